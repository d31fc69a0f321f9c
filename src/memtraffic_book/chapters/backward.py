"""The folded cells of `book/backward.ipynb`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memtraffic.op import Op
from memtraffic.tensors import SECTOR_BYTES
from memtraffic_book import claim, experiment, figures, glue, prove, tables, units

FIRST = 10_000_000  # what answers the first exercise
MATRIX = 4 * 4096 * 16384  # bytes, of the running example in float32
OURS, THEIRS, LINES = "our backward", "PyTorch's backward", "one line of PyTorch"
BOTH = ["torch.softmax", "memtraffic.softmax"]
WIDTHS = (1, 2, 31, 33, 64)  # of the exercises
# What the exercises compute, in float64.
GRADIENT = "lambda y, dy: y * (dy - (y * dy).sum(dim=1, keepdim=True))"
FROM_X = "lambda x, dy: torch.autograd.functional.vjp(lambda x: x.softmax(1), x, dy)[1]"


def show_moves() -> None:
    """Shows what each backward reads and writes, a line for each kernel of PyTorch's."""
    ways = []
    theirs = ("PyTorch's", experiment("backward_torch_counters"))
    for label, seen in (("ours", experiment("backward_counters")), theirs):
        sizes = zip(seen["l1_l2_read_bytes"], seen["l2_write_sectors"] * SECTOR_BYTES, strict=True)
        ways += [(f"{label}, kernel {i}", *moved) for i, moved in enumerate(sizes, 1)]
    tables.show(
        ways,
        backward=lambda way: way[0],
        reads=lambda way: units.format_bytes(way[1]),
        writes=lambda way: units.format_bytes(way[2]),
    )
    ratio = sum(way[1] + way[2] for way in ways[1:]) / (3 * MATRIX)
    claim(
        f"PyTorch's backward moves {units.format_ratio(ratio)} the least bytes.",
        ratio > 1.5,
    )
    glue("torch_moves", units.format_ratio(ratio))


def draw_race() -> None:
    """Draws the speed of three backwards over the width, in percent of an addition's."""
    raced = experiment("backward_race").pivot(index=["dtype", "n"], columns="impl", values="us")
    share = raced.rdiv(raced["copy"], axis=0)
    figures.plot_lines(
        {name: 100 * share.loc["float32"][name] for name in (OURS, THEIRS, LINES)},
        "columns (67 million numbers)",
        "speed, percent of an addition",
        title="A backward that moves the least is nearly as fast as an addition.",
        ticks=[256, 1024, 4096, 16384, 131072],
    )
    slowest, gain = share[OURS].min(), (raced[THEIRS] / raced[OURS]).min()
    claim(
        f"At 6 widths in 2 types our backward has at least {100 * slowest:.0f} % of the speed of "
        f"an addition, and at least {units.format_ratio(gain)} that of PyTorch's.",
        slowest > 0.75 and gain > 1.2,
    )


def show_steps() -> None:
    """Shows what a step of training moves with two softmaxes, and how long its kernels take."""
    moved = experiment("backward_step_counters").set_index("softmax")
    moved["bytes"] = moved["dram_read_bytes"] + moved["dram_write_bytes"]
    tables.show(
        BOTH,
        softmax=str,
        DRAM_traffic=lambda name: units.format_bytes(moved["bytes"][name]),
        kernels=lambda name: units.format_us(moved["ns"][name] / 1000),
    )
    saved, faster = (moved[it][BOTH[1]] / moved[it][BOTH[0]] for it in ("bytes", "ns"))
    claim(
        f"With our softmax a step moves {units.format_ratio(saved)} the bytes of a step with "
        "PyTorch's.",
        saved < 0.95,
    )
    glue("less_time", f"{100 * (1 - faster):.0f} %")
    glue("scores", units.format_bytes(2 * 8 * 4096 * 4096 * 4))


def judge(reference: str) -> Callable[[Callable[..., Tensor]], bool]:
    """A judge of functions that read two matrices and write one: what `reference` computes."""
    op = Op("the gradient", "M,N M,N", eval(reference, {"torch": torch}), roundings=16)
    return lambda fn: prove.exam(fn, reads="2MN", writes="MN", op=op, widths=WIDTHS)
