"""Times of an option, of memory layouts, of the host, and of `triton.autotune`: for experiments."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic import runtime
from memtraffic.benchmark.baselines import copy, find_implementation
from memtraffic.benchmark.loop import (
    Implementation,
    bench,
    bind,
    describe_shape,
    find_implementations,
)
from memtraffic.benchmark.timing import summary, time_interleaved
from memtraffic.inputs import Arguments
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.progress import progress
from memtraffic.tensors import MEMORY_LAYOUTS

ROUNDS = 20
WAITS = 100


def bench_option(
    fn: Implementation,
    shapes: Sequence[Sequence[int]],
    option: str,
    values: Sequence[Any],
    *,
    dtype: str = "float32",
) -> pd.DataFrame:
    """Times one implementation with several values of a keyword option, beside the fastest copy.

    Columns: one named after `option`; those of `bench` after `impl`; `copy_us`, the median time of
    the copy in microseconds. A value that the implementation refuses with a ValueError at some
    shape has no row there. Raises as `bench` does.
    """
    runtime.require_gpu("bench_option")
    function, rows = find_implementation(fn), []
    for shape in progress(shapes, "timing"):
        inputs = SOFTMAX.arguments(tuple(shape), dtype).positional
        calls: dict[Any, Callable[[], object]] = {}
        for value in values:
            call = functools.partial(function, *inputs, **{option: value})
            try:
                call()
            except ValueError:
                continue
            calls[value] = call
        timed = [bind(copy, inputs), *calls.values()]
        n_bytes = SOFTMAX.least_bytes(Arguments(inputs))
        copied, *times = (
            summary(samples, n_bytes) for samples in time_interleaved(timed, budget=0.1)
        )
        for value, found in zip(calls, times, strict=True):
            row = {option: value} | describe_shape(SOFTMAX, shape, dtype) | found
            rows.append(row | {"copy_us": copied["us"]})
    return pd.DataFrame(rows)


def bench_layouts(
    fn: Implementation,
    shape: Sequence[int],
    *,
    dtype: str = "float32",
) -> pd.DataFrame:
    """Times one implementation on inputs in each of the memory layouts in `tensors.MEMORY_LAYOUTS`.

    Columns: `layout`, and those of `bench` after `impl`. Raises as `bench` does.
    """
    runtime.require_gpu("bench_layouts")
    function = find_implementation(fn)
    inputs = [
        SOFTMAX.arguments(tuple(shape), dtype, layout).positional for layout in MEMORY_LAYOUTS
    ]
    samples = time_interleaved([bind(function, tensors) for tensors in inputs])
    return pd.DataFrame(
        [
            {"layout": layout}
            | describe_shape(SOFTMAX, shape, dtype)
            | summary(times, SOFTMAX.least_bytes(Arguments(tensors)))
            for layout, tensors, times in zip(MEMORY_LAYOUTS, inputs, samples, strict=True)
        ]
    )


def launch_overhead(
    impls: Sequence[str] | Mapping[str, Implementation],
    shape: Sequence[int],
    *,
    dtype: str = "float32",
    calls: int = 300,
) -> pd.DataFrame:
    """The time that a call takes on the host, before the GPU starts: a row for each implementation.

    Columns: `impl`, the sizes, `dtype`; `host_us`, microseconds per call on the host's clock, the
    median of 20 rounds of `calls` calls each. Choose a shape so small that the GPU keeps up with
    the calls. impls and errors: as for `bench`.
    """
    runtime.require_gpu("launch_overhead")
    fns = find_implementations(impls)
    inputs = SOFTMAX.arguments(tuple(shape), dtype).positional
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
            | describe_shape(SOFTMAX, shape, dtype)
            | {"host_us": statistics.median(samples) * 1e6}
            for name, samples in seconds.items()
        ]
    )


def caller_times(
    impls: Sequence[str] | Mapping[str, Implementation],
    shapes: Sequence[Sequence[int]],
    *,
    dtype: str = "float32",
    calls: int = 300,
) -> pd.DataFrame:
    """The time of a call on the GPU, beside what its caller sees on the host's clock.

    Columns: `impl`, the sizes, `dtype`; `us`, `us_p20` and `us_p80`, the time on the GPU, as of
    `bench`; `host_us`, until the call returns, as of `launch_overhead`; `host_wait_us`, until its
    result is there, the median of 100 calls that each wait for the GPU. impls, calls and errors: as
    for `launch_overhead`.
    """
    runtime.require_gpu("caller_times")
    fns, frames = find_implementations(impls), []
    for shape in shapes:
        on_gpu = bench(fns, SOFTMAX, [shape], dtype=dtype).drop(columns="gb_per_s")
        host = launch_overhead(fns, shape, dtype=dtype, calls=calls)["host_us"]
        waits = wait_times(fns, SOFTMAX.arguments(tuple(shape), dtype).positional)
        frames.append(on_gpu.assign(host_us=host, host_wait_us=waits))
    return pd.concat(frames, ignore_index=True)


def wait_times(fns: Mapping[str, Implementation], inputs: Sequence[Tensor]) -> list[float]:
    """Microseconds of a call and of the wait for its result: the median for each of `fns`."""
    medians = []
    for fn in map(find_implementation, fns.values()):
        seconds = []
        for _ in range(WAITS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            fn(*inputs)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        medians.append(statistics.median(seconds) * 1e6)
    return medians


def autotune_cost(
    fn: Implementation,
    tuned: Implementation,
    shapes: Sequence[Sequence[int]],
    *,
    dtype: str = "float32",
) -> pd.DataFrame:
    """What `triton.autotune` costs at its first call at each shape, and what its choice gains.

    fn, tuned: the same implementation, with options chosen by rule and by the autotuner. Columns:
    the sizes, `dtype`; `host_first_ms`, the first call of `tuned` in milliseconds on the host's
    clock, compilation included; `us` and `tuned_us`, the medians of `fn` and `tuned` in
    microseconds. Raises as `bench` does.
    """
    runtime.require_gpu("autotune_cost")
    fns, rows = [find_implementation(fn), find_implementation(tuned)], []
    for shape in progress(shapes, "tuning"):
        inputs = SOFTMAX.arguments(tuple(shape), dtype).positional
        torch.cuda.synchronize()
        start = time.perf_counter()
        fns[1](*inputs)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        samples = time_interleaved([functools.partial(fn, *inputs) for fn in fns])
        us, tuned_us = (statistics.median(times) * 1e6 for times in samples)
        times = {"host_first_ms": first * 1e3, "us": us, "tuned_us": tuned_us}
        rows.append(describe_shape(SOFTMAX, shape, dtype) | times)
    return pd.DataFrame(rows)
