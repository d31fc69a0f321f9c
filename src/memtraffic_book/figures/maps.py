"""Maps: a program or a thread for each element of a matrix; the programs on an SM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from memtraffic_book.figures.drawing import (
    INK,
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
    every = math.ceil(
        (text_width("00") + 0.04) / (unit * wide)
    )  # lanes between two that are written
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
