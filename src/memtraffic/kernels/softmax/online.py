"""Row softmax of rows of any width, tile by tile: a running maximum, a running sum.

Traffic: reads 2MN, writes MN.
"""

import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.chunking import widen
from memtraffic.kernels.operands import check_operands, common_divisor
from memtraffic.kernels.softmax.rule import MAX_ROW, pass_tile


@triton.jit
def _load(x_ptr, x_col_stride, live, cols, n_cols, STORED: tl.constexpr):
    at = x_ptr + cols.to(tl.int64) * x_col_stride
    x = tl.load(at, mask=live & (cols < n_cols), other=-float("inf"))
    return widen(x, STORED)


@triton.jit
def online_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if STORED == tl.float64 else tl.float32
    n_cols = n_cols // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    live = rows < n_rows
    x_ptr += rows.to(tl.int64) * x_row_stride  # (ROWS, 1)
    y_ptr += rows.to(tl.int64) * y_row_stride
    block = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    row_max = tl.full((ROWS, 1), -float("inf"), ACC)
    # A sum for each column of the block: one for all of a long row would lose digits.
    sums = tl.zeros((ROWS, BLOCK), ACC)
    for start in tl.range(0, n_cols, BLOCK):
        x = _load(x_ptr, x_col_stride, live, start + block, n_cols, STORED)
        new_max = tl.maximum(row_max, tl.max(x, axis=1, keep_dims=True))
        # Or -inf - -inf where all is -inf so far.
        base = tl.where(new_max == -float("inf"), 0, new_max)
        # As if the old ones had been summed from the new maximum.
        sums = sums * tl.exp(row_max - base) + tl.exp(x - base)
        row_max = new_max
    scale = 1 / tl.sum(sums, axis=1, keep_dims=True)
    for start in tl.range(0, n_cols, BLOCK):
        cols = start + block
        x = _load(x_ptr, x_col_stride, live, cols, n_cols, STORED)
        y = (tl.exp(x - row_max) * scale).to(STORED)
        at = y_ptr + cols.to(tl.int64) * y_col_stride
        tl.store(at, y, mask=live & (cols < n_cols))


def softmax(
    x: Tensor, *, block: int | None = None, num_warps: int | None = None
) -> Tensor:
    """Softmax of each row of `x`, in two passes over it. See book/long-rows.ipynb.

    x: tensor of shape (M, N), N to MAX_ROW, float32, float16 or bfloat16, of any
    strides, on a GPU or, interpreted, on the CPU. block: columns that a program reads
    at a time, a power of two. Returns a new tensor of x's shape and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape,
    RuntimeError for a tensor that requires a gradient.
    """
    y = check_operands("online", x, MAX_ROW)
    if x.numel():
        tile = pass_tile(x.shape[1], x.element_size(), planning_gpu(x))
        with device_guard(x):
            online_kernel[(triton.cdiv(x.shape[0], tile.rows),)](
                y, *y.stride(), x, *x.stride(), *x.shape,
                ROWS=tile.rows, BLOCK=block or tile.block, ALIGN=common_divisor(x, y),
                num_warps=num_warps or tile.num_warps,
            )  # fmt: skip
    return y
