"""The folded cells of `book/tiled.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.kernels.softmax.rule import tile_shape
from memtraffic_book import (
    claim,
    experiments,
    figures,
    glue,
    lab_notes,
    prove,
    recording,
    tables,
    units,
)
from memtraffic_book.prove import Operation
from memtraffic_book.recording import speeds

M, N, ITEMSIZE = 65536, 64, 4  # the narrow rows of this page, in float32
RULE = 2048  # bytes of a program
OURS = "memtraffic.softmax"
SHOWN = 4096  # columns, up to which the last figure goes
STEADY = 1500  # GB/s of a copy of narrow rows; below, memory is slower than the starts
BY_CHANCE = "Draw 200 shapes by chance"


def load() -> tuple[pd.DataFrame, pd.DataFrame, bool]:
    """The times of kernels and of tiles, and whether memory is faster than the starts are.

    The first has the columns `copy`, `masked` and `tiled`, for each number of columns. The second
    has the columns `rows`, `n`, `us` and `copy_us`.
    """
    narrow, tiles = experiments("tiled_narrow", "tiled_rows_float32")
    fast = narrow.query("impl == 'copy'")["gb_per_s"].max() > STEADY
    return narrow.pivot(index="n", columns="impl", values="us"), tiles, bool(fast)


def compare_warps() -> None:
    """Shows the time of programs of four warps and of one."""
    us, tiles, fast = load()
    one = tiles.set_index(["rows", "n"])["us"][1, N]
    masked, copy = us["masked"][N], us["copy"][N]
    tables.show(
        [("masked", 4, masked), ("tiled", 1, one), ("a copy", "–", copy)],
        kernel=lambda line: line[0],
        warps_per_program=lambda line: line[1],
        time_=lambda line: units.format_us(line[2]),
        speed_of_a_copy=lambda line: units.format_share(copy / line[2]),
    )
    claim(
        f"One warp per program takes {units.format_us(one)} where four take "
        f"{units.format_us(masked)} (within 20 %).",
        abs(one / masked - 1) < 0.2 or not fast,
    )
    glue("masked_share", units.format_share(copy / masked))
    glue("one_warp", units.format_share(copy / one))
    glue("masked_us", units.format_us(masked))
    glue("twice_us", units.format_us(us["masked"][2 * N]))


def time_starts() -> None:
    """Shows the time of programs that do nothing, and what memory moves between two starts."""
    starts, roof = experiments("tiled_starts", "roof")
    us, _, fast = load()
    idle = starts.pivot(index="programs", columns="warps", values="us")
    tables.show(
        idle.index,
        programs=lambda n: f"{n:,}",
        of_1_warp=lambda n: units.format_us(idle[1][n]),
        of_16_warps=lambda n: units.format_us(idle[16][n]),
    )
    masked, none = us["masked"][N], idle[4][M]
    claim(
        f"Of the {units.format_us(masked)} of masked, {units.format_us(none)} are what {M} "
        "programs take that do nothing (at least half).",
        none > masked / 2 or not fast,
    )
    start = 1000 * none / M  # ns
    rate = roof["copy_gb_per_s"][0] / 2  # half of what a copy moves is read
    glue("idle_us", units.format_us(none))
    glue("start", f"{start:.2f} ns")
    glue("start_kb", units.format_bytes(start * rate))


def show_dead_row(mask: Tensor, offsets: Tensor) -> None:
    """Claims what the softmax of a tile with one live row and one dead row is.

    mask, offsets: of that tile, of shape (2, block), into 15 elements.
    """
    x = torch.arange(15.0)
    values = torch.full(mask.shape, -float("inf"))
    values[mask] = x[offsets[mask]]
    y = torch.softmax(values, dim=1)
    print("sums of the rows:", y.sum(dim=1).round(decimals=6).tolist())
    claim("The 1 live row adds up to 1, and the dead one is NaN.", y.sum(dim=1).isnan()[1])
    live = mask.any(dim=1)
    assert torch.allclose(y[live].sum(dim=1), torch.ones(int(live.sum()))), y


def draw_tiles() -> None:
    """Draws the speed over the bytes that a program loads, for rows of several widths."""
    _, tiles, fast = load()
    size = tiles["rows"] * tiles["n"] * ITEMSIZE
    tiles = tiles.assign(size=size, share=100 * tiles["copy_us"] / tiles["us"])
    some = tiles[tiles["n"] <= 512]
    figures.plot_lines(
        {f"{n} columns": part.set_index("size")["share"] for n, part in some.groupby("n")},
        "bytes that a program loads",
        "% of the speed of a copy",
        title="Whatever their width, narrow rows need 2 kB per program.",
        ticks=[256, 1024, 2048, 8192],
    )
    by_rule = tiles[tiles["size"] == RULE]
    best = tiles.groupby("n")["us"].min()
    late = (by_rule.set_index("n")["us"] / best - 1).max()
    claim(
        f"Tiles of 2 kB take at most {units.format_percent(late)} longer than the best tiles, at "
        f"{len(by_rule)} widths (10 % allowed).",
        late < 0.1 or not fast,
    )
    glue("rule", f"{RULE / 1000:.0f} kB")
    glue("tiled_share", units.format_share(by_rule.set_index("n")["share"][N] / 100))


def draw_narrow() -> None:
    """Draws the speed of narrow rows of any width, and quotes what the rule had not seen."""
    single, half = (
        speeds(frame)
        for frame in experiments("map_float32", "map_bfloat16", gpu=recording.PUBLISHED)
    )
    share = single[["masked", "tiled", OURS]].loc[:SHOWN]
    figures.plot_lines(
        {str(name): 100 * share[name] for name in share},
        "columns",
        "% of the speed of a copy",
        title="Tiles repair narrow rows, but not those that start anywhere.",
        ticks=[16, 64, 256, 1024, 4096],
    )
    even = share["tiled"][share.index % 4 == 0]
    worst = units.format_share(even.min())
    claim(
        f"At {len(even)} multiples of 4 up to {SHOWN} columns, tiled reaches {worst} of the speed "
        "of a copy or more (85 % needed).",
        even.min() > 0.85,
    )
    glue("even_worst", worst)
    glue("tiled_33", units.format_share(share["tiled"][33]))
    glue("ours_33", units.format_share(share[OURS][33]))
    late = half[OURS].loc[:SHOWN]
    glue("half_worst", f"{units.format_share(late.min())} at {late.idxmin()} columns")
    note = lab_notes.find(BY_CHANCE)
    glue("by_chance", note["result"].split(":")[0])


# ---- what the answers are examined for


def rows_of(n_cols: int) -> int:
    """The rows that the rule gives a program, for rows of `n_cols` numbers of bfloat16."""
    return tile_shape(n_cols, 2, find_gpu("H200")).rows


def scaled(x: Tensor) -> Tensor:
    """Each row over the sum of its absolute values."""
    return x / x.abs().sum(dim=1, keepdim=True)


def examine(op: Operation = SOFTMAX) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of at most 64 columns."""
    return lambda fn: prove.exam(fn, op=op, widths=(1, 2, 31, 33, 64))
