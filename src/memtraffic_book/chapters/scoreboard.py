"""The folded cells of `book/scoreboard.ipynb`."""

from __future__ import annotations

import pandas as pd

from memtraffic_book import claim, experiments, tables, units
from memtraffic_book.chapters import ship
from memtraffic_book.recording import speeds

ABSENT = "–"  # where a kernel has no time


def show_versions(frames: ship.Frames) -> None:
    """Shows the version of each package, and at how many of all cases it was timed."""
    every = pd.concat(frames.values())
    tables.show(
        every["impl"].unique()[1:],  # without the copy
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
    return int(ship.noted(every[every["impl"] == name], kind).sum())


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
            for name in frame["impl"].unique()
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
            for name in frame["impl"].unique()[1:]
        },
    )


def _time(us: float) -> str:
    return units.format_us(us) if us else ABSENT


def show_map(dtype: str) -> None:
    """Shows the percent of a copy's speed that each line and rung reaches, over the columns."""
    [frame] = experiments(f"map_{dtype}")
    share = speeds(frame)
    names = [str(name) for name in dict.fromkeys(frame["impl"]) if name != "copy"]
    tables.show(
        share.index,
        columns=lambda n: n,
        **{
            ship.short(name): lambda n, it=it: f"{100 * it[n]:.0f} %" if it[n] == it[n] else ABSENT
            for name, it in share[names].items()
        },
    )
