"""What a call costs the host, and what `triton.autotune` costs before its first result."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence

import pandas as pd
import torch

from memtraffic import runtime
from memtraffic.benchmark.baselines import find_implementation
from memtraffic.benchmark.sweeps import Implementation, describe_shape, find_implementations
from memtraffic.benchmark.timing import time_interleaved
from memtraffic.ops import Op, find_op
from memtraffic.progress import progress

ROUNDS = 20


def launch_overhead(
    impls: Sequence[str] | Mapping[str, Implementation],
    shape: Sequence[int],
    *,
    dtype: str = "float32",
    op: str | Op = "softmax",
    calls: int = 300,
) -> pd.DataFrame:
    """The time that a call takes on the host, before the GPU starts: a row for each implementation.

    Columns: `impl`, the sizes, `dtype`; `host_us`, microseconds per call on the host's clock, the
    median of 20 rounds of `calls` calls each. Choose a shape so small that the GPU keeps up with
    the calls. impls and errors: as for `bench`.
    """
    runtime.require_gpu("launch_overhead")
    fns, op = find_implementations(impls), find_op(op)
    inputs = op.inputs(tuple(shape), dtype)
    seconds: dict[str, list[float]] = {name: [] for name in fns}
    for _ in progress(range(ROUNDS), "timing"):
        for name, fn in fns.items():
            fn(*inputs)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                fn(*inputs)
            seconds[name].append((time.perf_counter() - start) / calls)
            torch.cuda.synchronize()
    return pd.DataFrame(
        [
            {"impl": name}
            | describe_shape(op, shape, dtype)
            | {"host_us": statistics.median(samples) * 1e6}
            for name, samples in seconds.items()
        ]
    )


def autotune_cost(
    impl: Implementation,
    tuned: Implementation,
    shapes: Sequence[Sequence[int]],
    *,
    dtype: str = "float32",
    op: str | Op = "softmax",
) -> pd.DataFrame:
    """What `triton.autotune` costs at its first call at each shape, and what its choice gains.

    impl, tuned: the same implementation, with options chosen by rule and by the autotuner. Columns:
    the sizes, `dtype`; `host_first_ms`, the first call of `tuned` in milliseconds on the host's
    clock, compilation included; `us` and `tuned_us`, the medians of `impl` and `tuned` in
    microseconds. Raises as `bench` does.
    """
    runtime.require_gpu("autotune_cost")
    fns, op, rows = [find_implementation(impl), find_implementation(tuned)], find_op(op), []
    for shape in progress(shapes, "tuning"):
        inputs = op.inputs(tuple(shape), dtype)
        torch.cuda.synchronize()
        start = time.perf_counter()
        fns[1](*inputs)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        samples = time_interleaved([functools.partial(fn, *inputs) for fn in fns])
        us, tuned_us = (statistics.median(times) * 1e6 for times in samples)
        times = {"host_first_ms": first * 1e3, "us": us, "tuned_us": tuned_us}
        rows.append(describe_shape(op, shape, dtype) | times)
    return pd.DataFrame(rows)
