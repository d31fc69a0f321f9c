"""Resident programs on NVIDIA GPUs: how many thread blocks of a kernel one SM holds at once.

Sources: the sizes are those of NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the
rules and granules those of `cuda_occupancy.h`, the occupancy calculator that NVIDIA publishes with CUDA.
"""

from memtraffic.machine import Limits

REGISTER_UNIT = 256  # registers are dealt to a warp in pieces of so many
REGISTERS_PER_BLOCK = 65536
REGISTERS_PER_THREAD = 255
THREADS_PER_BLOCK = 1024
PARTITIONS = (
    4  # of an SM, each with its own quarter of the registers; a warp lives in one
)


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


# target: an SM of its compute capability, with the number of them on one GPU of that kind; L2 is left out
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


def limits(registers, shared_bytes, num_warps, sm):
    """The blocks that each limit of an SM allows: a dict with the keys `registers`, `shared`, `warps` and `blocks`.

    registers: of 32 bits, a thread. shared_bytes: a block. sm: one of `SMS`, or the `machine.limits` of a GPU. A block that
    breaks a limit of its own, in registers, shared memory or threads, is allowed 0 times.
    """
    unit = 256 if sm.target == "sm_75" else 128  # bytes, of shared memory
    reserved = sm.shared_per_sm - sm.shared_per_block  # of each block, by the system
    warp_registers = _up(registers * sm.warp_size, REGISTER_UNIT)
    checked = warp_registers * _up(
        num_warps, PARTITIONS
    )  # as if spread over all of them
    warps = sm.registers_per_sm // PARTITIONS // max(1, warp_registers) * PARTITIONS
    shared = _up(shared_bytes + reserved, unit)
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
    """Blocks that one SM holds at once: the least of `limits`, 0 where not even one fits."""
    return min(limits(registers, shared_bytes, num_warps, sm).values())


def _up(value, unit):
    return -(-value // unit) * unit
