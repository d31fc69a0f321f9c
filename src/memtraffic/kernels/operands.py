"""What launchers take: the checks of their operands, and which tensors overlap."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from memtraffic import device as runtime
from memtraffic.tensors import span

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOATS = (*DTYPES, torch.float64)
MAX_ROWS = 2**30  # the number of a row, rounded up to a tile, stays within 32 bits


def check_operands(rung: str, x: Tensor, out: Tensor | None, max_cols: int) -> Tensor:
    """The tensor that a softmax of `x` is written to: `out`, or a new one like `x`.

    Raises TypeError for anything but a dense tensor whose memory holds its values
    (`z.conj().imag` is negated when it is read), and for a dtype or a device that
    `rung` cannot take; RuntimeError for a tensor that requires a gradient; ValueError
    for a shape that it cannot take, and for an `out` that has another shape or was
    freed, repeats its elements, or overlaps a part of `x`. The messages repeat the numbers.
    """
    _check_dense(rung, "x", x)
    if out is not None:
        _check_dense(rung, "out", out)
    if x.dtype not in DTYPES:
        raise TypeError(f"{rung}: float32, float16 or bfloat16, not {x.dtype}")
    if not x.is_cuda and runtime.HAS_GPU and runtime.runs_on_gpu():
        raise TypeError(f"{rung}: the tensor is on the {x.device.type}, not on a GPU")
    requires_grad = x.requires_grad or (out is not None and out.requires_grad)
    if requires_grad and torch.is_grad_enabled():
        name = "x" if x.requires_grad else "out"
        raise RuntimeError(
            f"{rung}: {name} requires a gradient, and there is no backward here: "
            "detach it, or call this under torch.no_grad()"
        )
    if x.dim() != 2:
        raise ValueError(f"{rung}: 2 dimensions, not {x.dim()}: {tuple(x.shape)}")
    n_rows, n_cols = x.shape
    if n_cols > max_cols:
        raise ValueError(f"{rung}: {n_cols} columns, more than {max_cols}")
    if n_rows > MAX_ROWS:
        raise ValueError(f"{rung}: {n_rows} rows, more than {MAX_ROWS}")
    if out is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.dtype != x.dtype or out.device != x.device:
        raise TypeError(f"{rung}: out is {out.dtype} on {out.device}, not {x.dtype} on {x.device}")
    if out.shape != x.shape:
        raise ValueError(f"{rung}: out is {tuple(out.shape)}, not {tuple(x.shape)}")
    check_memory(rung, ValueError, out, {"x": x})
    increment_version(out)  # autograd may have saved what is about to be overwritten
    return out


def check_floats(op: str, *dtypes: torch.dtype) -> None:
    """Raises NotImplementedError for a dtype that the operation `op` does not take."""
    for dtype in dtypes:
        if dtype not in FLOATS:
            names = ", ".join(str(known).removeprefix("torch.") for known in FLOATS)
            raise NotImplementedError(f"{op}: not implemented for {dtype}: {names}")


def accumulated(x: Tensor) -> torch.dtype:
    """The dtype in which sums over `x` are held."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_dense(rung: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{rung}: {name} is a {type(x).__name__}, not a tensor")
    if x.layout is not torch.strided or x.is_meta:
        kind = "meta" if x.is_meta else str(x.layout)
        raise TypeError(f"{rung}: {name} is a {kind} tensor: a dense one is needed")
    if x.is_neg():
        raise TypeError(f"{rung}: {name} is negated when it is read: pass {name}.resolve_neg()")


def check_memory(
    what: str, error: type[Exception], out: Tensor, tensors: dict[str, Tensor | None]
) -> None:
    """Raises `error` for an `out` that cannot be written to.

    That is one whose memory was freed, that repeats its elements, or that overlaps a part of one of
    the tensors.
    """
    if out.numel() and not out.data_ptr():
        raise error(f"{what}: the memory of out was freed")
    if has_internal_overlap(out):
        raise error(f"{what}: out repeats its elements: its strides are {out.stride()}")
    for name, x in tensors.items():
        if x is not None and partially_overlaps(out, x):
            apart = out.data_ptr() - x.data_ptr()
            raise error(f"{what}: out starts {apart} bytes after {name}, and overlaps a part of it")


def has_internal_overlap(x: Tensor) -> bool:
    """Whether two elements have the same address; in more than two dimensions, by a stride of 0."""
    if x.is_contiguous():
        return False
    longer = [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    if len(longer) != 2:
        return any(stride == 0 for _, stride in longer)
    (m, row_stride), (n, col_stride) = longer
    # So many rows down are as far as so many columns back.
    step = math.gcd(row_stride, col_stride)
    return step == 0 or (col_stride // step < m and row_stride // step < n)


def partially_overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b` share memory without being views of the same elements.

    Only checked for dense tensors; False where one of them has gaps.
    """
    start, other = a.data_ptr(), b.data_ptr()
    if start + a.nbytes <= other or other + b.nbytes <= start:
        return False
    same = start == other and a.stride() == b.stride() and a.dtype == b.dtype
    return not same and all(span(x) == x.numel() for x in (a, b))
