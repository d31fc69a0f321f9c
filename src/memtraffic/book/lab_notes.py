"""What was tried on the kernels of `memtraffic.softmax`: predictions, results, and what stayed.

The numbers are those of trials on an H200, each within one run. Most of the kernels tried are gone,
so no page can measure them again; what stayed is measured on the scoreboard.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display

KEPT, DROPPED = "kept", "dropped"


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


def _note(note: dict[str, str]) -> str:
    lines = [f"**{note['change']}** {note['verdict'].capitalize()}."]
    if note["prediction"]:
        lines.append(f"- Predicted: {note['prediction']}.")
    lines.append(f"- Measured: {note['result']}.")
    if note["why"]:
        lines.append(f"- {note['why']}")
    return "\n".join([lines[0], "", *lines[1:]])
