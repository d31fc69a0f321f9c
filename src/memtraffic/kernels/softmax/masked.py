"""Row softmax of any width: a block of the next power of two, masked past the row.

Traffic: reads MN, writes MN. Ends where a row outgrows one program's registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.operands import check_operands
from memtraffic.kernels.softmax.rule import MAX_COLS, num_warps_of_row


@triton.jit
def _softmax_masked_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    n_cols,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * x_row_stride may exceed 2**31
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = cols < n_cols
    cols = cols.to(tl.int64)  # if x is transposed, cols * x_col_stride may exceed 2**31
    x_row = x_ptr + row * x_row_stride
    x = tl.load(x_row + cols * x_col_stride, mask=mask, other=-float("inf"))
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))  # of a dead element: exp(-inf) = 0
    y = numerator / tl.sum(numerator, axis=0)
    y_row = y_ptr + row * y_row_stride
    tl.store(y_row + cols * y_col_stride, y.to(y_ptr.dtype.element_ty), mask=mask)


def softmax(x: Tensor) -> Tensor:
    """Softmax of each row of `x`, of any width to MAX_COLS. See book/masked.ipynb.

    x: tensor of shape (M, N), float32, float16 or bfloat16, of any strides, on a GPU
    or, interpreted, on the CPU. Returns a new tensor of x's shape and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape,
    RuntimeError for a tensor that requires a gradient.
    """
    y = check_operands("masked", x, MAX_COLS)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        with device_guard(x):
            _softmax_masked_kernel[(x.shape[0],)](
                y, *y.stride(), x, *x.stride(), x.shape[1],
                BLOCK=block, num_warps=num_warps_of_row(block, planning_gpu(x)),
            )  # fmt: skip
    return y
