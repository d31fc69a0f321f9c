"""Kernels that work in blocks, whose traffic shows what they are only at shapes larger than these.

Each function below makes a function of tensors; its parameters are the blocks and the grid.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _bias_kernel(
    y_ptr, x_ptr, b_ptr, n_rows, n_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    width = tl.cdiv(n_cols, COLS) * COLS if PADDED else n_cols
    bias = tl.load(b_ptr + cols, mask=cols < width)
    x = tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask)
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], x + bias[None, :], mask=mask)


def add_bias(rows: int, cols: int, padded: bool = False, floor: bool = False) -> Callable:
    """y = x + bias in blocks: the bias is read once per block of rows.

    padded: the bias is read to the end of the last block. floor: the grid leaves out what is no
    whole block of rows.
    """

    def fn(x: Tensor) -> Tensor:
        (m, n), y = x.shape, torch.empty_like(x)
        bias = x.new_empty(triton.cdiv(n, cols) * cols)
        grid = m // rows if floor else triton.cdiv(m, rows), triton.cdiv(n, cols)
        if 0 not in grid:
            _bias_kernel[grid](y, x, bias, m, n, ROWS=rows, COLS=cols, PADDED=padded)
        return y

    return fn


@triton.jit
def _persistent_kernel(
    y_ptr, x_ptr, part_ptr, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS):
        for row in range(start, min(start + ROWS, n_rows)):
            x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
            tl.store(y_ptr + row * n_cols + cols, x, mask=cols < n_cols)
            total += x
    part = part_ptr + tl.program_id(0) * n_cols + cols
    tl.store(part, total, mask=cols < n_cols)


def layer_norm_backward(programs: int, rows: int = 1) -> Callable:
    """A copy and a sum over rows: each program, whose number is limited, leaves a part of it."""

    def fn(x: Tensor) -> Tensor:
        (m, n), y = x.shape, torch.empty_like(x)
        grid = min(programs, triton.cdiv(m, rows))
        parts = x.new_empty(grid, n)
        block = triton.next_power_of_2(n)
        _persistent_kernel[(grid,)](y, x, parts, m, n, ROWS=rows, BLOCK=block)
        return parts.sum(dim=0)

    return fn


@triton.jit
def _matmul_kernel(
    c_ptr, a_ptr, b_ptr, m, n, k,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    c = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, k, DEPTH):
        at = start + tl.arange(0, DEPTH)
        a_mask, b_mask = rows[:, None] < m, cols[None, :] < n
        a = tl.load(
            a_ptr + rows[:, None] * k + at[None, :], mask=a_mask & (at < k)[None, :], other=0.0
        )
        b = tl.load(
            b_ptr + at[:, None] * n + cols[None, :], mask=b_mask & (at < k)[:, None], other=0.0
        )
        c += tl.dot(a, b)
    mask = (rows < m)[:, None] & (cols < n)[None, :]
    tl.store(c_ptr + rows[:, None] * n + cols[None, :], c, mask=mask)


def matmul(rows: int, cols: int, depth: int) -> Callable:
    """A product of matrices in tiles."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        c = a.new_empty(m, n)
        grid = triton.cdiv(m, rows), triton.cdiv(n, cols)
        _matmul_kernel[grid](c, a, b, m, n, k, ROWS=rows, COLS=cols, DEPTH=depth)
        return c

    return fn


@triton.jit
def _sums_kernel(
    sums_ptr, y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, HALO: tl.constexpr, COPY: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, triton.next_power_of_2(BLOCK + 2 * HALO))
    at = block * BLOCK - HALO + cols
    mask = (cols < BLOCK + 2 * HALO) & (at >= 0) & (at < n_cols)
    x = tl.load(x_ptr + row * n_cols + at, mask=mask, other=0.0)
    if COPY:
        tl.store(y_ptr + row * n_cols + at, x, mask=mask)
    tl.store(sums_ptr + row * tl.num_programs(1) + block, tl.sum(x))


def group_scales(group: int, copy: bool = True, halo: int = 0) -> Callable:
    """A copy, as in a quantization, and one number for each group of columns.

    halo: columns on both sides of a group, which are read, too.
    """

    def fn(x: Tensor) -> Tensor:
        (m, n), y = x.shape, torch.empty_like(x)
        sums = x.new_empty(m, triton.cdiv(n, group))
        _sums_kernel[tuple(sums.shape)](sums, y, x, n, BLOCK=group, HALO=halo, COPY=copy)
        return sums

    return fn


def blur(cols: int) -> Callable:
    """Reads a halo of half a block on both sides of each block of columns."""
    return group_scales(cols, copy=False, halo=cols // 2)


def partial_sums(block: int) -> Callable:
    """A sum for each block of all elements, as the first stage of a reduction."""
    return lambda x: group_scales(block, copy=False)(x.view(1, -1))


def two_stages(first: int, second: int) -> Callable:
    """Sums for blocks, then for blocks of these."""
    return lambda x: partial_sums(second)(partial_sums(first)(x))
