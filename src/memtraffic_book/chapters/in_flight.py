"""The folded cells of `book/in-flight.ipynb`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic import count, device
from memtraffic.compile import capture_launches
from memtraffic.gpus import find_gpu
from memtraffic_book import (
    claim,
    experiment,
    experiments,
    figures,
    glue,
    prove,
    tables,
    units,
)
from memtraffic_book.recording import speeds
from memtraffic_book.units import format_share as percent

WAY = ["programs", "warps", "loads", "load_bytes"]  # per SM, program, lane and load
FULL, FEW = (8, 8, 1, 4), (4, 1, 16, 16)  # the two SMs of the first figure
LETTER = 1024  # bytes
BUSY = 0.95  # of the most, from the bend on
NARROW = (16, 64, 128, 256, 512, 1024)  # columns
TICKS = (1, 2, 4, 8, 16, 32, 64)  # kB


def kilobytes(n_bytes: float) -> str:
    """An amount with two digits.

    >>> kilobytes(24 * 1024)
    '25 kB'
    """
    return f"{n_bytes / 1000:.0f} kB"


def _share(row: Mapping[Any, Any]) -> float:
    """The speed of a kernel, as a share of the copy that was timed beside it."""
    return float(row["gb_per_s"] / row["copy_gb_per_s"])


def draw_full_and_empty() -> pd.DataFrame:
    """Draws two SMs: one full of warps with narrow loads, one with four warps with wide ones.

    Returns what was measured of kernels that read.
    """
    measured = experiment("slots_in_flight").query("access == 'read'")
    rows = measured.set_index(WAY, drop=False).loc[[FULL, FEW]].to_dict("records")
    full, few = slots = [
        figures.Slots(row["slots"], row["loads"], row["load_bytes"], _share(row)) for row in rows
    ]
    figures.full_and_empty(slots, title="Full and slow, empty and fast: what is in flight counts.")
    claim(
        f"With wide loads, {few.filled} warps are {units.format_ratio(few.share / full.share)} as "
        f"fast as {full.filled} warps with narrow ones (more than 0.8x needed).",
        few.share > 0.8 * full.share,
    )
    glue("full", percent(full.share))
    glue("few", percent(few.share))
    return measured


def check_law(flight: pd.DataFrame, latency: float, need: float) -> None:
    """Claims how near Little's law comes where little is in flight.

    flight: of `bytes_in_flight`. latency: in ns, of an idle memory. need: bytes per SM.
    """
    least = flight[flight["access"] == "read"].iloc[0]
    in_flight = least["kib_per_sm"] * 1024
    predicted = in_flight * least["sms"] / latency
    claim(
        f"With {units.format_bytes(in_flight)} in flight per SM the law predicts "
        f"{units.format_gb_per_s(predicted)}, and a reading kernel reaches "
        f"{units.format_gb_per_s(least['gb_per_s'])} (0.7x to 1.1x of it needed).",
        0.7 < least["gb_per_s"] / predicted < 1.1,
    )
    glue("latency", units.format_ns(latency))
    glue("need", kilobytes(need))


def draw_bend(flight: pd.DataFrame, need: float) -> pd.DataFrame:
    """Draws the speed over the bytes in flight, and claims where it bends.

    flight: of `bytes_in_flight`. need: bytes per SM that an idle memory would need. Returns the
    speeds as shares of a copy; the index is bytes in flight per SM.
    """
    h100 = "nvidia-h100-80gb-hbm3"
    other = experiment("bytes_in_flight", gpu=h100).query("access == 'read'")
    both = "bytes_in_flight", "roof"  # of one GPU
    roofs = [experiments(*both, **at)[1]["copy_gb_per_s"][0] for at in ({}, {"gpu": h100})]
    curve = flight.pivot(index="kib_per_sm", columns="access", values="gb_per_s")[["read", "copy"]]
    curve = (curve / roofs[0]).set_axis(LETTER * curve.index)
    lines = {str(name): 100 * line for name, line in curve.items()}
    lines["read, H100"] = 100 * other.set_index(LETTER * other["kib_per_sm"])["gb_per_s"] / roofs[1]
    lines = {name: line.set_axis(line.index / 1000) for name, line in lines.items()}
    bend = {name: (line >= BUSY * line.max()).idxmax() for name, line in curve.items()}
    most = curve["read"].max()
    reached = _at(curve["read"], need) / most
    title = f"From {kilobytes(bend['read'])} in flight per SM on, memory is busy."
    words = "kB in flight per SM, log scale", "% of the speed of a copy"
    ax = figures.plot_lines(lines, *words, title=title, ticks=TICKS)
    figures.mark_position(ax, bend["read"] / 1000, f"bend:\n{kilobytes(bend['read'])}", "right")
    figures.mark_position(ax, need / 1000, f"idle:\n{kilobytes(need)}", "left")
    claim(
        f"With {kilobytes(need)} in flight per SM, as the idle latency suggests, a read reaches "
        f"{percent(reached)} of the most that it can (under 95 %).",
        reached < BUSY,
    )
    claim(
        f"It reaches 95 % from {kilobytes(bend['read'])} per SM on (more than 1.2x of that).",
        bend["read"] > 1.2 * need,
    )
    glue("bend", kilobytes(bend["read"]))
    glue("copy_bend", kilobytes(bend["copy"]))
    glue("ratio", f"{bend['read'] / need:.1f} times")
    glue("reached", percent(reached))
    glue("copy_loss", percent(1 - curve["copy"].iloc[-1] / curve["copy"].max()))
    return curve


def _at(line: pd.Series[float], n_bytes: float) -> float:
    """The value of a line at so many bytes in flight, between its points."""
    grown = line.reindex(sorted({*line.index, n_bytes})).interpolate("index")
    return float(grown[n_bytes])


def show_load(flight: pd.DataFrame, curve: pd.DataFrame) -> None:
    """Shows how long an answer takes at most: as if the most were always in flight.

    flight: of `bytes_in_flight`. curve: of `draw_bend`.
    """
    read = flight[flight["access"] == "read"].set_index("kib_per_sm")
    tables.show(
        read.loc[[1, 8, 24, 32, 64]].reset_index(),
        in_flight_per_SM=lambda row: kilobytes(LETTER * row["kib_per_sm"]),
        speed=lambda row: percent(curve["read"][LETTER * row["kib_per_sm"]]),
        answer_after_at_most=lambda row: units.format_ns(row["latency_ns"]),
    )
    half, full = read.loc[32], read.loc[64]
    longer = full["latency_ns"] / half["latency_ns"]
    faster = abs(full["gb_per_s"] / half["gb_per_s"] - 1)
    claim(
        f"From {kilobytes(32 * LETTER)} to {kilobytes(64 * LETTER)} per SM this limit is "
        f"{units.format_ratio(longer)} as long (over 1.5x), and the bandwidth changes by "
        f"{units.format_percent(faster)} (under 5 %).",
        longer > 1.5 and faster < 0.05,
    )


def show_ways(measured: pd.DataFrame) -> None:
    """Shows ways to the same bytes in flight. measured: of `draw_full_and_empty`."""
    ways = [FULL, *((warps, 1, 16, 16) for warps in (1, 2, 3)), FEW, (8, 8, 1, 16)]
    rows = measured.set_index(WAY, drop=False).loc[ways].to_dict("records")
    tables.show(
        rows,
        warps=lambda row: row["slots"],
        loads_per_lane=lambda row: f"{row['loads']} × {row['load_bytes']} bytes",
        in_flight_per_SM=lambda row: kilobytes(row["flight_bytes"]),
        speed=lambda row: percent(_share(row)),
    )
    _, one, _, three, four, many = map(_share, rows)
    claim(
        f"With {kilobytes(rows[-1]['flight_bytes'])} in flight at best, 4 warps have "
        f"{units.format_ratio(four / many)} the speed of 64 (between 0.8x and 1.2x needed).",
        0.8 < four / many < 1.2,
    )
    glue("one", percent(one))
    glue("three", percent(three))


def draw_kernels(curve: pd.DataFrame) -> None:
    """Draws where the masked kernel lies at narrow rows. curve: of `draw_bend`."""
    share = speeds(experiment("map_float32"))["masked"].loc[list(NARROW)]
    kb = 16 * 4 * share.index.to_series() / 1000  # 16 programs of 4 warps, a row of float32 each
    masked = (100 * share).set_axis(kb)
    copied = (100 * curve["copy"]).set_axis(curve.index / 1000)
    title = "Narrow rows put too little into the post."
    words = "kB in flight per SM, log scale", "% of the speed of a copy"
    lines = {"a copy": copied[copied.index < 70], "masked": masked}
    ax = figures.plot_lines(lines, *words, title=title, ticks=TICKS)
    for n, x, y in list(zip(NARROW, masked.index, masked, strict=True))[1:4]:
        ax.annotate(f"{n}", (x, y), (6, -12), textcoords="offset points")
    slow, fast = share.loc[[128, 1024]]
    claim(
        f"At 128 columns, with {kilobytes(1000 * kb[128])} in flight per SM, masked has "
        f"{percent(slow / fast)} of its speed at 1024 columns (less than 80 % needed).",
        slow < 0.8 * fast,
    )
    glue("narrow", percent(slow))
    glue("narrow_flight", kilobytes(1000 * kb[128]))


# ---- what the answers are examined for


def has_in_flight(warps: int, n_bytes: int) -> Callable[[Any], bool]:
    """A judge of copies whose programs have so many warps, and load so many bytes at once."""

    def judge(fn: Callable[[Tensor], Tensor]) -> bool:
        x = torch.zeros(8, 1024, device=device.default())
        prove.exam(fn, op=torch.clone)
        launches = capture_launches(fn, x, gpu=find_gpu("H200"))
        assert len(launches) == 1, f"The function launches {len(launches)} Triton kernels, not 1."
        found = launches[0].options.get("num_warps", 4)
        accesses = count(fn, x, trace=True).accesses
        most = max(4 * len(access.offsets) for access in accesses if access.kind == "read")
        assert found == warps, f"A program has {found} warps, not {warps}."
        assert most == n_bytes, f"A program loads {most} bytes at once, not {n_bytes}."
        return True

    return judge


def follows_two_chains(fn: Callable[[Tensor, int], Tensor]) -> bool:
    """Whether `fn` follows two chains from the first two elements, side by side, in one kernel."""
    x = torch.tensor([3, 0, 4, 2, 1], device=device.default())
    places = [(0, 1), (3, 0), (2, 3), (4, 2), (1, 4)]  # of both chains, hop by hop
    for hops in (0, 1, 2, 3):
        ends, found = list(places[hops + 1]), fn(x, hops).tolist()
        assert found == ends, f"After {hops} hops the chains are at {ends}, not at {found}."
        accesses = count(lambda x, hops=hops: fn(x, hops), x, trace=True).accesses
        read = [at for it in accesses if it.kind == "read" for at in it.offsets]
        least = 2 * (hops + 1)
        assert len(read) == least, f"In {hops} hops it reads {len(read)} elements, not {least}."
        pairs = [sorted(read[i : i + 2]) for i in range(0, least, 2)]
        beside = pairs == [sorted(pair) for pair in places[: hops + 1]]
        assert beside, f"It reads {read}: both chains must make hop 1 before either makes hop 2."
    launches = capture_launches(lambda x: fn(x, 3), x, gpu=find_gpu("H200"))
    assert len(launches) == 1, f"Launch 1 kernel, not {len(launches)}."
    return True
