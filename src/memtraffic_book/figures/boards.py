"""Drawings on a board: the machine, and what its threads, warps and programs hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from memtraffic.gpus import KIB, NvidiaGpu
from memtraffic_book import units
from memtraffic_book.figures.drawing import (
    BLUE,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PROGRAM_COLORS,
    WIDTH,
    arrow,
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

# ---- the machine, and the way of the bytes through it


class _Way(NamedTuple):
    """A segment of the path: between which places, which way, how many inches from the left."""

    upper: str
    lower: str
    heads: str
    x: float


UP, DOWN, BOTH = "-|>", "<|-", "<|-|>"  # an arrow is drawn from below
SEGMENTS = {
    "dram_to_l2": _Way("l2", "dram", UP, 0.32),
    "l2_to_l1": _Way("l1", "l2", UP, 0.32),
    "l1_to_registers": _Way("registers", "l1", UP, 0.32),
    "registers_to_l1": _Way("registers", "l1", DOWN, 1.3),
    "l1_to_l2": _Way("l1", "l2", DOWN, 1.3),
    "l2_to_dram": _Way("l2", "dram", DOWN, 1.3),
    "shared": _Way("registers", "shared", BOTH, 2.36),
}
FILLS = {"dram": "#dfe4e9", "l2": "#cfe3ff", "l1": "#ffe3cc", "shared": "#ffe3cc"}
FILLS |= {"registers": "#c9ecd2"}
GAP, LANE = 0.46, 0.09  # inches between two levels, for the arrows; of a lane's box


def machine(gpu: NvidiaGpu, lit: Mapping[str, str], l2_size: str, title: str) -> Axes:
    """The machine: memory, L2, all SMs, and one SM opened up; the path in use is lit.

    gpu: it says the sizes of what an SM has. lit: the segments of the path that are in use, each
    with its bytes as a text; the others are faint. l2_size: as a text.

    The segments are `dram_to_l2`, `l2_to_l1`, `l1_to_registers`, on the way back
    `registers_to_l1`, `l1_to_l2` and `l2_to_dram`.
    """
    in_use = {place for segment in lit for place in SEGMENTS[segment][:2]}

    def place(name: str, at: tuple[float, float], size: tuple[float, float], text: str) -> None:
        """Draws a place that holds bytes; those on the path have a strong edge."""
        edge = {"ec": INK, "lw": 2} if name in in_use else {"ec": MUTED, "lw": 0.8}
        box(ax, at, size, fc=FILLS[name], gid=name, **edge)
        write(ax, at[0] + size[0] / 2, at[1] + size[1] / 2, text, linespacing=1.1)

    columns = 66  # of the processors, drawn in rows
    rows = -(-gpu.num_sms // columns)
    unit = (RIGHT - LEFT) / columns
    parts_top, part_high = 0.31, 1.3
    rail = parts_top + part_high + 0.06
    l1 = rail + GAP
    panel = l1 + 0.5
    grid = panel + 0.34
    l2 = grid + rows * unit + GAP
    dram = l2 + 0.36 + GAP
    ax = board()

    # All processors, and the first of them opened.
    corners = [(LEFT, panel), (RIGHT, panel), (LEFT + unit, grid), (LEFT, grid)]
    ax.add_patch(plt.Polygon(corners, facecolor=PALE, edgecolor="#aab4be", lw=0.8, zorder=0))
    box(ax, (LEFT, 0.03), (RIGHT - LEFT, panel - 0.03), fc=PALE, ec=MUTED, lw=1.2, gid="opened")
    beside: Any = write(ax, LEFT + 0.09, 0.17, "one SM, opened", ha="left", weight="bold")
    total = f"with {4 * gpu.registers_per_sm / KIB:g} KiB of registers"
    offset = {"xycoords": beside, "xytext": (4, 0), "textcoords": "offset points"}
    ax.annotate(total, (1, 0.5), va="center", color=MUTED, **offset)
    for i in range(gpu.num_sms):
        at = (LEFT + i % columns * unit, grid + i // columns * unit)
        fill = "#b6c2cf" if i else INK
        box(ax, at, (unit, unit), fc=fill, ec="white", lw=0.6, gid="processor")
    write(ax, RIGHT, grid - 0.12, f"{gpu.num_sms} SMs", ha="right", weight="bold")

    # The parts of the opened one.
    parts = gpu.subpartitions
    size = f"{4 * gpu.registers_per_sm / parts / KIB:g} KiB"
    wide = (RIGHT - LEFT - 0.16 - 0.06 * (parts - 1)) / parts
    for i in range(parts):
        x = LEFT + 0.08 + i * (wide + 0.06)
        box(ax, (x, parts_top), (wide, part_high), fc="white", ec=MUTED, lw=0.8, gid="part")
        write(ax, x + wide / 2, parts_top + 0.14, "scheduler")
        corner = x + (wide - 8 * LANE) / 2, parts_top + 0.27
        for lane in range(gpu.warp_size):
            at = corner[0] + lane % 8 * LANE, corner[1] + lane // 8 * LANE
            box(ax, at, (LANE, LANE), fc=PROGRAM_COLORS[0], ec="white", lw=0.6, gid="lane")
        write(ax, x + wide / 2, corner[1] + 4 * LANE + 0.1, f"{gpu.warp_size} lanes")
        bottom = parts_top + part_high - 0.04
        place("registers", (x + 0.04, bottom - 0.4), (wide - 0.08, 0.4), f"registers\n{size}")
        ax.plot([x + wide / 2] * 2, [bottom + 0.04, rail], color="#aab4be", lw=1.2)
    ends = [LEFT + 0.08, RIGHT - 0.08]  # one line under all parts: the arrows lead to each of them
    ax.plot(ends, [rail, rail], color="#aab4be", lw=1.2, gid="rail")
    half = (RIGHT - LEFT - 0.16) / 2  # of one memory, which both divide
    shared = f"shared memory\nup to {gpu.shared_per_sm / KIB:g} KiB"
    place("l1", (LEFT + 0.08, l1), (half, 0.42), "L1 cache")
    place("shared", (LEFT + 0.08 + half, l1), (half, 0.42), shared)

    # What all of them share.
    place("l2", (LEFT, l2), (RIGHT - LEFT, 0.36), f"L2 cache, {l2_size}")
    place("dram", (LEFT, dram), (RIGHT - LEFT, 0.4), "memory (DRAM)")

    # The path.
    bottoms = {"registers": rail, "l1": grid + rows * unit, "l2": l2 + 0.36}
    tops = {"l1": l1, "shared": l1, "l2": l2, "dram": dram}
    for segment, way in SEGMENTS.items():
        tail, head = (way.x, tops[way.lower] - 0.03), (way.x, bottoms[way.upper] + 0.03)
        if segment not in lit:
            arrow(ax, tail, head, way.heads, color="#aab4be", linewidth=1.2, mutation_scale=8)
            continue
        color = BLUE if way.heads == UP else ORANGE
        arrow(ax, tail, head, way.heads, color=color, linewidth=3, mutation_scale=15)
        look = {"ha": "left", "color": color, "weight": "bold"}
        write(ax, way.x + 0.13, (tail[1] + head[1]) / 2, lit[segment], **look)
    return finish(ax, dram + 0.44, title)


def strip(stops: Sequence[str], texts: Sequence[str], *, title: str) -> Axes:
    """The way of the bytes as a strip: places in a row, and what goes from each to the next.

    stops: names of places, from DRAM on; those of the machine have its colours.
    texts: the bytes between each place and the next, one fewer than places.
    """
    gap, high = 0.28, 0.42
    wide = (RIGHT - LEFT - gap * len(texts)) / len(stops)
    ax = board()
    for i, stop in enumerate(stops):
        x = LEFT + i * (wide + gap)
        look = {"fc": FILLS.get(stop.lower(), PALE), "ec": INK}
        box(ax, (x, 0.32), (wide, high), lw=1.2, gid="stop", **look)
        write(ax, x + wide / 2, 0.32 + high / 2, stop)
    for i, text in enumerate(texts):
        x, y = LEFT + (i + 1) * wide + i * gap, 0.32 + high / 2
        arrow(ax, (x + 0.02, y), (x + gap - 0.02, y), color=BLUE, linewidth=3, mutation_scale=12)
        write(ax, x + gap / 2, 0.15, text, color=BLUE, weight="bold", gid="bytes")
    return finish(ax, 0.32 + high + 0.06, title)


# ---- who touches and who holds what


def plot_thread_layout(layout: BlockedLayout, shape: tuple[int, int], *, title: str) -> Axes:
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


def full_and_empty(sms: Sequence[Mapping[str, Any]], *, title: str) -> Axes:
    """Two SMs side by side, each with its warp slots, its bytes in flight, and its speed.

    A dot in a slot is a load for which each lane of its warp waits; wide loads are tall dots. sms:
    of each, how many of its `slots` have a warp; `loads` of each lane, while it waits, and their
    `load_bytes`; `flight_bytes`; the speed as a `share` of a copy's.
    """
    ax, grid, top = board(), SIDE * SLOT, 0.76
    below = top + grid + 0.2
    for i, (sm, color) in enumerate(zip(sms, (ORANGE, BLUE), strict=True)):
        middle = WIDTH * (i + 0.5) / len(sms)
        many = f"{sm['loads']} loads" if sm["loads"] > 1 else "1 load"
        write(ax, middle, 0.1, f"{sm['slots']} of {SIDE**2} warp slots", weight="bold", size=12)
        waits = f"a lane waits for\n{many} of {sm['load_bytes']} bytes"
        write(ax, middle, 0.32, waits, va="top")
        for slot in range(SIDE**2):
            at = middle - grid / 2 + slot % SIDE * SLOT, top + slot // SIDE * SLOT
            size = SLOT - 0.03, SLOT - 0.03
            if slot < sm["slots"]:
                fill = PROGRAM_COLORS[1 - i]
                box(ax, at, size, facecolor=fill, edgecolor=INK, lw=1, gid="filled")
                _loads(ax, at, sm)
            else:
                box(ax, at, size, facecolor="white", edgecolor=MUTED, lw=0.5, gid="empty")
        write(ax, middle, below, f"{units.format_bytes(sm['flight_bytes'])} in flight")
        percent = units.format_share(sm["share"])
        write(ax, middle, below + 0.3, percent, weight="bold", size=22, color=color)
    write(ax, WIDTH / 2, below + 0.58, "of the speed of a copy", color=MUTED)
    return finish(ax, below + 0.72, title)


def _loads(ax: Axes, at: tuple[float, float], sm: Mapping[str, Any]) -> None:
    """A dot for each load of a slot, from its upper left corner."""
    side = math.isqrt(sm["loads"] - 1) + 1  # dots in a row
    step = (SLOT - 0.03) / side
    high = 0.55 * step if sm["load_bytes"] >= 16 else 0.22 * step
    for dot in range(sm["loads"]):
        x, y = at[0] + (dot % side + 0.22) * step, at[1] + (dot // side + 0.5) * step
        box(ax, (x, y - high / 2), (0.56 * step, high), fc=INK, ec="none", gid="load")


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
