"""How many programs of a kernel one SM or compute unit holds at once, by its vendor's rules."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from memtraffic.gpus import AmdGpu, Gpu, NvidiaGpu, find_gpu
from memtraffic.residency import amd, nvidia
from memtraffic.residency.resources import Resources, loaded_resources

__all__ = [
    "Occupancy",
    "Resources",
    "loaded_resources",
    "programs_by_limit",
    "resident_programs",
]


@dataclass(frozen=True)
class Occupancy:
    """How many programs of one compiled kernel a GPU holds at once, and what allows no more.

    kernel, target, num_warps: what was compiled, for which GPU, with how many warps per program.
    gpu: its product.
    limits: the programs per SM or compute unit that each resource allows, see `programs_by_limit`.
    binding: the first of the least limits. resident: what it allows.
    processors: the SMs or compute units of the GPU.
    programs: how many fit on all of them, which is the grid of a persistent launch.
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
            programs=resident * gpu.num_sms,
        )

    def __str__(self) -> str:
        limits = ", ".join(f"{name} {programs}" for name, programs in self.limits.items())
        return (
            f"{self.kernel} for {self.target} ({self.gpu}), {self.num_warps} warps: "
            f"{self.resident} programs fit, by {self.binding} (limits: {limits}); "
            f"{self.programs} programs on {self.processors} processors"
        )

    as_dict = asdict


def programs_by_limit(kernel: Resources, gpu: Gpu | None = None) -> dict[str, int]:
    """The programs that each resource of one SM or compute unit allows, by the name of the limit.

    kernel: what a compiled kernel uses. gpu: by default, the GPU of the table for the kernel's
    target. Raises LookupError for a target that is not in the table.
    """
    gpu = gpu or find_gpu(kernel.target)
    if isinstance(gpu, AmdGpu):
        vgprs, sgprs = kernel.allocated_vgprs, kernel.allocated_sgprs  # agprs are among vgprs
        return amd.programs_by_limit(vgprs, 0, sgprs, kernel.shared_bytes, kernel.num_warps, gpu)
    if isinstance(gpu, NvidiaGpu):
        used = (kernel.registers, kernel.shared_bytes, kernel.num_warps)
        return nvidia.programs_by_limit(*used, gpu)
    raise TypeError(f"programs_by_limit: no rules for a GPU of {gpu.vendor}")


def resident_programs(kernel: Resources, gpu: Gpu | None = None) -> int:
    """Programs of a kernel that are resident on one SM or compute unit: the least of its limits.

    Returns 0 where not even one program fits.
    """
    return min(programs_by_limit(kernel, gpu).values())
