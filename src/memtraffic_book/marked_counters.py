"""Hardware counters of many calls in one process, because to start one takes longer than a call.

A small kernel of our own marks where each call begins in what Nsight Compute reports.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
import torch
from torch import Tensor

from memtraffic.errors import CountersError
from memtraffic.meters import counters as hardware
from memtraffic.op import find_op

MARKER = "_idle_kernel"  # of `exhibits`, which no package has
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


def split(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of `counters` after each marker and before the next."""
    begins = [i for i, name in enumerate(frame["kernel"]) if name == MARKER]
    ends = [*begins[1:], len(frame)]
    return [frame.iloc[begin + 1 : end] for begin, end in zip(begins, ends, strict=True)]


def add_up(part: pd.DataFrame) -> dict[str, int]:
    """How many `launches` a part of `split` has, and the sum of each amount over them."""
    return {"launches": len(part)} | {name: int(part[name].sum()) for name in AMOUNTS}


def count_calls(
    impl: str,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    op: str = "softmax",
) -> pd.DataFrame:
    """What the hardware moved in a call of an implementation, for each dtype and shape.

    impl: a label of `measurements`. Columns: `m`, `n`, `dtype`, the number of `launches`, and the
    amounts of `traffic.counters.counters`, such as `dram_read_bytes`, of all launches together.

    Raises LookupError for an unknown label or operation, and what `counters.profile` raises.
    """
    from memtraffic_book.measurements import implementation

    implementation(impl)
    find_op(op)
    cases = list(itertools.product(dtypes, shapes))
    worker = "from memtraffic_book.marked_counters import _worker; _worker()"
    report = hardware.profile(worker, {"impl": impl, "op": op, "cases": cases})
    parts = split(hardware.parse(report))
    if len(parts) != len(cases):
        raise CountersError(f"count_calls: {len(cases)} calls, ncu saw {len(parts)}")
    return pd.DataFrame(
        [
            {"m": m, "n": n, "dtype": dtype} | add_up(part)
            for (dtype, (m, n)), part in zip(cases, parts, strict=True)
        ]
    )


def _worker() -> None:
    """What runs under ncu."""
    from memtraffic_book.measurements import implementation

    job = json.loads(sys.argv[1])
    fn, op = implementation(job["impl"]), find_op(job["op"])
    for dtype, shape in job["cases"]:
        inputs = op.inputs(tuple(shape), dtype)
        for _ in range(WARMUP):
            fn(*inputs)
        with counted():
            fn(*inputs)
