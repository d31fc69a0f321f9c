"""What launchers ask of operands: whether a kernel takes them, and what divides their rows."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtraffic import device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROWS = 2**30  # the number of a row, rounded up to a tile, stays within 32 bits
VECTOR_BYTES = 16  # the widest access of a lane


def check_operands(rung: str, x: Any, max_cols: int) -> Tensor:
    """The tensor that a softmax of `x` is written to: a new, contiguous one of its shape and dtype.

    Raises TypeError for anything but a dense tensor whose memory holds its values
    (`z.conj().imag` is negated when it is read), and for a dtype or a device that
    `rung` cannot take; RuntimeError for a tensor that requires a gradient; ValueError
    for a shape that it cannot take. The messages repeat the numbers.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{rung}: x is a {type(x).__name__}, not a tensor")
    if x.layout is not torch.strided or x.is_meta:
        kind = "meta" if x.is_meta else str(x.layout)
        raise TypeError(f"{rung}: x is a {kind} tensor: a dense one is needed")
    if x.is_neg():
        raise TypeError(f"{rung}: x is negated when it is read: pass x.resolve_neg()")
    if x.dtype not in DTYPES:
        raise TypeError(f"{rung}: float32, float16 or bfloat16, not {x.dtype}")
    if not x.is_cuda and device.HAS_GPU and device.runs_on_gpu():
        raise TypeError(f"{rung}: the tensor is on the {x.device.type}, not on a GPU")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{rung}: x requires a gradient, and there is no backward here: "
            "detach it, or call this under torch.no_grad()"
        )
    if x.dim() != 2:
        raise ValueError(f"{rung}: 2 dimensions, not {x.dim()}: {tuple(x.shape)}")
    n_rows, n_cols = x.shape
    if n_cols > max_cols:
        raise ValueError(f"{rung}: {n_cols} columns, more than {max_cols}")
    if n_rows > MAX_ROWS:
        raise ValueError(f"{rung}: {n_rows} rows, more than {MAX_ROWS}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def common_divisor(*matrices: Tensor) -> int:
    """`divisor_of_rows` of matrices as they lie."""
    strides = [x.stride() for x in matrices]
    return divisor_of_rows(matrices, matrices[0].shape[1], strides)


def divisor_of_rows(
    tensors: Sequence[Tensor], n_cols: int, strides: Sequence[Sequence[int]]
) -> int:
    """The largest power of two that divides width and row strides, at most 16 bytes.

    A lane can move so many elements in one access, if all addresses are multiples of
    16 bytes. It is 1 where the columns of a row are not adjacent in memory. strides: of
    each tensor, that of its columns last.
    """
    if any(s[-1] != 1 for s in strides):
        return 1
    widest = max(VECTOR_BYTES // tensor.element_size() for tensor in tensors)
    return math.gcd(widest, n_cols, *(step for s in strides for step in s[:-1]))


def shifted_vector(
    tensors: Sequence[Tensor], strides: Sequence[Sequence[int]] | None = None
) -> int:
    """Elements of a 16-byte access to rows of which some start between two such addresses.

    It is 1 where all rows start at multiples of 16 bytes, where a row of one tensor starts
    elsewhere between such addresses than the same row of another, and where the columns of a row
    are not adjacent in memory. strides: of each tensor as rows; by default its own.
    """
    strides = strides or [x.stride() for x in tensors]
    itemsizes = {tensor.element_size() for tensor in tensors}
    vector = VECTOR_BYTES // max(itemsizes)
    starts = [[step % vector for step in s[:-1]] for s in strides]
    alike = len(itemsizes) == 1 and all(it == starts[0] for it in starts)
    adjacent = all(s[-1] == 1 for s in strides)
    aligned = all(tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in tensors)
    return vector if alike and adjacent and aligned and any(starts[0]) else 1
