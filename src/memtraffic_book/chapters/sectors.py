"""The folded cells of `book/sectors.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic import count, device, resources
from memtraffic.kernels.softmax import masked, tiled
from memtraffic.meters.sectors import COUNTERS
from memtraffic.residency import BlockedLayout
from memtraffic.tensors import MEMORY_LAYOUTS, SECTOR_BYTES, matrix, sectors
from memtraffic_book import (
    claim,
    experiment,
    experiments,
    figures,
    glue,
    lab_notes,
    prove,
    recording,
    tables,
    units,
)
from memtraffic_book.recording import PUBLISHED, speeds

M = N = 4096  # the matrix that is timed
SHAPE = "70x1024"  # of the recorded calls that the page shows
ODD_SHAPE = "17x4097"
EVEN, ODD = 1500, 3001  # columns, which fill as much of a block of 2048 and of 4096
OURS = "memtraffic.softmax"
WHOLE_VECTORS = "At odd widths, load whole 16-byte vectors from a row's"
PREDICTED = [f"predicted_{name}" for name in COUNTERS]


def open_page() -> None:
    """Keeps for the prose how fast a transposed matrix is, and what L2 sends for it."""
    seen, timed = (
        frame.set_index("layout")
        for frame in experiments("tiled_counters", "tiled_layouts_float32")
    )
    us, sent = timed["us"], seen["l1_l2_read_bytes"]
    times = sent["transposed"] / sent["packed"]
    claim(
        f"For a transposed matrix L2 sends {units.format_ratio(times)} the bytes of a packed one "
        "(8 expected, within 10 %).",
        abs(times / 8 - 1) < 0.1,
    )
    glue("slow", units.format_share(us["packed"] / us["transposed"]))
    glue("times", f"{times:.0f} times")


def recorded() -> pd.DataFrame:
    """What a GPU counted of the calls of this book's kernels, beside what was predicted.

    Those of other layouts than packed are from the recording: a reader would wait for a minute.
    """
    others = experiment("sectors_layouts", gpu=PUBLISHED)
    found = experiments("sectors_packed", "sectors_others")
    frame = pd.concat([others, *found], ignore_index=True)
    return frame[frame["refused"] == ""]


def compare(frame: pd.DataFrame) -> None:
    """Shows predicted and counted sectors of `tiled` in each layout, and claims that all agree.

    So do kernels of packages that were tried afterwards. frame: of `recorded`.
    """
    some = frame[(frame["fn"] == "tiled") & (frame["shape"] == SHAPE)]
    by = some.set_index(["layout", "dtype"])
    tables.show(
        [(layout, dtype) for dtype in ("float32", "bfloat16") for layout in MEMORY_LAYOUTS],
        layout=lambda it: it[0],
        type=lambda it: it[1],
        load_requests=lambda it: f"{by['load_requests'][it]:,}",
        sectors_predicted=lambda it: f"{by['predicted_load_sectors'][it]:,}",
        sectors_counted=lambda it: f"{by['load_sectors'][it]:,}",
    )
    equal = frame[PREDICTED].to_numpy() == frame[[*COUNTERS]].to_numpy()
    claim(
        f"In {len(frame)} calls of {frame['fn'].nunique()} kernels, {equal.sum()} of {equal.size} "
        "counters equal what was predicted.",
        equal.all() and equal.size > 400,
    )
    others = experiment("sectors_blind", gpu=PUBLISHED)  # tried once, when it was new
    known = others[others["refused"] == ""]
    agree = (known[PREDICTED].to_numpy() == known[[*COUNTERS]].to_numpy()).all(axis=1)
    claim(
        f"Of {len(others)} kernels of three other packages, {len(known)} can be predicted, and "
        f"the counters of {agree.sum()} are equal.",
        agree.all() and len(known) >= 30,
    )
    loads = by["load_sectors"]
    glue("calls", str(len(frame)))
    glue("others", str(len(known)))
    glue("odd", f"{loads['odd', 'float32'] / loads['packed', 'float32']:.1f} times")


def small_tile(x: Tensor) -> Tensor:
    """`tiled.softmax` of 4 rows per program and 2 warps."""
    return tiled.softmax(x, rows=4, num_warps=2)


def draw_lanes() -> None:
    """Draws which lane holds which numbers of four rows of 64, and claims how it loads them."""
    packed, odd = (
        resources(small_tile, matrix(4, 64, layout=layout), target="sm_90")[0]
        for layout in ("packed", "odd")
    )
    assert isinstance(packed.layout, BlockedLayout), packed.layout
    figures.plot_thread_layout(
        packed.layout, (4, 64), "A lane holds 4 neighbours, and 16 lanes hold a row."
    )
    claim(
        f"From packed rows of 64 numbers a lane loads {max(packed.load_bits)} bits at a time, and "
        f"from rows that lie 65 apart {max(odd.load_bits)}.",
        (max(packed.load_bits), max(odd.load_bits)) == (128, 32),
    )


def show_bits() -> None:
    """Compiles `masked` and `tiled` for several rows, and shows what a lane loads at a time."""
    cases = {
        "4096 columns": matrix(2, 4096),
        "4100 columns": matrix(2, 4100),
        "4100 columns of 2 bytes": matrix(2, 4100, "bfloat16"),
        "4099 columns": matrix(2, 4099),
        "4096 columns, 2 apart": matrix(2, 4096, layout="every other"),
        "4096 columns, 4 bytes later": matrix(2, 4100)[:, 1:4097],
    }

    def bits(fn: Callable[[Tensor], Tensor]) -> dict[str, int]:
        return {
            name: max(resources(fn, x, target="sm_90")[0].load_bits) for name, x in cases.items()
        }

    untold, told = bits(masked.softmax), bits(tiled.softmax)
    tables.show(cases, rows_=str, masked=untold.get, tiled=told.get)
    a, b = untold["4100 columns"], told["4100 columns"]
    claim(f"At 4100 columns masked loads {a} bits at a time, and tiled {b}.", (a, b) == (32, 128))


def time_layouts() -> None:
    """Shows the bytes and the speed of four memory layouts."""
    seen, single, half = (
        frame.set_index("layout")
        for frame in experiments(
            "tiled_counters", "tiled_layouts_float32", "tiled_layouts_bfloat16"
        )
    )
    sent, speed = (
        seen["l1_l2_read_bytes"],
        [it["us"]["packed"] / it["us"] for it in (single, half)],
    )
    tables.show(
        MEMORY_LAYOUTS,
        layout=str,
        DRAM_to_L2=lambda name: units.format_bytes(seen["dram_read_bytes"][name]),
        L2_to_L1=lambda name: units.format_bytes(sent[name]),
        float32=lambda name: units.format_share(speed[0][name]),
        bfloat16=lambda name: units.format_share(speed[1][name]),
    )
    claim(
        "For every other column L2 sends "
        f"{sent['every other'] / sent['packed']:g} times the bytes of packed columns, exactly.",
        sent["every other"] == 2 * sent["packed"],
    )
    glue("other_speed", units.format_share(speed[0]["every other"]))
    glue("half_speed", units.format_share(speed[1]["transposed"]))
    glue("odd_half", units.format_share(speed[1]["odd"]))
    glue("odd_single", units.format_share(speed[0]["odd"]))


def draw_odd_widths(frame: pd.DataFrame) -> None:
    """Draws the speed at even and odd widths in bfloat16, and counts the requests at one of them.

    frame: of `recorded`.
    """
    [timed] = experiments("map_bfloat16", gpu=recording.PUBLISHED)
    speed = speeds(timed)[["tiled", OURS]]
    share = 100 * speed.loc[512:32768]
    odd = share[share.index % 2 == 1]
    figures.plot_lines(
        {
            "tiled, multiples of 8": share["tiled"][share.index % 8 == 0],
            "tiled, odd": odd["tiled"],
            f"{OURS}, odd": odd[OURS],
        },
        "columns",
        "% of the speed of a copy",
        title="At odd widths tiled falls behind, and the last kernel does not.",
        ticks=[512, 2048, 8192, 32768],
    )
    gain = (odd[OURS] / odd["tiled"]).min()
    claim(
        f"At {len(odd)} odd widths the last kernel has at least {units.format_ratio(gain)} the "
        "speed of tiled (more than 1.1x).",
        gain > 1.1,
    )
    calls = frame[(frame["shape"] == ODD_SHAPE) & (frame["dtype"] == "bfloat16")]
    asked = calls.set_index("fn")["load_requests"]
    ours = asked[OURS.replace(".", ":")]
    claim(
        f"For 17 rows of 4097 numbers of bfloat16, tiled makes {asked['tiled']:,} load requests, "
        f"and the last kernel {ours}.",
        4 * ours < asked["tiled"],
    )
    note = lab_notes.find(WHOLE_VECTORS)
    glue("even", units.format_share(speed["tiled"][EVEN]))
    glue("odd_width", units.format_share(speed["tiled"][ODD]))
    glue("ours_odd", units.format_share(speed[OURS][ODD]))
    for n in (77, 257):
        glue(f"ours_{n}", units.format_share(speed[OURS][n]))
    glue("expected", note["prediction"].split("; ")[1])
    glue("found", note["result"].rsplit(", ", 1)[1])


# ---- what the answers are examined for


def sixteenth(factor: object) -> bool:
    """Whether every sixteenth column of a matrix touches so many times the sectors."""
    few, all_of_them = matrix(1, 1024)[:, ::16], matrix(1, 64)
    return bool(factor == sectors(few) / sectors(all_of_them))


def loads_64_bits(n: int) -> bool:
    """Whether `tiled` loads packed rows of n numbers of bfloat16 64 bits at a time."""
    if not 1000 < n < 1100:
        raise AssertionError(f"{n} is not between 1000 and 1100")
    [kernel] = resources(tiled.softmax, matrix(2, n, "bfloat16"), target="sm_90")
    return set(kernel.load_bits) == {64}


def softmax_of_columns(x: Tensor) -> Tensor:
    """The softmax of each column."""
    return torch.softmax(x, dim=0)


def transposed(x: Tensor) -> Tensor:
    """The transposed matrix, packed."""
    return x.t().contiguous()


def examine(op: Callable[[Tensor], Tensor]) -> Callable[[Any], bool]:
    """A judge of functions that compute `op`, in which no two programs touch one sector."""

    def judge(fn: Callable[[Tensor], Tensor]) -> bool:
        prove.exam(fn, op=op, widths=(1, 8, 33, 64))
        x = torch.randn(32, 64, device=device.default())
        touched: dict[str, list[tuple[object, int]]] = {"read": [], "written": []}
        for access in count(fn, x, trace=True).accesses:
            of_sector = SECTOR_BYTES // x.element_size()
            found = {(access.program, offset // of_sector) for offset in access.offsets}
            touched[access.kind] += sorted(found - set(touched[access.kind]))
        least = x.numel() * x.element_size() // SECTOR_BYTES
        for kind, times in touched.items():
            if len(times) > least:
                raise AssertionError(
                    f"{least} sectors are {kind} {len(times)} times by programs: give a program "
                    "all numbers of a sector"
                )
        return True

    return judge
