"""The folded cells of `book/tiled.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax.rule import tile_shape
from memtraffic_book import claim, experiment, experiments, figures, glue, prove, tables, units
from memtraffic_book.recording import PUBLISHED, speeds

M, N, ITEMSIZE = 65536, 64, 4  # the narrow rows of this page, in float32
RULE = 2048  # bytes per program
STEADY = 1500  # GB/s of a copy of narrow rows; below, memory is slower than the starts
SCALED = "lambda x: x / x.abs().sum(dim=1, keepdim=True)"
CENTRED = "lambda x: x - x.mean(dim=1, keepdim=True)"


def load() -> tuple[Any, Any, bool]:
    """The times of kernels and of tiles, and whether memory is faster than the starts are.

    The first has the columns `copy`, `masked` and `tiled`, for each number of columns. The second
    has the columns `rows`, `n`, `us` and `copy_us`.
    """
    narrow, tiles = experiments("tiled_narrow", "tiled_rows_float32")
    fast = narrow.query("impl == 'copy'")["gb_per_s"].max() > STEADY
    return narrow.pivot(index="n", columns="impl", values="us"), tiles, bool(fast)


def time_starts() -> None:
    """Shows the time of programs that do nothing, and keeps what follows from it for the prose."""
    starts, roof = experiments("tiled_starts", "roof")
    us, tiles, fast = load()
    idle = starts.pivot(index="programs", columns="warps", values="us")
    tables.show(
        idle.index,
        programs=lambda n: f"{n:,}",
        of_1_warp=lambda n: units.format_us(idle[1][n]),
        of_16_warps=lambda n: units.format_us(idle[16][n]),
    )
    nothing = idle[4]
    claim(
        f"Of the {units.format_us(us['masked'][N])} of masked, {units.format_us(nothing[M])} are "
        f"what {M} programs take that do nothing.",
        nothing[M] > us["masked"][N] / 2 or not fast,
    )
    few, more, *_, most = nothing.index
    start = 1000 * (nothing[most] - nothing[few]) / (most - few)  # ns
    moved = start * roof["copy_gb_per_s"][0]  # bytes from one start to the next
    million = experiment("map_float32", gpu=PUBLISHED).query("n == @N").set_index("impl")["us"]
    for name, time in {
        "million_us": million["masked"],
        "copy_us": million["copy"],
        "million_starts": 2**20 * start / 1000,
        "few_us": nothing[few],
        "more_us": nothing[more],
        "idle_us": nothing[M],
        "masked_us": us["masked"][N],
        "one_warp": tiles.set_index(["rows", "n"])["us"][1, N],
    }.items():
        glue(name, units.format_us(time))
    glue("start", f"{start:.2f} ns")
    glue("roof", units.format_gb_per_s(roof["copy_gb_per_s"][0]))
    glue("moved_kb", units.format_bytes(moved))
    glue("start_kb", units.format_bytes(moved / 2))  # half of what a copy moves is read
    glue("asked", units.format_share(2 * N * ITEMSIZE / moved))
    glue("share", units.format_share(million["copy"] / million["masked"]))
    glue("tiled_share", units.format_share(million["copy"] / million["tiled"]))


def draw_tiles() -> None:
    """Draws the speed over the bytes that a program loads, for rows of several widths."""
    _, tiles, fast = load()
    size = tiles["rows"] * tiles["n"] * ITEMSIZE
    tiles = tiles.assign(size=size, share=100 * tiles["copy_us"] / tiles["us"])
    some = tiles[tiles["n"] <= 512]
    figures.plot_lines(
        {str(n): part.set_index("size")["share"] for n, part in some.groupby("n")},
        "bytes per program",
        "% of the speed of a copy",
        title="Whatever their width, narrow rows need 2 kB per program.",
        ticks=[256, 1024, 2048, 8192],
    )
    by_rule = tiles[tiles["size"] == RULE].set_index("n")["us"]
    late = (by_rule / tiles.groupby("n")["us"].min() - 1).max()
    claim(
        f"Tiles of 2 kB take at most {units.format_percent(late)} longer than the best tiles, at "
        f"{len(by_rule)} widths.",
        late < 0.1 or not fast,
    )


def draw_narrow() -> None:
    """Draws the speed of narrow rows of any width."""
    share = speeds(experiment("map_float32", gpu=PUBLISHED))[["masked", "tiled"]].loc[:4096]
    figures.plot_lines(
        {str(name): 100 * share[name] for name in share},
        "columns",
        "% of the speed of a copy",
        title="Tiles repair narrow rows, but not those of odd widths.",
        ticks=[16, 64, 256, 1024, 4096],
    )
    even = share["tiled"][share.index % 4 == 0]
    claim(
        f"At {len(even)} multiples of 4 up to 4096 columns, tiled reaches "
        f"{units.format_share(even.min())} of the speed of a copy or more.",
        even.min() > 0.85,
    )
    glue("even_worst", units.format_share(even.min()))
    glue("tiled_33", units.format_share(share["tiled"][33]))


# ---- what the answers are examined for


def rows_of(n_cols: int) -> int:
    """The rows that the rule gives a program, for rows of `n_cols` numbers of bfloat16."""
    return tile_shape(n_cols, 2, find_gpu("H200")).rows


def examine(op: str) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of at most 64 columns."""
    return lambda fn: prove.exam(fn, op=op, widths=(1, 2, 31, 33, 64))
