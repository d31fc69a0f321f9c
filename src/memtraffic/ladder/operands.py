"""What every launcher of a rung asks of its operands."""

import math

import torch

from memtraffic import machine

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROWS = 2**30  # the number of a row, rounded up to a tile, stays within 32 bits


def output(rung, x, out, max_cols):
    """The tensor that a softmax of `x` goes to: `out`, or a new one of x's shape and dtype.

    Raises TypeError for no tensor, or one of a dtype or on a device that `rung` cannot take; ValueError for a shape it cannot
    take or an `out` that does not fit, repeats its elements, or lies over a part of `x`; the message repeats the numbers.
    """
    for name, it in (("x", x), ("out", out)):
        if not isinstance(it, torch.Tensor) and not (name == "out" and it is None):
            raise TypeError(f"{rung}: {name} is a {type(it).__name__}, not a tensor")
    if x.dtype not in DTYPES:
        raise TypeError(f"{rung}: float32, float16 or bfloat16, not {x.dtype}")
    if machine.HAS_GPU and not machine.INTERPRETED and not x.is_cuda:
        raise TypeError(f"{rung}: the tensor is on the {x.device.type}, not on a GPU")
    if x.dim() != 2:
        raise ValueError(f"{rung}: 2 dimensions, not {x.dim()}: {tuple(x.shape)}")
    if x.shape[1] > max_cols:
        raise ValueError(f"{rung}: {x.shape[1]} columns, more than {max_cols}")
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"{rung}: {x.shape[0]} rows, more than {MAX_ROWS}")
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.dtype != x.dtype or out.device != x.device:
        raise TypeError(
            f"{rung}: out is {out.dtype} on {out.device}, not {x.dtype} on {x.device}"
        )
    if out.shape != x.shape:
        raise ValueError(f"{rung}: out is {tuple(out.shape)}, not {tuple(x.shape)}")
    if _repeats(out):
        raise ValueError(
            f"{rung}: out repeats its elements, its strides are {out.stride()}"
        )
    if _lies_over_a_part(out, x):
        raise ValueError(
            f"{rung}: out begins {out.data_ptr() - x.data_ptr()} bytes after x, and lies over a part of it"
        )
    return out


def _repeats(matrix):
    """Whether two elements of `matrix` have the same address."""
    (m, n), (down, across) = matrix.shape, matrix.stride()
    if m < 2 or n < 2:
        return max(m, n) > 1 and (down if m > 1 else across) == 0
    both = math.gcd(down, across)  # so many rows on are as far as so many columns
    return both == 0 or (across // both < m and down // both < n)


def _lies_over_a_part(a, b):
    """Whether `a` and `b`, of equal shape, share memory and are not the same; never, where one of them has gaps."""
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return False

    def span(it):
        steps = zip(it.shape, it.stride(), strict=True)
        return 1 + sum((n - 1) * stride for n, stride in steps)

    if not a.numel() or any(span(it) != it.numel() for it in (a, b)):
        return False
    apart = abs(a.data_ptr() - b.data_ptr())
    return apart < a.numel() * a.element_size()
