"""Row softmax in chunks: a program holds a wide row as several blocks, or several narrow rows.

Traffic: reads MN, writes MN. Ends where a row outgrows one program's registers.
Only the last chunk of a row has dead elements, and 16-bit numbers share registers.

Where VECTOR is over 1, rows start between multiples of 16 bytes. From its first such
multiple on, each is loaded in whole vectors; the columns before and after those, its
edges, are loaded one by one (`chunking.py`).
"""

import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.chunking import (
    at_edges,
    divisible,
    edges_of,
    exponential,
    load_chunks,
    load_edges,
    max_of_chunks,
    numerators,
    round_up,
    softmax_of_chunk,
    store_chunk,
    whole_vectors,
)
from memtraffic.kernels.operands import check_operands, common_divisor, shifted_vector
from memtraffic.kernels.softmax.rule import MAX_COLS, row_tile, tile_constants


@triton.jit
def softmax_kernel(
    y_ptr, y_batch_stride, y_row_stride, y_col_stride,
    x_ptr, x_batch_stride, x_row_stride, x_col_stride,
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
    n_cols = divisible(n_cols, ALIGN)
    batch, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * ROWS
    x_batch = batch * divisible(x_batch_stride, ALIGN)
    y_batch = batch * divisible(y_batch_stride, ALIGN)
    rows = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    x_row = x_batch + rows * divisible(x_row_stride, ALIGN)
    y_row = y_batch + rows * divisible(y_row_stride, ALIGN)
    inner = n_cols
    if VECTOR > 1:
        _, inner = whole_vectors(x_row, n_cols, VECTOR)
        edge_rows, edge_col, on_edge = edges_of(
            x_batch, x_row_stride, first, n_rows, n_cols, ROWS, VECTOR
        )
        x_edges = x_ptr + x_batch + edge_rows * x_row_stride + edge_col
        y_edges = y_ptr + y_batch + edge_rows * y_row_stride + edge_col
        edges = load_edges(x_edges, on_edge, STORED)  # (2 * VECTOR, ROWS)
        x_row = round_up(x_row, VECTOR)
        y_row = round_up(y_row, VECTOR)
    inner = tl.where(rows < n_rows, inner, 0)  # past the last row there is no column
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    chunks = load_chunks(
        x_ptr + x_row, x_col_stride, cols, inner, -float("inf"), BLOCK, CHUNKS, WHOLE
    )
    largest = max_of_chunks(chunks, CHUNKS, STORED)  # (ROWS, BLOCK)
    row_max = tl.max(largest, axis=1)  # (ROWS,)
    if VECTOR > 1:
        row_max = tl.maximum(row_max, tl.max(edges, axis=0))
    base = row_max[:, None]
    total, kept = numerators(chunks, base, CHUNKS, STORED, PTX)
    row_sum = tl.sum(total, axis=1)
    if VECTOR > 1:
        edges = exponential(edges, at_edges(row_max, ROWS), STORED)
        row_sum += tl.sum(edges, axis=0)
    scale = 1 / row_sum
    if VECTOR > 1:
        edges = (edges * at_edges(scale, ROWS)).to(STORED)
        tl.store(y_edges, edges, mask=on_edge)
    for i in tl.static_range(CHUNKS):
        y = softmax_of_chunk(kept[i], base, scale[:, None], CHUNKS, STORED, PTX)
        store_chunk(y_ptr + y_row, y_col_stride, y, i, cols, inner, BLOCK, WHOLE)


def softmax(x: Tensor) -> Tensor:
    """Softmax of each row of `x`, of any width to MAX_COLS. See book/chunks.ipynb.

    x: tensor of shape (M, N), float32, float16 or bfloat16, of any strides, on a GPU
    or, interpreted, on the CPU. Returns a new tensor of x's shape and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape, and for
    rows that no program of the GPU holds, RuntimeError for a tensor that requires a
    gradient.
    """
    y = check_operands("chunks", x, MAX_COLS)
    if not x.numel():
        return y
    (n_rows, n_cols), gpu = x.shape, planning_gpu(x)
    tile = row_tile(n_cols, x.element_size(), 1, gpu, shifted_vector((y, x)))
    if tile is None:
        raise ValueError(
            f"chunks: {n_cols} columns do not fit a program of an {gpu.product}"
        )
    with device_guard(x):
        softmax_kernel[(triton.cdiv(n_rows, tile.rows), 1)](
            y, 0, *y.stride(), x, 0, *x.stride(), n_rows, n_cols,
            **tile_constants(tile, n_rows, n_cols, common_divisor(x, y), gpu),
            num_warps=tile.num_warps,
        )  # fmt: skip
    return y
