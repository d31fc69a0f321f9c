"""The folded cells of `book/naive.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtraffic import count
from memtraffic.kernels.softmax import naive
from memtraffic_book import claim, experiment, experiments, figures, glue, prove, units

M, N, ITEMSIZE = 4096, 16384, 4  # the running example, in float32
MATRIX = M * N * ITEMSIZE  # bytes

# What answers are compared with.
SOFTMAX = "lambda x: torch.softmax(x, dim=1)"
LOGS = (
    "lambda x: x - x.amax(1, keepdim=True)"
    " - (x - x.amax(1, keepdim=True)).exp().sum(1, keepdim=True).log()"
)


def draw_maxima() -> None:
    """Draws where the bytes of the row maxima are counted."""
    measured = experiment("naive_counters")
    sub = measured.iloc[1]
    each, loads = MATRIX, sub["instruction_read_bytes"] - MATRIX  # without those of x
    l1, once = sub["l1_l2_read_bytes"] - MATRIX, M * ITEMSIZE
    texts = [units.format_bytes(found) for found in (once, l1, loads, each)]
    title = f"67 million elements want {texts[3]} of row maxima, and DRAM sends {texts[0]}."
    figures.strip(("DRAM", "L2", "L1", "loads", "sub"), texts, title=title)
    claim(
        f"The {M} maxima are {texts[3]} if each element counts, {texts[2]} at the loads, "
        f"{texts[1]} from L2 to L1, and {texts[0]} in DRAM.",
        each > 2 * loads > 4 * l1 > 8 * once,
    )
    glue("dram", units.format_ratio(measured["dram_read_bytes"].sum() / (5 * MATRIX)))
    for name, text in zip(("once", "l1", "loads", "each"), texts, strict=True):
        glue(name, text)


def draw_late() -> None:
    """Draws the time of each line beside that of its bytes."""
    measured, race = experiments("naive_counters", "fused_race")
    counted = count(naive.softmax, torch.empty(M, N, device="meta")).ops
    took, us = [*measured["ns"] / 1e3], race.set_index("impl")["us"]
    due = [(op.read_bytes + op.written_bytes) / (2 * MATRIX) * took[2] for op in counted]
    late = [units.format_ratio(us / least) for us, least in zip(took, due, strict=True)]
    texts = [f"{units.format_us(us)}, {ratio}" for us, ratio in zip(took, late, strict=True)]
    xlabel = "GPU time, µs (orange: its bytes at the speed of exp)"
    title = f"sub and div move the bytes of exp, and take {late[1]} and {late[4]} as long."
    ax = figures.plot_bars([op.name for op in counted], took, texts, xlabel, title)
    for i, mark in enumerate(due):
        ax.plot([mark, mark], [i - 0.42, i + 0.42], color=figures.ORANGE, linewidth=3)
    ratio = us["naive"] / us["copy"]
    claim(
        f"The five lines take {units.format_ratio(ratio)} as long as a copy, and for the same "
        f"bytes sub takes {late[1]} and div {late[4]} the time of exp.",
        ratio > 3 and min(took[1], took[4]) > 1.1 * took[2],
    )
    glue("copy_us", units.format_us(us["copy"]))
    glue("naive_us", units.format_us(us["naive"]))
    glue("times", f"{ratio:.1f} times")
    glue("sub", f"{took[1] / took[2]:.1f} times")


# ---- what the answers are examined for


def normalize(x: Tensor) -> Tensor:
    """Each row with a mean of 0 and a standard deviation of 1."""
    centred = x - x.mean(dim=1, keepdim=True)
    return centred / x.std(dim=1, keepdim=True)


def predicts(pair: Any) -> bool:
    """Whether a pair of formulas says what `normalize` reads and what it writes."""
    prove.traffic(normalize, *pair)
    return True


def examine(reads: str, writes: str, op: str) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of a matrix and move so much."""
    return lambda fn: prove.exam(fn, reads, writes, op)
