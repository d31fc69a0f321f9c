"""Row softmax by tiles: a program takes several narrow rows, or one wide row.

Traffic: reads MN, writes MN. Ends where a row outgrows one program's registers.
A lane moves 16 bytes per access where the layout of the matrix permits it.
"""

import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.operands import check_operands, common_divisor
from memtraffic.kernels.softmax.rule import MAX_COLS, tile_shape


@triton.jit
def _softmax_tile(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    n_rows, n_cols,
    tile,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    # No value changes, but the compiler can now prove that ALIGN divides each of them.
    # 128-bit accesses need that proof. (tl.multiple_of and tl.assume have no effect on
    # a scalar argument.)
    n_cols = n_cols // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    rows = tile * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (rows < n_rows) & (cols < n_cols)  # (ROWS, BLOCK)
    rows, cols = rows.to(tl.int64), cols.to(tl.int64)  # offsets outgrow int32
    x_offsets = rows * x_row_stride + cols * x_col_stride  # (ROWS, BLOCK)
    x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = numerator * (1 / tl.sum(numerator, axis=1)[:, None])  # one division per row
    y_offsets = rows * y_row_stride + cols * y_col_stride  # (ROWS, BLOCK)
    tl.store(y_ptr + y_offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_tiled_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    _softmax_tile(
        y_ptr, y_row_stride, y_col_stride,
        x_ptr, x_row_stride, x_col_stride,
        n_rows, n_cols, tile, ROWS, BLOCK, ALIGN,
    )  # fmt: skip


def softmax(
    x: Tensor, *, rows: int | None = None, num_warps: int | None = None
) -> Tensor:
    """Softmax of each row of `x`, of any width to MAX_COLS. See book/tiled.ipynb.

    x: tensor of shape (M, N), float32, float16 or bfloat16, of any strides, on a GPU
    or, interpreted, on the CPU. rows, num_warps: per program, powers of two, instead of
    what `tile_shape` chooses. Returns a new tensor of x's shape and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape and for
    options as `tile_shape` does, RuntimeError for a tensor that requires a gradient.
    """
    y = check_operands("tiled", x, MAX_COLS)
    if x.numel():
        itemsize, gpu = x.element_size(), planning_gpu(x)
        tile = tile_shape(x.shape[1], itemsize, gpu, rows=rows, num_warps=num_warps)
        with device_guard(x):
            _softmax_tiled_kernel[(triton.cdiv(x.shape[0], tile.rows),)](
                y, *y.stride(), x, *x.stride(), *x.shape,
                ROWS=tile.rows, BLOCK=tile.block, ALIGN=common_divisor(x, y),
                num_warps=tile.num_warps,
            )  # fmt: skip
    return y
