"""Shapes drawn by chance, at which no rule was ever tuned: ours beside what others offer there."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from memtraffic.benchmark.baselines import BACKWARD
from memtraffic.benchmark.timing import time_interleaved
from memtraffic.device import planning_gpu
from memtraffic.kernels.softmax import tiled
from memtraffic.kernels.tiling import MAX_COLS, max_warps
from memtraffic.op import find_op
from memtraffic_book import measurements

MOST = 2**20  # rows, and columns
MOST_BYTES = 4 * 2**30  # of a matrix
TILE_ROWS = [2**k for k in range(8)]
SWEPT = "memtraffic_book.held_out:swept_tile"
COMPILED = "compile(torch.softmax)"
SHORT_US = 20  # below this, what the fastest takes says more of its start than of its kernel
LATER_US = 1.0  # that ours may be later there
LEAST, USUAL = 0.95, 0.98  # of the speed of the fastest, elsewhere


class Case(NamedTuple):
    """A softmax of m x n elements, or the backward of one."""

    m: int
    n: int
    dtype: str
    backward: bool


def draw(count: int, seed: int) -> list[Case]:
    """Different cases drawn by chance, each size log-uniform; of both passes, float32 and bfloat16.

    >>> draw(1, seed=1) == draw(2, seed=1)[:1]
    True
    """
    chance = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        m, n = (int(2 ** chance.uniform(0, math.log2(MOST))) for _ in range(2))
        dtype = chance.choice(["float32", "bfloat16"])
        case = Case(m, n, dtype, chance.random() < 0.5)
        if m * n * getattr(torch, dtype).itemsize <= MOST_BYTES and case not in cases:
            cases.append(case)
    return cases


@functools.cache
def _fastest_tile(m: int, n: int, dtype: torch.dtype) -> tuple[int, int]:
    """The rows and warps of the rung `tiled` that take the least time at a shape."""
    [x] = find_op("softmax").arguments((m, n), str(dtype).removeprefix("torch.")).positional
    calls, options = [], []
    for rows in TILE_ROWS:
        for num_warps in (2**k for k in range(max_warps(planning_gpu(x)).bit_length())):
            call = functools.partial(tiled.softmax, x, rows=rows, num_warps=num_warps)
            try:
                call()
            except ValueError:  # too many elements for a lane
                continue
            calls.append(call)
            options.append((rows, num_warps))
    samples = time_interleaved(calls, budget=0.005)
    medians = [sorted(times)[len(times) // 2] for times in samples]
    return options[medians.index(min(medians))]


def swept_tile(x: Tensor) -> Tensor:
    """The rung `tiled`, with the rows and the warps that are the fastest at this shape.

    Raises ValueError for a row that is wider than the rung takes.
    """
    if x.shape[1] > MAX_COLS:
        raise ValueError(f"a tile has at most {MAX_COLS} columns, not {x.shape[1]}")
    rows, num_warps = _fastest_tile(*x.shape, x.dtype)
    return tiled.softmax(x, rows=rows, num_warps=num_warps)


def measure(cases: Iterable[Case], *, compiled: bool = False) -> pd.DataFrame:
    """Times ours and the others in each case. Columns: `backward`, and those of `compare`.

    compiled: `torch.compile`, too, which takes seconds for each case of a forward.
    """
    frames = []
    for case in cases:
        names = {"copy": "copy", "ours": "memtraffic.softmax", "torch": "torch.softmax"}
        names |= {name: name for name in ("Liger", "FlagGems", "QuACK")}
        if case.backward:
            names = {name: it if it == "copy" else it + BACKWARD for name, it in names.items()}
        else:
            names |= {"swept tile": SWEPT} | ({"compiled": COMPILED} if compiled else {})
        frame = measurements.compare(
            measurements.implementations(names),
            [(case.m, case.n)],
            inputs=find_op("softmax_backward" if case.backward else "softmax"),
            dtype=case.dtype,
            budget=0.02,
        )
        frame.insert(0, "backward", case.backward)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def verdicts(frame: pd.DataFrame) -> pd.DataFrame:
    """Ours against the fastest of the others in each case, the worst first.

    Columns: those of `Case`; `fastest`, of the others; `us`, its time; `ours_us`; `speed`, ours
    over its; `of_copy`, ours over a copy's, or an addition's; `met`, whether that is as fast as
    it should be. A case of which nothing was timed, for want of memory, has no row.
    """
    timed = frame[frame["us"] > 0].pivot(index=[*Case._fields], columns="impl", values="us")
    us = timed.reindex(columns=frame["impl"].unique())
    if us["ours"].isna().any():
        [case, *_] = us.index[us["ours"].isna()]
        raise RuntimeError(f"ours was not timed at {case}: {list(frame['note'].unique())}")
    others = us.drop(columns=["copy", "ours"])
    fastest, ours = others.min(axis=1), us["ours"]
    found = {
        "fastest": others.idxmin(axis=1),
        "us": fastest,
        "ours_us": ours,
        "speed": fastest / ours,
        "of_copy": us["copy"] / ours,
        "met": (fastest / ours >= LEAST).where(fastest >= SHORT_US, ours - fastest <= LATER_US),
    }
    return pd.DataFrame(found).reset_index().sort_values("speed", ignore_index=True)


def summary(found: pd.DataFrame, drawn: int) -> str:
    """What `verdicts` come to, in a few lines. drawn: how many cases; some may not be timed."""
    long = found[found["us"] >= SHORT_US]
    mean = statistics.geometric_mean(found["speed"])
    return (
        f"{len(found)} of {drawn} cases timed, {int(found['met'].sum())} as fast as they should "
        f"be; on average {mean:.3f} of the fastest other. Of {len(long)} of {SHORT_US} µs or more, "
        f"{int((long['speed'] >= USUAL).sum())} reach {USUAL}, the least {long['speed'].min():.3f}."
    )
