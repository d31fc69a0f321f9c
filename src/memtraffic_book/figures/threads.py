"""Drawings of threads: who holds what, how they find one maximum, and how programs fill an SM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes

from memtraffic_book.figures.drawing import (
    BLUE,
    DEAD,
    INK,
    LINE,
    MUTED,
    ORANGE,
    PALE,
    PROGRAM_COLORS,
    WIDTH,
    Sample,
    arrow,
    board,
    box,
    finish,
    halo,
    key,
    styled,
    text_width,
    write,
)

if TYPE_CHECKING:
    from memtraffic.compile import BlockedLayout

LEFT, RIGHT = 0.04, WIDTH - 0.04
REST = {"facecolor": "white", "edgecolor": MUTED, "hatch": "xxxx"}
COPIES = {"facecolor": PROGRAM_COLORS[0], "edgecolor": MUTED, "hatch": "...."}


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
def lanes(accesses: int, num_warps: int, *, warp_size: int = 32, title: str = "") -> Axes:
    """The threads of a program that load a row, and those that are idle.

    accesses: how many the row needs, each by one thread. num_warps: warps of the program.
    """
    threads = num_warps * warp_size
    used = min(accesses, threads)
    title = title or f"{used} threads load the row, and {threads - used} are idle."
    left = 0.1 + text_width(f"warp {num_warps - 1}")
    unit = (WIDTH - 0.04 - left) / warp_size
    ax = board()
    for warp, lane in itertools.product(range(num_warps), range(warp_size)):
        busy = warp * warp_size + lane < used
        look = {"facecolor": BLUE, "edgecolor": "white"} if busy else DEAD
        at = (left + lane * unit, 0.04 + warp * 0.24)
        box(ax, at, (unit, 0.17), lw=0.6, gid="busy" if busy else "idle", **look)
        if lane == 0:
            write(ax, left - 0.06, at[1] + 0.085, f"warp {warp}", ha="right")
    samples = [Sample("loads", {"facecolor": BLUE}), Sample("idle", DEAD)]
    return finish(ax, key(ax, num_warps * 0.24 + 0.18, samples, x=left), title)


# ---- a reduction


class ReductionSteps(NamedTuple):
    """What it takes to reduce a row to one number, each step for one thread or one warp.

    comparisons: of one thread, among its own elements. shuffles: steps within a warp. values: what
    the warps write to shared memory, one each. last_shuffles: steps of the one warp that reads
    these. barriers: before the values are read, and before the result is.
    """

    comparisons: int
    shuffles: int
    values: int
    last_shuffles: int
    barriers: int


def reduction_steps(n_threads: int, elements: int, warp_size: int = 32) -> ReductionSteps:
    """The steps of a reduction as Triton compiles it for one program.

    >>> reduction_steps(512, 32)
    ReductionSteps(comparisons=31, shuffles=5, values=16, last_shuffles=4, barriers=2)

    n_threads: a power of two, at least one warp. elements: those of each thread.
    """
    warps = n_threads // warp_size
    many = warps > 1
    return ReductionSteps(
        comparisons=elements - 1,
        shuffles=warp_size.bit_length() - 1,
        values=warps if many else 0,
        last_shuffles=warps.bit_length() - 1,
        barriers=2 if many else 0,
    )


@styled
def reduction(
    n_threads: int = 512,
    elements: int = 32,
    *,
    warp_size: int = 32,
    what: str = "maximum",
    operations: str = "comparisons",
    title: str = "",
) -> Axes:
    """How the threads of a program find one number, such as a maximum: step by step, and counted.

    n_threads: a power of two, more than one warp. elements: those of each thread, in its registers.
    operations: what a thread does with its own elements.
    """
    steps = reduction_steps(n_threads, elements, warp_size)
    warps = steps.values
    title = title or (
        f"{n_threads} threads find one {what} in {steps.shuffles + steps.last_shuffles} shuffles "
        f"and {steps.barriers} barriers."
    )
    butterfly, last = 0.17 * steps.shuffles + 0.1, 0.17 * steps.last_shuffles + 0.1
    ax = board()
    y = _step(ax, 0.0, "1. in a thread's registers", f"{steps.comparisons} {operations}")
    small = min(0.095, 3 / elements)
    for i in range(elements):
        box(ax, (LEFT + i * small, y), (small, 0.16), fc=PROGRAM_COLORS[0], ec="white", lw=0.6)
    end = LEFT + elements * small
    arrow(ax, (end + 0.06, y + 0.08), (end + 0.42, y + 0.08))
    box(ax, (end + 0.48, y), (0.16, 0.16), fc=BLUE, ec="white", gid="own")

    y = _step(ax, y + 0.3, "2. in a warp, lane to lane", f"{steps.shuffles} shuffles")
    _butterfly(ax, y, butterfly, warp_size)

    y = _step(ax, y + butterfly + 0.14, "3. to shared memory", f"{warps} values")
    unit = (RIGHT - LEFT) / warps
    for i in range(warps):
        x = LEFT + (i + 0.5) * unit
        ax.plot(x, y + 0.05, "o", color=BLUE, markersize=5)
        arrow(ax, (x, y + 0.09), (x, y + 0.24), linewidth=0.8, mutation_scale=6)
        cell = (x - unit / 2, y + 0.25)
        box(ax, cell, (unit, 0.16), fc=PROGRAM_COLORS[1], ec=MUTED, lw=0.6, gid="shared")
    y = _barrier(ax, y + 0.6, f"barrier: {warps} warps wait")

    y = _step(ax, y + 0.06, "4. one warp reads them", f"{steps.last_shuffles} shuffles")
    _butterfly(ax, y, last, warps)

    y = _step(ax, y + last + 0.14, "5. back to shared memory", "1 value")
    middle = WIDTH / 2
    cell = (middle - 0.08, y)
    box(ax, cell, (0.16, 0.16), fc=PROGRAM_COLORS[1], ec=MUTED, lw=0.6, gid="shared")
    y = _barrier(ax, y + 0.34, f"barrier: {warps} warps wait")
    for i in range(warps):
        x = LEFT + (i + 0.5) * unit
        ax.plot([middle, x], [y - 0.02, y + 0.2], color=MUTED, linewidth=0.7)
        ax.plot(x, y + 0.22, "o", color=BLUE, markersize=5)
    y = _step(ax, y + 0.32, f"6. all {n_threads} threads read it", "1 value each")
    return finish(ax, y, title)


def _step(ax: Axes, y: float, text: str, count: str) -> float:
    """Writes a step and its count. Returns where its drawing starts."""
    write(ax, LEFT, y + LINE / 2, text, ha="left", weight="bold")
    write(ax, RIGHT, y + LINE / 2, count, ha="right", color=ORANGE, weight="bold")
    return y + LINE + 0.08


def _barrier(ax: Axes, y: float, text: str) -> float:
    half = text_width(text) / 2 + 0.08
    for start, end in ((LEFT, WIDTH / 2 - half), (WIDTH / 2 + half, RIGHT)):
        ax.plot([start, end], [y, y], color=INK, linewidth=3, gid="barrier")
    write(ax, WIDTH / 2, y, text)
    return y + 0.14


def _butterfly(ax: Axes, y: float, height: float, lanes: int) -> None:
    """Each lane takes the value of the lane half of all away, then a quarter, until the next one.

    What reaches lane 0 is marked.
    """
    steps = lanes.bit_length() - 1
    unit, down = (RIGHT - LEFT) / lanes, (height - 0.1) / steps
    xs = [LEFT + (lane + 0.5) * unit for lane in range(lanes)]
    for step in range(steps):
        ys = y + 0.05 + step * down, y + 0.05 + (step + 1) * down
        apart = lanes >> (step + 1)
        for lane in range(lanes):
            marked = lane < apart  # what lane 0 has in the end comes from here
            color, order = (BLUE, 2) if marked else ("#c3ccd5", 1)
            for partner in (lane, lane ^ apart):
                ax.plot([xs[partner], xs[lane]], ys, color=color, linewidth=0.7, zorder=order)
    for step in range(steps + 1):
        for marked in (False, True):
            count = lanes >> step
            xs_here = xs[:count] if marked else xs[count:]
            ys_here = [y + 0.05 + step * down] * len(xs_here)
            color = BLUE if marked else "#aab4be"
            ax.plot(xs_here, ys_here, "o", color=color, markersize=3, zorder=3, gid="lanes")


def _dpp_sources() -> list[tuple[str, dict[int, int]]]:
    """The six steps in which a wave of 64 lanes reduces, with the lane that each lane reads.

    A lane that is not among the keys reads no other lane.
    """
    steps = []
    for n in (8, 4, 2, 1):
        steps.append((f"row_shr:{n}", {lane: lane - n for lane in range(64) if lane % 16 >= n}))
    next_16 = {lane: lane // 16 * 16 - 1 for lane in range(64) if lane // 16 in (1, 3)}
    steps.append(("row_bcast:15", next_16))
    steps.append(("row_bcast:31", {lane: 31 for lane in range(32, 64)}))
    return steps


@styled
def wave_reduction(*, what: str = "maximum", title: str = "") -> Axes:
    """How the 64 lanes of a wave of CDNA find one number, such as a maximum, without LDS.

    Each line leads from a lane to one that reads its value. What reaches lane 63 is marked.
    """
    steps = _dpp_sources()
    title = title or f"64 lanes find one {what} in {len(steps)} steps, and lane 63 has it."
    needed = [{63}]  # the lanes whose values reach lane 63, before each step and after the last
    for _, sources in reversed(steps):
        later = needed[0]
        needed.insert(0, later | {sources[lane] for lane in later if lane in sources})
    ax = board()
    names = max(text_width(name, weight="bold") for name, _ in steps)
    unit = (RIGHT - LEFT - names - 0.08) / 64
    xs = [LEFT + (lane + 0.5) * unit for lane in range(64)]
    top, down = 0.44, 0.36
    for row in range(4):
        write(ax, LEFT + (row + 0.5) * 16 * unit, 0.1, f"row {row}", color=MUTED)
    write(ax, xs[0], 0.28, "lane 0", ha="left")
    for lane in (15, 31, 47, 63):
        write(ax, xs[lane], 0.28, str(lane))
    for start in (0, 32):  # 16 lanes are shaded, 16 are not
        at, size = (LEFT + start * unit, top - 0.06), (16 * unit, down * len(steps) + 0.12)
        box(ax, at, size, fc=PALE, ec="none", zorder=0)
    for i, (name, sources) in enumerate(steps):
        y = top + i * down
        for lane in range(64):
            marked = lane in needed[i + 1]
            color, order = (BLUE, 2) if marked else ("#c3ccd5", 1)
            for source in {lane, sources.get(lane, lane)}:
                ends = [xs[source], xs[lane]], [y, y + down]
                ax.plot(*ends, color=color, linewidth=0.8 if marked else 0.5, zorder=order)
        write(ax, RIGHT, y + down / 2, name, ha="right", weight="bold")
    for i, live in enumerate(needed):
        for marked in (False, True):
            here = [xs[lane] for lane in range(64) if (lane in live) == marked]
            color = BLUE if marked else "#aab4be"
            ys = [top + i * down] * len(here)
            look: dict[str, Any] = {"color": color, "markersize": 3 if marked else 1.6, "zorder": 3}
            ax.plot(here, ys, "o", gid="needed" if marked else "other", **look)
    bottom = top + len(steps) * down + 0.2
    write(ax, xs[63], bottom, f"the {what} of all 64", ha="right", color=BLUE, weight="bold")
    return finish(ax, bottom + 0.12, title)


# ---- an SM, and a program's registers


@styled
def sm_packing(
    limits: Mapping[str, int],
    program: Mapping[str, str | tuple[int, int]] | None = None,
    *,
    processor: str = "SM",
    title: str = "",
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
    if not title:
        who = " and ".join(names.get(name, name) for name in full)
        programs = f"{resident} program{'s' * (resident != 1)}"
        title = f"One {processor} holds {programs}, and then its {who} {_are(who)} full."
        if not resident:
            title = f"One {processor} holds no program: its {who} {_are(who)} not enough."
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


def _are(names: str) -> str:
    plural = names.endswith(("s", "slots")) or " and " in names
    return "are" if plural else "is"


@styled
def registers_of_row(
    rows: Mapping[str, tuple[int, Sequence[int]]], n_threads: int, *, title: str = ""
) -> Axes:
    """In how many registers of each thread a row lies, and how many hold a dead element.

    rows: by name, the elements of the row and the sizes of the blocks that hold them, such as
    `(8320, [8192, 128])`. n_threads: those of the program. A block of fewer elements than threads
    takes one register of each, and several threads hold a copy of the same element.
    """
    held = {
        name: sum(max(1, block // n_threads) for block in blocks)
        for name, (_, blocks) in rows.items()
    }
    dead = {
        name: (sum(blocks) - n) / (held[name] * n_threads) for name, (n, blocks) in rows.items()
    }
    if not title:
        worst = max(dead, key=lambda name: dead[name])
        title = (
            f"{rows[worst][0]} numbers {worst} take {held[worst]} registers of each thread, and "
            f"{100 * dead[worst]:.0f} % of them hold minus infinity."
        )
    ax = board()
    unit, copied = (RIGHT - LEFT) / max(held.values()), False
    for i, (name, (n, blocks)) in enumerate(rows.items()):
        y, registers = i * 0.62, held[name]
        write(ax, LEFT, y + 0.12, f"{n} {name}", ha="left", weight="bold")
        write(ax, RIGHT, y + 0.12, f"{registers} registers", ha="right")
        live, used = n / n_threads, sum(blocks) / n_threads
        at, look = (LEFT, y + 0.24), {"facecolor": BLUE, "edgecolor": BLUE}
        box(ax, at, (live * unit, 0.22), gid="live", **look)
        if used < registers:
            at, copied = (LEFT + used * unit, y + 0.24), True
            box(ax, at, ((registers - used) * unit, 0.22), gid="copies", **COPIES)
        at, size = (LEFT + live * unit, y + 0.24), ((used - live) * unit, 0.22)
        box(ax, at, size, gid="dead", **DEAD)
        for line in range(1, int(live) + 1):
            x = LEFT + line * unit
            ax.plot([x, x], [y + 0.24, y + 0.46], color="white", linewidth=0.6)
        text = f"{100 * dead[name]:.0f} % hold -inf"
        if size[0] > text_width(text) + 0.1:
            halo(write(ax, at[0] + size[0] / 2, y + 0.35, text))
        box(ax, (LEFT, y + 0.24), (registers * unit, 0.22), fill=False, edgecolor=INK, lw=1.2)
    samples = [Sample("a number", {"facecolor": BLUE}), Sample("minus infinity", DEAD)]
    if copied:
        samples.append(Sample("copies", COPIES))
    return finish(ax, key(ax, len(rows) * 0.62 + 0.1, samples), title)


@styled
def register_file(
    kernels: Mapping[str, tuple[int, int]], *, registers: int, max_waves: int, title: str = ""
) -> Axes:
    """The registers of one lane of a SIMD, allocated to waves in units.

    kernels: by name, the registers that a wave uses and the unit in which they are allocated.
    registers: those of one lane. max_waves: slots of the SIMD.
    """
    taken = {name: math.ceil(used / unit) * unit for name, (used, unit) in kernels.items()}
    waves = {name: min(max_waves, registers // size) for name, size in taken.items()}
    if not title:
        name = min(waves, key=lambda name: waves[name])
        title = f"{name}: each wave takes {taken[name]}, and {waves[name]} waves fit."
    ax, scale = board(), (RIGHT - LEFT) / registers
    for i, (name, (used, _)) in enumerate(kernels.items()):
        y, size = i * 0.64, taken[name]
        write(ax, LEFT, y + 0.12, name, ha="left", weight="bold")
        write(ax, RIGHT, y + 0.12, f"{waves[name]} waves", ha="right", color=ORANGE, weight="bold")
        for wave in range(waves[name]):
            x = LEFT + wave * size * scale
            fill = PROGRAM_COLORS[wave % 2]
            box(ax, (x, y + 0.24), (used * scale, 0.22), fc=fill, ec="none", gid="used")
            at, rest = (x + used * scale, y + 0.24), ((size - used) * scale, 0.22)
            if rest[0]:
                box(ax, at, rest, lw=0, gid="rounded", **DEAD)
            box(ax, (x, y + 0.24), (size * scale, 0.22), fill=False, ec=MUTED, lw=0.8, gid="wave")
            if size * scale > 0.3:
                write(ax, x + size * scale / 2, y + 0.35, str(size))
        left = registers - waves[name] * size
        if left * scale > text_width(text := f"{left} free") + 0.06:
            write(ax, RIGHT - left * scale / 2, y + 0.35, text, color=MUTED)
        box(ax, (LEFT, y + 0.24), (RIGHT - LEFT, 0.22), fill=False, edgecolor=INK, lw=1.2)
    samples = [Sample("used", {"facecolor": PROGRAM_COLORS[0]}), Sample("rounding up", DEAD)]
    return finish(ax, key(ax, len(kernels) * 0.64 + 0.1, samples), title)
