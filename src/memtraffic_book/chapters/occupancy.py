"""The folded cells of `book/occupancy.ipynb`, and the two rules of Triton's tutorial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from memtraffic import residency
from memtraffic.gpus import AmdGpu, Gpu, NvidiaGpu, find_gpu
from memtraffic.residency import amd, nvidia
from memtraffic.residency.resources import Resources
from memtraffic_book import claim, experiment, figures, glue, measurements, prove, tables
from memtraffic_book.units import format_share as percent

FIRST = 4  # what answers the first exercise
H200, MI300X = cast(NvidiaGpu, find_gpu("H200")), cast(AmdGpu, find_gpu("MI300X"))
SLOTS = 64  # for warps, on an SM of an H200
CDNA = ("gfx908", "gfx90a", "gfx942", "gfx950")
COPY, LOG_SOFTMAX = "lambda x: torch.clone(x)", "lambda x: torch.log_softmax(x, dim=1)"


def nvidia_branch(kernel: Resources, gpu: Any, num_regs: int) -> int:
    """How many programs fit one SM, as Triton's tutorial calculates it."""
    programs = num_regs // (kernel.registers * gpu.warp_size * kernel.num_warps)
    return min(programs, gpu.shared_per_sm // kernel.shared_bytes)


def hip_branch(kernel: Resources, gpu: Any, num_regs: int) -> int:
    """How many programs fit one compute unit, as Triton's tutorial calculates it for CDNA."""
    num_gprs = num_regs * 2
    max_num_waves = gpu.simds * gpu.max_waves_per_simd
    waves = min(num_gprs // gpu.warp_size // kernel.registers, max_num_waves)
    programs = waves // kernel.num_warps
    return min(programs, gpu.shared_per_sm // kernel.shared_bytes)


def draw_packing(
    registers: int, shared_bytes: int, num_warps: int, by_hand: tuple[int, ...]
) -> None:
    """Draws an SM packed with a program, and claims that the page found its limits.

    registers: of a thread. by_hand: programs by registers, shared memory, warp slots and places.
    """
    kernel = shared_bytes, num_warps, H200
    limits = nvidia.programs_by_limit(registers, *kernel)
    fit = min(limits.values())
    title = f"One SM holds {fit} programs, because its shared memory has no room for another."
    figures.sm_packing(limits, title=title)
    claim(f"The rules of the package allow {fit} programs, too.", (*limits.values(),) == by_hand)
    fits = [min(nvidia.programs_by_limit(n, *kernel).values()) for n in range(256)]
    last = max(n for n in range(256) if fits[n] == fit)
    for name, value in {"fit": fit, "last": last, "lost": last + 1}.items():
        glue(name, str(value))


def compare_warps() -> None:
    """Claims how the speed of the persistent kernel depends on the warps of its programs."""
    timed = experiment("occupancy_warps").set_index("num_warps")
    few, many = (timed["copy_us"] / timed["us"])[[8, 32]]
    claim(
        f"With 8 warps per SM the kernel reaches {percent(few)} of a copy's speed, and with "
        f"32 warps {percent(many)}.",
        abs(many / few - 1) < 0.1,
    )
    glue("few", percent(few))
    glue("many", percent(many))


def compare_programs() -> None:
    """Shows how the speed at 4096 columns depends on the number of programs per SM."""
    timed = experiment("occupancy_programs")
    speed = (timed["copy_us"] / timed["us"]).set_axis(timed["programs"] // H200.num_sms)
    tables.show(
        [1, 2, 6],
        programs_per_SM=str,
        slots_filled=lambda programs: f"{4 * programs} of {SLOTS}",
        speed=lambda programs: percent(speed[programs]),
    )
    claim(
        f"A second program makes it {speed[2] / speed[1]:.2f}x as fast, and four more "
        f"{speed[6] / speed[2]:.2f}x.",
        speed[2] > 1.05 * speed[1] and speed[6] < 1.05 * speed[2],
    )
    glue("alone", percent(speed[1]))
    glue("double", percent(speed[2]))


def compare_rules() -> None:
    """Shows what fits four AMD GPUs beside the tutorial's rule, and claims what LLVM counts."""
    kernels = measurements.compile_for_targets(CDNA, (1024, 4096, 16384), (4, 8, 16))
    wide = {find_gpu(target).product: kernels[target, 16384, 4] for target in CDNA}
    tables.show(
        wide.items(),
        GPU=lambda row: row[0],
        programs_that_fit=lambda row: residency.resident_programs(row[1]),
        rule_for_65536=lambda row: hip_branch(row[1], find_gpu(row[0]), 65536),
        rule_for_all_VGPRs=lambda row: hip_branch(row[1], find_gpu(row[0]), all_vgprs(row[0])),
    )
    equal = [waves_of(it, find_gpu(it.target)) == it.llvm_waves for it in kernels.values()]
    claim(f"LLVM counts the same waves in {sum(equal)} of {len(equal)} kernels.", all(equal))


def all_vgprs(product: str) -> int:
    """The VGPRs of a compute unit."""
    gpu: Any = find_gpu(product)
    return int(gpu.vgprs * gpu.warp_size * gpu.simds)


def waves_of(kernel: Resources, gpu: Gpu) -> int:
    """The waves of a kernel on a SIMD, by the rules of the package."""
    found = amd.waves_by_limit(kernel.vgprs, kernel.agprs, kernel.sgprs, cast(AmdGpu, gpu))
    return min(found.values())


# ---- what the answers are examined for


def holds(warps: int, op: str, n: int, gpu: Gpu) -> Callable[[Callable[[Tensor], Tensor]], bool]:
    """A judge of an operation whose programs put so many warps on a processor at n columns."""

    def judge(fn: Callable[[Tensor], Tensor]) -> bool:
        prove.exam(fn, op=op)
        kernel = prove.compiled_answer(fn, torch.empty(8, n), gpu)
        fit = residency.resident_programs(kernel) * kernel.num_warps
        uses = f"{kernel.num_warps} warps, {kernel.registers} registers per thread"
        assert fit == warps, f"{uses}: {fit} warps fit, not {warps}"
        return True

    return judge


fills_h200, fills_mi300x = holds(SLOTS, COPY, 32768, H200), holds(32, LOG_SOFTMAX, 16384, MI300X)
