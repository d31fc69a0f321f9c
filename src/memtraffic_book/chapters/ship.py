"""The folded cells of `book/ship.ipynb`: what to call, read from what was timed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from typing import NamedTuple

import pandas as pd
import torch

from memtraffic.benchmark.decision import CANDIDATES, choose
from memtraffic_book import claim, experiments, figures, glue, recording, tables, units

TYPES = ("float32", "bfloat16")
CASES = {
    f"{dtype}{', with gradient' * gradient}": f"decision{'_gradient' * gradient}_{dtype}"
    for gradient in (False, True)
    for dtype in TYPES
}
SHORT = {
    "torch.softmax": "torch",
    "compile(torch.softmax)": "torch.compile",
    "memtraffic.softmax": "memtraffic",
}
ON_GPU, CALLED, IN_GRAPH = "us", "eager_us", "graph_us"
CALLED_AT = (8, 4096)  # rows, at which a page shows what the caller sees
FLAT = 95  # % of a copy, from which on a line counts as flat

Frames = Mapping[str, pd.DataFrame]


def load() -> dict[str, pd.DataFrame]:
    """What was timed of each of `CASES`; which kernel is the answer is read off the recordings."""
    return dict(zip(CASES, recording.experiments_for_verdicts(*CASES.values()), strict=True))


def short(name: str) -> str:
    """The name of a candidate, short enough for a table."""
    return SHORT.get(name, name)


def answers(frame: pd.DataFrame, column: str = ON_GPU) -> pd.Series[str]:
    """What to call at each shape, by columns `n` and rows `m`. column: the times that decide."""
    keys = ["n", "m"]
    found = {key: choose(part, column) for key, part in frame.groupby(keys)}
    return pd.Series(found, dtype=object).rename_axis(keys)


def runs(found: pd.Series[str]) -> str:
    """The answers at one width as text, from few rows to many.

    >>> runs(pd.Series({8: "torch.softmax", 64: "torch.softmax", 4096: "QuACK"}))
    'torch to 64, then QuACK'

    found: by the number of rows.
    """
    parts = [
        (name, [m for m, _ in some]) for name, some in groupby(found.items(), lambda it: it[1])
    ]
    *before, (last, _) = parts
    text = "".join(f"{short(name)} to {rows[-1]}, then " for name, rows in before)
    return text + short(last)


def show_decision(frames: Frames) -> None:
    """Shows what to call at each width and number of rows, by the time on the GPU."""
    found = {case: answers(frame) for case, frame in frames.items()}
    rows = next(iter(found.values()))
    tables.show(
        sorted(set(rows.index.get_level_values("n"))),
        columns=lambda n: n,
        **{case: lambda n, it=it: runs(it.loc[n]) for case, it in found.items()},
        rows_up_to=lambda n: max(rows.loc[n].index),
    )


class Threshold(NamedTuple):
    """A size of the matrix, below which `torch.softmax` is the answer.

    megabytes: of the matrix. below, small: how many smaller cases have that answer, of how many.
    above, large: how many larger cases have another one, of how many.
    """

    megabytes: float
    below: int
    small: int
    above: int
    large: int


def threshold(frames: Frames, column: str) -> Threshold:
    """The size in whole MB that tells best where `torch.softmax` is the answer.

    column: the times that decide.
    """
    cases = []
    for frame in frames.values():
        itemsize = getattr(torch, frame["dtype"].iloc[0]).itemsize
        for (n, m), name in answers(frame, column).items():
            cases.append((m * n * itemsize / 1e6, name == CANDIDATES[0]))
    sizes = sorted({size for size, _ in cases})
    middles = [(one * two) ** 0.5 for one, two in pairwise(sizes)]
    found = []
    for middle in middles:
        size = float(f"{middle:.1g}") if middle < 10 else float(round(middle))
        small = [is_torch for it, is_torch in cases if it < size]
        large = [not is_torch for it, is_torch in cases if it >= size]
        found.append(Threshold(size, sum(small), len(small), sum(large), len(large)))
    return max(found, key=lambda it: it.below + it.above)


def show_thresholds(frames: Frames) -> None:
    """Claims below how many MB `torch.softmax` is to be called, by each of three clocks."""
    ways = {
        "gpu": (ON_GPU, "By the time on the GPU"),
        "called": (CALLED, "Called one by one"),
        "graph": (IN_GRAPH, "In a CUDA graph"),
    }
    for name, (column, how) in ways.items():
        it = threshold(frames, column)
        size = f"{it.megabytes:g} MB"
        claim(
            f"{how}, torch.softmax is the answer in {it.below} of {it.small} cases of less than "
            f"{size}, and in {it.large - it.above} of {it.large} larger ones.",
            it.below + it.above > 0.75 * (it.small + it.large),
        )
        glue(f"{name}_mb", size)


def show_times(frames: Frames, dtype: str) -> None:
    """Shows what to call at few and at many rows and its time in µs, by the three clocks."""
    columns = {
        f"{what}{heading}": (answers(frame, column), frame.set_index(["n", "m", "impl"])[column])
        for what, frame in zip(
            ("", "gradient_"), (frames[it] for it in CASES if dtype in it), strict=True
        )
        for heading, column in (("GPU", ON_GPU), ("called", CALLED), ("graph", IN_GRAPH))
    }
    [(first, _), *_] = columns.values()

    def cell(it: tuple[pd.Series[str], pd.Series[float]], key: tuple[int, int]) -> str:
        name = it[0][key]
        return f"{short(name)} {number(it[1][(*key, name)])}" if name in CANDIDATES else name

    tables.show(
        [key for key in first.index if key[1] in CALLED_AT],
        columns=lambda key: key[0],
        rows_=lambda key: key[1],
        **{name: lambda key, it=it: cell(it, key) for name, it in columns.items()},
    )


def number(us: float) -> str:
    """Microseconds with two digits that count, without their unit.

    >>> number(4.96), number(31.4), number(1234.5)
    ('5.0', '31', '1,234')
    """
    return f"{us:.1f}" if us < 9.95 else f"{us:,.0f}"


def wrong(frames: Frames) -> Iterator[tuple[str, str]]:
    """What gave a wrong result, and where: the kernel and case, and the judge's note."""
    for case, frame in frames.items():
        bad = frame[frame["note"].astype(str).str.startswith("wrong")]
        for (name, n), part in bad.groupby(["impl", "n"]):
            row = part.iloc[0]
            yield f"{name} {row['version']}, {row['m']} x {n}, {case}", row["note"]


def show_wrong(frames: Frames) -> None:
    """Names each kernel whose result was wrong, and claims how many of all results were."""
    found = list(wrong(frames))
    for where, note in found:
        print(f"{where}: {note}")
    notes = pd.concat(frames.values())["note"].astype(str)
    judged = ~notes.str.startswith(("absent", "refused"))
    bad = notes.str.startswith("wrong").sum()
    claim(
        f"Of {judged.sum()} results that were judged, {bad} are wrong, none of them by "
        "torch.softmax or memtraffic.softmax.",
        not any(where.startswith(("torch", "memtraffic")) for where, _ in found),
    )
    glue("wrong", str(bad))


def show_attention() -> None:
    """Shows what attention takes with a softmax of its scores, and without scores."""
    [frame] = experiments("decision_attention")
    us = frame.pivot(index="n", columns="impl", values="us")
    fused = "scaled_dot_product_attention"
    tables.show(
        us.index,
        words=lambda n: n,
        **{
            f"{short(name)}{what.replace(', ', '_').replace(' ', '_')}": (
                lambda n, name=name, what=what: units.format_us(us.loc[n, name + what])
            )
            for what in ("", ", with gradient")
            for name in ("torch.softmax", "memtraffic.softmax", fused)
        },
    )
    gain = (us["memtraffic.softmax"] / us[fused]).min()
    claim(
        f"{fused} takes at most 1/{gain:.1f} of the time of attention with memtraffic.softmax "
        "(less than half needed).",
        gain > 2,
    )
    glue("attention", units.format_ratio(gain))


def draw_map() -> None:
    """Draws how flat the line became, in both types, beside `torch.softmax`."""
    frames = dict(zip(TYPES, experiments(*(f"map_{it}" for it in TYPES)), strict=True))
    speeds = {}
    for dtype, frame in frames.items():
        us = frame[frame["us"] > 0].pivot(index="n", columns="impl", values="us")
        for name in ("memtraffic.softmax", "torch.softmax"):
            speeds[name, dtype] = 100 * us["copy"] / us[name]
    ours = pd.DataFrame({dtype: speeds["memtraffic.softmax", dtype] for dtype in TYPES})
    flat = (ours >= FLAT).sum()
    lines = {f"memtraffic, {dtype}": ours[dtype] for dtype in TYPES}
    lines["torch, float32"] = speeds["torch.softmax", "float32"]
    title = f"The last kernel reaches {FLAT} % of a copy at {flat.sum()} of {ours.size} widths."
    figures.plot_lines(lines, "columns", "% of the speed of a copy", title=title, log2=True)
    for dtype in TYPES:
        low = ours[dtype][ours[dtype] < FLAT].sort_values()
        places = ", ".join(f"{value:.0f} % at {n}" for n, value in low.items())
        print(f"Below {FLAT} % of a copy, {dtype}: {places}")
    claim(
        f"In float32 the last kernel reaches {FLAT} % of the speed of a copy at "
        f"{flat['float32']} of {len(ours)} widths, and in bfloat16 at {flat['bfloat16']} "
        "(more than half needed).",
        (flat > len(ours) / 2).all(),
    )
    gain = statistics.geometric_mean(
        speeds["memtraffic.softmax", "float32"] / speeds["torch.softmax", "float32"]
    )
    for name, value in {
        "flat32": flat["float32"], "flat16": flat["bfloat16"], "widths": len(ours)
    }.items():  # fmt: skip
        glue(name, str(value))
    glue("lowest", f"{ours.min().min():.0f} %")
    glue("over_torch", units.format_ratio(gain))
    glue("step", units.format_ratio(1 / (0.9 + 0.1 / gain)))
