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
from memtraffic.functions import as_function
from memtraffic.inputs import AnyInputs, Arguments, Inputs, find_inputs
from memtraffic.op import Op, find_op
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
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    *,
    cold: bool = True,
) -> Callable[[], object]:
    """The call of `fn` that is timed; the fastest of several copies where `fn` is `copy`.

    Raises ValueError for a copy of anything but one tensor, or two of one shape.
    """
    if fn is not copy:
        return functools.partial(as_function(fn), *inputs, **(keywords or {}))
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in inputs]
    if keywords or len(shapes) not in (1, 2) or not isinstance(shapes[0], tuple):
        shapes = [*shapes, *(f"{name}=" for name in keywords or {})]
        raise ValueError(f"copy takes one tensor, or two of one shape, not {shapes}")
    if shapes[0] != shapes[-1]:
        raise ValueError(f"copy takes two tensors of one shape, not of {shapes}")
    return fastest_copy(*inputs, cold=cold)


def moved_once(arguments: Arguments, result: object) -> int:
    """Bytes to read each tensor of `arguments` once and to write each new one of `result` once.

    >>> import torch
    >>> x = torch.zeros(2, 4)
    >>> moved_once(Arguments((x, 3)), (x, x + 1))
    64
    """
    results = result if isinstance(result, (tuple, list)) else (result,)
    known = {x.data_ptr() for x in arguments.tensors}
    new = [x for x in results if isinstance(x, Tensor) and x.data_ptr() not in known]
    return sum(x.numel() * x.element_size() for x in (*arguments.tensors, *new))


def describe_shape(op: Op | Inputs, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """The columns that say what was timed: the sizes of `op` in lower case, and `dtype`."""
    return dict(zip(map(str.lower, op.sizes), shape, strict=True)) | {"dtype": dtype}


def bench(
    impls: Sequence[str] | Mapping[str, Implementation],
    shapes: Sequence[Sequence[int]],
    *,
    dtype: str = "float32",
    layout: str = "packed",
    op: str | Op = "softmax",
    inputs: AnyInputs = None,
    cold: bool = True,
    budget: float = 0.3,
) -> pd.DataFrame:
    """Times implementations of an operation: one row for each shape and implementation.

    >>> bench(["copy", "torch.softmax", "masked"], [(4096, 781), (4096, 1024)])  # doctest: +SKIP

    impls: names of baselines, names of rungs or `module:function`; or functions by name. shapes:
    one number for each of the operation's sizes. inputs: in place of an operation, what each
    function is called with, such as "M,N N:bf16", see `inputs.find_inputs`; the least traffic then
    reads each tensor once and writes each new tensor that the first implementation returns.
    layout: of matrices, as of `tensors.matrix`. cold, budget: as for `time_interleaved`. `copy` is
    the fastest of several copies at each shape, `fastest_copy`.

    Columns: `impl`; the sizes (`m` and `n` for a softmax) and `dtype`; `us`, `us_p20` and `us_p80`,
    the median and the 20th and 80th percentile in microseconds; `gb_per_s`, the operation's least
    traffic over the median.

    Raises RuntimeError without a GPU, LookupError for an unknown name.
    """
    runtime.require_gpu("bench")
    fns, op, rows = find_implementations(impls), find_op(op), []
    made_by = find_inputs(op if inputs is None else inputs)
    for shape in progress(shapes, "timing"):
        arguments = made_by.arguments(shape, dtype, layout)
        positional, keywords = arguments.positional, arguments.keywords
        calls = [bind(fn, positional, keywords, cold=cold) for fn in fns.values()]
        if inputs is None:
            n_bytes = op.least_bytes(*positional)
        else:
            n_bytes = moved_once(arguments, calls[0]())
        timed = time_interleaved(calls, cold=cold, budget=budget)
        for name, samples in zip(fns, timed, strict=True):
            times = summary(samples, n_bytes)
            rows.append({"impl": name} | describe_shape(made_by, shape, dtype) | times)
    return pd.DataFrame(rows)


def bench_beside_copy(
    impls: Sequence[str] | Mapping[str, Implementation],
    shapes: Sequence[Sequence[int]],
    *,
    inputs: AnyInputs,
    dtype: str = "float32",
) -> pd.DataFrame:
    """Times functions of any inputs beside the fastest copy of the first of their tensors.

    Nothing is judged. inputs: as of `bench`. Columns: those of `bench`; the first row of each shape
    is the copy, and `gb_per_s` is what the copy moves over the time. Raises as `bench` does, and
    ValueError for inputs without a tensor.
    """
    runtime.require_gpu("bench_beside_copy")
    fns, made_by, rows = find_implementations(impls), find_inputs(inputs), []
    for shape in progress(shapes, "timing"):
        arguments = made_by.arguments(shape, dtype)
        if not arguments.tensors:
            raise ValueError("bench_beside_copy: the inputs have no tensor, so there is no copy")
        first = arguments.tensors[0]
        calls: list[Callable[[], object]] = [fastest_copy(first)]
        calls += [functools.partial(arguments.call, fn) for fn in fns.values()]
        for name, times in zip(["copy", *fns], time_interleaved(calls), strict=True):
            described = {"impl": name} | describe_shape(made_by, shape, dtype)
            rows.append(described | summary(times, 2 * first.nbytes))
    return pd.DataFrame(rows)


def bench_option(
    fn: Implementation,
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
    function, op, rows = find_implementation(fn), find_op(op), []
    for shape in progress(shapes, "timing"):
        inputs = op.inputs(tuple(shape), dtype)
        calls: dict[Any, Callable[[], object]] = {}
        for value in values:
            call = functools.partial(function, *inputs, **{option: value})
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
    fn: Implementation,
    shape: Sequence[int],
    *,
    dtype: str = "float32",
    op: str | Op = "softmax",
) -> pd.DataFrame:
    """Times one implementation on inputs in each of the memory layouts in `tensors.MEMORY_LAYOUTS`.

    Columns: `layout`, and those of `bench` after `impl`. Raises as `bench` does.
    """
    runtime.require_gpu("bench_layouts")
    function, op = find_implementation(fn), find_op(op)
    inputs = [op.inputs(tuple(shape), dtype, layout) for layout in MEMORY_LAYOUTS]
    samples = time_interleaved([bind(function, tensors) for tensors in inputs])
    return pd.DataFrame(
        [
            {"layout": layout}
            | describe_shape(op, shape, dtype)
            | summary(times, op.least_bytes(*tensors))
            for layout, tensors, times in zip(MEMORY_LAYOUTS, inputs, samples, strict=True)
        ]
    )
