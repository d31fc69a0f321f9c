"""What was tried on the kernels of `memtraffic.softmax`: predictions, results, and what stayed.

The numbers are those of trials on an H200, each within one run. Most of the kernels tried are gone,
so no page can measure them again; what stayed is measured on the scoreboard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from memtraffic_book import claim, glue, tables

KEPT, DROPPED = "kept", "dropped"


def load() -> pd.DataFrame:
    """The notes, one row for each change, the largest gain first.

    Columns: `about`, which kernel; `gain`, how many percent faster it is at the shape that changed
    most, 0 where nothing changed or no number says it; the `change`; its `prediction`, "" where
    none was written down before; the `result`; the `verdict`, `kept` or `dropped`; and `why`: what
    we learned.
    """
    path = Path(__file__).with_name("lab_notes.csv")
    notes = pd.read_csv(path, keep_default_na=False, encoding="utf-8")
    return notes.sort_values("gain", ascending=False, kind="stable", ignore_index=True)


def find(start: str) -> dict[str, Any]:
    """The one note whose change begins so, by the names of its columns."""
    notes = load()
    [note] = notes[notes["change"].str.startswith(start)].to_dict("records")
    return note


def show() -> None:
    """Shows all notes as one table, the largest gain first, and claims how many were dropped."""
    notes = load()
    written, dropped = (notes["prediction"] != "").sum(), (notes["verdict"] == DROPPED).sum()
    claim(
        f"Of {len(notes)} changes {dropped} were dropped, and {written} have a prediction that was "
        "written down before.",
        0 < dropped < len(notes),
    )
    glue("dropped", f"{dropped} of {len(notes)}")
    tables.show_words(
        notes,
        gain=lambda note: f"{note['gain']:+g} %" if note["gain"] else "±0 %",
        of=lambda note: note["about"],
        note=lambda note: text(note).replace("`", ""),
        verdict=lambda note: note["verdict"],
    )


def text(note: dict[str, str]) -> str:
    """What was changed, predicted and measured, and why it came so.

    >>> text({"change": "Skip L1.", "prediction": "1 %", "result": "no change", "why": ""})
    'Skip L1. Predicted: 1 %. Measured: no change.'
    """
    predicted = f"Predicted: {note['prediction']}." if note["prediction"] else ""
    parts = note["change"], predicted, f"Measured: {note['result']}.", note["why"]
    return " ".join(filter(None, parts))
