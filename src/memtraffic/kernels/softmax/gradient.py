"""The gradient of a row softmax y, from the gradient dy of it: y * (dy - sum(y * dy)).

Traffic: reads 2MN, writes MN, of rows that fit one program; of longer ones, which several
programs share, reads 2MN + 2M and writes MN + 2M, as in `split.py`.
"""

import triton
import triton.language as tl

from memtraffic.kernels.chunking import (
    at_columns,
    at_edges,
    divisible,
    edges_of,
    forget,
    load_chunks,
    load_columns,
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
    n_cols = divisible(n_cols, ALIGN)
    batch, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * ROWS
    dx_batch = batch * divisible(dx_batch_stride, ALIGN)
    y_batch = batch * divisible(y_batch_stride, ALIGN)
    dy_batch = batch * divisible(dy_batch_stride, ALIGN)
    rows = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    dx_row = dx_batch + rows * divisible(dx_row_stride, ALIGN)
    y_row = y_batch + rows * divisible(y_row_stride, ALIGN)
    dy_row = dy_batch + rows * divisible(dy_row_stride, ALIGN)
    inner = n_cols
    if VECTOR > 1:
        _, inner = whole_vectors(y_row, n_cols, VECTOR)
        edge_rows, edge_col, on_edge = edges_of(
            y_batch, y_row_stride, first, n_rows, n_cols, ROWS, VECTOR
        )
        dx_edges = dx_ptr + dx_batch + edge_rows * dx_row_stride + edge_col
        y_edges = y_ptr + y_batch + edge_rows * y_row_stride + edge_col
        dy_edges = dy_ptr + dy_batch + edge_rows * dy_row_stride + edge_col
        edge_y, edge_dy = load_both(y_edges, dy_edges, on_edge, STORED)
        dx_row = round_up(dx_row, VECTOR)
        y_row = round_up(y_row, VECTOR)
        dy_row = round_up(dy_row, VECTOR)
    inner = tl.where(rows < n_rows, inner, 0)
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    ys = load_chunks(y_ptr + y_row, y_col_stride, cols, inner, 0, BLOCK, CHUNKS, WHOLE)
    dys = load_chunks(
        dy_ptr + dy_row, dy_col_stride, cols, inner, 0, BLOCK, CHUNKS, WHOLE
    )
    products = dot_of_chunks(ys, dys, CHUNKS, STORED)  # (ROWS, BLOCK)
    dot = tl.sum(products, axis=1)  # (ROWS,)
    if VECTOR > 1:
        dot += tl.sum(edge_y * edge_dy, axis=0)
        edge_dx = to_gradient(edge_y * (edge_dy - at_edges(dot, ROWS)), STORED, DTYPE)
        tl.store(dx_edges, edge_dx, mask=on_edge)
    for i in tl.static_range(CHUNKS):
        y = widen(forget(ys[i], CHUNKS, PTX), STORED)
        dy = widen(forget(dys[i], CHUNKS, PTX), STORED)
        dx = to_gradient(y * (dy - dot[:, None]), STORED, DTYPE)
        store_chunk(dx_ptr + dx_row, dx_col_stride, dx, i, cols, inner, BLOCK, WHOLE)


@triton.jit
def dot_of_chunks(ys, dys, CHUNKS: tl.constexpr, STORED: tl.constexpr):
    # Each product is added without being rounded. A compiler that may choose would choose anew
    # wherever the sum is computed, and its bits would differ.
    products = widen(tl.zeros_like(ys[0]), STORED)
    for i in tl.static_range(CHUNKS):
        products = tl.fma(widen(ys[i], STORED), widen(dys[i], STORED), products)
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
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    LOOKS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK * CHUNKS
    n_cols = divisible(n_cols, ALIGN)
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    part = tl.program_id(0) % n_parts
    dx_row = row * divisible(dx_row_stride, ALIGN)
    y_row = row * divisible(y_row_stride, ALIGN)
    dy_row = row * divisible(dy_row_stride, ALIGN)
    inner, dx_edges, y_edges, dy_edges = n_cols, dx_ptr, y_ptr, dy_ptr
    if VECTOR > 1:
        _, inner = whole_vectors(y_row, n_cols, VECTOR)
        _, edge_col, on_edge = edges_of(0, y_row_stride, row, n_rows, n_cols, 1, VECTOR)
        dx_edges += dx_row + edge_col
        y_edges += y_row + edge_col
        dy_edges += dy_row + edge_col
        dx_row = round_up(dx_row, VECTOR)
        y_row = round_up(y_row, VECTOR)
        dy_row = round_up(dy_row, VECTOR)
        own_edge = on_edge & (part == 0)  # the first part has those of the row
    dx_ptr += dx_row
    y_ptr += y_row
    dy_ptr += dy_row
    lane = tl.arange(0, BLOCK)  # (BLOCK,)
    cols = part * WIDTH + lane
    ys = load_chunks(y_ptr, y_col_stride, cols, inner, 0, BLOCK, CHUNKS, 0)
    dys = load_chunks(dy_ptr, dy_col_stride, cols, inner, 0, BLOCK, CHUNKS, 0)
    dot = tl.sum(dot_of_chunks(ys, dys, CHUNKS, STORED), axis=0)
    if VECTOR > 1:
        edge_y, edge_dy = load_both(y_edges, dy_edges, own_edge, STORED)
        dot += tl.sum(edge_y * edge_dy, axis=0)
    slots_ptr += row * n_parts
    publish(slots_ptr + part, dot, tl.full((), 1, tl.float32))  # a word is not 0
    slots = tl.arange(0, SLOTS)
    used = slots < n_parts
    words = look(slots_ptr + slots, used, LOOKS, PTX)
    late = first_missing(words, used, SLOTS)
    if late == SLOTS:
        dot = tl.sum(high_of(words), axis=0)  # 0 where not used
        for i in tl.static_range(CHUNKS):
            y = widen(forget(ys[i], CHUNKS, PTX), STORED)
            dy = widen(forget(dys[i], CHUNKS, PTX), STORED)
            dx = to_gradient(y * (dy - dot), STORED, DTYPE)
            store_chunk(dx_ptr, dx_col_stride, dx, i, cols, inner, BLOCK, 0)
    else:
        while late < SLOTS:
            end = tl.minimum(inner, (late + 1) * WIDTH)
            products = tl.zeros((BLOCK,), tl.float32)
            for start in range(late * WIDTH, end, BLOCK):
                y = load_columns(y_ptr, y_col_stride, start + lane, inner, 0)
                dy = load_columns(dy_ptr, dy_col_stride, start + lane, inner, 0)
                products = tl.fma(widen(y, STORED), widen(dy, STORED), products)
            late_dot = tl.sum(products, axis=0)
            if VECTOR > 1:
                y, dy = load_both(y_edges, dy_edges, on_edge & (late == 0), STORED)
                late_dot += tl.sum(y * dy, axis=0)
            publish(slots_ptr + late, late_dot, tl.full((), 1, tl.float32))
            words = tl.load(slots_ptr + slots, mask=used, other=0, volatile=True)
            late = first_missing(words, used, SLOTS)
        words = look(slots_ptr + slots, used, 1, PTX)
        dot = tl.sum(high_of(words), axis=0)
        for start in range(0, tl.minimum(inner - part * WIDTH, WIDTH), BLOCK):
            at = start + cols
            y = widen(load_columns(y_ptr, y_col_stride, at, inner, 0), STORED)
            dy = widen(load_columns(dy_ptr, dy_col_stride, at, inner, 0), STORED)
            dx = to_gradient(y * (dy - dot), STORED, DTYPE)
            tl.store(at_columns(dx_ptr, dx_col_stride, at), dx, mask=at < inner)
    if VECTOR > 1:
        edge_dx = to_gradient(edge_y * (edge_dy - dot), STORED, DTYPE)
        tl.store(dx_edges, edge_dx, mask=own_edge)


@triton.jit
def load_both(y_ptrs, dy_ptrs, mask, STORED: tl.constexpr):
    y = widen(tl.load(y_ptrs, mask=mask, other=0), STORED)
    return y, widen(tl.load(dy_ptrs, mask=mask, other=0), STORED)
