"""Replaces attributes of classes and modules for a while: for one that watches what runs.

What runs beside, in other threads, finds them as they were.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from unittest import mock

from memtraffic.device import having

lock = threading.RLock()  # who has it may replace attributes, and others wait
RUNNING = threading.RLock()  # what the interpreter runs is a state of the whole process
_watch: ContextVar[object] = ContextVar("watch", default=None)


@contextmanager
def watching() -> Iterator[None]:
    """Context manager: `replaced_here` is about what runs in the context of the caller.

    Those are the caller's thread, and threads that run in a copy of its context. Others that want
    to watch wait.
    """
    with lock, having(_watch, _watch.get() or object()):
        yield


@contextmanager
def replaced_here(
    *patches: tuple[Any, str, Callable[..., Any]],
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[None]:
    """Context manager: as `replaced`, of functions, in a context that is watched alone.

    beside: the context manager in which others call what there was.
    """
    watch = _watch.get()

    def split(owner: Any, name: str, here: Callable[..., Any]) -> tuple[Any, str, Any]:
        elsewhere = getattr(owner, name)

        @functools.wraps(elsewhere)
        def call(*args: Any, **options: Any) -> Any:
            if _watch.get() is watch:
                return here(*args, **options)
            with beside():
                return elsewhere(*args, **options)

        call.elsewhere = elsewhere  # type: ignore[attr-defined]
        return owner, name, call

    with replaced(*(split(*patch) for patch in patches)):
        yield


def unwatched(function: Any) -> Any:
    """What a function was before all `replaced_here`."""
    return unwatched(function.elsewhere) if hasattr(function, "elsewhere") else function


@contextmanager
def replaced(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Context manager: attributes, given as (owner, name, value), have other values meanwhile."""
    with ExitStack() as stack:
        for owner, name, value in patches:
            getattr(owner, name)  # so that what is not there fails in a line of this package
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def restored(*owners: Any) -> Iterator[None]:
    """Context manager: afterwards, the attributes of `owners` are again what they were."""
    saved = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in saved:
            for name in set(vars(owner)) - set(attributes):
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)
