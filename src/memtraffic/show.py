"""What a chapter shows: kernels and their differences, tables, figures, claims, exercises.

Everything here is written so that a notebook's output is the same text on every machine: numbers that were measured carry
their unit, and nothing prints a path or a version.
"""

import ast
import difflib
import html
import inspect
import itertools
import textwrap

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from memtraffic import measure, recording
from memtraffic.ladder import RUNGS, resolve
from memtraffic.traffic.formula import formula

# Dark on white; the book inverts its figures on a dark page and turns the hues back.
INK, MUTED, GRID = "#1f2328", "#59636e", "#d1d9e0"
BLUE, ORANGE, GREEN, RED = "#0969da", "#bc4c00", "#1a7f37", "#cf222e"
PROGRAM_COLORS = ("#9ec5fe", "#ffc9a3", "#a3dcb1", "#f3b1b6", "#cdb7f5", "#e8d98a")

plt.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.edgecolor": MUTED,
        "axes.grid": True,
        "axes.labelcolor": INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "figure.dpi": 160,
        "figure.facecolor": "white",
        "font.size": 11,
        "grid.color": GRID,
        "lines.linewidth": 2,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
)


# ---- numbers with their unit


def us(microseconds):
    """A duration: `us(101.4)` is `101 µs`."""
    return f"{microseconds:.1f} µs" if microseconds < 20 else f"{microseconds:,.0f} µs"


def gb_per_s(value):
    """A bandwidth: `gb_per_s(3957.2)` is `3957 GB/s`."""
    return f"{value:.0f} GB/s"


def times(value):
    """A ratio: `times(1.034)` is `1.03x`."""
    return f"{value:.2f}x"


def size(n_bytes):
    """An amount of memory in units of 1000: `size(268510464)` is `268.5 MB`, `size(16384)` is `16.4 kB`."""
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:,.1f} kB"


def percent(value):
    """A share or a change: `percent(0.916)` is `91.6 %`."""
    return f"{100 * value:.1f} %"


# ---- text


def claim(sentence, holds):
    """Prints `sentence` with a tick if it `holds`. Raises AssertionError, which repeats it, if not."""
    if not bool(holds):
        raise AssertionError(f"does not hold: {sentence}")
    print(f"✓ {sentence}")


def check(sentence, attempt, judge):
    """Checks an exercise: prints whether `attempt` is open (None), right or not yet.

    judge: a function of the attempt, true for a right one. What it raises of a wrong attempt is said, not raised, so that the
    exercises after it are checked too.
    """
    if attempt is None:
        print(f"○ {sentence}: your turn")
        return
    try:
        right, why = bool(judge(attempt)), ""
    except Exception as error:  # an attempt may do anything
        right, why = False, f" ({type(error).__name__}: {error})"
    print(f"✓ {sentence}" if right else f"✗ {sentence}: not yet{why}")


def glue(name, value):
    """Keeps `value`, a string, under `name` for the text of the book, which quotes it with the role `glue:text`."""
    mime = "application/papermill.record/"
    display(
        {f"{mime}text/plain": repr(value)},
        raw=True,
        metadata={"scrapbook": {"name": name, "mime_prefix": mime}},
    )


def source(*objects):
    """Shows the source of functions or kernels."""
    display(Markdown("```python\n" + "\n\n\n".join(map(_source, objects)) + "\n```"))


def diff(below, above):
    """Shows how the code of `above` differs from that of `below`, functions or kernels of two rungs, docstrings aside."""
    old, new = (_source(part, docstring=False).splitlines() for part in (below, above))
    lines = list(difflib.unified_diff(old, new, lineterm="", n=len(old) + len(new)))[3:]
    display(Markdown("```diff\n" + "\n".join(lines) + "\n```"))


def _source(function, docstring=True):
    while not inspect.isfunction(
        function
    ):  # a kernel wraps the function it was made of
        function = function.fn
    text = textwrap.dedent(inspect.getsource(function)).rstrip()
    first = ast.parse(text).body[0].body[0]
    if not docstring and ast.get_docstring(ast.parse(text).body[0]):
        lines = text.splitlines()
        text = "\n".join(lines[: first.lineno - 1] + lines[first.end_lineno :])
    return text


class Table:
    """A small table: HTML in a page, one line a row elsewhere."""

    def __init__(self, columns, rows):
        self.columns, self.rows = columns, rows

    def __repr__(self):
        return "\n".join(" | ".join(row) for row in (self.columns, *self.rows))

    def _repr_html_(self):
        def line(cells, tag):
            return (
                "<tr>"
                + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
                + "</tr>"
            )

        body = "".join(line(row, "td") for row in self.rows)
        return f'<table class="dataframe">{line(self.columns, "th")}{body}</table>'


def table(rows, **columns):
    """Shows a table: for each of `rows` (of a DataFrame, as a dict), each of `columns`, a function of the row.

    The name of a column is its heading, with `_` for a space.
    """
    rows = rows.to_dict("records") if hasattr(rows, "to_dict") else list(rows)
    headings = [name.replace("_", " ").strip() for name in columns]
    display(
        Table(headings, [[str(of(row)) for of in columns.values()] for row in rows])
    )


# ---- figures


def axes(xlabel="", ylabel="", size=(6, 3.4)):
    """Axes in the book's style; sizes in inches."""
    _figure, ax = plt.subplots(figsize=size, layout="constrained")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return ax


def bars(labels, values, texts, xlabel, colors=BLUE, size=None):
    """Horizontal bars from zero, the first on top, each with its text beside it. Returns the axes."""
    ax = axes(xlabel=xlabel, size=size or (6, 0.7 + 0.42 * len(labels)))
    rows = range(len(labels))
    drawn = ax.barh(rows, list(values), color=colors, height=0.65)
    ax.set_yticks(rows, list(labels))
    ax.bar_label(drawn, list(texts), padding=4)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(values))
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    return ax


def level(ax, value, text):
    """Marks a value of the y axis with a dashed line and its name, and starts the axis at zero."""
    ax.axhline(value, color=MUTED, linestyle="--", linewidth=1)
    ax.annotate(text, (ax.get_xlim()[0], value), va="bottom", color=MUTED)
    ax.set_ylim(0, 1.15 * value)


def powers_of_two(ax, values):
    """Makes the x axis logarithmic, with marks at the last of `values` and every other before it, and starts y at zero."""
    ax.set_xscale("log", base=2)
    marks = list(values)[::-2][::-1]
    ax.set_xticks(marks, [f"{mark:.0f}" for mark in marks])
    ax.set_ylim(0, None)


def widths(frame, ax=None):
    """Draws bandwidth over the width of the row, a line for each implementation in `frame`, of `bench`. Returns the axes."""
    ax = ax or axes(size=(6, 3.8))
    ax.set(xlabel="columns", ylabel="bandwidth for the least traffic, GB/s")
    colors = iter([MUTED, BLUE, ORANGE, GREEN, RED])
    ends = []
    for name, one in frame.groupby("impl", sort=False):
        color = next(colors)
        style = {"linestyle": "--", "zorder": 3} if name == "copy" else {}
        style |= {"marker": "o", "markersize": 4, "color": color}
        ax.plot(one["n"], one["gb_per_s"], **style)
        ends.append((one["gb_per_s"].iloc[-1], name, color))
    powers_of_two(ax, sorted(frame["n"].unique()))
    low, high = ax.get_xlim()
    ax.set_xlim(low, high * (high / low) ** 0.3)
    gap, below = 0.06 * ax.get_ylim()[1], float("inf")
    for value, name, color in sorted(
        ends, reverse=True
    ):  # from the top, none on another
        below = min(value, below - gap)
        ax.annotate(f" {name}", (high, below), color=color, va="center")
    return ax


def panels(frames):
    """Draws `widths` for each of `frames`, by title, one below the other. Returns the figure."""
    size = (6, 3.6 * len(frames))
    figure, sides = plt.subplots(
        len(frames), 1, figsize=size, layout="constrained", squeeze=False
    )
    for ax, (title, frame) in zip(sides[:, 0], frames.items(), strict=True):
        widths(frame, ax).set_title(title)
    return figure


def flow(ops, unit):
    """Draws what each of `ops` reads, to the left, and writes, to the right, in units of so many elements.

    A bar too short to see is marked M. Returns the axes.
    """
    ax = axes(xlabel="reads, MN          writes, MN", size=(6, 0.8 + 0.42 * len(ops)))
    rows = range(len(ops))
    read = [-op.read_elements / unit for op in ops]
    written = [op.written_elements / unit for op in ops]
    reads = ax.barh(rows, read, color=BLUE, height=0.65)
    writes = ax.barh(rows, written, color=ORANGE, height=0.65)
    ax.set_yticks(rows, [op.name for op in ops])
    for drawn, side in ((reads, "read_elements"), (writes, "written_elements")):
        small = [getattr(op, side) < 0.01 * unit for op in ops]
        ax.bar_label(drawn, ["M" if few else "" for few in small], padding=4)
    ax.axvline(0, color=INK, linewidth=1)
    ax.invert_yaxis()
    ax.set(xlim=(-1.3, 1.3), xticks=[-1, 0, 1], xticklabels=["1", "0", "1"])
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    return ax


def cells(accesses, shape, argument):
    """Draws a matrix, each cell with its offset from the first element, in the colour of the program that touched it.

    accesses: those of a traced count. argument: the name of the kernel's pointer. A cell that nobody touched stays white, one
    touched more often than once says how often. Returns the axes.
    """
    m, n = shape
    touched = {}
    for access in accesses:
        if access.argument == argument:
            for offset in access.offsets:
                touched.setdefault(offset, []).append(access.program[0])
    ax = axes(size=(min(6, 0.75 * n + 1.4), 0.5 * m + 0.5))
    for offset in range(m * n):
        row, col = divmod(offset, n)
        programs = touched.get(offset, [])
        color = (
            PROGRAM_COLORS[programs[0] % len(PROGRAM_COLORS)] if programs else "white"
        )
        ax.add_patch(plt.Rectangle((col, row), 1, 1, facecolor=color, edgecolor=MUTED))
        text = str(offset) + (f" ({len(programs)} times)" if len(programs) > 1 else "")
        ax.text(col + 0.5, row + 0.5, text, ha="center", va="center")
    for row in range(m):
        owners = sorted(
            {
                program
                for offset in range(row * n, row * n + n)
                for program in touched.get(offset, [])
            }
        )
        ax.text(
            n + 0.15,
            row + 0.5,
            f"program {', '.join(map(str, owners))}" if owners else "nobody",
            va="center",
        )
    ax.set(xlim=(0, n + 1.6), ylim=(m, 0))
    ax.axis("off")
    return ax


def lanes(layout, shape):
    """Draws who holds what of a block of `shape` (rows, columns): a box for each access of a lane, with the lane's number, in
    the colour of its warp.

    layout: a `targets.Layout`. Returns the axes.
    """
    m, n = shape
    (high, wide), down, across = layout.elements, layout.lanes, layout.warps
    ax = axes(size=(6.4, 0.6 + 0.4 * (m // high)))
    for row, col in itertools.product(range(0, m, high), range(0, n, wide)):
        box = (row // high, col // wide)
        lane = box[0] % down[0] * down[1] + box[1] % down[1]
        warp = box[0] // down[0] % across[0] * across[1]
        warp += box[1] // down[1] % across[1]
        color = PROGRAM_COLORS[warp % len(PROGRAM_COLORS)]
        ax.add_patch(plt.Rectangle((col, row), wide, high, fc=color, ec="white"))
        at = (col + wide / 2, row + high / 2)
        ax.text(*at, str(lane), ha="center", va="center", fontsize=9)
        if box[1] == n // wide - 1:
            ax.text(n, row + high / 2, f" warp {warp}", va="center")
    ax.set(xlim=(0, n), ylim=(m, 0), xlabel="columns")
    ax.set_yticks([row + 0.5 for row in range(m)], [f"row {row}" for row in range(m)])
    ax.set_xticks(range(0, n + 1, max(1, n // 4)))
    ax.grid(visible=False)
    ax.tick_params(axis="y", length=0)
    return ax


def heatmaps(frames, value, chosen):
    """Draws a map for each of `frames`, of `sweep`, by title: widths across, values of the option up, in each cell
    the speed in percent of a copy.

    value: what the option is. chosen: the value that is framed, a function of the title and the width. Returns the figure.
    """
    figure, sides = plt.subplots(
        len(frames),
        1,
        figsize=(6, 3.1 * len(frames)),
        layout="constrained",
        squeeze=False,
    )
    for ax, (title, frame) in zip(sides[:, 0], frames.items(), strict=True):
        grid = share(frame)
        ax.pcolormesh(
            grid,
            cmap="Blues",
            vmin=0.3,
            vmax=1.1,
            edgecolor="white",
        )
        for y, row in enumerate(grid.index):
            for x, col in enumerate(grid.columns):
                cell = grid.loc[row, col]
                if cell != cell:
                    continue
                color = "white" if cell > 0.75 else INK
                text = f"{100 * cell:.0f}"
                ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=color)
                if row == chosen(title, col):
                    ax.add_patch(
                        plt.Rectangle((x, y), 1, 1, fc="none", ec=ORANGE, lw=2)
                    )
        ax.set_xticks([i + 0.5 for i in range(len(grid.columns))], grid.columns)
        ax.set_yticks([i + 0.5 for i in range(len(grid.index))], grid.index)
        ax.set(xlabel="columns", ylabel=value, title=f"{title}: percent of a copy")
        ax.grid(visible=False)
        ax.tick_params(length=0)
    return figure


def share(frame):
    """The speed of each row of `frame`, of `sweep`, over that of the copy of the same width: values down, widths across."""
    copy = frame[frame["value"] == 0].set_index("n")["us"]
    rest = frame[frame["value"] != 0]
    grid = rest.pivot(index="value", columns="n", values="us")
    return copy[grid.columns] / grid


def staircase(stairs, points, xlabel, ylabel):
    """Draws steps, and kernels on or under them.

    stairs: lines by name, each a pair of lists (x, y). points: labels, each a pair (x, y). Returns the axes.
    """
    ax = axes(xlabel, ylabel, size=(6, 3.8))
    for (name, (x, y)), color in zip(stairs.items(), (BLUE, MUTED), strict=False):
        ax.step(x, y, where="mid", color=color, linewidth=1.5)
        at = len(x) * 3 // 4
        ax.annotate(
            name, (x[at], y[at]), (0, 5), textcoords="offset points", color=color
        )
    ax.plot(*zip(*points.values(), strict=True), "o", color=ORANGE, markersize=5)
    corners = {at for line in stairs.values() for at in zip(*line, strict=True)}
    for label, at in points.items():
        beside = [y - at[1] for x, y in points.values() if abs(x - at[0]) < 4]
        near = sum(gap for gap in beside if abs(gap) < 4)  # of another label
        level = -4 - 7 * (near > 0) + 2 * (near < 0)
        where = ((6, 3), "left") if at in corners else ((-7, level), "right")
        style = {"textcoords": "offset points", "color": ORANGE, "ha": where[1]}
        ax.annotate(label, at, where[0], **style)
    ax.set_ylim(0, 1.1 * max(max(y) for _, y in stairs.values()))
    return ax


def grid(values, rows, columns, title, xlabel, ylabel=""):
    """Draws whole numbers as a map: `values[row][column]`, the higher the darker, None for an empty cell.

    A column's name may be a tuple, and is then written on several lines. Returns the axes.
    """
    ax = axes(xlabel, ylabel, size=(6, 0.9 + 0.4 * len(rows)))
    most = max(value for row in values for value in row if value is not None)
    for y, x in itertools.product(range(len(rows)), range(len(columns))):
        value = values[y][x]
        if value is None:
            continue
        depth = value / most
        color = plt.get_cmap("Blues")(0.15 + 0.75 * depth)
        ax.add_patch(plt.Rectangle((x, y), 1, 1, fc=color, ec="white"))
        ink = "white" if depth > 0.6 else INK
        ax.text(x + 0.5, y + 0.5, str(value), ha="center", va="center", color=ink)
    ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0), title=title)
    names = ["\n".join(map(str, it)) if isinstance(it, tuple) else it for it in columns]
    ax.set_xticks([x + 0.5 for x in range(len(columns))], names)
    ax.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    return ax


def timeline(schedules, tiles):
    """Draws in what order compiled kernels move and use their tiles: a panel for each of `schedules`, of `targets.Resources`,
    by title.

    A tile is on its way from the step that asks for it to the step that waits for it, and in use from there to its store.
    Across are the steps of the code, which are not equally long. Returns the figure.
    """
    figure, sides = plt.subplots(
        len(schedules),
        1,
        figsize=(6, 1.1 + 1.5 * len(schedules)),
        layout="constrained",
        squeeze=False,
    )
    for ax, (title, schedule) in zip(sides[:, 0], schedules.items(), strict=True):
        for tile, (asked, there, stored) in enumerate(spans(schedule, tiles)):
            ax.barh(
                tile, there - asked, left=asked, color=PROGRAM_COLORS[0], height=0.7
            )
            ax.barh(tile, stored - there, left=there, color=BLUE, height=0.7)
        asked, there, stored = spans(schedule, tiles)[1]
        for start, end, text, color in (
            (asked, there, "on its way", INK),
            (there, stored, "in use", "white"),
        ):
            at, fits = ((start + end) / 2, 1), end - start > 3
            ax.text(*at, text if fits else "", ha="center", va="center", color=color)
        ax.set_yticks(range(tiles), [f"tile {tile}" for tile in range(tiles)])
        ax.invert_yaxis()
        ax.set(title=title, xticks=[], xlabel="steps of the code, in order")
        ax.grid(visible=False)
        ax.tick_params(axis="y", length=0)
    return figure


def spans(schedule, tiles):
    """For each of `tiles` tiles, the steps at which it is asked for, there, and stored, as a program runs `schedule`.

    schedule: of `targets.Resources`, one loop, each pass of which stores one tile.
    """
    start, end = schedule.index("for"), schedule.index("end")
    body = schedule[start + 1 : end]
    asked, there, stored = [], [], []
    for step, name in enumerate([*schedule[:start], *body * tiles]):
        if name in ("copy", "load"):
            asked.append(step)
        if name == "load" or name.startswith("wait"):
            there.append(step + 1)
        if name == "store":
            stored.append(step + 1)
    return list(zip(asked, there, stored, strict=False))[:tiles]


def ladder(frame, moved):
    """The ladder in one figure: what each rung moves, and how fast it is for it. Returns the figure.

    frame: rows of `bench` at one shape. moved: bytes read and written, by the name of the implementation.
    """
    figure, sides = plt.subplots(
        2, 1, figsize=(6, 1.7 + 0.8 * len(frame)), layout="constrained"
    )
    labels = list(frame["impl"])
    colors = [MUTED if label == "copy" else BLUE for label in labels]
    columns = (
        (
            "bytes moved, read and written, GB",
            [moved[label] / 1e9 for label in labels],
            "{:.2f} GB",
        ),
        (
            "bandwidth for its least traffic, GB/s",
            list(frame["gb_per_s"]),
            "{:.0f} GB/s",
        ),
    )
    for ax, (xlabel, values, text) in zip(sides, columns, strict=True):
        drawn = ax.barh(labels, values, color=colors, height=0.65)
        ax.bar_label(drawn, [text.format(value) for value in values], padding=4)
        ax.set(xlabel=xlabel, xlim=(0, 1.3 * max(values)))
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
    return figure


def save_ladder(recorded, path):
    """Draws `ladder` for every rung there is, from the recording `ladder` in the folder `recorded`, into a PNG.

    The picture carries the checksum of that recording, so that a stale one can be told.
    """
    frame = recording.read(recorded, "ladder")
    m, n = (int(frame[size].iloc[0]) for size in "mn")
    itemsize = getattr(torch, frame["dtype"].iloc[0]).itemsize
    shown = {"copy": measure.copy} | {rung: resolve(rung) for rung in RUNGS}
    moved = {
        name: sum(formula(fn).elements(m, n)) * itemsize for name, fn in shown.items()
    }
    figure = ladder(frame[frame["impl"].isin(shown)], moved)
    checksum = recording.load_machine(recorded)["experiments"]["ladder"]["sha256"]
    figure.savefig(path, dpi=160, metadata={"Source": checksum, "Software": None})
    plt.close(figure)
