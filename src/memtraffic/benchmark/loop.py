"""Times implementations beside one another, at one shape after the other; judges them, if asked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import Any

import pandas as pd
from torch import Tensor

from memtraffic import device
from memtraffic.benchmark.baselines import copy, find_implementation
from memtraffic.benchmark.copying import fastest_copy
from memtraffic.benchmark.timing import summary, time_interleaved
from memtraffic.errors import InputsError, said
from memtraffic.functions import as_function
from memtraffic.inputs import Arguments
from memtraffic.op import AnyInputs, Op, find_op, least_bytes
from memtraffic.progress import progress
from memtraffic.testing import assert_correct

Implementation = str | Callable[..., Any]
Shapes = Sequence[Sequence[int]]
ABSENT = "absent: "  # the note of a package that is not here starts with it
LOOSE = 16  # ulps of a row's largest element that a result may be off and still be timed
TIMES = ("us", "us_p20", "us_p80", "us_reversed", "gb_per_s")


def bind(
    fn: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any] | None = None
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
    return fastest_copy(*inputs)


def describe_shape(op: Op, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """The columns that say what was timed: the sizes of `op` in lower case, and `dtype`."""
    return dict(zip(map(str.lower, op.sizes), shape, strict=True)) | {"dtype": dtype}


def bench(
    impls: Sequence[str] | Mapping[str, Implementation],
    inputs: AnyInputs = None,
    shapes: Shapes = ((4096, 1024), (4096, 16384)),
    *,
    dtype: str = "float32",
    layout: str = "packed",
    judge: bool = False,
    beside_copy: bool = False,
    budget: float = 0.3,
) -> pd.DataFrame:
    """Times implementations of an operation: one row for each shape and implementation.

    >>> shapes = [(4096, 781), (4096, 1024)]
    >>> bench(["copy", "torch.softmax", "masked"], shapes=shapes)  # doctest: +SKIP

    impls: names of baselines, names of rungs or `module:function`; or functions by name. `copy` is
    the fastest of several copies at each shape, `fastest_copy`. inputs: an `Op`, by default the
    softmax of a matrix; or what each function is called with, such as "M,N N:bf16", see
    `op.find_op`. shapes: one number for each size. layout: of matrices, as of
    `tensors.matrix`. budget: as for `time_interleaved`.

    Columns: `impl`; the sizes (`m` and `n` for a softmax) and `dtype`; `us`, `us_p20` and `us_p80`,
    the median and the 20th and 80th percentile in microseconds; `gb_per_s`, the least traffic over
    the median: that of the `Op`, or of each tensor read once and each new tensor that the first
    implementation returns written once.

    judge: each result of the `Op` is judged before it is timed, but for `copy`, and nothing stops
    the others. What is not installed, refuses a shape or is wrong there has NaN for times. Further
    columns: `us_reversed`, the median of those rounds, every second one, that were in reverse
    order; `note`, why an implementation was not timed, or by how much a
    result is less precise than the judge allows, otherwise "".

    beside_copy: the first row of each shape is the fastest copy of the first tensor, and `gb_per_s`
    is what this copy moves over the time.

    Raises RuntimeError without a GPU, LookupError for an unknown name, ValueError for a shape of
    another number of sizes, for `judge` without an `Op` or with inputs that are not tensors by
    position, and for `beside_copy` without a tensor.
    """
    device.require_gpu("bench")
    named = impls if isinstance(impls, Mapping) else {name: name for name in impls}
    fns = {name: find_implementation(impl) for name, impl in named.items()}
    subject = find_op("softmax") if inputs is None else inputs
    made_by, rows = find_op(subject), []
    sizes = [made_by.check(shape) for shape in shapes]
    op = subject if isinstance(subject, Op) else None
    if judge and op is None:
        raise ValueError("bench: judges the results of an Op, which has their reference")
    for shape in progress(sizes, "timing"):
        key = describe_shape(made_by, shape, dtype)
        make = functools.partial(made_by.arguments, shape, dtype, layout)
        if not judge or op is None:
            timed = _time(fns, op, make(), beside_copy, budget)
            rows += [{"impl": name} | key | found for name, found in timed.items()]
            continue
        times, notes = _judge_and_time(fns, op, make, budget)
        for name in fns:
            found = dict.fromkeys(TIMES, float("nan")) | times.get(name, {})
            rows.append({"impl": name} | key | found | {"note": notes.get(name, "")})
    return pd.DataFrame(rows)


def _time(
    fns: Mapping[str, Callable[..., Any]],
    op: Op | None,
    arguments: Arguments,
    beside_copy: bool,
    budget: float,
) -> dict[str, dict[str, float]]:
    """The times of `fns` on the same arguments, which are those of `op` if there is one."""
    positional, keywords = arguments.positional, arguments.keywords
    calls: dict[str, Callable[[], object]] = {}
    if beside_copy:
        if not arguments.tensors:
            raise ValueError("bench: the inputs have no tensor, so there is no copy beside")
        calls["copy"] = fastest_copy(arguments.tensors[0])
    calls |= {name: bind(fn, positional, keywords) for name, fn in fns.items()}
    if beside_copy:
        n_bytes = 2 * arguments.tensors[0].nbytes
    elif op:
        n_bytes = op.least_bytes(arguments)
    else:
        n_bytes = least_bytes(arguments.tensors, next(iter(calls.values()))())
    samples = time_interleaved(list(calls.values()), budget=budget)
    return {name: summary(times, n_bytes) for name, times in zip(calls, samples, strict=True)}


def _judge_and_time(
    fns: Mapping[str, Callable[..., Any]], op: Op, make: Callable[[], Arguments], budget: float
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The times of those of `fns` that are right at a shape, and notes on the others."""
    calls: dict[str, Callable[[], object]] = {}
    notes: dict[str, str] = {}
    try:
        arguments = make()
    except (InputsError, RuntimeError) as error:  # too large, or a kernel has broken the GPU
        return {}, dict.fromkeys(fns, _reason("not timed", error))
    inputs = arguments.positional
    if arguments.keywords or not all(isinstance(it, Tensor) for it in inputs):
        raise ValueError(f"{op.name}: inputs of a judged function are tensors by position")
    for name, fn in fns.items():
        try:
            if fn is not copy and (note := judge_result(op, _settled(name, fn, inputs), *inputs)):
                notes[name] = note
            calls[name] = bind(fn, inputs)
        except AssertionError as error:
            notes[name] = _reason("wrong", error)
        except ImportError as error:
            notes[name] = ABSENT + said(error)
        except Exception as error:  # a compiler raises what it likes
            notes[name] = _reason("refused", error)
    try:
        samples = time_interleaved(list(calls.values()), budget=budget, reverse=True)
    except Exception as error:
        return {}, notes | dict.fromkeys(calls, _reason("not timed", error))
    n_bytes, found = op.least_bytes(arguments), {}
    for name, durations in zip(calls, samples, strict=True):
        back = summary(durations[1::2], n_bytes)["us"]
        found[name] = summary(durations, n_bytes) | {"us_reversed": back}
    return found, notes


def _settled(name: str, fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A function to judge for `fn`: of `torch.compile` one that only has the result.

    The judge calls it under a setting of PyTorch for which everything would be compiled again.
    """
    if not name.startswith("compile("):
        return fn
    result = fn(*inputs)
    return lambda *inputs: result


def judge_result(op: Op, fn: Callable[..., Tensor], *inputs: Tensor) -> str:
    """What `assert_correct` has against a result that is only imprecise; "" if nothing.

    >>> import torch
    >>> from memtraffic.kernels.softmax.definitions import SOFTMAX
    >>> judge_result(SOFTMAX, lambda x: torch.softmax(x, dim=1), torch.zeros(3, 5))
    ''

    Raises AssertionError for a wrong result, and what `fn` raises.
    """
    try:
        assert_correct(op, fn, *inputs)
    except AssertionError as error:
        assert_correct(dataclasses.replace(op, roundings=LOOSE, checks_row_sums=False), fn, *inputs)
        return _reason("imprecise", error)
    return ""


def _reason(what: str, error: Exception) -> str:
    kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
    text = shorten(said(error), 160, placeholder=" …")
    return f"{what}: {kind}{text or type(error).__name__}"
