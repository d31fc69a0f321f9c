"""What runs the kernels: a GPU and its limits, or Triton's interpreter.

Decided once, when this module is first imported, because Triton reads `TRITON_INTERPRET` while it is being imported. Every
module that imports Triton imports this one first.
"""

import ctypes
import functools
import importlib.util
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON and "TRITON_INTERPRET" not in os.environ and not HAS_GPU:
    if "triton" in sys.modules:
        raise ImportError(
            "machine: there is no GPU and Triton was imported before memtraffic, too late for its interpreter; "
            "import memtraffic first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in (
    "1",
    "true",
    "on",
    "yes",
    "y",
)


@dataclass(frozen=True)
class Limits:
    """What one GPU offers. Sizes in bytes, registers of 32 bits; `sm` is a compute unit on AMD.

    target: what compilers call its kind, such as `sm_90` or `gfx942`.
    """

    name: str
    sms: int
    registers_per_sm: int
    shared_per_sm: int
    shared_per_block: int
    l2_bytes: int
    warp_size: int
    threads_per_sm: int
    blocks_per_sm: int | None
    target: str = ""


def device():
    """Where the book's tensors live: the current GPU, or the CPU where kernels are interpreted."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if HAS_GPU
        else torch.device("cpu")
    )


def warp_size():
    """Threads that execute together on the GPU that launchers choose for: 64 on AMD's CDNA, else 32."""
    if _target:
        return _target_warp_size
    return limits().warp_size if HAS_GPU else 32


def target():
    """The kind of GPU that launchers choose for while kernels are compiled for it, such as `gfx942`; None at other times."""
    return _target


def on(x):
    """A context in which launches go to the GPU that holds `x`, or to the interpreter, as silent about NaN as a GPU."""
    if x.is_cuda and compiles():
        return torch.cuda.device(x.device)
    return np.errstate(invalid="ignore", over="ignore")


_metered, _target, _target_warp_size = False, None, None


def compiles():
    """Whether a kernel launched now is compiled and runs on a GPU: not interpreted, and no meter stands in for it."""
    return not INTERPRETED and not _metered


@contextmanager
def metered(target=None, warp_size=None):
    """While this lasts, a meter sees each launch of a kernel in place of the GPU; launchers hold no compiled kernel.

    target, warp_size: of the GPU that launchers choose for meanwhile, where it is not this one.
    """
    global _metered, _target, _target_warp_size
    before = _metered, _target, _target_warp_size
    _metered, _target, _target_warp_size = True, target, warp_size
    try:
        yield
    finally:
        _metered, _target, _target_warp_size = before


def require_gpu(what):
    """Raises RuntimeError, saying that `what` needs a GPU, where there is none."""
    if not HAS_GPU:
        raise RuntimeError(
            f"{what} needs a GPU, and PyTorch finds none on this machine"
        )


@functools.cache
def limits(index=None):
    """The limits of GPU `index` (the current one by default). Raises RuntimeError without a GPU.

    All but one come from PyTorch (on AMD, where not every version tells the LDS of a compute unit, `shared_per_sm` is that of
    one program); the resident blocks an SM can hold come from the CUDA driver's
    `CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR` and are None on AMD.
    """
    require_gpu("limits")
    index = torch.cuda.current_device() if index is None else index
    p = torch.cuda.get_device_properties(index)
    blocks = None
    if torch.version.cuda:
        answer, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
        status = driver.cuDeviceGetAttribute(
            ctypes.byref(answer), 106, ctypes.c_int(index)
        )
        if status != 0:
            raise RuntimeError(
                f"limits: cuDeviceGetAttribute failed with CUDA error {status}"
            )
        blocks = answer.value
    return Limits(
        name=p.name,
        sms=p.multi_processor_count,
        registers_per_sm=p.regs_per_multiprocessor,
        shared_per_sm=p.shared_memory_per_block
        if torch.version.hip
        else p.shared_memory_per_multiprocessor,
        shared_per_block=getattr(
            p, "shared_memory_per_block_optin", p.shared_memory_per_block
        ),
        l2_bytes=p.L2_cache_size,
        warp_size=p.warp_size,
        threads_per_sm=p.max_threads_per_multi_processor,
        blocks_per_sm=blocks,
        target=p.gcnArchName.split(":")[0]
        if torch.version.hip
        else f"sm_{p.major}{p.minor}",
    )


def gpu_name():
    """The GPU's name as its driver gives it. Raises RuntimeError without a GPU."""
    require_gpu("gpu_name")
    return torch.cuda.get_device_name()


def slug(name):
    """A GPU's name as a folder: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def copy_bandwidth(n_bytes=2**30):
    """Bytes a second that a device-to-device copy of `n_bytes` moves, reads plus writes: the roof of every kernel here.

    Measured now, the median of repeated copies. Raises RuntimeError without a GPU.
    """
    require_gpu("copy_bandwidth")
    from triton.testing import do_bench

    source = torch.empty(n_bytes, dtype=torch.uint8, device=device()).random_()
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * n_bytes / (milliseconds * 1e-3)
