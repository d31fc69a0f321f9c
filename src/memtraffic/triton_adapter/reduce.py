"""Reductions and scans by a function of the kernel's own, for Triton's interpreter.

The interpreter calls such a function once per element, which takes it a second for 10,000 elements.
Here it is called for all pairs of neighbours at once. It may be: the compiler, which pairs elements
in an order of its own, takes only functions that are associative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from memtraffic.triton_adapter.patching import replaced

Lanes: TypeAlias = list[np.ndarray[Any, Any]]  # an array for each operand, all of one shape


class _Mixed(BaseException):
    """A function branches, and not all lanes go the same way. lanes: those that go one of them."""

    def __init__(self, lanes: np.ndarray[Any, Any]) -> None:
        self.lanes = lanes


def _one_way(value: Any) -> bool:
    """The truth value of a block. Raises _Mixed if its elements differ."""
    true = value.handle.data.astype(bool)
    if true.any() and not true.all():
        raise _Mixed(true)
    return bool(true.all())


def _combine(ops: Any, dtypes: Sequence[Any], left: Lanes, right: Lanes) -> Lanes:
    """What the function of `ops` makes of the lanes on the left and of those on the right."""
    import triton.language as tl

    shape = left[0].shape
    types = [*dtypes, *dtypes]
    flat = [operand.reshape(-1) for operand in (*left, *right)]
    found = [np.empty(flat[0].shape, operand.dtype) for operand in left]

    def run(lanes: np.ndarray[Any, Any]) -> None:
        if not lanes.size:
            return
        used = lanes.size
        block = np.resize(lanes, 1 << (used - 1).bit_length())  # what a block may have
        given = (ops.to_tensor(a[block], t) for a, t in zip(flat, types, strict=True))
        try:
            result = ops.combine_fn.fn(*given)
        except _Mixed as mixed:
            run(lanes[mixed.lanes[:used]])
            run(lanes[~mixed.lanes[:used]])
            return
        results = result if isinstance(result, (tuple, tl.tuple)) else (result,)
        for into, value in zip(found, results, strict=True):
            data = value.handle.data if isinstance(value, tl.tensor) else np.array([value])
            into[lanes] = np.broadcast_to(data, block.shape)[:used]

    with replaced((tl.tensor, "__bool__", _one_way)):
        run(np.arange(flat[0].size))
    return [values.reshape(shape) for values in found]


def reduce(ops: Any, operands: Sequence[Any]) -> list[Any]:
    """The interpreter's `ReduceOps.generic_reduce`: along `ops.axis`, or all axes if it is None."""
    dtypes = [operand.dtype for operand in operands]
    shape = operands[0].handle.data.shape
    axis = ops.axis
    lanes = [operand.handle.data for operand in operands]
    lanes = [np.moveaxis(a, axis, -1) if axis is not None else a.reshape(-1) for a in lanes]
    while (n := lanes[0].shape[-1]) > 1:
        even = n - n % 2
        pairs = _combine(
            ops, dtypes, [a[..., :even:2] for a in lanes], [a[..., 1:even:2] for a in lanes]
        )
        rest = (a[..., even:] for a in lanes)
        lanes = [np.concatenate(both, axis=-1) for both in zip(pairs, rest, strict=True)]
    found = [a[..., 0] for a in lanes]
    if ops.keep_dims:
        kept = [1 if axis in (None, i) else n for i, n in enumerate(shape)]
        found = [a.reshape(kept) for a in found]
    return [ops.to_tensor(a, dtype) for a, dtype in zip(found, dtypes, strict=True)]


def scan(ops: Any, operands: Sequence[Any]) -> list[Any]:
    """The interpreter's `ScanOps.generic_scan`, along `ops.axis`."""
    dtypes = [operand.dtype for operand in operands]
    lanes = [np.moveaxis(operand.handle.data, ops.axis, -1) for operand in operands]
    distance = 1
    while distance < lanes[0].shape[-1]:
        sums = _combine(
            ops, dtypes, [a[..., :-distance] for a in lanes], [a[..., distance:] for a in lanes]
        )
        first = (a[..., :distance] for a in lanes)
        lanes = [np.concatenate(both, axis=-1) for both in zip(first, sums, strict=True)]
        distance *= 2
    found = (np.moveaxis(a, -1, ops.axis) for a in lanes)
    return [ops.to_tensor(a, dtype) for a, dtype in zip(found, dtypes, strict=True)]
