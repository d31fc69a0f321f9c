"""The GPU that is here or planned for, and what runs kernels: a GPU, or Triton's interpreter.

That is decided once, when this module is first imported, because Triton reads `TRITON_INTERPRET`
while it is being imported. Every module that imports Triton imports this one first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from memtraffic.caches import keep_writable
from memtraffic.errors import NoGpuError
from memtraffic.gpus import DEFAULT_GPU, GPUS, Gpu, find_gpu, nvidia_gpu

# Two constants of cuda.h; the second is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES there.
CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR = 106
MAX_DYNAMIC_SHARED_BYTES = 8

keep_writable()

# ---- what runs kernels

HAS_GPU: bool = torch.cuda.is_available()
HAS_TRITON: bool = importlib.util.find_spec("triton") is not None

if HAS_TRITON and not HAS_GPU and "TRITON_INTERPRET" not in os.environ:
    if "triton" in sys.modules:
        raise ImportError(
            "there is no GPU, and Triton was imported before memtraffic, too late to interpret "
            "kernels: import memtraffic first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

_asked = os.environ.get("TRITON_INTERPRET", "").lower()
INTERPRETED: bool = _asked in {"1", "true", "on", "yes", "y"}

# While launches are captured, a tuple of one: the GPU that launchers plan for, or None.
_captures: ContextVar[tuple[Gpu | None] | None] = ContextVar("captures", default=None)
capture = _captures.get  # part of the key of a plan: what it was made for

# The context manager, if we are in one, in which PyTorch answers for a GPU that is not here.
standing_in: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "standing_in", default=nullcontext
)


@contextmanager
def having(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Context manager: a variable of this context has this value meanwhile."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# Whether a GPU that is planned for, or stands in, says that it has no SM, to see what changes.
no_sms: ContextVar[bool] = ContextVar("no_sms", default=False)


def num_sms(gpu: Gpu) -> int:
    """How many SMs `gpu` says that it has."""
    return 0 if no_sms.get() else gpu.num_sms


def is_standing_in() -> bool:
    """Whether PyTorch answers for a GPU that is not here."""
    return standing_in.get() is not nullcontext


def stand_in_hint(when: str = "if it launches one only for tensors on a GPU") -> str:
    """What to do about a function that insists on a GPU; "" where there is one, or a stand-in."""
    if HAS_GPU or is_standing_in():
        return ""
    return f": {when}, give --stand-in, or call this within `stand_in()`"


def default() -> torch.device:
    """Where the book's tensors live: the current GPU, or the CPU on a machine without one."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


def require_gpu(what: str) -> None:
    """Raises NoGpuError, which says that `what` needs a GPU, on a machine without one."""
    if not HAS_GPU:
        raise NoGpuError(f"{what} needs a GPU, and PyTorch finds none on this machine")


def runs_on_gpu() -> bool:
    """Whether a kernel launched now runs on a GPU: it is neither interpreted nor captured."""
    return not INTERPRETED and _captures.get() is None


@contextmanager
def capturing_launches(gpu: Gpu | None = None) -> Iterator[None]:
    """Context manager: a meter sees each kernel launch in place of the GPU.

    Launchers use no compiled kernel meanwhile. gpu: the GPU that they plan for; `captured_gpu`
    returns it. The state is that of the current thread: others may launch at the same time. So a
    backward pass runs in this thread, too; where there is a GPU, PyTorch has another one for it.

    >>> from memtraffic.gpus import find_gpu
    >>> with capturing_launches(find_gpu("gfx942")):
    ...     runs_on_gpu(), captured_gpu().product
    (False, 'MI300X')
    """
    with having(_captures, (gpu,)), torch.autograd.set_multithreading_enabled(False):
        yield


def captured_gpu() -> Gpu | None:
    """The GPU that launches are captured for; None where none was given or nothing is captured."""
    capture = _captures.get()
    return capture[0] if capture else None


def device_guard(x: torch.Tensor) -> AbstractContextManager[object]:
    """Context manager for a launch on `x`: makes x's GPU the current one.

    Where the kernel is interpreted or captured, it silences NumPy's warnings about overflow,
    division by zero and invalid values instead: a GPU gives none.
    """
    if x.is_cuda and runs_on_gpu():
        return torch.cuda.device(x.device)
    return np.errstate(invalid="ignore", over="ignore", divide="ignore")


# ---- the GPU that is here, or is planned for


def this_gpu(index: int | None = None) -> Gpu:
    """What GPU `index` of this machine offers; the current one by default.

    An NVIDIA GPU need not be in the table: its sizes come from PyTorch and the driver, and the
    table adds its product and the bandwidth of its datasheet. For an AMD GPU, PyTorch gives the
    target, the number of compute units and the size of L2, and the table the rest.

    Raises NoGpuError without a GPU, and UnknownGpuError for an AMD target that is not in the table.
    """
    require_gpu("this_gpu")
    return _read_gpu(torch.cuda.current_device() if index is None else index)


@functools.cache
def _read_gpu(index: int) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(index)  # has more than its stub says
    name = properties.name
    listed = next((gpu for gpu in GPUS if gpu.driver_name == name), None)
    product = listed.product if listed else name
    datasheet = listed.datasheet_bytes_per_s if listed else 0.0
    if torch.version.hip:
        return replace(
            find_gpu(properties.gcnArchName.split(":")[0]),
            product=product,
            driver_name=name,
            num_sms=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            datasheet_bytes_per_s=datasheet,
        )
    capability = 10 * properties.major + properties.minor
    max_blocks = ctypes.c_int()
    call_driver(
        "cuDeviceGetAttribute",
        ctypes.byref(max_blocks),
        ctypes.c_int(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR),
        ctypes.c_int(index),
    )
    gpu = nvidia_gpu(
        capability,
        product,
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor,
        max_blocks.value,
        properties.shared_memory_per_multiprocessor,
        name,
        datasheet,
    )
    return replace(
        gpu,
        warp_size=properties.warp_size,
        registers_per_sm=properties.regs_per_multiprocessor,
        shared_per_program=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
    )


def planning_gpu(x: torch.Tensor) -> Gpu:
    """The GPU that a launcher plans for when it is called on `x`.

    That is the GPU for which launches are captured, else the one that holds `x`. Where kernels are
    interpreted it is `DEFAULT_GPU`.
    """
    if (captured := captured_gpu()) is not None:
        return captured
    gpu = this_gpu(x.device.index) if x.is_cuda and runs_on_gpu() else DEFAULT_GPU
    return replace(gpu, num_sms=0) if no_sms.get() else gpu


def call_driver(function: str, *arguments: object) -> None:
    """Calls `function` of the CUDA driver. Raises RuntimeError, with the error's number."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if status != 0:
        raise RuntimeError(f"{function} failed with CUDA error {status}")


def gpu_name(index: int | None = None) -> str:
    """The driver's name for GPU `index`, by default the current one.

    Raises NoGpuError without a GPU.
    """
    require_gpu("gpu_name")
    return torch.cuda.get_device_name(index)
