"""The time of a softmax whose columns lie on several GPUs, beside what else one could do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist

import memtraffic
from memtraffic import runtime
from memtraffic.gpus import planning_gpu
from memtraffic.kernels.softmax.linked import linked_tile
from memtraffic.kernels.softmax.sharded import sharded_softmax
from memtraffic.processes import run_ranks
from memtraffic.tensors import matrix

ROWS = 8192
WIDTHS = (16384, 32768, 65536)  # columns of a rank


def sharded_times(
    n_rows: int = ROWS,
    widths: Sequence[int] = WIDTHS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    *,
    ranks: int = 2,
    repeats: int = 20,
) -> pd.DataFrame:
    """Microseconds of a softmax over `ranks` ranks, by dtype and columns of a rank.

    Columns: `alone`, the softmax of one rank's part without the others; `one_kernel` and
    `collective`, the rungs of `sharded_softmax`; `dtensor`, that of `torch.softmax` of a DTensor.
    Each is the slowest rank's median of `repeats` calls that all ranks begin together. A rung that
    cannot be had is missing, as `one_kernel` without symmetric memory. Without GPUs the ranks are
    processes that talk by gloo, and the times are those of the interpreter.
    """
    cases = [(n_rows, width, dtype, repeats) for dtype in dtypes for width in widths]
    found = run_ranks(_times, ranks, (cases,), timeout=600)
    rows = []
    for case, *times in zip(cases, *found, strict=True):
        slowest = {name: max(each[name] for each in times) for name in times[0]}
        rows.append({"dtype": case[2], "columns": case[1]} | slowest)
    return pd.DataFrame(rows)


def _times(cases: Sequence[tuple[int, int, str, int]]) -> list[dict[str, float]]:
    """What one rank takes for each case."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    device = runtime.device()
    mesh = DeviceMesh(device.type, list(range(dist.get_world_size())))
    found = []
    for n_rows, width, dtype, repeats in cases:
        x = matrix(n_rows, width, dtype, device=device)
        whole = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)

        calls: dict[str, Callable[[], object]] = {
            "alone": partial(memtraffic.softmax, x),
            "collective": partial(sharded_softmax, x, run_check=False),
            "dtensor": partial(torch.softmax, whole, 1),
        }
        fits = linked_tile(width, x.element_size(), planning_gpu(x)) is not None
        if device.type == "cuda" and fits:
            calls["one_kernel"] = partial(sharded_softmax, x, run_check=False, rung="one kernel")
        found.append({name: _median(call, repeats, device) for name, call in calls.items()})
    return found


def _median(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median of some calls, in microseconds, after three that are not timed."""
    times = []
    for _ in range(repeats + 3):
        dist.barrier()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[3:])
