"""Softmax and its backward for narrow rows that follow one another, wherever they start.

A program takes some rows as one run of numbers, and loads and stores it in whole vectors. Through
shared memory it hands each lane the columns of a row, so that a sum needs no other lane. Where each
row is loaded by itself, its lanes load a number each, and add up their numbers in five steps.

Traffic: forward reads MN and writes MN, backward reads 2MN and writes MN.
"""

import math
from collections import Counter
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
WIDEST = {(4, 1): 40, (4, 2): 224, (2, 1): 63, (2, 2): 63}
# Tiles load two or four 16-bit elements at once where all rows start at multiples of 4 or 8 bytes:
# there the widest row of the backward, and the narrowest of the forward that starts at those of 8.
WIDEST_OF_PAIRS, NARROWEST_OF_FOURS = 48, 33
RUNS, NUM_WARPS = (2048,), 4  # numbers of a program, and its warps
# In the forward of 16 bits, a lane has a whole row of so many columns at most. From FOUR_LANES
# columns on, four lanes share one, unless more than PASSES of their numbers meet in a bank.
RUNS_OF_HALVES, WIDEST_OF_LANE = (2048, 4096), 51
FOUR_LANES, RUNS_OF_FOUR, PASSES = 49, (1024,), 2
WIDEST_OF_TWO_WARPS = 22  # of the backward of 16 bits, where some lanes have no row
# By the same as `WIDEST`: below so many numbers an SM, tiles start sooner, by up to 1.2 µs. And of
# more than HALF columns: the narrower the row, the sooner a tile is slow.
FEWEST = {(4, 1): 2**11, (4, 2): 2**11, (2, 1): 2**10, (2, 2): 2**10}
HALF, FEWEST_OF_WIDER = 64, 2**14
RECIPROCAL_BITS = tl.constexpr(20)
# Blocks of columns, by the same; where lanes share a row of 16 bits, each would end with sums over
# lanes, so there is one. What takes as long as so many columns: one more block, by the tensors; the
# mask of a column; a number that is loaded and stored, by the bytes of an element.
MOST_BLOCKS = {(4, 1): 2, (4, 2): 2, (2, 1): 4, (2, 2): 1}
BLOCK_COST, MASK_COST, NUMBER_COST = {1: 3.5, 2: 50}, 0.3, {2: 2.9, 4: 1}


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
    sizes, num_warps, most_blocks = RUNS, NUM_WARPS, MOST_BLOCKS[itemsize, inputs]
    four = halves and n_cols >= FOUR_LANES and passes_of_four(n_cols) <= PASSES
    lane = halves and not four and n_cols <= WIDEST_OF_LANE  # has a whole row
    if lane:
        sizes = RUNS_OF_HALVES
    elif halves:
        sizes, most_blocks = RUNS_OF_FOUR if four else RUNS, 1
    places = fewest_places(n_cols, most_blocks, BLOCK_COST[inputs])
    step = vector // math.gcd(n_cols, vector)  # rows that are whole vectors
    choices = []
    for size in sizes:  # as many rows as fit, or a power of two
        most = (size - places) // n_cols + 1
        choices += [(size, most // step * step), (size, 2 ** (most.bit_length() - 1))]

    def cost(choice: tuple[int, int]) -> float:  # of a row
        size, rows = choice
        lanes = max(triton.next_power_of_2(rows), 64 if lane else 0)
        return (NUMBER_COST[itemsize] * size + lanes * places) / rows

    size, rows = min((it for it in choices if it[1] >= step), key=cost)
    lanes = triton.next_power_of_2(rows)
    if lane:
        num_warps = max(2, min(NUM_WARPS, lanes // 32))
    elif four or (itemsize == 2 and n_cols <= WIDEST_OF_TWO_WARPS and rows < lanes):
        num_warps = 2
    constants = {
        "ROWS": lanes, "PLACES": places, "RUN": size, "VECTOR": vector,
    }  # fmt: skip
    if inputs == 1:
        constants["SKIP"] = 2 if lane and n_cols % 2 and n_cols > NARROWEST else 1
    return Run(rows, num_warps, constants)


def passes_of_four(n_cols: int) -> int:
    """The most words of a bank of shared memory where four lanes share a row of 16-bit numbers.

    A warp has two neighbouring columns of 16 rows at a time.
    """
    words = {(row * n_cols + col) // 2 for row in range(16) for col in range(2)}
    return max(Counter(word % 32 for word in words).values())


def fewest_places(n_cols: int, most_blocks: int, block_cost: float) -> int:
    """The columns of blocks, each a power of two and the last with a mask, that take the least.

    >>> fewest_places(49, 3, 3.5), fewest_places(49, 2, 3.5)
    (49, 64)
    """

    def cost(places: int) -> float:
        masked = places & -places
        return places + MASK_COST * masked + block_cost * (places.bit_count() - 1)

    rounded = {-(-n_cols // 2**k) * 2**k for k in range(n_cols.bit_length() + 1)}
    return min((it for it in rounded if it.bit_count() <= most_blocks), key=cost)


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
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    # All rows, a row to a lane, in blocks of a power of two of columns: (columns, ROWS) each, the
    # bits of PLACES. `other` behind the last column. Lanes without a row have the last one's. With
    # SKIP, the first lanes have each SKIP-th row, the next those after them: two neighbours that
    # start with a half and with a whole word of shared memory would meet in its banks.
    blocks = ()
    for bit in tl.static_range(9):
        if PLACES & (256 >> bit):
            block = block_of_rows(
                run, n_rows, n_cols, other, PLACES, 256 >> bit, ROWS, SKIP
            )
            blocks = blocks + (block,)  # noqa: RUF005 - Triton adds tuples
    return blocks


@triton.jit
def block_of_rows(
    run, n_rows, n_cols, other,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, WIDTH * ROWS)
    lane = place % ROWS
    row = tl.minimum(lane % (ROWS // SKIP) * SKIP + lane // (ROWS // SKIP), n_rows - 1)
    col = place // ROWS + PLACES // (2 * WIDTH) * (2 * WIDTH)
    found = tl.gather(run, row * n_cols + col, 0)
    if PLACES % WIDTH == 0:  # the last one
        found = tl.where(col < n_cols, found, other)
    return tl.reshape(found, (WIDTH, ROWS))


@triton.jit
def by_row(values, ROWS: tl.constexpr, SKIP: tl.constexpr):
    # The values of lanes in the order of their rows.
    return tl.reshape(
        tl.permute(tl.reshape(values, (SKIP, ROWS // SKIP)), (1, 0)), (ROWS,)
    )


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
    PLACES: tl.constexpr,
    RUN: tl.constexpr,
    VECTOR: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    first, numbers, whole = extent(n_rows, n_cols, vectors, VECTOR)
    place = tl.arange(0, RUN)
    loaded = load_run(x_ptr + first, place, numbers, whole)  # (RUN,)
    blocks = columns_of_rows(loaded, rows, n_cols, -float("inf"), PLACES, ROWS, SKIP)
    for i in tl.static_range(len(blocks)):
        largest = tl.max(widen(blocks[i], STORED, tl.float32), axis=0)  # (ROWS,)
        if i == 0:
            row_max = largest
        else:
            row_max = tl.maximum(row_max, largest)
    for i in tl.static_range(len(blocks)):
        some = widen(blocks[i], STORED, tl.float32)
        total = tl.sum(exponential(some, row_max[None, :], STORED), axis=0)
        if i == 0:
            row_sum = total
        else:
            row_sum += total
    values = by_row(joined(row_max, 1 / row_sum), ROWS, SKIP)
    of_row = tl.gather(values, row_of(place, reciprocal, ROWS), 0)
    base, scale = parted(of_row)
    x = widen(loaded, STORED, tl.float32)
    y = (exponential(x, base, STORED) * scale).to(STORED)
    store_run(y_ptr + first, place, y, numbers, whole)


@triton.jit
def narrow_backward_kernel(
    dx_ptr, y_ptr, dy_ptr, n_rows, n_cols, rows, vectors, reciprocal,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
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
    blocks = columns_of_rows(product, rows, n_cols, 0, PLACES, ROWS, 1)
    for i in tl.static_range(len(blocks)):
        total = tl.sum(blocks[i], axis=0)  # (ROWS,)
        if i == 0:
            dot = total
        else:
            dot += total
    of_row = tl.gather(dot, row_of(place, reciprocal, ROWS), 0)
    dx = to_gradient(y * (dy - of_row), STORED, DTYPE)
    store_run(dx_ptr + first, place, dx, numbers, whole)
