"""The folded cells of `book/memory-wall.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from memtraffic import formula
from memtraffic.meters.polynomials import polynomial
from memtraffic.names import import_function
from memtraffic_book import claim, experiment, experiments, figures, glue, prove, tables, units
from memtraffic_book.recording import PUBLISHED, speeds

FIRST = 335.5  # what answers the first exercise
M, N = 4096, 16384  # the running example, in float32
LADDER = *"naive fused masked tiled chunks persistent split".split(), "memtraffic.softmax"
LADDER_AT = (128, 4096, 5003, 65536)  # columns
# Of the operation, where a row fits one program; several of them exchange some words, too.
OURS_AT = (9, 8), (13, 7), (700, 29), (5, 781), (3, 8320)
CLAIMS = Path(__file__).with_name("memory_wall.csv")  # each with its source

# What answers are compared with.
SILU = "lambda x: x / (1 + torch.exp(-x))"
REVERSED = "lambda x: x.flip(1)"


def show_claims() -> None:
    """Shows six claims of speed, and keeps of each whether its bytes can move so fast."""
    said = pd.read_csv(CLAIMS)
    itemsize = said["dtype"].map(lambda name: getattr(torch, name).itemsize)
    moved = said["matrices"] * said["m"] * said["n"] * itemsize
    found = said["gb_per_s"].fillna(moved / said["us"] / 1e3)
    share, gb = found / said["datasheet_gb_per_s"], units.format_gb_per_s
    tables.show_words(
        said,
        claim=lambda it: it["number"],
        operation=lambda it: it["operation"],
        matrix=lambda it: f"{it['m']} × {it['n']} {it['dtype']}",
        claimed=lambda it: gb(it["gb_per_s"]) if it["gb_per_s"] > 0 else f"{it['us']:,.1f} µs",
        GPU=lambda it: f"{it['gpu']} ({gb(it['datasheet_gb_per_s'])})",
    )
    beyond = said["number"][share > 1].tolist()
    claim(
        f"{len(beyond)} of {len(said)} claims need more than the bandwidth of their GPU.",
        beyond == [1, 4, 5],
    )
    for number, rate, part in zip(said["number"], found, share, strict=True):
        verdict = "Impossible" if part > 1 else "Possible"
        glue(f"verdict_{number}", f"{verdict}: {gb(rate)}, {part:.2g} times the bandwidth")


def check_floor() -> None:
    """Claims that no recorded time on the map is below its floor."""
    names = "map_float32", "map_bfloat16", "bytes_in_flight", "roof"
    *maps, flight, roofs = experiments(*names, gpu=PUBLISHED)
    timed, most = pd.concat(maps, ignore_index=True), roofs["datasheet_gb_per_s"][0]
    best = timed.loc[timed["gb_per_s"].idxmax()]
    share = best["gb_per_s"] / most
    claim(
        f"None of {(timed['us'] > 0).sum()} measured times at 67 million numbers is below its "
        f"floor; the best, a {best['impl']}'s, has {units.format_share(share)} of the bandwidth.",
        share <= 1,
    )
    glue("read", units.format_gb_per_s(flight["gb_per_s"].max()))
    glue("large", units.format_gb_per_s(roofs["copy_gb_per_s"][0]))  # of 2 GiB
    glue("bandwidth", units.format_gb_per_s(most))
    glue("floor", units.format_us(2 * M * N * 4 / most * 1e-3))


def draw_times() -> None:
    """Draws how long five lines, two copies and the exponentials take, each alone."""
    race, first, rates = experiments("fused_race", "first_copy", "arithmetic")
    us, ours = race.set_index("impl")["us"], first.set_index("impl")["us"]
    # Of 10**12 a second; the GPU computes exp as exp2.
    exp_us = M * N / rates.set_index("what")["t_per_s"]["exp2"] * 1e-6
    names = "five lines of PyTorch", "copy_rows", "fastest copy", "exponentials alone"
    times = us["naive"], ours["copy_rows"], us["copy"], exp_us
    title = f"A copy takes {units.format_ratio(us['copy'] / exp_us)} as long as the exponentials."
    texts = [*map(units.format_us, times)]
    figures.plot_bars(names, times, texts, "µs", title, [False, False, True, False])
    share = ours["copy"] / ours["copy_rows"]
    part = units.format_percent(share)
    claim(f"At {M} x {N} copy_rows reaches {part} of the speed of the fastest copy.", share > 0.85)
    glue("first", units.format_share(share))
    glue("copy", units.format_us(us["copy"]))
    glue("rate", units.format_gb_per_s(race.set_index("impl")["gb_per_s"]["copy"]))
    glue("naive", units.format_us(us["naive"]))
    glue("speedup", f"{us['naive'] / us['fused']:.1f} times")
    glue("exponentials", units.format_us(exp_us))
    glue("ratio", f"{us['copy'] / exp_us:.1f} times")


def keep_ladder() -> None:
    """Keeps the ladder of the first page, and claims that its reads fall to MN."""
    share, ends = speeds(experiment("map_float32", gpu=PUBLISHED)), {}
    for name in LADDER:
        fn = import_function(name.replace("memtraffic.", "memtraffic:"))
        found = formula(fn, held_out=OURS_AT if name == LADDER[-1] else None)
        ends[name] = reads, writes = polynomial(found.reads), polynomial(found.writes)
        short, there = name.removeprefix("memtraffic."), share[name].dropna()
        glue(f"{short}_reads", reads)
        if writes != "MN":  # the page names the others
            glue(f"{short}_writes", writes)
        for n in LADDER_AT:
            glue(f"{short}_{n}", units.format_share(there[n]) if n in there else "–")
    (reads, writes), last = ends[LADDER[0]], ends[LADDER[-1]]
    claim(
        f"From the first kernel to the last, reads fall from {reads} to {last[0]}, and writes from "
        f"{writes} to {last[1]}.",
        reads != last[0] == last[1] == "MN",
    )


# ---- what the answers are examined for


def examine(op: str) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of a matrix whose width is a power of two."""
    return lambda fn: prove.exam(fn, op=op, widths=(1, 2, 64, 1024))
