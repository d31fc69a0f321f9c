"""The backward of a softmax for rows that do not fit one program: split over several, or in passes.

Traffic: split, reads 2MN and writes MN; in two passes, reads 4MN and writes MN.
"""

import triton
import triton.language as tl

from memtraffic.ladder.split import collect, publish
from memtraffic.ops.rows import to_gradient

__all__ = ["passes_backward_kernel", "split_backward_kernel"]


@triton.jit
def split_backward_kernel(
    dx_ptr, dx_row_stride, dx_col_stride,
    y_ptr, y_row_stride, y_col_stride,
    dy_ptr, dy_row_stride, dy_col_stride,
    slots_ptr,
    n_rows, n_cols,
    n_parts, part_cols,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    part_cols = part_cols // ALIGN * ALIGN
    dx_row_stride = dx_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    dy_row_stride = dy_row_stride // ALIGN * ALIGN
    group, part = tl.program_id(0) // n_parts, tl.program_id(0) % n_parts
    groups = tl.num_programs(0) // n_parts
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = (cols < part_cols) & (cols < n_cols - part * part_cols)
    cols = (part * part_cols + cols).to(tl.int64)
    dx_ptr += cols * dx_col_stride  # (BLOCK,)
    y_ptr += cols * y_col_stride
    dy_ptr += cols * dy_col_stride
    row = group.to(tl.int64)
    tag = tl.program_id(0) * 0
    next_y = tl.load(y_ptr + row * y_row_stride, mask=mask, other=0)
    next_dy = tl.load(dy_ptr + row * dy_row_stride, mask=mask, other=0)
    while row < n_rows:
        y, dy = next_y.to(tl.float32), next_dy.to(tl.float32).to(STORED).to(tl.float32)
        tag += 1
        slots = slots_ptr + (group * 2 + tag % 2) * n_parts
        publish(slots + part, tl.sum(y * dy, axis=0), tag)
        next_row = row + groups
        live = mask & (next_row < n_rows)
        next_y = tl.load(y_ptr + next_row * y_row_stride, mask=live, other=0)
        next_dy = tl.load(dy_ptr + next_row * dy_row_stride, mask=live, other=0)
        dot = tl.sum(collect(slots, n_parts, tag, SLOTS), axis=0)
        dx = to_gradient(y * (dy - dot), STORED, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * dx_row_stride, dx, mask=mask)
        row = next_row


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
        dy = tl.load(dy_ptr + cols * dy_col_stride, mask=mask, other=0).to(ACC).to(STORED).to(ACC)
        dots += y * dy
    dot = tl.sum(dots, axis=1, keep_dims=True)  # (ROWS, 1)
    for start in tl.range(0, n_cols, BLOCK):
        mask = live & (start + block < n_cols)
        cols = (start + block).to(tl.int64)
        y = tl.load(y_ptr + cols * y_col_stride, mask=mask, other=0).to(ACC)
        dy = tl.load(dy_ptr + cols * dy_col_stride, mask=mask, other=0).to(ACC).to(STORED).to(ACC)
        dx = to_gradient(y * (dy - dot), STORED, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + cols * dx_col_stride, dx, mask=mask)
