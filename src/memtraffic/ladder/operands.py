"""What every launcher of a rung asks of its operands."""

import torch

from memtraffic import machine

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def output(rung, x, out, max_cols):
    """The tensor that a softmax of `x` goes to: `out`, or a new one of x's shape and dtype.

    Raises TypeError for a dtype or a device that `rung` cannot take, ValueError for a shape it cannot take or an
    `out` that does not fit; the message repeats the numbers.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"{rung}: float32, float16 or bfloat16, not {x.dtype}")
    if machine.HAS_GPU and not machine.INTERPRETED and not x.is_cuda:
        raise TypeError(f"{rung}: the tensor is on the {x.device.type}, not on a GPU")
    if x.dim() != 2:
        raise ValueError(f"{rung}: 2 dimensions, not {x.dim()}: {tuple(x.shape)}")
    if x.shape[1] > max_cols:
        raise ValueError(f"{rung}: {x.shape[1]} columns, more than {max_cols}")
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.dtype != x.dtype or out.device != x.device:
        raise TypeError(
            f"{rung}: out is {out.dtype} on {out.device}, not {x.dtype} on {x.device}"
        )
    if out.shape != x.shape:
        raise ValueError(f"{rung}: out is {tuple(out.shape)}, not {tuple(x.shape)}")
    if any(
        n > 1 and stride == 0 for n, stride in zip(out.shape, out.stride(), strict=True)
    ):
        raise ValueError(
            f"{rung}: out repeats its elements, its strides are {out.stride()}"
        )
    return out
