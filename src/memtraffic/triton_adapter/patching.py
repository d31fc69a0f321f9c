"""Replaces attributes of Triton's classes for a while, one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

lock = threading.RLock()


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
