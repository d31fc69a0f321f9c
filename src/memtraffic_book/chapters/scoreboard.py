"""The folded cells of `book/scoreboard.ipynb`."""

from __future__ import annotations

from typing import NamedTuple

from memtraffic import formula
from memtraffic.meters.polynomials import polynomial
from memtraffic.names import import_function
from memtraffic_book import claim, experiment, glue, tables

LADDER = ("naive", "fused", "masked", "tiled", "persistent", "split", "memtraffic.softmax")
LADDER_AT = (128, 4096, 65536)  # columns
# Of the operation, where a row fits one program; several of them exchange some words, too.
OURS_AT = (9, 8), (13, 7), (700, 29), (5, 781), (3, 8320)
ABSENT = "–"  # where a kernel takes no rows of this width


class Rung(NamedTuple):
    """A kernel: what it reads and writes, counted, and its speed in percent of a copy."""

    name: str
    reads: str
    writes: str
    speeds: tuple[str, ...]


def ladder() -> list[Rung]:
    """The kernels in the order of the book, at the widths of the first page."""
    frame = experiment("map_float32")
    us = frame[frame["us"] > 0].pivot(index="n", columns="impl", values="us")
    share = us.rdiv(us["copy"], axis=0)
    rungs = []
    for name in LADDER:
        shapes = OURS_AT if name == LADDER[-1] else None
        found = formula(
            import_function(name.replace("memtraffic.", "memtraffic:")), held_out=shapes
        )
        there = share[name].dropna()
        speeds = [f"{100 * there[n]:.0f} %" if n in there else ABSENT for n in LADDER_AT]
        amounts = polynomial(found.reads), polynomial(found.writes)
        rungs.append(Rung(name, *amounts, tuple(speeds)))
    return rungs


def show_ladder() -> None:
    """Shows the ladder, and keeps its numbers for the first page."""
    rungs = ladder()
    tables.show(
        rungs,
        kernel=lambda rung: rung.name,
        reads=lambda rung: rung.reads,
        writes=lambda rung: rung.writes,
        **{f"{n}_columns": lambda rung, i=i: rung.speeds[i] for i, n in enumerate(LADDER_AT)},
    )
    for rung in rungs:
        short = rung.name.removeprefix("memtraffic.")
        glue(f"{short}_reads", rung.reads)
        glue(f"{short}_writes", rung.writes)
        for n, speed in zip(LADDER_AT, rung.speeds, strict=True):
            glue(f"{short}_{n}", speed)
    first, last = rungs[0], rungs[-1]
    claim(
        f"From the first kernel to the last, reads fall from {first.reads} to {last.reads}, and "
        f"writes from {first.writes} to {last.writes}.",
        first.reads != last.reads == last.writes == "MN",
    )
