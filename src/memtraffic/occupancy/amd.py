"""Resident programs on AMD GPUs: how many workgroups of a kernel one compute unit holds at once.

Sources: [base] LLVM, https://github.com/llvm/llvm-project, `llvm/lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp`; [td] beside it,
`AMDGPU.td`; [guide] LLVM, "User Guide for AMDGPU Backend", https://llvm.org/docs/AMDGPUUsage.html; [mesa] Mesa,
`src/amd/common/ac_gpu_info.c`; [products] AMD's white papers of CDNA 1 to 4 and the datasheets of its cards. On RDNA the unit
is the workgroup processor, two compute units that share their waves and LDS: so LLVM compiles for it by default.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CU:
    """A compute unit, or on RDNA a workgroup processor. Registers are those of one lane on one SIMD, sizes are in bytes.

    cus: how many one GPU has [products]. wave_size: lanes of a wave [td]. waves_per_simd: the most there may be [base]. vgprs:
    vector registers, dealt out in pieces of vgpr_unit [base]. agprs: a file of their own for accumulators [guide], 0 where
    they share the vector registers. lds: of the unit, lds_per_group: of one workgroup at most [td], lds_unit: its pieces
    [base, on RDNA mesa]. groups: workgroups of more than one wave, as many as there are barriers [base]. sgpr_waves: waves a
    SIMD by the scalar registers a wave uses, as pairs (at most so many registers, waves) [base]; empty where they never bind.
    simds: that a workgroup's waves are spread over [base]. most_vgprs: what the instructions of a wave can name, accumulators
    included [base].
    """

    target: str
    name: str
    cus: int
    wave_size: int
    waves_per_simd: int
    vgprs: int
    vgpr_unit: int
    agprs: int
    lds: int
    lds_per_group: int
    lds_unit: int
    groups: int
    sgpr_waves: tuple = ()
    simds: int = 4
    most_vgprs: int = 512


THREADS_PER_GROUP = 1024  # [base]

_SGPR_WAVES = ((80, 10), (88, 9), (100, 8), (10**9, 7))
_KIB = 1024

# target: a compute unit of its kind, with the number of them on one GPU
CUS = {
    cu.target: cu
    for cu in (
        CU("gfx908", "MI100", 120, 64, 10, 256, 4, 256, 64 * _KIB, 64 * _KIB, 512, 16, _SGPR_WAVES),
        CU("gfx90a", "MI250X", 110, 64, 8, 512, 8, 0, 64 * _KIB, 64 * _KIB, 512, 16, _SGPR_WAVES),
        CU("gfx942", "MI300X", 304, 64, 8, 512, 8, 0, 64 * _KIB, 64 * _KIB, 512, 16, _SGPR_WAVES),
        CU("gfx950", "MI355X", 256, 64, 8, 512, 8, 0, 160 * _KIB, 160 * _KIB, 1280, 16, _SGPR_WAVES),
        CU("gfx1100", "RX 7900 XTX", 48, 32, 16, 1536, 24, 0, 128 * _KIB, 64 * _KIB, 1024, 32, most_vgprs=256),
        CU("gfx1201", "RX 9070 XT", 32, 32, 16, 1536, 24, 0, 128 * _KIB, 64 * _KIB, 1024, 32, most_vgprs=256),
    )
}  # fmt: skip


def waves(vgprs, agprs, sgprs, cu):
    """Waves that one SIMD holds of a kernel with so many registers: a dict by limit, `vgprs`, `sgprs` and `waves`.

    vgprs, agprs: a lane. sgprs: a wave. cu: one of `CUS`. Of more vector registers than a wave can name, it holds 0.
    """
    if cu.agprs:  # two files: the fuller one binds
        used = max(_up(vgprs, cu.vgpr_unit), _up(agprs, cu.vgpr_unit))
    else:  # one file: accumulators start at the next multiple of 4
        used = _up(_up(vgprs, 4) + agprs if agprs else vgprs, cu.vgpr_unit)
    fit = 0 if vgprs + agprs > cu.most_vgprs else cu.vgprs // max(cu.vgpr_unit, used)
    found = {"vgprs": fit, "waves": cu.waves_per_simd}
    if cu.sgpr_waves:
        found["sgprs"] = next(waves for most, waves in cu.sgpr_waves if sgprs <= most)
    return found


def limits(vgprs, agprs, sgprs, lds_bytes, num_warps, cu):
    """The workgroups that each limit of a compute unit allows: a dict with the keys `vgprs`, `sgprs`, `waves`, `lds` and
    `groups`.

    vgprs, agprs: vector and accumulator registers a lane. sgprs: scalar registers a wave. lds_bytes: a workgroup, static and
    dynamic. cu: one of `CUS`. A limit that cannot bind is left out. The waves of a workgroup are spread over the SIMDs, so
    a workgroup of more waves than all SIMDs hold is allowed 0 times, and so is one of too much LDS or too many threads. The
    rules are those of [base].

    Raises ValueError for no warps, and for less than no registers or bytes.
    """
    if num_warps < 1 or min(vgprs, agprs, sgprs, lds_bytes) < 0:
        registers = f"{vgprs}, {agprs} and {sgprs} registers"
        raise ValueError(f"limits: {num_warps} warps, {registers}, {lds_bytes} bytes")
    found = {
        name: simd_waves * cu.simds // num_warps
        for name, simd_waves in waves(vgprs, agprs, sgprs, cu).items()
    }
    if num_warps * cu.wave_size > THREADS_PER_GROUP:
        found["waves"] = 0
    if lds_bytes:
        lds = _up(lds_bytes, cu.lds_unit)
        found["lds"] = 0 if lds_bytes > cu.lds_per_group else cu.lds // lds
    if num_warps > 1:  # a workgroup of one wave needs no barrier
        found["groups"] = cu.groups
    return found


def resident(vgprs, agprs, sgprs, lds_bytes, num_warps, cu):
    """Workgroups that one compute unit holds at once: the least of `limits`, 0 where not even one fits. Takes and raises what
    that does.
    """
    return min(limits(vgprs, agprs, sgprs, lds_bytes, num_warps, cu).values())


def _up(value, unit):
    return -(-value // unit) * unit
