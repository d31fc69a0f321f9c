"""The folded cells of `book/chunks.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from memtraffic import device, resources
from memtraffic.compile import capture_launches
from memtraffic.gpus import NvidiaGpu
from memtraffic.kernels.softmax import chunks, tiled
from memtraffic.residency import resident_programs
from memtraffic.residency.resources import Resources
from memtraffic_book import (
    claim,
    exhibits,
    experiment,
    experiments,
    figures,
    glue,
    prove,
    tables,
    units,
)
from memtraffic_book.recording import speeds

WIDE = 2048, 4096, 6144, 8192, 8320, 12672, 16384, 24576, 32000, 32768  # multiples of 16 bytes
WAYS: dict[str, Callable[..., Tensor]] = {
    "one block": tiled.softmax,
    "converted once": exhibits.softmax_converting_once,
    "kept": chunks.softmax,
}


def draw_cliff() -> None:
    """Draws the speed over the width of a row, in one block and in chunks."""
    share = speeds(experiment("map_bfloat16"))[["tiled", "chunks"]].loc[list(WIDE)]
    low = share.min()
    block, pieces = (units.format_share(low[name]) for name in ("tiled", "chunks"))
    lines = {"chunks": 100 * share["chunks"], "one block": 100 * share["tiled"]}
    title = f"One block falls to {block} of the speed of a copy, chunks never below {pieces}."
    figures.plot_lines(
        lines,
        "columns of bfloat16",
        "% of the speed of a copy",
        title=title,
        ticks=[2**k for k in range(11, 16)],
    )
    lost = 1 - share["tiled"][8320] / share["tiled"][8192]
    claim(
        f"With 128 columns more than 8192, one block is {units.format_percent(lost)} slower "
        "(more than a tenth needed).",
        lost > 0.1,
    )
    claim(
        f"At multiples of 8 columns from 2048 to 32768, in bfloat16, one block falls to {block} of "
        f"the speed of a copy, and chunks fall to {pieces}.",
        low["chunks"] > low["tiled"],
    )
    glue("tiled_8192", units.format_share(share["tiled"][8192]))
    glue("tiled_8320", units.format_share(share["tiled"][8320]))
    glue("chunks_8320", units.format_share(share["chunks"][8320]))


def compiled(fn: Callable[..., Tensor], n: int) -> Resources:
    """The kernel of a softmax of bfloat16, compiled for an H200."""
    x = torch.empty(8, n, dtype=torch.bfloat16, device=device.default())
    [kernel] = resources(fn, x, target="sm_90")
    return kernel


def count_programs() -> None:
    """Claims how many programs of one block an SM holds, and quotes the bytes of their rows."""
    held = {n: resident_programs(compiled(tiled.softmax, n)) for n in (8192, 8320)}
    claim(
        f"At 8320 columns {held[8320]} programs of tiled fit an SM (fewer than half of the "
        f"{held[8192]} at 8192).",
        2 * held[8320] < held[8192],
        of_compiler=True,
    )
    glue("tiled_programs", str(held[8320]))
    for n, programs in held.items():
        glue(f"held_{n}", f"{programs * n * 2 / 1e3:.0f} kB")


def compare_ways() -> None:
    """Shows registers, programs and speed of one block and of chunks, kept and converted."""
    ways, once = experiments("map_bfloat16", "chunks_converted")
    share = speeds(ways)
    speed = {
        "one block": share["tiled"],
        "converted once": speeds(once)["converted once"],
        "kept": share["chunks"],
    }
    kernels = {(n, way): compiled(fn, n) for n in (8320, 12672, 16384) for way, fn in WAYS.items()}
    programs = {key: resident_programs(kernel) for key, kernel in kernels.items()}
    tables.show(
        kernels,
        columns_and_way=lambda key: f"{key[0]}, {key[1]}",
        registers=lambda key: kernels[key].registers,
        programs=lambda key: programs[key],
        bytes_of_rows=lambda key: f"{programs[key] * key[0] * 2 / 1e3:.0f} kB",
        speed_of_a_copy=lambda key: units.format_share(speed[key[1]][key[0]]),
    )
    one, converted, kept = (programs[8320, way] for way in WAYS)
    claim(
        f"At 8320 columns {one} programs with one block fit an SM, {converted} in chunks that are "
        f"converted once, and {kept} in chunks that are kept.",
        one < converted < kept,
        of_compiler=True,
    )
    spilled = sum(kernel.spill_bytes for kernel in kernels.values())
    claim(f"The {len(kernels)} kernels spill {spilled} bytes.", spilled == 0)
    glue("many", str(kept))
    for name, way in (("warps_one", "one block"), ("warps_many", "kept")):
        glue(name, str(programs[8320, way] * kernels[8320, way].num_warps))


def compare_widest() -> None:
    """Claims how fast rows of 32768 columns are, and how far float32 falls."""
    wide = speeds(experiment("map_bfloat16")).loc[32768]
    one, loop, ours = (units.format_share(wide[it]) for it in ("tiled", "persistent", "chunks"))
    claim(
        f"At 32768 columns of bfloat16 one block reaches {one} of the speed of a copy, a "
        f"persistent loop {loop}, and chunks {ours}.",
        wide["chunks"] > max(wide["tiled"], wide["persistent"]),
    )
    single = speeds(experiment("map_float32")).loc[list(WIDE)]
    block, pieces = (units.format_share(single[name].min()) for name in ("tiled", "chunks"))
    claim(
        f"At the same widths of float32, one block falls to {block}, and chunks fall to {pieces}.",
        single["tiled"].min() < single["chunks"].min(),
    )
    glue("block_wide", one)
    glue("chunks_wide", ours)
    glue("block_float32", block)


def check_wider_row(n: int) -> None:
    """Claims that a row of n float32 numbers leaves registers free on an SM. Raises if not."""
    registers = NvidiaGpu.registers_per_sm
    claim(f"A row of {n:,} float32 numbers leaves some of {registers:,} registers.", n < registers)


# ---- what the answers are examined for


def softened(x: Tensor) -> Tensor:
    """The softmax with a temperature of 2."""
    return torch.softmax(x / 2, dim=1)


def centred(x: Tensor) -> Tensor:
    """Each row less its mean."""
    return x - x.mean(dim=1, keepdim=True)


def is_the_rule(fn: Callable[[int], Any]) -> bool:
    """Whether `fn` gives the fewest warps whose threads hold at most 64 numbers of a row."""
    wanted = {1: 1, 2048: 1, 2049: 2, 8192: 4, 8320: 8, 16384: 8, 32768: 16}
    found = {n: fn(n) for n in wanted}
    if found != wanted:
        raise AssertionError(f"it gives {found}, not {wanted}")
    return True


def in_two_blocks(fn: Callable[[Tensor], Tensor]) -> bool:
    """Judges a softmax whose program has fewer elements than the next power of two."""
    prove.exam(fn, widths=(2, 3, 128, 129, 781, 5000))
    [launch] = capture_launches(fn, torch.zeros(1, 8320, device=device.default()))
    elements = sum(size for size in launch.constants.values() if isinstance(size, int))
    if not 8320 <= elements < triton.next_power_of_2(8320):
        raise AssertionError(f"its blocks have {elements} elements at 8320 columns")
    return True
