"""Every exception of this package, below one base: `except MemtrafficError` catches them all.

>>> from memtraffic.errors import InputsError, MemtrafficError
>>> issubclass(InputsError, MemtrafficError), issubclass(InputsError, ValueError)
(True, True)
"""

import difflib
import traceback
from collections.abc import Iterable


class MemtrafficError(Exception):
    """What a meter says when it cannot do what it was asked for."""


class InputsError(MemtrafficError, ValueError):
    """A specification of inputs cannot be read, or cannot be made at some sizes; it says why."""


class CountError(MemtrafficError):
    """What a function does cannot be counted exactly; the message says why."""


class AccessError(CountError):
    """A kernel reaches outside the tensors that it was given; the message says where."""


class FormulaError(MemtrafficError):
    """A function's traffic is no sum of products of its sizes; the message says where."""


class CountersError(MemtrafficError, RuntimeError):
    """The counters of a function could not be read; the message says why."""


class CountersUnavailable(CountersError):
    """This machine has no counters to read: no GPU, no `ncu`, or no permission."""


class CompileError(MemtrafficError):
    """A kernel could not be compiled; the message is the compiler's."""


class NoKernelError(MemtrafficError, LookupError):
    """A function launched no Triton kernel."""


class NoGpuError(MemtrafficError, RuntimeError):
    """There is no GPU here, and what was asked for needs one."""


class UnknownGpuError(MemtrafficError, LookupError):
    """The table of GPUs has no such name; the message says which it has."""


class LaunchError(MemtrafficError, RuntimeError):
    """No GPU can make this launch; the message says why."""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """What to say of a name that is not known; it may be a misspelling of one that is.

    >>> unknown("rung", "fusd", ["naive", "fused"])
    "no rung is named 'fusd' (did you mean 'fused'?): give one of naive, fused"
    """
    listed = list(known)
    close = difflib.get_close_matches(str(name), listed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"no {kind} is named {name!r}{hint}: give one of {', '.join(listed)}"


def said(error: BaseException) -> str:
    """What an error says, in one line, without PyTorch's stack in C++.

    Of an assertion without a message, it is the line of the source.
    """
    text = str(error).split("\nException raised from")[0]
    if not text and isinstance(error, AssertionError):
        text = "".join(frame.line or "" for frame in traceback.extract_tb(error.__traceback__)[-1:])
    return " ".join(text.split())


def described(error: BaseException) -> str:
    """The same, with its class where it is not of this package.

    >>> described(KeyError("x"))
    "KeyError: 'x'"
    """
    if isinstance(error, MemtrafficError):
        return said(error)
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}: {said(error)}".removesuffix(": ")
