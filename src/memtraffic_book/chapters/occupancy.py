"""The folded cells of `book/occupancy.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from memtraffic import residency
from memtraffic.gpus import NvidiaGpu, find_gpu
from memtraffic.residency import nvidia
from memtraffic.residency.resources import round_up
from memtraffic_book import (
    claim,
    experiment,
    figures,
    glue,
    lab_notes,
    measurements,
    prove,
    tables,
)
from memtraffic_book.units import format_share as percent

H200 = cast(NvidiaGpu, find_gpu("H200"))
SLOTS = H200.max_threads_per_sm // H200.warp_size  # for warps, on an SM
TRIED = "Other numbers of warps, and limits on registers"


def compare_warps() -> None:
    """Shows the speed of the persistent kernel by the warps of its one program per SM."""
    warps = experiment("occupancy_warps").set_index("num_warps", drop=False)
    share = warps["copy_us"] / warps["us"]
    tables.show(
        warps,
        warps_of_the_program=lambda row: row["num_warps"],
        slots_filled=lambda row: f"{row['num_warps']} of {SLOTS}",
        speed=lambda row: percent(share[row["num_warps"]]),
    )
    claim(
        f"With 8 warps per SM the kernel reaches {percent(share[8])} of a copy's speed, and with "
        f"32 warps {percent(share[32])} (at most 10 % apart).",
        abs(share[32] / share[8] - 1) < 0.1,
    )
    glue("few", percent(share[8]))
    glue("many", percent(share[32]))
    glue("tried", lab_notes.find(TRIED)["result"])


def draw_packing(
    registers: int, shared_bytes: int, num_warps: int, by_hand: tuple[int, ...]
) -> None:
    """Draws an SM that is packed with a program, and claims that the page found its limits.

    registers: of a thread. by_hand: programs by registers, shared memory, warp and block slots.
    """
    limits = nvidia.programs_by_limit(registers, shared_bytes, num_warps, H200)
    fit = min(limits.values())
    of_warp = round_up(registers * H200.warp_size, H200.register_granularity)
    reserved = H200.shared_per_sm - H200.shared_per_program
    shared = round_up(shared_bytes + reserved, H200.shared_granularity)
    program = {
        "registers": (of_warp * num_warps, H200.registers_per_sm),
        "shared": (shared, H200.shared_per_sm),
        "warps": (num_warps, SLOTS),
        "blocks": (1, H200.max_blocks_per_sm),
    }
    title = f"One SM holds {fit} programs, because its shared memory has no room for another."
    figures.sm_packing(limits, program, title=title)
    claim(
        f"The rules of the package allow {fit} programs, with {fit * num_warps} of {SLOTS} warps.",
        tuple(limits.values()) == by_hand,
    )
    fits = {
        more: min(nvidia.programs_by_limit(more, shared_bytes, num_warps, H200).values())
        for more in range(registers, 256)
    }
    last = max(more for more, programs in fits.items() if programs == fit)
    claim(
        f"With up to {last} registers per thread {fit} programs fit, and with {last + 1} only "
        f"{fits[last + 1]}.",
        all(fits[more] == fit for more in range(registers, last + 1)),
    )
    glue("fit", str(fit))
    glue("last", str(last))


def compare_with_tutorial() -> None:
    """Claims how often the tutorial's formula finds more programs than the smallest limit."""
    kernels = measurements.compile_for_targets(["sm_90"], [2**k for k in range(8, 16)]).values()
    many = 0
    for kernel in kernels:
        by_registers = H200.registers_per_sm // (kernel.registers * 32 * kernel.num_warps)
        by_shared = H200.shared_per_program // max(1, kernel.shared_bytes)
        many += min(by_registers, by_shared) > residency.resident_programs(kernel)
    claim(
        f"At {many} of {len(kernels)} widths the tutorial's formula would start more programs than "
        "the smallest limit allows.",
        many > 0,
    )


def compare_programs() -> None:
    """Claims how the speed at 4096 columns depends on the number of programs per SM."""
    timed = experiment("occupancy_programs")
    timed = timed.set_index(timed["programs"] / H200.num_sms)
    speed = timed["copy_us"] / timed["us"]
    inside = timed[2.0:6.0]["us"]
    rest = abs(inside / inside.iloc[0] - 1).max()
    tables.show(
        [1.0, 2.0, 3.0, 6.0],
        programs_per_SM=lambda programs: f"{programs:.0f}",
        slots_filled=lambda programs: f"{4 * programs:.0f} of {SLOTS}",
        speed=lambda programs: percent(speed[programs]),
    )
    claim(
        f"With 2 programs per SM it is {speed[2.0] / speed[1.0]:.2f}x as fast as with 1 (over "
        f"1.05x), and from 2 to 6 the time changes by at most {100 * rest:.1f} % (under 5 %).",
        speed[2.0] > 1.05 * speed[1.0] and rest < 0.05,
    )
    glue("alone", percent(speed[1.0]))
    glue("double", percent(speed[2.0]))


# ---- what the answers are examined for


def holds(programs: int) -> Callable[[Any], bool]:
    """A judge of copies of which so many programs fit an SM of an H200 at 32768 columns."""

    def judge(fn: Callable[[Tensor], Tensor]) -> bool:
        prove.exam(fn, op=torch.clone)
        kernel = prove.compiled_answer(fn, (8, 32768), H200)
        fit = residency.resident_programs(kernel)
        uses = f"{kernel.num_warps} warps, {kernel.registers} registers per thread"
        assert fit == programs, f"{uses}: {fit} programs fit, not {programs}"
        return True

    return judge


def fills_the_slots(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` is a copy whose warps fill an SM of an H200 at 32768 columns."""
    prove.exam(fn, op=torch.clone)
    kernel = prove.compiled_answer(fn, (8, 32768), H200)
    warps = residency.resident_programs(kernel) * kernel.num_warps
    uses = f"{kernel.num_warps} warps, {kernel.registers} registers per thread"
    assert warps == SLOTS, f"{uses}: {warps} warps fit, not {SLOTS}"
    return True
