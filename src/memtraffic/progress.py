"""Progress bars. Commands enable them on a terminal, and notebooks for Colab in their cells."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

DELAY = 2.0  # seconds after which a bar appears
_enabled = _at_once = False


def enable(notebook: bool = False) -> None:
    """Shows progress from now on, if stderr is a terminal.

    notebook: show it in a notebook, too, and of a loop from its first step on: it may be long.
    """
    global _enabled, _at_once
    _enabled = notebook or sys.stderr.isatty()
    _at_once = notebook


@contextmanager
def progress_bar(
    label: str, total: int | None = None, delay: float | None = None
) -> Iterator[Callable[[int, int], object]]:
    """Context manager that gives a function to call with the steps done and their total.

    total: if it is known before the first step. delay: seconds; by default DELAY.
    """
    if not _enabled:
        yield lambda done, total: None
        return
    from tqdm import tqdm

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    delay = DELAY if delay is None else delay
    with tqdm(
        desc=label, total=total, delay=delay, mininterval=DELAY / 10, leave=False, file=sys.stderr
    ) as bar:
        yield show


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Yields `items` and shows how many of them are done."""
    items = list(items)
    with progress_bar(label, len(items), 0.0 if _at_once else None) as show:
        for done, item in enumerate(items):
            show(done, len(items))
            yield item
