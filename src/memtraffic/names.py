"""Functions by name, as a command is given them, and as one process tells them to another."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memtraffic.errors import unknown

# The rungs of the ladder, in the order of the book. Each offers `softmax(x)`, the softmax of each
# row of a 2-D tensor. They are not imported here: the first also works without Triton.
RUNGS = {
    name: f"memtraffic.kernels.softmax.{name}:softmax"
    for name in ("naive", "fused", "masked", "tiled", "chunks", "persistent", "online", "split")
}

OPS = {
    "softmax": "memtraffic.kernels.softmax.definitions:SOFTMAX",
    "softmax_backward": "memtraffic.kernels.softmax.definitions:SOFTMAX_BACKWARD",
}

# What `bench` compares by default, by operation.
COMPARED = {
    "softmax": (
        *("copy", "torch.softmax", "compile(torch.softmax)", "compile(naive)"),
        *("compile(persistent reduction)", "naive", "fused", "masked", "tiled", "persistent"),
        "memtraffic.softmax",
    ),
    "softmax_backward": ("copy", "torch.softmax backward"),
}


def import_function(name: str) -> Callable[..., Any]:
    """Imports the function called `name`.

    >>> import_function("naive").__module__
    'memtraffic.kernels.softmax.naive'
    >>> import_function("math:sqrt")(9)
    3.0

    name: a rung of the ladder, or `module:function`, whose module is also looked for in the current
    folder. An `nn.Module` is moved to where the tensors of the book live.

    Raises LookupError if there is no such rung, module or function.
    """
    function = import_named(name, RUNGS, "rung")
    if not callable(function):
        raise LookupError(f"{name!r} is not a function but of type {type(function).__name__}")
    torch: Any = sys.modules.get("torch")  # without it, there is no module of it
    if torch and isinstance(function, torch.nn.Module):
        from memtraffic import device

        return function.to(device.default())
    return function


def import_named(name: str, known: Mapping[str, str], kind: str) -> Any:
    """Imports what `name` stands for: one of the names of `kind`, or `module:attribute`.

    The module is also looked for in the current folder. Raises LookupError if there is no such
    name, module or attribute, or if the module raises an error while it is imported.
    """
    if name not in known and ":" not in name:
        raise LookupError(unknown(kind, name, [*known, "module:attribute"]))
    try:
        with _current_folder_on_path():
            return pkgutil.resolve_name(known.get(name, name))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may exit while it is imported
        raise LookupError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
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
    if isinstance(owner := getattr(fn, "__self__", None), type):  # which may inherit the method
        module, qualname = owner.__module__, f"{owner.__qualname__}.{getattr(fn, '__name__', '')}"
    if module == "__main__" or "<" in qualname:
        raise LookupError(
            f"{qualname} is defined in {module}: put it in a file that another process can import"
        )
    path = f"{module}:{qualname}"
    return next((name for name, target in RUNGS.items() if target == path), path)
