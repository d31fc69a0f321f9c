"""The folded cells of `book/chunks.ipynb`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memtraffic import device, resources
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import chunks, tiled
from memtraffic.residency import resident_programs
from memtraffic.residency.resources import Resources
from memtraffic_book import claim, experiments, figures, glue, prove, tables, units
from memtraffic_book.recording import speeds

FIRST = (5, 2.5)  # what answers the first exercise
WIDE = [2048, 4096, 6144, 8192, 8320, 12672, 16384, 24576, 32000, 32768]  # multiples of 16 bytes
BLOCK, OWN, FORGET = "one block", "your chunks", "chunks, forget"
WAYS: dict[str, Callable[..., Tensor]]  # the page gives its own
WAYS = {BLOCK: tiled.softmax, OWN: chunks.softmax, FORGET: chunks.softmax}
HALF = "lambda x: torch.softmax(x / 2, dim=1)"
SINK = "lambda x: x.softmax(1) / (1 + x.softmax(1).amax(1, True) * torch.exp(-x.amax(1, True)))"


def draw_cliff() -> None:
    """Draws the speed over the width of a row, in one block and in chunks."""
    half, single = (speeds(it).loc[WIDE] for it in experiments("map_bfloat16", "map_float32"))
    block, pieces = (units.format_share(half[name].min()) for name in ("tiled", "chunks"))
    figures.plot_lines(
        {"chunks": 100 * half["chunks"], "one block": 100 * half["tiled"]},
        "columns of bfloat16",
        "% of the speed of a copy",
        title=f"One block falls to {block} of the speed of a copy, chunks never below {pieces}.",
        ticks=[2**k for k in range(11, 16)],
    )
    lost = 1 - half["tiled"][8320] / half["tiled"][8192]
    claim(
        f"With 128 columns more than 8192, one block is {units.format_percent(lost)} slower; over "
        f"all widths it falls to {block} of the speed of a copy, and chunks fall to {pieces}.",
        lost > 0.1 and half["chunks"].min() > half["tiled"].min(),
    )
    for name, n in (("tiled", 8192), ("tiled", 8320), ("chunks", 8320)):
        glue(f"{name}_{n}", units.format_share(half[name][n]))
    glue("chunks_low", pieces)
    glue("block_float32", units.format_share(single["tiled"].min()))


def compiled(fn: Callable[..., Tensor], n: int) -> Resources:
    """The kernel of a softmax of bfloat16, compiled for an H200."""
    x = torch.empty(8, n, dtype=torch.bfloat16, device=device.default())
    if fn not in WAYS.values():
        return prove.compiled_answer(fn, x, find_gpu("H200"))
    [kernel] = resources(fn, x, target="sm_90")
    return kernel


def compare_ways(own: Callable[..., Tensor]) -> None:
    """Shows registers, programs and speed of one block and of chunks. own: the page's function."""
    speed = speeds(*experiments("map_bfloat16")).rename(columns={"tiled": BLOCK, "chunks": FORGET})
    ways = WAYS | {OWN: own}
    kernels = {(n, way): compiled(fn, n) for n in (8320, 16384) for way, fn in ways.items()}
    programs = {key: resident_programs(kernel) for key, kernel in kernels.items()}
    tables.show(
        kernels,
        columns=lambda key: key[0],
        a_row_in=lambda key: key[1],
        warps=lambda key: kernels[key].num_warps,
        registers_per_lane=lambda key: kernels[key].registers,
        programs_per_SM=lambda key: programs[key],
        their_rows=lambda key: f"{programs[key] * key[0] * 2 / 1e3:.0f} kB",
        speed_of_a_copy=lambda key: units.format_share(speed.loc[key]) if key[1] in speed else "–",
    )
    one, mine, many = (programs[8320, way] for way in WAYS)
    spilled = sum(kernel.spill_bytes for kernel in kernels.values())
    claim(
        f"At 8320 columns an SM holds {many} programs in chunks and {one} with one block, and the "
        f"{len(kernels)} kernels spill {spilled} bytes.",
        many > one and spilled == 0,
        of_compiler=True,
    )
    for name, value in {"tiled_programs": one, "own": mine, "many": many}.items():
        glue(name, str(value))
    glue("block_warps", str(kernels[8320, BLOCK].num_warps))
    glue("block_registers", str(kernels[8320, BLOCK].registers))


def examine(reference: str) -> Callable[[Callable[[Tensor], Tensor]], bool]:
    """Examines a function that reads and writes each number once, as `prove.exam` does."""
    return lambda fn: prove.exam(fn, op=reference)
