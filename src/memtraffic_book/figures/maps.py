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
    text_width,
    write,
)

if TYPE_CHECKING:
    from memtraffic.compile import BlockedLayout
    from memtraffic.meters.count import Access

LEFT, RIGHT = 0.04, WIDTH - 0.04
REST = {"facecolor": "white", "edgecolor": MUTED, "hatch": "xxxx"}


# ---- who touches and who holds what


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


RESOURCES = {
    "shared": "shared memory",
    "warps": "warp slots",
    "blocks": "block slots",
    "lds": "LDS",
    "vgprs": "vector registers",
    "sgprs": "scalar registers",
    "waves": "wave slots",
    "groups": "workgroup slots",
}


def sm_packing(
    limits: Mapping[str, int],
    program: Mapping[str, tuple[int, int]] | None = None,
    *,
    title: str,
    lengths: Mapping[str, float] | None = None,
) -> Axes:
    """An SM that is packed with programs: which resource is full first.

    limits: how many programs each resource has room for, as `residency.programs_by_limit` returns
    them. program: what one program takes of a resource, and how much there is, such as
    `{"registers": (8192, 65536)}`; a rest that is too small for a program is drawn to scale. Each
    bar has a place for each program that the resource has room for; the filled ones are the
    programs that are resident. lengths: the share of the width that a bar has, 1 for those not
    named.
    """
    resident, step = min(limits.values()), 0.72 if program else 0.56
    fills = {"facecolor": PROGRAM_COLORS[0]}, {"facecolor": PROGRAM_COLORS[1], "hatch": "////"}
    free: dict[str, Any] = {"facecolor": "white"}
    samples = dict(zip(("a resident program", "the next one"), fills, strict=True))
    samples["room left"] = free
    ax = board()
    for i, (name, most) in enumerate(limits.items()):
        y, binds = i * step, most == resident
        look = {"weight": "bold", "color": ORANGE} if binds else {}
        room = f"room for only {most}" if binds else f"room for {most}"
        write(ax, LEFT, y + 0.12, RESOURCES.get(name, name), ha="left", weight="bold")
        write(ax, RIGHT, y + 0.12, room, ha="right", **look)
        length = (RIGHT - LEFT) * (lengths or {}).get(name, 1)
        one, total = (program or {}).get(name, (0, 1))
        rest = total - most * one if one else 0
        wide = length * (1 - rest / total) / max(1, most)
        for place in range(most):
            taken = place < resident
            look = fills[place % 2] if taken else free
            gid, at = "taken" if taken else "free", (LEFT + place * wide, y + 0.24)
            box(ax, at, (wide, 0.2), lw=0.7, gid=gid, edgecolor=MUTED, **look)
        if rest:
            samples["rest: too small"] = REST
            at = (LEFT + most * wide, y + 0.24)
            box(ax, at, (length * rest / total, 0.2), lw=0.7, gid="rest", **REST)
            write(ax, LEFT + length, y + 0.55, f"rest: {rest:,}", ha="right")
        edge = {"edgecolor": ORANGE, "lw": 2.5} if binds else {"edgecolor": INK, "lw": 1.2}
        box(ax, (LEFT, y + 0.24), (length, 0.2), fill=False, gid="bar", **edge)
        if one:
            unit = " bytes" if name in ("shared", "lds") else ""
            takes = f"one program: {one:,} of {total:,}{unit}"
            write(ax, LEFT, y + 0.55, takes, ha="left", color=MUTED)
    looks = [Sample(text, {"edgecolor": MUTED, **look}) for text, look in samples.items()]
    return finish(ax, key(ax, len(limits) * step + 0.1, looks), title)
