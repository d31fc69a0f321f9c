"""The backward of a softmax for rows that do not fit one program: split over several, or in passes.

Traffic: split, reads 2MN and writes MN; in two passes, reads 4MN and writes MN.
"""

import triton
import triton.language as tl

from memtraffic.kernels.exchange import first_missing, high_of, look, publish
from memtraffic.kernels.softmax.chunks import forget, load_chunks, store_chunk, widen
from memtraffic.kernels.softmax.rows import dot_of_chunks, to_gradient


@triton.jit
def split_backward_kernel(
    dx_ptr, dx_row_stride, dx_col_stride,
    y_ptr, y_row_stride, y_col_stride,
    dy_ptr, dy_row_stride, dy_col_stride,
    slots_ptr,
    n_rows, n_cols,
    n_parts,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGN: tl.constexpr,
    LOOKS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK * CHUNKS
    n_cols = n_cols // ALIGN * ALIGN
    dx_row_stride = dx_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    dy_row_stride = dy_row_stride // ALIGN * ALIGN
    dx_col_stride = tl.cast(dx_col_stride, tl.int64)
    y_col_stride = tl.cast(y_col_stride, tl.int64)
    dy_col_stride = tl.cast(dy_col_stride, tl.int64)
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    part = tl.program_id(0) % n_parts
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    first = part * WIDTH
    dx_ptr += row * dx_row_stride + (first + cols) * dx_col_stride
    y_ptr += row * y_row_stride + cols * y_col_stride
    dy_ptr += row * dy_row_stride + cols * dy_col_stride
    part_y_ptr, part_dy_ptr = (
        y_ptr + first * y_col_stride,
        dy_ptr + first * dy_col_stride,
    )
    left = n_cols - first
    live = left > 0
    ys = load_chunks(
        part_y_ptr, y_col_stride, live, cols, left, 0, BLOCK, CHUNKS, WHOLE
    )
    dys = load_chunks(
        part_dy_ptr, dy_col_stride, live, cols, left, 0, BLOCK, CHUNKS, WHOLE
    )
    slots_ptr += row * n_parts
    dot = tl.sum(dot_of_chunks(ys, dys, CHUNKS, STORED, tl.float32), axis=0)
    publish(slots_ptr + part, dot, tl.full((), 1, tl.float32))  # a word is not 0
    slots = tl.arange(0, SLOTS)
    used = slots < n_parts
    words = look(slots_ptr + slots, used, LOOKS, PTX)
    late = first_missing(words, used, SLOTS)
    if late == SLOTS:
        dot = tl.sum(high_of(words), axis=0)  # 0 where not used
        for i in tl.static_range(CHUNKS):
            y = widen(forget(ys[i], CHUNKS, PTX), STORED, tl.float32)
            dy = widen(forget(dys[i], CHUNKS, PTX), STORED, tl.float32)
            dx = to_gradient(y * (dy - dot), STORED, DTYPE)
            store_chunk(
                dx_ptr, dx_col_stride, dx, i, live, cols, left, BLOCK, CHUNKS, WHOLE
            )
    else:
        while late < SLOTS:
            end = tl.minimum(n_cols - late * WIDTH, WIDTH)
            products = tl.zeros((BLOCK,), tl.float32)
            for start in range(late * WIDTH, late * WIDTH + end, BLOCK):
                mask = cols < n_cols - start
                y = tl.load(y_ptr + start * y_col_stride, mask=mask, other=0)
                dy = tl.load(dy_ptr + start * dy_col_stride, mask=mask, other=0)
                y, dy = widen(y, STORED, tl.float32), widen(dy, STORED, tl.float32)
                products = tl.fma(y, dy, products)
            publish(
                slots_ptr + late, tl.sum(products, axis=0), tl.full((), 1, tl.float32)
            )
            words = tl.load(slots_ptr + slots, mask=used, other=0, volatile=True)
            late = first_missing(words, used, SLOTS)
        words = look(slots_ptr + slots, used, 1, PTX)
        dot = tl.sum(high_of(words), axis=0)
        for start in range(0, tl.minimum(left, WIDTH), BLOCK):
            mask = cols < left - start
            y = tl.load(part_y_ptr + start * y_col_stride, mask=mask, other=0)
            dy = tl.load(part_dy_ptr + start * dy_col_stride, mask=mask, other=0)
            y, dy = widen(y, STORED, tl.float32), widen(dy, STORED, tl.float32)
            dx = to_gradient(y * (dy - dot), STORED, DTYPE)
            tl.store(dx_ptr + start * dx_col_stride, dx, mask=mask)


@triton.jit
def passes_backward_kernel(
    dx_ptr, dx_row_stride, dx_col_stride,
    y_ptr, y_row_stride, y_col_stride,
    dy_ptr, dy_row_stride, dy_col_stride,
    n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if STORED == tl.float64 else tl.float32
    n_cols = n_cols // ALIGN * ALIGN
    dx_row_stride = dx_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    dy_row_stride = dy_row_stride // ALIGN * ALIGN
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    live = rows < n_rows
    rows = rows.to(tl.int64)
    dx_ptr += rows * dx_row_stride  # (ROWS, 1)
    y_ptr += rows * y_row_stride
    dy_ptr += rows * dy_row_stride
    block = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    dots = tl.zeros((ROWS, BLOCK), ACC)  # added up once, after the loop
    for start in tl.range(0, n_cols, BLOCK):
        mask = live & (start + block < n_cols)
        cols = (start + block).to(tl.int64)
        y = tl.load(y_ptr + cols * y_col_stride, mask=mask, other=0).to(ACC)
        dy = (
            tl.load(dy_ptr + cols * dy_col_stride, mask=mask, other=0)
            .to(ACC)
            .to(STORED)
            .to(ACC)
        )
        dots += y * dy
    dot = tl.sum(dots, axis=1, keep_dims=True)  # (ROWS, 1)
    for start in tl.range(0, n_cols, BLOCK):
        mask = live & (start + block < n_cols)
        cols = (start + block).to(tl.int64)
        y = tl.load(y_ptr + cols * y_col_stride, mask=mask, other=0).to(ACC)
        dy = (
            tl.load(dy_ptr + cols * dy_col_stride, mask=mask, other=0)
            .to(ACC)
            .to(STORED)
            .to(ACC)
        )
        dx = to_gradient(y * (dy - dot), STORED, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + cols * dx_col_stride, dx, mask=mask)
