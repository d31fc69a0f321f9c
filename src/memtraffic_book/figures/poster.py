"""Where does your time go? The table that the book ends with, and its three numbers."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memtraffic_book import units
from memtraffic_book.figures.drawing import ORANGE

ENOUGH, LATE = 0.95, 1.1  # of the best bandwidth; of the time of the best tile
WIDTH, HEIGHT, HEAD, STEP = 300, 326, 92, 33  # in points
CASES = (
    ("more bytes move\nthan in a copy", "fuse the kernels: read\nonce, write once"),
    (
        "a load touches sectors\nthat it does not need",
        "give neighbouring lanes\nneighbouring addresses",
    ),
    ("a program loads less\nthan {load}", "give it several rows:\na tile"),
    ("less than {flight} are in\nflight on an SM", "widen the loads, or fit\na second program"),
    ("a row does not fit\none program", "share the row among\nseveral programs"),
    ("a call takes longer\nthan its kernel", "call torch.softmax, or\nreplay a CUDA graph"),
    ("you are as fast\nas a copy", "stop"),
)


def numbers(copy: pd.DataFrame, flight: pd.DataFrame, tiles: pd.DataFrame) -> dict[str, str]:
    """The three numbers: `copy`, `flight` and `load`.

    copy: times of a copy of the book's example. flight: speeds of a kernel that reads, over
    `kib_per_sm` in flight; the number is the least that comes near the best. tiles: times of tiles
    of `rows` rows of `n` numbers of float32; the number is the fewest bytes with which no width is
    late.
    """
    read = flight[flight["access"] == "read"]
    near = read.loc[read["gb_per_s"] >= ENOUGH * read["gb_per_s"].max(), "kib_per_sm"].min()
    late = tiles["us"] / tiles.groupby("n")["us"].transform("min")
    worst = late.groupby(4 * tiles["rows"] * tiles["n"]).max()
    return {
        "copy": units.format_us(copy.loc[copy["impl"] == "copy", "us"].iloc[0]),
        "flight": f"{1.024 * near:.0f} kB",
        "load": f"{worst[worst < LATE].index[0] / 1000:.0f} kB",
    }


def poster(copy: str, flight: str, load: str) -> Figure:
    """Draws the three numbers, and what to do in each case."""
    figure = plt.figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="none")

    def write(x: float, y: float, text: str, size: float = 9.7, **how: str) -> None:
        figure.text(x / WIDTH, 1 - y / HEIGHT, text, size=size, va="center", **how)

    def fill(x: float, y: float, width: float, height: float, color: str) -> None:
        corner = x / WIDTH, 1 - (y + height) / HEIGHT
        figure.add_artist(Rectangle(corner, width / WIDTH, height / HEIGHT, color=color, lw=0))

    write(WIDTH / 2, 12, "Where does your time go?", 13, weight="bold", ha="center")
    said = (copy, "for a copy of 4096\n× 16384 numbers"), (flight, "for an SM: at least\nin flight")
    colors = "#cfe3ff", "#ffe0c9", "#d3f0da"
    for i, (number, text) in enumerate([*said, (load, "for a program: at\nleast to load")]):
        fill(4 + 98 * i, 24, 96, 50, colors[i])
        write(52 + 98 * i, 38, number, 16, weight="bold", ha="center")
        write(52 + 98 * i, 60, text, ha="center")
    write(19, HEAD - 9, "If …", weight="bold")
    write(148, HEAD - 9, "then …", weight="bold", color=ORANGE)
    write(WIDTH - 6, HEAD - 9, "numbers of an H200", ha="right")
    for i, (seen, done) in enumerate(CASES):
        if i % 2 == 0:
            fill(4, HEAD + STEP * i, WIDTH - 8, STEP, "#eef1f4")
        write(8, HEAD + STEP * (i + 0.5), f"{i + 1}", weight="bold")
        write(19, HEAD + STEP * (i + 0.5), seen.format(flight=flight, load=load))
        write(148, HEAD + STEP * (i + 0.5), done)
    return figure
