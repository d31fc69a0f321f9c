"""Resident programs on NVIDIA GPUs: how many thread blocks of a kernel one SM holds at once.

The rules are those of `cuda_occupancy.h`, which NVIDIA publishes with CUDA; the constants are in
`memtraffic.gpus`.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

from memtraffic.device import MAX_DYNAMIC_SHARED_BYTES, call_driver, this_gpu
from memtraffic.gpus import NvidiaGpu
from memtraffic.residency.resources import Resources, round_up
from memtraffic.triton_adapter.launch import function_handle
from memtraffic.triton_adapter.launch import loaded_usage as loaded_usage


def limits_of(kernel: Resources, gpu: NvidiaGpu) -> dict[str, int]:
    """`programs_by_limit` of what a compiled kernel uses."""
    return programs_by_limit(kernel.registers, kernel.shared_bytes, kernel.num_warps, gpu)


def check_options(options: Mapping[str, Any], gpu: NvidiaGpu) -> None:
    """Any option that NVIDIA's compiler has, every GPU can fulfil."""


def programs_by_limit(
    registers: int, shared_bytes: int, num_warps: int, gpu: NvidiaGpu
) -> dict[str, int]:
    """The thread blocks that each limit of one SM allows: `registers`, `shared`, `warps`, `blocks`.

    >>> from memtraffic.gpus import find_gpu
    >>> programs_by_limit(69, 32784, 4, find_gpu("sm_90"))
    {'registers': 7, 'shared': 6, 'warps': 16, 'blocks': 32}

    registers: 32-bit registers per thread. shared_bytes, num_warps: those of one block. A block
    that breaks a limit of its own, such as 255 registers per thread, is allowed 0 times. Assumes
    that the SM gives shared memory the largest carve-out.

    Raises ValueError for fewer than 1 warp, and for negative registers or bytes.
    """
    if num_warps < 1 or registers < 0 or shared_bytes < 0:
        raise ValueError(
            f"programs_by_limit: {num_warps} warps, {registers} registers, {shared_bytes} bytes"
        )
    warp_registers = round_up(registers * gpu.warp_size, gpu.register_granularity)
    warps = gpu.registers_per_sm // gpu.subpartitions // max(1, warp_registers) * gpu.subpartitions
    reserved = gpu.shared_per_sm - gpu.shared_per_program  # for each block, by the system
    shared = round_up(shared_bytes + reserved, gpu.shared_granularity)
    threads = num_warps * gpu.warp_size
    return {
        "registers": 0 if registers > gpu.max_registers_per_thread else warps // num_warps,
        "shared": (
            0 if shared_bytes > gpu.shared_per_program else gpu.shared_per_sm // max(1, shared)
        ),
        "warps": 0 if threads > gpu.max_threads_per_program else gpu.max_threads_per_sm // threads,
        "blocks": gpu.max_blocks_per_sm,
    }


def driver_resident_programs(compiled: Any, num_warps: int, shared_bytes: int) -> int:
    """What the CUDA driver says instead, for a kernel that Triton compiled for this GPU.

    compiled: Triton's compiled kernel. num_warps, shared_bytes: those of one block. Asks
    `cuOccupancyMaxActiveBlocksPerMultiprocessor`, after allowing the kernel as much shared memory
    as a block may have. Raises RuntimeError for what the driver refuses.
    """
    gpu, blocks, integer = this_gpu(), ctypes.c_int(), ctypes.c_int
    function = ctypes.c_void_p(function_handle(compiled))
    most = integer(MAX_DYNAMIC_SHARED_BYTES), integer(gpu.shared_per_program)
    call_driver("cuFuncSetAttribute", function, *most)
    sizes = integer(num_warps * gpu.warp_size), ctypes.c_size_t(shared_bytes)
    asked = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    call_driver(asked, ctypes.byref(blocks), function, *sizes)
    return blocks.value
