"""Tables whose cells are text: measured numbers stand in them with their unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
from IPython.display import display


def table(rows: pd.DataFrame | Iterable[Any], **columns: Callable[[Any], object]) -> pd.DataFrame:
    """A table of text with one column for each function of a row.

    >>> table([("copy", 5), ("naive", 20)], kernel=lambda row: row[0], time_=lambda row: row[1])
      kernel time
    0   copy    5
    1  naive   20

    rows: a DataFrame, whose rows the functions get as dicts, or any other sequence. The name of a
    column is its heading, with a space for each `_`; a `_` at the end is dropped.
    """
    items = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    headings = {name: name.replace("_", " ").strip() for name in columns}
    cells = {headings[name]: [str(cell(row)) for row in items] for name, cell in columns.items()}
    return pd.DataFrame(cells, dtype=object)


def show(rows: pd.DataFrame | Iterable[Any], **columns: Callable[[Any], object]) -> None:
    """Shows a `table`: HTML in a page, and as plain text one line for each row.

    Plain text has no padding. The width of a padded column would depend on the measured numbers in
    it, and a comparison that leaves the numbers out would still see the spaces.
    """
    _show(table(rows, **columns))


def show_words(rows: pd.DataFrame | Iterable[Any], **columns: Callable[[Any], object]) -> None:
    """Shows a `table` whose cells are words, which a page breaks into lines."""
    _show(table(rows, **columns), "words")


def show_filtered(rows: pd.DataFrame | Iterable[Any], **columns: Callable[[Any], object]) -> None:
    """Shows a `table` whose rows a reader chooses, by its columns of few values."""
    _show(table(rows, **columns), "filtered")


def _show(frame: pd.DataFrame, classes: str = "") -> None:
    lines = [list(frame.columns), *frame.to_numpy().tolist()]
    with pd.option_context("display.max_colwidth", None):
        html = frame.to_html(index=False, border=0, classes=classes or None)
    display({"text/plain": "\n".join(map(" | ".join, lines)), "text/html": html}, raw=True)
