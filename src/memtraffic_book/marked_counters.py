"""Hardware counters of many calls in one process, because to start one takes longer than a call.

A small kernel of our own marks where each call begins in what Nsight Compute reports.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeAlias
from unittest import mock

import pandas as pd
import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from memtraffic import device
from memtraffic.benchmark.loop import ABSENT
from memtraffic.errors import CountersError
from memtraffic.functions import as_function
from memtraffic.inputs import Arguments
from memtraffic.meters import counters as hardware
from memtraffic.meters.sectors import COUNTERS, sectors
from memtraffic.names import import_function
from memtraffic.op import find_op
from memtraffic.triton_adapter import capture
from memtraffic_book.processes import run_ranks

MARKER = "_idle_kernel"  # of `exhibits`, which no package has
SURVEY = Path(__file__).parents[2] / "examples" / "survey"
WARMUP = 3  # calls that compile, and that let an autotuner choose
SECONDS = 240  # that a process may take for one call, and to predict it
AMOUNTS = tuple(name for name in hardware.METRICS if name != "ns")  # of which no time is compared


@contextmanager
def counted() -> Iterator[None]:
    """Lets Nsight Compute count the kernels inside of the block, after one that marks it."""
    from memtraffic_book.exhibits import _idle_kernel

    mark: Tensor = torch.zeros(1, device="cuda")
    _idle_kernel[(1,)](mark)  # compiled before the profiler looks
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    _idle_kernel[(1,)](mark)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def _profiled(
    worker: str, job: Mapping[str, Any], metrics: Mapping[str, str]
) -> list[tuple[dict[str, Any], pd.DataFrame | None]]:
    """What a worker under ncu tells of each call, and what ncu counted of those that begun.

    job: what it finds in `sys.argv[1]`, with the file `told`, into which it writes a dict for each
    call: with `begun`, whether `counted` was entered, and `missing`, why it failed. Raises
    CountersError if ncu saw another number of calls, and what `counters.profile` raises.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        report = hardware.profile(worker, {**job, "told": str(told)}, metrics)
        outcomes = json.loads(told.read_text(encoding="utf-8"))
    calls = sum(outcome["begun"] for outcome in outcomes)
    frame = hardware.parse(report, metrics) if calls else pd.DataFrame({"kernel": []})
    begins = [i for i, name in enumerate(frame["kernel"]) if name == MARKER]
    if len(begins) != calls:
        raise CountersError(f"counters: {calls} calls were counted, ncu saw {len(begins)}")
    pairs = itertools.pairwise([*begins, len(frame)])
    parts = (frame.iloc[begin + 1 : end] for begin, end in pairs)
    return [(outcome, next(parts) if outcome.pop("begun") else None) for outcome in outcomes]


def count_surveyed(kernels: Sequence[str], sizes: dict[str, int]) -> pd.DataFrame:
    """What the hardware moved in passes of kernels of the survey, a row for each of them.

    kernels, sizes: as of `run` in `examples/survey/measure.py`. Columns: `package`, its `version`,
    `kernel`, `direction`; the sizes `at`, as the survey writes them; the number of `launches`; the
    sums of `AMOUNTS`; `missing`, why there are none, and then the numbers are 0. A kernel is
    missing if its package or its file is, or if it fails.

    Raises CountersError for a kernel that is not in the survey, and what `counters.profile` raises.
    """
    worker = f"import json, sys; sys.path.insert(0, {str(SURVEY)!r}); import measure; "
    worker += "measure.run(**json.loads(sys.argv[1]))"
    rows = []
    for outcome, part in _profiled(worker, {"kernels": kernels, "sizes": sizes}, hardware.METRICS):
        missing, numbers = outcome.pop("missing"), dict.fromkeys(("launches", *AMOUNTS), 0)
        if part is not None and not missing:
            numbers = {"launches": len(part)} | {name: int(part[name].sum()) for name in AMOUNTS}
        rows.append(outcome | numbers | {"missing": missing})
    return pd.DataFrame(rows)


Case: TypeAlias = tuple[str, str, Sequence[int], str, str]
KEY = "fn", "inputs", "shape", "dtype", "layout"  # of a case
Choices: TypeAlias = dict[str, str]  # the configuration of each autotuned kernel, by its name
Predicted: TypeAlias = tuple[Choices, dict[str, int], list[str]]


def count_sectors(
    calls: Mapping[str, str],
    shapes: Sequence[Sequence[int] | Mapping[str, int]],
    dtypes: Sequence[str],
    layouts: Sequence[str],
) -> pd.DataFrame:
    """What `memtraffic.sectors` predicts of calls of functions, beside what a GPU counts.

    A call is made in a process of its own, where kernels are compiled and autotuners choose, and
    predicted there for this GPU; then, if that is done, it is made in the one process that is
    counted, which is given the choices and compiles nothing. calls: of each function, a rung or
    `module:function`, its inputs; the others as `memtraffic.sectors` takes them, or sizes by letter
    in place of shapes. Columns: `fn`, `inputs`, `shape`, `dtype`, `layout`; each of `COUNTERS`, of
    the kernels that are predicted; each of them after `predicted_`; and `refused`, why nothing is
    predicted or it failed: numbers are 0 then.

    Raises what `counters.profile` raises.
    """
    cases: list[Case] = [
        (fn, inputs, _sized(inputs, shape), dtype, layout)
        for (fn, inputs), shape, dtype, layout in itertools.product(
            calls.items(), shapes, dtypes, layouts
        )
    ]
    hardware.require_counters()  # or all of them would compile for nothing
    target = device.this_gpu().product
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        predicted = [*threads.map(_predict_alone, cases, [target] * len(cases))]
    pairs = zip(cases, predicted, strict=True)
    job = {"calls": [(case, found[0]) for case, (found, _) in pairs if found]}
    worker = "from memtraffic_book.marked_counters import _call_all; _call_all()"
    counted = iter(_profiled(worker, job, COUNTERS))
    rows = []
    for case, (found, refused) in zip(cases, predicted, strict=True):
        row: dict[str, Any] = dict(zip(KEY, case, strict=True))
        row["shape"] = "x".join(map(str, row["shape"]))
        row |= dict.fromkeys((*COUNTERS, *(f"predicted_{name}" for name in COUNTERS)), 0)
        if found:
            _, totals, kernels = found
            outcome, part = next(counted)
            refused = outcome["missing"]
            if part is not None and not refused:
                ours = part[part["kernel"].isin(kernels)]
                row |= {name: int(ours[name].sum()) for name in COUNTERS}
                row |= {f"predicted_{name}": totals[name] for name in COUNTERS}
        rows.append(row | {"refused": refused})
    return pd.DataFrame(rows)


def _predict_alone(case: Case, target: str) -> tuple[Predicted | None, str]:
    """`_attempt` in a process of its own, which is ended after `SECONDS`."""
    try:
        [outcome] = run_ranks(_attempt, 1, (case, target), timeout=SECONDS)
    except (ProcessExitedException, ProcessRaisedException, TimeoutError) as error:
        return None, shorten(str(error), 200)
    return outcome


def _attempt(case: Case, target: str) -> tuple[Predicted | None, str]:
    """What `_predict` returns, and ""; or None, and why it fails: `ABSENT` without its package."""
    try:
        return _predict(case, target), ""
    except Exception as error:  # of a package, which does not stop the others
        absent = isinstance(error.__cause__ or error, ImportError)
        return None, f"{ABSENT * absent}{type(error).__name__}: {error}"


def _sized(inputs: str, shape: Sequence[int] | Mapping[str, int]) -> Sequence[int]:
    """The numbers for the sizes of such inputs."""
    return [shape[size] for size in find_op(inputs).sizes] if isinstance(shape, Mapping) else shape


def count_surveyed_sectors(sizes: Mapping[str, int], dtype: str, table: str) -> pd.DataFrame:
    """What `count_sectors` says of each kernel of a table that some sizes and a path describe.

    sizes: numbers by letter. table: of kernels, a file beside the survey's `kernels.csv`.
    """
    called = pd.read_csv(SURVEY / table, keep_default_na=False)
    calls = dict(zip(called["path"], called["inputs"], strict=True))
    return count_sectors(calls, [sizes], [dtype], ["packed"])


def _arguments(case: Case) -> tuple[Callable[..., Any], Arguments]:
    name, inputs, shape, dtype, layout = case
    if str(SURVEY) not in sys.path:  # where those lie that adapt what others published
        sys.path.append(str(SURVEY))
    return as_function(import_function(name)), find_op(inputs).arguments(shape, dtype, layout)


def _predict(case: Case, target: str) -> Predicted:
    """What autotuners choose in a call; then what is predicted of it: totals, and its kernels.

    Raises what `memtraffic.sectors` raises.
    """
    chosen: Choices = {}
    fn, arguments = _arguments(case)
    with _as_chosen(chosen):
        arguments.call(fn)
    if device.HAS_GPU:
        torch.cuda.synchronize()  # or the error of a kernel would not be seen
    with _as_chosen(chosen, predicted=True):
        found = sectors(*_arguments(case), target=target)
    return chosen, found.totals, sorted({access.kernel for access in found.accesses})


def _call_all() -> None:
    """What runs under ncu for `count_sectors`: each call twice, of which the second is counted."""
    job, outcomes = json.loads(sys.argv[1]), []
    for case, chosen in job["calls"]:
        outcome = {"begun": False, "missing": ""}
        try:
            fn, arguments = _arguments(case)
            with _as_chosen(chosen):
                arguments.call(fn)  # all is loaded
                with counted():
                    outcome["begun"] = True
                    arguments.call(fn)
        except Exception as error:  # of a package, which does not stop the others
            outcome["missing"] = f"{type(error).__name__}: {error}"
        outcomes.append(outcome)
    Path(job["told"]).write_text(json.dumps(outcomes), encoding="utf-8")


@contextmanager
def _as_chosen(chosen: Choices, *, predicted: bool = False) -> Iterator[None]:
    """Context manager: an autotuned kernel runs as chosen; its first choice is noted, and stays.

    predicted: kernels are interpreted.
    """

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_as_chosen(tuner: Any, *args: Any, **options: Any) -> Any:
            name, configs = tuner.base_fn.__name__, tuner.configs
            tuner.configs = [it for it in configs if chosen.get(name, str(it)) == str(it)]
            try:
                result = run(tuner, *args, **options)
                if len(configs) > 1 and not predicted:
                    chosen.setdefault(name, str(tuner.best_config))
            finally:
                tuner.configs = configs
            return result

        return run_as_chosen

    hooks: list[tuple[Any, str]] = [(owner, "run") for owner in capture.autotuners()]
    if predicted:  # whose runs are replaced
        hooks = [(capture, "configurations_of")]
    with ExitStack() as stack:
        for owner, name in hooks:
            stack.enter_context(mock.patch.object(owner, name, wrapped(vars(owner)[name])))
        yield
