"""The folded cells of `book/cdna.ipynb`, and the two rules that it compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from memtraffic import device, residency, resources
from memtraffic.compile import capture_launches
from memtraffic.gpus import AmdGpu, find_gpu
from memtraffic.kernels.softmax import persistent, tiled
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.residency import amd
from memtraffic.residency.resources import Resources
from memtraffic_book import claim, figures, glue, measurements, prove, units
from memtraffic_book.chapters import naive

CDNA = ("gfx908", "gfx90a", "gfx942", "gfx950")
NUM_REGS = 65536  # of one processor, as the driver reports them
MI100, MI300X = (cast(AmdGpu, find_gpu(name)) for name in ("MI100", "MI300X"))
Kernels = Mapping[tuple[str, int, int | None], Resources]


def nvidia_branch(kernel: Resources, gpu: Any) -> int:
    """How many programs fit one SM, as Triton's tutorial calculates it."""
    programs = NUM_REGS // (kernel.registers * gpu.warp_size * kernel.num_warps)
    return min(programs, gpu.shared_per_sm // kernel.shared_bytes)


def hip_branch(kernel: Resources, gpu: Any) -> int:
    """How many programs fit one compute unit, as Triton's tutorial calculates it for CDNA."""
    num_gprs = NUM_REGS * 2
    max_num_waves = gpu.simds * gpu.max_waves_per_simd
    waves = min(num_gprs // gpu.warp_size // kernel.registers, max_num_waves)
    programs = waves // kernel.num_warps
    return min(programs, gpu.shared_per_sm // kernel.shared_bytes)


def compile_kernels() -> Kernels:
    """Compiles the persistent kernel for four GPUs, three widths and three numbers of warps.

    Draws what the tutorial's rule finds on an MI100 beside what fits.
    """
    kernels = measurements.compile_for_targets(CDNA, (1024, 4096, 16384), (4, 8, 16))
    wide = kernels["gfx908", 16384, 8]
    held, counted = residency.resident_programs(wide), hip_branch(wide, MI100)
    launched, fit = counted * MI100.num_sms, held * MI100.num_sms
    title = f"One MI100 processor has registers for {held} programs, and the rule finds {counted}."
    usable, found = "registers that a softmax can use", "registers that the rule counts"
    lengths = {usable: held / counted}
    figures.sm_packing({usable: held, found: counted}, title=title, lengths=lengths)
    claim(f"The rule launches {launched} programs on an MI100, and {fit} fit.", launched > fit)
    wrong = sum(
        hip_branch(kernel, MI100) > residency.resident_programs(kernel)
        for (target, *_), kernel in kernels.items()
        if target == "gfx908"
    )
    glue("launched", str(launched))
    glue("fit", str(fit))
    glue("wrong", f"{wrong} of 9")
    return kernels


def check_by_hand(programs: int, shared: int, apart: int) -> None:
    """Claims that the package finds the same as the page.

    programs: of 8 waves with 73 VGPRs. shared, apart: waves of 73 VGPRs and 18 AGPRs, where the two
    share a file, and where each has its own.
    """
    found = [amd.waves_by_limit(73, 18, 0, gpu)["vgprs"] for gpu in (MI300X, MI100)]
    rule = min(amd.programs_by_limit(73, 0, 0, 0, 8, MI300X).values())
    claim(
        f"The package finds the same: {rule} programs of 8 waves, {found[0]} waves on an MI300X "
        f"and {found[1]} on an MI100.",
        [rule, *found] == [programs, shared, apart],
    )


def _waves(kernel: Resources, unit: int) -> int:
    """The waves of a kernel on a SIMD, if registers come in such units."""
    gpu = replace(cast(AmdGpu, find_gpu(kernel.target)), vgpr_granule=unit)
    return min(amd.waves_by_limit(kernel.vgprs, kernel.agprs, kernel.sgprs, gpu).values())


def check_units(three: Resources, kernels: Kernels) -> None:
    """Claims that LLVM allocates registers in units of 8, or of 4 on an MI100.

    three: a kernel whose registers LLVM limited so that 3 waves fit.
    """
    eight, sixteen = _waves(three, 8), _waves(three, 16)
    claim(
        f"LLVM keeps more than 160 registers and counts {three.llvm_waves} waves: units of 8 hold "
        f"{eight}, units of 16 would hold {sixteen}.",
        three.vgprs > 160 and eight == three.llvm_waves > sixteen,
    )
    equal = [
        _waves(kernel, cast(AmdGpu, find_gpu(target)).vgpr_granule) == kernel.llvm_waves
        for (target, *_), kernel in kernels.items()
    ]
    claim(
        f"LLVM counts the same waves as our rule in {sum(equal)} of {len(equal)} kernels.",
        all(equal),
    )
    glue("waves", str(512 // 168))


def draw_packing(kernel: Resources) -> None:
    """Draws a compute unit of an MI300X whose LDS is full first. kernel: of `transpose`."""
    limits = residency.programs_by_limit(kernel)
    fit = min(limits.values())
    title = f"One compute unit holds {fit} programs, because its LDS has no room for another."
    figures.sm_packing(
        {name: limits[name] for name in ("waves", "lds", "groups")},
        {"lds": (kernel.shared_bytes, MI300X.shared_per_sm)},
        title=title,
    )
    waves = MI300X.simds * kernel.llvm_waves
    claim(
        f"LLVM counts {waves} waves per compute unit, and LDS leaves room for "
        f"{fit * kernel.num_warps}.",
        waves > fit * kernel.num_warps and limits["lds"] == fit,
    )


def compare_stages(one: Resources, two: Resources) -> None:
    """Claims what the launcher chooses, and what a second stage costs on an MI300X."""
    x = torch.empty(8, 16384, device=device.default())
    stages = [
        capture_launches(persistent.softmax, x, gpu=find_gpu(name))[0].constants["STAGES"]
        for name in ("H200", "MI300X")
    ]
    claim(
        f"Our launcher takes {stages[0]} stages on an H200, and {stages[1]} on an MI300X.",
        stages[0] > stages[1] == 1,
    )
    lds = two.shared_bytes - one.shared_bytes
    claim(f"The second stage takes {lds} bytes of LDS more.", lds == 0 and one.vgprs < two.vgprs)
    glue("datasheet", units.format_gb_per_s(MI300X.datasheet_bytes_per_s * 1e-9))


# ---- what the answers are examined for


def one_wave(x: Tensor) -> Tensor:
    """The tiled softmax with one row and one wave per program."""
    return tiled.softmax(x, rows=1, num_warps=1)


def is_broken(answer: tuple[int, int]) -> bool:
    """Whether the rule finds room on an MI100 for such a kernel, of which none fits.

    answer: registers per lane, and waves of a program.
    """
    registers, num_warps = answer
    assert 1 <= registers <= 256 and 1 <= num_warps <= 16, "at most 256 registers and 16 waves"
    [kernel] = resources(one_wave, SOFTMAX, (8, 1024), target="gfx908")
    kernel = replace(kernel, registers=registers, allocated_vgprs=registers)
    kernel = replace(kernel, num_warps=num_warps, shared_bytes=1)
    launched, fit = hip_branch(kernel, MI100), residency.resident_programs(kernel, MI100)
    assert launched >= 1 and fit == 0, f"the rule launches {launched}, and {fit} fit"
    return True


def counts_waves(fn: Callable[[int], int]) -> bool:
    """Whether `fn` says how many waves fit a SIMD of an MI300X, by registers per lane."""
    for n in range(1, 513):
        right = amd.waves_by_limit(n, 0, 0, MI300X)
        most = min(right["vgprs"], right["waves"])
        assert fn(n) == most, f"at {n} registers it gives {fn(n)}, and {most} waves fit"
    return True


def runs_on_both(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` is a softmax whose programs an MI300X can start, too."""
    for n in (781, 4096, 32768):
        for launch in capture_launches(fn, torch.empty(4, n, device=device.default()), gpu=MI300X):
            used = launch.options["num_warps"]
            assert used <= 16, f"at {n} columns it launches {used} warps, more than 16"
    return prove.exam(fn)


def fills_the_slots(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` is a log-softmax whose waves fill an MI300X at 16384 columns."""
    prove.exam(fn, op=naive.LOGS)
    kernel = prove.compiled_answer(fn, (8, 16384), MI300X)
    waves = residency.resident_programs(kernel) * kernel.num_warps
    uses = f"{kernel.num_warps} waves per program, {kernel.registers} registers per lane"
    assert waves == 32, f"{uses}: {waves} waves fit on a compute unit, not 32"
    return True
