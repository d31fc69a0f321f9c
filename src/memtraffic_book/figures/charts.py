"""Charts: lines with their spread, bars, one kernel against several others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib import patheffects
from matplotlib.axes import Axes

from memtraffic_book.figures.drawing import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PROGRAM_COLORS,
    PURPLE,
    RED,
    STYLE,
    TEAL,
    TEXT,
    WIDTH,
    entitle,
    text_width,
)

# Colour, marker and dashes of the lines of a chart, in their order.
LINES: tuple[tuple[str, str, Any], ...] = (
    (BLUE, "o", "-"),
    (ORANGE, "s", (0, (5, 1.5))),
    (GREEN, "^", (0, (4, 1, 1, 1))),
    (RED, "D", (0, (1.5, 1))),
    (PURPLE, "v", (0, (7, 1, 1, 1, 1, 1))),
    (TEAL, "X", (0, (2, 2))),
)

END = "end of a line"  # a name that may be moved


def axes(
    title: str, xlabel: str, ylabel: str = "", size: tuple[float, float] = (WIDTH, 2.9)
) -> Axes:
    """Empty axes in the book's style. size: in inches. The name of the y axis stands above it."""
    plt.rcParams.update(STYLE)
    figure, ax = plt.subplots(figsize=size)
    entitle(figure, title)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel, rotation=0, ha="left", va="bottom")
    ax.yaxis.set_label_coords(0, 1.02)
    return ax


def _note(
    ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **look: Any
) -> None:
    """Writes text at a point of the data, moved by an offset in points, with a white rim."""
    rim = patheffects.withStroke(linewidth=3, foreground="white")
    ax.annotate(text, at, offset, textcoords="offset points", path_effects=[rim], **look)


def mark_position(ax: Axes, value: float, text: str, side: Literal["left", "right"]) -> None:
    """Marks a value of the x axis with a dotted line, and its name on one side of it."""
    ax.axvline(value, color=MUTED, linestyle=":", linewidth=1.2)
    offset, ha = ((5, 4), "left") if side == "right" else ((-5, 4), "right")
    _note(ax, text, (value, 0), offset, ha=ha, va="bottom", xycoords=ax.get_xaxis_transform())


# ---- lines


def plot_lines(
    lines: Mapping[str, pd.Series],
    xlabel: str,
    ylabel: str,
    *,
    title: str,
    ticks: Sequence[float] = (),
    low: Mapping[str, pd.Series] | None = None,
    high: Mapping[str, pd.Series] | None = None,
) -> Axes:
    """Lines, each with its name at its end, and the spread of what was measured as error bars.

    lines: by name, series whose index is x. ticks: of an x axis that is logarithmic then, above
    which the y axis starts at zero.
    low, high: the ends of the spread, series by the names of lines; a line may have none.
    """
    ax, low, high = axes(title, xlabel, ylabel), low or {}, high or {}
    looks = itertools.cycle(LINES)
    for name, line in lines.items():
        color, marker, dashes = (MUTED, "|", "--") if name == "copy" else next(looks)
        look: dict[str, Any] = {"color": color, "marker": marker, "linestyle": dashes}
        look["markersize"] = 5
        if name in low:
            spread = [line - low[name], high[name] - line]
            ax.errorbar(line.index, line, spread, capsize=3, elinewidth=1, **look)
        else:
            ax.plot(line.index, line, **look)
        end = line.index[-1], line.iloc[-1]
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "gid": END}
        ax.annotate(_in_two(name), end, (7, 0), color=color, annotation_clip=False, **beside)
    if ticks:
        ax.set_xscale("log", base=2)
        ax.set_ylim(0, None)
        ax.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
        ax.set_xticks([], minor=True)
    _spread_ends(ax)
    return ax


def _spread_ends(ax: Axes) -> None:
    """Moves the names of lines apart, half of it up and half down, until none lies on another."""
    figure: Any = ax.figure
    figure.draw_without_rendering()
    ends: list[Any] = [text for text in ax.texts if text.get_gid() == END]
    wanted = {end: ax.transData.transform(end.xy)[1] * 72 / figure.dpi for end in ends}
    tall = {end: 1.2 * TEXT * (end.get_text().count("\n") + 1) + 1 for end in ends}
    places = dict(wanted)
    # The ends of lines that meet, within a point, keep the order in which the lines are drawn.
    pairs = list(pairwise(sorted(ends, key=lambda end: round(wanted[end]))))
    for _ in range(300):
        for below, above in pairs:
            overlap = (tall[below] + tall[above]) / 2 - (places[above] - places[below])
            places[below] -= max(0, overlap) / 2
            places[above] += max(0, overlap) / 2
    for end in ends:
        end.set_position((7, places[end] - wanted[end]))


def _in_two(name: str) -> str:
    """Breaks a long name in two, at a space, after a dot or before a bracket.

    >>> _in_two("copy"), _in_two("compile(naive)"), _in_two("torch.softmax")
    ('copy', 'compile\\n(naive)', 'torch.\\nsoftmax')
    """
    breaks = [it.start() for it in re.finditer(r" |(?<=\.)(?=.)|(?<=.)(?=\()", name)]
    if text_width(name) < 0.85 or not breaks:
        return name
    halves = [(name[:it], name[it:].lstrip()) for it in breaks]
    return "\n".join(min(halves, key=lambda it: max(map(text_width, it))))


MAP_TICKS = {2**4: "16", 2**8: "256", 2**12: "4096", 2**16: "65 536", 2**20: "1 million"}
MAP_LOW = 12  # columns, where the axis starts


def width_map(speeds: pd.DataFrame, ends: tuple[str, str], *, title: str) -> Axes:
    """The map of the book: speeds in percent of a copy over the width of a row.

    speeds: a column for each kernel, its index is the number of columns; NaN where it does not run.
    ends: the kernels between which the book lies. Widths that are no multiple of 4 are hollow
    dots, and a line passes by them.
    """
    ax = axes(title, "columns, log scale", "% of the speed of a copy")
    ax.set_xscale("log", base=2)
    even = speeds[speeds.index % 4 == 0]
    odd = speeds[speeds.index % 4 != 0]
    for i, name in enumerate(ends):
        color, marker, dashes = LINES[i]
        line, dots = even[name].dropna(), odd[name].dropna()
        ax.plot(line.index, line, color=color, linestyle=dashes, gid=name)
        hollow: dict[str, Any] = {"marker": marker, "markersize": 4, "markerfacecolor": "white"}
        ax.plot(dots.index, dots, linestyle="", color=color, **hollow, gid=f"{name}, odd")
        at = line.index[len(line) // 3], line.iloc[len(line) // 3]
        below = i == 0 and at[1] > 25  # or it would lie on the axis
        _note(ax, name, at, (0, -17 if below else 7), color=color, weight="bold")
    ax.set(xlim=(MAP_LOW, 1.4 * 2**20), ylim=(0, 108), yticks=[0, 50, 100])
    ax.set_xticks(list(MAP_TICKS), list(MAP_TICKS.values()))
    ax.set_xticks([], minor=True)
    return ax


# ---- bars


def plot_bars(
    labels: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    xlabel: str,
    title: str,
    dark: Sequence[bool] = (),
) -> Axes:
    """Horizontal bars from zero, the first on top, each with its text at its end.

    dark: which bars stand out; by default all do.
    """
    ax = axes(title, xlabel, size=(WIDTH, 1.15 + 0.36 * len(labels)))
    color = [BLUE if it else PROGRAM_COLORS[0] for it in dark] or BLUE
    drawn = ax.barh(range(len(labels)), list(values), color=color, height=0.65)
    ax.set_yticks(range(len(labels)), list(labels))
    ax.bar_label(drawn, list(texts), padding=4)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.45 * max(values))
    ax.locator_params(axis="x", nbins=4)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    return ax
