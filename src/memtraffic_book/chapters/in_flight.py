"""The folded cells of `book/in-flight.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from memtraffic import count, device
from memtraffic.compile import capture_launches
from memtraffic.gpus import find_gpu
from memtraffic_book import claim, experiment, figures, glue, prove, tables, units
from memtraffic_book.units import format_share as percent

FIRST = 48  # what answers the first exercise
WAY = ["programs", "warps", "loads", "load_bytes"]  # per SM, program, lane and load
FULL, FEW = (8, 8, 1, 4), (4, 1, 16, 16)  # the two SMs of the first figure
ONE, TWO, THREE, WIDE = (1, 1, 16, 16), (2, 1, 16, 16), (3, 1, 16, 16), (8, 8, 1, 16)
BUSY = 95  # % of the speed of a copy, from the bend on
TICKS = (1, 2, 4, 8, 16, 32, 64)  # kB
kilobytes = "{:.0f} kB".format
TWICE = "lambda x: 2 * x"


def _measured(*ways: tuple[int, ...]) -> list[dict[Any, Any]]:
    """What was measured of kernels that read, in each of these ways."""
    measured = experiment("slots_in_flight").query("access == 'read'")
    measured = measured.assign(share=measured["gb_per_s"] / measured["copy_gb_per_s"])
    return measured.set_index(WAY, drop=False).loc[[*ways]].to_dict("records")


def draw_full_and_empty() -> None:
    """Draws two SMs: one full of warps with narrow loads, one with four warps with wide ones."""
    sms = _measured(FULL, FEW)
    figures.full_and_empty(sms, title="Full and slow, empty and fast: what is in flight counts.")


def draw_bend(flight: pd.DataFrame, need: float) -> None:
    """Draws the speed over the bytes in flight, and claims where it bends.

    flight: of `bytes_in_flight`. need: bytes in flight per SM that the law asks for.
    """
    read = flight[flight["access"] == "read"].set_index("kib_per_sm")["gb_per_s"]
    share = 100 * read / experiment("roof")["copy_gb_per_s"][0]
    share, need = share.set_axis(1.024 * share.index), need / 1000  # kB
    bend, reached = (share >= BUSY).idxmax(), np.interp(need, share.index, share)
    places = sorted({*share.index, need})
    law = pd.Series([share.max() * min(1, at / need) for at in places], places)
    lines = {"a kernel": share, "the law": law}
    title = f"The law says {kilobytes(need)} per SM, and memory says {kilobytes(bend)}."
    words = "kB in flight per SM, log scale", "% of the speed of a copy"
    ax = figures.plot_lines(lines, *words, title=title, ticks=TICKS)
    figures.mark_position(ax, need, kilobytes(need), "left")
    figures.mark_position(ax, bend, kilobytes(bend), "right")
    claim(
        f"With the {kilobytes(need)} per SM that the law asks for, a kernel that reads reaches "
        f"{reached:.0f} % of the speed of a copy, and {BUSY} % from {kilobytes(bend)} on.",
        reached < BUSY and bend > 1.2 * need,
    )
    glue("most", units.format_gb_per_s(read.max()))
    glue("need", kilobytes(need))
    glue("bend", kilobytes(bend))
    glue("busy", f"{share[bend]:.0f} %")
    glue("asked", f"{need * share[bend] / share.max():.1f} kB")  # by the law, at this speed
    glue("reached", f"{reached:.0f} %")


def show_ways(latency: float) -> None:
    """Shows ways to have bytes in flight. latency: in ns, of an idle memory."""
    rows = _measured(FULL, ONE, TWO, THREE, FEW, WIDE)
    tables.show(
        rows,
        warps=lambda row: row["slots"],
        loads_per_lane=lambda row: f"{row['loads']} × {row['load_bytes']} bytes",
        in_flight_at_most=lambda row: kilobytes(row["flight_bytes"] / 1000),
        speed_of_a_copy=lambda row: percent(row["share"]),
    )
    full, one, _, three, few, _ = rows
    ratio = few["share"] / full["share"]
    claim(
        f"With wide loads, 4 warps are {units.format_ratio(ratio)} as fast as 64 with narrow ones.",
        ratio > 1,
    )
    glue("average", units.format_bytes(one["gb_per_s"] * latency / one["sms"]))
    glue("latency", units.format_ns(latency))
    for name, row in {"full": full, "one": one, "three": three, "few": few}.items():
        glue(name, percent(row["share"]))


# ---- what the answers are examined for


def doubles(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` computes TWICE by programs of one warp that load 2048 bytes at once."""
    x = torch.zeros(8, 1024, device=device.default())
    prove.exam(fn, op=TWICE)
    [launch] = capture_launches(fn, x, gpu=find_gpu("H200"))
    warps, accesses = launch.options.get("num_warps", 4), count(fn, x, trace=True).accesses
    most = max(4 * len(access.offsets) for access in accesses if access.kind == "read")
    assert (warps, most) == (1, 2048), f"A program has {warps} warps and loads {most} bytes at once"
    return True


def follows_two_chains(fn: Callable[[Tensor, int], Tensor]) -> bool:
    """Whether `fn` follows two chains from the first two elements, side by side."""
    x = torch.tensor([3, 0, 4, 2, 1], device=device.default())
    places = [(0, 1), (0, 3), (2, 3), (2, 4)]  # of both chains, hop by hop
    found = fn(x, 3).tolist()
    assert found == [1, 4], f"After 3 hops the chains are at [1, 4], not at {found}."
    accesses = count(lambda x: fn(x, 3), x, trace=True).accesses
    read = [at for it in accesses if it.kind == "read" for at in it.offsets]
    beside = [tuple(sorted(read[i : i + 2])) for i in range(0, len(read), 2)] == places
    assert beside, f"It reads {read}: both chains must make hop 1 before either makes hop 2."
    return True
