"""The rungs of the ladder, one module each, in the order of the book.

A rung offers `softmax(x)`, the softmax of each row of a 2-D tensor. They are named, not imported, here: the first rung needs
no Triton, and must work where Triton does not exist.
"""

import importlib
import os
import sys

RUNGS = {
    name: f"memtraffic.ladder.{name}:softmax"
    for name in ("naive", "fused", "masked", "warps", "persistent")
}


def resolve(name):
    """The function that `name` stands for: a rung, or `module:function` importable from the current folder.

    >>> resolve("naive").__module__
    'memtraffic.ladder.naive'

    Raises LookupError for a name that leads nowhere.
    """
    path = RUNGS.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise LookupError(
            f"no rung is named {name!r}: give one of {', '.join(RUNGS)}, or module:function"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        target = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{name!r} cannot be imported: {error}") from error
    if not callable(target):
        raise LookupError(f"{name!r} is {type(target).__name__}, not a function")
    return target


def name_of(fn):
    """The name by which another process finds `fn`, the inverse of `resolve`.

    Raises LookupError for a function another process cannot import, such as one defined in a notebook cell.
    """
    if isinstance(fn, str):
        return fn
    module, qualname = (
        getattr(fn, "__module__", "__main__"),
        getattr(fn, "__qualname__", repr(fn)),
    )
    if module == "__main__" or "<" in qualname:
        raise LookupError(
            f"{qualname} is defined in {module}: put it in a file, so that another process can import it"
        )
    path = f"{module}:{qualname}"
    return next((name for name, target in RUNGS.items() if target == path), path)
