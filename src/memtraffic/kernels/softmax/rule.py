"""The rule: how many rows and warps a program gets, and in what pieces it takes a row.

What was tuned stands in one table, TUNED; all else follows from the widths of accesses and from the
GPU. The rungs take `num_warps_of_row`, `tile_shape` or `row_tile`, `memtraffic.softmax` the last of
these, `column_tile` and `split_tile`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton

from memtraffic.gpus import Gpu
from memtraffic.kernels.launch import takes_ptx
from memtraffic.kernels.operands import VECTOR_BYTES

MAX_COLS = 32768  # 32 elements per thread; twice as many would spill
MAX_ROW = 2**24  # columns, where a row need not fit one program
MAX_ELEMENTS_PER_LANE = 64  # more would leave a lane too few registers


class Tuned(NamedTuple):
    """A number that was chosen by a sweep: on which GPU, when, and what holds its numbers."""

    value: int
    gpu: str
    date: str
    sweep: str


_SWEEP = "H200", "2026-11-28", "0b53af6"
TUNED = {
    # The bytes that a warp loads of narrow rows.
    "warp_bytes": Tuned(2048, "H200", "2026-11-26", "tiled_rows_float32"),
    # The widest row, in bytes, that is taken in one block: any, and one that starts at a multiple
    # of 16 bytes. Wider ones are taken in chunks.
    "block_bytes": Tuned(32, *_SWEEP),
    "aligned_block_bytes": Tuned(256, *_SWEEP),
    # Of rows in chunks, the widest, in bytes, of which a warp has 16, 8, 4 or 2.
    "sixteen_rows_bytes": Tuned(112, *_SWEEP),
    "eight_rows_bytes": Tuned(256, *_SWEEP),
    "four_rows_bytes": Tuned(1024, *_SWEEP),
    "two_rows_bytes": Tuned(2048, *_SWEEP),
    # Bytes of all inputs that a lane holds in chunks, before a program gets twice the warps.
    "lane_bytes": Tuned(256, *_SWEEP),
    # Elements of an input that a lane holds in a program of one warp, before it gets another.
    "lone_elements": Tuned(64, "H200", "2026-11-28", "94ab10c"),
    # The most warps of a program, where several could share the row.
    "most_warps": Tuned(8, *_SWEEP),
    # Bytes of a row that several programs share where there are fewer rows than SMs.
    "few_rows_bytes": Tuned(36 * 2**10, "H200", "2026-11-24", "f2e7dba"),
    # Elements of a tile whose rows are adjacent in memory, not its columns.
    "column_tile": Tuned(4096, "H200", "2026-11-22", "26445dc"),
    # A program that shares a row: bytes of all inputs that each of its 128 lanes holds, half of
    # them in the forward of 32 bits; what it holds in the forward of 16 bits where rows start
    # anywhere; and the registers of a lane, where two numbers share one. With fewer programs an SM
    # than so many, a lane holds fewer bytes.
    "part_lane_bytes": Tuned(256, "H200", "2026-11-28", "ed99d26"),
    "shifted_lane_bytes": Tuned(160, "H200", "2026-11-28", "ed99d26"),
    "part_registers": Tuned(96, "H200", "2026-11-28", "ed99d26"),
    "parts_per_sm": Tuned(4, "H200", "2026-11-24", "f2e7dba"),
    # How often it looks for the words of the others before it computes them itself.
    "looks": Tuned(4096, "H200", "2026-11-22", "e72fbe5"),
    # A loop over tiles: the most stages, and the narrowest access that is worth a prefetch.
    "max_stages": Tuned(3, "H200", "2026-11-26", "persistent_suspects"),
    "prefetched_bytes": Tuned(16, "H200", "2026-11-26", "persistent_suspects"),
    # A row in passes: bytes that a lane loads at once, and the warps of a program.
    "pass_lane_bytes": Tuned(64, "H200", "2026-11-22", "26445dc"),
    "pass_warps": Tuned(8, "H200", "2026-11-22", "26445dc"),
}

ROWS = {
    16: "sixteen_rows_bytes", 8: "eight_rows_bytes", 4: "four_rows_bytes", 2: "two_rows_bytes"
}  # fmt: skip


def tuned(name: str) -> int:
    """The number in TUNED with this name."""
    return TUNED[name].value


@dataclass(frozen=True)
class Tile:
    """What a program has of a matrix: `rows`, each in `chunks` blocks of `block` columns.

    vector: elements of a 16-byte access to rows that start anywhere; 1 where accesses follow from
    their alignment.
    """

    rows: int
    block: int
    num_warps: int
    chunks: int = 1
    vector: int = 1


# ---- the rungs


def max_warps(gpu: Gpu) -> int:
    """The most warps that a program on `gpu` can have."""
    return gpu.max_threads_per_program // gpu.warp_size


def num_warps_of_row(n_cols: int, gpu: Gpu) -> int:
    """Warps of a program that holds a row: a thread holds at most 32 elements of it."""
    return max(4, min(max_warps(gpu), n_cols // 512))


def rows_and_warps(block: int, itemsize: int, most_warps: int) -> tuple[int, int]:
    """Rows and warps of a program, for rows in blocks of `block` elements: the rule of `tiled`.

    >>> rows_and_warps(64, 4, most_warps=32), rows_and_warps(4096, 4, most_warps=32)
    ((8, 1), (1, 4))

    itemsize: bytes of an element. most_warps: of a program, on the GPU.
    """
    rows = max(1, tuned("warp_bytes") // (block * itemsize))
    num_warps = max(1, min(most_warps, block // 1024))
    return rows, num_warps


def tile_shape(
    n_cols: int,
    itemsize: int,
    gpu: Gpu,
    *,
    rows: int | None = None,
    num_warps: int | None = None,
) -> Tile:
    """The tile of a program for rows of `n_cols` elements of `itemsize` bytes.

    `rows` and `num_warps` override what `rows_and_warps` says.

    >>> from memtraffic.gpus import find_gpu
    >>> tile_shape(256, 4, find_gpu("H200"))
    Tile(rows=2, block=256, num_warps=1, chunks=1, vector=1)

    Raises ValueError for more than MAX_ELEMENTS_PER_LANE elements per lane.
    """
    block, most = triton.next_power_of_2(n_cols), max_warps(gpu)
    by_rule = rows_and_warps(block, itemsize, most)
    rows = by_rule[0] if rows is None else rows
    num_warps = by_rule[1] if num_warps is None else num_warps
    lanes = num_warps * gpu.warp_size
    if rows * block > MAX_ELEMENTS_PER_LANE * lanes:
        raise ValueError(
            f"{rows} x {block} elements on {lanes} lanes are more than "
            f"{MAX_ELEMENTS_PER_LANE} per lane"
        )
    return Tile(rows, block, num_warps)


def choose_num_stages(tile_bytes: int, vector_bytes: int, gpu: Gpu) -> int:
    """Stages of a loop over tiles: 1, and 1 more per tile that shared memory holds.

    tile_bytes: of one tile. vector_bytes: of one access of a lane; narrow ones are not
    worth a prefetch. There is one stage, too, where prefetched tiles would wait in
    registers: they would take the place of other programs.
    """
    if vector_bytes < tuned("prefetched_bytes") or not gpu.prefetches_to_shared_memory:
        return 1
    # The reductions of 32 warps may need 1024 bytes.
    tiles = (gpu.shared_per_program - 1024) // tile_bytes
    return 1 + max(0, min(tuned("max_stages") - 1, tiles))


def pass_tile(n_cols: int, itemsize: int, gpu: Gpu) -> Tile:
    """The tile of its row that a program takes at a time, in passes over it."""
    num_warps = tuned("pass_warps")
    widest = num_warps * gpu.warp_size * tuned("pass_lane_bytes") // itemsize
    return Tile(1, min(triton.next_power_of_2(n_cols), widest), num_warps)


# ---- rows in chunks


def row_tile(
    n_cols: int,
    itemsize: int,
    inputs: int,
    gpu: Gpu,
    vector: int = 1,
    most_warps: int = 16,
    most_rows: int = 2**11,
) -> Tile | None:
    """The tile of a program that has whole rows of `n_cols` columns; None if they do not fit.

    itemsize: bytes of an element. inputs: tensors that the program holds, 1 forward, 2 backward.
    vector: of rows that start between multiples of 16 bytes, see `shifted_vector`. most_warps: of
    32 lanes. most_rows: of a program, a power of two.

    >>> from memtraffic.gpus import find_gpu
    >>> row_tile(12672, 4, 1, find_gpu("H200"))
    Tile(rows=1, block=1024, num_warps=8, chunks=13, vector=1)
    """
    row_bytes = n_cols * itemsize
    if row_bytes <= tuned("aligned_block_bytes" if vector == 1 else "block_bytes"):
        block = triton.next_power_of_2(n_cols)
        rows = max(1, min(most_rows, tuned("warp_bytes") // (block * itemsize)))
        return Tile(rows, block, _in_warps(1, gpu))
    rows = next((n for n, it in ROWS.items() if row_bytes <= tuned(it)), 1)
    rows = min(rows, most_rows)
    held, lone = rows * row_bytes * inputs, tuned("lone_elements") * itemsize * inputs
    warps = 1
    while warps <= 16 and held > 32 * warps * min(tuned("lane_bytes"), lone * warps):
        warps *= 2  # to 32, more than any program has here
    num_warps = _in_warps(warps, gpu)
    if warps > most_warps or num_warps > max_warps(gpu):
        return None
    block = VECTOR_BYTES // itemsize * num_warps * gpu.warp_size // rows
    return Tile(rows, block, num_warps, triton.cdiv(n_cols, block), vector)


def _in_warps(warps: int, gpu: Gpu) -> int:
    """As many lanes as in `warps` warps of 32, in warps of the GPU."""
    return triton.cdiv(32 * warps, gpu.warp_size)


def tile_constants(
    tile: Tile, n_rows: int, n_cols: int, align: int, gpu: Gpu
) -> dict[str, Any]:
    """The constants of a kernel whose rows fit a program."""
    vector = tile.vector
    # A row has `least` to `most` columns in whole ones, wherever it starts.
    least, most = (n_cols - vector + 1) // vector * vector, n_cols // vector * vector
    return {
        "ROWS": tile.rows, "BLOCK": tile.block,
        "CHUNKS": max(1, triton.cdiv(most, tile.block)),
        "WHOLE": 0 if n_rows % tile.rows else least // tile.block,  # no row of them is dead
        "ALIGN": align, "VECTOR": vector, "PTX": takes_ptx(gpu),
    }  # fmt: skip


# ---- `memtraffic.softmax`


def op_tile(
    n_rows: int, n_cols: int, itemsize: int, inputs: int, gpu: Gpu, vector: int
) -> Tile | None:
    """As `row_tile`, of `n_rows` rows in all; None, too, where it is faster to share a row."""
    shared = itemsize < 8  # a sum of float64 fits no half of a word
    if shared and n_rows < gpu.num_sms and n_cols * itemsize >= tuned("few_rows_bytes"):
        return None
    most_warps = tuned("most_warps") if shared else 16
    most_rows = 1 << max(1, n_rows // gpu.num_sms).bit_length() - 1  # no SM is idle
    return row_tile(n_cols, itemsize, inputs, gpu, vector, most_warps, most_rows)


def column_tile(n_cols: int, n_rows: int) -> Tile | None:
    """The tile where the rows are adjacent in memory, not the columns; None if none fits."""
    block = triton.next_power_of_2(n_cols)
    rows = min(triton.next_power_of_2(n_rows), max(8, tuned("column_tile") // block))
    if rows * block > MAX_ELEMENTS_PER_LANE * 512:
        return None
    return Tile(rows, block, max(1, min(16, rows * block // 1024)))
