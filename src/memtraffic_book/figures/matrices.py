"""Drawings of memory: which program touches which element, what a mask leaves out, sectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from memtraffic_book.figures.drawing import (
    BLUE,
    DEAD,
    GRID,
    INK,
    LINE,
    MUTED,
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
    from memtraffic.meters.count import Access

SECTOR = 32  # bytes
LEFT, RIGHT = 0.04, WIDTH - 0.04
WIDEST = 16  # elements of a block that can be drawn one by one
WANTED = {"facecolor": PROGRAM_COLORS[0], "edgecolor": MUTED}
OTHERS = {"facecolor": GRID, "edgecolor": MUTED}
AFTER = {"facecolor": "white", "edgecolor": MUTED, "linestyle": ":"}


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
def mask(
    n: int,
    block: int,
    *,
    row: int = 1,
    rows: int | None = None,
    itemsize: int = 4,
    other: str = "-inf",
    title: str = "",
) -> Axes:
    """A block that is wider than its row: the dead elements above, the row in memory below.

    A number is an element's offset from the start of the matrix.

    n: elements of a row; the rows are packed. block: elements of a program's block, at most 16.
    row: which one is drawn. rows: those of the matrix, or None if it does not end in the picture.
    other: what the dead elements hold. Raises ValueError for a block that is narrower than the row,
    or too wide to be drawn, and for a row that the matrix does not have.
    """
    if not 0 < n <= block <= WIDEST:
        raise ValueError(
            f"mask: a row of {n} in a block of {block}, and at most {WIDEST} are drawn"
        )
    if rows is not None and not 0 <= row < rows:
        raise ValueError(f"mask: row {row} of a matrix of {rows} rows")
    dead = block - n
    title = title or (
        f"A row of {n} fills {n} of {block} elements, and the mask switches {dead} off."
    )
    per_sector = SECTOR // itemsize
    start, stop = row * n, (row + 1) * n
    first, last = start // per_sector, -(-stop // per_sector)
    wide, high = min(0.49, (RIGHT - LEFT) / block), 0.34
    small = min(0.24, (RIGHT - LEFT) / ((last - first) * per_sector))
    top, below = 0.52, 1.46
    ax = board()
    write(ax, LEFT, 0.13, f"program {row}: a block of {block} elements", ha="left")
    for i in range(block):
        at, live = (LEFT + i * wide, top), i < n
        box(ax, at, (wide, high), gid="live" if live else "dead", **(WANTED if live else DEAD))
        text = str(start + i) if live else other
        turned = 90 if text_width(text) > wide - 0.03 else 0
        halo(write(ax, at[0] + wide / 2, at[1] + high / 2, text, rotation=turned))
    if dead:
        ends = LEFT + n * wide + 0.03, LEFT + block * wide - 0.03
        sides = [ends[0], ends[0], ends[1], ends[1]]
        ax.plot(sides, [top - 0.03, top - 0.08, top - 0.08, top - 0.03], color=INK, linewidth=1)
        text = f"{dead} dead element{'s' * (dead > 1)}: not loaded, {other}"
        write(ax, ends[1], top - 0.18, text, ha="right")
    for offset in range(first * per_sector, last * per_sector):
        at = (LEFT + (offset - first * per_sector) * small, below)
        mine = start <= offset < stop
        name = "row" if mine else "after" if rows and offset >= rows * n else "others"
        look = {"row": WANTED, "others": OTHERS, "after": AFTER}[name]
        box(ax, at, (small, high), gid=name, **look)
        if name != "after" and text_width(str(offset)) < small - 0.03:
            write(ax, at[0] + small / 2, below + high / 2, str(offset))
        if mine:
            x = LEFT + (offset - start + 0.5) * wide
            head = (at[0] + small / 2, below)
            arrow(ax, head, (x, top + high), color=BLUE, linewidth=0.8, mutation_scale=6)
    for sector in range(first, last):
        at = (LEFT + (sector - first) * per_sector * small, below)
        wide_sector = per_sector * small
        box(ax, at, (wide_sector, high), fill=False, edgecolor=INK, linewidth=2, gid="sector")
        x = at[0] + wide_sector / 2
        write(ax, x, below + high + 0.12, f"sector {sector}: {SECTOR} bytes")
    samples = [Sample(f"row {row} in memory", WANTED)]
    samples.append(Sample("other rows", OTHERS))
    if rows and last * per_sector > rows * n:
        samples.append(Sample("after the matrix", AFTER))
    return finish(ax, key(ax, below + high + 0.42, samples), title)


@styled
def sectors(
    strips: Mapping[str, Sequence[int]], *, itemsize: int = 4, shown: int = 4, title: str = ""
) -> Axes:
    """Which sectors of 32 bytes a row touches: what is wanted of them, and what comes along.

    strips: by name, the offsets in memory of the row's elements, such as `range(16)` for a packed
    row and `range(0, 32, 2)` for one that owns every other element. shown: how many sectors are
    drawn; all are counted.
    """
    per_sector = SECTOR // itemsize
    touched = {name: sorted({it // per_sector for it in them}) for name, them in strips.items()}
    if not title:
        share = {name: len(set(strips[name])) / len(touched[name]) for name in strips}
        worst = min(share, key=lambda name: share[name])
        title = (
            f"Memory comes in sectors of {SECTOR} bytes: of what the {worst} row fetches, it "
            f"wants {100 * share[worst] / per_sector:.3g} %."
        )
    high, step = 0.22, 0.64
    small = (RIGHT - LEFT - 0.1 * (shown - 1) - 0.22) / (shown * per_sector)
    ax = board()
    for i, (name, offsets) in enumerate(strips.items()):
        y, wanted = i * step, set(offsets)
        fetched = len(touched[name]) * SECTOR
        count = f"{len(wanted) * itemsize} of {fetched} bytes wanted"
        write(ax, LEFT, y + 0.12, name, ha="left", weight="bold")
        write(ax, RIGHT, y + 0.12, count, ha="right")
        for j, sector in enumerate(touched[name][:shown]):
            x = LEFT + j * (per_sector * small + 0.1)
            for k in range(per_sector):
                mine = sector * per_sector + k in wanted
                look = {"facecolor": BLUE, "edgecolor": "white"} if mine else DEAD
                at = (x + k * small, y + 0.24)
                box(ax, at, (small, high), lw=0.6, gid="wanted" if mine else "unwanted", **look)
            size = (per_sector * small, high)
            box(ax, (x, y + 0.24), size, fill=False, edgecolor=INK, lw=1.2, gid="sector")
            if j and sector - touched[name][j - 1] > 1:  # others lie between
                write(ax, x - 0.05, y + 0.24 + high / 2, "⋮", weight="bold")
        if len(touched[name]) > shown:
            write(ax, WIDTH - 0.13, y + 0.24 + high / 2, "…")
    samples = [Sample("wanted", {"facecolor": BLUE}), Sample("fetched, not wanted", DEAD)]
    return finish(ax, key(ax, len(strips) * step + LINE / 2, samples), title)
