"""How many programs of a kernel one SM or compute unit holds at once, by its vendor's rules."""

from collections.abc import Callable
from typing import Any

import torch

from memtraffic.compile import Resources, resources
from memtraffic.gpus import AmdGpu, Gpu, NvidiaGpu, find_gpu
from memtraffic.inputs import AnyInputs
from memtraffic.residency import amd, nvidia


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


def occupancy(
    fn: Callable[..., object],
    target: str | Gpu,
    *tensors: torch.Tensor,
    inputs: AnyInputs = None,
    **options: int | None,
) -> list[dict[str, Any]]:
    """The `report` of each kernel that `fn(*tensors)` launches, compiled for `target`.

    >>> from memtraffic import runtime
    >>> from memtraffic.kernels.softmax import fused
    >>> x = torch.empty(8, 1024, device=runtime.device())
    >>> [kernel] = occupancy(fused.softmax, "h200", x, num_warps=32)
    >>> kernel["resident"], kernel["binding"], kernel["programs"]
    (2, 'warps', 264)

    No kernel runs, and the GPU need not be there. target: a `Gpu`, or the name of a target or
    product of the table. inputs: in place of tensors, as for `resources`. options: those of
    `resources`, such as `num_warps`. Raises what `find_gpu` and `resources` raise.
    """
    gpu = find_gpu(target) if isinstance(target, str) else target
    return [
        report(kernel, gpu) for kernel in resources(fn, gpu, *tensors, inputs=inputs, **options)
    ]


def report(kernel: Resources, gpu: Gpu | None = None) -> dict[str, Any]:
    """Everything about the residency of one kernel, as a dict.

    Keys: `kernel`, `target`, `gpu` (its product), `num_warps`; `limits`, as `programs_by_limit`
    returns them; `binding`, the first of the least limits; `resident`, programs per SM or compute
    unit; `processors`, how many of those the GPU has; `programs`, how many fit on all of them,
    which is the grid of a persistent launch.
    """
    gpu = gpu or find_gpu(kernel.target)
    limits = programs_by_limit(kernel, gpu)
    binding = min(limits, key=lambda name: limits[name])
    return {
        "kernel": kernel.kernel,
        "target": kernel.target,
        "gpu": gpu.product,
        "num_warps": kernel.num_warps,
        "limits": limits,
        "binding": binding,
        "resident": limits[binding],
        "processors": gpu.num_sms,
        "programs": limits[binding] * gpu.num_sms,
    }
