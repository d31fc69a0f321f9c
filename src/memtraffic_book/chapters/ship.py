"""The folded cells of `book/ship.ipynb`: what to call, read from what was timed."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from memtraffic.benchmark.timing import choose
from memtraffic.tensors import matrix
from memtraffic.testing import is_correct
from memtraffic_book import claim, experiments, figures, glue, prove, tables, units
from memtraffic_book.chapters import naive
from memtraffic_book.recording import speeds

TYPES = ("float32", "bfloat16")
CASES = {
    f"{dtype}{', with gradient' * gradient}": f"decision{'_gradient' * gradient}_{dtype}"
    for gradient in (False, True)
    for dtype in TYPES
}
SHORT = {
    "torch.softmax": "torch",
    "compile(torch.softmax)": "compile",
    "memtraffic.softmax": "ours",
    "scaled_dot_product_attention": "SDPA",
}
ON_GPU, CALLED, IN_GRAPH = "us", "eager_us", "graph_us"
CALLED_AT = (8, 4096)  # rows, at which a page shows what the caller sees
SHOWN_AT = (128, 4096)  # columns
SHORT_TYPES = {"float32": "fp32", "bfloat16": "bf16"}
TORCH, OURS = "torch.softmax", "memtraffic.softmax"
WIDE, VECTOR_BYTES = 10_000_000, 16
FLAT = 95  # % of a copy, from which on a line counts as flat

Frames = Mapping[str, pd.DataFrame]


def load() -> dict[str, pd.DataFrame]:
    """What was timed of each of `CASES`."""
    return dict(zip(CASES, experiments(*CASES.values()), strict=True))


def short(name: str) -> str:
    """The name of a candidate, short enough for a table."""
    return SHORT.get(name, name)


def answers(frame: pd.DataFrame, column: str = ON_GPU) -> pd.Series[str]:
    """What to call at each shape, by columns `n` and rows `m`. column: the times that decide."""
    parts = frame[frame["impl"] != "copy"].groupby(["n", "m"])
    found = {key: choose(part, column) for key, part in parts}
    return pd.Series(found, dtype=object).rename_axis(["n", "m"])


def runs(found: pd.Series[str]) -> str:
    """The answers at one width as text, from few rows to many.

    >>> runs(pd.Series({8: "torch.softmax", 64: "torch.softmax", 4096: "QuACK"}))
    'torch ≤64, QuACK'

    found: by the number of rows.
    """
    parts = [
        (name, [m for m, _ in some]) for name, some in groupby(found.items(), lambda it: it[1])
    ]
    *before, (last, _) = parts
    text = "".join(f"{short(name)} ≤{rows[-1]}, " for name, rows in before)
    return text + short(last)


def show_decision(frames: Frames) -> None:
    """Shows what to call at each width and number of rows, called one by one from Python."""
    found = {case: answers(frame, CALLED) for case, frame in frames.items()}
    rows = next(iter(found.values()))
    tables.show_words(
        sorted(set(rows.index.get_level_values("n"))),
        columns=lambda n: n,
        **{case: lambda n, it=it: runs(it.loc[n]) for case, it in found.items()},
    )


class Threshold(NamedTuple):
    """A size of the matrix, below which `torch.softmax` is the answer.

    megabytes: of the matrix. below, small: how many smaller cases have that answer, of how many.
    above, large: how many larger cases have another one, of how many. share: of the time of
    `torch.softmax` that the answer takes in larger cases, on average.
    """

    megabytes: float
    below: int
    small: int
    above: int
    large: int
    share: float


def threshold(frames: Iterable[pd.DataFrame], column: str = CALLED) -> Threshold:
    """The round size that tells best where `torch.softmax` is the answer. column: of the times."""
    cases = []
    for frame in frames:
        us, itemsize = (
            frame.set_index(["n", "m", "impl"])[column],
            getattr(torch, frame["dtype"].iloc[0]).itemsize,
        )
        for (n, m), name in answers(frame, column).items():
            share = us[n, m, name] / us[n, m, TORCH]
            cases.append((m * n * itemsize / 1e6, name == TORCH, share))
    sizes = sorted({size for size, *_ in cases})
    found = []
    for size in dict.fromkeys(float(f"{(a * b) ** 0.5:.1g}") for a, b in pairwise(sizes)):
        small = [is_torch for it, is_torch, _ in cases if it < size]
        large = [(is_torch, share) for it, is_torch, share in cases if it >= size]
        if small and large:
            above = sum(not is_torch for is_torch, _ in large)
            share = statistics.geometric_mean(share for _, share in large)
            found.append(Threshold(size, sum(small), len(small), above, len(large), share))
    return max(found, key=lambda it: it.below + it.above)


def show_thresholds(frames: Frames) -> None:
    """Claims below how many MB `torch.softmax` is to be called, without and with a gradient."""
    for name, how in (("forward", ""), ("gradient", "with its gradient ")):
        it = threshold(frame for case, frame in frames.items() if ("gradient" in case) == bool(how))
        size = f"{it.megabytes:g} MB"
        claim(
            f"Called {how}one by one, torch.softmax is the answer in {it.below} of {it.small} "
            f"cases of less than {size}, and in {it.large - it.above} of {it.large} larger ones, "
            f"where the answer takes {100 * it.share:.0f} % of its time on average.",
            it.below + it.above > 0.75 * (it.small + it.large),
        )
        glue(f"{name}_mb", size)
        glue(f"{name}_share", f"{100 * it.share:.0f} %")


def claim_rivals(frames: Frames) -> None:
    """Claims how ours compares with the fastest other, where rows are whole vectors and where not.

    By the time on the GPU, of matrices from WIDE bytes on; none where a result was wrong.
    """
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for frame in frames.values():
        itemsize = getattr(torch, frame["dtype"].iloc[0]).itemsize
        bad = noted(frame, "wrong").groupby([frame["n"], frame["m"]])
        us = frame[frame[ON_GPU] > 0].pivot(index=["n", "m"], columns="impl", values=ON_GPU)
        ratio = us[OURS] / us.drop(columns=["copy", OURS], errors="ignore").min(axis=1)
        for (n, m), value in ratio[~bad.any()].items():
            if n * m * itemsize >= WIDE:
                ratios[n * itemsize % VECTOR_BYTES == 0].append(value)
    whole, odd = (statistics.geometric_mean(ratios[is_whole]) for is_whole in (True, False))
    claim(
        f"Of {WIDE // 10**6} MB or more, ours takes on average {units.format_ratio(whole)} the "
        f"time of the fastest other in {len(ratios[True])} cases whose rows are whole vectors of "
        f"16 bytes (0.85x to 1.1x needed), and {units.format_ratio(odd)} in {len(ratios[False])} "
        "others (less than 0.9x).",
        0.85 < whole < 1.1 and odd < 0.9,
    )
    found = [name for frame in frames.values() for name in answers(frame, CALLED)]
    glue("ours", str(found.count(OURS)))
    glue("cases", str(len(found)))
    glue("whole", units.format_ratio(whole))
    glue("odd", units.format_ratio(odd))


def show_times(frames: Frames) -> None:
    """Shows what to call at a few widths and its time in µs, by the three clocks.

    A table without the gradient, and one with it: narrow enough for a phone.
    """
    clocks = {"on_GPU": ON_GPU, "called": CALLED, "in_graph": IN_GRAPH}

    def cell(found: tuple[pd.Series[str], pd.Series[float]], n: int, m: int) -> str:
        name = found[0][n, m]
        us = found[1].get((n, m, name))
        return name if us is None else f"{short(name)} {number(us)}"

    for what, case in (("forward", ""), ("with_gradient", ", with gradient")):
        timed = {dtype: frames[dtype + case] for dtype in TYPES}
        columns = {
            heading: {
                dtype: (answers(frame, column), frame.set_index(["n", "m", "impl"])[column])
                for dtype, frame in timed.items()
            }
            for heading, column in clocks.items()
        }
        tables.show_words(
            itertools.product(SHOWN_AT, CALLED_AT, TYPES),
            **{what: lambda key: f"{key[1]}x{key[0]} {SHORT_TYPES[key[2]]}"},
            **{
                heading: lambda key, it=it: cell(it[key[2]], key[0], key[1])
                for heading, it in columns.items()
            },
        )
    called, graph = (
        fastest(frames[TYPES[0]], column)[SHOWN_AT[0], CALLED_AT[0]]
        for column in (CALLED, IN_GRAPH)
    )
    claim(
        f"At {CALLED_AT[0]} x {SHOWN_AT[0]} a call takes {units.format_ratio(called / graph)} what "
        "it takes in a CUDA graph (more than 2.00x needed).",
        called > 2 * graph,
    )


def fastest(frame: pd.DataFrame, column: str) -> pd.Series[float]:
    """The least time in a column at each shape, by columns `n` and rows `m`."""
    there = frame[(frame[column] > 0) & (frame["impl"] != "copy")]
    return there.groupby(["n", "m"])[column].min()


def number(us: float) -> str:
    """Microseconds with two digits that count, without their unit.

    >>> number(4.96), number(31.4), number(1234.5)
    ('5.0', '31', '1,234')
    """
    return f"{us:.1f}" if us < 9.95 else f"{us:,.0f}"


def noted(frame: pd.DataFrame, *kinds: str) -> pd.Series[bool]:
    """Whether the note of each result begins with one of `kinds`."""
    return frame["note"].astype(str).str.startswith(kinds)


def wrong(frames: Frames) -> Iterator[tuple[str, str]]:
    """Each kernel that was wrong, with its first shape and type, and what the judge said."""
    every = pd.concat(frames.values())
    bad = every[noted(every, "wrong")]
    for (name, n, dtype), part in bad.groupby(["impl", "n", "dtype"]):
        row = part.iloc[0]
        yield f"{name} {row['version']}, {row['m']} x {n}, {dtype}", row["note"].partition(",")[0]


def show_wrong(frames: Frames) -> None:
    """Names each kernel whose result was wrong, and claims how many of all results were."""
    found = list(wrong(frames))
    for where, note in found:
        print(f"{where}: {note}")
    every = pd.concat(frames.values())
    judged = ~noted(every, "absent", "refused")
    bad, imprecise = (noted(every, it).sum() for it in ("wrong", "imprecise"))
    claim(
        f"Of {judged.sum()} results that were judged, {bad} are wrong, none of them by "
        f"torch.softmax or memtraffic.softmax, and {imprecise} others are imprecise.",
        not any(where.startswith(("torch", "memtraffic")) for where, _ in found),
    )


def show_attention() -> None:
    """Shows what attention takes with a softmax of its scores, and without scores."""
    [frame] = experiments("decision_attention")
    us = frame.pivot(index="n", columns="impl", values="us")
    fused, cases = "scaled_dot_product_attention", ("", ", with gradient")
    tables.show_words(
        itertools.product(cases, us.index),
        words=lambda key: f"{key[1]}{key[0]}",
        **{
            short(name): lambda key, name=name: units.format_us(us.loc[key[1], name + key[0]])
            for name in ("torch.softmax", "memtraffic.softmax", fused)
        },
    )
    gain = min((us[OURS + case] / us[fused + case]).min() for case in cases)
    claim(
        f"Attention takes at least {units.format_ratio(gain)} the time of {fused} with "
        "memtraffic.softmax (more than 2.00x needed).",
        gain > 2,
    )


def draw_map() -> None:
    """Draws how flat the line became, in both types, beside `torch.softmax`."""
    frames = experiments(*(f"map_{it}" for it in TYPES))
    share = dict(zip(TYPES, map(speeds, frames), strict=True))
    ours = 100 * pd.DataFrame({dtype: share[dtype][OURS] for dtype in TYPES})
    flat = (ours >= FLAT).sum()
    title = f"The last kernel reaches {FLAT} % of a copy at {flat.sum()} of {ours.size} points."
    ax = figures.width_map(ours, (TYPES[1], TYPES[0]), title=title)
    for label, below in zip(ax.texts, (-34, -19), strict=True):  # of two lines that nearly meet
        label.set_position((0, below))
    claim(
        f"In float32 the last kernel reaches {FLAT} % of the speed of a copy at "
        f"{flat['float32']} of {len(ours)} widths, and in bfloat16 at {flat['bfloat16']} "
        "(more than half needed).",
        (flat > len(ours) / 2).all(),
    )
    gain = statistics.geometric_mean(share["float32"][OURS] / share["float32"][TORCH])
    lowest = ours.stack()
    n, dtype = lowest.idxmin()
    glue("lowest", f"{lowest.min():.0f} %")
    glue("lowest_at", f"{n} columns of {dtype}")
    glue("over_torch", units.format_ratio(gain))
    glue("step", units.format_ratio(1 / (0.9 + 0.1 / gain)))


# ---- the judges of the exercises


def right_by_the_table_alone(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a softmax is right at multiples of 128 columns, and wrong at 781."""
    for n in (256, 384, 640):
        if not is_correct("softmax", fn, matrix(5, n)):
            raise AssertionError(f"it is wrong at {n} columns, a width of the table")
    if is_correct("softmax", fn, matrix(5, 781)):
        raise AssertionError("it is right at 781 columns, too")
    return True


judge_log_softmax = functools.partial(prove.exam, op=naive.LOGS)
