"""The copies that are Triton kernels."""

import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.operands import common_divisor
from memtraffic.kernels.softmax.rule import tile_shape


@triton.jit
def _copy_flat_kernel(y_ptr, x_ptr, other_ptr, n, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = at < n
    y = tl.load(x_ptr + at, mask=mask)
    if ADD:
        y += tl.load(other_ptr + at, mask=mask)
    tl.store(y_ptr + at, y, mask=mask)


def copy_flat(out: Tensor, x: Tensor, other: Tensor | None, block: int, num_warps: int) -> Tensor:
    """Copy the memory of `x` into `out`, or add that of `other`; `block` elements per program."""
    n, add = x.numel(), other is not None
    if n:
        with device_guard(x):
            _copy_flat_kernel[(triton.cdiv(n, block),)](
                out, x, other if add else x, n, ADD=add, BLOCK=block, num_warps=num_warps
            )
    return out


@triton.jit
def _copy_tiled_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """The rung `tiled` without its arithmetic."""
    n_cols = n_cols // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (rows < n_rows) & (cols < n_cols)  # (ROWS, BLOCK)
    rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    x = tl.load(x_ptr + rows * x_row_stride + cols * x_col_stride, mask=mask)
    tl.store(y_ptr + rows * y_row_stride + cols * y_col_stride, x, mask=mask)


def copy_tiles(out: Tensor, x: Tensor) -> Tensor:
    """Copy the matrix `x` into `out` with the grid, the tiles and the warps of the rung `tiled`."""
    tile = tile_shape(x.shape[1], x.element_size(), planning_gpu(x))
    with device_guard(x):
        _copy_tiled_kernel[(triton.cdiv(x.shape[0], tile.rows),)](
            out, *out.stride(), x, *x.stride(), *x.shape,
            ROWS=tile.rows, BLOCK=tile.block, ALIGN=common_divisor(x, out),
            num_warps=tile.num_warps,
        )  # fmt: skip
    return out
