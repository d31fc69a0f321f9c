"""How all figures of the book look: sizes, colours, hatches, titles, and a board to draw on.

On a phone a page shows a figure 343 pixels wide. A figure is therefore `WIDTH` inches wide and its
text at least `TEXT` points high, which is more than 11 of those pixels. What a figure tells apart,
it tells apart by more than colour.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from memtraffic_book import units

INK, MUTED, PALE = "#1f2328", "#59636e", "#f3f5f7"
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL = (
    "#0969da", "#bc4c00", "#1a7f37", "#cf222e", "#8250df", "#0f766e",
)  # fmt: skip
PROGRAM_COLORS = ("#9ec5fe", "#ffc9a3", "#a3dcb1", "#f3b1b6", "#cdb7f5", "#e8d98a")
WIDTH = 4.0  # inches
TEXT, TITLE = 10.0, 11.0  # points
LINE = 0.17  # inches from a line of text to the next

STYLE = rc_params_from_file(
    Path(__file__).with_name("memtraffic.mplstyle"), use_default_template=False
)


# ---- text


@functools.cache
def text_width(text: str, size: float = TEXT, weight: str = "normal") -> float:
    """The width of a line of text, in inches.

    >>> 0.5 < text_width("registers") < text_width("registers", weight="bold") < 0.9
    True

    size: in points.
    """
    font = FontProperties(family="DejaVu Sans", weight=weight)  # Matplotlib brings it
    solid = text.replace(" ", "n")  # a space has no outline
    return float(TextPath((0, 0), solid, size=size, prop=font).get_extents().width) / 72


def wrap(text: str, width: float, size: float = TEXT, weight: str = "normal") -> str:
    """Breaks text into as few lines as fit the width, and those of about the same length.

    >>> print(wrap("Each of 16 warps writes 4 kB to shared memory.", 2))
    Each of 16 warps writes
    4 kB to shared memory.

    width: in inches. size: in points. A number stays beside its unit.
    """
    together = "|".join(map(re.escape, (*units.UNITS, "KiB", "MiB", "GiB")))
    words = re.sub(rf"(\d) (?=(?:{together})(?!\w))", "\\1\N{NO-BREAK SPACE}", text).split(" ")

    def lines(most: float) -> list[str]:
        done = [words[0]]
        for word in words[1:]:
            longer = f"{done[-1]} {word}"
            if text_width(longer, size, weight) <= most:
                done[-1] = longer
            else:
                done.append(word)
        return done

    best = lines(width)
    for percent in range(95, 30, -5):
        if len(even := lines(width * percent / 100)) > len(best):
            break
        best = even
    return "\n".join(best).replace("\N{NO-BREAK SPACE}", " ")


def title_lines(title: str) -> str:
    """The title of a figure, broken into lines that fit its width."""
    return wrap(title, WIDTH - 0.1, TITLE, "bold")


def entitle(figure: Any, title: str, **look: Any) -> None:
    """Writes the one sentence that a figure says above it."""
    look = {"x": 0.04 / WIDTH, "ha": "left", "weight": "bold", "size": TITLE, **look}
    figure.suptitle(title_lines(title), **look)


# ---- a board to draw on


def board() -> Axes:
    """An empty board: x from 0 at the left to `WIDTH`, y from 0 at the top downwards, in inches."""
    plt.rcParams.update(STYLE)
    ax = plt.figure(figsize=(WIDTH, 1), layout="none").add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), xticks=[], yticks=[])
    ax.axis("off")
    return ax


def finish(ax: Axes, height: float, title: str) -> Axes:
    """Cuts a board off at `height` inches and writes its title above it. Returns the board."""
    figure: Any = ax.figure
    whole = height + 0.13 + 0.19 * (title_lines(title).count("\n") + 1)
    figure.set_size_inches(WIDTH, whole)
    ax.set_position((0, 0, 1, height / whole))
    ax.set_ylim(height, 0)
    entitle(figure, title, y=1 - 0.03 / whole, va="top")
    return ax


def box(ax: Axes, at: tuple[float, float], size: tuple[float, float], **look: Any) -> Any:
    """Draws a box from a corner, with its width and height. look: of Matplotlib's `Rectangle`."""
    return ax.add_patch(plt.Rectangle(at, *size, **look))


def write(ax: Axes, x: float, y: float, text: str, **look: Any) -> Any:
    """Writes text, centred on a point unless `ha` and `va` say otherwise."""
    return ax.text(x, y, text, **{"ha": "center", "va": "center", **look})


def arrow(
    ax: Axes, tail: tuple[float, float], head: tuple[float, float], style: str = "-|>", **look: Any
) -> None:
    """Draws an arrow from one point to another. style: `<|-|>` has two heads, `-` none."""
    given = {"color": MUTED, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    look = {**given, "arrowstyle": style, **look}
    ax.annotate("", head, tail, arrowprops=look, annotation_clip=False)


def key(ax: Axes, y: float, samples: Mapping[str, Mapping[str, Any]]) -> float:
    """Writes on a board what looks mean, in a row that breaks at the edge.

    y: of the middle of the row. samples: for what is meant, a look of a `Rectangle`. Returns how
    far down the key reaches.
    """
    x = start = 0.04
    for text, look in samples.items():
        wide = 0.3 + text_width(text)
        if x > start and x + wide > WIDTH:
            x, y = start, y + LINE + 0.05
        box(ax, (x, y - 0.07), (0.22, 0.14), **{"edgecolor": MUTED, **look})
        write(ax, x + 0.28, y, text, ha="left")
        x += wide + 0.17
    return y + 0.12
