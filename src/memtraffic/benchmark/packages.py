"""Softmax kernels that other packages publish, to compare with: none of them has to be installed.

A package is imported when one of its kernels is first called, and what is not here is an
ImportError. What a kernel refuses is refused by the package's own error, or, where that would be
obscure, by a ValueError that says why.

- Liger (`liger-kernel`): a program per row, up to 65536 columns.
- FlagGems (`flag-gems`): a program per row; longer rows are read twice. Its backward is autotuned
  for each shape; it is given a tenth of the usual time for that.
- QuACK (`quack-kernels`): several rows per thread block, or a cluster of thread blocks per row. It
  compiles a kernel for each width.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtraffic.triton_adapter.launch import set_tuning_time

# A cluster of QuACK's is at most 16 thread blocks, each of which an SM of an H200 gives this much
# shared memory, less 1 KiB for what the blocks tell one another.
QUACK_MOST = 16 * 226 * 2**10
QUACK_BYTES = 16  # what it moves at a time, so each row has to start at a multiple of it
TUNING_MS = 2.5, 10  # that an autotuner warms up and measures each configuration; usually 25, 100


# ---- Liger


def liger(x: Tensor) -> Tensor:
    """Liger's softmax of each row."""
    y: Tensor = _module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply(x)
    return y


def liger_backward(y: Tensor, dy: Tensor) -> Tensor:
    """Liger's backward of a row softmax, as its autograd function calls it."""
    module = _module("liger_kernel.ops.softmax")
    block, num_warps = module.calculate_settings(y.shape[-1])
    dx: Tensor = module._softmax_backward(dy, y, block, num_warps, y.shape[-1] > block)
    return dx


# ---- FlagGems


def flag_gems(x: Tensor) -> Tensor:
    """FlagGems' softmax of each row."""
    y: Tensor = _module("flag_gems.ops").softmax(x, -1)
    return y


def flag_gems_backward(y: Tensor, dy: Tensor) -> Tensor:
    """FlagGems' backward of a row softmax."""
    backward = _module("flag_gems.ops").softmax_backward
    _tune_quickly(backward.__globals__.get("softmax_backward_kernel_inner"))
    dx: Tensor = backward(dy, y, -1, y.dtype)
    return dx


@functools.cache
def _tune_quickly(kernel: Any) -> None:
    """Lets the autotuner of a kernel take a tenth of its time.

    Otherwise a comparison at many shapes would mostly wait for FlagGems to tune.
    """
    set_tuning_time(kernel, *TUNING_MS)


# ---- QuACK


def quack(x: Tensor) -> Tensor:
    """QuACK's softmax of each row, started without its wrapper: the least time on the host."""
    _check_quack(x, 1)
    y = torch.empty_like(x)
    quack_kernel("Softmax", 2, x.dtype, x.shape[1])(x, y)
    return y


def quack_backward(y: Tensor, dy: Tensor) -> Tensor:
    """QuACK's backward of a row softmax, started without its wrapper."""
    _check_quack(y, 2)
    dx = torch.empty_like(y)
    quack_kernel("SoftmaxBackward", 3, y.dtype, y.shape[1])(dy, y, dx)
    return dx


def quack_takes(n: int, itemsize: int, inputs: int = 1) -> str:
    """Why QuACK has no kernel for rows of `n` elements of so many bytes; "" where it has one.

    >>> quack_takes(4096, 4), quack_takes(781, 4)
    ('', 'QuACK takes a multiple of 4 columns of this type, not 781')

    inputs: matrices that the kernel reads, of which it keeps a row each in shared memory.
    """
    step = QUACK_BYTES // itemsize
    if n % step:
        return f"QuACK takes a multiple of {step} columns of this type, not {n}"
    most = QUACK_MOST // (itemsize * inputs)
    return f"QuACK takes at most {most} columns of this type here, not {n}" if n > most else ""


def _check_quack(x: Tensor, inputs: int) -> None:
    if reason := quack_takes(x.shape[1], x.element_size(), inputs):
        raise ValueError(reason)
    if not x.is_contiguous():
        raise ValueError("QuACK takes packed rows")


@functools.cache
def quack_kernel(kind: str, tensors: int, dtype: torch.dtype, n: int) -> Callable[..., object]:
    _module("quack")
    module: Any = sys.modules["quack.softmax"]  # `quack.softmax` is a function
    kernel: Callable[..., object] = getattr(module, kind).compile(
        *[module.torch2cute_dtype_map[dtype]] * tensors, n
    )
    return kernel


# ---- all of them


def _module(name: str) -> Any:
    """Imports a module of a package, with what the package wants to know before.

    Raises ImportError, whatever the package raises meanwhile.
    """
    if name.startswith("flag_gems") and torch.version.cuda:
        os.environ.setdefault("GEMS_VENDOR", "nvidia")  # or it runs vendors' commands to find out
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise ImportError(
            f"{name} cannot be imported ({type(error).__name__}: {reason})"
        ) from error


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "Liger": liger,
    "FlagGems": flag_gems,
    "QuACK": quack,
}
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Liger": liger_backward,
    "FlagGems": flag_gems_backward,
    "QuACK": quack_backward,
}
