"""The gradients of RMS norm with respect to its input and its weight, by programs that stay.

With `xhat = x * rstd`: `dx = rstd * (dy * weight - xhat * mean(dy * weight * xhat))`, and `dweight`
is the sum of `dy * xhat` over the rows. A program strides over rows, adds up their part of dweight
in registers, and writes that once; the parts are then added up. Long rows are split over several
programs, which tell each other their sums by `exchange`.

Traffic: reads 2MN + M, and N for the weight for each tile of rows, which the caches hold; writes
MN, and N numbers of float32 for each program, which are read again. P programs that share a row
write a word each, and read P.
"""

import triton
import triton.language as tl

from memtraffic.kernels.chunking import forget, load_chunk, store_chunk
from memtraffic.kernels.exchange import high_of, look, publish
from memtraffic.kernels.rms_norm.forward import load_weight


@triton.jit
def dot_of_row(
    dot, slots_ptr, part, n_parts,
    SLOTS: tl.constexpr,
    LOOKS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    # The sum of all parts of a row. Who waits can wait: the launch is cooperative, so the programs
    # that share a row run at once, and each publishes its part before it looks.
    publish(slots_ptr + part, dot, tl.full((), 1, tl.float32))  # a word is not 0
    slots = tl.arange(0, SLOTS)
    words = look(slots_ptr + slots, slots < n_parts, LOOKS, PTX)
    return tl.sum(high_of(words), axis=0)  # 0 where not used


@triton.jit
def rms_norm_backward_kernel(
    dx_ptr, dx_row_stride, dx_col_stride,
    parts_ptr,
    dy_ptr, dy_row_stride, dy_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    weight_ptr, weight_stride,
    rstd_ptr,
    slots_ptr,
    n_rows, n_cols,
    n_parts,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGN: tl.constexpr,
    SLOTS: tl.constexpr,
    LOOKS: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    n_cols = n_cols // ALIGN * ALIGN
    dx_row_stride = dx_row_stride // ALIGN * ALIGN
    dy_row_stride = dy_row_stride // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    dx_col_stride = tl.cast(dx_col_stride, tl.int64)  # offsets outgrow int32
    dy_col_stride = tl.cast(dy_col_stride, tl.int64)
    x_col_stride = tl.cast(x_col_stride, tl.int64)
    weight_stride = tl.cast(weight_stride, tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    every = tl.full((1, 1), True, tl.int1)
    # Programs that share a row follow one another.
    part = tl.program_id(0) % n_parts
    first = part * (BLOCK * CHUNKS)  # the part's first column
    left = n_cols - first
    weight_ptrs = weight_ptr + (first + cols) * weight_stride
    sums = ()
    for _ in tl.static_range(CHUNKS if WEIGHTED else 0):
        sums = sums + (tl.zeros((ROWS, BLOCK), ACC),)  # noqa: RUF005 - Triton adds tuples
    start, step = tl.program_id(0) // n_parts, tl.num_programs(0) // n_parts
    for tile in tl.range(start, tl.cdiv(n_rows, ROWS), step, num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
        live = rows < n_rows
        rstd = tl.load(rstd_ptr + rows, mask=live, other=0)
        dy_ptrs = dy_ptr + rows * dy_row_stride + (first + cols) * dy_col_stride
        x_ptrs = x_ptr + rows * x_row_stride + (first + cols) * x_col_stride
        xs, dys, added = (), (), ()
        products = tl.zeros((ROWS, BLOCK // VECTOR), ACC)
        for i in tl.static_range(CHUNKS):
            x = load_chunk(x_ptrs, x_col_stride, i, live, cols, left, 0, BLOCK, WHOLE)
            dy = load_chunk(dy_ptrs, dy_col_stride, i, live, cols, left, 0, BLOCK, WHOLE)
            xs, dys = xs + (x,), dys + (dy,)  # noqa: RUF005
            xhat, gradient = x.to(ACC) * rstd, dy.to(ACC)
            if WEIGHTED:
                added = added + (sums[i] + gradient * xhat,)  # noqa: RUF005
                gradient *= load_chunk(
                    weight_ptrs, weight_stride, i, every, cols, left, 0, BLOCK, WHOLE
                ).to(ACC)
            # A lane adds up its vector at once, and has registers left for dweight.
            products += tl.sum(tl.reshape(gradient * xhat, (ROWS, BLOCK // VECTOR, VECTOR)), axis=2)
        sums = added
        dot = tl.sum(products, axis=1, keep_dims=True)  # (ROWS, 1)
        if SLOTS:
            row_slots = slots_ptr + tl.cast(tile, tl.int64) * n_parts
            dot = dot_of_row(tl.sum(dot), row_slots, part, n_parts, SLOTS, LOOKS, PTX)
        mean = dot / n_cols
        dx_ptrs = dx_ptr + rows * dx_row_stride + (first + cols) * dx_col_stride
        for i in tl.static_range(CHUNKS):
            x, gradient = forget(xs[i], CHUNKS, PTX), forget(dys[i], CHUNKS, PTX)
            gradient = gradient.to(ACC)
            if WEIGHTED:
                gradient *= load_chunk(
                    weight_ptrs, weight_stride, i, every, cols, left, 0, BLOCK, WHOLE
                ).to(ACC)
            dx = rstd * (gradient - x.to(ACC) * rstd * mean)
            dx = dx.to(dx_ptr.dtype.element_ty)
            store_chunk(dx_ptrs, dx_col_stride, dx, i, live, cols, left, BLOCK, CHUNKS, WHOLE)
    if WEIGHTED:
        parts_ptr += start.to(tl.int64) * n_cols
        for i in tl.static_range(CHUNKS):
            at = first + i * BLOCK + cols
            part_sum = tl.sum(sums[i], axis=0, keep_dims=True)  # (1, BLOCK)
            tl.store(parts_ptr + at, part_sum, mask=at < n_cols)


@triton.jit
def long_rms_norm_backward_kernel(
    dx_ptr, dx_row_stride, dx_col_stride,
    parts_ptr,
    dy_ptr, dy_row_stride, dy_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    weight_ptr, weight_stride,
    rstd_ptr,
    n_rows, n_cols,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    # The part of dweight outgrows the registers, too: it is added up in memory.
    ACC: tl.constexpr = rstd_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    first = tl.program_id(0)
    parts_ptr += first.to(tl.int64) * n_cols
    for tile in tl.range(first, n_rows, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64)
        dx_row = dx_ptr + row * (dx_row_stride // ALIGN * ALIGN)
        dy_row = dy_ptr + row * (dy_row_stride // ALIGN * ALIGN)
        x_row = x_ptr + row * (x_row_stride // ALIGN * ALIGN)
        rstd = tl.load(rstd_ptr + row)
        products = tl.zeros((BLOCK,), ACC)
        for start in tl.range(0, n_cols, BLOCK):
            cols = (start + tl.arange(0, BLOCK)).to(tl.int64)
            mask = cols < n_cols
            xhat = tl.load(x_row + cols * x_col_stride, mask=mask, other=0).to(ACC) * rstd
            dy = tl.load(dy_row + cols * dy_col_stride, mask=mask, other=0).to(ACC)
            if WEIGHTED:
                dy *= load_weight(weight_ptr, weight_stride, cols, n_cols, 0, 0).to(ACC)
            products += dy * xhat
        mean = tl.sum(products, axis=0) / n_cols
        for start in tl.range(0, n_cols, BLOCK):
            cols = (start + tl.arange(0, BLOCK)).to(tl.int64)
            mask = cols < n_cols
            xhat = tl.load(x_row + cols * x_col_stride, mask=mask, other=0).to(ACC) * rstd
            dy = tl.load(dy_row + cols * dy_col_stride, mask=mask, other=0).to(ACC)
            if WEIGHTED:
                part = tl.load(parts_ptr + cols, mask=mask & (row > first), other=0)
                tl.store(parts_ptr + cols, part + dy * xhat, mask=mask)
                dy *= load_weight(weight_ptr, weight_stride, cols, n_cols, 0, 0).to(ACC)
            dx = (rstd * (dy - xhat * mean)).to(dx_ptr.dtype.element_ty)
            tl.store(dx_row + cols * dx_col_stride, dx, mask=mask)
