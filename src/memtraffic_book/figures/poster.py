"""Where does your time go? The table that the book ends with, and its three numbers."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memtraffic_book import units
from memtraffic_book.figures.drawing import ORANGE

ENOUGH, LATE = 0.95, 1.1  # of the best bandwidth; of the time of the best tile
WIDTH, HEIGHT, HEAD, STEP, LINE = 300, 356, 90, 32, 19  # in points
LINES = (  # causes, and what is seen and done in each of their cases
    "Too many bytes",
    ("more bytes move\nthan in a copy", "fuse the kernels: read\nonce, write once"),
    (
        "a load touches sectors\nthat nobody needs",
        "give neighbouring lanes\nneighbouring addresses",
    ),
    ("a row does not fit\none program", "share the row among\nseveral programs"),
    "Too few at once",
    ("a program loads less\nthan {load}", "give it several rows:\na tile"),
    ("under {flight} in flight\nwhile one computes", "widen the loads, or fit\na second program"),
    "Too late",
    ("a call takes longer\nthan its kernel", "replay a CUDA graph, or\nmake fewer, larger calls"),
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
    said = (copy, "copy time of 4096\n× 16384 numbers"), (load, "or more: bytes\nper program")
    colors = "#cfe3ff", "#d3f0da", "#ffe0c9"
    for i, (number, text) in enumerate([*said, (flight, "or more: bytes in\nflight per SM")]):
        fill(4 + 98 * i, 24, 96, 50, colors[i])
        write(52 + 98 * i, 38, number, 16, weight="bold", ha="center")
        write(52 + 98 * i, 60, text, ha="center")
    write(WIDTH - 6, HEIGHT - 7, "The numbers are of an H200.", ha="right")
    write(8, HEAD - 6, "Within a tenth of the copy time? Stop. Else:", weight="bold")
    y, cases = HEAD, iter("123456")
    for line in LINES:
        if isinstance(line, str):
            fill(4, y + 3, WIDTH - 8, LINE - 5, "#eef1f4")
            write(8, y + 10, line, weight="bold", color=ORANGE)
            y += LINE
        else:
            write(8, y + STEP / 2, next(cases), weight="bold")
            write(19, y + STEP / 2, line[0].format(flight=flight, load=load))
            write(148, y + STEP / 2, line[1])
            y += STEP
    return figure
