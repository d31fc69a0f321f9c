"""The folded cells of `book/scoreboard.ipynb`."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from memtraffic import formula
from memtraffic.benchmark.decision import CANDIDATES
from memtraffic.meters.polynomials import polynomial
from memtraffic.names import import_function
from memtraffic_book import claim, experiment, experiments, glue, tables, units
from memtraffic_book.chapters import ship

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


def show_versions(frames: ship.Frames) -> None:
    """Shows the version of each package, and at how many of all cases it was timed."""
    every = pd.concat(frames.values())
    tables.show(
        CANDIDATES,
        kernel=lambda name: name,
        version=lambda name: max(every.loc[every["impl"] == name, "version"].astype(str)) or "–",
        timed=lambda name: (every.loc[every["impl"] == name, "us"] > 0).sum(),
        refused=lambda name: _notes(every, name, "refused"),
        wrong=lambda name: _notes(every, name, "wrong"),
        imprecise=lambda name: _notes(every, name, "imprecise"),
        absent=lambda name: _notes(every, name, "absent"),
    )
    timed = every[every["us"] > 0]
    apart = abs(timed["us_reversed"] / timed["us"] - 1).median()
    claim(
        f"In the rounds of reverse order, half of the medians are within "
        f"{units.format_percent(apart)} of those of all rounds (2 % allowed).",
        apart < 0.02,
    )


def _notes(every: pd.DataFrame, name: str, kind: str) -> int:
    notes = every.loc[every["impl"] == name, "note"].astype(str)
    return int(notes.str.startswith(kind).sum())


def show_times(frame: pd.DataFrame) -> None:
    """Shows the time on the GPU of each candidate at each shape, and what to call there."""
    us = frame.pivot(index=["n", "m"], columns="impl", values="us")
    calls = ship.answers(frame)
    tables.show(
        us.index,
        columns=lambda key: key[0],
        rows_=lambda key: key[1],
        **{
            ship.short(name): lambda key, it=us[name]: _time(it[key])
            for name in ("copy", *CANDIDATES)
        },
        call=lambda key: ship.short(calls[key]),
    )


def show_calls(frame: pd.DataFrame) -> None:
    """Shows the time of a call of each candidate, one by one and in a CUDA graph, in µs."""
    eager, graph = (
        frame.pivot(index=["n", "m"], columns="impl", values=column)
        for column in (ship.CALLED, ship.IN_GRAPH)
    )
    tables.show(
        [key for key in eager.index if key[1] in ship.CALLED_AT],
        columns=lambda key: key[0],
        rows_=lambda key: key[1],
        **{
            ship.short(name): lambda key, one=eager[name], all=graph[name]: (
                f"{_time(one[key])}, {_time(all[key])}" if one[key] else ABSENT
            )
            for name in CANDIDATES
        },
    )


def _time(us: float) -> str:
    return units.format_us(us) if us else ABSENT


def show_map(dtype: str) -> None:
    """Shows the percent of a copy's speed that each line and rung reaches, over the columns."""
    [frame] = experiments(f"map_{dtype}")
    us = frame[frame["us"] > 0].pivot(index="n", columns="impl", values="us")
    names = [str(name) for name in dict.fromkeys(frame["impl"]) if name != "copy"]
    share = {name: us["copy"] / us[name] for name in names}
    tables.show(
        us.index,
        columns=lambda n: n,
        **{
            ship.short(name): lambda n, it=it: f"{100 * it[n]:.0f} %" if it[n] == it[n] else ABSENT
            for name, it in share.items()
        },
    )
