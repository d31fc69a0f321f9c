"""What a kind of GPU offers: one table for all vendors.

Sources of the constants, by the tag that stands beside each:

- [guide] NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability",
  https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
- [calculator] `cuda_occupancy.h`, which NVIDIA publishes with CUDA; Triton's wheel contains it
- [base] LLVM, https://github.com/llvm/llvm-project,
  `llvm/lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp`; [td] `AMDGPU.td` in the folder above it
- [llvm] LLVM, "User Guide for AMDGPU Backend", https://llvm.org/docs/AMDGPUUsage.html
- [mesa] Mesa, `src/amd/common/ac_gpu_info.c`
- [lines] ROCm Compute Profiler, "Vector L1 cache", for CDNA 1 and 2; AMD's white papers of CDNA 3
  and 4, and of RDNA
- [products] the datasheet of each GPU, whose address stands beside its bandwidth; NVIDIA's white
  papers of the Turing, A100, Ampere GA102, Ada, Hopper and Blackwell architectures; AMD's white
  papers of CDNA 1 to 4
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from memtraffic.errors import UnknownGpuError, unknown

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What one GPU offers. Sizes are in bytes, registers have 32 bits.

    vendor: what decides wherever vendors differ.
    target: the compiler's name for this kind of GPU, such as "sm_90".
    product, driver_name: the names that the datasheet and the driver give it; "" if unknown.
    num_sms: streaming multiprocessors; on CDNA, compute units; on RDNA, workgroup processors.
        Such a pair of compute units shares its LDS, and LLVM compiles for the pair by default.
    max_threads_per_program: the most threads of a thread block [guide] or a workgroup [base].
    shared_per_sm, shared_per_program, shared_granularity: shared memory (on AMD, LDS) of an SM, the
        most that one program may have, and the unit in which it is allocated.
    prefetches_to_shared_memory: whether a prefetched tile waits in shared memory, not in registers.
    sector_bytes: the least that a load or store fetches, and whole: by NVIDIA, a sector of a cache
        line [guide]; by AMD, a line of the vector cache [lines].
    l2_bytes: 0 if unknown. infinity_cache_bytes: AMD's cache between L2 and the memory; 0 for none.
    datasheet_bytes_per_s: bandwidth of the memory, 0.0 if unknown.
    """

    vendor: Literal["nvidia", "amd"]
    target: str
    product: str
    driver_name: str = ""
    num_sms: int
    warp_size: int
    max_threads_per_program: int = 1024
    shared_per_sm: int
    shared_per_program: int
    shared_granularity: int
    prefetches_to_shared_memory: bool
    sector_bytes: int
    l2_bytes: int = 0
    infinity_cache_bytes: int = 0
    datasheet_bytes_per_s: float = 0.0

    @property
    def backend(self) -> str:
        """Triton's name for the compiler."""
        return {"nvidia": "cuda", "amd": "hip"}[self.vendor]

    @property
    def architecture(self) -> int | str:
        """Triton's name for the target: 90 for sm_90."""
        return int(self.target[3:]) if self.vendor == "nvidia" else self.target

    @property
    def last_level_bytes(self) -> int:
        """The largest of the caches that all SMs share; 0 if unknown."""
        return max(self.l2_bytes, self.infinity_cache_bytes)


@dataclass(frozen=True, kw_only=True)
class NvidiaGpu(Gpu):
    """A GPU made by NVIDIA.

    register_granularity: the unit in which a warp's registers are allocated.
    subpartitions: those of an SM; a warp takes its registers from one of them.
    """

    vendor: Literal["nvidia", "amd"] = "nvidia"
    warp_size: int = 32  # [guide]
    sector_bytes: int = 32  # [guide]
    registers_per_sm: int = 65536  # [guide]
    max_registers_per_thread: int = 255  # [guide]
    register_granularity: int = 256  # [calculator]
    subpartitions: int = 4  # [calculator]
    max_threads_per_sm: int
    max_blocks_per_sm: int


@dataclass(frozen=True, kw_only=True)
class AmdGpu(Gpu):
    """A GPU made by AMD. Registers are those of one lane on one SIMD.

    simds: those of a compute unit, or on RDNA of a workgroup processor. The waves of a workgroup
        are spread over them.
    vgprs, vgpr_granule: vector registers, and the unit in which they are allocated.
    agprs: accumulation registers in a file of their own; 0 where they share that of the vector
        registers.
    max_addressable_vgprs: the most vector registers that the instructions of one wave can name,
        accumulation registers included.
    sgpr_waves: waves per SIMD by the scalar registers that a wave uses, as pairs (at most so many
        registers, waves); empty where scalar registers are never the limit.
    max_workgroups: workgroups of more than one wave; each of them needs a barrier.
    """

    vendor: Literal["nvidia", "amd"] = "amd"
    prefetches_to_shared_memory: bool = False
    sector_bytes: int = 128  # [lines]
    simds: int = 4  # [base]
    max_waves_per_simd: int  # [base]
    vgprs: int  # [base]
    vgpr_granule: int  # [base]
    agprs: int = 0  # [llvm]
    max_addressable_vgprs: int  # [base]
    sgpr_waves: tuple[tuple[int, int], ...] = ()  # [base]
    max_workgroups: int  # [base]


def nvidia_gpu(
    capability: int,
    product: str,
    num_sms: int,
    threads: int,
    blocks: int,
    shared: int,
    driver_name: str,
    datasheet: float,
) -> NvidiaGpu:
    """A GPU by its compute capability. threads, blocks, shared (bytes): the most per SM."""
    turing = capability < 80
    return NvidiaGpu(
        target=f"sm_{capability}",
        product=product,
        driver_name=driver_name,
        num_sms=num_sms,
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        shared_per_sm=shared,
        shared_per_program=shared - (0 if turing else KIB),  # reserved per block [calculator]
        shared_granularity=256 if turing else 128,  # [calculator]
        prefetches_to_shared_memory=not turing,  # cp.async [guide]
        datasheet_bytes_per_s=datasheet,
    )


_CDNA = functools.partial(
    AmdGpu,
    warp_size=64,  # [td]
    shared_per_sm=64 * KIB,  # [td]
    shared_per_program=64 * KIB,  # [td]
    shared_granularity=512,  # [base]
    max_waves_per_simd=8,
    vgprs=512,
    vgpr_granule=8,
    max_addressable_vgprs=512,
    sgpr_waves=((80, 10), (88, 9), (100, 8), (10**9, 7)),
    max_workgroups=16,
)
_RDNA = functools.partial(
    AmdGpu,
    warp_size=32,  # [td]
    shared_per_sm=128 * KIB,  # [td]
    shared_per_program=64 * KIB,  # [td]
    shared_granularity=1024,  # [mesa]
    max_waves_per_simd=16,
    vgprs=1536,
    vgpr_granule=24,
    max_addressable_vgprs=256,
    max_workgroups=32,
)

# Product, number of SMs, Infinity Cache and bandwidth [products]; threads, blocks and shared memory
# per SM [guide].
GPUS: tuple[Gpu, ...] = (
    # https://www.nvidia.com/en-us/data-center/tesla-t4/
    nvidia_gpu(75, "T4", 40, 1024, 16, 64 * KIB, "Tesla T4", 0.32e12),
    # https://www.nvidia.com/en-us/data-center/a100/
    nvidia_gpu(80, "A100", 108, 2048, 32, 164 * KIB, "NVIDIA A100-SXM4-80GB", 2.039e12),
    # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    nvidia_gpu(86, "A10", 72, 1536, 16, 100 * KIB, "NVIDIA A10", 0.6e12),
    # https://www.nvidia.com/en-us/data-center/l4/
    nvidia_gpu(89, "L4", 58, 1536, 24, 100 * KIB, "NVIDIA L4", 0.3e12),
    # https://www.nvidia.com/en-us/data-center/h200/
    nvidia_gpu(90, "H200", 132, 2048, 32, 228 * KIB, "NVIDIA H200", 4.8e12),
    # https://www.nvidia.com/en-us/data-center/h100/
    nvidia_gpu(90, "H100", 132, 2048, 32, 228 * KIB, "NVIDIA H100 80GB HBM3", 3.35e12),
    # https://www.nvidia.com/en-us/data-center/dgx-b200/
    nvidia_gpu(100, "B200", 148, 2048, 32, 228 * KIB, "NVIDIA B200", 8e12),
    # https://www.nvidia.com/en-us/geforce/graphics-cards/50-series/rtx-5090/
    nvidia_gpu(120, "RTX 5090", 170, 1536, 24, 100 * KIB, "NVIDIA GeForce RTX 5090", 1.792e12),
    # https://www.amd.com/en/products/accelerators/instinct/mi100.html
    _CDNA(
        target="gfx908", product="MI100", driver_name="AMD Instinct MI100", num_sms=120,
        datasheet_bytes_per_s=1.2288e12,
        max_waves_per_simd=10, vgprs=256, vgpr_granule=4, agprs=256, sector_bytes=64,
    ),
    # https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html
    # Half of it: its two dies are two devices.
    _CDNA(
        target="gfx90a", product="MI250X", driver_name="AMD Instinct MI250X", num_sms=110,
        datasheet_bytes_per_s=3.2768e12 / 2, sector_bytes=64,
    ),
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    _CDNA(
        target="gfx942", product="MI300X", driver_name="AMD Instinct MI300X", num_sms=304,
        datasheet_bytes_per_s=5.3e12, infinity_cache_bytes=256 * KIB**2,
    ),
    # https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html
    _CDNA(
        target="gfx950", product="MI355X", driver_name="AMD Instinct MI355X", num_sms=256,
        datasheet_bytes_per_s=8e12, infinity_cache_bytes=256 * KIB**2,
        shared_per_sm=160 * KIB, shared_per_program=160 * KIB, shared_granularity=1280,
    ),
    # https://www.amd.com/en/products/graphics/desktops/radeon/7000-series/amd-radeon-rx-7900xtx.html
    _RDNA(
        target="gfx1100", product="RX 7900 XTX", driver_name="AMD Radeon RX 7900 XTX", num_sms=48,
        datasheet_bytes_per_s=0.96e12, infinity_cache_bytes=96 * KIB**2,
    ),
    # https://www.amd.com/en/products/graphics/desktops/radeon/9000-series/amd-radeon-rx-9070xt.html
    _RDNA(
        target="gfx1201", product="RX 9070 XT", driver_name="AMD Radeon RX 9070 XT", num_sms=32,
        datasheet_bytes_per_s=0.64e12, infinity_cache_bytes=64 * KIB**2,
    ),
)  # fmt: skip

# The first GPU of each target.
TARGETS: dict[str, Gpu] = {}
for _gpu in GPUS:
    TARGETS.setdefault(_gpu.target, _gpu)

DEFAULT_GPU: Gpu = TARGETS["sm_90"]  # what launchers plan for where no GPU is here


def find_gpu(name: str | Gpu) -> Gpu:
    """The GPU of the table whose target or product is `name`, in upper or lower case.

    >>> find_gpu("sm_90").product, find_gpu("mi300x").target
    ('H200', 'gfx942')

    A GPU is returned as it is. Raises UnknownGpuError, which lists the known targets and products,
    for any other name.
    """
    if isinstance(name, Gpu):
        return name
    named = TARGETS | {gpu.product: gpu for gpu in GPUS}
    for known, gpu in named.items():
        if known.lower() == str(name).lower():
            return gpu
    raise UnknownGpuError(unknown("GPU", name, named))


def find_gpus(names: str | Gpu | Iterable[str | Gpu]) -> list[Gpu]:
    """What `find_gpu` finds for one name or for several. Raises ValueError for none."""
    found = [find_gpu(it) for it in ([names] if isinstance(names, (str, Gpu)) else names)]
    if not found:
        raise ValueError("no GPU is named as a target")
    return found
