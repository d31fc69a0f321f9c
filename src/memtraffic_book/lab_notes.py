"""What was tried on the kernels of `memtraffic.softmax`: predictions, results, and what stayed.

The numbers are those of trials on an H200, each within one run. Most of the kernels tried are gone,
so no page can measure them again; what stayed is measured on the scoreboard.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from IPython.display import Markdown, display

from memtraffic.gpus import DEFAULT_GPU
from memtraffic.kernels.softmax.planning import softmax_tile

KEPT, DROPPED = "kept", "dropped"
KINDS = {
    "float32": (4, 1),
    "bfloat16": (2, 1),
    "float32 backward": (4, 2),
    "bfloat16 backward": (2, 2),
}
NARROWEST = 257  # columns; below, several rows share a warp
MANY = 2**20  # rows


def load() -> pd.DataFrame:
    """The notes, one row for each change.

    Columns: `about`, which kernel; the `change`; its `prediction`, "" where none was written down
    before; the `result`; the `verdict`, `kept` or `dropped`; and `why`, "" where it is not known.
    """
    path = Path(__file__).with_name("lab_notes.csv")
    return pd.read_csv(path, keep_default_na=False, encoding="utf-8")


def show(about: str) -> None:
    """Shows the notes about one kernel. Raises LookupError if there are none."""
    notes = load().query("about == @about")
    if notes.empty:
        raise LookupError(f"no notes about {about!r}: {', '.join(sorted(set(load()['about'])))}")
    display(Markdown("\n\n".join(map(_note, notes.to_dict("records")))))


class Range(NamedTuple):
    """Widths, from `first` to `last`, whose programs have so many rows and warps each."""

    kind: str
    first: int
    last: int
    rows: int
    num_warps: int


def rule() -> list[Range]:
    """What the rule of `memtraffic.softmax` gives a program on the published GPU, from 257 columns.

    It is that of rows that start at multiples of 16 bytes and fit one program.
    """
    found = []
    for kind, (itemsize, inputs) in KINDS.items():
        tiles, n = [], NARROWEST
        while tile := softmax_tile(MANY, n, itemsize, inputs, DEFAULT_GPU):
            tiles.append((n, tile.rows, tile.num_warps))
            n += 1
        for (rows, num_warps), some in groupby(tiles, key=lambda it: it[1:]):
            first, *_, last = (n for n, _, _ in some)
            found.append(Range(kind, first, last, rows, num_warps))
    return found


def _note(note: dict[str, str]) -> str:
    lines = [f"**{note['change']}** {note['verdict'].capitalize()}."]
    if note["prediction"]:
        lines.append(f"- Predicted: {note['prediction']}.")
    lines.append(f"- Measured: {note['result']}.")
    if note["why"]:
        lines.append(f"- {note['why']}")
    return "\n".join([lines[0], "", *lines[1:]])
