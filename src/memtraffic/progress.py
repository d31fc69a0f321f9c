"""Progress bars. Commands enable them, and notebooks for Colab in their cells.

Where stderr is no terminal, a line says from time to time how far a long command is, and how long
the rest will take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

DELAY = 2.0  # seconds after which a bar appears
LONG = 10.0  # seconds after which, and between which, a line appears where there is no terminal
_enabled = _at_once = False


def enable(notebook: bool = False) -> None:
    """Shows progress from now on.

    notebook: as on a terminal, and of a loop from its first step on: it may be long.
    """
    global _enabled, _at_once
    _enabled, _at_once = True, notebook


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

    often, rarely = (DELAY if delay is None else delay, DELAY / 10), (LONG, LONG)
    wait, every = often if _at_once or sys.stderr.isatty() else rarely
    with tqdm(
        desc=label, total=total, delay=wait, mininterval=every, leave=False, file=sys.stderr
    ) as bar:
        yield show


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Yields `items` and shows how many of them are done."""
    items = list(items)
    with progress_bar(label, len(items), 0.0 if _at_once else None) as show:
        for done, item in enumerate(items):
            show(done, len(items))
            yield item
