"""How many programs of a kernel one SM or compute unit holds at once, by its vendor's rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memtraffic.gpus import Gpu, find_gpu
from memtraffic.residency import amd, nvidia
from memtraffic.residency.resources import BlockedLayout, Resources
from memtraffic.triton_adapter.launch import CompiledKernel, shared_bytes

__all__ = ["BlockedLayout", "Occupancy", "Resources", "programs_by_limit", "resident_programs"]

# Each module has `limits_of(kernel, gpu)`, `loaded_usage(compiled)` and
# `check_options(options, gpu)`.
_RULES: dict[str, Any] = {"nvidia": nvidia, "amd": amd}


def rules_of(gpu: Gpu) -> Any:
    """The module with the rules of a GPU's vendor."""
    return _RULES[gpu.vendor]


@dataclass(frozen=True)
class Occupancy:
    """How many programs of one compiled kernel a GPU holds at once, and what allows no more.

    kernel, target, num_warps: what was compiled, for which GPU, with how many warps per program.
    gpu: its product.
    limits: the programs per SM or compute unit that each resource allows, see `programs_by_limit`.
    binding: the first of the least limits. resident: what it allows.
    processors: the SMs or compute units of the GPU.
    programs: how many fit on all of them, which is the grid of a persistent launch. A program of
        several thread blocks, by the option `num_ctas`, takes the places of so many, and all that
        is said of one SM is of blocks.
    """

    kernel: str
    target: str
    gpu: str
    num_warps: int
    limits: dict[str, int]
    binding: str
    resident: int
    processors: int
    programs: int

    @classmethod
    def of(cls, kernel: Resources, gpu: Gpu | None = None) -> Occupancy:
        """That of a kernel whose `Resources` are known. gpu: as of `programs_by_limit`."""
        gpu = gpu or find_gpu(kernel.target)
        limits = programs_by_limit(kernel, gpu)
        binding = min(limits, key=lambda name: limits[name])
        resident = limits[binding]
        return cls(
            kernel=kernel.kernel,
            target=kernel.target,
            gpu=gpu.product,
            num_warps=kernel.num_warps,
            limits=limits,
            binding=binding,
            resident=resident,
            processors=gpu.num_sms,
            programs=resident * gpu.num_sms // kernel.num_ctas,
        )

    def __str__(self) -> str:
        limits = ", ".join(f"{name} {programs}" for name, programs in self.limits.items())
        return (
            f"{self.kernel} for {self.target} ({self.gpu}), {self.num_warps} warps: "
            f"{self.resident} programs fit, by {self.binding} (limits: {limits}); "
            f"{self.programs} programs on {self.processors} processors"
        )


def programs_by_limit(kernel: Resources, gpu: Gpu | None = None) -> dict[str, int]:
    """The programs that each resource of one SM or compute unit allows, by the name of the limit.

    kernel: what a compiled kernel uses. gpu: by default, the GPU of the table for the kernel's
    target. Raises LookupError for a target that is not in the table.
    """
    gpu = gpu or find_gpu(kernel.target)
    limits: dict[str, int] = rules_of(gpu).limits_of(kernel, gpu)
    return limits


def resident_programs(kernel: Resources, gpu: Gpu | None = None) -> int:
    """Programs of a kernel that are resident on one SM or compute unit: the least of its limits.

    Returns 0 where not even one program fits.
    """
    return min(programs_by_limit(kernel, gpu).values())


def loaded_resources(compiled: CompiledKernel, gpu: Gpu) -> Resources:
    """The `Resources` of a kernel that Triton compiled for the current GPU, without its code.

    What decides how many of its programs are resident, and no more: `load_bits`, `store_bits`,
    `layout`, `schedule` and `instructions` are empty, because no disassembler is run. gpu: the
    current GPU.
    """
    return Resources(
        kernel=compiled.name,
        target=gpu.target,
        num_warps=compiled.metadata.num_warps,
        shared_bytes=shared_bytes(compiled),
        **rules_of(gpu).loaded_usage(compiled),
    )
