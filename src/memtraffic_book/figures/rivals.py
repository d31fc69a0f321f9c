"""One kernel against several others: a panel for each of them, over the width."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import offset_copy

from memtraffic_book.figures.charts import LINES, panels
from memtraffic_book.figures.drawing import GRID, INK, MUTED, TEXT, WIDTH, halo, styled

HIGH = 0.68  # inches of a panel
STEP = 1.35  # from one point with a marker to the next, as a ratio of widths


@styled
def rivals(shares: pd.DataFrame, ours: str, title: str = "", roof: str = "a copy") -> Figure:
    """Draws the share of a roof that kernels reach over the width: ours in grey, and another's.

    shares: a column for each kernel, whose index is the number of columns; NaN where a kernel was
    not timed. Each column but `ours` gets a panel with its name. Where the other kernel is faster,
    the gap between the two is hatched. roof: what a share of 1 is.
    """
    others = [str(name) for name in shares.columns if name != ours]
    size = (WIDTH, 1.15 + HIGH * len(others))
    figure, axes = panels(len(others), size, title)
    engine: Any = figure.get_layout_engine()
    engine.set(h_pad=0.03, hspace=0)
    widths, mine = shares.index.to_numpy(), 100 * shares[ours]
    top = 100 * max(1.0, float(shares.max().max()))
    bottom = min(40, 100 * float(shares.min().min()) - 35)  # room for the name
    for i, (ax, name) in enumerate(zip(axes, others, strict=True)):
        line = 100 * shares[name]
        color, marker, dashes = LINES[i % len(LINES)]
        ax.plot(widths, mine, color=MUTED, linewidth=3.5, alpha=0.45, solid_capstyle="butt")
        there = line.dropna()
        look: dict[str, Any] = {
            "color": color,
            "marker": marker,
            "linestyle": dashes,
            "linewidth": 1.3,
        }
        ax.plot(there.index, there, markersize=4, markevery=_spread(list(there.index)), **look)
        both = line.notna() & mine.notna()
        hatch: dict[str, Any] = {"edgecolor": color, "hatch": "////", "linewidth": 0}
        where = (both & (line > mine)).tolist()
        ax.fill_between(
            widths, line, mine, where=where, interpolate=True, facecolor="none", **hatch
        )
        ax.set_xscale("log", base=2)
        ticks = [2**k for k in (8, 12, 16) if widths.min() <= 2**k <= widths.max()]
        ax.set_xticks(ticks, [] if ax is not axes[-1] else [str(tick) for tick in ticks])
        ax.set_xticks([], minor=True)
        ax.set_xlim(0.85 * widths.min(), 1.15 * widths.max())
        ax.set_ylim(bottom, 1.05 * top)
        ax.set_yticks([50, 100])
        ax.axhline(100, color=INK, linestyle=(0, (6, 3)), linewidth=0.8)
        place = offset_copy(ax.transAxes, figure, 4, 4, units="points")
        halo(ax.text(0, 0, name, transform=place, color=color, weight="bold"))
        ax.grid(color=GRID)
    label = f"percent of the speed of {roof}\n(thick grey line: {ours})"
    axes[0].set_title(label, fontsize=TEXT, weight="normal")
    axes[-1].set_xlabel("columns, log scale")
    return figure


def _spread(widths: list[float]) -> list[int]:
    """Of sorted widths, the places of some that are far enough apart on a logarithmic axis.

    >>> _spread([256, 300, 1024, 1100, 2048])
    [0, 2, 4]
    """
    found: list[int] = []
    for place, width in enumerate(widths):
        if not found or width >= STEP * widths[found[-1]]:
            found.append(place)
    return found
