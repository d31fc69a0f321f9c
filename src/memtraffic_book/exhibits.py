"""Variants of the kernels that exist to be shown or measured in one chapter, some of them wrong."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard
from memtraffic.kernels.softmax.op import backward

# ---- memory-wall: a first kernel, what an SM computes, what it has in flight, what a launch costs


@triton.jit
def copy_rows(y_ptr, x_ptr, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    offsets = row * row_stride + cols
    x = tl.load(x_ptr + offsets)  # memory to registers
    tl.store(y_ptr + offsets, x)  # registers to memory


def first_copy(x: Tensor) -> Tensor:
    """A copy by the first kernel of the book, a program a row, with the warps of a plain launch.

    x: of packed rows whose width is a power of two.
    """
    y = torch.empty_like(x)
    with device_guard(x):
        copy_rows[(x.shape[0],)](y, x, x.stride(0), BLOCK=x.shape[1])
    return y


@triton.jit
def _arithmetic_kernel(
    y_ptr, n_trips, WHAT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes in registers: a chain of `n_trips` times STEPS results for each of BLOCK elements.

    WHAT: "exp2", "exp" or "multiply-add". All three keep an element between 0 and 1.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = at.to(tl.float32) * 1e-9
    for _ in tl.range(n_trips):
        for _ in tl.static_range(STEPS):
            if WHAT == "exp2":
                x = tl.exp2(-x)
            elif WHAT == "exp":
                x = tl.exp(-x)
            else:
                x = x * 0.75 + 0.25
    tl.store(y_ptr + at, x)


@triton.jit
def _stream_kernel(y_ptr, x_ptr, n_tiles, n_copied, BLOCK: tl.constexpr):
    """Each program goes through the tiles that lie a grid apart, with one of them in flight.

    It copies the tiles before `n_copied`, and only reads the others. The mask is not known to the
    compiler, so that the loads are made where nothing is stored; `y` may be `x`.
    """
    elements = tl.arange(0, BLOCK)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=1):
        at = tile * BLOCK + elements  # 32 bits: for less than 2**31 elements
        x = tl.load(x_ptr + at)
        tl.store(y_ptr + at, x, mask=tile < n_copied)


@triton.jit
def _idle_kernel(x_ptr):
    """Does nothing."""


# ---- masked: what a wrong mask does


@triton.jit
def _no_other_kernel(y_ptr, x_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + tl.program_id(0) * row_stride + cols, mask=mask)  # no other
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + tl.program_id(0) * row_stride + cols, y, mask=mask)


def softmax_no_other(x: Tensor, block: int | None = None) -> Tensor:
    """A masked softmax that is wrong: it does not say what a masked element loads.

    x: of packed rows. block: the width of a program's block, by default as wide as the row needs.
    """
    y, block = torch.empty_like(x), block or triton.next_power_of_2(x.shape[1])
    with device_guard(x):
        _no_other_kernel[(x.shape[0],)](y, x, x.stride(0), x.shape[1], BLOCK=block)
    return y


def softmax_block_of_512(x: Tensor) -> Tensor:
    """A softmax that is wrong for wide rows: it computes the first 512 columns alone."""
    return softmax_no_other(x, block=512)


# ---- occupancy: loads that wait for one another


@triton.jit
def _pointer_chase_kernel(y_ptr, x_ptr, hops):
    """Follows a chain: each number that it loads is the offset of its next load."""
    at = tl.load(x_ptr)
    for _ in range(hops):
        at = tl.load(x_ptr + at)
    tl.store(y_ptr, at)


# ---- occupancy: a kernel that needs LDS


@triton.jit
def _transpose_kernel(y_ptr, x_ptr, n, SIDE: tl.constexpr):
    """Transposes one tile of a square matrix, whose numbers change lanes on the way."""
    at = tl.arange(0, SIDE)
    rows, cols = tl.program_id(0) * SIDE + at, tl.program_id(1) * SIDE + at
    x = tl.load(x_ptr + rows[:, None] * n + cols[None, :])
    tl.store(y_ptr + cols[:, None] * n + rows[None, :], tl.trans(x))


def transpose(x: Tensor) -> Tensor:
    """The transpose of a square matrix whose side is a multiple of 64, through LDS."""
    y, tiles = torch.empty_like(x), len(x) // 64
    _transpose_kernel[(tiles, tiles)](y, x, len(x), SIDE=64, num_warps=4)
    return y


# ---- backward: the gradient of a softmax, dx = y * (dy - sum(y * dy)), in two ways


def backward_ours(y: Tensor, dy: Tensor) -> Tensor:
    """What `memtraffic.softmax` computes in the backward pass."""
    return backward(dy, y, 1, y.dtype)


def backward_lines(y: Tensor, dy: Tensor) -> Tensor:
    """The formula as a line of PyTorch, which is four operations."""
    return y * (dy - (y * dy).sum(dim=1, keepdim=True))
