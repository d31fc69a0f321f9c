"""Compares many implementations, each judged before it is timed; none of them can stop the others.

What is not installed, refuses a shape or is wrong there has a row that says so instead of a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic import runtime
from memtraffic.benchmark import peers
from memtraffic.benchmark.baselines import copy
from memtraffic.benchmark.sweeps import Implementation, bind, describe_shape, find_implementations
from memtraffic.benchmark.timing import summary, time_interleaved
from memtraffic.op import Op, find_op
from memtraffic.progress import progress
from memtraffic.testing import assert_correct

ABSENT = "absent: "  # the note of a peer that is not here starts with it
LOOSE = 16  # ulps of a row's largest element that a result may be off and still be timed
TIMES = ("us", "us_p20", "us_p80", "us_reversed", "gb_per_s")

Shape = tuple[int, ...]


class _Lost(Exception):
    """The GPU answers this process no more."""


def compare(
    impls: Sequence[str] | Mapping[str, Implementation],
    shapes: Sequence[Sequence[int]],
    *,
    dtype: str = "float32",
    op: str | Op = "softmax",
    only: Mapping[str, Sequence[Sequence[int]]] | None = None,
    budget: float = 0.1,
) -> pd.DataFrame:
    """Judges and times implementations: one row for each shape and implementation.

    >>> compare(["copy", "torch.softmax", "Liger"], [(4096, 1024)])  # doctest: +SKIP

    impls, shapes, dtype, op: as for `bench`; `copy` is not judged. only: for the names of
    implementations that are slow to compile, the only shapes that they are tried at. budget: as for
    `time_interleaved`.

    Columns: `impl`; the sizes and `dtype`; `us`, `us_p20`, `us_p80` and `gb_per_s`, as of `bench`,
    NaN where nothing was timed; `us_reversed`, the median of those rounds, every second one, that
    were in reverse order; `version`, of a peer; `note`, why an implementation was not timed, or by
    how much a result is less precise than the judge allows, otherwise "".

    Raises RuntimeError without a GPU, LookupError for an unknown name, ValueError for a shape of
    another number of sizes than the operation has.
    """
    runtime.require_gpu("compare")
    fns, op = find_implementations(impls), find_op(op)
    sizes = [tuple(shape) for shape in shapes]
    for shape in sizes:
        if len(shape) != len(op.sizes):
            raise ValueError(f"{op.name}: a shape is {', '.join(op.sizes)}, not {shape}")
    tried = {name: {tuple(shape) for shape in where} for name, where in (only or {}).items()}
    here = {name: peers.find_peer(name) for name in fns}
    absent = {name: peers.absent(peer) for name, peer in here.items() if peer}
    versions = {name: peers.version(peer) for name, peer in here.items() if peer}
    rows, lost = [], ""
    with peers.compiling_ahead(list(fns), [shape[-1] for shape in sizes], dtype):
        for shape in progress(sizes, "comparing"):
            named = {name: fn for name, fn in fns.items() if shape in tried.get(name, [shape])}
            notes = {name: ABSENT + absent[name] for name in named if absent.get(name)}
            times: dict[str, dict[str, float]] = {}
            if not lost:
                able = {name: fn for name, fn in named.items() if name not in notes}
                try:
                    times = _measure(able, op, shape, dtype, budget, notes)
                except _Lost as error:
                    lost = str(error)
            for name in named:
                missing = {} if name in times or name in notes or not lost else {name: lost}
                rows.append(
                    {"impl": name}
                    | describe_shape(op, shape, dtype)
                    | times.get(name, dict.fromkeys(TIMES, float("nan")))
                    | {"version": versions.get(name, "")}
                    | {"note": (notes | missing).get(name, "")}
                )
    return pd.DataFrame(rows)


def _measure(
    fns: Mapping[str, Callable[..., Any]],
    op: Op,
    shape: Shape,
    dtype: str,
    budget: float,
    notes: dict[str, str],
) -> dict[str, dict[str, float]]:
    """The times of those of `fns` that are right at a shape; adds to `notes` what there is to say.

    Raises _Lost, after it has noted the reason.
    """
    calls: dict[str, Callable[[], object]] = {}
    try:
        inputs = op.inputs(shape, dtype)
    except torch.OutOfMemoryError as error:
        notes |= dict.fromkeys(fns, _reason("not timed", error))
        return {}
    for name, fn in fns.items():
        try:
            if fn is not copy and (note := judge(op, _settled(name, fn, inputs), *inputs)):
                notes[name] = note
            calls[name] = bind(fn, inputs)
        except AssertionError as error:
            notes[name] = _reason("wrong", error)
        except Exception as error:  # a compiler raises what it likes
            notes[name] = _reason("refused", error)
        _check_gpu(name, shape, notes)
    try:
        samples = time_interleaved(list(calls.values()), budget=budget, reverse=True)
    except Exception as error:
        notes |= dict.fromkeys(calls, _reason("not timed", error))
        _check_gpu(" or ".join(calls), shape, notes)
        return {}
    n_bytes, found = op.least_bytes(*inputs), {}
    for name, durations in zip(calls, samples, strict=True):
        back = {"us_reversed": summary(durations[1::2], n_bytes)["us"]}
        times = summary(durations, n_bytes) | back
        found[name] = {column: times[column] for column in TIMES}
    return found


def _settled(name: str, fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A function to judge for `fn`: of `torch.compile` one that only has the result.

    The judge calls it under a setting of PyTorch for which everything would be compiled again.
    """
    if not name.startswith("compile("):
        return fn
    result = fn(*inputs)
    return lambda *inputs: result


def judge(op: Op, fn: Callable[..., Tensor], *inputs: Tensor) -> str:
    """What `assert_correct` has against a result that is only imprecise; "" if nothing.

    >>> from memtraffic.kernels.softmax.definitions import SOFTMAX
    >>> judge(SOFTMAX, lambda x: torch.softmax(x, dim=1), torch.zeros(3, 5))
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
    text = " ".join(str(error).split())[:160] or type(error).__name__
    return (
        f"{what}: {text}"
        if isinstance(error, AssertionError | ValueError)
        else (f"{what}: {type(error).__name__}: {text}")
    )


def _check_gpu(name: str, shape: Shape, notes: dict[str, str]) -> None:
    """Raises _Lost where an error of a kernel has made the GPU useless to this process."""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        lost = f"not timed: after {name} at {shape} the GPU answered no more"
        notes.setdefault(name, _reason("broken", error))
        raise _Lost(lost) from error
