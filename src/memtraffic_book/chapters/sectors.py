"""The folded cells of `book/sectors.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd

from memtraffic import count, resources
from memtraffic.kernels.softmax import tiled
from memtraffic.meters.sectors import COUNTERS
from memtraffic.tensors import MEMORY_LAYOUTS, matrix, sectors
from memtraffic_book import claim, experiment, experiments, figures, glue, prove, tables, units
from memtraffic_book.recording import PUBLISHED, speeds

SHAPE = "70x1024"  # of the recorded calls that the page shows
TIMED = ("tiled_counters", "tiled_layouts_float32", "tiled_layouts_bfloat16")
COLUMNS = "lambda x: torch.softmax(x, dim=0)"
TRANSPOSED = "lambda x: x.transpose(0, 1).contiguous()"


def draw_lanes() -> None:
    """Draws which lane holds which numbers of four rows of 64, and claims how it loads them."""
    tile = partial(tiled.softmax, rows=4, num_warps=2)
    packed, odd = (
        resources(tile, matrix(4, 64, layout=layout), target="sm_90")[0]
        for layout in ("packed", "odd")
    )
    assert packed.layout, packed
    figures.plot_thread_layout(
        packed.layout, (4, 64), title="A lane holds 4 neighbours, and 16 lanes hold a row."
    )
    claim(
        f"From packed rows of 64 numbers a lane loads {max(packed.load_bits)} bits at a time, and "
        f"from rows that lie 65 apart {max(odd.load_bits)}.",
        (max(packed.load_bits), max(odd.load_bits)) == (128, 32),
    )


def compare() -> None:
    """Shows predicted and counted sectors of `tiled` in each layout, and claims that all agree.

    So do kernels of packages that were tried afterwards. What is neither packed nor of this book is
    from the recording: a reader would wait for a minute.
    """
    recorded = experiments("sectors_layouts", "sectors_blind", gpu=PUBLISHED)
    found = pd.concat([*experiments("sectors_packed", "sectors_others"), *recorded])
    found = found[found["refused"] == ""]
    own = found[(found["fn"] == "tiled") & (found["shape"] == SHAPE)]
    tables.show(
        own[own["dtype"] == "float32"],
        layout=lambda call: call["layout"],
        load_requests=lambda call: f"{call['load_requests']:,}",
        sectors_predicted=lambda call: f"{call['predicted_load_sectors']:,}",
        sectors_counted=lambda call: f"{call['load_sectors']:,}",
    )
    equal = pd.concat([found[name] == found[f"predicted_{name}"] for name in COUNTERS])
    claim(
        f"In {len(found)} calls of {found['fn'].nunique()} kernels, {equal.sum()} of {equal.size} "
        "counters equal what was predicted.",
        equal.all() and equal.size > 600,
    )
    glue("others", str((recorded[1]["refused"] == "").sum()))


def time_layouts() -> None:
    """Shows the bytes and the speed of four memory layouts."""
    seen, *timed = (frame.set_index("layout") for frame in experiments(*TIMED))
    sent = seen["l1_l2_read_bytes"]
    single, half = (it["us"]["packed"] / it["us"] for it in timed)
    tables.show(
        MEMORY_LAYOUTS,
        layout=str,
        DRAM_to_L2=lambda name: units.format_bytes(seen["dram_read_bytes"][name]),
        L2_to_L1=lambda name: units.format_bytes(sent[name]),
        float32=lambda name: units.format_share(single[name]),
        bfloat16=lambda name: units.format_share(half[name]),
    )
    times = sent["transposed"] / sent["packed"]
    claim(
        f"For a transposed matrix L2 sends {units.format_ratio(times)} the bytes of a packed one.",
        abs(times / 8 - 1) < 0.1,
    )
    glue("times", f"{times:.0f} times")
    glue("slow", units.format_share(single["transposed"]))
    glue("other_speed", units.format_share(single["every other"]))
    wide = speeds(experiment("map_bfloat16", gpu=PUBLISHED)).loc[3001]
    glue("odd_width", units.format_share(wide["tiled"]))
    glue("odd_repaired", units.format_share(wide["memtraffic.softmax"]))


# ---- what the answers are examined for


def sixteenth(factor: object) -> bool:
    """Whether every sixteenth column of a matrix touches so many times the sectors."""
    return bool(factor == sectors(matrix(1, 1024)[:, ::16]) / sectors(matrix(1, 64)))


def loads_64_bits(n: int) -> bool:
    """Whether `tiled` loads packed rows of n numbers of bfloat16 64 bits at a time."""
    [kernel] = resources(tiled.softmax, matrix(2, n, "bfloat16"), target="sm_90")
    return set(kernel.load_bits) == {64}


def examine(op: str) -> Callable[[Any], bool]:
    """A judge of functions that compute `op`, in which no two programs touch one sector."""

    def judge(fn: Any) -> bool:
        prove.exam(fn, op=op, widths=(1, 8, 33, 64))
        x = matrix(32, 64)
        touched = {
            (access.kind, offset // 8, access.program)  # of a sector with 8 numbers of float32
            for access in count(fn, x, trace=True).accesses
            for offset in access.offsets
        }
        least = 2 * x.numel() // 8
        if len(touched) > least:
            raise AssertionError(
                f"{least} sectors are touched {len(touched)} times: give a program all 8 numbers"
            )
        return True

    return judge
