"""Resident programs on NVIDIA GPUs: how many thread blocks of a kernel one SM holds at once.

Source of the rules: NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities" and "Multiprocessor Level", and the
occupancy calculator of Nsight Compute.
"""

REGISTER_UNIT = 256  # registers are allocated to a warp in pieces of so many
PARTITIONS = (
    4  # of an SM, each with its own quarter of the registers; a warp lives in one
)
SHARED_UNIT = 128  # bytes, the granule of shared memory
SHARED_RESERVED = (
    1024  # bytes of each block that the system keeps, from compute capability 8.0
)


def limits(registers, shared_bytes, num_warps, sm):
    """The blocks that each limit of an SM allows: a dict with the keys `registers`, `shared`, `warps`, `blocks`.

    registers: of 32 bits, a thread. shared_bytes: a block. sm: the SM, a `machine.Limits`. A limit that a kernel does not
    touch is left out.
    """
    warp_registers = _up(registers * sm.warp_size, REGISTER_UNIT)
    partition = sm.registers_per_sm // PARTITIONS // warp_registers
    shared = _up(shared_bytes, SHARED_UNIT) + SHARED_RESERVED
    found = {
        "registers": partition * PARTITIONS // num_warps,
        "shared": sm.shared_per_sm // shared,
        "warps": sm.threads_per_sm // sm.warp_size // num_warps,
        "blocks": sm.blocks_per_sm,
    }
    return {name: blocks for name, blocks in found.items() if blocks is not None}


def resident(registers, shared_bytes, num_warps, sm):
    """Blocks that one SM holds at once: the least of `limits`, 0 where not even one fits."""
    return min(limits(registers, shared_bytes, num_warps, sm).values())


def _up(value, unit):
    return -(-value // unit) * unit
