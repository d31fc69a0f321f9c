"""A row, or a part of one, in chunks: each is what the lanes of a program load at once.

Each lane holds the same places of all chunks, so what is added up over chunks needs no
other lane: one reduction over the lanes is left for each row. And a row of 12,672
columns is 7 chunks of 2048, where one block would have to be 16,384 wide.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def divisible(x, ALIGN: tl.constexpr):
    # No value changes, but the compiler can now prove that ALIGN divides it.
    return x // ALIGN * ALIGN


@triton.jit
def at_columns(row_ptr, col_stride, cols, start=0):
    col_stride = tl.cast(col_stride, tl.int64)  # offsets outgrow int32
    return row_ptr + cols * col_stride + start * col_stride


@triton.jit
def load_columns(row_ptr, col_stride, cols, n_cols, other):
    return tl.load(at_columns(row_ptr, col_stride, cols), mask=cols < n_cols, other=other)


@triton.jit
def load_chunks(
    row_ptr, col_stride, cols, n_cols, other,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    # The first WHOLE chunks lie inside of the row, and are loaded without a mask.
    chunks = ()
    for i in tl.static_range(CHUNKS):
        at = at_columns(row_ptr, col_stride, cols, i * BLOCK)
        if i < WHOLE:
            chunk = tl.load(at)
        else:
            chunk = tl.load(at, mask=cols < n_cols - i * BLOCK, other=other)
        chunks = chunks + (chunk,)  # noqa: RUF005 - Triton adds tuples
    return chunks


@triton.jit
def store_chunk(
    row_ptr, col_stride, value, i: tl.constexpr, cols, n_cols,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    at = at_columns(row_ptr, col_stride, cols, i * BLOCK)
    if i < WHOLE:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=cols < n_cols - i * BLOCK)


@triton.jit
def round_up(x, FACTOR: tl.constexpr):
    return (x + FACTOR - 1) // FACTOR * FACTOR


@triton.jit
def whole_vectors(start, n_cols, VECTOR: tl.constexpr):
    # A row starts anywhere. From its first aligned address on, it is loaded in whole vectors: the
    # columns before them, and those that they hold together.
    head = (round_up(start, VECTOR) - start).to(tl.int32)
    return head, (n_cols - head) // VECTOR * VECTOR


@triton.jit
def edges_of(
    batch, row_stride, first, n_rows, n_cols,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    # The columns before and after whole vectors, fewer than VECTOR each, are loaded one by one: of
    # 2 * VECTOR lanes, the first half has those before them. Returns the rows, the columns, and
    # whether there is such a column. A matrix of fewer elements than lanes is cheap to load, and
    # Triton loads it again rather than hand it from lane to lane: of one row they are a vector, of
    # two a matrix (4 * VECTOR, 2).
    if ROWS == 1:
        rows, lane = first, tl.arange(0, 2 * VECTOR)
    else:
        lane = tl.arange(0, max(2, 8 // ROWS) * VECTOR)[:, None]
        rows = first + tl.arange(0, ROWS)[None, :]
    head, inner = whole_vectors(batch + rows * row_stride, n_cols, VECTOR)
    before = lane < VECTOR
    col = lane + tl.where(before, 0, head + inner - VECTOR)
    on_edge = col < tl.where(before, head, n_cols)
    if ROWS > 1:
        on_edge = on_edge & (rows < n_rows)
    return rows, col, on_edge


@triton.jit
def load_edges(ptrs, on_edge, STORED: tl.constexpr):
    return widen(tl.load(ptrs, mask=on_edge, other=-float("inf")), STORED)


@triton.jit
def at_edges(x, ROWS: tl.constexpr):
    # A number of each row, beside its edges.
    return tl.sum(x) if ROWS == 1 else x[None, :]


@triton.jit
def widen(x, STORED: tl.constexpr):
    # As PyTorch does, a matrix is first converted to the result's dtype, by way of ACC.
    ACC: tl.constexpr = tl.float64 if STORED == tl.float64 else tl.float32
    return x.to(ACC).to(STORED).to(ACC)


@triton.jit
def forget(chunk, CHUNKS: tl.constexpr, PTX: tl.constexpr):
    # Numbers of 16 bits are kept as they are, two to a register, and converted each
    # time they are used. A compiler would convert them once, and need twice the
    # registers, but it cannot know that this instruction changes nothing.
    if PTX and CHUNKS > 1 and chunk.dtype.primitive_bitwidth == 16:
        chunk = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [chunk], dtype=chunk.dtype, is_pure=False, pack=2
        )
    return chunk


@triton.jit
def exponential(x, base, STORED: tl.constexpr):
    # Where the result has 16 bits, a numerator under 2**-126 may be 0: tl.exp takes
    # three more instructions to get it right.
    if STORED.primitive_bitwidth == 16:
        return tl.exp2((x - base) * LOG2E)
    return tl.exp(x - base)


@triton.jit
def max_of_chunks(chunks, CHUNKS: tl.constexpr, STORED: tl.constexpr):
    largest = widen(chunks[0], STORED)
    for i in tl.static_range(1, CHUNKS):
        largest = tl.maximum(largest, widen(chunks[i], STORED))
    return largest


@triton.jit
def numerators(
    chunks, base,
    CHUNKS: tl.constexpr,
    STORED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    # The sum of the numerators, and what `softmax_of_chunk` needs of them: where the
    # matrix has 16 bits and several chunks, the chunks again; otherwise the numerators.
    AGAIN: tl.constexpr = chunks[0].dtype.primitive_bitwidth == 16 and CHUNKS > 1
    total, kept = 0.0, ()
    for i in tl.static_range(CHUNKS):
        chunk = forget(chunks[i], CHUNKS, PTX)
        numerator = exponential(widen(chunk, STORED), base, STORED)
        total += numerator
        kept = kept + (chunk if AGAIN else numerator,)  # noqa: RUF005
    return total, kept


@triton.jit
def softmax_of_chunk(
    kept, base, scale,
    CHUNKS: tl.constexpr,
    STORED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    if kept.dtype.primitive_bitwidth == 16 and CHUNKS > 1:
        x = widen(forget(kept, CHUNKS, PTX), STORED)
        kept = exponential(x, base, STORED)
    return (kept * scale).to(STORED)
