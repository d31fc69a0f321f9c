"""Softmax and its backward for rows that fit one program: one row in chunks, or several rows.

If several, and SINGLY, the rows at the end that do not fill a tile take a program each. All tiles
are full then, so that a lane needs no predicate for each row, which would take a register.

Where VECTOR is over 1, rows start between multiples of 16 bytes. From its first such multiple on,
each is loaded in whole vectors, the chunks and REST columns behind them; the columns before and
after those, its edges, are loaded one by one, in a matrix (2 * VECTOR, ROWS) with its own layout.
A matrix of fewer elements than lanes is cheap to load, and Triton loads it again rather than hand
it from lane to lane: of one row they are a vector, of two a matrix (4 * VECTOR, 2).

Traffic: forward reads MN and writes MN, backward reads 2MN and writes MN.
"""

import triton
import triton.language as tl

from memtraffic.kernels.chunking import (
    edge_columns,
    exponential,
    forget,
    load_chunks,
    max_of_chunks,
    numerators,
    round_up,
    softmax_of_chunk,
    store_chunk,
    whole_vectors,
    widen,
)


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
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    SINGLY: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    # No value changes, but the compiler can now prove that ALIGN divides each of them.
    n_cols = n_cols // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    batch, program = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    x_batch = batch * (x_batch_stride // ALIGN * ALIGN)
    y_batch = batch * (y_batch_stride // ALIGN * ALIGN)
    full = n_rows // ROWS  # tiles
    if SINGLY:
        n_rows = full * ROWS
    if SINGLY and program >= full:
        softmax_of_rows(
            y_ptr, y_batch, y_row_stride, y_col_stride,
            x_ptr, x_batch, x_row_stride, x_col_stride,
            program + full * (ROWS - 1), n_rows + ROWS, n_cols,
            1, BLOCK, CHUNKS, WHOLE, REST, VECTOR, PTX,
        )  # fmt: skip
    else:
        softmax_of_rows(
            y_ptr, y_batch, y_row_stride, y_col_stride,
            x_ptr, x_batch, x_row_stride, x_col_stride,
            program * ROWS, n_rows, n_cols,
            ROWS, BLOCK, CHUNKS, WHOLE, REST, VECTOR, PTX,
        )  # fmt: skip


@triton.jit
def edge_places(first, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    # The rows and the lanes of the edges.
    if ROWS == 1:
        rows, lane = first, tl.arange(0, 2 * VECTOR)
    else:
        lane = tl.arange(0, max(2, 8 // ROWS) * VECTOR)[:, None]
        rows = first + tl.arange(0, ROWS)[None, :]
    return rows, lane


@triton.jit
def at_edges(x, ROWS: tl.constexpr):
    # A number of each row, beside its edges.
    if ROWS == 1:
        number = tl.sum(x)
    else:
        number = x[None, :]
    return number


@triton.jit
def softmax_of_rows(
    y_ptr, y_batch, y_row_stride, y_col_stride,
    x_ptr, x_batch, x_row_stride, x_col_stride,
    first, n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    VECTOR: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if STORED == tl.float64 else tl.float32
    rows = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    live = rows < n_rows
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    x_col_stride = tl.cast(x_col_stride, tl.int64)  # offsets outgrow int32
    y_col_stride = tl.cast(y_col_stride, tl.int64)
    x_row = x_batch + rows * x_row_stride  # (ROWS, 1)
    y_row = y_batch + rows * y_row_stride
    inner = n_cols
    if VECTOR > 1:
        _, inner = whole_vectors(x_row, n_cols, VECTOR)
        of_edges, lane = edge_places(first, ROWS, VECTOR)
        x_start = x_batch + of_edges * x_row_stride
        y_start = y_batch + of_edges * y_row_stride
        edge_col, on_edge = edge_columns(x_start, n_cols, lane, VECTOR)
        edges = tl.load(x_ptr + x_start + edge_col, mask=on_edge, other=-float("inf"))
        edges = widen(edges, STORED, ACC)  # (2 * VECTOR, ROWS)
        x_row = round_up(x_row, VECTOR)
        y_row = round_up(y_row, VECTOR)
    x_ptrs = x_ptr + x_row + cols * x_col_stride  # (ROWS, BLOCK)
    chunks = load_chunks(
        x_ptrs, x_col_stride, live, cols, inner, -float("inf"), BLOCK, CHUNKS, WHOLE
    )
    if REST:
        rest_cols = CHUNKS * BLOCK + tl.arange(0, REST)[None, :]
        on_rest = rest_cols < inner
        rest = tl.load(x_ptr + x_row + rest_cols, mask=on_rest, other=-float("inf"))
        rest = widen(rest, STORED, ACC)  # (ROWS, REST)
    largest = max_of_chunks(chunks, CHUNKS, STORED, ACC)  # (ROWS, BLOCK)
    row_max = tl.max(largest, axis=1)  # (ROWS,)
    if REST:
        row_max = tl.maximum(row_max, tl.max(rest, axis=1))
    if VECTOR > 1:
        row_max = tl.maximum(row_max, tl.max(edges, axis=0))
    base = row_max[:, None]
    total, kept = numerators(chunks, base, CHUNKS, STORED, ACC, PTX)
    row_sum = tl.sum(total, axis=1)
    if REST:
        rest = exponential(rest, base, STORED)
        row_sum += tl.sum(rest, axis=1)
    if VECTOR > 1:
        edges = exponential(edges, at_edges(row_max, ROWS), STORED)
        row_sum += tl.sum(edges, axis=0)
    scale = 1 / row_sum
    if VECTOR > 1:
        edges = (edges * at_edges(scale, ROWS)).to(STORED)
        tl.store(y_ptr + y_start + edge_col, edges, mask=on_edge)
    scale = scale[:, None]
    y_ptrs = y_ptr + y_row + cols * y_col_stride
    for i in tl.static_range(CHUNKS):
        y = softmax_of_chunk(kept[i], base, scale, CHUNKS, STORED, ACC, PTX)
        store_chunk(y_ptrs, y_col_stride, y, i, live, cols, inner, BLOCK, CHUNKS, WHOLE)
    if REST:
        tl.store(y_ptr + y_row + rest_cols, (rest * scale).to(STORED), mask=on_rest)


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
    REST: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    SINGLY: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    n_cols = n_cols // ALIGN * ALIGN
    dx_row_stride = dx_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    dy_row_stride = dy_row_stride // ALIGN * ALIGN
    batch, program = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    dx_batch = batch * (dx_batch_stride // ALIGN * ALIGN)
    y_batch = batch * (y_batch_stride // ALIGN * ALIGN)
    dy_batch = batch * (dy_batch_stride // ALIGN * ALIGN)
    full = n_rows // ROWS
    if SINGLY:
        n_rows = full * ROWS
    if SINGLY and program >= full:
        gradient_of_rows(
            dx_ptr, dx_batch, dx_row_stride, dx_col_stride,
            y_ptr, y_batch, y_row_stride, y_col_stride,
            dy_ptr, dy_batch, dy_row_stride, dy_col_stride,
            program + full * (ROWS - 1), n_rows + ROWS, n_cols,
            1, BLOCK, CHUNKS, WHOLE, REST, VECTOR, PTX,
        )  # fmt: skip
    else:
        gradient_of_rows(
            dx_ptr, dx_batch, dx_row_stride, dx_col_stride,
            y_ptr, y_batch, y_row_stride, y_col_stride,
            dy_ptr, dy_batch, dy_row_stride, dy_col_stride,
            program * ROWS, n_rows, n_cols,
            ROWS, BLOCK, CHUNKS, WHOLE, REST, VECTOR, PTX,
        )  # fmt: skip


@triton.jit
def gradient_of_rows(
    dx_ptr, dx_batch, dx_row_stride, dx_col_stride,
    y_ptr, y_batch, y_row_stride, y_col_stride,
    dy_ptr, dy_batch, dy_row_stride, dy_col_stride,
    first, n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    VECTOR: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if STORED == tl.float64 else tl.float32
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
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
        edge_y = tl.load(y_ptr + y_start + edge_col, mask=on_edge, other=0)
        edge_dy = tl.load(dy_ptr + dy_start + edge_col, mask=on_edge, other=0)
        edge_y, edge_dy = widen(edge_y, STORED, ACC), widen(edge_dy, STORED, ACC)
        dx_row = round_up(dx_row, VECTOR)
        y_row = round_up(y_row, VECTOR)
        dy_row = round_up(dy_row, VECTOR)
    y_ptrs = y_ptr + y_row + cols * y_col_stride  # (ROWS, BLOCK)
    dy_ptrs = dy_ptr + dy_row + cols * dy_col_stride
    ys = load_chunks(y_ptrs, y_col_stride, live, cols, inner, 0, BLOCK, CHUNKS, WHOLE)
    dys = load_chunks(
        dy_ptrs, dy_col_stride, live, cols, inner, 0, BLOCK, CHUNKS, WHOLE
    )
    if REST:
        rest_cols = CHUNKS * BLOCK + tl.arange(0, REST)[None, :]
        on_rest = rest_cols < inner
        rest_y = tl.load(y_ptr + y_row + rest_cols, mask=on_rest, other=0)
        rest_dy = tl.load(dy_ptr + dy_row + rest_cols, mask=on_rest, other=0)
        rest_y, rest_dy = widen(rest_y, STORED, ACC), widen(rest_dy, STORED, ACC)
    products = dot_of_chunks(ys, dys, CHUNKS, STORED, ACC)  # (ROWS, BLOCK)
    dot = tl.sum(products, axis=1)  # (ROWS,)
    if REST:
        dot += tl.sum(rest_y * rest_dy, axis=1)
    if VECTOR > 1:
        dot += tl.sum(edge_y * edge_dy, axis=0)
        edge_dx = to_gradient(edge_y * (edge_dy - at_edges(dot, ROWS)), STORED, DTYPE)
        tl.store(dx_ptr + dx_start + edge_col, edge_dx, mask=on_edge)
    dot = dot[:, None]
    dx_ptrs = dx_ptr + dx_row + cols * dx_col_stride
    for i in tl.static_range(CHUNKS):
        y = widen(forget(ys[i], CHUNKS, PTX), STORED, ACC)
        dy = widen(forget(dys[i], CHUNKS, PTX), STORED, ACC)
        dx = to_gradient(y * (dy - dot), STORED, DTYPE)
        store_chunk(
            dx_ptrs, dx_col_stride, dx, i, live, cols, inner, BLOCK, CHUNKS, WHOLE
        )
    if REST:
        dx = to_gradient(rest_y * (rest_dy - dot), STORED, DTYPE)
        tl.store(dx_ptr + dx_row + rest_cols, dx, mask=on_rest)


@triton.jit
def dot_of_chunks(
    ys, dys, CHUNKS: tl.constexpr, STORED: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    # Each product is added without being rounded. A compiler that may choose would choose anew
    # wherever the sum is computed, and its bits would differ.
    products = tl.zeros(ys[0].shape, ACC)
    for i in tl.static_range(CHUNKS):
        products = tl.fma(
            widen(ys[i], STORED, ACC), widen(dys[i], STORED, ACC), products
        )
    return products
