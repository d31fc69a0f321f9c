"""The folded cells of `book/long-rows.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import pandas as pd
import torch
from torch import Tensor

from memtraffic import count, resources
from memtraffic.kernels.softmax import online, split
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.residency import Occupancy
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct
from memtraffic_book import claim, experiment, experiments, figures, glue, prove, tables, units
from memtraffic_book.recording import speeds
from memtraffic_book.units import format_share as percent

LLAMA, ELEMENTS = 128256, 2**26  # columns; of each matrix of the map, at most
KERNELS = ("split", "online", "torch.softmax")
LOGSUMEXP = "lambda x: torch.logsumexp(x, dim=1)"


def reads(way: str, impl: str) -> pd.Series:
    """What a kernel reads on one way, in multiples of the matrix, by columns."""
    counted = experiment("long_counters").query("impl == @impl").groupby("n")
    return counted[f"{way}_read_bytes"].sum() / (4 * counted["m"].first() * counted["n"].first())


def show_three_reads() -> None:
    """Claims what torch.softmax reads, and keeps how fast the kernels are."""
    share, times = speeds(experiment("map_float32")), reads("l1_l2", "torch.softmax")[LLAMA]
    found = f"{units.format_ratio(times)} the bytes of the matrix"
    claim(f"At {LLAMA} columns torch.softmax reads {found}.", abs(times / 3 - 1) < 0.01)
    for name in KERNELS:
        glue(f"{name.split('.')[0]}_share", percent(share[name][LLAMA]))
    glue("split_longest", percent(share["split"].iloc[-1]))


def draw_second_read() -> None:
    """Draws how much of the second read of `online` comes from DRAM, over its working set."""
    [kernel] = resources(online.softmax, SOFTMAX, (64, LLAMA), target="sm_90")
    at_once, sent = Occupancy.of(kernel).programs, reads("dram", "online")
    l2 = experiment("roof")["l2_mib"][0] * 2**20
    working = [round(4e-6 * n * min(at_once, ELEMENTS // n), 1) for n in sent.index]
    ax = figures.plot_lines(
        {"online": sent.set_axis(working)},
        "working set, MB",
        "reads from DRAM, multiples of MN",
        title="The larger the working set, the more of the second read comes from DRAM.",
        ticks=working,
    )
    figures.mark_position(ax, l2 / 1e6, "size\nof L2", "left")
    near, far = sent.iloc[0], sent.iloc[-1]
    sends = "DRAM sends {} the matrix at the smallest working set, and {} at the largest"
    sends = sends.format(*map(units.format_ratio, (near, far)))
    claim(f"{sends}.", near < 1.3 and far > 1.6)
    glue("rows_at_once", str(at_once))


def check_impatience() -> None:
    """Claims that programs of `split` which never wait find the same numbers, and read more."""
    x = matrix(2, 4096)

    def in_parts(x: Tensor, **options: int) -> Tensor:
        return split.softmax(x, block=1024, chunks=1, **options)

    once, often = count(in_parts, x), count(lambda x: in_parts(x, looks=0), x)
    ratio = often.read_elements / once.read_elements
    claim(
        f"Programs that never wait find the same {x.numel()} numbers, bit for bit, and read "
        f"{units.format_ratio(ratio)} as much.",
        ratio > 2 and torch.equal(in_parts(x), in_parts(x, looks=0)),
    )


def draw_speeds() -> None:
    """Draws the speed of three kernels over long rows."""
    share = speeds(experiment("map_float32")).loc[4096:]
    figures.plot_lines(
        {name: 100 * share[name].set_axis(share.index / 1024) for name in KERNELS},
        "columns, multiples of 1024",
        "speed, percent of a copy",
        title="The kernel that reads each number once is the fastest.",
        ticks=[4, 16, 64, 256, 1024],
    )
    ours, twice = share.loc[LLAMA][["split", "online"]]
    claim(
        f"At {LLAMA} columns split reaches {percent(ours)} of the speed of a copy, and online "
        f"{percent(twice)}.",
        ours > 1.2 * twice,
    )


def show_few_rows() -> None:
    """Shows the times at 8 rows, and glues how many programs a row of them needs."""
    timed, roof = experiments("long_few", "roof")
    few = timed.pivot(index="n", columns="impl", values="us")
    few = few.rename(columns={"split, 1024 columns": "split"}).loc[[4096, 32768, 262144]]
    rows = few[["copy", *reversed(KERNELS)]].map(units.format_us).reset_index(names="columns")
    tables.show(rows, **{name: itemgetter(name) for name in rows})
    gain = (few["online"] / few["split"])[262144]
    faster = f"{units.format_ratio(gain)} as fast as online"
    claim(f"With 8 rows of 262144 columns split is {faster}.", gain > 1.5)
    rate = 3 * 4 * 262144 / few["online"][262144] / 1e3  # GB/s of an SM with one program
    glue("parts", f"{roof['copy_gb_per_s'][0] / rate / 8:.1f} times")
    glue("wait", units.format_us(few["split"][4096] - few["copy"][4096]))


# ---- judges of the exercises


def examine_minus_infinity(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` is right where a row begins with -inf, and reads 2MN. Raises if not."""
    x = matrix(3, 2500)
    x[1, :2048] = -float("inf")
    assert_correct("softmax", fn, x)
    return prove.exam(fn, reads="2MN")


def examine_logsumexp(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn` is the logsumexp of each row, and writes M. Raises if not."""
    return prove.exam(fn, writes="M", op=LOGSUMEXP)


def examine_help(fn: Callable[..., Tensor]) -> bool:
    """Whether 3 of a row's 4 programs end and are right. Raises if they wait for ever."""
    x = matrix(1, 16)
    count(fn, (x, 3))  # an interpreter sees that they would wait, and a GPU would not end
    return torch.allclose(fn(x, 3)[0, :12], x.softmax(dim=1)[0, :12])
