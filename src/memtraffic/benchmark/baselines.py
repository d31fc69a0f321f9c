"""What the kernels of the ladder are compared with: a copy, PyTorch, and `memtraffic.softmax`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memtraffic.benchmark import packages
from memtraffic.kernels.rms_norm import op as rms_norm
from memtraffic.kernels.rms_norm.definitions import EPS
from memtraffic.kernels.softmax import naive
from memtraffic.kernels.softmax import op as softmax
from memtraffic.names import import_function
from memtraffic.torch_adapter import refuse_to_recompile, rms_norm_backward, softmax_backward


def copy(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A copy of `x`, or the sum of `x` and `y`: each input is read once and one result written.

    Where it is timed, its place is taken by the fastest of several copies, `fastest_copy`.
    """
    return x.clone() if y is None else x + y


def torch_softmax(x: Tensor) -> Tensor:
    """PyTorch's own softmax of each row."""
    return torch.softmax(x, dim=1)


def own_softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """The backward of `memtraffic.softmax`, as its autograd function calls it."""
    return softmax.backward(dy, y, 1, y.dtype)


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own RMS norm of each row, with an eps of 1e-6."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def compiled_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's RMS norm through `torch.compile`."""
    with _ptxas_of_inductor():
        return _compile(0, torch_rms_norm)(x, weight)


def own_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """`memtraffic.rms_norm` of each row."""
    return rms_norm.rms_norm(x, weight, EPS)


def own_rms_norm_backward(x: Tensor, weight: Tensor, dy: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of `x` as our backward computes it, which has the weight's in the same pass."""
    return rms_norm.backward(dy, x, weight, rstd, EPS)[0]


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


BACKWARD = " backward"  # what the name of an implementation of the backward ends in
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
    "torch.rms_norm": torch_rms_norm,
    "compile(torch.rms_norm)": compiled_rms_norm,
    "memtraffic.rms_norm": own_rms_norm,
}
BACKWARD_BASELINES: dict[str, Callable[..., Tensor]] = {
    f"torch.softmax{BACKWARD}": softmax_backward,
    f"memtraffic.softmax{BACKWARD}": own_softmax_backward,
    f"torch.rms_norm{BACKWARD}": rms_norm_backward,
    f"memtraffic.rms_norm{BACKWARD}": own_rms_norm_backward,
}
PACKAGES: dict[str, Callable[..., Tensor]] = {
    **packages.FORWARD,
    **{name + BACKWARD: fn for name, fn in packages.BACKWARD.items()},
}
_NAMED = {**BASELINES, **BACKWARD_BASELINES, **PACKAGES}


def find_implementation(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function with this name: a baseline, a package's, a rung, or `module:function`.

    >>> find_implementation("copy").__name__
    'copy'

    A function is returned as it is. Raises LookupError for any other name.
    """
    if callable(name):
        return name
    return _NAMED.get(name) or import_function(name)
