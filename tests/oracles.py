"""What the makers' own code says of occupancy: NVIDIA's header, and LLVM, which Triton's wheel brings both.

Also what no code says, typed from the makers' tables. The rules under test are in `memtraffic.occupancy`.
"""

import os
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# ---- NVIDIA

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the products' datasheets:
# product, its SMs; threads, blocks, KiB of shared memory an SM; KiB a block
NVIDIA_TABLE = {
    "sm_75": ("T4", 40, 1024, 16, 64, 64),
    "sm_80": ("A100", 108, 2048, 32, 164, 163),
    "sm_86": ("A10", 72, 1536, 16, 100, 99),
    "sm_89": ("L4", 58, 1536, 24, 100, 99),
    "sm_90": ("H200", 132, 2048, 32, 228, 227),
    "sm_100": ("B200", 148, 2048, 32, 228, 227),
    "sm_120": ("RTX 5090", 170, 1536, 24, 100, 99),
}
# Likewise; the header would allow a thread one more, which no instruction can name.
REGISTERS_PER_THREAD = 255
NOT_GIVEN = 2**31 - 1  # INT_MAX, for a limit that does not apply

_PROGRAM = r"""
#include <climits>
#include <cstddef>
#include <cstdio>
#include "cuda_occupancy.h"

int main() {
  int major, minor, threads, regs, warps;
  long shared, block, dynamic;
  while (scanf("%d %d %d %ld %ld %d %d %ld", &major, &minor, &threads, &shared, &block, &regs, &warps, &dynamic) == 8) {
    cudaOccDeviceProp device;
    device.computeMajor = major;
    device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = threads;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 49152;
    device.sharedMemPerMultiprocessor = shared;
    device.numSms = 1;
    device.sharedMemPerBlockOptin = block;
    device.reservedSharedMemPerBlock = shared - block;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = regs;
    kernel.sharedSizeBytes = 0;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = dynamic;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult found;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&found, &device, &kernel, &state, warps * 32, dynamic);
    printf("%d %d %d %d %d %d\n", error, found.activeBlocksPerMultiprocessor, found.blockLimitRegs,
           found.blockLimitSharedMem, found.blockLimitWarps, found.blockLimitBlocks);
  }
}
"""


def no_header():
    """Why NVIDIA's header cannot be asked here, or None."""
    if not shutil.which("g++"):
        return "there is no g++ to compile NVIDIA's header with"
    if not _header().is_file():
        return "Triton's wheel has no cuda_occupancy.h"
    return None


def _header():
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/include/cuda_occupancy.h"


def build_header(folder):
    """Compiles the program that asks the header; returns its path."""
    source, program = folder / "occupancy.cpp", folder / "occupancy"
    source.write_text(_PROGRAM, encoding="utf-8")
    command = ["g++", "-w", f"-I{_header().parent}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def ask_header(program, points, shared_more=0):
    """What the header answers for points (target, registers, shared bytes, warps): (error, resident, limits) of each.

    It is given the sizes of NVIDIA_TABLE. shared_more: bytes of shared memory an SM, more than there.
    """
    lines = []
    for target, registers, shared_bytes, num_warps in points:
        *_, threads, _, shared, block = NVIDIA_TABLE[target]
        cc, sizes = (
            target.removeprefix("sm_"),
            (shared * 1024 + shared_more, block * 1024),
        )
        words = (cc[:-1], cc[-1], threads, *sizes, registers, num_warps, shared_bytes)
        lines.append(" ".join(map(str, words)))
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    answers = []
    for line in done.stdout.splitlines():
        error, resident, *limits = map(int, line.split())
        names = ("registers", "shared", "warps", "blocks")
        answers.append((error, resident, dict(zip(names, limits, strict=True))))
    assert len(answers) == len(points)
    return answers


# ---- AMD

# Product and its units, by AMD's white papers of CDNA 1 to 4 and data sheets, of RDNA the workgroup processors, half the
# compute units; bytes of a piece of LDS, by https://github.com/llvm/llvm-project/pull/208046 and .../219495; registers that
# the instructions of a wave can name, by LLVM's user guide: 256, and on CDNA as many accumulators
AMD_TABLE = {
    "gfx908": ("MI100", 120, 512, 512),
    "gfx90a": ("MI250X", 110, 512, 512),  # one of its two dies, which are two devices
    "gfx942": ("MI300X", 304, 512, 512),
    "gfx950": ("MI355X", 256, 1280, 512),
    "gfx1100": ("RX 7900 XTX", 96 // 2, 1024, 256),
    "gfx1201": ("RX 9070 XT", 64 // 2, 1024, 256),
}
SIMDS = 4  # of a compute unit of CDNA, of a workgroup processor of RDNA
# Where LLVM writes into a kernel's head how many pieces it is dealt. Not on gfx950, for which this LLVM counts in
# 2048 bytes by mistake (pull request 208046), nor on RDNA, where a number of 512 bytes stands for whole 1024 (219495).
LDS_PIECES = ("gfx908", "gfx90a", "gfx942")
LDS_STEPS = (1, 255, 256, 257, 511, 512, 513, 767, 768, 769, 1024, 1025, 1280, 1281)

_KERNEL = """target triple = "{triple}"
{array}
define amdgpu_kernel void @k(ptr addrspace(1) %p) #0 {{
  call void asm sideeffect "; use", "{clobbers}"()
  {store}
  ret void
}}
attributes #0 = {{ "amdgpu-flat-work-group-size"="{threads},{threads}" "target-cpu"="{target}" }}
"""


def ask_llvm(points):
    """What Triton's LLVM says of kernels made for points (target, VGPRs, AGPRs, SGPRs, LDS bytes, threads).

    Returns a dict with `kernels`, a list of (VGPRs, AGPRs, SGPRs, waves a SIMD, threads a wave); `most_lds`, by target, the
    bytes above which LLVM refuses a kernel; `pieces`, by target, in how many pieces it deals out each of LDS_STEPS.
    """
    with ThreadPoolExecutor() as pool:
        jobs = [(points[::2], True), (points[1::2], False)]
        first, second = pool.map(_ask_worker, jobs)
    found = first | {"kernels": [None] * len(points)}
    found["kernels"][::2] = first["kernels"]
    found["kernels"][1::2] = second["kernels"]
    return found


def _ask_worker(job):
    done = subprocess.run(
        [sys.executable, "-c", "import oracles; oracles._worker()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        input=pickle.dumps(job),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # LLVM warns there of each kernel
        check=True,
    )
    return pickle.loads(done.stdout)


def _worker():
    from triton._C.libtriton import llvm

    llvm.init_targets()
    points, whole = pickle.loads(sys.stdin.buffer.read())
    found = {"kernels": [_compiled(*point) for point in points]}
    if whole:
        found["most_lds"] = {target: _most_lds(target) for target in AMD_TABLE}
        found["pieces"] = {
            target: [_pieces(target, size) for size in LDS_STEPS]
            for target in LDS_PIECES
        }
    sys.stdout.buffer.write(pickle.dumps(found))


def _assembly(target, vgprs, agprs, sgprs, lds, threads, triple="amdgcn-amd-amdhsa"):
    from triton._C.libtriton import llvm

    clobbers = [
        f"~{{{file}{count - 1}}}"
        for file, count in (("v", vgprs), ("a", agprs), ("s", sgprs))
        if count
    ]
    text = _KERNEL.format(
        triple=triple,
        clobbers=",".join(clobbers),
        array=f"@lds = internal addrspace(3) global [{lds} x i8] undef" if lds else "",
        store="store volatile i8 1, ptr addrspace(3) @lds" if lds else "",
        threads=threads,
        target=target,
    )
    return llvm.translate_to_asm(text, triple, target, "", [], False, False)


def _compiled(target, *sizes):
    text = _assembly(target, *sizes)
    said = {name: int(value) for name, value in re.findall(r"; (\w+): (\d+)", text)}
    [wave] = re.findall(r"\.wavefront_size: +(\d+)", text)
    names = ("NumVgprs", "NumAgprs", "TotalNumSgprs", "Occupancy")
    return (*(said.get(name, 0) for name in names), int(wave))


def _pieces(target, lds):
    """In how many pieces a kernel's LDS is dealt out: LDS_SIZE of COMPUTE_PGM_RSRC2, written out where no HSA fills it in."""
    text = _assembly(target, 0, 0, 0, lds, 64, triple="amdgcn--")
    [rsrc2] = re.findall(r"\.long\s+47180\n\s+\.long\s+(\d+)", text)
    return int(rsrc2) >> 15 & 0x1FF


def _most_lds(target):
    """The bytes of LDS that LLVM names in its refusal of far too many, which ends the process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        _assembly(target, 0, 0, 0, 2**20, 64)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return int(re.search(r"exceeds limit \((\d+)\)", said)[1])
