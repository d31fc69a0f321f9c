"""The machine: memory, caches and processors, and the way of the bytes through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from memtraffic.gpus import KIB, NvidiaGpu
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
    write,
)


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
LEFT, RIGHT = 0.04, WIDTH - 0.04
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
