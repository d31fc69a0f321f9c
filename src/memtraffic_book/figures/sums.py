"""A drawing of numbers that are summed tile by tile, and rescaled when their maximum rises."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from memtraffic_book.figures.drawing import (
    HATCHES,
    INK,
    LINE,
    MUTED,
    PROGRAM_COLORS,
    WIDTH,
    Sample,
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


@styled
def running_sum(tiles: Sequence[Sequence[float]], *, base: float = 2, title: str = "") -> Axes:
    """The sum of an online softmax after each tile: old terms shrink when the maximum rises.

    A term is a box, as wide as `base ** (x - maximum)`. Dotted lines lead from the end of the old
    terms to where they end after the next tile.

    tiles: the numbers of a row, tile by tile; at most six tiles. base: what is raised to a power.
    Raises ValueError for more tiles than there are colours.
    """
    if len(tiles) > len(PROGRAM_COLORS):
        raise ValueError(
            f"running_sum: {len(tiles)} tiles, and {len(PROGRAM_COLORS)} can be told apart"
        )
    maxima = [max(x for tile in tiles[: i + 1] for x in tile) for i in range(len(tiles))]
    terms = [
        [(t, x, base ** (x - high)) for t, tile in enumerate(tiles[: i + 1]) for x in tile]
        for i, high in enumerate(maxima)
    ]
    sums = [math.fsum(width for _, _, width in them) for them in terms]
    title = title or "When the maximum rises, all old terms shrink by the same factor."
    looks = [
        {"facecolor": color, "edgecolor": MUTED, "hatch": hatch}
        for color, hatch in zip(PROGRAM_COLORS, HATCHES, strict=True)
    ]
    scale, high, step = (RIGHT - LEFT) / max(sums), 0.28, 0.92
    ax = board()
    for i, them in enumerate(terms):
        y = i * step
        halo(write(ax, LEFT, y + LINE / 2, f"tile {i}", ha="left", weight="bold"))
        text = f"maximum {maxima[i]:g}, sum {sums[i]:g}"
        halo(write(ax, RIGHT, y + LINE / 2, text, ha="right"))
        x, top = LEFT, y + LINE + 0.08
        for tile, number, width in them:
            box(ax, (x, top), (width * scale, high), gid=f"tile {tile}", lw=0.8, **looks[tile])
            if width * scale > text_width(f"{number:g}") + 0.06:
                halo(write(ax, x + width * scale / 2, top + high / 2, f"{number:g}"))
            x += width * scale
        if i + 1 < len(terms):
            factor = base ** (maxima[i] - maxima[i + 1])
            below = (i + 1) * step + LINE + 0.08
            ends = [LEFT + sums[i] * scale, LEFT + sums[i] * factor * scale]
            ax.plot(ends, [top + high, below], color=INK, linestyle=":", linewidth=1.2, gid="end")
            text = f"times {factor:g}" if factor < 1 else "times 1: no new maximum"
            halo(write(ax, RIGHT, top + high + 0.15, text, ha="right"))
    samples = [Sample(f"tile {tile}", looks[tile]) for tile in range(len(tiles))]
    return finish(ax, key(ax, len(terms) * step - 0.14, samples), title)
