"""Hardware counters of many calls in one process, because to start one takes longer than a call.

A small kernel of our own marks where each call begins in what Nsight Compute reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
import torch
from torch import Tensor

from memtraffic.traffic import counters as hardware

MARKER = "_idle_kernel"  # of `exhibits`, which no package has
WARMUP = 3  # calls that compile, and that let an autotuner choose
AMOUNTS = tuple(name for name in hardware.METRICS if name != "ns")  # of which no time is compared


@contextmanager
def counted() -> Iterator[None]:
    """Lets Nsight Compute count the kernels inside of the block, after one that marks it."""
    from memtraffic.book.exhibits import _idle_kernel

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


def split(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of `counters` after each marker and before the next."""
    begins = [i for i, name in enumerate(frame["kernel"]) if name == MARKER]
    ends = [*begins[1:], len(frame)]
    return [frame.iloc[begin + 1 : end] for begin, end in zip(begins, ends, strict=True)]


def add_up(part: pd.DataFrame) -> dict[str, int]:
    """How many `launches` a part of `split` has, and the sum of each amount over them."""
    return {"launches": len(part)} | {name: int(part[name].sum()) for name in AMOUNTS}
