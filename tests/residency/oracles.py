"""What the vendors' own code says about occupancy: NVIDIA's header, and LLVM; Triton has both.

Beside it, from the vendors' tables, what no code says. The rules under test are in
`memtraffic.residency`, the sizes in `memtraffic.gpus`: nothing here is taken from either.
"""

import os
import re
import subprocess
from pathlib import Path

import triton
from triton._C.libtriton import llvm

from memtraffic.compile.worker import WORKER
from memtraffic.triton_adapter.launch import triton_version

# ---- NVIDIA

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and datasheets:
# the driver's name; TB/s (the B200's are of eight); target; SMs; threads, blocks and KiB of shared
# memory per SM; KiB per block
NVIDIA_TABLE = {
    "T4": ("Tesla T4", 0.32, "sm_75", 40, 1024, 16, 64, 64),
    "A100": ("NVIDIA A100-SXM4-80GB", 2.039, "sm_80", 108, 2048, 32, 164, 163),
    "A10": ("NVIDIA A10", 0.6, "sm_86", 72, 1536, 16, 100, 99),
    "L4": ("NVIDIA L4", 0.3, "sm_89", 58, 1536, 24, 100, 99),
    "H200": ("NVIDIA H200", 4.8, "sm_90", 132, 2048, 32, 228, 227),
    "H100": ("NVIDIA H100 80GB HBM3", 3.35, "sm_90", 132, 2048, 32, 228, 227),
    "B200": ("NVIDIA B200", 64 / 8, "sm_100", 148, 2048, 32, 228, 227),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", 1.792, "sm_120", 170, 1536, 24, 100, 99),
}
# From the guide, too. The header allows a thread one register more, which no instruction can name.
MAX_REGISTERS_PER_THREAD = 255
NOT_GIVEN = 2**31 - 1  # INT_MAX, for a limit that does not apply

_PROGRAM = r"""
#include <climits>
#include <cstddef>
#include <cstdio>
#include "cuda_occupancy.h"

int main() {
  cudaOccDeviceProp device;
  device.maxThreadsPerBlock = 1024;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerBlock = 49152;
  device.numSms = 1;
  cudaOccFuncAttributes kernel;
  kernel.maxThreadsPerBlock = 1024;
  kernel.sharedSizeBytes = 0;
  kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  kernel.numBlockBarriers = 1;
  cudaOccDeviceState state;
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult found;
  int warps;
  size_t &shared = device.sharedMemPerMultiprocessor, &block = device.sharedMemPerBlockOptin;
  size_t &dynamic = kernel.maxDynamicSharedSizeBytes;
  while (scanf("%d %d %d %zu %zu %d %d %zu", &device.computeMajor, &device.computeMinor,
               &device.maxThreadsPerMultiprocessor, &shared, &block, &kernel.numRegs, &warps,
               &dynamic) == 8) {
    device.reservedSharedMemPerBlock = shared - block;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(
        &found, &device, &kernel, &state, warps * 32, dynamic);
    printf("%d %d %d %d %d %d\n", error, found.activeBlocksPerMultiprocessor, found.blockLimitRegs,
           found.blockLimitSharedMem, found.blockLimitWarps, found.blockLimitBlocks);
  }
}
"""


def build_header(folder):
    """Compiles the program that asks the header; returns its path."""
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    source, program = folder / "occupancy.cpp", folder / "occupancy"
    source.write_text(_PROGRAM, encoding="utf-8")
    subprocess.run(["g++", "-w", f"-I{include}", source, "-o", program], check=True)
    return program


def ask_header(program, product, points, shared_more=0):
    """The header's answers to points (registers, shared bytes, warps): (error, resident, limits).

    It is given the sizes of NVIDIA_TABLE. shared_more: bytes of shared memory per SM, beyond those.
    """
    _, _, target, _, threads, _, shared, block = NVIDIA_TABLE[product]
    cc = target.removeprefix("sm_")
    sizes = (cc[:-1], cc[-1], threads, shared * 1024 + shared_more, block * 1024)
    lines = [" ".join(map(str, (*sizes, regs, warps, used))) for regs, used, warps in points]
    said = subprocess.check_output([program], input="\n".join(lines), text=True)
    answers = [[*map(int, line.split())] for line in said.splitlines()]
    names = ("registers", "shared", "warps", "blocks")
    return [(error, it, dict(zip(names, them, strict=True))) for error, it, *them in answers]


# ---- AMD

# the driver's name; TB/s; target; units: AMD's white papers of CDNA 1 to 4 and datasheets; of RDNA
#   the workgroup processors, which are half the compute units
# threads per wave; vector registers of a lane and the unit they are allocated in; waves per SIMD;
#   registers that the instructions of a wave can name, accumulation registers included: LLVM's user
#   guide
# KiB of LDS per unit and per workgroup: AMD's documents of each instruction set; the granularity,
#   in bytes: https://github.com/llvm/llvm-project/pull/208046 and .../219495
_RDNA = 32, 1536, 24, 16, 256, 128, 64, 1024
AMD_TABLE = {
    "MI100": ("AMD Instinct MI100", 1.2288, "gfx908", 120, 64, 256, 4, 10, 512, 64, 64, 512),
    # one of its two dies, which are two devices
    "MI250X": ("AMD Instinct MI250X", 3.2768 / 2, "gfx90a", 110, 64, 512, 8, 8, 512, 64, 64, 512),
    "MI300X": ("AMD Instinct MI300X", 5.3, "gfx942", 304, 64, 512, 8, 8, 512, 64, 64, 512),
    "MI355X": ("AMD Instinct MI355X", 8.0, "gfx950", 256, 64, 512, 8, 8, 512, 160, 160, 1280),
    "RX 7900 XTX": ("AMD Radeon RX 7900 XTX", 0.96, "gfx1100", 96 // 2, *_RDNA),
    "RX 9070 XT": ("AMD Radeon RX 9070 XT", 0.64, "gfx1201", 64 // 2, *_RDNA),
}
CDNA = ("gfx908", "gfx90a", "gfx942", "gfx950")
SIMDS = 4  # of a compute unit of CDNA, of a workgroup processor of RDNA

_KERNEL = """target triple = "{triple}"
{array}
define amdgpu_kernel void @k(ptr addrspace(1) %p) #0 {{
  call void asm sideeffect "; use", "{clobbers}"()
  {store}
  ret void
}}
attributes #0 = {{
  "amdgpu-flat-work-group-size"="{threads},{threads}" "target-cpu"="{target}"
}}
"""


def ask_llvm(points):
    """What Triton's LLVM says of kernels for points (target, VGPRs, AGPRs, SGPRs, LDS, threads).

    Returns a list of (VGPRs, AGPRs, SGPRs, waves per SIMD, threads per wave).
    """
    return WORKER.call([], _compile_all, points)


def _compile_all(points):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LLVM warns there of each kernel
    llvm.init_targets()
    return [*map(_compiled, points)]


def _compiled(point):
    target, vgprs, agprs, sgprs, lds, threads = point
    files, triple = (("v", vgprs), ("a", agprs), ("s", sgprs)), "amdgcn-amd-amdhsa"
    kernel = _KERNEL.format(
        triple=triple,
        clobbers=",".join(f"~{{{file}{count - 1}}}" for file, count in files if count),
        array=f"@lds = internal addrspace(3) global [{lds} x i8] undef" if lds else "",
        store="store volatile i8 1, ptr addrspace(3) @lds" if lds else "",
        threads=threads,
        target=target,
    )
    switches = [False] * (2 if triton_version() < (3, 8) else 3)
    text = llvm.translate_to_asm(kernel, triple, target, "", [], *switches)
    counts = {name: int(value) for name, value in re.findall(r"; (\w+): (\d+)", text)}
    [wave] = re.findall(r"\.wavefront_size: +(\d+)", text)
    names = ("NumVgprs", "NumAgprs", "TotalNumSgprs", "Occupancy")
    return (*(counts.get(name, 0) for name in names), int(wave))
