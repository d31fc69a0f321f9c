"""Hardware counters of many calls in one process, because to start one takes longer than a call.

A small kernel of our own marks where each call begins in what Nsight Compute reports.
"""

from __future__ import annotations

import csv
import importlib.metadata
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
from typing import Any, TypeAlias, TypeVar
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
T = TypeVar("T")
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
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        job = {"kernels": list(kernels), "sizes": sizes, "told": str(told)}
        report = hardware.profile(worker, job)
        outcomes = json.loads(told.read_text(encoding="utf-8"))
    parts = iter(_parts(report, sum(outcome["begun"] for outcome in outcomes)))
    rows = []
    for outcome in outcomes:
        missing, numbers = outcome.pop("missing"), dict.fromkeys(("launches", *AMOUNTS), 0)
        part = next(parts) if outcome.pop("begun") else None
        if part is not None and not missing:
            numbers = {"launches": len(part)} | {name: int(part[name].sum()) for name in AMOUNTS}
        rows.append(outcome | numbers | {"missing": missing})
    return pd.DataFrame(rows)


Case: TypeAlias = tuple[str, str, Sequence[int], str, str]
Choices: TypeAlias = dict[str, list[str]]  # configurations by the name of an autotuned kernel


def count_sectors(
    calls: Mapping[str, str],
    shapes: Sequence[Sequence[int] | Mapping[str, int]],
    dtypes: Sequence[str],
    layouts: Sequence[str],
) -> pd.DataFrame:
    """What `memtraffic.sectors` predicts of calls of functions, beside what a GPU counts.

    A call is made in a process of its own, where kernels are compiled and autotuners choose, and
    predicted there for this GPU, or with these choices in another process; then, if that is done,
    it is made in the one process that is counted, which is given the choices, too, and compiles
    nothing. calls: of each function, a rung or `module:function`, its inputs; the others as
    `memtraffic.sectors` takes them, or sizes by letter in place of shapes. Columns: `fn`, `inputs`,
    `shape`, `dtype`, `layout`; each of `COUNTERS`, of the kernels that are predicted; each of them
    after `predicted_`; and `refused`, why nothing is predicted or it failed: numbers are 0 then.

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
    predicted, refused = _each(
        _choose_and_predict, {i: (case, target) for i, case in enumerate(cases)}
    )
    tuned = {i: (cases[i], it[0], target) for i, it in predicted.items() if it[0]}
    again, failed = _each(_predict, tuned)
    predicted |= {i: (predicted[i][0], *it) for i, it in again.items()}
    predicted = {i: it for i, it in predicted.items() if i not in failed}
    refused |= failed
    parts, failed = _count({i: (cases[i], it[0]) for i, it in predicted.items()})
    refused |= failed
    rows = []
    for i, (fn, inputs, shape, dtype, layout) in enumerate(cases):
        row: dict[str, Any] = {"fn": fn, "inputs": inputs, "shape": "x".join(map(str, shape))}
        row |= {"dtype": dtype, "layout": layout}
        numbers = dict.fromkeys((*COUNTERS, *(f"predicted_{name}" for name in COUNTERS)), 0)
        if i not in refused:
            _, totals, kernels = predicted[i]
            ours = parts[i][parts[i]["kernel"].isin(kernels)]
            numbers |= {name: int(ours[name].sum()) for name in COUNTERS}
            numbers |= {f"predicted_{name}": totals[name] for name in COUNTERS}
        rows.append(row | numbers | {"refused": refused.get(i, "")})
    return pd.DataFrame(rows)


def _count(
    calls: Mapping[int, tuple[Case, Choices]],
) -> tuple[dict[int, pd.DataFrame], dict[int, str]]:
    """What ncu reports of each call, and why those that failed did."""
    with tempfile.TemporaryDirectory() as folder:
        worker = "from memtraffic_book.marked_counters import _call; _call()"
        told = Path(folder) / "told.json"
        job = {"calls": [*calls.values()], "told": str(told)}
        report = hardware.profile(worker, job, COUNTERS)
        outcomes = json.loads(told.read_text(encoding="utf-8"))
    parts = _parts(report, sum(begun for begun, _ in outcomes), COUNTERS)
    begun = [i for i, (begins, _) in zip(calls, outcomes, strict=True) if begins]
    failed = {i: why for i, (_, why) in zip(calls, outcomes, strict=True) if why}
    return dict(zip(begun, parts, strict=True)), failed


def _each(
    fn: Callable[..., T], jobs: Mapping[int, tuple[Any, ...]]
) -> tuple[dict[int, T], dict[int, str]]:
    """What a function returns for each of some arguments, and why it fails for others.

    Each call has a process of its own; there are as many at a time as cores.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        outcomes = [*threads.map(lambda job: _attempt_alone(fn, *job), jobs.values())]
    failed = {i: why for i, (_, why) in zip(jobs, outcomes, strict=True) if why}
    found = {i: result for i, (result, _) in zip(jobs, outcomes, strict=True) if i not in failed}
    return found, failed


def _attempt(fn: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a function returns, and ""; or None, and its error."""
    try:
        return fn(*arguments), ""
    except Exception as error:  # of a package, which does not stop the others
        return None, f"{type(error).__name__}: {error}"


def _attempt_alone(fn: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """`_attempt` in a process of its own, which is ended after `SECONDS`."""
    try:
        [outcome] = run_ranks(_attempt, 1, (fn, *arguments), timeout=SECONDS)
    except (ProcessExitedException, ProcessRaisedException, TimeoutError) as error:
        return None, shorten(str(error), 200)
    return outcome


def _sized(inputs: str, shape: Sequence[int] | Mapping[str, int]) -> Sequence[int]:
    """The numbers for the sizes of such inputs."""
    return [shape[size] for size in find_op(inputs).sizes] if isinstance(shape, Mapping) else shape


def count_surveyed_sectors(sizes: Mapping[str, int], dtype: str, table: str) -> pd.DataFrame:
    """What `count_sectors` says of each kernel of a table that some sizes and a path describe.

    sizes: numbers by letter. table: of kernels, a file beside the survey's `kernels.csv`. What is
    `refused` because its package is not installed starts with `ABSENT`.
    """
    with (SURVEY / table).open(encoding="utf-8", newline="") as file:
        called = {row["path"]: row for row in csv.DictReader(file)}
    calls = {path: row["inputs"] for path, row in called.items()}
    frame = count_sectors(calls, [sizes], [dtype], ["packed"])
    packages = frame["fn"].map(lambda path: called[path]["package"])
    absent = packages[~packages.map(_is_installed)]
    frame.loc[absent.index, "refused"] = ABSENT + absent + " is not installed"
    return frame


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _arguments(case: Case) -> tuple[Callable[..., Any], Arguments]:
    name, inputs, shape, dtype, layout = case
    if str(SURVEY) not in sys.path:  # where those lie that adapt what others published
        sys.path.append(str(SURVEY))
    return as_function(import_function(name)), find_op(inputs).arguments(shape, dtype, layout)


def _choose_and_predict(case: Case, target: str) -> tuple[Choices, dict[str, int], list[str]]:
    """What autotuners choose in a call; and if there are none, what is predicted of it.

    A package may call what it has tuned without its autotuner the second time, so that a choice is
    met in another process alone.
    """
    chosen = _choose(case)
    return chosen, *(({}, []) if chosen else _predict(case, chosen, target))


def _choose(case: Case) -> Choices:
    """Calls a function, so that its kernels are compiled; returns what autotuners chose."""
    fn, arguments = _arguments(case)
    with _as_chosen({}) as chosen:
        arguments.call(fn)
    if device.HAS_GPU:
        torch.cuda.synchronize()  # or the error of a kernel would not be seen
    return chosen


def _predict(case: Case, chosen: Choices, target: str) -> tuple[dict[str, int], list[str]]:
    """The totals of a call, and its kernels; raises what `memtraffic.sectors` raises."""
    called = _arguments(case)
    with _as_chosen(chosen, predicted=True) as ran:
        found = sectors(*called, target=target)
    _check_same(ran, chosen)
    return found.totals, sorted({access.kernel for access in found.accesses})


def _call() -> None:
    """What runs under ncu for `count_sectors`: tells of each call if it began and why it failed."""
    job, outcomes = json.loads(sys.argv[1]), []
    for case, chosen in job["calls"]:
        begun: list[bool] = []
        _, why = _attempt(_call_as_chosen, case, chosen, begun)
        outcomes.append((bool(begun), why))
    Path(job["told"]).write_text(json.dumps(outcomes), encoding="utf-8")


def _call_as_chosen(case: Case, chosen: Choices, begun: list[bool]) -> None:
    """Calls a function twice, and counts the second time, when all is loaded."""
    fn, arguments = _arguments(case)
    with _as_chosen(chosen) as ran:
        arguments.call(fn)
    _check_same(ran, chosen)
    with _as_chosen(chosen), counted():
        begun.append(True)
        arguments.call(fn)


@contextmanager
def _as_chosen(chosen: Choices, *, predicted: bool = False) -> Iterator[Choices]:
    """Context manager: autotuned kernels run as chosen, in order, and choose what is not.

    Yields what they run with. predicted: they are interpreted.
    """
    ran: Choices = {}
    running: list[Any] = []

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_as_chosen(tuner: Any, *args: Any, **options: Any) -> Any:
            name, configs = tuner.base_fn.__name__, tuner.configs
            if len(configs) == 1 or tuner in running:  # or that of a class calls that above it
                return run(tuner, *args, **options)
            before = ran.setdefault(name, [])
            running.append(tuner)
            try:
                if name in chosen:  # of one, nothing is timed
                    tuner.configs = [_nth(tuner, chosen[name], len(before))]
                result = run(tuner, *args, **options)
                best = tuner.configs[0] if name in chosen else vars(tuner).get("best_config")
                before.append(str(best))
            finally:
                running.pop()
                tuner.configs = configs
            return result

        return run_as_chosen

    hooks: list[tuple[Any, str]] = [(owner, "run") for owner in capture.autotuners()]
    if predicted:  # whose runs are replaced
        hooks = [(capture, "configurations_of")]
    with ExitStack() as stack:
        for owner, name in hooks:
            stack.enter_context(mock.patch.object(owner, name, wrapped(vars(owner)[name])))
        yield ran


def _nth(tuner: Any, chosen: Sequence[str], number: int) -> Any:
    """The configuration that the run of this number has; raises LookupError without one."""
    found = [it for it in tuner.configs if chosen[number : number + 1] == [str(it)]]
    if not found:
        raise LookupError(f"{tuner.base_fn.__name__} chose {chosen}, which has no {number}")
    return found[0]


def _check_same(ran: Choices, chosen: Choices) -> None:
    """Raises LookupError if autotuned kernels did not run as chosen."""
    for name, configs in chosen.items():
        if (others := ran.get(name, [])) != configs:
            raise LookupError(f"{name} chose {configs}, and here it has run with {others}")
