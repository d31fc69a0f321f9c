"""Which kernel a softmax or its backward takes, and with what tiles: the rule, and its plans."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul
from typing import Any

import torch
import triton
from torch import Tensor

from memtraffic.device import planning_gpu
from memtraffic.gpus import Gpu
from memtraffic.kernels.launch import Launch, takes_ptx
from memtraffic.kernels.softmax.long_backward import (
    passes_backward_kernel,
    split_backward_kernel,
)
from memtraffic.kernels.softmax.narrow import (
    narrow_backward_kernel,
    narrow_kernel,
    narrow_run,
    reciprocal,
)
from memtraffic.kernels.softmax.online import online_kernel, online_tile
from memtraffic.kernels.softmax.rows import softmax_backward_kernel, softmax_kernel
from memtraffic.kernels.softmax.split import (
    TooManyPrograms,
    best_split,
    split_kernel,
    split_launch,
)
from memtraffic.kernels.tiling import VECTOR_BYTES, shifted_vector

MAX_BATCHES = 65535  # of a grid's second dimension
COLUMN_TILE = 8192  # elements of a tile whose rows are adjacent in memory, at most
SPLIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # a sum fits half a word

Run = Callable[..., None]


# By the bytes of an element and the tensors that a program holds, 1 in the forward and 2 in the
# backward, from a sweep of shapes on an H200: the widest row, in columns, of each number of warps.
WARPS = {
    (4, 1): {2: 4096, 4: 8192, 8: 14336, 16: 32768},
    (2, 1): {2: 6144, 4: 16384, 8: 32768},
    (8, 1): {2: 2048, 4: 4096, 8: 8192, 16: 16384},
    (4, 2): {4: 3072, 8: 14336, 16: 16384},
    (2, 2): {2: 1536, 4: 6144, 8: 24576, 16: 28672},
    (8, 2): {2: 1024, 4: 2048, 8: 4096, 16: 8192},
}
SHIFTED = {(2, 1): (8, 51200)}  # wider ones that start between multiples of 16 bytes
# Rows that would fit a program, and are faster over several: the narrowest of a kind, and the bytes
# of one where there are fewer rows than SMs.
SPLIT_FROM, SPLIT_BYTES = {(4, 1): 24577}, 36 * 2**10
# Narrow rows take a warp each: the rows of a program, and the narrowest and the widest such row.
ONE_WARP = {(2, 1): (4, 257, 1792), (2, 2): (4, 257, 768), (4, 2): (1, 257, 512)}
# Narrower ones share one, or two: the widest, and the widest that is shifted.
NARROW = {(4, 1): (512, 512), (4, 2): (256, 256)}
NARROW_OTHERS = 256, 512
# 16-bit rows that are shifted, from this width on, are loaded in whole vectors. By the columns of a
# row with its padding, up to some: the rows and the warps of a program.
SHIFTED_FROM = 65
SHIFTED_ROWS = {
    (2, 1): {96: (8, 1), 128: (8, 2), 160: (8, 1), 192: (8, 2), 640: (4, 2)},
    (2, 2): {79: (8, 1), 136: (8, 2), 384: (4, 2), 512: (2, 2)},
}
# Where a power of two may leave many places of 16-bit rows empty, eight lanes take a row, in chunks
# of a vector each: the narrowest and the widest such row, which is not shifted.
EIGHT_LANES, EIGHT_VECTORS = (129, 320), 8 * VECTOR_BYTES // 2
# Of a row with its padding. Where the forward loads 8 bytes or more at a time, the narrowest do
# with one.
TWO_WARPS_BYTES = 1024
LANE_BYTES = 64  # of each tensor
# By kind, block and `shifted`, where other bytes of a lane are faster.
LANE_BYTES_OF = {(4, 1, 128, True): 128, (2, 1, 64, True): 32, (2, 2, 64, False): 32}
FEW_BYTES = 2**14  # an SM
# Of tensors of fewer bytes an SM, the elements in a lane: such a program is short, and starts soon.
LANE_ELEMENTS_OF_FEW = {2**11: 4, 2**13: 8}
# Rows of a tile, up to which those that do not fill one take a program each.
MOST_SINGLY = 64
WIDE = 8  # warps, with which a lane of the forward takes two vectors of a chunk
# Bytes of an element, whole chunks and warps of a forward of which ptxas spills a register. It does
# not if it is told how many registers there are, and then chooses another number elsewhere.
SPILLING = {(4, 14, 2), (4, 14, 4)}
MAX_REGISTERS = 255  # of a lane, on NVIDIA's GPUs


@dataclass(frozen=True)
class Tile:
    """Rows of a program, the columns of a row in chunks of `block`, and warps."""

    rows: int
    block: int
    chunks: int
    num_warps: int


@dataclass(frozen=True)
class ShiftedTile(Tile):
    """A tile of several rows that start anywhere, and are loaded in whole vectors.

    rest: columns of a narrower chunk behind the others, 0 if there is none.
    """

    rest: int


def softmax_tile(
    n_rows: int,
    n_cols: int,
    itemsize: int,
    inputs: int,
    gpu: Gpu,
    shifted: bool = False,
) -> Tile | None:
    """The rule: the tile of a program of a softmax; None if several programs share a row.

    n_rows: of all programs. The others: as for `row_tile`.
    """
    row_bytes, kind = n_cols * itemsize, (itemsize, inputs)
    few = n_rows < gpu.num_sms and row_bytes >= SPLIT_BYTES
    if itemsize < 8 and (few or n_cols >= SPLIT_FROM.get(kind, n_cols + 1)):
        return None
    sm_bytes = n_rows * triton.next_power_of_2(n_cols) * itemsize / gpu.num_sms
    return row_tile(n_cols, itemsize, inputs, gpu, shifted, sm_bytes)


def row_tile(
    n_cols: int,
    itemsize: int,
    inputs: int,
    gpu: Gpu,
    shifted: bool = False,
    sm_bytes: float = math.inf,
) -> Tile | None:
    """The tile of a program that has whole rows of `n_cols` columns; None if they do not fit.

    itemsize: bytes of an element. inputs: tensors that the program holds, 1 forward, 2 backward.
    shifted: rows start between multiples of 16 bytes, see `shifted_vector`. sm_bytes: those of one
    tensor's rows, each padded to a power of two, an SM; few narrow rows take smaller programs.

    >>> from memtraffic.gpus import find_gpu
    >>> row_tile(12672, 4, 1, find_gpu("H200"))
    Tile(rows=1, block=2048, chunks=7, num_warps=8)
    """
    block, kind = triton.next_power_of_2(n_cols), (itemsize, inputs)
    if (
        itemsize == 2
        and not shifted
        and EIGHT_LANES[0] <= n_cols <= EIGHT_LANES[1]
        and sm_bytes >= FEW_BYTES
    ):
        chunks = triton.cdiv(n_cols, EIGHT_VECTORS)
        return Tile(gpu.warp_size // 8, EIGHT_VECTORS, chunks, 1)
    if shifted and n_cols >= SHIFTED_FROM and (tile := shifted_tile(n_cols, kind, gpu)):
        return tile
    if n_cols <= NARROW.get(kind, NARROW_OTHERS)[shifted]:
        row_bytes = block * itemsize
        lane_bytes = LANE_BYTES_OF.get((*kind, block, shifted), LANE_BYTES)
        num_warps = 2 if row_bytes >= TWO_WARPS_BYTES else 1
        few = (it for most, it in LANE_ELEMENTS_OF_FEW.items() if sm_bytes < most)
        if elements := next(few, 0):
            lane_bytes = elements * itemsize
        rows = max(1, lane_bytes * gpu.warp_size * num_warps // row_bytes)
        if (
            row_bytes == TWO_WARPS_BYTES
            and inputs == 1
            and n_cols * itemsize % 8 == 0
            and sm_bytes >= FEW_BYTES
        ):
            num_warps = 1
        return Tile(rows, block, 1, num_warps)
    rows, narrowest, widest = ONE_WARP.get(kind, (1, n_cols + 1, 0))
    if narrowest <= n_cols <= widest:
        rows = num_warps = 1 if shifted else rows  # a row of its own can be shifted
    else:
        rows = 1
        fitting = (warps for warps, widest in WARPS[kind].items() if n_cols <= widest)
        num_warps = next(fitting, 0)
        if not num_warps and shifted and n_cols <= SHIFTED.get(kind, (0, 0))[1]:
            num_warps = SHIFTED[kind][0]
    # On a GPU of wider warps as many lanes, in fewer warps.
    lanes = max(num_warps * 32, gpu.warp_size)
    if not num_warps or lanes > gpu.max_threads_per_program:
        return None
    # In bfloat16, two vectors were slower where rows are shifted.
    takes_two = kind == (4, 1) or (kind == (2, 1) and not shifted)
    vectors = 2 if takes_two and num_warps == WIDE else 1
    block = vectors * VECTOR_BYTES // itemsize * lanes // rows
    return Tile(rows, block, triton.cdiv(n_cols, block), lanes // gpu.warp_size)


def shifted_tile(n_cols: int, kind: tuple[int, int], gpu: Gpu) -> ShiftedTile | None:
    """The tile of several rows that start anywhere; None where another tile is faster.

    A row is a power of two of columns that it has wherever it starts, and another one of those
    behind them. kind: bytes of an element, and inputs.

    >>> from memtraffic.gpus import find_gpu
    >>> shifted_tile(77, (2, 1), find_gpu("H200"))
    ShiftedTile(rows=8, block=64, chunks=1, num_warps=1, rest=8)
    """
    narrowest, widest = in_vectors(n_cols, VECTOR_BYTES // kind[0])
    block = 1 << narrowest.bit_length() - 1
    rest = triton.next_power_of_2(widest - block) if widest > block else 0
    choices = SHIFTED_ROWS.get(kind, {}).items()
    rows, num_warps = next((it for most, it in choices if block + rest <= most), (0, 0))
    if not rows:
        return None
    return ShiftedTile(rows, block, 1, triton.cdiv(32 * num_warps, gpu.warp_size), rest)


def column_tile(n_cols: int, n_rows: int) -> Tile | None:
    """The tile where the rows are adjacent in memory, not the columns; None if none fits."""
    block = triton.next_power_of_2(n_cols)
    rows = min(triton.next_power_of_2(n_rows), max(8, COLUMN_TILE // block // 2), 64)
    if rows * block > 4 * COLUMN_TILE:
        return None
    return Tile(rows, block, 1, max(1, min(16, rows * block // 1024)))


# ---- views


def as_rows(tensors: Sequence[Tensor], dim: int) -> tuple[list[int], list[list[int]]]:
    """Tensors of one shape as batches of matrices whose rows lie along `dim`.

    Returns the sizes, (..., batch, M, N), and each tensor's strides. Dimensions that follow one
    another in all of the tensors are joined, so there are few. The order of rows is that of the
    last tensor's memory.
    """
    shape, last = tensors[-1].shape, tensors[-1]
    others = [i for i in range(len(shape)) if i != dim and shape[i] != 1]
    sizes: list[int] = []
    steps: list[list[int]] = []  # of each size, those of the tensors
    for i in sorted(others, key=last.stride, reverse=True):
        here = [x.stride(i) for x in tensors]
        if steps and steps[-1] == [shape[i] * step for step in here]:
            sizes[-1] *= shape[i]
            steps[-1] = here
        else:
            sizes.append(shape[i])
            steps.append(here)
    missing = max(0, 2 - len(sizes))
    sizes = [1] * missing + sizes + [shape[dim]]
    steps = [[0] * len(tensors)] * missing + steps + [[x.stride(dim) for x in tensors]]
    return sizes, list(map(list, zip(*steps, strict=True)))


class Slices:
    """Runs a function on each slice of tensors with many dimensions.

    sizes, strides: of the tensors. outer: how many dimensions a slice does not have.
    """

    def __init__(
        self, run: Run, sizes: list[int], strides: list[list[int]], outer: int
    ) -> None:
        self._run, self._sizes = run, sizes[outer:]
        self._strides = [s[outer:] for s in strides]
        self._offsets = [
            [sum(map(mul, index, s)) for s in strides]
            for index in product(*map(range, sizes[:outer]))
        ]

    def __call__(self, *tensors: Tensor) -> None:
        """Calls the function with the slices of each tensor, one after the other."""
        for offsets in self._offsets:
            slices = zip(tensors, self._strides, offsets, strict=True)
            self._run(*(
                x.as_strided(self._sizes, s, x.storage_offset() + offset)
                for x, s, offset in slices
            ))  # fmt: skip


# ---- plans


def plan(run: Run, tensors: Sequence[Tensor], dim: int, backward: bool) -> Run:
    """What computes a softmax, or its backward, into the first of `tensors` from the others.

    tensors: of one shape. run: what does the same for a part of the tensors
    along their last dimension; it is called where one launch cannot reach all rows.
    """
    if not tensors[0].numel():
        return lambda *tensors: None
    if not tensors[0].dim():
        tensors = [x.view(1) for x in tensors]
    sizes, strides = as_rows(tensors, dim % tensors[0].dim())
    *outer, batches, n_rows, n_cols = sizes
    gpu, inputs = planning_gpu(tensors[0]), len(tensors) - 1
    itemsize = max(x.element_size() for x in tensors)
    packed = all(s[-1] == 1 for s in strides) or n_cols == 1
    vector = shifted_vector(tensors, strides) if packed else 1
    if packed:
        all_rows = batches * n_rows
        tile = softmax_tile(all_rows, n_cols, itemsize, inputs, gpu, shifted=vector > 1)
    else:
        tile = column_tile(n_cols, n_rows)
    if outer or batches > (MAX_BATCHES if tile else 1):
        return Slices(run, sizes, strides, len(outer) or 1)
    if batches == 1 and (
        launch := narrow_launch(tensors, strides, n_rows, n_cols, backward, gpu)
    ):
        return launch
    align = common_divisor(tensors, sizes, strides)
    by_tensor = zip(tensors, strides, strict=True)
    maxnreg = None
    if tile:
        kernel: Any = softmax_backward_kernel if backward else softmax_kernel
        arguments = tuple(it for x, s in by_tensor for it in (x, *s))
        num_warps = tile.num_warps
        constants = tile_constants(tile, n_cols, vector, align, gpu, packed)
        programs = tile_programs(tile, n_rows, constants)
        whole, kind = constants["WHOLE"], (itemsize, tile.chunks, num_warps)
        if (
            constants["PTX"]
            and whole == tile.chunks
            and not backward
            and kind in SPILLING
        ):
            maxnreg = MAX_REGISTERS
    else:
        arguments = tuple(it for x, s in by_tensor for it in (x, *s[1:]))
        if packed and tensors[backward].dtype in SPLIT_DTYPES:
            kernel = split_backward_kernel if backward else split_kernel
            split = best_split(
                n_cols, itemsize, inputs, max(align, vector), gpu, n_rows
            )
            try:
                return split_launch(
                    kernel, arguments, n_rows, n_cols, split, align=align, vector=vector
                )
            except TooManyPrograms:
                pass  # in passes, then
        kernel = passes_backward_kernel if backward else online_kernel
        loop = online_tile(n_cols, itemsize * inputs, gpu)
        rows, num_warps = 1 if packed else 32, loop.num_warps
        block = loop.block if packed else min(loop.block, 128)
        constants = {"ROWS": rows, "BLOCK": block, "ALIGN": align}
        programs = triton.cdiv(n_rows, rows)
    arguments = *arguments, n_rows, n_cols
    return Launch(
        kernel, (programs, batches), arguments, constants,
        num_warps=num_warps, maxnreg=maxnreg,
    )  # fmt: skip


def narrow_launch(
    tensors: Sequence[Tensor],
    strides: Sequence[Sequence[int]],
    n_rows: int,
    n_cols: int,
    backward: bool,
    gpu: Gpu,
) -> Launch | None:
    """The launch where narrow rows follow one another and start between multiples of 16 bytes."""
    itemsizes = [x.element_size() for x in tensors]
    aligned = all(x.data_ptr() % VECTOR_BYTES == 0 for x in tensors)
    follow = all(s[-2:] == [n_cols, 1] for s in strides)
    if not (aligned and follow) or max(itemsizes) > 4:
        return None
    per_sm = n_rows * n_cols / gpu.num_sms
    run = narrow_run(n_cols, min(itemsizes), len(tensors) - 1, per_sm)
    if not run:
        return None
    vectors = run.rows * n_cols // run.constants["VECTOR"]
    return Launch(
        narrow_backward_kernel if backward else narrow_kernel,
        (triton.cdiv(n_rows, run.rows), 1),
        (*tensors, n_rows, n_cols, run.rows, vectors, reciprocal(n_cols)),
        run.constants,
        num_warps=run.num_warps,
    )


def tile_programs(tile: Tile, n_rows: int, constants: dict[str, int]) -> int:
    """The programs of a kernel whose rows fit one."""
    full, rest = divmod(n_rows, tile.rows)
    return full + (rest if constants["SINGLY"] else rest > 0)


def tile_constants(
    tile: Tile, n_cols: int, vector: int, align: int, gpu: Gpu, packed: bool = False
) -> dict[str, int]:
    """The constants of a kernel whose rows fit a program.

    vector: see `shifted_vector`. packed: whether the columns of a row are adjacent in memory.
    """
    rest = tile.rest if isinstance(tile, ShiftedTile) else 0
    # All rows of a program exist.
    full = tile.rows == 1 or isinstance(tile, ShiftedTile)
    vector = vector if full else 1
    narrowest, widest = in_vectors(n_cols, vector)
    return {
        "ROWS": tile.rows, "BLOCK": tile.block,
        "CHUNKS": triton.cdiv(widest - rest, tile.block),
        "WHOLE": narrowest // tile.block if full else 0,
        "REST": rest, "ALIGN": align, "VECTOR": vector,
        # In chunks, a lane has one row.
        "SINGLY": packed and tile.chunks == 1 < tile.rows <= MOST_SINGLY,
        "PTX": takes_ptx(gpu),
    }  # fmt: skip


def in_vectors(n_cols: int, vector: int) -> tuple[int, int]:
    """The fewest and the most columns of a row that whole vectors hold, wherever it starts."""
    return (n_cols - vector + 1) // vector * vector, n_cols // vector * vector


def common_divisor(
    tensors: Sequence[Tensor], sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> int:
    """The largest power of two that divides width and strides, at most 16 bytes of each tensor.

    It is 1 where the columns of a row are not adjacent in memory.
    """
    if any(s[-1] != 1 for s in strides):
        return 1
    widest = max(VECTOR_BYTES // tensor.element_size() for tensor in tensors)
    return math.gcd(widest, sizes[-1], *(step for s in strides for step in s[:-1]))
