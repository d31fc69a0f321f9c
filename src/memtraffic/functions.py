"""What a meter takes for a function: anything that computes when it is called on tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any


def as_function(fn: Any) -> Callable[..., Any]:
    """The function that a meter calls for `fn`.

    >>> import torch
    >>> as_function(torch.nn.Identity)(3)
    3

    fn: a function or another object that can be called, such as an `nn.Module`, is returned as it
    is. A class of `nn.Module` is made an object, without arguments, where the tensors of the book
    live. A class of `torch.autograd.Function` is its `apply`.

    Raises TypeError for anything else, and for a function that only starts its work when it is
    called: a coroutine function or a generator function.
    """
    import torch

    from memtraffic import device

    name = function_name(fn)
    if isinstance(fn, type):
        if issubclass(fn, torch.autograd.Function):
            return fn.apply
        if not issubclass(fn, torch.nn.Module):
            raise TypeError(f"{name} is a class that computes nothing when it is called")
        return fn().to(device.default())
    if not callable(fn):
        raise TypeError(f"{name} is {type(fn).__name__}, not a function")
    if type(fn).__module__.startswith("triton."):
        kernel = getattr(fn, "__name__", name)
        raise TypeError(f"{kernel} is a Triton kernel: give the function that launches it")
    called = fn, type(fn).__call__, getattr(fn, "forward", None)  # the last of an nn.Module
    late = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_late(it) for is_late in late for it in called):
        raise TypeError(
            f"{name} does its work after it has returned: give a function that waits for it, such "
            "as lambda x: asyncio.run(fn(x)) or lambda x: list(fn(x))"
        )
    return fn


def check_finished(result: object, error: type[Exception] = TypeError) -> None:
    """Raises `error` if the work of a result is still to be done, as that of a generator is.

    >>> check_finished(map(abs, [1]))
    Traceback (most recent call last):
    TypeError: the function returned a result of type map, before it did its work
    """
    import torch

    if inspect.iscoroutine(result):
        result.close()  # or Python would warn that nobody waited for it
    later = isinstance(result, (Iterator, Awaitable, AsyncIterator)) or (
        callable(result) and not isinstance(result, (torch.nn.Module, type))
    )
    if later:
        kind = type(result).__name__
        raise error(f"the function returned a result of type {kind}, before it did its work")


def function_name(fn: Any) -> str:
    """What a message calls a function: its module and its name, or its class.

    >>> import torch
    >>> function_name(functools.partial(torch.nn.functional.relu, inplace=True))
    'torch.nn.functional.relu'
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(owner := getattr(fn, "__self__", None), type):  # apply of an autograd.Function
        fn = owner
    if not hasattr(fn, "__qualname__"):
        fn = type(fn)
    return f"{getattr(fn, '__module__', None) or 'builtins'}.{fn.__qualname__}"
