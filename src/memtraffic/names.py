"""Functions by name, as a command is given them, and as one process tells them to another."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from memtraffic.ladder import RUNGS

RENAMED = {"warps": "tiled"}


def import_function(name: str) -> Callable[..., Any]:
    """Imports the function called `name`.

    >>> import_function("naive").__module__
    'memtraffic.ladder.naive'
    >>> import_function("math:sqrt")(9)
    3.0

    name: a rung of the ladder, or `module:function`, whose module is also looked for in the current
    folder.

    Raises LookupError if there is no such rung, module or function.
    """
    if name in RENAMED:
        raise LookupError(f"the rung {name!r} is now named {RENAMED[name]!r}")
    if ":" not in name and name not in RUNGS:
        similar = difflib.get_close_matches(name, RUNGS, n=1)
        hint = f" (did you mean {similar[0]!r}?)" if similar else ""
        rungs = ", ".join(RUNGS)
        raise LookupError(
            f"no rung is named {name!r}{hint}: give one of {rungs}, or module:function"
        )
    function = import_attribute(RUNGS.get(name, name))
    if type(function).__module__.startswith("triton."):
        raise LookupError(f"{name!r} is a Triton kernel: name the function that launches it")
    if not callable(function):
        raise LookupError(f"{name!r} is not a function but of type {type(function).__name__}")
    return function


def import_attribute(path: str) -> Any:
    """Imports `module:attribute`, whose module is also looked for in the current folder.

    Raises LookupError if there is no such module, if it raises an error while it is imported, or if
    it has no such attribute.
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise LookupError(f"{path!r} is not of the form module:function, such as 'mine:softmax'")
    try:
        with _current_folder_on_path():
            value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:
        raise LookupError(
            f"{path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return value


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def import_path(fn: Callable[..., Any] | str) -> str:
    """The name by which another process imports `fn`: the inverse of `import_function`.

    >>> import_path(import_function("naive"))
    'naive'

    A string is returned as it is. Raises LookupError for a function that another process cannot
    import, such as one defined in a notebook cell.
    """
    if isinstance(fn, str):
        return fn
    module = getattr(fn, "__module__", "__main__")
    qualname = getattr(fn, "__qualname__", repr(fn))
    if module == "__main__" or "<" in qualname:
        raise LookupError(
            f"{qualname} is defined in {module}: put it in a file that another process can import"
        )
    path = f"{module}:{qualname}"
    return next((name for name, target in RUNGS.items() if target == path), path)
