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
from typing import Any, TypeAlias

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

MARKER = "_idle_kernel"  # of `exhibits`, which no package has
SURVEY = Path(__file__).parents[2] / "examples" / "survey"
WARMUP = 3  # calls that compile, and that let an autotuner choose
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
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    layouts: Sequence[str],
    processes: int = 8,
) -> pd.DataFrame:
    """What `memtraffic.sectors` predicts of calls of functions, beside what a GPU counts.

    Processes with the same inputs predict for this GPU, while another one counts. calls: of each
    function, a rung or `module:function`, its inputs; the others as `memtraffic.sectors` takes
    them. processes: that predict; 0 for this one. Columns: `fn`, `inputs`, `shape`, `dtype`,
    `layout`; each of `COUNTERS`, of the kernels that are predicted; each of them after
    `predicted_`; and `refused`, why nothing is predicted or the call failed: numbers are 0 then.

    Raises what `counters.profile` raises.
    """
    cases = [
        (*call, *how) for call, *how in itertools.product(calls.items(), shapes, dtypes, layouts)
    ]
    predict = functools.partial(_predict, target=gpus.this_gpu().product)
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pool = stack.enter_context(spawn.Pool(processes)) if processes else None
        found = pool.map_async(predict, cases, chunksize=1) if pool else None
        worker = "from memtraffic_book.marked_counters import _call; _call()"
        told = Path(folder) / "told.json"
        report = hardware.profile(worker, {"cases": cases, "told": str(told)}, COUNTERS)
        begins = json.loads(told.read_text(encoding="utf-8"))
        predictions = found.get() if found else [*map(predict, cases)]
    parts = iter(_parts(report, sum(begun for begun, _ in begins), COUNTERS))
    rows = []
    for case, (begun, failed), predicted in zip(cases, begins, predictions, strict=True):
        (fn, inputs, shape, dtype, layout), (totals, kernels, refused) = case, predicted
        part = next(parts) if begun else None
        row: dict[str, Any] = {"fn": fn, "inputs": inputs, "shape": "x".join(map(str, shape))}
        row |= {"dtype": dtype, "layout": layout} | dict.fromkeys(COUNTERS, 0)
        if part is not None and not (refused or failed):
            ours = part[part["kernel"].isin(kernels)]
            row |= {name: int(ours[name].sum()) for name in COUNTERS}
        row |= {f"predicted_{name}": totals.get(name, 0) for name in COUNTERS}
        rows.append(row | {"refused": failed or refused})
    return pd.DataFrame(rows)


def count_surveyed_sectors(shape: Sequence[int], dtype: str) -> pd.DataFrame:
    """What `count_sectors` says of each kernel of the survey that two sizes and a path describe."""
    with (SURVEY / "kernels.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["fixed"]]
    calls = {row["path"]: row["inputs"] for row in rows}
    calls = {path: it for path, it in calls.items() if {*find_op(it).sizes} == {"M", "N"}}
    return count_sectors(calls, [shape], [dtype], ["packed"])


def _arguments(case: Case) -> tuple[Callable[..., Any], Arguments]:
    name, inputs, shape, dtype, layout = case
    return as_function(import_function(name)), find_op(inputs).arguments(shape, dtype, layout)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _predict(case: Case, target: str) -> tuple[dict[str, int], list[str], str]:
    """The totals and kernels of a call; and why there are none, or ""."""
    try:
        found = sectors(*_arguments(case), target=target)
    except Exception as error:  # of a package, which does not stop the others
        return {}, [], _said(error)
    return found.totals, sorted({access.kernel for access in found.accesses}), ""


def _call() -> None:
    """What runs under ncu for `count_sectors`: it tells whether each call began, and why not."""
    job, calls = json.loads(sys.argv[1]), []
    for case in job["cases"]:
        begun, failed = False, ""
        try:
            fn, arguments = _arguments(case)
            arguments.call(fn)  # which compiles, and lets an autotuner choose
            with counted():
                begun = True
                arguments.call(fn)
        except Exception as error:  # of a package
            failed = _said(error)
        calls.append((begun, failed))
    Path(job["told"]).write_text(json.dumps(calls), encoding="utf-8")
