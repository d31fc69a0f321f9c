"""The pictures of a page, as SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

BLUE, PALE, INK, ORANGE = "#0969da", "#9ec5fe", "#1f2328", "#bc4c00"


def _svg(figure: Any) -> str:
    """A figure as SVG, the same text each time."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "memtraffic", "svg.fonttype": "path"}):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _axes(bars: int, title: str, xlabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 1.1 + 0.28 * bars), layout="constrained", facecolor="white")
    ax = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_xlabel(xlabel)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def draw_traffic(bars: Sequence[tuple[str, int, int]], title: str, sums: int) -> str:
    figure, ax = _axes(len(bars) + 2, title, "elements")
    places = range(len(bars))
    reads, writes = [read for _, read, _ in bars], [written for *_, written in bars]
    ax.barh(places, reads, color=BLUE, edgecolor=INK, linewidth=0.5, label="read")
    ax.barh(
        places, writes, left=reads, color=PALE, edgecolor=INK, linewidth=0.5, hatch="///",
        label="written",
    )  # fmt: skip
    ax.set_yticks(places, [name for name, *_ in bars])
    for label in ax.get_yticklabels()[-sums:]:
        label.set_fontweight("bold")
    ax.axhline(len(bars) - sums - 0.5, color=INK, linewidth=0.8)
    ax.margins(y=0.02)
    ax.invert_yaxis()
    ax.locator_params(axis="x", nbins=5)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return _svg(figure)


def draw_occupancy(bars: Mapping[str, Mapping[str, float]]) -> str:
    targets = list(dict.fromkeys(target for each in bars.values() for target in each))
    title = "The share of an SM's slots for warps that programs take."
    figure, ax = _axes(len(targets) * len(bars), title, "percent")
    height = 0.8 / len(bars)
    looks = [(BLUE, ""), (PALE, "///"), (ORANGE, "..."), ("white", "xxx")]
    for i, (kernel, each) in enumerate(bars.items()):
        places = [targets.index(target) + (i - (len(bars) - 1) / 2) * height for target in each]
        color, hatch = looks[i]
        drawn = ax.barh(
            places, [100 * share for share in each.values()], height=height, color=color,
            hatch=hatch, edgecolor=INK, linewidth=0.5, label=kernel.lstrip("_"),
        )  # fmt: skip
        ax.bar_label(drawn, [f"{share:.0%}" for share in each.values()], padding=3, fontsize=8)
    ax.set_yticks(range(len(targets)), targets)
    ax.invert_yaxis()
    ax.set_xlim(0, 112)
    ax.margins(y=0.02)
    if len(bars) > 1:
        figure.legend(frameon=False, loc="outside lower center")
    return _svg(figure)
