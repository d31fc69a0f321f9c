"""The folded cells of `book/fused.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic import count, formula, resources, runtime
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
    prove,
    tables,
    units,
)
from memtraffic_book.figures.hardware import Segment

M, N, ITEMSIZE = 4096, 16384, 4  # the running example, in float32
KEPT = "persistent reduction"  # how the page calls `compile(persistent reduction)`


def draw_single_trip() -> pd.DataFrame:
    """Draws what the kernel moves on each way. Returns the race of the five lines and a copy."""
    raced, counted = experiments("fused_race", "fused_counters")
    us = raced.set_index("impl")["us"]
    [seen] = counted.to_dict("records")
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
    glue("more", units.format_bytes(seen["dram_read_bytes"] - M * N * ITEMSIZE))
    glue("naive_us", units.format_us(us["naive"]))
    glue("copy_us", units.format_us(us["copy"]))
    glue("gap", units.format_ratio(us["naive"] / us["copy"]))
    return raced


def check_offsets(x: Tensor, row: int, offsets: Tensor) -> None:
    """Claims that these are the offsets of the row's elements."""
    first, last = offsets[0].item(), offsets[-1].item()
    claim(
        f"The elements of row {row} of a 3 x 5 matrix have offsets {first} to {last}.",
        torch.equal(x.flatten()[offsets], x[row]),
    )


def trace_rows(copy_rows: Any, x: Tensor, y: Tensor) -> None:
    """Draws which program reads which element. y: the copy that was made of x, from NaN."""

    def copy(x: Tensor) -> Tensor:
        y = torch.full_like(x, float("nan"))
        copy_rows[(x.shape[0],)](y, x, x.stride(0), BLOCK=4)
        return y

    trace = count(copy, x, trace=True)
    title = "Each of the 3 programs reads 4 of the 5 elements of its row."
    figures.plot_access_map(trace.accesses, (len(x), x.shape[1]), "x_ptr", title)
    claim("The 3 programs read 12 of the 15 elements.", trace.read_elements == 12)
    claim("The other 3 elements of the result are still NaN.", y.isnan().sum() == 3)


def compare_rows(y: Tensor, x: Tensor) -> None:
    """Claims that the first four columns of y are the softmax of those of x."""
    error = (y[:, :4] - torch.softmax(x[:, :4], dim=1)).abs().max()
    claim("In 12 elements the kernel differs from torch.softmax by less than 1e-6.", error < 1e-6)


def show_who_holds_what(example: Tensor, threads: int) -> Resources:
    """Shows which numbers thread 0 holds. Returns what the compiler made for an H200.

    example: a matrix of N columns. threads: those of a program.
    """
    [compiled] = resources(fused.softmax, example, target="sm_90")
    loads = compiled.load_bits[128]
    together = 128 // (8 * ITEMSIZE)
    print(f"Thread 0 holds {loads} times {together} neighbours:")
    for i in range(loads):
        print(f"  elements {i * threads * together} to {i * threads * together + together - 1}")
    kib = N * ITEMSIZE // 1024
    claim(
        f"With {loads} loads of {together} numbers, {threads} threads hold the {N} numbers of a "
        "row.",
        loads * together * threads == N,
    )
    assert compiled.layout and compiled.layout.elements[-1] == together, compiled.layout
    glue("row_kib", f"{kib} KiB")
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


def compare_with_bytes(raced: pd.DataFrame) -> None:
    """Sets the times beside the bytes, and takes the gain apart. raced: of `draw_single_trip`."""
    us = raced.set_index("impl")["us"]
    moved = {
        name: sum(formula(implementation(name)).elements(M, N)) * ITEMSIZE for name in us.index
    }
    rate = {name: float(moved[name]) / us[name] / 1e3 for name in us.index}
    tables.show(
        raced,
        kernel=lambda row: row["impl"],
        moves=lambda row: units.format_bytes(float(moved[row["impl"]])),
        time=lambda row: units.format_us(row["us"]),
        spread=lambda row: (
            "± " + units.format_percent((row["us_p80"] - row["us_p20"]) / 2 / row["us"])
        ),
        bandwidth=lambda row: units.format_gb_per_s(rate[row["impl"]]),
    )
    bytes_ratio, faster = float(moved["naive"] / moved["fused"]), rate["fused"] / rate["naive"]
    found, share = us["naive"] / us["fused"], us["copy"] / us["fused"]
    whole, part, rest = map(units.format_ratio, (found, bytes_ratio, faster))
    claim(f"The kernel is {whole} as fast as the five lines (more than 2.40x needed).", found > 2.4)
    claim(
        f"That is {part} from fewer bytes times {rest} from more bandwidth.",
        abs(bytes_ratio * faster / found - 1) < 0.01,
    )
    percent = units.format_percent(share)
    claim(
        f"The kernel reaches {percent} of the speed of a copy (at least 60 % needed).", share > 0.6
    )
    glue("speedup", whole)
    glue("predicted", part)
    glue("share", percent)


def draw_widths() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Draws bandwidth over width. Returns the times, and the ends of their spread, in µs."""
    swept = experiment("fused_widths")
    swept = swept.replace({"compile(naive)": "torch.compile", f"compile({KEPT})": KEPT})
    order = ["copy", "fused", "torch.softmax", "torch.compile", KEPT]
    micros, early, late = (
        swept.pivot(index="n", columns="impl", values=name)[order]
        for name in ("us", "us_p20", "us_p80")
    )
    library = micros["torch.softmax"] / micros["fused"]
    worst = library.idxmax()
    text = units.format_ratio(library[worst])
    title = f"At {worst} columns torch.softmax takes {text} the time of fused."
    least = 2 * M * ITEMSIZE * micros.index.to_series() / 1e3  # kB
    rates, low, high = (dict((least / it.T).T) for it in (micros, late, early))
    chart = figures.plot_lines(rates, "columns", "GB/s", title=title, log2=True, low=low, high=high)
    named = {256, 2048, 8192, 32768}
    chart.set_xticks(list(micros.index), [str(n) if n in named else "" for n in micros.index])
    return micros, early, late


def show_multiples(
    micros: pd.DataFrame, early: pd.DataFrame, late: pd.DataFrame, raced: pd.DataFrame
) -> None:
    """Shows the times as multiples of the fused kernel's.

    micros, early, late: of `draw_widths`. raced: of `draw_single_trip`.
    """
    us = raced.set_index("impl")["us"]
    relative = micros.drop(columns=["copy", "fused"]).div(micros["fused"], axis=0)
    tables.show(
        micros.index,
        columns=str,
        fused=lambda n: units.format_us(micros["fused"][n]),
        torch=lambda n: units.format_ratio(relative["torch.softmax"][n]),
        compile_=lambda n: units.format_ratio(relative["torch.compile"][n]),
        persistent=lambda n: units.format_ratio(relative[KEPT][n]),
    )
    best = relative.min(axis=1)
    low, high = (units.format_ratio(value) for value in (best.min(), best.max()))
    claim(
        f"The best of the 3 others takes between {low} and {high} the time of fused.",
        best.min() > 0.6 and best.max() > 0.95,
    )
    wide = relative[KEPT][[2048, 4096, 8192]]
    claim(
        "From 2048 to 8192 columns the persistent reduction takes between "
        f"{units.format_ratio(wide.min())} and {units.format_ratio(wide.max())} the time of fused "
        "(between 0.9x and 1.1x needed).",
        wide.between(0.9, 1.1).all(),
    )
    pairs = ("fused", KEPT), (KEPT, "fused")
    one, other = (micros[here].between(early[there], late[there]) for here, there in pairs)
    level = (one & other)[wide.index].mean()
    claim(
        f"At {units.format_percent(level)} of the {len(wide)} widths from 2048 to 8192 columns the "
        "persistent reduction is level with fused (more than 30 % needed).",
        level > 0.3,
    )
    again = abs(micros["fused"][N] / us["fused"] - 1)
    glue("first_us", units.format_us(us["fused"]))
    glue("again_us", units.format_us(micros["fused"][N]))
    glue("again", units.format_percent(again))
    glue("best_low", units.format_ratio(best[256]))
    glue("kept", units.format_ratio(relative[KEPT][N]))
    glue("dropped", units.format_ratio(relative[KEPT][32768]))
    glue("library", units.format_ratio(relative["torch.softmax"][8192]))


# ---- what the answers are examined for


def half(x: Tensor) -> Tensor:
    """The softmax with a temperature of 2."""
    return torch.softmax(x / 2, dim=1)


def center(x: Tensor) -> Tensor:
    """Each row less its mean."""
    return x - x.mean(dim=1, keepdim=True)


def reads_row_0(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether each of four programs reads row 0 of a matrix 4 x 4."""
    trace = count(fn, torch.ones(4, 4, device=runtime.device()), trace=True).accesses
    read = [offset for access in trace if access.kind == "read" for offset in access.offsets]
    return sorted(read) == sorted([0, 1, 2, 3] * 4)


def examine(op: Callable[[Tensor], Tensor]) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of a matrix."""
    return lambda fn: prove.exam(fn, op=op, widths=(1, 2, 64, 1024))
