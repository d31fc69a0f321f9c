"""The verdicts of the scoreboard, computed from its recordings: who wins, where, and by how much.

A frame is the result of an experiment `scoreboard_…` in one dtype: a row for each shape and kernel,
with a time of 0 where none was taken. Kernels of the backward go by the names of their packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import pandas as pd

from memtraffic.benchmark import timing
from memtraffic.benchmark.baselines import BACKWARD
from memtraffic.benchmark.loop import ABSENT
from memtraffic.names import RUNGS
from memtraffic.tensors import SECTOR_BYTES
from memtraffic_book.peers import PEERS

OURS, TORCH, ROOFS = "memtraffic.softmax", "torch.softmax", ("copy", "add")
NEAR = 0.02  # what is nearer is not worth a change of kernel
T = TypeVar("T", "pd.DataFrame", "pd.Series[float]")
WORTH = 1.1  # how many times as fast a kernel must be to be worth a dependency
PRINTED = range(256, 12673, 128)  # the widths of the tables in Triton's documentation


def timed(frame: pd.DataFrame, column: str = "us") -> pd.DataFrame:
    """A column of what was timed: widths down, kernels across, NaN where there is no time.

    >>> frame = pd.DataFrame({"impl": ["copy", "Liger backward"], "n": 64, "us": [2.0, 0.0]})
    >>> timed(frame).loc[64].to_dict()
    {'copy': 2.0, 'Liger': nan}
    """
    names = frame["impl"].str.removesuffix(BACKWARD)
    order = list(dict.fromkeys(names))
    here = frame.assign(impl=names)[frame["us"] > 0]
    return here.pivot(index="n", columns="impl", values=column).reindex(columns=order)


def others(us: pd.DataFrame) -> list[str]:
    """The kernels in `us` that others made: what is neither ours, nor a rung, nor a roof."""
    return [str(name) for name in us if name not in (OURS, *RUNGS, *ROOFS)]


def _contestants(us: pd.DataFrame) -> pd.DataFrame:
    """The columns of `us` but for rungs and roofs."""
    return us[[name for name in us if name == OURS or name in others(us)]]


def roof(us: pd.DataFrame) -> pd.Series[float]:
    """The times of the roof that was timed beside the kernels: a copy, or an addition."""
    [name] = [name for name in ROOFS if name in us]
    return us[name]


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """The share of the roof's speed that each kernel reaches: widths down, kernels across."""
    us = timed(frame)
    kernels = us.drop(columns=[name for name in ROOFS if name in us])
    return kernels.rdiv(roof(us), axis=0)


def at(us: T, widths: Iterable[int]) -> T:
    """The rows of some widths, those that there are."""
    return us[us.index.isin(list(widths))]


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean: the one number whose inverse is the mean of the inverse ratios.

    >>> geometric_mean([2, 0.5]), geometric_mean([4, 1])
    (1.0, 2.0)
    """
    values = pd.Series(list(ratios), dtype=float)
    return float(values.prod() ** (1 / len(values))) if len(values) else float("nan")


class Match(NamedTuple):
    """Our kernel against another, over the widths at which both were timed.

    faster, level, slower: at how many widths ours is that, see `timing.level`. mean: the geometric
    mean of the ratios of speed, ours over the other's. worst, worst_at: the lowest ratio, and its
    width.
    """

    other: str
    widths: int
    faster: int
    level: int
    slower: int
    mean: float
    worst: float
    worst_at: int


def match(frame: pd.DataFrame, other: str, widths: Iterable[int]) -> Match | None:
    """Our kernel against `other` at some of the widths; None if both were timed at none of them."""
    wanted = list(widths)
    spread = [at(timed(frame, name), wanted) for name in ("us", "us_p20", "us_p80")]
    if other not in spread[0] or not (both := spread[0][[OURS, other]].dropna()).size:
        return None
    pairs = [[[it.at[n, name] for it in spread] for name in (OURS, other)] for n in both.index]
    even = pd.Series([timing.level(*pair) for pair in pairs], index=both.index)
    ratios = both[other] / both[OURS]
    faster, slower = (~even & (ratios > 1)).sum(), (~even & (ratios <= 1)).sum()
    counts = len(both), int(faster), int(even.sum()), int(slower)
    return Match(other, *counts, geometric_mean(ratios), ratios.min(), int(ratios.idxmin()))


def matches(frame: pd.DataFrame, widths: Iterable[int]) -> list[Match]:
    """Our kernel against each of the `others`, where both were timed."""
    wanted = list(widths)
    found = [match(frame, name, wanted) for name in others(timed(frame))]
    return [it for it in found if it]


def winners(us: pd.DataFrame, widths: Iterable[int]) -> dict[str, list[int]]:
    """At which of the widths each kernel has the least time, the one that wins most first.

    Roofs and rungs do not take part.
    """
    rows = _contestants(at(us, widths)).dropna(how="all")
    won: dict[str, list[int]] = {}
    for n, name in rows.idxmin(axis=1).items():
        won.setdefault(str(name), []).append(int(str(n)))
    return dict(sorted(won.items(), key=lambda item: -len(item[1])))


def spans(some: Iterable[int], of: Iterable[int]) -> str:
    """Some of the widths in `of` as text, neighbours joined.

    >>> spans([256, 384, 512, 1024], range(256, 2049, 128))
    '256 to 512, 1024'
    """
    places = {n: place for place, n in enumerate(sorted(of))}
    runs: list[list[int]] = []
    for n in sorted(some):
        if runs and places[n] == places[runs[-1][-1]] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class Lead(NamedTuple):
    """A width at which another kernel is ahead of ours. ratio: our speed over the other's."""

    n: int
    other: str
    ratio: float


def against_fastest(
    us: pd.DataFrame, widths: Iterable[int], rivals: Sequence[str] | None = None
) -> list[Lead]:
    """Ours against the fastest of some rivals at each width; first where ours is slowest.

    rivals: all of the `others` by default.
    """
    rows = at(us, widths)
    names = others(us) if rivals is None else [name for name in rivals if name in us]
    here = rows[names].dropna(how="all")
    found = [
        Lead(int(n), str(row.idxmin()), float(row.min() / rows.loc[n, OURS]))
        for n, row in here.iterrows()
        if rows.loc[n, OURS] > 0
    ]
    return sorted(found, key=lambda it: it.ratio)


def over_least(counted: pd.DataFrame) -> pd.DataFrame:
    """What a call moved, over the least: each element once in, and once out.

    counted: a frame as `marked_counters.count_calls` gives it. Columns: `n`, `dtype`, and the
    ratios `read` and `written`, between L2 and L1, and `from_memory`, of what L2 read itself.
    """
    itemsize = counted["dtype"].map({"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8})
    least = counted["m"] * counted["n"] * itemsize
    written = counted["l2_write_sectors"] * SECTOR_BYTES
    return counted[["n", "dtype"]].assign(
        read=counted["l1_l2_read_bytes"] / least,
        written=written / least,
        from_memory=counted["dram_read_bytes"] / least,
    )


def caller_ratios(host: pd.DataFrame, column: str, suffix: str = "") -> pd.Series[float]:
    """What a call of ours takes over what one of PyTorch's takes, by the number of columns."""
    us = host.pivot(index="n", columns="impl", values=column)
    return us[OURS + suffix] / us[TORCH + suffix]


# ---- what to ship


class Choice(NamedTuple):
    """What to ship in a case. fastest: of all kernels; over_torch, over_ours: its relative speed.

    ship: ours, unless another is faster by more than `NEAR`; `torch.softmax`, where not even the
    fastest is `WORTH` its while. level: the others that are not slower than that by more than
    `NEAR`.
    """

    case: str
    fastest: str
    over_torch: float
    over_ours: float
    ship: str
    level: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """The speed of what is shipped over that of `torch.softmax`."""
        if self.ship == TORCH:
            return 1.0
        return self.over_torch / (self.over_ours if self.ship == OURS else 1)


def choose(case: str, us: pd.DataFrame, widths: Callable[[int], bool]) -> Choice | None:
    """What to ship for a case, by the geometric mean over its widths; None if it has no widths.

    Only kernels that were timed at each of these widths are candidates, and no rungs.
    """
    rows = _contestants(us[[widths(int(n)) for n in us.index]]).dropna(axis=1)
    if rows.empty or OURS not in rows or TORCH not in rows:
        return None
    speed = {name: geometric_mean(rows[TORCH] / rows[name]) for name in rows}
    fastest = max(speed, key=lambda name: speed[name])
    over_ours = speed[fastest] / speed[OURS]
    ship = OURS if over_ours <= 1 + NEAR else str(fastest)
    if speed[fastest] < WORTH:
        ship = TORCH
    level = [name for name in speed if speed[name] >= (1 - NEAR) * speed[ship] and name != ship]
    return Choice(case, str(fastest), speed[fastest], over_ours, ship, tuple(map(str, level)))


def refusals(frame: pd.DataFrame) -> pd.DataFrame:
    """What was timed of each peer, and what not: a row for each of them that has a row.

    Columns: `impl`, `version`, `timed`, `refused`, `wrong` and `imprecise`, numbers of widths;
    `absent`; `missing`, the widths that were not timed, as text; `reason`, the first refusal.
    """
    rows = []
    for name, part in frame.groupby("impl", sort=False):
        if str(name).removesuffix(BACKWARD) in PEERS:
            notes = part["note"].astype(str)
            rows.append(
                {
                    "impl": name,
                    "version": max(part["version"].astype(str)),
                    "timed": int((part["us"] > 0).sum()),
                    "refused": int(notes.str.startswith("refused").sum()),
                    "wrong": int(notes.str.startswith("wrong").sum()),
                    "imprecise": int(notes.str.startswith("imprecise").sum()),
                    "absent": bool(notes.str.startswith(ABSENT).any()),
                    "missing": spans(part.loc[part["us"] <= 0, "n"], part["n"]),
                    "reason": next(iter(notes[notes.str.startswith("refused")]), ""),
                }
            )
    return pd.DataFrame(rows)
