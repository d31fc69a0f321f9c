"""Softmax and its backward for rows that fit one program: a tile of rows, in one or two blocks.

Traffic: forward reads MN and writes MN, backward reads 2MN and writes MN. A row is BLOCK columns
and TAIL more, both powers of two, so that few elements of a program are masked.
"""

import triton
import triton.language as tl

__all__ = ["softmax_backward_kernel", "softmax_kernel", "to_gradient"]


@triton.jit
def _load(ptr, mask, other, STORED: tl.constexpr, ACC: tl.constexpr):
    # As PyTorch does, a matrix is first converted to the dtype of the result, by way of ACC.
    return tl.load(ptr, mask=mask, other=other).to(ACC).to(STORED).to(ACC)


@triton.jit
def to_gradient(dx, STORED: tl.constexpr, DTYPE: tl.constexpr):
    dx = dx.to(STORED)
    if DTYPE != tl.float64:  # as PyTorch converts, by way of float32
        dx = dx.to(tl.float32)
    return dx.to(DTYPE)


@triton.jit
def softmax_kernel(
    y_ptr, y_batch_stride, y_row_stride, y_col_stride,
    x_ptr, x_batch_stride, x_row_stride, x_col_stride,
    n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if STORED == tl.float64 else tl.float32
    # No value changes, but the compiler can now prove that ALIGN divides each of them.
    n_cols = n_cols // ALIGN * ALIGN
    x_batch_stride = x_batch_stride // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_batch_stride = y_batch_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    live = rows < n_rows
    mask = live & (cols < n_cols)  # (ROWS, BLOCK)
    cols = cols.to(tl.int64)  # offsets outgrow int32
    x_ptr += batch * x_batch_stride + rows * x_row_stride  # (ROWS, 1)
    y_ptr += batch * y_batch_stride + rows * y_row_stride
    x = _load(x_ptr + cols * x_col_stride, mask, -float("inf"), STORED, ACC)
    row_max = tl.max(x, axis=1, keep_dims=True)  # (ROWS, 1)
    if TAIL:
        tail_cols = BLOCK + tl.arange(0, TAIL)[None, :]  # (1, TAIL)
        tail_mask = live & (tail_cols < n_cols)
        tail_cols = tail_cols.to(tl.int64)
        tail = _load(x_ptr + tail_cols * x_col_stride, tail_mask, -float("inf"), STORED, ACC)
        row_max = tl.maximum(row_max, tl.max(tail, axis=1, keep_dims=True))
    x = tl.exp(x - row_max)
    row_sum = tl.sum(x, axis=1, keep_dims=True)
    if TAIL:
        tail = tl.exp(tail - row_max)
        row_sum += tl.sum(tail, axis=1, keep_dims=True)
    scale = 1 / row_sum
    tl.store(y_ptr + cols * y_col_stride, (x * scale).to(STORED), mask=mask)
    if TAIL:
        tl.store(y_ptr + tail_cols * y_col_stride, (tail * scale).to(STORED), mask=tail_mask)


@triton.jit
def softmax_backward_kernel(
    dx_ptr, dx_batch_stride, dx_row_stride, dx_col_stride,
    y_ptr, y_batch_stride, y_row_stride, y_col_stride,
    dy_ptr, dy_batch_stride, dy_row_stride, dy_col_stride,
    n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if STORED == tl.float64 else tl.float32
    n_cols = n_cols // ALIGN * ALIGN
    dx_batch_stride = dx_batch_stride // ALIGN * ALIGN
    dx_row_stride = dx_row_stride // ALIGN * ALIGN
    y_batch_stride = y_batch_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    dy_batch_stride = dy_batch_stride // ALIGN * ALIGN
    dy_row_stride = dy_row_stride // ALIGN * ALIGN
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    live = rows < n_rows
    mask = live & (cols < n_cols)  # (ROWS, BLOCK)
    cols = cols.to(tl.int64)
    dx_ptr += batch * dx_batch_stride + rows * dx_row_stride  # (ROWS, 1)
    y_ptr += batch * y_batch_stride + rows * y_row_stride
    dy_ptr += batch * dy_batch_stride + rows * dy_row_stride
    y = _load(y_ptr + cols * y_col_stride, mask, 0, STORED, ACC)
    dy = _load(dy_ptr + cols * dy_col_stride, mask, 0, STORED, ACC)
    dot = tl.sum(y * dy, axis=1, keep_dims=True)  # (ROWS, 1)
    if TAIL:
        tail_cols = BLOCK + tl.arange(0, TAIL)[None, :]  # (1, TAIL)
        tail_mask = live & (tail_cols < n_cols)
        tail_cols = tail_cols.to(tl.int64)
        tail_y = _load(y_ptr + tail_cols * y_col_stride, tail_mask, 0, STORED, ACC)
        tail_dy = _load(dy_ptr + tail_cols * dy_col_stride, tail_mask, 0, STORED, ACC)
        dot += tl.sum(tail_y * tail_dy, axis=1, keep_dims=True)
    dx = to_gradient(y * (dy - dot), STORED, dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + cols * dx_col_stride, dx, mask=mask)
    if TAIL:
        dx = to_gradient(tail_y * (tail_dy - dot), STORED, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + tail_cols * dx_col_stride, dx, mask=tail_mask)
