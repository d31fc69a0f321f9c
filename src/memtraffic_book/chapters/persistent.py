"""The folded cells of `book/persistent.ipynb`, and what its visible cells compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memtraffic import count, device, resources
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import persistent
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.op import Op
from memtraffic.residency import resident_programs
from memtraffic.residency.resources import Resources
from memtraffic_book import (
    claim,
    experiment,
    figures,
    glue,
    lab_notes,
    prove,
    recording,
    tables,
    units,
)
from memtraffic_book.catalog import SUSPECTS
from memtraffic_book.measurements import implementations
from memtraffic_book.recording import speeds

WIDE_ROWS = 4096, 16384  # the running example
LOOPS = ("1 stage", "2 stages", "3 stages")
OURS = "memtraffic.softmax"
WIDE = 32768  # columns, where one program of bfloat16 fills an SM
FAST = 0.95  # of the speed of a copy: what is slower leaves something to win
AGAIN, COUNTER = "Make the programs persistent", "Let a program of the loop take its next row"
VERSIONS = {  # by the names of the table
    "3 stages": "3 stages",
    "2 stages": "2 stages",
    "the same, a program per row": "2 stages, program per tile",
    "1 stage": "1 stage",
    "the same, fewer warps": "1 stage, 8 warps",
    "tiled": "tiled",
}


def compiled(n_cols: int, num_stages: int) -> Resources:
    """The loop over rows of `n_cols` numbers of float32, compiled for an H200."""
    fn = partial(persistent.softmax, rows=1, num_stages=num_stages)
    x = torch.empty(8, n_cols, device=device.default())
    [launch] = capture_launches(fn, x, gpu=find_gpu("H200"))
    [kernel] = compile_launches([(launch, "sm_90")])
    return kernel


def check_schedules() -> None:
    """Claims what each loop has requested while a row is in use."""
    one, two, three = (compiled(16384, stages).schedule for stages in (1, 2, 3))
    assert one[:2] == ("for", "load"), one
    assert two[:3] == ("copy", "for", "wait 0"), two
    claim(
        "While a row is in use, the loop of 3 stages has 1 request in flight, and the others 0.",
        three[:4] == ("copy", "copy", "for", "wait 1"),
    )


def take_apart() -> None:
    """Shows the loops, and what one change in each of two of them wins."""
    us, impls = experiment("persistent_suspects").set_index("impl")["us"], implementations(SUSPECTS)
    share = us["copy"] / us
    resident = {}
    for label in VERSIONS.values():
        [kernel] = resources(impls[label], SOFTMAX, WIDE_ROWS, target="sm_90")
        resident[label] = resident_programs(kernel)
    tables.show(
        VERSIONS.items(),
        version=lambda pair: pair[0],
        programs_per_SM=lambda pair: resident[pair[1]],
        speed_of_a_copy=lambda pair: units.format_share(share[pair[1]]),
    )
    _, fixed, queue, alone, pair, _ = (share[name] for name in VERSIONS.values())
    order, second = queue - fixed, pair - alone
    claim(
        f"A fixed order costs 2 stages {units.format_share(order)} of the speed of a copy, and a "
        f"second program wins {units.format_share(second)}; no loop is as fast as tiled.",
        order > second > 0 and share[list(LOOPS)].max() < share["tiled"],
    )
    detour = share["tiled"] / queue
    claim(
        f"With a program per row, 2 stages take {units.format_ratio(detour)} the time of tiled (at "
        "most 1.02x).",
        detour < 1.02,
    )
    note = lab_notes.find(COUNTER)
    glue("counter", note["result"].split(" of a copy")[0])
    glue("order", units.format_share(order))
    glue("second", units.format_share(second))
    glue("tiled_share", units.format_share(share["tiled"]))
    glue("loop_share", units.format_share(share["3 stages"]))
    glue("lost", units.format_share(share["tiled"] - share["3 stages"]))


def draw_wide() -> None:
    """Draws the speed of wide rows of bfloat16, and counts where the loop wins."""
    every = speeds(experiment("map_bfloat16", gpu=recording.PUBLISHED))
    share = every[["tiled", "persistent", OURS]].loc[1000:WIDE]
    even = share[share.index % 4 == 0]
    figures.plot_lines(
        {str(name): 100 * even[name] for name in even},
        "columns, bfloat16",
        "% of the speed of a copy",
        title="The loop wins only where tiled is far from a copy.",
        ticks=[1024, 4096, 16384, 32768],
    )
    wins = even[even["persistent"] > 1.05 * even["tiled"]]
    claim(
        f"At {len(wins)} of {len(even)} multiples of 4 from 1000 to {WIDE} columns the loop is "
        "over 5 % faster than tiled, and at none where tiled reaches 95 % of the speed of a copy.",
        (wins["tiled"] < FAST).all(),
    )
    glue("wins", f"{len(wins)} of {len(even)}")
    glue("wide_tiled", units.format_share(share["tiled"][WIDE]))
    glue("wide_loop", units.format_share(share["persistent"][WIDE]))
    glue("wide_chunks", units.format_share(every["chunks"][WIDE]))
    note = lab_notes.find(AGAIN)
    glue("again", note["result"].split(" of a copy")[0])


# ---- what the answers are examined for


def rows_of_programs(fn: Callable[[Tensor], Tensor], n_rows: int, n_cols: int = 5) -> list[Any]:
    """The rows that each program of `fn` reads, of a matrix of so many rows and columns."""
    rows: dict[object, set[int]] = {}
    x = torch.randn(n_rows, n_cols, device=device.default())
    accesses = count(fn, x, trace=True).accesses
    for access in accesses:
        if access.argument == accesses[0].argument:  # the first access reads
            rows.setdefault(access.program, set()).update(it // n_cols for it in access.offsets)
    return [sorted(mine) for mine in rows.values() if mine]


def takes_neighbours(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether each of three programs takes rows that are neighbours."""
    found = rows_of_programs(fn, 7)
    if len(found) != 3:
        raise AssertionError(f"{len(found)} programs read the 7 rows, not 3")
    for mine in found:
        if mine[-1] - mine[0] >= len(mine):
            raise AssertionError(f"one program reads rows {mine}, which are no neighbours")
    return prove.exam(fn)


RMS_NORM = Op(
    name="RMS norm",
    inputs="M,N N",
    reference=lambda x, w: x / x.square().mean(dim=1, keepdim=True).sqrt() * w,
    roundings=8,
)


def loads_weights_once(fn: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether each of three programs reads the weights of an RMS norm once."""
    x, w = RMS_NORM.arguments((50, 8)).tensors
    times = (count(fn, (x, w)).read_elements - x.numel()) / w.numel()
    if times > 3:
        raise AssertionError(
            f"50 rows read the weights {times:g} times, not 3: load them before the loop"
        )
    return prove.exam(fn, reads="MN + 3N", op=RMS_NORM)
