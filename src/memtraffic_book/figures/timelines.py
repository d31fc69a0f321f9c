"""Time on the axis: how loads, arithmetic and stores follow each other, and how rounds fill SMs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes

from memtraffic_book.figures.drawing import (
    BLUE,
    DEAD,
    GREEN,
    INK,
    LINE,
    MUTED,
    ORANGE,
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

LEFT, RIGHT = 0.04, WIDTH - 0.04
KINDS: dict[str, dict[str, Any]] = {
    "wait": {"facecolor": "white", "edgecolor": MUTED, "hatch": "...."},
    "load": {"facecolor": PROGRAM_COLORS[0], "edgecolor": BLUE},
    "compute": {"facecolor": PROGRAM_COLORS[1], "edgecolor": ORANGE, "hatch": "////"},
    "store": {"facecolor": PROGRAM_COLORS[2], "edgecolor": GREEN, "hatch": "\\\\\\\\"},
}


Kind = Literal["wait", "load", "compute", "store"]


class Span(NamedTuple):
    """What one tile does in one lane of a timeline, from `start` to `end`."""

    lane: str
    kind: Kind
    start: float
    end: float
    tile: int


def plan(
    load: float,
    compute: float,
    store: float,
    *,
    tiles: int,
    stages: int = 1,
    programs: int = 1,
    latency: float = 0.0,
) -> list[Span]:
    """When each tile is loaded, computed and stored, if memory serves one tile at a time.

    >>> [max(span.end for span in plan(2, 2, 1, tiles=4, stages=n)) for n in (1, 2, 3)]
    [20.0, 20.0, 14.0]

    load, compute, store: how long each takes for a tile. latency: from a request to the start of
    its load. The tiles go to the programs in turn. stages: as Triton's `num_stages`; a program has
    `stages - 1` buffers, at least one, and asks for the tile that a buffer takes next when the one
    before in it is stored. Memory serves requests in their order; the programs compute beside each
    other, but one program has one tile in work at a time.
    """
    buffers = max(1, stages - 1)
    own = [list(range(program, tiles, programs)) for program in range(programs)]
    done = [0] * programs  # tiles of a program that are stored
    free = [0.0] * programs  # when the last of them was
    requested, arrived = dict.fromkeys(range(programs * buffers), 0.0), {}
    queue = [(latency, tile, "load") for tile in requested if tile < tiles]  # for memory, by time
    spans: list[Span] = []
    memory = 0.0  # when it is free

    def add(kind: Kind, start: float, end: float, tile: int) -> None:
        if kind != "wait" or end > start:
            spans.append(Span(_lane(tile, programs, buffers), kind, start, end, tile))

    while queue:
        asked, tile, kind = heapq.heappop(queue)
        program = tile % programs
        start = max(asked, memory)
        if kind == "load":
            memory = arrived[tile] = start + load
            add("wait", requested[tile], start, tile)
            add("load", start, memory, tile)
        else:
            memory = free[program] = start + store
            add("wait", asked, start, tile)
            add("store", start, memory, tile)
            done[program] += 1
            later = tile + buffers * programs  # takes the buffer of this one
            if later < tiles:
                requested[later] = memory
                heapq.heappush(queue, (memory + latency, later, "load"))
        turn = own[program][done[program] : done[program] + 1]
        if turn and turn[0] in arrived and (kind == "store" or turn[0] == tile):
            begin = max(arrived[turn[0]], free[program])
            add("wait", arrived[turn[0]], begin, turn[0])
            add("compute", begin, begin + compute, turn[0])
            heapq.heappush(queue, (begin + compute, turn[0], "store"))
    return sorted(spans, key=lambda span: (span.lane, span.start))


def plan_shared(
    loads: Sequence[Sequence[float]], compute: float, store: float, *, together: bool
) -> list[Span]:
    """When programs load, compute and store their parts of rows, alone or waiting for one another.

    >>> loads = [[2, 3], [3, 2]]
    >>> [max(it.end for it in plan_shared(loads, 1, 1, together=t)) for t in (False, True)]
    [9.0, 10.0]

    loads: for each row, how long each program loads its part. compute, store: how long each part
    takes. together: a program stores its part when all parts of the row are computed; otherwise
    nobody waits.
    """
    free = [0.0] * len(loads[0])  # when each program has stored its last part
    spans: list[Span] = []
    for row, parts in enumerate(loads):
        done = [start + load + compute for start, load in zip(free, parts, strict=True)]
        for program, (load, end) in enumerate(zip(parts, done, strict=True)):
            lane, start = f"program {program}", free[program]
            go = max(done) if together else end
            spans.append(Span(lane, "load", start, start + load, row))
            spans.append(Span(lane, "compute", start + load, end, row))
            spans += [Span(lane, "wait", end, go, row)] if go > end else []
            spans.append(Span(lane, "store", go, go + store, row))
            free[program] = go + store
    return sorted(spans, key=lambda span: (span.lane, span.start))


def _lane(tile: int, programs: int, buffers: int) -> str:
    """The name of the row of a timeline in which a tile is drawn."""
    names = [f"program {tile % programs}"] if programs > 1 else []
    names += [f"buffer {tile // programs % buffers}"] if buffers > 1 else []
    return ", ".join(names)


@styled
def timeline(schedules: Mapping[str, Sequence[Span]], title: str = "", *, unit: str = "µs") -> Axes:
    """Schedules one below the other on one axis of time, their ends and what they save marked.

    schedules: by name, what `plan` returns, or what was measured. unit: of their times.
    """
    ends = {name: max(span.end for span in spans) for name, spans in schedules.items()}
    last = max(ends.values())
    if not title:
        first = min(ends, key=lambda name: ends[name])
        slowest = max(ends, key=lambda name: ends[name])
        share = 100 * (1 - ends[first] / last)
        title = f"“{first}” ends {share:.0f} % earlier than “{slowest}”."
    lanes = {name: sorted({span.lane for span in spans}) for name, spans in schedules.items()}
    tall, head = 0.25, 2 * LINE + 0.06
    ax = board()
    named = [text_width(lane) for them in lanes.values() for lane in them if lane]
    left = LEFT + (max(named) + 0.08 if named else 0)
    scale = (RIGHT - left) / last
    y = 0.0
    for name, spans in schedules.items():
        write(ax, LEFT, y + LINE / 2, name, ha="left", weight="bold")
        end, saved = ends[name], last - ends[name]
        text = f"ends at {end:.3g} {unit}"
        text += f", {saved:.3g} {unit} earlier" if saved > 0.005 * last else ""
        write(ax, LEFT, y + 1.5 * LINE, text, ha="left", color=INK)
        y += head
        bottom = y + tall * len(lanes[name])
        for i, lane in enumerate(lanes[name]):
            write(ax, left - 0.06, y + (i + 0.5) * tall, lane, ha="right")
        for span in spans:
            at = (left + span.start * scale, y + lanes[name].index(span.lane) * tall + 0.02)
            wide = (span.end - span.start) * scale
            box(ax, at, (wide, tall - 0.04), lw=0.8, gid=span.kind, **KINDS[span.kind])
            text = str(span.tile)
            if span.kind in ("load", "compute") and wide > text_width("0" * len(text)) + 0.08:
                halo(write(ax, at[0] + wide / 2, at[1] + tall / 2 - 0.02, text))
        x = left + end * scale
        ax.plot([x, x], [y - 0.04, bottom + 0.04], color=INK, linewidth=2, gid="end")
        if saved > 0.005 * last:
            middle = (y + bottom) / 2
            arrow(ax, (RIGHT, middle), (x + 0.03, middle), "<|-|>", color=INK)
            ax.plot([RIGHT, RIGHT], [y, bottom], color=INK, linewidth=1, linestyle=":")
        y = bottom + 0.14
    y = _time_axis(ax, y, left, scale, last, unit)
    kinds = {span.kind for spans in schedules.values() for span in spans}
    samples = [Sample(kind, KINDS[kind]) for kind in KINDS if kind in kinds]
    return finish(ax, key(ax, y, samples), title)


def _time_axis(ax: Axes, y: float, left: float, scale: float, last: float, unit: str) -> float:
    """Draws the axis of time on a board. Returns where a key goes below it."""
    ax.plot([left, left + last * scale], [y, y], color=MUTED, linewidth=1)
    power = 10.0 ** math.floor(math.log10(last))
    step = next(it * power for it in (0.1, 0.2, 0.5, 1, 2, 5) if last / (it * power) <= 5)
    for i in range(int(last / step + 1e-9) + 1):
        x, text = left + i * step * scale, f"{i * step:g}"
        ax.plot([x, x], [y, y + 0.05], color=MUTED, linewidth=1)
        write(ax, min(x, RIGHT - text_width(text) / 2), y + 0.15, text)
    write(ax, (left + RIGHT) / 2, y + 0.33, f"time, {unit}")
    return y + 0.6


# ---- rounds


def take_turns(
    durations: Sequence[float],
    slots: int,
    *,
    start: float = 0.0,
    persistent: bool = False,
    pace: Sequence[float] = (),
) -> list[tuple[int, float, float]]:
    """For each tile the slot that it runs on, when it begins, and when it ends.

    >>> take_turns([3, 1, 1], 2)
    [(0, 0.0, 3.0), (1, 0.0, 1.0), (1, 1.0, 2.0)]
    >>> take_turns([3, 1, 1], 2, persistent=True)
    [(0, 0.0, 3.0), (1, 0.0, 1.0), (0, 3.0, 4.0)]

    durations: of the tiles. start: what a program takes before its first tile. A new program for
    each tile takes the slot that is free first; a persistent one keeps its slot, and takes each
    tile that is `slots` further. pace: what each slot takes for a tile of duration 1, by default 1.
    """
    free = [0.0] * slots
    pace = pace or [1.0] * slots
    turns = []
    for tile, duration in enumerate(durations):
        slot = tile % slots if persistent else min(range(slots), key=lambda it: free[it])
        begin = free[slot] + (start if tile < slots or not persistent else 0)
        free[slot] = begin + duration * pace[slot]
        turns.append((slot, begin, free[slot]))
    return turns


@styled
def rounds(
    tiles: int | Sequence[float],
    slots: int,
    *,
    start: float = 0.0,
    pace: Sequence[float] = (),
    unit: str = "rounds",
    title: str = "",
) -> Axes:
    """Slots over time, once with a program for each tile and once with persistent programs.

    tiles: how many, each of which takes 1, or how long each takes. slots: programs that run at
    once. start: what a program takes before its first tile. pace: as for `take_turns`; a slot that
    takes longer than the fastest is marked as slow, and the title must be given.
    """
    durations = [1.0] * tiles if isinstance(tiles, int) else list(tiles)
    n = len(durations)
    full, rest = divmod(n, slots)
    if not title:
        title = f"{n} tiles fill {slots} slots {full} times."
        if rest:
            title = (
                f"{n} tiles on {slots} slots need {full + 1} rounds, and in the last round "
                f"{slots - rest} of {slots} slots are idle."
            )
    ways = {"a queue: a program for each tile": False, "persistent: a program for each slot": True}
    plans = {
        name: take_turns(durations, slots, start=start, persistent=stays, pace=pace)
        for name, stays in ways.items()
    }
    last = max(end for turns in plans.values() for _, _, end in turns)
    tall = 0.19
    ax = board()
    slow = [it > min(pace) for it in pace] or [False] * slots
    labels = [f"slot {slot}" + ", slow" * slow[slot] for slot in range(slots)]
    left = LEFT + max(map(text_width, labels)) + 0.08
    scale = (RIGHT - left) / last
    y = 0.0
    for name, turns in plans.items():
        write(ax, LEFT, y + LINE / 2, name, ha="left", weight="bold")
        y += LINE + 0.1
        done = max(end for _, _, end in turns)
        for slot in range(slots):
            top = y + slot * tall
            write(ax, left - 0.06, top + tall / 2, labels[slot], ha="right")
            own = [(begin, end, tile) for tile, (it, begin, end) in enumerate(turns) if it == slot]
            for i, (begin, end, tile) in enumerate(own):
                at = (left + begin * scale, top + 0.015)
                size = ((end - begin) * scale, tall - 0.03)
                look = {"facecolor": PROGRAM_COLORS[0], "edgecolor": BLUE, "lw": 0.8}
                box(ax, at, size, gid="tile", **look)
                if size[0] > text_width(str(tile)) + 0.04:
                    write(ax, at[0] + size[0] / 2, top + tall / 2, str(tile))
                if start and (i == 0 or not ways[name]):
                    at, size = (at[0] - start * scale, top + 0.015), (start * scale, tall - 0.03)
                    box(ax, at, size, fc=INK, lw=0, gid="start")
            idle = done - max((end for _, end, _ in own), default=0.0)
            if idle > 1e-9:
                at, size = (left + (done - idle) * scale, top + 0.015), (idle * scale, tall - 0.03)
                box(ax, at, size, lw=0.6, gid="idle", **DEAD)
        x, bottom = left + done * scale, y + slots * tall
        ax.plot([x, x], [y - 0.04, bottom + 0.04], color=INK, linewidth=2, gid="end")
        y = bottom + 0.12
    y = _time_axis(ax, y - 0.02, left, scale, last, unit)
    samples = [Sample("a tile", {"facecolor": PROGRAM_COLORS[0], "edgecolor": BLUE})]
    samples += [Sample("a program starts", {"facecolor": INK})] if start else []
    return finish(ax, key(ax, y, [*samples, Sample("idle", DEAD)]), title)


# ---- the order of a compiled loop
