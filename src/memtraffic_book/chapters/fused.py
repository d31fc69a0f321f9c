"""The folded cells of `book/fused.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memtraffic import device, formula, resources
from memtraffic.gpus import NvidiaGpu, find_gpu
from memtraffic.kernels.softmax import fused, naive
from memtraffic_book import claim, experiment, experiments, figures, glue, prove, units
from memtraffic_book.recording import speeds

FIRST = (16, 8, 2)  # what answers the first exercise
M, N, ITEMSIZE = 4096, 16384, 4  # the running example, in float32
KEPT = "torch.compile, keeping the row"  # how the page calls `compile(persistent reduction)`
NAMES = {"compile(naive)": "torch.compile", "compile(persistent reduction)": KEPT}
READ = ("fused", "torch.compile", KEPT, "torch.softmax"), (1, 2, 1, 3)  # how many times each reads
SMALL = 1024  # columns, where a kernel looks faster than a copy

# What the exercises compute.
HALF = "lambda x: torch.softmax(x / 2, dim=1)"
CENTER = "lambda x: x - x.mean(dim=1, keepdim=True)"


def draw_machine() -> None:
    """Draws the machine, and on it what hardware counters saw the kernel move on each way."""
    counted, roofs = experiments("fused_counters", "roof")
    [seen] = counted.to_dict("records")
    here = device.this_gpu() if device.HAS_GPU else None
    gpu: Any = here if isinstance(here, NvidiaGpu) else find_gpu("H200")  # whose counters are shown
    sent = units.format_bytes(32 * seen["l2_write_sectors"])  # a sector has 32 bytes
    path = {
        "dram_to_l2": units.format_bytes(seen["dram_read_bytes"]),
        "l2_to_l1": units.format_bytes(seen["l1_l2_read_bytes"]),
        "l1_to_registers": units.format_bytes(seen["instruction_read_bytes"]),
        "registers_to_l1": sent,
        "l1_to_l2": sent,
        "l2_to_dram": units.format_bytes(seen["dram_write_bytes"]),
    }
    l2_size = units.format_bytes(roofs["l2_mib"][0] * 2**20)
    title = "In one kernel, each number comes up to the registers once, and goes down once."
    figures.machine(gpu, path, l2_size, title)


def count_exchanges() -> None:
    """Claims how many exchanges and barriers the machine code of two reductions has."""
    row = torch.empty(1, N, device=device.default())
    [compiled] = resources(fused.softmax, row, target="sm_90")
    found = {
        kind: sum(n for name, n in compiled.instructions.items() if name.split(".")[0] == kind)
        for kind in ("SHFL", "BAR")
    }
    claim(
        f"The code for sm_90 has {found['SHFL']} exchanges, 10 for each of the 2 reductions; "
        f"{found['BAR']} barriers, 2 for each and 1 between them; and {compiled.shared_bytes} "
        "bytes of shared memory.",
        found == {"SHFL": 2 * 10, "BAR": 2 * 2 + 1},
        of_compiler=True,
    )


def compare_with_bytes() -> None:
    """Splits the gain over the five lines into fewer bytes, and into moving them faster."""
    us = experiment("fused_race").set_index("impl")["us"]
    before, after = (
        ITEMSIZE * float(sum(formula(fn).elements(M, N))) for fn in (naive.softmax, fused.softmax)
    )
    found, fewer = us["naive"] / us["fused"], before / after
    whole, part, rest = map(units.format_ratio, (found, fewer, found / fewer))
    claim(
        f"The kernel is {whole} as fast as the five lines: {part} from fewer bytes, times {rest} "
        "from moving them faster.",
        found > 2.4,
    )
    for name in us.index:
        glue(name, units.format_us(us[name]))
    glue("all_bytes", units.format_bytes(before))
    glue("least_bytes", units.format_bytes(after))
    glue("as_slow", units.format_us(us["naive"] / fewer))
    glue("speedup", f"{found:.1f} times")
    glue("faster", f"{found / fewer:.1f} times")
    glue("share", units.format_share(us["copy"] / us["fused"]))


def draw_widths() -> None:
    """Draws the speed of the library and of the compiler over the width, and what they read."""
    swept, *read = experiments(
        *("fused_widths", "fused_counters", "compiled_counters"),
        *("persistent_reduction_counters", "torch_softmax_counters"),
    )
    swept, (names, times) = swept.replace(NAMES), READ
    speed = speeds(swept)
    slow = speed["torch.softmax"]
    low, where = units.format_share(slow.min()), slow.idxmin()
    title = f"At {where} columns torch.softmax falls to {low} of the speed of a copy."
    lines, ticks = {name: 100 * speed[name] for name in names}, [256, 2048, 8192, 32768]
    figures.plot_lines(lines, "columns", "% of the speed of a copy", title=title, ticks=ticks)
    asked = [round(it["instruction_read_bytes"].sum() / (M * N * ITEMSIZE), 2) for it in read]
    listed = ", ".join(f"{it:.2f}x ({name})" for name, it in zip(names, asked, strict=True))
    claim(f"The loads ask for the matrix of {M} x {N} numbers {listed}.", asked == [*times])
    at = swept[swept["n"] == SMALL].set_index("impl")
    glue("small", units.format_us(at["us"][KEPT]))
    for name, column in (("copied", "us"), ("copied_low", "us_p20"), ("copied_high", "us_p80")):
        glue(name, units.format_us(at[column]["copy"]))
    glue("library", low)
    for n in (8192, 32768):
        glue(f"ours_{n}", units.format_share(speed["fused"][n]))
        glue(f"kept_{n}", units.format_share(speed[KEPT][n]))


# ---- what the answers are examined for


def examine(op: str) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of a matrix whose width is a power of two."""
    return lambda fn: prove.exam(fn, op=op, widths=(1, 2, 64, 1024))
