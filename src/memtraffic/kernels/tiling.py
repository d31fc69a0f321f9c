"""The shape of a program: its rows, warps and stages, and what divides its rows."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import triton
from torch import Tensor

from memtraffic.gpus import Gpu

MAX_COLS = 32768  # 32 elements per thread; twice as many would spill
MAX_ROW = 2**24  # columns, where a row need not fit one program
MAX_ELEMENTS_PER_LANE = 64  # more would leave a lane too few registers
MIN_TILE_BYTES = 2048  # a program loads at least this much: several narrow rows
MIN_ASYNC_COPY_BYTES = 16  # narrower asynchronous copies are slower than loads
MAX_STAGES = 3  # a third tile in flight gains nothing more
VECTOR_BYTES = 16  # the widest access of a lane


@dataclass(frozen=True)
class Tiling:
    """The tile that a program works on, and how.

    rows, block: the shape of a tile, in elements. align: a number of elements that
    divides the width and the row strides. stages: of the loop over tiles, 1 more than
    the tiles that are loaded ahead.
    """

    rows: int
    block: int
    num_warps: int
    align: int = 1
    stages: int = 1

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        """The constants of a kernel that loops over tiles, by name, in their order."""
        return {
            "ROWS": self.rows, "BLOCK": self.block, "ALIGN": self.align, "STAGES": self.stages,
        }  # fmt: skip


def max_warps(gpu: Gpu) -> int:
    """The most warps that a program on `gpu` can have."""
    return gpu.max_threads_per_program // gpu.warp_size


def num_warps_of_row(n_cols: int, gpu: Gpu) -> int:
    """Warps of a program that holds a row: a thread holds at most 32 elements of it."""
    return max(4, min(max_warps(gpu), n_cols // 512))


def rows_and_warps(block: int, itemsize: int, most_warps: int) -> tuple[int, int]:
    """Rows and warps of a program, for rows in blocks of `block` elements: the rule.

    >>> rows_and_warps(64, 4, most_warps=32), rows_and_warps(4096, 4, most_warps=32)
    ((8, 1), (1, 4))

    itemsize: bytes of an element. most_warps: of a program, on the GPU.
    """
    rows = max(1, MIN_TILE_BYTES // (block * itemsize))
    num_warps = max(1, min(most_warps, block // 1024))
    return rows, num_warps


def tile_shape(
    n_cols: int,
    itemsize: int,
    gpu: Gpu,
    *,
    rows: int | None = None,
    num_warps: int | None = None,
) -> Tiling:
    """The tile of a program for rows of `n_cols` elements of `itemsize` bytes.

    `rows` and `num_warps` override what `rows_and_warps` says.

    >>> from memtraffic.gpus import find_gpu
    >>> tile_shape(256, 4, find_gpu("H200"))
    Tiling(rows=2, block=256, num_warps=1, align=1, stages=1)

    Raises ValueError for a number that is not a power of two, for more warps than a
    program can have, and for more than MAX_ELEMENTS_PER_LANE elements per lane.
    """
    block, most = triton.next_power_of_2(n_cols), max_warps(gpu)
    by_rule = rows_and_warps(block, itemsize, most)
    rows = by_rule[0] if rows is None else rows
    num_warps = by_rule[1] if num_warps is None else num_warps
    for name, value in (("rows", rows), ("num_warps", num_warps)):
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name} is {value}, not a power of two")
    if num_warps > most:
        raise ValueError(f"num_warps is {num_warps}, more than {most} on {gpu.product}")
    lanes = num_warps * gpu.warp_size
    if rows * block > MAX_ELEMENTS_PER_LANE * lanes:
        raise ValueError(
            f"{rows} x {block} elements on {lanes} lanes are more than "
            f"{MAX_ELEMENTS_PER_LANE} per lane"
        )
    return Tiling(rows, block, num_warps)


def common_divisor(x: Tensor, y: Tensor) -> int:
    """The largest power of two that divides width and row strides, at most 16 bytes.

    A lane can move so many elements in one access, if both addresses are multiples of
    16 bytes. It is 1 where the columns of a row are not adjacent in memory.
    """
    if x.stride(1) != 1 or y.stride(1) != 1:
        return 1
    widest = VECTOR_BYTES // x.element_size()
    return math.gcd(widest, x.shape[1], x.stride(0), y.stride(0))


def shifted_vector(tensors: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> int:
    """Elements of a 16-byte access to rows of which some start between two such addresses.

    It is 1 where all rows start at multiples of 16 bytes, or where a row of one tensor starts
    elsewhere between such addresses than the same row of another.
    """
    itemsizes = {tensor.element_size() for tensor in tensors}
    vector = VECTOR_BYTES // max(itemsizes)
    starts = [[step % vector for step in s[:-1]] for s in strides]
    alike = len(itemsizes) == 1 and all(it == starts[0] for it in starts)
    aligned = all(tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in tensors)
    return vector if alike and aligned and any(starts[0]) else 1


def choose_num_stages(tile_bytes: int, vector_bytes: int, gpu: Gpu) -> int:
    """Stages of a loop over tiles: 1, and 1 more per tile that shared memory holds.

    tile_bytes: of one tile. vector_bytes: of one access of a lane; narrow ones are not
    worth a prefetch. There is one stage, too, where prefetched tiles would wait in
    registers: they would take the place of other programs.
    """
    if vector_bytes < MIN_ASYNC_COPY_BYTES or not gpu.prefetches_to_shared_memory:
        return 1
    scratch = 1024  # bytes that the reductions of 32 warps may need
    tiles = (gpu.shared_per_program - scratch) // tile_bytes
    return 1 + max(0, min(MAX_STAGES - 1, tiles))
