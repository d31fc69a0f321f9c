"""Times implementations of an operation over shapes, values of an option, and memory layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from memtraffic import runtime
from memtraffic.benchmark.baselines import copy, find_implementation
from memtraffic.benchmark.copying import fastest_copy
from memtraffic.benchmark.timing import summary, time_interleaved
from memtraffic.ops import Op, find_op
from memtraffic.progress import progress
from memtraffic.tensors import MEMORY_LAYOUTS

Implementation = str | Callable[..., Any]


def find_implementations(
    impls: Sequence[str] | Mapping[str, Implementation],
) -> dict[str, Callable[..., Any]]:
    """The functions to compare, by name; see `find_implementation`."""
    named = impls if isinstance(impls, Mapping) else {name: name for name in impls}
    return {name: find_implementation(impl) for name, impl in named.items()}


def bind(
    fn: Callable[..., Any], inputs: Sequence[Tensor], *, cold: bool = True
) -> Callable[[], object]:
    """The call of `fn` that is timed; the fastest of several copies where `fn` is `copy`."""
    if fn is copy:
        return fastest_copy(*inputs, cold=cold)
    return functools.partial(fn, *inputs)


def describe_shape(op: Op, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """The columns that say what was timed: the sizes of `op` in lower case, and `dtype`."""
    return dict(zip(map(str.lower, op.sizes), shape, strict=True)) | {"dtype": dtype}


def bench(
    impls: Sequence[str] | Mapping[str, Implementation],
    shapes: Sequence[Sequence[int]],
    *,
    dtype: str = "float32",
    layout: str = "packed",
    op: str | Op = "softmax",
    cold: bool = True,
    budget: float = 0.3,
) -> pd.DataFrame:
    """Times implementations of an operation: one row for each shape and implementation.

    >>> bench(["copy", "torch.softmax", "masked"], [(4096, 781), (4096, 1024)])  # doctest: +SKIP

    impls: names of baselines, names of rungs or `module:function`; or functions by name. shapes:
    one number for each of the operation's sizes. layout: of the inputs, as of `tensors.matrix`.
    cold, budget: as for `time_interleaved`. `copy` is the fastest of several copies at each shape,
    `fastest_copy`.

    Columns: `impl`; the sizes (`m` and `n` for a softmax) and `dtype`; `us`, `us_p20` and `us_p80`,
    the median and the 20th and 80th percentile in microseconds; `gb_per_s`, the operation's least
    traffic over the median.

    Raises RuntimeError without a GPU, LookupError for an unknown name.
    """
    runtime.require_gpu("bench")
    fns, op, rows = find_implementations(impls), find_op(op), []
    for shape in progress(shapes, "timing"):
        inputs = op.inputs(tuple(shape), dtype, layout)
        calls = [bind(fn, inputs, cold=cold) for fn in fns.values()]
        timed = time_interleaved(calls, cold=cold, budget=budget)
        for name, samples in zip(fns, timed, strict=True):
            times = summary(samples, op.least_bytes(*inputs))
            rows.append({"impl": name} | describe_shape(op, shape, dtype) | times)
    return pd.DataFrame(rows)


def bench_option(
    impl: Implementation,
    shapes: Sequence[Sequence[int]],
    option: str,
    values: Sequence[Any],
    *,
    dtype: str = "float32",
    op: str | Op = "softmax",
) -> pd.DataFrame:
    """Times one implementation with several values of a keyword option, beside the fastest copy.

    Columns: one named after `option`; those of `bench` after `impl`; `copy_us`, the median time of
    the copy in microseconds. A value that the implementation refuses with a ValueError at some
    shape has no row there. Raises as `bench` does.
    """
    runtime.require_gpu("bench_option")
    fn, op, rows = find_implementation(impl), find_op(op), []
    for shape in progress(shapes, "timing"):
        inputs = op.inputs(tuple(shape), dtype)
        calls: dict[Any, Callable[[], object]] = {}
        for value in values:
            call = functools.partial(fn, *inputs, **{option: value})
            try:
                call()
            except ValueError:
                continue
            calls[value] = call
        timed = [bind(copy, inputs), *calls.values()]
        n_bytes = op.least_bytes(*inputs)
        copied, *times = (
            summary(samples, n_bytes) for samples in time_interleaved(timed, budget=0.1)
        )
        for value, time in zip(calls, times, strict=True):
            row = {option: value} | describe_shape(op, shape, dtype) | time
            rows.append(row | {"copy_us": copied["us"]})
    return pd.DataFrame(rows)


def bench_layouts(
    impl: Implementation,
    shape: Sequence[int],
    *,
    dtype: str = "float32",
    op: str | Op = "softmax",
) -> pd.DataFrame:
    """Times one implementation on inputs in each of the memory layouts in `tensors.MEMORY_LAYOUTS`.

    Columns: `layout`, and those of `bench` after `impl`. Raises as `bench` does.
    """
    runtime.require_gpu("bench_layouts")
    fn, op = find_implementation(impl), find_op(op)
    inputs = [op.inputs(tuple(shape), dtype, layout) for layout in MEMORY_LAYOUTS]
    samples = time_interleaved([bind(fn, tensors) for tensors in inputs])
    return pd.DataFrame(
        [
            {"layout": layout}
            | describe_shape(op, shape, dtype)
            | summary(times, op.least_bytes(*tensors))
            for layout, tensors, times in zip(MEMORY_LAYOUTS, inputs, samples, strict=True)
        ]
    )
