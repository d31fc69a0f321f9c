"""RMS norm, `y = x / sqrt(mean(x**2) + eps) * weight`: a row in chunks, or several narrow rows.

Traffic: reads MN, and N for the weight in each program, which the caches hold; writes MN, and M for
what the backward needs. Rows that do not fit one program are read twice.
"""

import triton
import triton.language as tl

from memtraffic.kernels.chunking import forget, load_chunks, store_chunk


@triton.jit
def load_weight(weight_ptr, weight_stride, cols, n_cols, i: tl.constexpr, WHOLE: tl.constexpr):
    if i < WHOLE:
        return tl.load(weight_ptr + cols * weight_stride, eviction_policy="evict_last")
    return tl.load(
        weight_ptr + cols * weight_stride,
        mask=cols < n_cols,
        eviction_policy="evict_last",
    )


@triton.jit
def rms_norm_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    weight_ptr, weight_stride,
    rstd_ptr,
    n_rows, n_cols,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    # No value changes, but the compiler can now prove that ALIGN divides each of them.
    n_cols = n_cols // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    # (ROWS, 1); offsets outgrow int32
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = rows < n_rows
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    x_col_stride = tl.cast(x_col_stride, tl.int64)
    y_col_stride = tl.cast(y_col_stride, tl.int64)
    weight_stride = tl.cast(weight_stride, tl.int64)
    x_ptrs = x_ptr + rows * x_row_stride + cols * x_col_stride  # (ROWS, BLOCK)
    xs = load_chunks(x_ptrs, x_col_stride, live, cols, n_cols, 0, BLOCK, CHUNKS, WHOLE)
    squares = tl.zeros((ROWS, BLOCK), ACC)
    for i in tl.static_range(CHUNKS):
        x = xs[i].to(ACC)
        squares += x * x
    mean = tl.sum(squares, axis=1, keep_dims=True) / n_cols  # (ROWS, 1)
    rstd = tl.rsqrt(mean + EPS)
    tl.store(rstd_ptr + rows, rstd, mask=live)
    y_ptrs = y_ptr + rows * y_row_stride + cols * y_col_stride
    for i in tl.static_range(CHUNKS):
        y = forget(xs[i], CHUNKS, PTX).to(ACC) * rstd
        if WEIGHTED:
            y *= load_weight(weight_ptr, weight_stride, cols + i * BLOCK, n_cols, i, WHOLE).to(ACC)
        y = y.to(y_ptr.dtype.element_ty)
        store_chunk(y_ptrs, y_col_stride, y, i, live, cols, n_cols, BLOCK, CHUNKS, WHOLE)


@triton.jit
def long_rms_norm_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    weight_ptr, weight_stride,
    rstd_ptr,
    n_rows, n_cols,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (x_row_stride // ALIGN * ALIGN)
    y_ptr += row * (y_row_stride // ALIGN * ALIGN)
    squares = tl.zeros((BLOCK,), ACC)
    for start in tl.range(0, n_cols, BLOCK):
        cols = (start + tl.arange(0, BLOCK)).to(tl.int64)
        x = tl.load(x_ptr + cols * x_col_stride, mask=cols < n_cols, other=0).to(ACC)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + EPS)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, n_cols, BLOCK):
        cols = (start + tl.arange(0, BLOCK)).to(tl.int64)
        x = tl.load(x_ptr + cols * x_col_stride, mask=cols < n_cols, other=0)
        y = x.to(ACC) * rstd
        if WEIGHTED:
            y *= load_weight(weight_ptr, weight_stride, cols, n_cols, 0, 0).to(ACC)
        tl.store(
            y_ptr + cols * y_col_stride,
            y.to(y_ptr.dtype.element_ty),
            mask=cols < n_cols,
        )
