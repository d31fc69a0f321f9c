"""The time of a softmax whose columns lie on several GPUs, beside what else one could do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist

import memtraffic
from memtraffic.benchmark.baselines import copy
from memtraffic.benchmark.timing import summary
from memtraffic.device import default
from memtraffic.kernels.softmax.linked import MAX_COLS, Link, linked_softmax
from memtraffic.kernels.softmax.sharded import sharded_softmax
from memtraffic.tensors import matrix
from memtraffic.torch_adapter import sleep_on_gpu
from memtraffic_book.processes import run_ranks

COPY, ALONE, ONE, TWO, DTENSOR = "copy", "own part", "one kernel", "two kernels", "DTensor"
UNTIMED = 3  # first calls, which compile
SLEEP_CYCLES = 10_000_000  # some 5 ms, in which the host queues what is timed
TIMEOUT = 500  # seconds for all


def sharded_times(
    n_rows: int, widths: Sequence[int], dtypes: Sequence[str], *, ranks: int = 2, repeats: int = 20
) -> pd.DataFrame:
    """Microseconds of a softmax over `ranks` ranks; a row per implementation, width and dtype.

    The columns are impl, m, n of a rank, dtype, and the median and the 20th and 80th percentile of
    `repeats` calls that all ranks begin together; a call ends when the slowest rank ends. `impl`:
    "copy" and "own part", a copy of one rank's part and its softmax without the others; "one
    kernel", `linked_softmax`; "two kernels", `sharded_softmax`; "DTensor", `torch.softmax` of a
    DTensor. There is no row for the one kernel where a program cannot hold its columns, nor
    without a GPU for each rank: there the ranks are processes that talk by gloo, and the times are
    those of the interpreter. Raises what `run_ranks` raises.
    """
    cases = [(n_rows, width, dtype, repeats) for dtype in dtypes for width in widths]
    found = run_ranks(_times, ranks, (cases,), timeout=TIMEOUT)
    rows = []
    for (m, n, dtype, _), *of_ranks in zip(cases, *found, strict=True):
        for impl in of_ranks[0]:
            slowest = [*map(max, *(times[impl] for times in of_ranks))]
            rows.append({"impl": impl, "m": m, "n": n, "dtype": dtype} | summary(slowest, 0))
    return pd.DataFrame(rows).drop(columns="gb_per_s")


def _times(cases: Sequence[tuple[int, int, str, int]]) -> list[dict[str, list[float]]]:
    """What each call takes on one rank, for each case."""
    return [
        {impl: _calls(call, repeats) for impl, call in _impls(n_rows, width, dtype)}
        for n_rows, width, dtype, repeats in cases
    ]


def _impls(n_rows: int, width: int, dtype: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed, by its label."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    device = default()
    x = matrix(n_rows, width, dtype, device=device)
    yield COPY, partial(copy, x)
    yield ALONE, partial(memtraffic.softmax, x)
    if device.type == "cuda" and width <= MAX_COLS:
        yield ONE, partial(linked_softmax, x, Link(n_rows, device))
    yield TWO, partial(sharded_softmax, x)
    mesh = DeviceMesh(device.type, list(range(dist.get_world_size())))
    whole = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    yield DTENSOR, partial(torch.softmax, whole, 1)


def _calls(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call but the first ones.

    A GPU first sleeps, while its host queues the rest; then all meet, and the clock starts. So the
    time of the host is none of it.
    """
    device, times = default(), []
    meeting = torch.zeros(1, device=device)
    for _ in range(UNTIMED + repeats):
        dist.barrier()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            sleep_on_gpu(SLEEP_CYCLES)
            dist.all_reduce(meeting)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return times[UNTIMED:]
