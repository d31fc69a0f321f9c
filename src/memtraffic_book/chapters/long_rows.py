"""The folded cells of `book/long-rows.ipynb`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic import count, resources
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import online, split
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.residency import Occupancy
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct
from memtraffic_book import claim, experiment, experiments, figures, glue, prove, tables, units
from memtraffic_book.recording import speeds
from memtraffic_book.units import format_share as percent

LLAMA, LONGEST = 128256, 2**20  # columns
ELEMENTS = 2**26  # of each matrix of the map, at most
READS = ["instruction_read_bytes", "l1_l2_read_bytes", "dram_read_bytes"]
KERNELS = ("split", "online", "torch.softmax")
TILES = [[1, 3], [2, 5], [4, 5]]


def reads(counted: pd.DataFrame) -> pd.DataFrame:
    """What each kernel reads on each way, in multiples of the matrix, by kernel and columns."""
    found = counted.groupby(["impl", "n"])[READS].sum()
    size = (4 * counted["m"] * counted["n"]).groupby([counted["impl"], counted["n"]]).first()
    return found.div(size, axis=0)


def show_three_reads() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Claims what torch.softmax reads and how fast it is; returns all shares and reads."""
    share, moved = speeds(experiment("map_float32")), reads(experiment("long_counters"))
    times = moved.loc["torch.softmax", LLAMA]["l1_l2_read_bytes"]
    claim(
        f"At {LLAMA} columns torch.softmax reads {units.format_ratio(times)} the bytes of the "
        "matrix (3 expected, within 1 %).",
        abs(times / 3 - 1) < 0.01,
    )
    reached = share["torch.softmax"][LLAMA]
    claim(
        f"It reaches {percent(reached)} of the speed of a copy (less than 60 % expected).",
        reached < 0.6,
    )
    for name in KERNELS:
        glue(f"{name.split('.')[0]}_share", percent(share[name][LLAMA]))
    glue("split_longest", percent(share["split"][LONGEST]))
    return share, moved


def check_sum(row: Iterable[float], total: float, how: str) -> None:
    """Claims that `total` is the sum of the row's numerators, as powers of 2."""
    whole = sum(2.0 ** (x - max(row)) for x in row)
    claim(f"{how} gives the sum {whole}, as all six terms at once do.", total == whole)


def draw_second_read(moved: pd.DataFrame) -> None:
    """Draws how much of the second read of `online` comes from DRAM, over its working set."""
    _, roof = experiments("long_counters", "roof")  # of one GPU
    [kernel] = resources(online.softmax, SOFTMAX, (64, LLAMA), target="sm_90")
    at_once = Occupancy.of(kernel, find_gpu("H200")).programs
    l2 = roof["l2_mib"][0] * 2**20
    twice = moved.loc["online"]
    working = {n: 4 * n * min(at_once, ELEMENTS // n) for n in twice.index}  # bytes
    sent = twice["dram_read_bytes"]
    line = pd.Series(list(sent), [round(size / 1e6, 1) for size in working.values()])
    ax = figures.plot_lines(
        {"online": line},
        "working set, MB",
        "reads from DRAM, multiples of MN",
        title="The larger the working set, the more of the second read comes from DRAM.",
        ticks=list(line.index),
    )
    figures.mark_position(ax, l2 / 1e6, "size\nof L2", "left")
    asked = twice["instruction_read_bytes"]
    claim(
        f"At {len(asked)} widths the loads ask for {units.format_ratio(asked.max())} the bytes of "
        "the matrix (2 expected, within 1 %).",
        abs(asked / 2 - 1).max() < 0.01,
    )
    near, far = sent.iloc[0], sent.iloc[-1]
    claim(
        f"DRAM sends {units.format_ratio(near)} the matrix where the working set is far smaller "
        f"than L2, and {units.format_ratio(far)} where it is far larger (1.3x and 1.6x are the "
        "limits).",
        near < 1.3 and far > 1.6,
    )
    glue("l2", units.format_bytes(l2))
    glue("rows_at_once", str(at_once))


def check_split(moved: pd.DataFrame) -> None:
    """Claims that the programs of a row read each element once, counted and measured."""
    accesses = count(split.softmax, matrix(4, 65536), trace=True).accesses
    mine = [access for access in accesses if access.argument == "x_ptr" and len(access.offsets)]
    times = Counter(offset for access in mine for offset in access.offsets)
    sharing = len({access.program for access in mine}) // 4
    claim(
        f"Each row of 65536 is shared by {sharing} programs, which read its elements "
        f"{max(times.values())} time.",
        set(times.values()) == {1} and len(times) == 4 * 65536,
    )
    sent = moved.loc["split", LLAMA]["dram_read_bytes"]
    claim(
        f"At {LLAMA} columns DRAM sends {units.format_ratio(sent)} the bytes of the matrix to "
        "split (at most 1.05x expected).",
        sent <= 1.05,
    )


def check_impatience(fn: Callable[..., Tensor]) -> None:
    """Claims that programs which never wait find the same numbers, and read more.

    fn: split.softmax with several programs a row.
    """
    x = matrix(2, 4096)
    same = torch.equal(fn(x), fn(x, looks=0))
    claim(f"Programs that never wait find the same {x.numel()} numbers, bit for bit.", same)
    once, often = count(fn, x), count(lambda x: fn(x, looks=0), x)
    ratio = often.read_elements / once.read_elements
    claim(f"But they read {units.format_ratio(ratio)} as much (more than 2x expected).", ratio > 2)


def draw_speeds(share: pd.DataFrame) -> None:
    """Draws the speed of three kernels over long rows, and claims it in two types."""
    long = share[share.index >= 4096]
    figures.plot_lines(
        {name: 100 * long[name].set_axis(long.index / 1024) for name in KERNELS},
        "columns, multiples of 1024",
        "speed, percent of a copy",
        title="The kernel that reads each number once is the fastest.",
        ticks=[4, 16, 64, 256, 1024],
    )
    at = share.loc[LLAMA]
    claim(
        f"At {LLAMA} columns split reaches {percent(at['split'])} of the speed of a copy, and "
        f"online {percent(at['online'])} (more than 1.2x as fast needed).",
        at["split"] > 1.2 * at["online"],
    )
    half = speeds(experiment("map_bfloat16"))["split"][LLAMA]
    claim(
        f"In bfloat16 split reaches {percent(half)} at {LLAMA} columns (more than 75 % needed).",
        half > 0.75,
    )


def show_few_rows() -> None:
    """Shows the times at 8 rows, and glues how many programs a row of them needs."""
    timed, roof = experiments("long_few", "roof")
    few = timed.pivot(index="n", columns="impl", values="us")
    names = {"copy": "copy", "torch.softmax": "torch_softmax", "online": "online"}
    names["split, 1024 columns"] = "split"

    def time_of(impl: str) -> Callable[[int], str]:
        return lambda n: units.format_us(few[impl][n])

    shown = [4096, 32768, 262144]
    tables.show(shown, columns_=str, **{name: time_of(impl) for impl, name in names.items()})
    gain = (few["online"] / few["split, 1024 columns"]).loc[65536:].min()
    claim(
        f"With 8 rows of 65536 columns or more, split is {units.format_ratio(gain)} as fast as "
        "online, or faster (more than 1.5x needed).",
        gain > 1.5,
    )
    widest = few.index[-1]
    rate = 3 * 4 * widest / few["online"][widest] / 1e3  # GB/s of an SM with one program
    bandwidth = roof["copy_gb_per_s"][0]
    glue("sm_rate", units.format_gb_per_s(rate))
    glue("parts", f"{bandwidth / rate / 8:.1f} times")


# ---- judges of the exercises


def forgetful_sum() -> float:
    """What the loop over the six numbers finds if it forgets to rescale."""
    total, row_max = 0.0, -float("inf")
    for tile in TILES:
        row_max = max(row_max, *tile)
        total += sum(2.0 ** (x - row_max) for x in tile)
    return total


def examine_minus_infinity(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` is right where a row begins with -inf, and reads 2MN. Raises if not."""
    x = matrix(3, 2500)
    x[1, :2048] = -float("inf")
    assert_correct("softmax", fn, x)
    return prove.exam(fn, reads="2MN")


def examine_logsumexp(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` is the logsumexp of each row, and writes M. Raises if not."""
    return prove.exam(fn, writes="M", op=lambda x: x.logsumexp(dim=1))


def are_parts(pair: Any) -> bool:
    """Whether `pair` is the programs of a row of 33000 columns and the chunks of each."""
    found = split.split_row(33000, 512, 16, num_warps=4)
    return tuple(pair) == (found.parts, found.chunks)
