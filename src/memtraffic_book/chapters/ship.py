"""The folded cells of `book/ship.ipynb`: what to call, read from what was timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from memtraffic.benchmark.timing import choose
from memtraffic.tensors import matrix
from memtraffic.testing import is_correct
from memtraffic_book import claim, experiment, experiments, figures, glue, tables, units
from memtraffic_book.recording import speeds

FIRST = ((1, 2), (5, 1.4))  # what answers the first exercise
TYPES = ("float32", "bfloat16")
QUIET = "lambda x: (e := (x - (m := x.amax(1, True).relu())).exp()) / ((-m).exp() + e.sum(1, True))"
TORCH, OURS, FUSED = "torch.softmax", "memtraffic.softmax", "scaled_dot_product_attention"
CALLED, IN_GRAPH = "eager_us", "graph_us"
BELOW = {"": (4, 24), "_gradient": (60, 60)}  # MB: torch is to be called below, ours above
SHOWN = [(4096, 128), (8, 151936), (4096, 1024), (4096, 4096), (4096, 50257)]
FLAT = 95  # % of a copy, from which on a line counts as flat


def load(gradient: str = "") -> dict[str, pd.DataFrame]:
    """What was timed of each type. gradient: "", or "_gradient" for forward and backward."""
    frames = experiments(*(f"decision{gradient}_{dtype}" for dtype in TYPES))
    return dict(zip(TYPES, frames, strict=True))


def times(frame: pd.DataFrame, column: str = CALLED) -> pd.DataFrame:
    """The times in a column, a row for each number of rows and columns, by what was called."""
    return frame.pivot(index=["m", "n"], columns="impl", values=column)


def show_calls() -> None:
    """Shows what a call takes at a few shapes of float32, and keeps numbers for the prose."""
    us = times(load()["float32"])
    tables.show(
        SHOWN,
        matrix=lambda key: f"{key[0]} x {key[1]}",
        size=lambda key: units.format_bytes(4 * key[0] * key[1]),
        torch=lambda key: units.format_us(us[TORCH][key]),
        ours=lambda key: units.format_us(us[OURS][key]),
    )
    call, roof = us[OURS][SHOWN[0]], experiment("roof")["copy_gb_per_s"][0]
    glue("call", units.format_us(call))
    glue("kernel", units.format_us(times(load()["float32"], IN_GRAPH)[OURS][SHOWN[0]]))
    glue("roof", units.format_gb_per_s(roof))
    glue("covered", f"{call * roof / 2000:.0f} MB")  # half of it is read


def claim_sizes(gradient: str) -> None:
    """Claims below which size `torch.softmax` is to be called. gradient: as in `BELOW`."""
    (low, high), cases = BELOW[gradient], []
    for dtype, frame in load(gradient).items():
        us, itemsize = times(frame), getattr(torch, dtype).itemsize
        for (m, n), part in frame[frame["impl"] != "copy"].groupby(["m", "n"]):
            found, mb = choose(part, CALLED), m * n * itemsize / 1e6
            cases.append((mb, found == TORCH, us[OURS][m, n] / us[TORCH][m, n]))
    small = [is_torch for mb, is_torch, _ in cases if mb < low]
    large = [(is_torch, ratio) for mb, is_torch, ratio in cases if mb > high]
    ratio = statistics.geometric_mean(ratio for _, ratio in large)
    claim(
        f"Called{' with its gradient' * bool(gradient)} from Python, torch.softmax is "
        f"beaten by none in {sum(small)} of {len(small)} cases of less than {low} MB, and in "
        f"{sum(it for it, _ in large)} of {len(large)} of more than {high} MB; in these "
        f"memtraffic.softmax takes {units.format_ratio(ratio)} its time on average.",
        sum(small) > 0.75 * len(small) and ratio < 0.9,
    )
    glue(f"below{gradient}", f"{low} MB")
    glue(f"above{gradient}", f"{high} MB")
    glue(f"share{gradient}", f"{100 * ratio:.0f} %")


def claim_attention() -> None:
    """Claims what attention takes with a softmax of its scores, and without scores."""
    frame = experiment("decision_attention")
    us = frame.pivot(index="n", columns="impl", values="us")
    ratio = us[OURS] / us[FUSED]
    claim(
        f"With memtraffic.softmax, attention takes at least {units.format_ratio(ratio.min())} the "
        f"time of {FUSED}.",
        ratio.min() > 2,
    )
    for name, impl in (("attention", OURS), ("sdpa", FUSED)):
        glue(name, units.format_us(us[impl].iloc[-1]))


def draw_map() -> None:
    """Draws how flat the line became, in both types, beside `torch.softmax`."""
    share = dict(zip(TYPES, map(speeds, experiments("map_float32", "map_bfloat16")), strict=True))
    ours = 100 * pd.DataFrame({dtype: share[dtype][OURS] for dtype in TYPES})
    flat = (ours >= FLAT).sum()
    title = f"memtraffic.softmax: {FLAT} % of a copy at {flat.sum()} of {ours.size} points."
    ax = figures.width_map(ours, (TYPES[1], TYPES[0]), title=title)
    for label, below in zip(ax.texts, (-34, -19), strict=True):  # of two lines that nearly meet
        label.set_position((0, below))
    claim(
        f"In float32, memtraffic.softmax reaches {FLAT} % of the speed of a copy at "
        f"{flat['float32']} of {len(ours)} widths, and in bfloat16 at {flat['bfloat16']}.",
        (flat > len(ours) / 2).all(),
    )
    gain = statistics.geometric_mean(share["float32"][OURS] / share["float32"][TORCH])
    single, half = (ours[dtype] for dtype in TYPES)
    glue("range", f"{single.min():.0f} % to {single.max():.0f} %")
    glue("lowest_at", f"{half.min():.0f} % at {half.idxmin()} columns")
    glue("over_torch", units.format_ratio(gain))


def right_by_the_table_alone(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a softmax is right at multiples of 128 columns, and wrong at 781."""
    for n in (256, 384, 640):
        if not is_correct("softmax", fn, matrix(5, n)):
            raise AssertionError(f"it is wrong at {n} columns, a width of the table")
    if is_correct("softmax", fn, matrix(5, 781)):
        raise AssertionError("it is right at 781 columns, too")
    return True
