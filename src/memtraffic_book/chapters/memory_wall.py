"""The folded cells of `book/memory-wall.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from memtraffic import count, device, formula, gpus
from memtraffic.meters.polynomials import polynomial
from memtraffic.names import import_function
from memtraffic_book import (
    claim,
    experiment,
    experiments,
    figures,
    glue,
    prove,
    recording,
    units,
)
from memtraffic_book.recording import speeds

M, N, ITEMSIZE = 4096, 16384, 4  # the running example, in float32
LADDER = (
    *("naive", "fused", "masked", "tiled", "chunks", "persistent", "split"),
    "memtraffic.softmax",
)
LADDER_AT = (128, 4096, 5003, 65536)  # columns
# Of the operation, where a row fits one program; several of them exchange some words, too.
OURS_AT = (9, 8), (13, 7), (700, 29), (5, 781), (3, 8320)
ABSENT = "–"  # where a kernel takes no rows of this width


def draw_times() -> None:
    """Draws how long the bytes and the arithmetic of a softmax take, each alone."""
    race, rates = experiments("fused_race", "arithmetic")
    us, rates = race.set_index("impl")["us"], rates.set_index("what")["t_per_s"] * 1e12
    exp_us, other_us = (
        numbers * M * N / rates[what] * 1e6 for what, numbers in (("exp2", 1), ("multiply-add", 4))
    )
    ratio = units.format_ratio(us["copy"] / exp_us)
    parts = {"other arithmetic": other_us, "exponentials": exp_us, "bytes": us["copy"]}
    figures.plot_bars(
        [*parts],
        [*parts.values()],
        [*map(units.format_us, parts.values())],
        "µs",
        f"The bytes take {ratio} as long as the exponentials.",
        [name == "bytes" for name in parts],
    )
    glue("copy", units.format_us(us["copy"]))
    glue("naive", units.format_us(us["naive"]))
    glue("speedup", f"{us['naive'] / us['fused']:.1f} times")
    glue("exponentials", units.format_us(exp_us))
    glue("ratio", f"{us['copy'] / exp_us:.1f} times")


def trace_rows(copy_rows: Any, x: Tensor, y: Tensor) -> None:
    """Draws which program reads which element. y: the copy that was made of x, from NaN."""

    def copy(x: Tensor) -> Tensor:
        y = torch.full_like(x, float("nan"))
        copy_rows[(x.shape[0],)](y, x, x.stride(0), BLOCK=4)
        return y

    trace = count(copy, x, trace=True)
    title = "Each of the 3 programs reads 4 of the 5 elements of its row."
    figures.plot_access_map(trace.accesses, (len(x), x.shape[1]), "x_ptr", title)
    claim(
        "The 3 programs read 12 of the 15 elements, and 3 of the copy are still NaN.",
        trace.read_elements == 12 and y.isnan().sum() == 3,
    )


def time_first_copy() -> None:
    """Claims how near the first kernel is to the fastest copy."""
    us = experiment("first_copy").set_index("impl")["us"]
    share = us["copy"] / us["copy_rows"]
    claim(
        f"On {M} x {N} numbers copy_rows reaches {units.format_percent(share)} of the speed of the "
        "fastest copy (more than 85 % needed).",
        share > 0.85,
    )
    glue("first", f"{100 * share:.0f} %")


def draw_machine() -> None:
    """Draws the machine, with the speed of each step."""
    gpu = device.this_gpu() if device.HAS_GPU else gpus.find_gpu("H200")
    roofs, reads, clocks, chain = experiments("roof", "l2_read", "arithmetic", "occupancy_latency")
    dram, l2_mib = roofs["copy_gb_per_s"][0], roofs["l2_mib"][0]
    inside = reads[(reads["cache"] == "warm") & (reads["mib"] <= l2_mib / 2)]
    less, more = inside.iloc[-2], inside.iloc[-1]  # both have the fixed cost of a launch
    l2 = (more["mib"] - less["mib"]) * 2**20 / (more["us"] - less["us"]) * 1e-3
    speeds = {"dram": f"{dram * 1e-3:.1f} TB/s", "l2": f"{l2 * 1e-3:.1f} TB/s"}
    clock = clocks["clock_ghz"][0]
    if gpu.target == "sm_90":  # 128 bytes per clock and SM
        speeds["l1"] = f"{128 * clock * gpu.num_sms * 1e-3:.0f} TB/s, all SMs"
    sizes = {"l2": units.format_bytes(l2_mib * 2**20)}
    if gpu.product == "H200":
        sizes |= {"dram": "141 GB", "l1": "the rest of 256 KiB"}
    figures.machine(gpu, speeds=speeds, sizes=sizes)
    claim(
        f"L2 answers the SMs at {speeds['l2']}, {units.format_ratio(l2 / dram)} the bandwidth of "
        "DRAM (more than 1.2x needed).",
        l2 > 1.2 * dram,
    )
    glue("l2", sizes["l2"])
    glue("latency", units.format_ns(chain["latency_ns"][0]))
    glue("cycles", f"{chain['latency_ns'][0] * clock:.0f} cycles")


def draw_roofline(roof: float, rates: pd.Series[float], intensity: float) -> None:
    """Draws the roofline of a softmax.

    roof: bytes per second. rates: operations per second, by what they are. intensity: exponentials
    per byte.
    """
    kinds = {"multiply-adds": rates["multiply-add"], "exponentials": rates["exp2"]}
    title = "A softmax lies far to the left of the ridge, where memory sets the time."
    figures.roofline(roof, kinds, intensity, kind="exponentials", title=title)
    glue("ridge", units.format_per_byte(rates["exp2"] / roof))


def check_floor() -> None:
    """Claims that no recorded time on the map is below its floor."""
    *maps, roofs = experiments("map_float32", "map_bfloat16", "roof", gpu=recording.PUBLISHED)
    found = pd.concat(maps)["gb_per_s"].loc[lambda it: it > 0]
    roof, datasheet = roofs["copy_gb_per_s"][0], roofs["datasheet_gb_per_s"][0]
    claim(
        f"None of {len(found)} times of kernels at widths from 16 to 1048576 beats its floor: the "
        f"best has {units.format_percent(found.max() / roof)} of the roof.",
        found.max() <= roof,
    )
    glue("best", f"{100 * found.max() / roof:.0f} %")
    glue("lost", f"{100 * (1 - roof / datasheet):.0f} %")


class Rung(NamedTuple):
    """A kernel: what it reads and writes, counted, and its speed in percent of a copy."""

    name: str
    reads: str
    writes: str
    speeds: tuple[str, ...]


def ladder() -> list[Rung]:
    """The kernels in the order of the book, at the widths of the first page."""
    share = speeds(experiment("map_float32", gpu=recording.PUBLISHED))
    rungs = []
    for name in LADDER:
        found = formula(
            import_function(name.replace("memtraffic.", "memtraffic:")),
            held_out=OURS_AT if name == LADDER[-1] else None,
        )
        there = share[name].dropna()
        shown = [f"{100 * there[n]:.0f} %" if n in there else ABSENT for n in LADDER_AT]
        rungs.append(Rung(name, polynomial(found.reads), polynomial(found.writes), tuple(shown)))
    return rungs


def keep_ladder() -> None:
    """Keeps the ladder for the first page, and claims that its reads fall to MN."""
    rungs = ladder()
    for rung in rungs:
        short = rung.name.removeprefix("memtraffic.")
        glue(f"{short}_reads", rung.reads)
        if rung.writes != "MN":  # the page names the others
            glue(f"{short}_writes", rung.writes)
        for n, speed in zip(LADDER_AT, rung.speeds, strict=True):
            glue(f"{short}_{n}", speed)
    first, last = rungs[0], rungs[-1]
    claim(
        f"From the first kernel to the last, reads fall from {first.reads} to {last.reads}, and "
        f"writes from {first.writes} to {last.writes}.",
        first.reads != last.reads == last.writes == "MN",
    )


# ---- what the answers are examined for


def reverse(x: Tensor) -> Tensor:
    """Each row from its end to its beginning."""
    return x.flip(1)


def examine(op: Callable[[Tensor], Tensor], reads: str = "MN") -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of a matrix whose width is a power of two."""
    return lambda fn: prove.exam(fn, reads, reads, op=op, widths=(1, 2, 64, 1024))
