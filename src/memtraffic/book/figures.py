"""The figures of the book. Sizes are in inches.

Every function draws in the book's own style and leaves Matplotlib's settings as they are; `style`
does the same for what a page draws itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from memtraffic.compile import BlockedLayout
    from memtraffic.traffic.count import Access, OpTraffic

INK, MUTED, GRID = "#1f2328", "#59636e", "#d1d9e0"
BLUE, ORANGE, GREEN, RED = "#0969da", "#bc4c00", "#1a7f37", "#cf222e"
PROGRAM_COLORS = ("#9ec5fe", "#ffc9a3", "#a3dcb1", "#f3b1b6", "#cdb7f5", "#e8d98a")

P = ParamSpec("P")
T = TypeVar("T")


STYLE = rc_params_from_file(
    Path(__file__).with_name("memtraffic.mplstyle"), use_default_template=False
)


@contextmanager
def style() -> Iterator[None]:
    """Context manager: what is drawn inside has the book's style.

    It restores the settings of the style alone. `plt.style.context` restores all of them, among
    them what the backend of a notebook sets when the first figure loads it.
    """
    before = {name: plt.rcParams[name] for name in STYLE}
    plt.rcParams.update(STYLE)
    try:
        yield
    finally:
        plt.rcParams.update(before)


def _styled(draw: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        with style():
            return draw(*args, **kwargs)

    return drawn


# ---- axes


@_styled
def axes(xlabel: str = "", ylabel: str = "", size: tuple[float, float] = (6, 3.4)) -> Axes:
    """Empty axes in the book's style."""
    _, [ax] = _panels(1, size)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return ax


def _panels(count: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of several axes, one below the other."""
    figure, grid = plt.subplots(count, 1, figsize=size, squeeze=False)
    # Ticks that are made later, when the figure is drawn, would take Matplotlib's own style.
    ticks = {"color": INK, "labelcolor": INK, "labelsize": 11, "grid_color": GRID}
    for ax in grid[:, 0]:
        ax.tick_params(which="both", **ticks)
    return figure, list(grid[:, 0])


def _hide_grid(ax: Axes, axis: Literal["x", "y"]) -> None:
    ax.grid(axis=axis, visible=False)
    ax.tick_params(axis=axis, length=0)


def _box(ax: Axes, at: tuple[float, float], size: tuple[float, float], **colors: Any) -> None:
    ax.add_patch(plt.Rectangle(at, *size, **colors))


@_styled
def mark_level(ax: Axes, value: float, text: str) -> None:
    """Marks a value of the y axis with a dashed line and its name, and starts the axis at zero."""
    ax.axhline(value, color=MUTED, linestyle="--", linewidth=1)
    ax.annotate(text, (ax.get_xlim()[0], value), va="bottom", color=MUTED)
    ax.set_ylim(0, 1.15 * value)


@_styled
def mark_position(ax: Axes, value: float, text: str) -> None:
    """Marks a value of the x axis with a dotted line and its name."""
    ax.axvline(value, color=MUTED, linestyle=":", linewidth=1)
    ax.annotate(f" {text}", (value, 0.03), xycoords=("data", "axes fraction"), color=MUTED)


def log2_axis(ax: Axes, values: Iterable[float]) -> None:
    """Makes the x axis logarithmic, with ticks at every other of `values`, the last included.

    The y axis starts at zero.
    """
    ax.set_xscale("log", base=2)
    ticks = list(values)[::-2][::-1]
    ax.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    ax.set_ylim(0, None)


# ---- lines and bars


@_styled
def plot_bars(
    labels: Sequence[str], values: Sequence[float], texts: Sequence[str], xlabel: str
) -> Axes:
    """Horizontal bars from zero, the first on top, each with its text beside it."""
    ax = axes(xlabel=xlabel, size=(6, 0.7 + 0.42 * len(labels)))
    drawn = ax.barh(range(len(labels)), list(values), color=BLUE, height=0.65)
    ax.set_yticks(range(len(labels)), list(labels))
    ax.bar_label(drawn, list(texts), padding=4)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(values))
    _hide_grid(ax, "y")
    return ax


@_styled
def plot_lines(
    lines: Mapping[str, pd.Series],
    xlabel: str,
    ylabel: str,
    *,
    log2: bool = False,
    size: tuple[float, float] = (6, 3.4),
) -> Axes:
    """Lines, each with its name at its end.

    lines: by name, series whose index is x. log2: a logarithmic x axis, as `log2_axis` makes it.
    """
    ax = axes(xlabel, ylabel, size)
    _draw_lines(ax, lines, log2)
    return ax


def _draw_lines(ax: Axes, lines: Mapping[str, pd.Series], log2: bool) -> None:
    colors = iter([BLUE, ORANGE, GREEN, RED])
    ends = []
    for name, line in lines.items():
        color = MUTED if name == "copy" else next(colors)
        [drawn] = ax.plot(line.index, line, marker="o", markersize=4, color=color)
        if name == "copy":
            drawn.set(linestyle="--", zorder=3)
        ends.append((line.iloc[-1], name, color))
    low, high = ax.get_xlim()
    if log2:
        log2_axis(ax, sorted({x for line in lines.values() for x in line.index}))
        low, high = ax.get_xlim()
        ax.set_xlim(low, high * (high / low) ** 0.3)
    else:
        ax.set_xlim(low, high + 0.3 * (high - low))
    bottom, top = ax.get_ylim()
    gap, below = 0.06 * (top - bottom), float("inf")
    for value, name, color in sorted(ends, reverse=True):  # from the top, none on another
        below = min(value, below - gap)
        ax.annotate(f" {name}", (high, below), color=color, va="center")


@_styled
def plot_widths(frame: pd.DataFrame) -> Axes:
    """Bandwidth over the width of a row, a line for each implementation in a result of `bench`."""
    return _draw_widths(axes(size=(6, 3.8)), frame)


def _draw_widths(ax: Axes, frame: pd.DataFrame) -> Axes:
    ax.set(xlabel="columns", ylabel="bandwidth for the least traffic, GB/s")
    lines = {
        name: one.set_index("n")["gb_per_s"] for name, one in frame.groupby("impl", sort=False)
    }
    _draw_lines(ax, lines, log2=True)
    return ax


@_styled
def plot_width_panels(frames: Mapping[str, pd.DataFrame]) -> Figure:
    """`plot_widths` for each of several frames, by title, one below the other."""
    figure, sides = _panels(len(frames), (6, 3.6 * len(frames)))
    for ax, (title, frame) in zip(sides, frames.items(), strict=True):
        _draw_widths(ax, frame).set_title(title)
    return figure


@_styled
def plot_roofline(peak: float, bandwidth: float, points: Mapping[str, float]) -> Axes:
    """The roofline of a GPU, and where operations lie on it.

    peak: in FLOP/s. bandwidth: in bytes/s. points: arithmetic intensities in FLOP/byte, by name.
    """
    ridge = peak / bandwidth
    intensities = [0.1, ridge, 100]
    ax = axes("arithmetic intensity, FLOP/byte", "attainable rate, FLOP/s")
    ax.loglog(intensities, [min(peak, it * bandwidth) for it in intensities], color=BLUE)
    for name, intensity in points.items():
        ax.plot([intensity], [intensity * bandwidth], "o", color=ORANGE, markersize=9)
        ax.annotate(name, (intensity * 1.3, intensity * bandwidth * 0.7))
    ax.annotate("memory sets\nthe time", (1.1, 2 * bandwidth), ha="right")
    ax.annotate("arithmetic sets the time", (ridge, peak * 0.6))
    return ax


@_styled
def plot_staircase(
    stairs: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    points: Mapping[str, tuple[float, float]],
    xlabel: str,
    ylabel: str,
) -> Axes:
    """Steps, and labelled points on or under them.

    stairs: lines by name, each a pair of lists (x, y). points: pairs (x, y) by label.
    """
    ax = axes(xlabel, ylabel, size=(6, 3.8))
    for (name, (x, y)), color in zip(stairs.items(), (BLUE, MUTED), strict=False):
        ax.step(x, y, where="mid", color=color, linewidth=1.5)
        at = (x[len(x) * 3 // 4], y[len(y) * 3 // 4])
        ax.annotate(name, at, (0, 5), textcoords="offset points", color=color)
    ax.plot(*zip(*points.values(), strict=True), "o", color=ORANGE, markersize=5)
    corners = {corner for line in stairs.values() for corner in zip(*line, strict=True)}
    for label, point in points.items():
        gaps = [other[1] - point[1] for other in points.values() if abs(other[0] - point[0]) < 4]
        near = sum(gap for gap in gaps if abs(gap) < 4)  # of another label, above or below
        where, side = (-7, -4 - 7 * (near > 0) + 2 * (near < 0)), "right"
        if point in corners:
            where, side = (6, 3), "left"
        ax.annotate(label, point, where, textcoords="offset points", color=ORANGE, ha=side)
    ax.set_ylim(0, 1.1 * max(max(y) for _, y in stairs.values()))
    return ax


# ---- what moves, and who holds it


@_styled
def plot_op_traffic(ops: Sequence[OpTraffic], unit: float) -> Axes:
    """What each operation reads, to the left, and writes, to the right.

    unit: elements, the unit of the axis. A bar too short to be seen is marked M.
    """
    ax = axes(xlabel="reads, MN          writes, MN", size=(6, 0.8 + 0.42 * len(ops)))
    ax.set_yticks(range(len(ops)), [op.name for op in ops])
    read = [-op.read_elements / unit for op in ops]
    written = [op.written_elements / unit for op in ops]
    for values, color in ((read, BLUE), (written, ORANGE)):
        drawn = ax.barh(range(len(ops)), values, color=color, height=0.65)
        ax.bar_label(drawn, ["M" if abs(value) < 0.01 else "" for value in values], padding=4)
    ax.axvline(0, color=INK, linewidth=1)
    ax.invert_yaxis()
    ax.set(xlim=(-1.3, 1.3), xticks=[-1, 0, 1], xticklabels=["1", "0", "1"])
    _hide_grid(ax, "y")
    return ax


@_styled
def plot_access_map(accesses: Iterable[Access], shape: tuple[int, int], argument: str) -> Axes:
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
    ax = axes(size=(min(6, 0.75 * n + 1.4), 0.5 * m + 0.5))
    for offset in range(m * n):
        row, col = divmod(offset, n)
        by = programs[offset]
        color = PROGRAM_COLORS[by[0] % len(PROGRAM_COLORS)] if by else "white"
        _box(ax, (col, row), (1, 1), facecolor=color, edgecolor=MUTED)
        text = f"{offset} ({len(by)} times)" if len(by) > 1 else str(offset)
        ax.text(col + 0.5, row + 0.5, text, ha="center", va="center")
    for row in range(m):
        owners = sorted({it for offset in range(row * n, (row + 1) * n) for it in programs[offset]})
        text = f"program {', '.join(map(str, owners))}" if owners else "no program"
        ax.text(n + 0.15, row + 0.5, text, va="center")
    ax.set(xlim=(0, n + 1.6), ylim=(m, 0))
    ax.axis("off")
    return ax


@_styled
def plot_thread_layout(layout: BlockedLayout, shape: tuple[int, int]) -> Axes:
    """Which thread holds what of a block of `shape` (rows, columns).

    Each access of a thread is a box with the thread's lane, in the colour of its warp.
    """
    m, n = shape
    (high, wide), down, across = layout.elements, layout.lanes, layout.warps
    ax = axes(size=(6.4, 0.6 + 0.4 * (m // high)))
    for y, x in itertools.product(range(m // high), range(n // wide)):
        lane = y % down[0] * down[1] + x % down[1]
        warp = y // down[0] % across[0] * across[1] + x // down[1] % across[1]
        color = PROGRAM_COLORS[warp % len(PROGRAM_COLORS)]
        _box(ax, (x * wide, y * high), (wide, high), fc=color, ec="white")
        center = ((x + 0.5) * wide, (y + 0.5) * high)
        ax.text(*center, str(lane), ha="center", va="center", fontsize=9)
        if x == n // wide - 1:
            ax.text(n, center[1], f" warp {warp}", va="center")
    ax.set(xlim=(0, n), ylim=(m, 0), xlabel="columns")
    ax.set_yticks([row + 0.5 for row in range(m)], [f"row {row}" for row in range(m)])
    ax.set_xticks(range(0, n + 1, max(1, n // 4)))
    ax.grid(visible=False)
    ax.tick_params(axis="y", length=0)
    return ax


# ---- maps


def relative_speed(frame: pd.DataFrame, option: str) -> pd.DataFrame:
    """The speed over that of a copy, of a result of `bench_option`: values down, widths across.

    >>> frame = pd.DataFrame({"rows": [1, 2], "n": [64, 64], "us": [20.0, 8.0], "copy_us": 10.0})
    >>> relative_speed(frame, "rows")[64].to_dict()
    {1: 0.5, 2: 1.25}
    """
    speed = frame.assign(speed=frame["copy_us"] / frame["us"])
    return speed.pivot(index=option, columns="n", values="speed")


@_styled
def plot_heatmaps(
    frames: Mapping[str, pd.DataFrame],
    option: str,
    chosen: Callable[[str, int], object],
    label: str,
) -> Figure:
    """A map for each result of `bench_option`, by title, one below the other.

    Widths are across and the values of the option up; each cell has the speed in percent of a copy.
    chosen: the value to frame, a function of the title and the width. label: what the option is.
    """
    figure, sides = _panels(len(frames), (6, 3.1 * len(frames)))
    for ax, (title, frame) in zip(sides, frames.items(), strict=True):
        speed = relative_speed(frame, option)
        ax.pcolormesh(speed, cmap="Blues", vmin=0.3, vmax=1.1, edgecolor="white")
        for (y, value), (x, n) in itertools.product(enumerate(speed.index), enumerate(speed)):
            cell = speed.loc[value, n]
            if pd.isna(cell):
                continue
            color, text = "white" if cell > 0.75 else INK, f"{100 * cell:.0f}"
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=color)
            if value == chosen(title, n):
                _box(ax, (x, y), (1, 1), fc="none", ec=ORANGE, lw=2)
        ax.set(xlabel="columns", ylabel=label, title=f"{title}: percent of a copy")
        _label_cells(ax, list(speed), list(speed.index))
    return figure


@_styled
def plot_integer_map(
    values: Sequence[Sequence[int]],
    rows: Sequence[object],
    columns: Sequence[object],
    title: str,
    xlabel: str,
    ylabel: str = "",
) -> Axes:
    """Whole numbers as a map, the higher the darker: `values[row][column]`.

    The name of a column may be a tuple, which is then written on several lines.
    """
    ax = axes(xlabel, ylabel, size=(6, 0.9 + 0.4 * len(rows)))
    most = max(map(max, values))
    for y, x in itertools.product(range(len(rows)), range(len(columns))):
        depth = values[y][x] / most
        color = plt.get_cmap("Blues")(0.15 + 0.75 * depth)
        _box(ax, (x, y), (1, 1), fc=color, ec="white")
        ink = "white" if depth > 0.6 else INK
        ax.text(x + 0.5, y + 0.5, str(values[y][x]), ha="center", va="center", color=ink)
    ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0), title=title)
    names = ["\n".join(map(str, it)) if isinstance(it, tuple) else it for it in columns]
    _label_cells(ax, names, rows)
    return ax


def _label_cells(ax: Axes, columns: Sequence[object], rows: Sequence[object]) -> None:
    """Puts names under and beside the cells of a map."""
    ax.set_xticks([x + 0.5 for x in range(len(columns))], list(map(str, columns)))
    ax.set_yticks([y + 0.5 for y in range(len(rows))], list(map(str, rows)))
    ax.grid(visible=False)
    ax.tick_params(length=0)


# ---- the loop over tiles


@_styled
def plot_timeline(schedules: Mapping[str, Sequence[str]], tiles: int) -> Figure:
    """In what order compiled kernels move and use their tiles: a panel for each schedule, by title.

    schedules: each the `schedule` of a `compile.Resources`. A tile is in flight from the step that
    requests it to the step that waits for it, and in use from there to its store. Across are the
    steps of the code, which do not all take the same time.
    """
    figure, sides = _panels(len(schedules), (6, 1.1 + 1.5 * len(schedules)))
    for ax, (title, schedule) in zip(sides, schedules.items(), strict=True):
        intervals = tile_intervals(schedule, tiles)
        for tile, (requested, arrived, stored) in enumerate(intervals):
            flight, use = arrived - requested, stored - arrived
            ax.barh(tile, flight, left=requested, color=PROGRAM_COLORS[0], height=0.7)
            ax.barh(tile, use, left=arrived, color=BLUE, height=0.7)
        requested, arrived, stored = intervals[1]
        for start, end, text, color in (
            (requested, arrived, "in flight", INK),
            (arrived, stored, "in use", "white"),
        ):
            if end - start > 3:
                ax.text((start + end) / 2, 1, text, ha="center", va="center", color=color)
        ax.set_yticks(range(tiles), [f"tile {tile}" for tile in range(tiles)])
        ax.invert_yaxis()
        ax.set(title=title, xticks=[], xlabel="steps of the code, in order")
        ax.grid(visible=False)
        ax.tick_params(axis="y", length=0)
    return figure


def tile_intervals(schedule: Sequence[str], tiles: int) -> list[tuple[int, int, int]]:
    """For each tile, the steps at which it is requested, arrives, and is stored.

    >>> tile_intervals(("for", "load", "reduce", "store", "end"), 2)
    [(0, 1, 3), (3, 4, 6)]

    schedule: of a `compile.Resources`, with one loop that stores one tile in each iteration.
    """
    start, end = schedule.index("for"), schedule.index("end")
    steps = [*schedule[:start], *list(schedule[start + 1 : end]) * tiles]
    requested = [i for i, step in enumerate(steps) if step in ("copy", "load")]
    arrived = [i + 1 for i, step in enumerate(steps) if step == "load" or step.startswith("wait")]
    stored = [i + 1 for i, step in enumerate(steps) if step == "store"]
    return list(zip(requested, arrived, stored, strict=False))[:tiles]


# ---- the ladder


@_styled
def plot_ladder(frame: pd.DataFrame, moved: Mapping[str, float]) -> Figure:
    """The ladder in one figure: the bytes that each rung moves, and the bandwidth that it reaches.

    frame: a result of `bench` at one shape. moved: bytes read and written, by implementation.
    """
    figure, sides = _panels(2, (6, 1.7 + 0.8 * len(frame)))
    labels = list(frame["impl"])
    moved_gb = [moved[label] / 1e9 for label in labels]
    for ax, xlabel, values, text in (
        (sides[0], "bytes moved, read and written, GB", moved_gb, "{:.2f} GB"),
        (sides[1], "bandwidth for the least traffic, GB/s", list(frame["gb_per_s"]), "{:.0f} GB/s"),
    ):
        colors = [MUTED if label == "copy" else BLUE for label in labels]
        drawn = ax.barh(labels, values, color=colors, height=0.65)
        ax.bar_label(drawn, [text.format(value) for value in values], padding=4)
        ax.set(xlabel=xlabel, xlim=(0, 1.3 * max(values)))
        _hide_grid(ax, "y")
        ax.invert_yaxis()
    return figure
