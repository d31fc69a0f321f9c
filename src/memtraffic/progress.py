"""Progress bars on the terminal. Only commands enable them: a notebook would keep them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")

DELAY = 2.0  # seconds after which a bar appears
_enabled = False


def enable() -> None:
    """Shows progress from now on, if stderr is a terminal and tqdm is installed."""
    global _enabled
    _enabled = sys.stderr.isatty() and find_spec("tqdm") is not None


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], object]]:
    """Context manager that gives a function to call with the steps done and their total."""
    if not _enabled:
        yield lambda done, total: None
        return
    from tqdm import tqdm

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with tqdm(desc=label, delay=DELAY, mininterval=DELAY / 10, leave=False, file=sys.stderr) as bar:
        yield show


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Yields `items` and shows how many of them are done."""
    items = list(items)
    with progress_bar(label) as show:
        for done, item in enumerate(items):
            show(done, len(items))
            yield item
