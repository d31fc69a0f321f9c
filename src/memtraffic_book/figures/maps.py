"""Maps: a program or a thread for each element of a matrix; the warps and programs of an SM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    key,
    text_width,
    write,
)

if TYPE_CHECKING:
    from memtraffic.residency import BlockedLayout

LEFT, RIGHT = 0.04, WIDTH - 0.04


# ---- who touches and who holds what


def plot_thread_layout(layout: BlockedLayout, shape: tuple[int, int], title: str = "") -> Axes:
    """Which thread holds what of a block of `shape` (rows, columns).

    Each access of a thread is a box with the thread's lane, in the colour of its warp. Where boxes
    are narrow, only some lanes are written.
    """
    m, n = shape
    (high, wide), down, across = layout.elements, layout.lanes, layout.warps
    left, right = 0.08 + text_width("row 0"), 0.08 + text_width("warp 0")
    unit, tall = (WIDTH - left - right) / n, 0.3
    ax = board()
    # Lanes between two that are written.
    every = math.ceil((text_width("00") + 0.04) / (unit * wide))
    for y, x in itertools.product(range(m // high), range(n // wide)):
        lane = y % down[0] * down[1] + x % down[1]
        warp = y // down[0] % across[0] * across[1] + x // down[1] % across[1]
        look = {"facecolor": PROGRAM_COLORS[warp % len(PROGRAM_COLORS)], "edgecolor": "white"}
        at = (left + x * wide * unit, 0.04 + y * tall)
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


# ---- what an SM has room for

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
        write(ax, middle, 0.1, f"{sm.filled} of {SIDE**2} warp slots", weight="bold", size=12)
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


RESOURCES = {
    "registers": "registers",
    "shared": "shared memory",
    "warps": "warp slots",
    "blocks": "places for programs",
}


def sm_packing(limits: Mapping[str, int], *, title: str) -> Axes:
    """An SM that is packed with programs: which resource is full first.

    limits: how many programs each resource has room for, as `residency.programs_by_limit` returns
    them for a GPU of NVIDIA's. Each bar has a place for each program that the resource has room
    for; the filled ones are the programs that are resident.
    """
    resident, step, length = min(limits.values()), 0.56, RIGHT - LEFT
    fills = {"facecolor": PROGRAM_COLORS[0]}, {"facecolor": PROGRAM_COLORS[1], "hatch": "////"}
    free = {"facecolor": "white"}
    ax = board()
    for i, (name, most) in enumerate(limits.items()):
        y, binds, wide = i * step, most == resident, length / max(1, most)
        look = {"weight": "bold", "color": ORANGE} if binds else {}
        room = f"room for only {most}" if binds else f"room for {most}"
        write(ax, LEFT, y + 0.12, RESOURCES[name], ha="left", weight="bold")
        write(ax, RIGHT, y + 0.12, room, ha="right", **look)
        for place in range(most):
            gid, fill = ("taken", fills[place % 2]) if place < resident else ("free", free)
            at = LEFT + place * wide, y + 0.24
            box(ax, at, (wide, 0.2), lw=0.7, gid=gid, edgecolor=MUTED, **fill)
        edge = {"edgecolor": ORANGE, "lw": 2.5} if binds else {"edgecolor": INK, "lw": 1.2}
        box(ax, (LEFT, y + 0.24), (length, 0.2), fill=False, gid="bar", **edge)
    names = "a resident program", "the next one", "room left"
    samples = dict(zip(names, (*fills, free), strict=True))
    return finish(ax, key(ax, len(limits) * step + 0.1, samples), title)
