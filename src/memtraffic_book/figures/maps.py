"""Maps: a number, a winner, a program or a thread for each cell; the programs on an SM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from memtraffic_book.figures.drawing import (
    DEAD,
    INK,
    LINE,
    MUTED,
    ORANGE,
    PROGRAM_COLORS,
    WIDTH,
    Sample,
    board,
    box,
    finish,
    key,
    styled,
    text_width,
    write,
)

if TYPE_CHECKING:
    from memtraffic.compile import BlockedLayout
    from memtraffic.meters.count import Access

LEFT, RIGHT = 0.04, WIDTH - 0.04
REST = {"facecolor": "white", "edgecolor": MUTED, "hatch": "xxxx"}


def shade(value: float) -> tuple[str, str]:
    """The fill of a cell and the colour of its text: the higher the value, the darker.

    >>> shade(0.3), shade(1.1)[1]
    (('#f7fbff', '#1f2328'), 'white')
    """
    depth = min(1.0, max(0.0, (value - 0.3) / 0.8))
    red, green, blue, _ = plt.get_cmap("Blues")(depth, bytes=True)
    light = (0.3 * red + 0.59 * green + 0.11 * blue) / 255
    return f"#{red:02x}{green:02x}{blue:02x}", INK if light > 0.55 else "white"


class _Grid(NamedTuple):
    """A board with a grid on it. left, top: its corner. wide, high: of a cell. end: below it."""

    ax: Axes
    left: float
    top: float
    wide: float
    high: float
    end: float

    def cell(self, x: int, y: int, **look: Any) -> tuple[float, float]:
        """Draws a cell by its column and row. Returns its middle."""
        at = self.left + x * self.wide, self.top + y * self.high
        box(self.ax, at, (self.wide, self.high), **{"edgecolor": "white", "lw": 1, **look})
        return at[0] + self.wide / 2, at[1] + self.high / 2


def _grid(
    rows: Sequence[Hashable],
    columns: Sequence[Hashable],
    labels: tuple[str, str],
    high: float,
) -> _Grid:
    """A grid with names beside its rows and above its columns.

    labels: what the rows are, and what the columns are. A name of a column that is a pair has its
    first half written once over its neighbours. high: inches of a row.
    """
    down, across = (f"{labels[0]} ↓", f"{labels[1]} →")
    two = text_width(down) + text_width(across) + 0.2 > RIGHT - LEFT
    names = [it[-1] if isinstance(it, tuple) else it for it in columns]
    groups = [it[0] for it in columns if isinstance(it, tuple)]
    left = LEFT + max(text_width(str(row)) for row in rows) + 0.08
    wide = (RIGHT - left) / len(columns)
    widest = max(text_width(str(name)) for name in names)
    turned = widest > wide - 0.05
    y = 0.1 + LINE * two
    top = y + 0.12 + (LINE if groups else 0) + (widest if turned else LINE) + 0.08
    end = top + len(rows) * high
    ax = board()
    write(ax, RIGHT, 0.1, across, ha="right", color=MUTED)
    write(ax, LEFT, y, down, ha="left", color=MUTED)
    for i, row in enumerate(rows):
        write(ax, left - 0.06, top + (i + 0.5) * high, str(row), ha="right")
    for i, name in enumerate(names):
        look: dict[str, Any] = {"rotation": 90} if turned else {}
        write(ax, left + (i + 0.5) * wide, top - 0.05, str(name), va="bottom", **look)
    x = left
    for group, them in itertools.groupby(groups):
        after = x + len(list(them)) * wide
        write(ax, (x + after) / 2, y + 0.12 + LINE / 2, str(group), weight="bold")
        ax.plot([x + 0.04, after - 0.04], [y + 0.12 + LINE] * 2, color=MUTED, linewidth=1)
        x = after
    return _Grid(ax, left, top, wide, high, end)


@styled
def heatmap(
    values: pd.DataFrame,
    framed: Callable[[Any, Any], bool],
    *,
    title: str,
    rows: str,
    columns: str,
    frame: str,
) -> Axes:
    """A map of shares in percent, the higher the darker, with a closed frame in chosen cells.

    values: shares, 1.0 for 100 %; the index goes down, the columns across; NaN is an empty cell.
    framed: whether the cell of a value of the index and one of the columns has a frame. rows,
    columns: what these are. frame: what a frame means.
    """
    samples = [Sample(frame, {"fill": False, "edgecolor": ORANGE, "lw": 2})]
    labels = rows, columns
    grid = _grid(list(values.index), list(values.columns), labels, 0.32)
    for (y, row), (x, column) in itertools.product(
        enumerate(values.index), enumerate(values.columns)
    ):
        value = values.loc[row, column]
        if pd.isna(value):
            continue
        fill, ink = shade(value)
        middle = grid.cell(x, y, facecolor=fill, gid="cell")
        chosen = bool(framed(row, column))
        weight = "bold" if chosen else "normal"
        write(grid.ax, *middle, f"{100 * value:.0f}", color=ink, weight=weight)
        if chosen:  # inside its cell, so that frames of neighbours stay apart
            at = middle[0] - grid.wide / 2 + 0.03, middle[1] - grid.high / 2 + 0.03
            size = grid.wide - 0.06, grid.high - 0.06
            box(grid.ax, at, size, fill=False, edgecolor="white", lw=4)
            box(grid.ax, at, size, fill=False, edgecolor=ORANGE, lw=2, gid="frame")
    write(grid.ax, LEFT, grid.end + 0.15, "number: speed in percent of a copy", ha="left")
    return finish(grid.ax, key(grid.ax, grid.end + 0.39, samples), title)


# ---- who touches and who holds what


@styled
def plot_access_map(
    accesses: Iterable[Access], shape: tuple[int, int], argument: str, title: str = ""
) -> Axes:
    """A matrix, each element with its offset, in the colour of the program that accessed it.

    accesses: of a count with `trace=True`. argument: the name of the kernel's pointer. An element
    that no program accessed is white; one that was accessed more than once says how often.
    """
    m, n = shape
    programs: dict[int, list[int]] = {offset: [] for offset in range(m * n)}
    for access in accesses:
        if access.argument == argument:
            for offset in access.offsets:
                programs.setdefault(offset, []).append(access.program[0])
    names = []
    for row in range(m):
        owners = sorted({it for offset in range(row * n, (row + 1) * n) for it in programs[offset]})
        names.append(f"program {', '.join(map(str, owners))}" if owners else "no program")
    wide = min(0.6, (WIDTH - 0.16 - max(map(text_width, names))) / n)
    high = 0.36
    ax = board()
    for offset in range(m * n):
        row, col = divmod(offset, n)
        by = programs[offset]
        color = PROGRAM_COLORS[by[0] % len(PROGRAM_COLORS)] if by else "white"
        at = (0.04 + col * wide, 0.04 + row * high)
        box(ax, at, (wide, high), facecolor=color, edgecolor=MUTED)
        text = f"{offset} ({len(by)}×)" if len(by) > 1 else str(offset)
        write(ax, at[0] + wide / 2, at[1] + high / 2, text)
    for row, name in enumerate(names):
        write(ax, 0.12 + n * wide, 0.04 + (row + 0.5) * high, name, ha="left")
    return finish(ax, m * high + 0.08, title)


@styled
def plot_thread_layout(
    layout: BlockedLayout, shape: tuple[int, int], title: str = "", *, live: int | None = None
) -> Axes:
    """Which thread holds what of a block of `shape` (rows, columns).

    Each access of a thread is a box with the thread's lane, in the colour of its warp. Where boxes
    are narrow, only some lanes are written. Boxes are hatched from column `live` on.
    """
    m, n = shape
    end = n if live is None else live
    (high, wide), down, across = layout.elements, layout.lanes, layout.warps
    left, right = 0.08 + text_width("row 0"), 0.08 + text_width("warp 0")
    unit, tall = (WIDTH - left - right) / n, 0.3
    ax = board()
    every = math.ceil(
        (text_width("00") + 0.04) / (unit * wide)
    )  # lanes between two that are written
    for y, x in itertools.product(range(m // high), range(n // wide)):
        lane = y % down[0] * down[1] + x % down[1]
        warp = y // down[0] % across[0] * across[1] + x // down[1] % across[1]
        look = {"facecolor": PROGRAM_COLORS[warp % len(PROGRAM_COLORS)], "edgecolor": "white"}
        at = (left + x * wide * unit, 0.04 + y * tall)
        if x * wide >= end:
            look = DEAD | {"gid": "dead"}
        box(ax, at, (wide * unit, tall), lw=1, **look)
        if lane % every == 0:
            write(ax, at[0] + wide * unit / 2, at[1] + tall / 2, str(lane))
        if x == n // wide - 1:
            write(ax, WIDTH - right + 0.06, at[1] + tall / 2, f"warp {warp}", ha="left")
        if x == 0:
            write(ax, left - 0.06, at[1] + tall / 2, f"row {y * high}", ha="right")
    bottom = 0.04 + m // high * tall
    for col in range(0, n, max(1, n // 4)):
        tick = left + col * unit
        ax.plot([tick, tick], [bottom, bottom + 0.06], color=MUTED, linewidth=1)
        write(ax, tick, bottom + 0.16, f"column {col}" if col == 0 else str(col))
    return finish(ax, bottom + 0.28, title)


@styled
def sm_packing(
    limits: Mapping[str, int],
    program: Mapping[str, str | tuple[int, int]] | None = None,
    *,
    title: str,
    lengths: Mapping[str, float] | None = None,
) -> Axes:
    """An SM that is packed with programs: which resource is full first.

    limits: how many programs each resource has room for, as `residency.programs_by_limit` returns
    them. program: what one program takes, as a text for each resource, such as
    `{"registers": "8,192 of 65,536"}`, or as two numbers, `{"registers": (8192, 65536)}`; then a
    rest that is too small for a program is drawn to scale, with its size. Each bar has a place for
    each program that the resource has room for; the filled ones are the programs that are resident.
    lengths: the share of the width that a bar has, 1 for those not named.
    """
    resident = min(limits.values())
    full = [name for name, most in limits.items() if most == resident]
    names = {"shared": "shared memory", "warps": "warp slots", "blocks": "block slots"}
    names |= {"lds": "LDS", "vgprs": "vector registers", "sgprs": "scalar registers"}
    names |= {"waves": "wave slots", "groups": "workgroup slots"}
    step, rests = 0.72 if program else 0.56, False
    ax = board()
    for i, (name, most) in enumerate(limits.items()):
        y, binds = i * step, name in full
        text = names.get(name, name)
        room = f"room for only {most}" if binds else f"room for {most}"
        look = {"weight": "bold", "color": ORANGE} if binds else {}
        write(ax, LEFT, y + 0.12, text, ha="left", weight="bold")
        write(ax, RIGHT, y + 0.12, room, ha="right", **look)
        length = (RIGHT - LEFT) * (lengths or {}).get(name, 1)
        takes = (program or {}).get(name, "")
        unit = " bytes" if name in ("shared", "lds") else ""
        rest, share = 0, 0.0
        if isinstance(takes, tuple):
            one, total = takes
            rest, takes = total - most * one, f"{one:,} of {total:,}{unit}"
            share = rest / total
        wide = length * (1 - share) / max(1, most)
        for place in range(most):
            taken = place < resident
            fill = PROGRAM_COLORS[place % 2] if taken else "white"
            hatch = ("", "////")[place % 2] if taken else ""
            at = (LEFT + place * wide, y + 0.24)
            look = {"facecolor": fill, "edgecolor": MUTED, "hatch": hatch}
            box(ax, at, (wide, 0.2), lw=0.7, gid="taken" if taken else "free", **look)
        if rest:
            rests, at = True, (LEFT + length * (1 - share), y + 0.24)
            box(ax, at, (length * share, 0.2), lw=0.7, gid="rest", **REST)
            write(ax, LEFT + length, y + 0.55, f"rest: {rest:,}", ha="right")
        edge: dict[str, Any] = {"edgecolor": INK, "lw": 1.2}
        if binds:
            edge = {"edgecolor": ORANGE, "lw": 2.5}
        box(ax, (LEFT, y + 0.24), (length, 0.2), fill=False, gid="bar", **edge)
        if takes:
            write(ax, LEFT, y + 0.55, f"one program: {takes}", ha="left", color=MUTED)
    samples = [Sample("a resident program", {"facecolor": PROGRAM_COLORS[0], "edgecolor": MUTED})]
    other = {"facecolor": PROGRAM_COLORS[1], "edgecolor": MUTED, "hatch": "////"}
    samples.append(Sample("the next one", other))
    samples.append(Sample("room left", {"facecolor": "white", "edgecolor": MUTED}))
    if rests:
        samples.append(Sample("rest: too small", REST))
    return finish(ax, key(ax, len(limits) * step + 0.1, samples), title)
