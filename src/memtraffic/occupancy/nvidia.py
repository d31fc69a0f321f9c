"""Resident programs on NVIDIA GPUs: how many thread blocks of a kernel one SM holds at once.

Sources: [guide] NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability",
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications; [calculator] `cuda_occupancy.h`,
which NVIDIA publishes with CUDA and Triton in its wheel; [products] the datasheet of each GPU and, of NVIDIA's white papers,
"Turing", "A100", "Ampere GA102", "Ada", "Hopper" and "Blackwell" architecture.
"""

import ctypes

from memtraffic.machine import Limits
from memtraffic.machine import limits as limits_of_this_gpu

REGISTER_UNIT = 256  # registers are dealt to a warp in pieces of so many [calculator]
REGISTERS_PER_BLOCK = 65536  # [guide]
REGISTERS_PER_THREAD = 255  # [guide]
THREADS_PER_BLOCK = 1024  # [guide]
PARTITIONS = 4  # of an SM; a warp takes its registers from one of them [calculator]


def _sm(target, name, sms, threads, blocks, shared_kib, reserved=1024):
    return Limits(
        name=name,
        sms=sms,
        registers_per_sm=65536,
        shared_per_sm=shared_kib * 1024,
        shared_per_block=shared_kib * 1024 - reserved,
        l2_bytes=0,
        warp_size=32,
        threads_per_sm=threads,
        blocks_per_sm=blocks,
        target=target,
    )


# target: an SM of its compute capability, with the number of them on one GPU of that kind; L2 is left out. Name and number of
# SMs [products]; threads and blocks an SM, KiB of shared memory an SM, registers [guide]; reserved bytes [calculator]
SMS = {
    sm.target: sm
    for sm in (
        _sm("sm_75", "T4", 40, 1024, 16, 64, reserved=0),
        _sm("sm_80", "A100", 108, 2048, 32, 164),
        _sm("sm_86", "A10", 72, 1536, 16, 100),
        _sm("sm_89", "L4", 58, 1536, 24, 100),
        _sm("sm_90", "H200", 132, 2048, 32, 228),
        _sm("sm_100", "B200", 148, 2048, 32, 228),
        _sm("sm_120", "RTX 5090", 170, 1536, 24, 100),
    )
}


def shared_unit(sm):
    """The pieces, in bytes, in which an SM deals out shared memory [calculator]."""
    return 256 if sm.target == "sm_75" else 128


def limits(registers, shared_bytes, num_warps, sm):
    """The blocks that each limit of an SM allows: a dict with the keys `registers`, `shared`, `warps` and `blocks`.

    registers: of 32 bits, a thread. shared_bytes: a block. num_warps: a block. sm: one of `SMS`, or the `machine.limits` of an
    NVIDIA GPU. A block that breaks a limit of its own, in registers, shared memory or threads, is allowed 0 times. An SM is
    taken to give shared memory as much of its carve-out as it can. The rules are those of [calculator].

    Raises ValueError for no warps, and for less than no registers or bytes.
    """
    if num_warps < 1 or registers < 0 or shared_bytes < 0:
        raise ValueError(
            f"limits: {num_warps} warps, {registers} registers, {shared_bytes} bytes"
        )
    reserved = sm.shared_per_sm - sm.shared_per_block  # of each block, by the system
    warp_registers = _up(registers * sm.warp_size, REGISTER_UNIT)
    # A launch is checked as if its warps were spread over all partitions.
    checked = warp_registers * _up(num_warps, PARTITIONS)
    warps = sm.registers_per_sm // PARTITIONS // max(1, warp_registers) * PARTITIONS
    shared = _up(shared_bytes + reserved, shared_unit(sm))
    return {
        "registers": 0
        if checked > REGISTERS_PER_BLOCK or registers > REGISTERS_PER_THREAD
        else warps // num_warps,
        "shared": 0
        if shared_bytes > sm.shared_per_block
        else sm.shared_per_sm // max(1, shared),
        "warps": 0
        if num_warps * sm.warp_size > THREADS_PER_BLOCK
        else sm.threads_per_sm // sm.warp_size // num_warps,
        "blocks": sm.blocks_per_sm,
    }


def resident(registers, shared_bytes, num_warps, sm):
    """Blocks that one SM holds at once: the least of `limits`, 0 where not even one fits. Takes and raises what that does."""
    return min(limits(registers, shared_bytes, num_warps, sm).values())


def driver(kernel, num_warps, shared_bytes):
    """The same number from the CUDA driver, for a kernel that Triton compiled for this GPU; shared_bytes: of a block.

    Asks `cuOccupancyMaxActiveBlocksPerMultiprocessor`, after it let the kernel have as much shared memory as there is. Raises
    RuntimeError for what the driver refuses.
    """
    cuda, blocks = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    kernel.run  # noqa: B018  loads it
    function = ctypes.c_void_p(kernel.function)
    most = limits_of_this_gpu().shared_per_block
    max_dynamic_shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    status = cuda.cuFuncSetAttribute(function, max_dynamic_shared, most)
    status = status or cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks), function, num_warps * 32, ctypes.c_size_t(shared_bytes)
    )
    if status:
        raise RuntimeError(f"driver: CUDA error {status}")
    return blocks.value


def _up(value, unit):
    return -(-value // unit) * unit
