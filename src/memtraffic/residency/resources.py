"""What one compiled kernel uses."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BlockedLayout:
    """How the elements of a block are distributed over a program, by dimension, rows first.

    elements: neighbouring elements that a thread holds together. lanes: threads of a warp. warps:
    warps of a program. A block that is larger than their product repeats the pattern.
    """

    elements: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses.

    kernel, target, num_warps: what was compiled, for which GPU, with how many warps per program.
    registers: of 32 bits, per thread. On AMD these are the vector registers: `vgprs` and `agprs`,
        which share one file from gfx90a on.
    spill_bytes: local memory per thread (on AMD, scratch).
    shared_bytes: shared memory (on AMD, LDS) per program; `static_shared_bytes` of it are static.
    num_ctas: the thread blocks of a program, a cluster; all else here is of one block.
    load_bits, store_bits: the widths of the instructions that load from and store to global memory,
        each with the number of such instructions: {128: 2} is two that move 16 bytes per thread.
        Bulk copies by descriptor (TMA), which no thread makes, are not among them.
    layout: how the block of the first load is distributed over threads.
    schedule: the steps of the kernel, see `compile.ttgir.schedule`.
    vgprs, agprs, sgprs: AMD's vector, accumulation and scalar registers, 0 on NVIDIA.
    allocated_vgprs, allocated_sgprs: what a wave is given of them, AGPRs included; the option
        `waves_per_eu` may raise it.
    llvm_waves: waves per SIMD that LLVM says the registers and static LDS allow.
    instructions: the number of instructions by name.
    unlaunchable: why no GPU of this target can launch the kernel; "" if it can.
    """

    kernel: str
    target: str
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bits: dict[int, int] = field(default_factory=dict)
    store_bits: dict[int, int] = field(default_factory=dict)
    layout: BlockedLayout | None = None
    schedule: tuple[str, ...] = ()
    static_shared_bytes: int = 0
    num_ctas: int = 1
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    allocated_vgprs: int = 0
    allocated_sgprs: int = 0
    llvm_waves: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    unlaunchable: str = ""

    def __str__(self) -> str:
        return (
            f"{self.kernel} for {self.target}, {self.num_warps} warps: {self.registers} registers, "
            f"{self.spill_bytes} bytes spilled, {self.shared_bytes} bytes shared; "
            f"loads: {widths_text(self.load_bits, ' bits')}; "
            f"stores: {widths_text(self.store_bits, ' bits')}"
        ) + (f"; cannot be launched: {self.unlaunchable}" if self.unlaunchable else "")


def widths_text(bits: dict[int, int], unit: str = "") -> str:
    """`load_bits` or `store_bits` in words, such as "2 of 128"."""
    return " + ".join(f"{n} of {width}{unit}" for width, n in sorted(bits.items())) or "none"


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit
