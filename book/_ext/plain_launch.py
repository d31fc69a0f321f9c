"""What a plain file of a kernel has in place of the package's launch code, which does more.

`plain_files` takes these definitions wherever a kernel's module names one of theirs; nothing else
imports them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Launch = Callable[[Tensor, Tensor], None]
INTERPRETED_PROGRAMS = 4  # without a GPU: enough to see them stride
per_sm: dict[Any, int] = {}  # programs that an SM holds at once, by what was compiled


@dataclass(frozen=True)
class Gpu:
    """What the launcher asks of a GPU. Sizes are in bytes; the defaults are an H200's."""

    product: str = "H200"
    num_sms: int = 132
    warp_size: int = 32
    max_threads_per_program: int = 1024
    shared_per_sm: int = 233472
    shared_per_program: int = 232448
    registers_per_sm: int = 65536
    prefetches_to_shared_memory: bool = True


def planning_gpu(x: Tensor) -> Gpu:
    """The GPU that holds `x`; an H200 where Triton's interpreter runs the kernel."""
    if not x.is_cuda:
        return Gpu()
    found = torch.cuda.get_device_properties(x.device)
    return Gpu(
        product=found.name,
        num_sms=found.multi_processor_count,
        warp_size=found.warp_size,
        shared_per_sm=found.shared_memory_per_multiprocessor,
        shared_per_program=getattr(
            found, "shared_memory_per_block_optin", found.shared_memory_per_block
        ),
        registers_per_sm=found.regs_per_multiprocessor,
        prefetches_to_shared_memory=torch.version.hip is None and found.major >= 8,
    )


def device_guard(x: Tensor) -> AbstractContextManager[object]:
    """Makes x's GPU the current one; without one, numbers overflow as silently as on a GPU."""
    quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")
    return torch.cuda.device(x.device) if x.is_cuda else quiet


def check_operands(name: str, x: Tensor, out: Tensor | None, max_cols: int) -> Tensor:
    """The tensor that the softmax of `x` is written to: `out`, or a new one like `x`."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{name}: float32, float16 or bfloat16, not {x.dtype}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: x requires a gradient, and there is no backward here")
    if x.dim() != 2 or x.shape[1] > max_cols:
        raise ValueError(f"{name}: a matrix of at most {max_cols} columns, not {tuple(x.shape)}")
    if out is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(f"{name}: out is {out.dtype} {tuple(out.shape)}, not as x")
    return out


def cached_launch(
    make: Callable[..., Launch], y: Tensor, x: Tensor, **options: int | None
) -> Launch:
    """`make(x, y, **options)`: nothing is kept here."""
    return make(x, y, **options)


def resident_launch(
    kernel: Any,
    arguments: tuple[Any, ...],
    constants: dict[str, int],
    n_tiles: int,
    gpu: Gpu,
    *,
    num_warps: int,
    min_stages: int,
    programs: int | None,
) -> Launch:
    """A function that launches as many programs as `gpu` holds at once, and at most `n_tiles`.

    The registers and the shared memory of a program are known once the kernel is compiled, so the
    first call for a kind of matrix starts one program per SM.
    """
    kind = kernel.__name__, gpu, num_warps, tuple(constants.items())

    def launch(y: Tensor, x: Tensor) -> None:
        fitting = per_sm.get(kind, 1) * gpu.num_sms if x.is_cuda else INTERPRETED_PROGRAMS
        compiled = kernel[(min(n_tiles, programs or fitting),)](
            *arguments, **constants, num_warps=num_warps
        )
        if compiled is not None:
            per_sm[kind] = resident_programs(compiled, num_warps, gpu)

    return launch


def resident_programs(compiled: Any, num_warps: int, gpu: Gpu) -> int:
    """Programs of a compiled kernel that fit the registers and shared memory of an SM."""
    registers = -(-compiled.n_regs // 8) * 8 * gpu.warp_size * num_warps
    shared = compiled.metadata.shared + 1024  # the system takes 1 KiB for each program
    return max(1, min(gpu.registers_per_sm // registers, gpu.shared_per_sm // shared))


def takes_ptx(gpu: Gpu) -> bool:
    """Whether kernels may hold instructions of NVIDIA's; not where interpreted."""
    return torch.cuda.is_available() and torch.version.hip is None
