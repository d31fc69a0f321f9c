"""Resident programs on AMD GPUs: how many workgroups of a kernel one compute unit holds at once.

On RDNA the unit is the workgroup processor, as in `memtraffic.gpus`, which has the constants. The
rules are those of LLVM, https://github.com/llvm/llvm-project,
`llvm/lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp`.
"""

import re
from collections.abc import Mapping
from typing import Any

from memtraffic.gpus import AmdGpu
from memtraffic.residency.resources import Resources, round_up
from memtraffic.triton_adapter.launch import CompiledKernel


def usage(assembly: str) -> dict[str, int]:
    """What LLVM's comments in the assembly say that a kernel uses, as fields of `Resources`."""
    counted = {name: int(value) for name, value in re.findall(r"; (\w+): (\d+)", assembly)}
    vgprs = counted["NumVgprs"]
    return {
        "registers": counted.get("TotalNumVgprs", vgprs),
        "spill_bytes": counted["ScratchSize"],
        "static_shared_bytes": counted["LDSByteSize"],
        "vgprs": vgprs,
        "agprs": counted.get("NumAgprs", 0),
        "sgprs": counted["TotalNumSgprs"],
        "allocated_vgprs": counted["NumVGPRsForWavesPerEU"],
        "allocated_sgprs": counted["NumSGPRsForWavesPerEU"],
        "llvm_waves": counted["Occupancy"],
    }


def loaded_usage(compiled: CompiledKernel) -> dict[str, int]:
    """The same of a kernel that Triton compiled for the current GPU."""
    return usage(compiled.asm["amdgcn"])


def limits_of(kernel: Resources, gpu: AmdGpu) -> dict[str, int]:
    """`programs_by_limit` of what a compiled kernel is given."""
    vgprs, sgprs = kernel.allocated_vgprs, kernel.allocated_sgprs  # agprs are among vgprs
    return programs_by_limit(vgprs, 0, sgprs, kernel.shared_bytes, kernel.num_warps, gpu)


def check_options(options: Mapping[str, Any], gpu: AmdGpu) -> None:
    """Raises ValueError for a launch option that `gpu` cannot fulfil."""
    if (waves := options.get("waves_per_eu", 0)) > gpu.max_waves_per_simd:
        raise ValueError(
            f"waves_per_eu is {waves}: a SIMD of {gpu.target} holds {gpu.max_waves_per_simd}"
        )


def waves_by_limit(vgprs: int, agprs: int, sgprs: int, gpu: AmdGpu) -> dict[str, int]:
    """The waves that each limit of one SIMD allows: `vgprs`, `waves`, and on CDNA `sgprs`.

    >>> from memtraffic.gpus import find_gpu
    >>> waves_by_limit(128, 0, 90, find_gpu("gfx942"))
    {'vgprs': 4, 'waves': 8, 'sgprs': 8}

    vgprs, agprs: vector and accumulation registers per lane. sgprs: scalar registers per wave.
    Vector registers are allocated in units of `gpu.vgpr_granule`; from gfx90a on that is 8, by
    LLVM's `getVGPRAllocGranule`, although AMD's workload guide for the MI300X says 16. Returns 0
    for `vgprs` if the kernel needs more vector registers than its instructions can address.
    """
    if gpu.agprs:  # two register files: the fuller one binds
        used = max(round_up(vgprs, gpu.vgpr_granule), round_up(agprs, gpu.vgpr_granule))
    else:  # one register file: accumulation registers start at a multiple of 4
        used = round_up(round_up(vgprs, 4) + agprs if agprs else vgprs, gpu.vgpr_granule)
    too_many = vgprs + agprs > gpu.max_addressable_vgprs
    limits = {
        "vgprs": 0 if too_many else gpu.vgprs // max(gpu.vgpr_granule, used),
        "waves": gpu.max_waves_per_simd,
    }
    if gpu.sgpr_waves:
        limits["sgprs"] = next(waves for most, waves in gpu.sgpr_waves if sgprs <= most)
    return limits


def programs_by_limit(
    vgprs: int, agprs: int, sgprs: int, lds_bytes: int, num_warps: int, gpu: AmdGpu
) -> dict[str, int]:
    """The workgroups that each limit of one compute unit allows.

    The limits are `vgprs`, `waves`, `sgprs`, `lds` and `groups`; one that cannot bind is left out.

    >>> from memtraffic.gpus import find_gpu
    >>> programs_by_limit(128, 0, 90, 20000, 4, find_gpu("gfx942"))
    {'vgprs': 4, 'waves': 8, 'sgprs': 8, 'lds': 3, 'groups': 16}

    vgprs, agprs: vector and accumulation registers per lane. sgprs: scalar registers per wave.
    lds_bytes: static and dynamic LDS of one workgroup. num_warps: waves of one workgroup, which
    are spread over the SIMDs. A limit is 0 where one workgroup alone exceeds it: more than 1024
    threads, for example.

    Raises ValueError for fewer than 1 wave, and for negative registers or bytes.
    """
    if num_warps < 1 or min(vgprs, agprs, sgprs, lds_bytes) < 0:
        raise ValueError(
            f"programs_by_limit: {num_warps} warps, {vgprs} vector, {agprs} accumulation and "
            f"{sgprs} scalar registers, {lds_bytes} bytes"
        )
    limits = {
        name: waves * gpu.simds // num_warps
        for name, waves in waves_by_limit(vgprs, agprs, sgprs, gpu).items()
    }
    if num_warps * gpu.warp_size > gpu.max_threads_per_program:
        limits["waves"] = 0
    if lds_bytes:
        lds = round_up(lds_bytes, gpu.shared_granularity)
        limits["lds"] = 0 if lds_bytes > gpu.shared_per_program else gpu.shared_per_sm // lds
    if num_warps > 1:  # a workgroup of one wave needs no barrier
        limits["groups"] = gpu.max_workgroups
    return limits
