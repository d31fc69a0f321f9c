"""Captures the kernel launches that a function makes, without running a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from memtraffic import device
from memtraffic.errors import CompileError
from memtraffic.functions import check_finished
from memtraffic.gpus import Gpu
from memtraffic.triton_adapter.capture import capturing
from memtraffic.triton_adapter.compile import Attributes, jit_function, specialize
from memtraffic.triton_adapter.launch import Kernel, naming_version


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, as its compiler sees it.

    module, qualname: where the kernel is defined.
    signature: the type of each argument, such as `*fp32`, `i32` or `constexpr`.
    constants: the value of each `constexpr`, by the argument's name; an int of 1 and None are among
        them. Those inside a tuple have the path to it as their key.
    attributes: what else is known at compile time, such as "divisible by 16", by the argument's
        position.
    options: launch options, such as `num_warps`.
    function: the kernel; by default, another process imports it.
    """

    module: str
    qualname: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: Attributes
    options: dict[str, Any]
    function: Kernel = field(default=None, compare=False, repr=False)


def capture_launches(
    fn: Callable[..., object], *tensors: torch.Tensor, gpu: Gpu | None = None
) -> list[Launch]:
    """Every `Launch` that `fn(*tensors)` makes. No kernel runs, so outputs stay unwritten.

    An autotuned kernel is launched once in each of its configurations.

    >>> from memtraffic.kernels.softmax import fused
    >>> from memtraffic.gpus import find_gpu
    >>> x = torch.empty(3, 4096, device=device.default())
    >>> [launch] = capture_launches(fused.softmax, x, gpu=find_gpu("MI300X"))
    >>> launch.signature["x_ptr"], launch.constants, launch.options
    ('*fp32', {'BLOCK': 4096}, {'num_warps': 8})

    gpu: the GPU that `fn` plans its launches for. Raises TypeError for an argument that Triton does
    not take, and for a result whose work is still to be done; what `fn` itself raises is passed on.
    """
    found: list[Launch] = []
    with device.capturing_launches(gpu), capturing(lambda *it: found.append(launch_of(*it))):
        result = fn(*tensors)
    check_finished(result)
    return found


def launch_of(kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    """The `Launch` of a kernel with these arguments and options.

    Raises TypeError for an argument that Triton does not take.
    """
    function = jit_function(kernel)
    try:
        with naming_version(CompileError):
            facts = specialize(function, args, options)
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from error
    return Launch(function.__module__, function.__qualname__, *facts, kernel)
