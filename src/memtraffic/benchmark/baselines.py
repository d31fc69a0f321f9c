"""What the kernels of the ladder are compared with: a copy, PyTorch, and `memtraffic.softmax`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memtraffic.kernels.softmax import naive
from memtraffic.kernels.softmax import op as softmax
from memtraffic.names import import_function
from memtraffic.torch_adapter import refuse_to_recompile, softmax_backward


def copy(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A copy of `x`, or the sum of `x` and `y`: each input is read once and one result written.

    Where it is timed, its place is taken by the fastest of several copies, `fastest_copy`.
    """
    return x.clone() if y is None else x + y


def torch_softmax(x: Tensor) -> Tensor:
    """PyTorch's own softmax of each row."""
    return torch.softmax(x, dim=1)


def compiled_softmax(x: Tensor) -> Tensor:
    """PyTorch's softmax through `torch.compile`."""
    with _ptxas_of_inductor():
        return _compile(0, torch_softmax)(x)


def compiled(x: Tensor) -> Tensor:
    """The naive softmax through `torch.compile`."""
    with _ptxas_of_inductor():
        return _compile(0)(x)


def compiled_persistent_reduction(x: Tensor) -> Tensor:
    """The naive softmax through `torch.compile`, which keeps each row in registers.

    Inductor calls this a persistent reduction. Its option `triton.multi_kernel` builds a looped and
    a persistent reduction, and the value 3 selects the second.
    """
    with _ptxas_of_inductor():
        return _compile(3)(x)


PTXAS = "TRITON_PTXAS_PATH"
_inductor: dict[str, str] = {}  # what Inductor has set


@contextmanager
def _ptxas_of_inductor() -> Iterator[None]:
    """Context manager: the assembler that Inductor chooses is that of its own kernels alone.

    Inductor makes Triton use PyTorch's `ptxas`, for the rest of the process. A Triton kernel that
    is compiled later would then have other registers than in a process without `torch.compile`.
    """
    if PTXAS in os.environ:  # the caller's choice, which Inductor respects
        yield
        return
    os.environ.update(_inductor)
    try:
        yield
    finally:
        if PTXAS in os.environ:
            _inductor[PTXAS] = os.environ.pop(PTXAS)


@functools.cache
def _compile(multi_kernel: int, fn: Callable[..., Tensor] = naive.softmax) -> Callable[..., Tensor]:
    # Each shape is compiled by itself. Too many of them raise an error; without this setting
    # PyTorch would return to eager mode in silence. A multi-kernel cannot be loaded from the cache
    # on disk.
    refuse_to_recompile(256)
    options: dict[str, Any] = {"triton.multi_kernel": multi_kernel}
    options["fx_graph_cache"] = not multi_kernel
    return torch.compile(fn, dynamic=False, options=options)


BASELINES: dict[str, Callable[..., Tensor]] = {
    "copy": copy,
    "torch.softmax": torch_softmax,
    "compile(torch.softmax)": compiled_softmax,
    "compile(naive)": compiled,
    "compile(persistent reduction)": compiled_persistent_reduction,
    "memtraffic.softmax": softmax.softmax,
    "torch.softmax backward": softmax_backward,
}


def find_implementation(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function with this name: a baseline, a rung, or `module:function`.

    >>> find_implementation("copy").__name__
    'copy'

    A function is returned as it is. Raises LookupError for any other name.
    """
    if callable(name):
        return name
    return BASELINES.get(name) or import_function(name)
