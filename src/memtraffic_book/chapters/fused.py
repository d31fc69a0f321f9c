"""The folded cells of `book/fused.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtraffic import count, device, formula, resources
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import fused
from memtraffic.residency.resources import Resources
from memtraffic_book import (
    claim,
    experiment,
    experiments,
    figures,
    glue,
    implementation,
    lab_notes,
    prove,
    tables,
    units,
)
from memtraffic_book.figures.hardware import Segment
from memtraffic_book.recording import speeds

M, N, ITEMSIZE = 4096, 16384, 4  # the running example, in float32
KEPT = "persistent reduction"  # how the page calls `compile(persistent reduction)`
FEWER_INSTRUCTIONS = "Compute `exp2(x * log2e"  # how the lab note begins that the page tells


def compare_rows(y: Tensor, x: Tensor) -> None:
    """Claims that the first four columns of y are the softmax of those of x."""
    error = (y[:, :4] - torch.softmax(x[:, :4], dim=1)).abs().max()
    claim("In 12 elements the kernel differs from torch.softmax by less than 1e-6.", error < 1e-6)
    glue("tried", lab_notes.find(FEWER_INSTRUCTIONS)["result"])


def show_who_holds_what(threads: int) -> Resources:
    """Shows which numbers of a row thread 0 holds. Returns what the compiler made for an H200.

    threads: those of a program.
    """
    row = torch.empty(1, N, device=device.default())
    [compiled] = resources(fused.softmax, row, target="sm_90")
    loads = compiled.load_bits[128]
    together = 128 // (8 * ITEMSIZE)
    print(f"Thread 0 holds {loads} times {together} neighbours:")
    for i in range(loads):
        print(f"  elements {i * threads * together} to {i * threads * together + together - 1}")
    claim(
        f"With {loads} loads of {together} numbers, {threads} threads hold the {N} numbers of a "
        "row.",
        loads * together * threads == N,
    )
    assert compiled.layout and compiled.layout.elements[-1] == together, compiled.layout
    glue("row_kib", f"{N * ITEMSIZE // 1024} KiB")
    return compiled


def count_exchanges(compiled: Resources, threads: int) -> None:
    """Claims how many shuffles and barriers the machine code of two reductions has."""
    shuffles = (32).bit_length() - 1 + (threads // 32).bit_length() - 1  # of a warp, of its results
    barriers = 2  # before the last warp reads, and before all threads do
    kinds = {"SHFL": 0, "BAR": 0}
    for name, times in compiled.instructions.items():
        if name.split(".")[0] in kinds:
            kinds[name.split(".")[0]] += times
    found = kinds["SHFL"], kinds["BAR"]
    claim(
        f"The code for sm_90 has {found[0]} shuffles: {shuffles} for each of the 2 reductions.",
        found[0] == 2 * shuffles,
    )
    claim(
        f"It has {found[1]} barriers: {barriers} for each of the 2 reductions, and 1 between them.",
        found[1] == 2 * barriers + 1,
        of_compiler=True,
    )


def draw_single_trip() -> None:
    """Draws what hardware counters saw the kernel move on each way."""
    [seen] = experiment("fused_counters").to_dict("records")
    sent = units.format_bytes(32 * seen["l2_write_sectors"])  # a sector has 32 bytes
    path: dict[Segment, str] = {
        "dram_to_l2": units.format_bytes(seen["dram_read_bytes"]),
        "l2_to_l1": units.format_bytes(seen["l1_l2_read_bytes"]),
        "l1_to_registers": units.format_bytes(seen["instruction_read_bytes"]),
        "registers_to_l1": sent,
        "l1_to_l2": sent,
        "l2_to_dram": units.format_bytes(seen["dram_write_bytes"]),
    }
    title = "In one kernel, each number comes up to the registers once, and goes down once."
    figures.machine(find_gpu("H200"), lit=path, title=title)


def compare_with_bytes() -> None:
    """Sets the times of a copy, the five lines and the kernel beside their bytes."""
    raced = experiment("fused_race")
    us = raced.set_index("impl")["us"]
    moved = {
        name: float(sum(formula(implementation(name)).elements(M, N))) * ITEMSIZE
        for name in us.index
    }
    tables.show(
        us.index,
        kernel=str,
        moves=lambda name: units.format_bytes(moved[name]),
        time=lambda name: units.format_us(us[name]),
        speed_of_a_copy=lambda name: units.format_share(us["copy"] / us[name]),
    )
    found, fewer = us["naive"] / us["fused"], moved["naive"] / moved["fused"]
    whole, part, rest = map(units.format_ratio, (found, fewer, found / fewer))
    claim(
        f"The kernel is {whole} as fast as the five lines (more than 2.40x needed): {part} from "
        f"fewer bytes, times {rest} from moving them faster.",
        found > 2.4,
    )
    share = us["copy"] / us["fused"]
    percent = units.format_percent(share)
    claim(
        f"The kernel reaches {percent} of the speed of a copy (at least 60 % needed).", share > 0.6
    )
    glue("speedup", f"{found:.1f} times")
    glue("faster", units.format_ratio(found / fewer))
    glue("share", units.format_share(share))


def compare_requests() -> None:
    """Shows what the kernels of the library and of the compiler read, beside ours."""
    frames = experiments(
        *("fused_counters", "compiled_counters", "persistent_reduction_counters"),
        "torch_softmax_counters",
    )
    names = "fused", "torch.compile", KEPT, "torch.softmax"
    read = {
        name: frame.filter(like="read_bytes").sum() / (M * N * ITEMSIZE)
        for name, frame in zip(names, frames, strict=True)
    }
    tables.show(
        names,
        kernel=str,
        requested=lambda name: units.format_ratio(read[name]["instruction_read_bytes"]),
        from_L2=lambda name: units.format_ratio(read[name]["l1_l2_read_bytes"]),
        from_DRAM=lambda name: units.format_ratio(read[name]["dram_read_bytes"]),
    )
    asked = [read[name]["instruction_read_bytes"] for name in names]
    listed = ", ".join(map(units.format_ratio, asked))
    claim(
        f"The loads of the 4 kernels request {listed} the matrix, in the order of the table.",
        [round(times, 2) for times in asked] == [1, 2, 1, 3],
    )


def draw_widths() -> None:
    """Draws the speed of the library and of the compiler over the width, and quotes it."""
    swept = experiment("fused_widths")
    swept = swept.replace({"compile(naive)": "torch.compile", f"compile({KEPT})": KEPT})
    order = ["fused", KEPT, "torch.compile", "torch.softmax"]
    speed = speeds(swept)[order]
    library = speed["torch.softmax"]
    title = (
        f"At {library.idxmin()} columns torch.softmax falls to "
        f"{units.format_share(library.min())} of the speed of a copy."
    )
    lines = {name: 100 * speed[name] for name in order}
    ticks = [256, 2048, 8192, 32768]
    figures.plot_lines(lines, "columns", "% of the speed of a copy", title=title, ticks=ticks)
    kept = speed["fused"] / speed[KEPT]
    near = kept[[2048, 4096, 8192]]
    apart = (near - 1).abs().max()
    claim(
        "From 2048 to 8192 columns the times of the persistent reduction and of fused differ by at "
        f"most {units.format_percent(apart)} (10 % allowed).",
        apart <= 0.1,
    )
    claim(
        f"At 32768 columns it takes {units.format_ratio(kept[32768])} the time of fused "
        "(more than 1.10x needed).",
        kept[32768] > 1.1,
    )
    glue("dropped", units.format_share(speed[KEPT][32768]))
    glue("ours_32768", units.format_share(speed["fused"][32768]))
    glue("library", units.format_share(library[8192]))
    glue("library_here", units.format_share(library[N]))
    glue("ours_256", units.format_share(speed["fused"][256]))
    glue("others_256", units.format_share(speed.drop(columns="fused").loc[256].max()))


# ---- what the answers are examined for


def half(x: Tensor) -> Tensor:
    """The softmax with a temperature of 2."""
    return torch.softmax(x / 2, dim=1)


def center(x: Tensor) -> Tensor:
    """Each row less its mean."""
    return x - x.mean(dim=1, keepdim=True)


def reads_row_0(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether each of four programs reads row 0 of a matrix 4 x 4."""
    trace = count(fn, torch.ones(4, 4, device=device.default()), trace=True).accesses
    read = [offset for access in trace if access.kind == "read" for offset in access.offsets]
    return sorted(read) == sorted([0, 1, 2, 3] * 4)


def examine(op: Callable[[Tensor], Tensor]) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of a matrix."""
    return lambda fn: prove.exam(fn, op=op, widths=(1, 2, 64, 1024))
