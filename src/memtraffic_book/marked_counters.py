"""Hardware counters of many calls in one process, because to start one takes longer than a call.

A small kernel of our own marks where each call begins in what Nsight Compute reports.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from unittest import mock

import pandas as pd
import torch
from torch import Tensor

from memtraffic import gpus
from memtraffic.errors import CountersError
from memtraffic.functions import as_function
from memtraffic.inputs import Arguments
from memtraffic.meters import counters as hardware
from memtraffic.meters.sectors import COUNTERS, sectors
from memtraffic.names import import_function
from memtraffic.op import find_op
from memtraffic.triton_adapter.capture import autotuners

MARKER = "_idle_kernel"  # of `exhibits`, which no package has
SURVEY = Path(__file__).parents[2] / "examples" / "survey"
WARMUP = 3  # calls that compile, and that let an autotuner choose
T = TypeVar("T")
AMOUNTS = tuple(name for name in hardware.METRICS if name != "ns")  # of which no time is compared


@contextmanager
def counted() -> Iterator[None]:
    """Lets Nsight Compute count the kernels inside of the block, after one that marks it."""
    from memtraffic_book.exhibits import _idle_kernel

    mark: Tensor = torch.zeros(1, device="cuda")
    _idle_kernel[(1,)](mark, READ=False)  # compiled before the profiler looks
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    _idle_kernel[(1,)](mark, READ=False)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def _parts(
    report: str, calls: int, metrics: Mapping[str, str] = hardware.METRICS
) -> list[pd.DataFrame]:
    """What ncu reports after each marker; raises CountersError if that is not of so many calls."""
    frame = hardware.parse(report, metrics) if calls else pd.DataFrame({"kernel": []})
    begins = [i for i, name in enumerate(frame["kernel"]) if name == MARKER]
    if len(begins) != calls:
        raise CountersError(f"counters: {calls} calls were counted, ncu saw {len(begins)}")
    pairs = itertools.pairwise([*begins, len(frame)])
    return [frame.iloc[begin + 1 : end] for begin, end in pairs]


def _add_up(part: pd.DataFrame) -> dict[str, int]:
    """How many `launches` a part has, and the sum of each amount over them."""
    return {"launches": len(part)} | {name: int(part[name].sum()) for name in AMOUNTS}


def count_surveyed(kernels: Sequence[str], sizes: dict[str, int]) -> pd.DataFrame:
    """What the hardware moved in passes of kernels of the survey, a row for each of them.

    kernels, sizes: as of `run` in `examples/survey/measure.py`. Columns: `package`, its `version`,
    `kernel`, `direction`; the sizes `at`, as the survey writes them; the number of `launches`; the
    amounts, as of `count_calls`; `missing`, why there are none, and then the numbers are 0. A
    kernel is missing if its package or its file is, or if it fails.

    Raises CountersError for a kernel that is not in the survey, and what `counters.profile` raises.
    """
    worker = f"import json, sys; sys.path.insert(0, {str(SURVEY)!r}); import measure; "
    worker += "measure.run(**json.loads(sys.argv[1]))"
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        job = {"kernels": list(kernels), "sizes": sizes, "told": str(told)}
        report = hardware.profile(worker, job)
        outcomes = json.loads(told.read_text(encoding="utf-8"))
    parts = iter(_parts(report, sum(outcome["begun"] for outcome in outcomes)))
    rows = []
    for outcome in outcomes:
        begun, missing = outcome.pop("begun"), outcome.pop("missing")
        found = _add_up(next(parts)) if begun else {}
        nothing = dict.fromkeys(("launches", *AMOUNTS), 0)
        rows.append(outcome | (nothing if missing else found) | {"missing": missing})
    return pd.DataFrame(rows)


Case: TypeAlias = tuple[str, str, Sequence[int], str, str]


def count_sectors(
    calls: Mapping[str, str],
    shapes: Sequence[Sequence[int] | Mapping[str, int]],
    dtypes: Sequence[str],
    layouts: Sequence[str],
    processes: int = 12,
    counters: Mapping[str, str] = COUNTERS,
) -> pd.DataFrame:
    """What `memtraffic.sectors` predicts of calls of functions, beside what a GPU counts.

    One process counts, and notes what its autotuners chose; then others predict for this GPU, with
    the same inputs and choices. calls: of each function, a rung or `module:function`, its inputs;
    the others as `memtraffic.sectors` takes them, or sizes by letter in place of shapes.
    processes: that compile before and predict afterwards; 0 for this one. Columns: `fn`, `inputs`,
    `shape`, `dtype`, `layout`; each of `counters`, of the kernels that are predicted; each of them
    after `predicted_`; and `refused`, why nothing is predicted or the call failed: numbers are 0
    then.

    Raises what `counters.profile` raises.
    """
    cases: list[Case] = [
        (fn, inputs, _sized(inputs, shape), dtype, layout)
        for (fn, inputs), shape, dtype, layout in itertools.product(
            calls.items(), shapes, dtypes, layouts
        )
    ]
    predict = functools.partial(_predict, target=gpus.this_gpu().product)
    if processes:
        hardware.require_counters()  # or all of them would compile for nothing
    _each(processes, _compile, cases)  # all at once what ncu calls one after the other
    with tempfile.TemporaryDirectory() as folder:
        worker = "from memtraffic_book.marked_counters import _call; _call()"
        told = Path(folder) / "told.json"
        report = hardware.profile(worker, {"cases": cases, "told": str(told)}, counters)
        begins = json.loads(told.read_text(encoding="utf-8"))
    predictions = _each(processes, predict, cases, [chosen for *_, chosen in begins])
    parts = iter(_parts(report, sum(begun for begun, *_ in begins), counters))
    rows = []
    for case, (begun, failed, _), predicted in zip(cases, begins, predictions, strict=True):
        (fn, inputs, shape, dtype, layout), (totals, kernels, refused) = case, predicted
        if not refused and not counters.keys() <= totals.keys():
            refused = "not known: conflicts in a loop, or at addresses that change in one"
        part = next(parts) if begun else None
        row: dict[str, Any] = {"fn": fn, "inputs": inputs, "shape": "x".join(map(str, shape))}
        row |= {"dtype": dtype, "layout": layout} | dict.fromkeys(counters, 0)
        if part is not None and not (refused or failed):
            ours = part[part["kernel"].isin(kernels)]
            row |= {name: int(ours[name].sum()) for name in counters}
        row |= {f"predicted_{name}": totals.get(name, 0) for name in counters}
        rows.append(row | {"refused": failed or refused})
    return pd.DataFrame(rows)


def _each(processes: int, fn: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """What a function returns for each of its arguments, from so many processes, or from this."""
    jobs = zip(*arguments, strict=True)
    if not processes:
        return [*itertools.starmap(fn, jobs)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.starmap(fn, jobs, chunksize=1)


# Of loads and of stores: that of all accesses also counts waits for shuffles and other data.
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_"
CONFLICTS = {"bank_conflicts": f"{_CONFLICTS}ld.sum,{_CONFLICTS}st.sum"}


def count_conflicts(
    calls: Mapping[str, str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
) -> pd.DataFrame:
    """What `count_sectors` says of bank conflicts in shared memory; it raises the same."""
    return count_sectors(calls, shapes, dtypes, ["packed"], counters=CONFLICTS)


def _sized(inputs: str, shape: Sequence[int] | Mapping[str, int]) -> Sequence[int]:
    """The numbers for the sizes of such inputs."""
    return [shape[size] for size in find_op(inputs).sizes] if isinstance(shape, Mapping) else shape


def count_surveyed_sectors(sizes: Mapping[str, int], dtype: str, table: str) -> pd.DataFrame:
    """What `count_sectors` says of each kernel of a table that some sizes and a path describe.

    sizes: numbers by letter. table: of kernels, a file beside the survey's `kernels.csv`. A row is
    left out if it has other letters or fixed arguments, or is of a tutorial, which is a file.
    """
    with (SURVEY / table).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["fixed"]]
    calls = {
        row["path"]: row["inputs"]
        for row in rows
        if {*find_op(row["inputs"]).sizes} <= {*sizes} and row["package"] != "triton-tutorials"
    }
    return count_sectors(calls, [sizes], [dtype], ["packed"])


def _arguments(case: Case) -> tuple[Callable[..., Any], Arguments]:
    name, inputs, shape, dtype, layout = case
    if str(SURVEY) not in sys.path:  # whose modules adapt what others published
        sys.path.append(str(SURVEY))
    return as_function(import_function(name)), find_op(inputs).arguments(shape, dtype, layout)


def _compile(case: Case) -> None:
    """Calls a function, so that Triton finds its kernels compiled afterwards."""
    try:
        fn, arguments = _arguments(case)
        arguments.call(fn)
    except Exception:  # the call that is counted says why
        return


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


Choices: TypeAlias = dict[str, list[str]]  # configurations by the name of an autotuned kernel


def _predict(case: Case, chosen: Choices, target: str) -> tuple[dict[str, int], list[str], str]:
    """The totals and kernels of a call; and why there are none, or ""."""
    try:
        called = _arguments(case)
        with _choosing(chosen):
            found = sectors(*called, target=target)
    except Exception as error:  # of a package, which does not stop the others
        return {}, [], _said(error)
    kernels = sorted({access.kernel for access in found.accesses})
    if found.bank_conflicts is None:
        return found.totals, kernels, ""
    return found.totals | {"bank_conflicts": found.bank_conflicts}, kernels, ""


@contextmanager
def _choosing(chosen: Choices) -> Iterator[None]:
    """Context manager: autotuned kernels have no other configurations than these, if any."""

    def prune(tuner: Any, options: dict[str, Any]) -> list[Any]:
        wanted = chosen.get(tuner.base_fn.__name__, ())
        return [it for it in tuner.configs if str(it) in wanted] or tuner.configs

    with ExitStack() as stack:
        for owner in autotuners("prune_configs"):
            stack.enter_context(mock.patch.object(owner, "prune_configs", prune))
        yield


@contextmanager
def _noting(chosen: Choices) -> Iterator[None]:
    """Context manager: notes what autotuned kernels have chosen."""

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tuner: Any, *args: Any, **options: Any) -> Any:
            result = run(tuner, *args, **options)
            chosen.setdefault(tuner.base_fn.__name__, []).append(str(tuner.best_config))
            return result

        return noted

    with ExitStack() as stack:
        for owner in autotuners("run"):
            stack.enter_context(mock.patch.object(owner, "run", noting(vars(owner)["run"])))
        yield


def _call() -> None:
    """What runs under ncu for `count_sectors`.

    It tells of each call whether it began, why it failed, and what its autotuners chose.
    """
    job, calls = json.loads(sys.argv[1]), []
    for case in job["cases"]:
        begun, failed, chosen = False, "", Choices()
        try:
            fn, arguments = _arguments(case)
            arguments.call(fn)  # which compiles, and lets an autotuner choose
            with _noting(chosen), counted():
                begun = True
                arguments.call(fn)
        except Exception as error:  # of a package
            failed = _said(error)
        calls.append((begun, failed, chosen))
    Path(job["told"]).write_text(json.dumps(calls), encoding="utf-8")
