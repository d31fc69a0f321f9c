"""The folded cells of `book/persistent.ipynb`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memtraffic import count, device, resources
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.op import Op
from memtraffic.residency import resident_programs
from memtraffic_book import claim, experiment, figures, glue, lab_notes, prove, tables, units
from memtraffic_book.catalog import SUSPECTS
from memtraffic_book.measurements import implementations
from memtraffic_book.recording import PUBLISHED, speeds

FIRST = (32, 128)  # what answers the first exercise
SHAPE = 4096, 16384  # the running example
VERSIONS = {  # by the names of the table: what was timed
    "loop": "1 stage",
    "loop, asks ahead": "3 stages",
    "loop, 8 warps": "1 stage, 8 warps",
    "loop, room for one row": "2 stages",
    "the same, a row per program": "2 stages, program per tile",
    "tiled": "tiled",
}
WIDE = 32768  # columns, where one program of bfloat16 fills an SM
COUNTER = "Let a program of the loop take its next row"


def take_apart() -> None:
    """Shows what was timed, in the order in which the page accuses."""
    us, impls = experiment("persistent_suspects").set_index("impl")["us"], implementations(SUSPECTS)
    share = {name: us["copy"] / us[label] for name, label in VERSIONS.items()}
    found = [resources(impls[it], SOFTMAX, SHAPE, target="sm_90")[0] for it in VERSIONS.values()]
    kernels = dict(zip(VERSIONS, found, strict=True))
    tables.show(
        VERSIONS,
        kernel=str,
        stages=lambda name: VERSIONS[name].partition(" stage")[0].replace("tiled", "–"),
        warps=lambda name: kernels[name].num_warps,
        programs_per_SM=lambda name: resident_programs(kernels[name]),
        speed_of_a_copy=lambda name: units.format_share(share[name]),
    )
    alone, ahead, pair, fixed, queue, tiled = share.values()
    claim(
        f"With a row per program, 2 programs per SM reach {units.format_share(queue)} of the speed "
        f"of a copy, and in a loop {units.format_share(fixed)}; no loop is as fast as tiled.",
        queue - fixed > pair - alone > 0 and max(alone, ahead, pair, fixed) < tiled,
    )
    glue("counter", lab_notes.find(COUNTER)["result"].split(" of a copy")[0].replace("→", "to"))
    for key, it in zip("alone ahead pair fixed queue tiled".split(), share.values(), strict=True):
        glue(key, units.format_share(it))


def draw_wide() -> None:
    """Draws the speed of wide rows of bfloat16, and counts where the loop wins."""
    share = speeds(experiment("map_bfloat16", gpu=PUBLISHED)).loc[1000:WIDE]
    even = share.loc[share.index % 4 == 0, ["tiled", "persistent", "chunks"]]
    figures.plot_lines(
        {str(name): 100 * even[name] for name in even},
        "columns, bfloat16",
        "% of the speed of a copy",
        title="The loop wins only where tiled is far from a copy.",
        ticks=[1024, 4096, 16384, 32768],
    )
    wins = even[even["persistent"] > 1.05 * even["tiled"]]
    claim(
        f"From 1000 to {WIDE} columns the loop is over 5 % faster than tiled at {len(wins)} of "
        f"{len(even)} widths; at none of these does tiled reach 95 % of the speed of a copy.",
        (wins["tiled"] < 0.95).all(),
    )
    for name in even:
        glue(f"wide_{name}", units.format_share(even[name][WIDE]))
    tutorial = speeds(experiment("map_float32", gpu=PUBLISHED)).loc[12672]  # its widest
    for name, key in {"torch.softmax": "theirs", "persistent": "loop", "tiled": "queued"}.items():
        glue(key, units.format_share(tutorial[name]))


# ---- what the answers are examined for


def takes_neighbours(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether each of three programs takes rows of a softmax that are neighbours."""
    rows: dict[object, set[int]] = {}
    accesses = count(fn, torch.randn(7, 5, device=device.default()), trace=True).accesses
    for access in accesses:
        if access.argument == accesses[0].argument:  # the first access reads
            rows.setdefault(access.program, set()).update(it // 5 for it in access.offsets)
    found = [sorted(mine) for mine in rows.values() if mine]
    assert len(found) == 3, f"{len(found)} programs read the 7 rows, not 3"
    for mine in found:
        assert mine[-1] - mine[0] < len(mine), f"one reads rows {mine}, which are no neighbours"
    return prove.exam(fn)


RMS_NORM = Op(
    name="RMS norm",
    inputs="M,N N",
    reference=lambda x, w: x / x.square().mean(dim=1, keepdim=True).sqrt() * w,
    roundings=8,
)


def loads_weights_once(fn: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether each of three programs reads the weights of an RMS norm once."""
    return prove.exam(fn, reads="MN + 3N", op=RMS_NORM)
