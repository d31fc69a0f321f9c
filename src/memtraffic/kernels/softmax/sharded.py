"""Softmax of a matrix whose columns lie on several ranks: two kernels and one collective.

Each rank reduces its columns to a maximum and a sum per row, the ranks gather those of
all, and each normalises its own columns. With N columns on each of G ranks:

Traffic of a rank: reads 2MN + 2MG, writes MN + 2M. The collective reads 2M numbers of it
and writes 2MG. Over the link, a rank sends and receives 2M(G - 1) numbers.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.chunking import exponential, load_columns
from memtraffic.kernels.operands import check_operands
from memtraffic.kernels.softmax.rule import MAX_ROW, pass_tile
from memtraffic.torch_adapter import all_gather


@triton.jit
def sums_kernel(
    sums_ptr,  # (M, 2), packed
    x_ptr, x_row_stride, x_col_stride, n_cols,
    BLOCK: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride
    block = tl.arange(0, BLOCK)  # (BLOCK,)
    part_max = -float("inf")
    sums = tl.zeros((BLOCK,), tl.float32)  # added up once, after the loop
    for start in tl.range(0, n_cols, BLOCK):
        x = load_columns(x_ptr, x_col_stride, start + block, n_cols, -float("inf"))
        x = x.to(tl.float32)
        new_max = tl.maximum(part_max, tl.max(x, axis=0))
        base = tl.where(new_max == -float("inf"), 0, new_max)  # or -inf - -inf
        sums = sums * tl.exp(part_max - base) + exponential(x, base, STORED)
        part_max = new_max
    tl.store(sums_ptr + 2 * row, part_max)
    tl.store(sums_ptr + 2 * row + 1, tl.sum(sums, axis=0))


@triton.jit
def normalise_kernel(
    y_ptr,  # packed
    x_ptr, x_row_stride, x_col_stride,
    all_sums_ptr,  # (G, M, 2), packed
    n_rows, n_cols, n_ranks,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride
    y_ptr += row * n_cols
    ranks = tl.arange(0, RANKS)  # (RANKS,)
    at = all_sums_ptr + 2 * (ranks.to(tl.int64) * n_rows + row)
    maxima = tl.load(at, mask=ranks < n_ranks, other=-float("inf"))
    sums = tl.load(at + 1, mask=ranks < n_ranks, other=0)
    row_max = tl.max(maxima, axis=0)
    # Each sum as if it had been summed from the row's maximum.
    scale = 1 / tl.sum(sums * tl.exp(maxima - row_max), axis=0)
    block = tl.arange(0, BLOCK)
    for start in tl.range(0, n_cols, BLOCK):
        cols = start + block
        x = load_columns(x_ptr, x_col_stride, cols, n_cols, 0).to(tl.float32)
        y = exponential(x, row_max, STORED) * scale
        tl.store(y_ptr + cols, y.to(STORED), mask=cols < n_cols)


def _tile(x: Tensor) -> dict[str, int]:
    """The constants and options of a launch that goes through rows of `x` by tiles."""
    tile = pass_tile(max(1, x.shape[1]), x.element_size(), planning_gpu(x))
    return {"BLOCK": tile.block, "num_warps": tile.num_warps}


def partial_sums(x: Tensor) -> Tensor:
    """The maximum of each row of `x` and the sum of its numerators, of shape (M, 2).

    A row without columns, or of -inf alone, has the maximum -inf and the sum 0.
    """
    sums = torch.empty(x.shape[0], 2, device=x.device)
    with device_guard(x):
        sums_kernel[(x.shape[0],)](sums, x, *x.stride(), x.shape[1], **_tile(x))
    return sums


def normalise(y: Tensor, x: Tensor, all_sums: Tensor) -> Tensor:
    """Writes the softmax of the columns `x` to `y`. all_sums: of all ranks, (G, M, 2)."""
    ranks = all_sums.shape[0]
    with device_guard(x):
        normalise_kernel[(x.shape[0],)](
            y, x, *x.stride(), all_sums, *x.shape, ranks,
            RANKS=triton.next_power_of_2(ranks), **_tile(x),
        )  # fmt: skip
    return y


def sharded_softmax(x: Tensor, group: Any = None) -> Tensor:
    """Softmax of the rows of which each rank of a process group has some columns.

    x: this rank's columns, of shape (M, N), N to MAX_ROW, float32, float16 or bfloat16, of
    any strides, on a GPU or, interpreted, on the CPU. All ranks have the same M and the
    same dtype; N may differ, and be 0. group: of `torch.distributed`, by default that of all.

    Each rank of the group has to call it: it is one all-gather. Returns this rank's columns
    of the softmax, contiguous. Raises TypeError for another dtype or device, ValueError for
    another shape, RuntimeError for a tensor that requires a gradient, or where the
    all-gather fails.
    """
    y, sums = check_operands("sharded", x, MAX_ROW), partial_sums(x)
    all_sums = sums.new_empty(dist.get_world_size(group), *sums.shape)
    all_gather(all_sums.view(-1), sums.view(-1), group)
    return normalise(y, x, all_sums)
