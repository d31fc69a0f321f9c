"""SMs as grids of warp slots: who waits for how many letters, and how fast that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from memtraffic_book import units
from memtraffic_book.figures.drawing import (
    BLUE,
    INK,
    MUTED,
    ORANGE,
    PROGRAM_COLORS,
    WIDTH,
    board,
    box,
    finish,
    write,
)

SIDE, SLOT = 8, 0.2  # slots in a row of the grid, and inches from one to the next


@dataclass(frozen=True)
class Slots:
    """What the warps of one SM wait for, and how fast they are.

    filled: slots with a warp, of `SIDE` squared. loads, load_bytes: of each lane, while it waits.
    share: the speed, 1 is that of a copy.
    """

    filled: int
    loads: int
    load_bytes: int
    share: float

    @property
    def flight_bytes(self) -> int:
        """Bytes in flight on this SM."""
        return 32 * self.filled * self.loads * self.load_bytes


def full_and_empty(sms: Sequence[Slots], *, title: str) -> Axes:
    """SMs side by side, each with its warp slots, its bytes in flight, and its speed.

    A dot in a slot is a load for which each lane of its warp waits; wide loads are tall dots.
    """
    ax, grid = board(), SIDE * SLOT
    for i, (sm, color) in enumerate(zip(sms, (ORANGE, BLUE), strict=False)):
        middle = WIDTH * (i + 0.5) / len(sms)
        many = f"{sm.loads} loads" if sm.loads > 1 else "1 load"
        write(ax, middle, 0.1, f"{sm.filled} of {SIDE**2} slots", weight="bold", size=12)
        write(ax, middle, 0.32, f"a lane waits for\n{many} of {sm.load_bytes} bytes", va="top")
        left, top = middle - grid / 2, 0.76
        for slot in range(SIDE**2):
            at = (left + slot % SIDE * SLOT, top + slot // SIDE * SLOT)
            _slot(ax, at, sm if slot < sm.filled else None, i)
        flight = units.format_bytes(sm.flight_bytes)
        below = top + grid + 0.2
        write(ax, middle, below, f"{flight} in flight")
        percent = f"{100 * sm.share:.0f} %"
        write(ax, middle, below + 0.3, percent, weight="bold", size=22, color=color)
    write(ax, WIDTH / 2, below + 0.58, "of the speed of a copy", color=MUTED)
    return finish(ax, below + 0.72, title)


def _slot(ax: Axes, at: tuple[float, float], sm: Slots | None, place: int) -> None:
    """One slot from its upper left corner: empty, or with a dot for each load."""
    x, y = at
    size = (SLOT - 0.03, SLOT - 0.03)
    if sm is None:
        box(ax, at, size, facecolor="white", edgecolor=MUTED, lw=0.5, gid="empty")
        return
    fill = PROGRAM_COLORS[1 - place % 2]
    box(ax, at, size, facecolor=fill, edgecolor=INK, lw=1, gid="filled")
    side = math.isqrt(max(0, sm.loads - 1)) + 1  # dots in a row
    step = size[0] / side
    high = 0.55 * step if sm.load_bytes >= 16 else 0.22 * step
    for dot in range(sm.loads):
        center = x + (dot % side + 0.5) * step, y + (dot // side + 0.5) * step
        corner = center[0] - 0.28 * step, center[1] - high / 2
        box(ax, corner, (0.56 * step, high), facecolor=INK, edgecolor="none", gid="load")
