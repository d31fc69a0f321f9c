"""The gradient of a row softmax y, from the gradient dy of it: y * (dy - sum(y * dy)).

Traffic: reads 2MN, writes MN, of rows that fit one program; of longer ones, which several
programs share, reads 2MN + 2M and writes MN + 2M, as in `split.py`.
"""

import triton
import triton.language as tl

from memtraffic.kernels.chunking import (
    at_edges,
    edge_columns,
    edge_places,
    forget,
    load_chunks,
    round_up,
    store_chunk,
    whole_vectors,
    widen,
)
from memtraffic.kernels.exchange import first_missing, high_of, look, publish


@triton.jit
def to_gradient(dx, STORED: tl.constexpr, DTYPE: tl.constexpr):
    dx = dx.to(STORED)
    if DTYPE != tl.float64:  # as PyTorch converts, by way of float32
        dx = dx.to(tl.float32)
    return dx.to(DTYPE)


@triton.jit
def softmax_backward_kernel(
    dx_ptr, dx_batch_stride, dx_row_stride, dx_col_stride,
    y_ptr, y_batch_stride, y_row_stride, y_col_stride,
    dy_ptr, dy_batch_stride, dy_row_stride, dy_col_stride,
    n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    dx_row_stride = dx_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    dy_row_stride = dy_row_stride // ALIGN * ALIGN
    batch, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * ROWS
    dx_batch = batch * (dx_batch_stride // ALIGN * ALIGN)
    y_batch = batch * (y_batch_stride // ALIGN * ALIGN)
    dy_batch = batch * (dy_batch_stride // ALIGN * ALIGN)
    rows = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    live = rows < n_rows
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    dx_col_stride = tl.cast(dx_col_stride, tl.int64)
    y_col_stride = tl.cast(y_col_stride, tl.int64)
    dy_col_stride = tl.cast(dy_col_stride, tl.int64)
    dx_row = dx_batch + rows * dx_row_stride  # (ROWS, 1)
    y_row = y_batch + rows * y_row_stride
    dy_row = dy_batch + rows * dy_row_stride
    inner = n_cols
    if VECTOR > 1:
        _, inner = whole_vectors(y_row, n_cols, VECTOR)
        of_edges, lane = edge_places(first, ROWS, VECTOR)
        dx_start = dx_batch + of_edges * dx_row_stride
        y_start = y_batch + of_edges * y_row_stride
        dy_start = dy_batch + of_edges * dy_row_stride
        edge_col, on_edge = edge_columns(y_start, n_cols, lane, VECTOR)
        if ROWS > 1:
            on_edge = on_edge & (of_edges < n_rows)
        edge_y = tl.load(y_ptr + y_start + edge_col, mask=on_edge, other=0)
        edge_dy = tl.load(dy_ptr + dy_start + edge_col, mask=on_edge, other=0)
        edge_y, edge_dy = (
            widen(edge_y, STORED),
            widen(edge_dy, STORED),
        )
        dx_row = round_up(dx_row, VECTOR)
        y_row = round_up(y_row, VECTOR)
        dy_row = round_up(dy_row, VECTOR)
    y_ptrs = y_ptr + y_row + cols * y_col_stride  # (ROWS, BLOCK)
    dy_ptrs = dy_ptr + dy_row + cols * dy_col_stride
    ys = load_chunks(y_ptrs, y_col_stride, live, cols, inner, 0, BLOCK, CHUNKS, WHOLE)
    dys = load_chunks(
        dy_ptrs, dy_col_stride, live, cols, inner, 0, BLOCK, CHUNKS, WHOLE
    )
    products = dot_of_chunks(ys, dys, CHUNKS, STORED)  # (ROWS, BLOCK)
    dot = tl.sum(products, axis=1)  # (ROWS,)
    if VECTOR > 1:
        dot += tl.sum(edge_y * edge_dy, axis=0)
        edge_dx = to_gradient(edge_y * (edge_dy - at_edges(dot, ROWS)), STORED, DTYPE)
        tl.store(dx_ptr + dx_start + edge_col, edge_dx, mask=on_edge)
    dot = dot[:, None]
    dx_ptrs = dx_ptr + dx_row + cols * dx_col_stride
    for i in tl.static_range(CHUNKS):
        y = widen(forget(ys[i], CHUNKS, PTX), STORED)
        dy = widen(forget(dys[i], CHUNKS, PTX), STORED)
        dx = to_gradient(y * (dy - dot), STORED, DTYPE)
        store_chunk(
            dx_ptrs, dx_col_stride, dx, i, live, cols, inner, BLOCK, CHUNKS, WHOLE
        )


@triton.jit
def dot_of_chunks(
    ys, dys, CHUNKS: tl.constexpr, STORED: tl.constexpr
):  # fmt: skip
    # Each product is added without being rounded. A compiler that may choose would choose anew
    # wherever the sum is computed, and its bits would differ.
    products = widen(tl.zeros_like(ys[0]), STORED)
    for i in tl.static_range(CHUNKS):
        products = tl.fma(
            widen(ys[i], STORED),
            widen(dys[i], STORED),
            products,
        )
    return products


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
    VECTOR: tl.constexpr,
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
    dx_row, y_row, dy_row = row * dx_row_stride, row * y_row_stride, row * dy_row_stride
    inner, dx_edges, y_edges, dy_edges = n_cols, dx_ptr, y_ptr, dy_ptr
    if VECTOR > 1:
        _, inner = whole_vectors(y_row, n_cols, VECTOR)
        lane = tl.arange(0, 2 * VECTOR)
        edge_col, on_edge = edge_columns(y_row, n_cols, lane, VECTOR)
        dx_edges += dx_row + edge_col
        y_edges += y_row + edge_col
        dy_edges += dy_row + edge_col
        dx_row, y_row = (
            round_up(dx_row, VECTOR),
            round_up(y_row, VECTOR),
        )
        dy_row = round_up(dy_row, VECTOR)
        own_edge = on_edge & (part == 0)  # the first part has those of the row
    dx_ptr += dx_row + (first + cols) * dx_col_stride
    y_ptr += y_row + cols * y_col_stride
    dy_ptr += dy_row + cols * dy_col_stride
    part_y_ptr, part_dy_ptr = (
        y_ptr + first * y_col_stride,
        dy_ptr + first * dy_col_stride,
    )
    left = inner - first
    live = left > 0
    ys = load_chunks(
        part_y_ptr, y_col_stride, live, cols, left, 0, BLOCK, CHUNKS, WHOLE
    )
    dys = load_chunks(
        part_dy_ptr, dy_col_stride, live, cols, left, 0, BLOCK, CHUNKS, WHOLE
    )
    slots_ptr += row * n_parts
    dot = tl.sum(dot_of_chunks(ys, dys, CHUNKS, STORED), axis=0)
    if VECTOR > 1:
        edge_y, edge_dy = load_both(y_edges, dy_edges, own_edge, STORED)
        dot += tl.sum(edge_y * edge_dy, axis=0)
    publish(slots_ptr + part, dot, tl.full((), 1, tl.float32))  # a word is not 0
    slots = tl.arange(0, SLOTS)
    used = slots < n_parts
    words = look(slots_ptr + slots, used, LOOKS)
    late = first_missing(words, used, SLOTS)
    if late == SLOTS:
        dot = tl.sum(high_of(words), axis=0)  # 0 where not used
        for i in tl.static_range(CHUNKS):
            y = widen(forget(ys[i], CHUNKS, PTX), STORED)
            dy = widen(forget(dys[i], CHUNKS, PTX), STORED)
            dx = to_gradient(y * (dy - dot), STORED, DTYPE)
            store_chunk(
                dx_ptr, dx_col_stride, dx, i, live, cols, left, BLOCK, CHUNKS, WHOLE
            )
    else:
        while late < SLOTS:
            end = tl.minimum(inner - late * WIDTH, WIDTH)
            products = tl.zeros((BLOCK,), tl.float32)
            for start in range(late * WIDTH, late * WIDTH + end, BLOCK):
                y, dy = load_both(
                    y_ptr + start * y_col_stride, dy_ptr + start * dy_col_stride,
                    cols < inner - start, STORED,
                )  # fmt: skip
                products = tl.fma(y, dy, products)
            late_dot = tl.sum(products, axis=0)
            if VECTOR > 1:
                y, dy = load_both(y_edges, dy_edges, on_edge & (late == 0), STORED)
                late_dot += tl.sum(y * dy, axis=0)
            publish(slots_ptr + late, late_dot, tl.full((), 1, tl.float32))
            words = tl.load(slots_ptr + slots, mask=used, other=0, volatile=True)
            late = first_missing(words, used, SLOTS)
        words = look(slots_ptr + slots, used, 1)
        dot = tl.sum(high_of(words), axis=0)
        for start in range(0, tl.minimum(left, WIDTH), BLOCK):
            mask = cols < left - start
            y, dy = load_both(
                part_y_ptr + start * y_col_stride, part_dy_ptr + start * dy_col_stride,
                mask, STORED,
            )  # fmt: skip
            dx = to_gradient(y * (dy - dot), STORED, DTYPE)
            tl.store(dx_ptr + start * dx_col_stride, dx, mask=mask)
    if VECTOR > 1:
        edge_dx = to_gradient(edge_y * (edge_dy - dot), STORED, DTYPE)
        tl.store(dx_edges, edge_dx, mask=own_edge)


@triton.jit
def load_both(y_ptrs, dy_ptrs, mask, STORED: tl.constexpr):
    y = widen(tl.load(y_ptrs, mask=mask, other=0), STORED)
    return y, widen(tl.load(dy_ptrs, mask=mask, other=0), STORED)
