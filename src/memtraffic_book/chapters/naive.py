"""The folded cells of `book/naive.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtraffic import count
from memtraffic.kernels.softmax import naive
from memtraffic.meters.count import Traffic
from memtraffic_book import claim, experiment, figures, glue, lab_notes, prove, tables, units

M, N, ITEMSIZE = 4096, 16384, 4  # the running example, in float32
MATRIX = M * N * ITEMSIZE  # bytes
PREFETCH = "After its own loads, let a program fetch into L2"


def lines() -> Traffic:
    """What each of the five lines moves for the running example, counted."""
    return count(naive.softmax, torch.empty(M, N, device="meta"))


def time_lines() -> None:
    """Sets the time of the five lines beside that of a copy."""
    us = experiment("fused_race").set_index("impl")["us"]
    ratio = units.format_ratio(us["naive"] / us["copy"])
    claim(
        f"The five lines take {ratio} as long as a copy of the same matrix, more than 3x.",
        us["naive"] > 3 * us["copy"],
    )
    glue("copy_us", units.format_us(us["copy"]))
    glue("naive_us", units.format_us(us["naive"]))
    glue("times", f"{us['naive'] / us['copy']:.1f} times")


def show_ops(counted: Traffic) -> None:
    """Shows the count of each line. counted: of the five lines, on a matrix of 3 x 5."""
    tables.show(
        counted.ops,
        line=lambda op: op.name,
        reads=lambda op: op.read_elements,
        writes=lambda op: op.written_elements,
    )
    moved = counted.read_elements, counted.written_elements
    claim("The five lines read 81 elements and write 51, for a matrix of 15.", moved == (81, 51))


def show_counters() -> list[dict[Any, Any]]:
    """Shows what hardware counters saw of each line. Returns what they saw."""
    measured, counted = experiment("naive_counters").to_dict("records"), lines().ops
    fetched = [row["dram_read_bytes"] for row in measured]
    sent = [row["l2_write_sectors"] * 32 for row in measured]  # a sector has 32 bytes
    tables.show(
        range(len(counted)),
        line=lambda i: counted[i].name,
        reads_counted=lambda i: units.format_bytes(counted[i].read_bytes),
        from_memory=lambda i: units.format_bytes(fetched[i]),
        writes_counted=lambda i: units.format_bytes(counted[i].written_bytes),
        to_L2=lambda i: units.format_bytes(sent[i]),
    )
    seen = sum(fetched) / (5 * MATRIX)
    claim(
        f"The 5 lines run {len(measured)} kernels, and memory sends them "
        f"{units.format_ratio(seen)} the bytes of 5MN elements, to within 1 %.",
        len(measured) == len(counted) == 5 and abs(seen - 1) < 0.01,
    )
    return measured


def draw_maxima(measured: list[dict[Any, Any]]) -> None:
    """Draws where the bytes of the row maxima are counted. measured: of `show_counters`."""
    sub = measured[1]
    each, warps = MATRIX, sub["instruction_read_bytes"] - MATRIX  # without those of x
    l1, once = sub["l1_l2_read_bytes"] - MATRIX, M * ITEMSIZE
    texts = [units.format_bytes(found) for found in (once, l1, warps, each)]
    title = f"67 million elements want {texts[3]} of row maxima, and memory sends {texts[0]}."
    figures.strip(("DRAM", "L2", "L1", "warps", "lanes"), texts, title=title)
    claim(
        f"The {M} maxima are {texts[3]} if each element counts, {texts[2]} at the instructions, "
        f"{texts[1]} from L2 to L1, and {texts[0]} in memory.",
        each > 2 * warps > 4 * l1 > 8 * once,
    )
    note = lab_notes.find(PREFETCH)
    _, _, expected = note["prediction"].split(",")[0].partition(" at 1048576 columns ")
    found = note["result"].rpartition(", ")[2].removesuffix(" where programs share a row")
    glue("prefetch_predicted", expected)
    glue("prefetch_found", found)
    glue("prefetch_why", note["why"].partition(" at 1048576")[0].rpartition(", ")[2])
    for name, text in zip(("once", "l1", "warps", "each"), texts, strict=True):
        glue(name, text)


def draw_late(measured: list[dict[Any, Any]]) -> None:
    """Draws the time of each line beside that of its bytes. measured: of `show_counters`."""
    counted, took = lines().ops, [row["ns"] / 1e3 for row in measured]
    due = [(op.read_bytes + op.written_bytes) / (2 * MATRIX) * took[2] for op in counted]
    late = [units.format_ratio(us / least) for us, least in zip(took, due, strict=True)]
    ax = figures.plot_bars(
        [op.name for op in counted],
        took,
        [f"{units.format_us(us)}, {ratio}" for us, ratio in zip(took, late, strict=True)],
        "GPU time, µs (orange: its bytes at the speed of exp)",
        f"sub and div move the bytes of exp, and take {late[1]} and {late[4]} as long.",
    )
    for i, mark in enumerate(due):
        ax.plot([mark, mark], [i - 0.42, i + 0.42], color=figures.ORANGE, linewidth=3)
    claim(
        f"For the same bytes, sub takes {late[1]} and div {late[4]} the time of exp, more than "
        "1.1x.",
        min(took[1], took[4]) > 1.1 * took[2],
    )


# ---- what the answers are examined for


def logs(x: Tensor) -> Tensor:
    """The logarithm of the softmax of each row."""
    return x.log_softmax(dim=1)


def predicts(fn: Callable[[Tensor], Tensor]) -> Callable[[Any], bool]:
    """A judge of pairs of formulas: what `fn` reads and what it writes."""

    def judge(pair: Any) -> bool:
        prove.traffic(fn, *pair)
        return True

    return judge


def examine(
    reads: str, writes: str, op: str | Callable[[Tensor], Tensor] = "softmax"
) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of a matrix and move so much."""
    return lambda fn: prove.exam(fn, reads, writes, op)
