"""Row softmax, one program per row: each element is read once and written once.

Traffic: reads MN, writes MN. Ends where a row is not a power of two wide, and where it
outgrows one program's registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.operands import check_operands
from memtraffic.kernels.softmax.rule import MAX_COLS, num_warps_of_row


@triton.jit
def _softmax_fused_kernel(
    y_ptr, y_row_stride,
    x_ptr, x_row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride outgrows int32 at 2**31
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + row * x_row_stride + cols).to(tl.float32)  # (BLOCK,)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * y_row_stride + cols, y.to(y_ptr.dtype.element_ty))


def softmax(x: Tensor) -> Tensor:
    """Softmax of each row of `x`, a power of two wide. Explained in book/fused.ipynb.

    >>> import torch
    >>> from memtraffic import device
    >>> softmax(torch.zeros(2, 4, device=device.default()))[0].tolist()
    [0.25, 0.25, 0.25, 0.25]

    x: tensor of shape (M, N), float32, float16 or bfloat16, its columns adjacent, on a
    GPU or, interpreted, on the CPU. Returns a new tensor of x's shape and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape,
    RuntimeError for a tensor that requires a gradient.
    """
    y = check_operands("fused", x, MAX_COLS)
    n_rows, n_cols = x.shape
    if n_cols == 0 or n_cols & (n_cols - 1):
        raise ValueError(f"fused: {n_cols} columns, not a power of two")
    if n_cols > 1 and x.stride(1) != 1:
        raise ValueError(f"fused: columns lie {x.stride(1)} apart, not 1")
    if n_rows:
        with device_guard(x):
            _softmax_fused_kernel[(n_rows,)](
                y, y.stride(0), x, x.stride(0),
                BLOCK=n_cols, num_warps=num_warps_of_row(n_cols, planning_gpu(x)),
            )  # fmt: skip
    return y
