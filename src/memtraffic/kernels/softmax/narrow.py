"""Softmax and its backward for narrow rows that follow one another, wherever they start.

A program takes some rows as one run of numbers, and loads and stores it in whole vectors. Through
shared memory it hands each lane the columns of a row, so that a sum needs no other lane. Where each
row is loaded by itself, its lanes load a number each, and add up their numbers in five steps.

Traffic: forward reads MN and writes MN, backward reads 2MN and writes MN.
"""

import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from memtraffic.kernels.chunking import exponential, widen
from memtraffic.kernels.softmax.rows import to_gradient
from memtraffic.kernels.tiling import VECTOR_BYTES

NARROWEST = 3  # columns, below which `RECIPROCAL_BITS` are too many
# By the bytes of an element and the tensors that a program loads, from sweeps on an H200: the
# widest row that is not faster in a tile.
WIDEST = {(4, 1): 72, (4, 2): 224, (2, 1): 63, (2, 2): 63}
# Tiles load two or four 16-bit elements at once where all rows start at multiples of 4 or 8 bytes:
# there the widest row of the backward, and the narrowest of the forward that starts at those of 8.
WIDEST_OF_PAIRS, NARROWEST_OF_FOURS = 48, 33
# Numbers of a program, and its warps; in the forward of 16 bits, for rows of fewer columns than so
# many.
RUN, NUM_WARPS = 2048, 4
RUNS_OF_HALVES = {22: (1024, 2), 40: (2048, 2), math.inf: (1024, 2)}
# By the same: below so many numbers an SM, tiles start sooner, by up to 1.2 µs. And of more than
# HALF columns: the narrower the row, the sooner a tile is slow.
FEWEST = {(4, 1): 2**10, (4, 2): 2**11, (2, 1): 2**9, (2, 2): 2**10}
HALF, FEWEST_OF_WIDER = 64, 2**14
RECIPROCAL_BITS = tl.constexpr(20)
FULL = 0.6  # of a power of two


@dataclass(frozen=True)
class Run:
    """The rows of a program, its warps, and the constants of a kernel."""

    rows: int
    num_warps: int
    constants: dict[str, Any]


def narrow_run(
    n_cols: int, itemsize: int, inputs: int, numbers_per_sm: float = math.inf
) -> Run | None:
    """The rows of a program; None where they are faster in a tile of their own.

    itemsize: bytes of an element, 2 or 4. inputs: tensors that a program loads, 1 in the forward
    and 2 in the backward. numbers_per_sm: elements of one tensor over the SMs of the GPU.
    """
    fewest = FEWEST[itemsize, inputs] if n_cols <= HALF else FEWEST_OF_WIDER
    if numbers_per_sm < fewest:
        return None
    vector = VECTOR_BYTES // itemsize
    narrowest, widest = NARROWEST, WIDEST[itemsize, inputs]
    halves = itemsize == 2 and inputs == 1
    if itemsize == 2 and n_cols % 4 == 0:
        narrowest = NARROWEST_OF_FOURS if halves else widest + 1
    elif itemsize == 2 and n_cols % 2 == 0 and not halves:
        widest = WIDEST_OF_PAIRS
    if not narrowest <= n_cols <= widest or n_cols % vector == 0:
        return None
    size, num_warps = RUN, NUM_WARPS
    if halves:
        size, num_warps = next(
            it for most, it in RUNS_OF_HALVES.items() if n_cols < most
        )
    # A row's columns are a power of two, and a second one where that leaves fewer places empty.
    width, rest = triton.next_power_of_2(n_cols), 0
    if n_cols <= FULL * width:
        width //= 2
        rest = triton.next_power_of_2(n_cols - width)
    # As many rows as fit, or a power of two: what leaves fewer places and lanes without a number.
    most = (size - width - rest) // n_cols + 1
    step = vector // math.gcd(n_cols, vector)  # rows that are whole vectors
    choices = [most // step * step, 2 ** (most.bit_length() - 1)]

    def waste(rows: int) -> float:
        return (size + triton.next_power_of_2(rows) * (width + rest)) / rows

    rows = min((it for it in choices if it >= step), key=waste)
    lanes = triton.next_power_of_2(rows)
    return Run(
        rows,
        num_warps,
        {"ROWS": lanes, "WIDTH": width, "REST": rest, "RUN": size, "VECTOR": vector},
    )


def reciprocal(n_cols: int) -> int:
    """The number that divides by `n_cols`: `i * reciprocal >> 20` is the row of number `i`."""
    return -(-(2**RECIPROCAL_BITS.value) // n_cols)


@triton.jit
def extent(n_rows, n_cols, vectors, VECTOR: tl.constexpr):
    # Of this program: its first number, how many it has, and how many of them whole vectors hold.
    first = tl.program_id(0).to(tl.int64) * (vectors * VECTOR)
    left = n_rows.to(tl.int64) * n_cols - first
    whole = tl.minimum(left // VECTOR, vectors).to(tl.int32) * VECTOR
    return first, tl.minimum(left, vectors * VECTOR).to(tl.int32), whole


@triton.jit
def load_run(ptr, place, numbers, whole):
    run = tl.load(ptr + place, mask=place < whole, other=0)
    if whole < numbers:  # the last rows of all may end inside of a vector
        rest = tl.load(ptr + place, mask=(place >= whole) & (place < numbers), other=0)
        run = tl.where(place < whole, run, rest)
    return run


@triton.jit
def store_run(ptr, place, run, numbers, whole):
    tl.store(ptr + place, run, mask=place < whole)
    if whole < numbers:
        tl.store(ptr + place, run, mask=(place >= whole) & (place < numbers))


@triton.jit
def columns_of_rows(
    run, n_rows, n_cols, other,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    # (WIDTH, ROWS): columns of all rows from column FIRST on, a row to a lane. FULL: each row has
    # them all; lanes without a row have the last one's.
    place = tl.arange(0, WIDTH * ROWS)
    row, col = tl.minimum(place % ROWS, n_rows - 1), place // ROWS + FIRST
    found = tl.gather(run, row * n_cols + col, 0)
    if not FULL:
        found = tl.where(col < n_cols, found, other)
    return tl.reshape(found, (WIDTH, ROWS))


@triton.jit
def row_of(place, reciprocal, ROWS: tl.constexpr):
    # Numbers behind the last row have one, too, which does not matter.
    return ((place * reciprocal) >> RECIPROCAL_BITS) & (ROWS - 1)


@triton.jit
def joined(one, other):
    # Two numbers in a word, so that one load from shared memory finds both.
    upper = one.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return upper | (other.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def parted(word):
    one = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return one, word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def narrow_kernel(
    y_ptr, x_ptr, n_rows, n_cols, rows, vectors, reciprocal,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    RUN: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    first, numbers, whole = extent(n_rows, n_cols, vectors, VECTOR)
    place = tl.arange(0, RUN)
    loaded = load_run(x_ptr + first, place, numbers, whole)  # (RUN,)
    low = -float("inf")
    some = columns_of_rows(loaded, rows, n_cols, low, 0, WIDTH, REST > 0, ROWS)
    some = widen(some, STORED, tl.float32)
    row_max = tl.max(some, axis=0)  # (ROWS,)
    if REST:
        others = columns_of_rows(loaded, rows, n_cols, low, WIDTH, REST, False, ROWS)
        others = widen(others, STORED, tl.float32)
        row_max = tl.maximum(row_max, tl.max(others, axis=0))
    row_sum = tl.sum(exponential(some, row_max[None, :], STORED), axis=0)
    if REST:
        row_sum += tl.sum(exponential(others, row_max[None, :], STORED), axis=0)
    of_row = tl.gather(joined(row_max, 1 / row_sum), row_of(place, reciprocal, ROWS), 0)
    base, scale = parted(of_row)
    x = widen(loaded, STORED, tl.float32)
    y = (exponential(x, base, STORED) * scale).to(STORED)
    store_run(y_ptr + first, place, y, numbers, whole)


@triton.jit
def narrow_backward_kernel(
    dx_ptr, y_ptr, dy_ptr, n_rows, n_cols, rows, vectors, reciprocal,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    RUN: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    first, numbers, whole = extent(n_rows, n_cols, vectors, VECTOR)
    place = tl.arange(0, RUN)  # (RUN,)
    y = widen(load_run(y_ptr + first, place, numbers, whole), STORED, tl.float32)
    dy = widen(load_run(dy_ptr + first, place, numbers, whole), STORED, tl.float32)
    product = y * dy
    some = columns_of_rows(product, rows, n_cols, 0, 0, WIDTH, REST > 0, ROWS)
    dot = tl.sum(some, axis=0)  # (ROWS,)
    if REST:
        others = columns_of_rows(product, rows, n_cols, 0, WIDTH, REST, False, ROWS)
        dot += tl.sum(others, axis=0)
    of_row = tl.gather(dot, row_of(place, reciprocal, ROWS), 0)
    dx = to_gradient(y * (dy - of_row), STORED, DTYPE)
    store_run(dx_ptr + first, place, dx, numbers, whole)
