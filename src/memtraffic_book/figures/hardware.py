"""The machine: memory, caches and processors, and the way of the bytes through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from memtraffic.gpus import KIB, AmdGpu, Gpu, NvidiaGpu
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
    write,
)

Segment = Literal[
    "dram_to_l2", "l2_to_l1", "l1_to_registers", "registers_to_l1", "l1_to_l2", "l2_to_dram",
    "shared",
]  # fmt: skip


class _Way(NamedTuple):
    """A segment of the path: between which places, which way, how many inches from the left."""

    upper: str
    lower: str
    heads: str
    x: float


UP, DOWN, BOTH = "-|>", "<|-", "<|-|>"  # an arrow is drawn from below
SEGMENTS: dict[Segment, _Way] = {
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
GAP = 0.46  # inches between two levels, for the arrows


class _Words(NamedTuple):
    """What a vendor calls the parts, and how large those of one processor are."""

    processor: str
    processors: str
    part: str  # of a processor: what runs one warp at a time
    parts: int
    register_bytes: int  # of one part
    shared: str
    up_to: str  # before the size of shared memory, where L1 may take of it


def _words(gpu: Gpu) -> _Words:
    if isinstance(gpu, AmdGpu):
        register_bytes = (gpu.vgprs + gpu.agprs) * gpu.warp_size * 4
        one, all_ = ("compute unit", "CUs") if gpu.warp_size == 64 else ("WGP", "WGPs")
        return _Words(one, all_, "SIMD", gpu.simds, register_bytes, "LDS", "")
    if isinstance(gpu, NvidiaGpu):
        parts, register_bytes = gpu.subpartitions, gpu.registers_per_sm * 4
        words = "SM", "SMs", "scheduler", parts, register_bytes // parts, "shared memory", "up to "
        return _Words(*words)
    raise TypeError(f"machine: nothing is known of a processor of {gpu.vendor}")


def machine(
    gpu: Gpu,
    *,
    speeds: Mapping[str, str] | None = None,
    lit: Mapping[Segment, str] | None = None,
    sizes: Mapping[str, str] | None = None,
    title: str = "",
) -> Axes:
    """The machine: memory, L2, all SMs, and one SM opened up; the path in use is lit.

    gpu: its vendor's words, and the sizes of what an SM has. speeds: texts such as `4273 GB/s`,
    for the way between memory and L2 (`dram`), L2 and L1 (`l2`), L1 and the registers (`l1`). lit:
    the segments of the path that are in use, each with its bytes as a text; the others are faint.
    sizes: texts for what the table of GPUs does not know: `dram`, `l2` and `l1`.

    The segments are `dram_to_l2`, `l2_to_l1`, `l1_to_registers`, on the way back
    `registers_to_l1`, `l1_to_l2`, `l2_to_dram`, and `shared`, the exchange through shared memory.
    """
    words, speeds, lit = _words(gpu), speeds or {}, lit or {}
    known = {"l2": units.format_bytes(gpu.l2_bytes)} if gpu.l2_bytes else {}
    sizes = {**known, **(sizes or {})}
    title = title or (
        f"Numbers travel from the memory of the {gpu.product} to the registers of one of its "
        f"{gpu.num_sms} {words.processors}, and back."
    )
    in_use = {place for segment in lit for place in SEGMENTS[segment][:2]}

    def place(name: str, at: tuple[float, float], size: tuple[float, float]) -> None:
        """Draws a place that holds bytes; those on the path have a strong edge."""
        edge = {"ec": INK, "lw": 2} if name in in_use else {"ec": MUTED, "lw": 0.8}
        box(ax, at, size, fc=FILLS[name], gid=name, **edge)

    columns = 66  # of the processors, drawn in rows
    rows = -(-gpu.num_sms // columns)
    unit = (RIGHT - LEFT) / min(columns, gpu.num_sms)
    unit = min(unit, 0.12)
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
    name = f"one {words.processor}, opened"
    beside: Any = write(ax, LEFT + 0.09, 0.17, name, ha="left", weight="bold")
    total = f"with {words.parts * words.register_bytes / KIB:g} KiB of registers"
    offset = {"xycoords": beside, "xytext": (4, 0), "textcoords": "offset points"}
    ax.annotate(total, (1, 0.5), va="center", color=MUTED, **offset)
    for i in range(gpu.num_sms):
        at = (LEFT + i % columns * unit, grid + i // columns * unit)
        look = {"fc": INK, "ec": "white"} if i == 0 else {"fc": "#b6c2cf", "ec": "white"}
        box(ax, at, (unit, unit), lw=0.6, gid="processor", **look)
    write(ax, RIGHT, grid - 0.12, f"{gpu.num_sms} {words.processors}", ha="right", weight="bold")

    # The parts of the opened one.
    wide = (RIGHT - LEFT - 0.16 - 0.06 * (words.parts - 1)) / words.parts
    for i in range(words.parts):
        x = LEFT + 0.08 + i * (wide + 0.06)
        box(ax, (x, parts_top), (wide, part_high), fc="white", ec=MUTED, lw=0.8, gid="part")
        write(ax, x + wide / 2, parts_top + 0.14, words.part)
        across = gpu.warp_size // 4
        cell = min(0.09, (wide - 0.1) / across), 0.09
        corner = x + (wide - across * cell[0]) / 2
        for lane in range(gpu.warp_size):
            at = (corner + lane % across * cell[0], parts_top + 0.27 + lane // across * cell[1])
            box(ax, at, cell, fc=PROGRAM_COLORS[0], ec="white", lw=0.6, gid="lane")
        write(ax, x + wide / 2, parts_top + 0.27 + 4 * cell[1] + 0.1, f"{gpu.warp_size} lanes")
        bottom = parts_top + part_high - 0.04
        place("registers", (x + 0.04, bottom - 0.4), (wide - 0.08, 0.4))
        size = f"{words.register_bytes / KIB:g} KiB"
        write(ax, x + wide / 2, bottom - 0.2, f"registers\n{size}", linespacing=1.1)
        ax.plot([x + wide / 2] * 2, [bottom + 0.04, rail], color="#aab4be", lw=1.2)
    ends = [LEFT + 0.08, RIGHT - 0.08]  # one line under all parts: the arrows lead to each of them
    ax.plot(ends, [rail, rail], color="#aab4be", lw=1.2, gid="rail")
    apart = 0 if words.up_to else 0.06  # one memory, which both divide, or two
    half = (RIGHT - LEFT - 0.16 - apart) / 2
    shared = f"{words.up_to}{gpu.shared_per_sm / KIB:g} KiB"
    for name, x, text in (
        ("l1", LEFT + 0.08, _with_size("L1 cache", sizes.get("l1", ""), "\n")),
        ("shared", LEFT + 0.08 + half + apart, f"{words.shared}\n{shared}"),
    ):
        place(name, (x, l1), (half, 0.42))
        write(ax, x + half / 2, l1 + 0.21, text, linespacing=1.1)

    # What all of them share.
    place("l2", (LEFT, l2), (RIGHT - LEFT, 0.36))
    write(ax, WIDTH / 2, l2 + 0.18, _with_size("L2 cache", sizes.get("l2", "")))
    place("dram", (LEFT, dram), (RIGHT - LEFT, 0.4))
    write(ax, WIDTH / 2, dram + 0.2, _with_size("memory (DRAM)", sizes.get("dram", "")))

    # The path.
    bottoms = {"registers": rail, "l1": grid + rows * unit, "l2": l2 + 0.36}
    tops = {"l1": l1, "shared": l1, "l2": l2, "dram": dram}
    for segment, way in SEGMENTS.items():
        tail, head = (way.x, tops[way.lower] - 0.03), (way.x, bottoms[way.upper] + 0.03)
        if segment not in lit:
            arrow(ax, tail, head, way.heads, color="#aab4be", linewidth=1.2, mutation_scale=8)
            continue
        color = {UP: BLUE, DOWN: ORANGE, BOTH: INK}[way.heads]
        arrow(ax, tail, head, way.heads, color=color, linewidth=3, mutation_scale=15)
        look = {"ha": "left", "color": color, "weight": "bold"}
        write(ax, way.x + 0.13, (tail[1] + head[1]) / 2, lit[segment], **look)
    for name, top in {"dram": dram, "l2": l2, "l1": l1}.items():
        if name in speeds:
            write(ax, RIGHT - 0.08, top - GAP / 2, speeds[name], ha="right", color=MUTED)
    return finish(ax, dram + 0.44, title)


def _with_size(name: str, size: str, between: str = ", ") -> str:
    return f"{name}{between}{size}" if size else name


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
