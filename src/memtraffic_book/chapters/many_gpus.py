"""The folded cells of `book/many-gpus.ipynb`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from memtraffic.op import Op
from memtraffic.tensors import matrix
from memtraffic_book import claim, experiment, glue, prove, tables, units
from memtraffic_book.chapters.ship import SHORT_TYPES
from memtraffic_book.many_gpus import ALONE, COPY, DTENSOR, ONE, TWO
from memtraffic_book.processes import run_ranks

N, DTYPE = 16384, "float32"  # the case of the prose
LABELS = {
    COPY: "copy",
    ALONE: "part alone",
    ONE: "one kernel",
    TWO: "two kernels",
    DTENSOR: "DTensor",
}
Orders = Sequence[Sequence[int]]


def load_times() -> pd.DataFrame:
    """The times of all implementations. Glues those of the prose."""
    times = experiment("many_gpus")
    us = in_case(times)
    names = {ALONE: "alone", ONE: "one", DTENSOR: "dtensor"}
    for impl, name in names.items():
        glue(f"{name}_us", units.format_us(us[impl]))
    glue("wait_us", units.format_us(us[ONE] - us[ALONE]))
    return times


def in_case(times: pd.DataFrame) -> pd.Series:
    """The microseconds of each implementation in the case of the prose."""
    us: pd.Series = times.query("n == @N and dtype == @DTYPE").set_index("impl")["us"]
    return us


def two_numbers() -> Tensor:
    part = torch.tensor([[1.0, 3, 2], [5, 4, 5]][dist.get_rank()])
    part_max = part.max()
    numerators = torch.exp2(part - part_max)
    posted = [torch.empty(2) for _ in range(2)]
    dist.all_gather(posted, torch.stack([part_max, numerators.sum()]))
    maxima, sums = torch.stack(posted).unbind(1)
    row_max = maxima.max()
    row_sum = (sums * torch.exp2(maxima - row_max)).sum()
    return numerators * torch.exp2(part_max - row_max) / row_sum


def check_parts(parts: Sequence[Tensor], row: Sequence[float]) -> None:
    """Claims that the parts, joined, are the softmax of `row` in powers of 2."""
    exact = torch.softmax(torch.tensor(row, dtype=torch.float64) * torch.log(torch.tensor(2.0)), 0)
    error = (torch.cat([*parts]) - exact).abs().max()
    claim(f"Joined, they are the softmax of all {len(row)} numbers, to 1e-6.", error < 1e-6)


def collectives_of_dtensor(m: int, n: int) -> tuple[dict[str, int], int]:
    """How often each collective is called in the softmax of a DTensor; a rank calls this.

    m, n: of the part that each rank has. And how many elements this rank has of the others' parts
    afterwards: as many as it sent to them.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    x = DTensor.from_local(torch.ones(m, n), DeviceMesh("cpu", [0, 1]), [Shard(1)])
    with CommDebugMode() as seen:
        y: Any = torch.softmax(x, 1)
    counts = {str(name): times for name, times in seen.get_comm_counts().items()}
    return counts, y.to_local().numel() - m * n


def check_dtensor(m: int = 4, n: int = 8) -> None:
    """Claims that the softmax of a DTensor is one all-gather, and that this sends the matrix."""
    [(calls, sent), _] = run_ranks(collectives_of_dtensor, 2, (m, n), backend="gloo", timeout=300)
    claim(
        "The softmax of a DTensor calls 1 all-gather, and no other collective.",
        ["all_gather" in name for name in calls] == [True] and sum(calls.values()) == 1,
    )
    claim("In 1 all-gather of its part, a rank sends MN elements.", sent == m * n)


def show_times(times: pd.DataFrame) -> None:
    """Shows the median of each implementation, a row for each width and dtype of a part."""
    us = times.pivot(index=["dtype", "n"], columns="impl", values="us")
    cases = list(times[["dtype", "n"]].drop_duplicates().itertuples(index=False, name=None))

    def cell(impl: str) -> Callable[[tuple[str, int]], str]:
        return lambda case: units.format_us(t) if (t := us[impl].get(case, 0)) > 0 else "–"

    shown = {label.replace(" ", "_"): cell(impl) for impl, label in LABELS.items()}
    tables.show(cases, part=lambda case: f"{case[1]} {SHORT_TYPES[case[0]]}", **shown)
    found = in_case(times)
    gain, cost = found[TWO] / found[ONE], found[DTENSOR] / found[ONE]
    claim(
        f"At {N} columns of {DTYPE} a GPU, one kernel is {units.format_ratio(gain)} as fast as two "
        "(more than 1.1x needed).",
        gain > 1.1,
    )
    claim(
        f"There, the DTensor takes {units.format_ratio(cost)} its time (more than 3x needed).",
        cost > 3,
    )


# ---- judges of the exercises


def sums_of_rows(x: Tensor) -> Tensor:
    """The maximum of each row and the sum of its numerators, of shape (M, 2).

    As in Triton, a NaN is no maximum; the sum has it.
    """
    row_max = x.masked_fill(x.isnan(), -torch.inf).amax(dim=1)
    return torch.stack([row_max, (x - row_max[:, None]).exp().sum(dim=1)], dim=1)


def _part_and_sums(m: int, n: int, **options: object) -> tuple[Tensor, Tensor]:
    x, other = (matrix(m, n, seed=seed, **options) for seed in (0, 1))  # type: ignore[arg-type]
    return x, torch.stack([sums_of_rows(x.float()), sums_of_rows(other.float())])


def _normalised(x: Tensor, all_sums: Tensor) -> Tensor:
    maxima, sums = all_sums.unbind(2)
    row_max = maxima.amax(dim=0)
    row_sum = (sums * (maxima - row_max).exp()).sum(dim=0)
    return (x - row_max[:, None]).exp() / row_sum[:, None]


SUMS = Op("sums of rows", "M,N", sums_of_rows, roundings=16)
NORMALISED = Op("own columns", _part_and_sums, _normalised, roundings=16)


def examine_sums(fn: Callable[..., Tensor]) -> bool:
    """Whether `fn` of a part reads it once and writes two numbers a row. Raises if it is wrong."""
    return prove.exam(fn, "MN", "2M", SUMS)


def examine_normalised(fn: Callable[..., Tensor]) -> bool:
    """Whether `fn` of a part and the sums of two ranks gives the part's columns. Raises if not."""
    return prove.exam(fn, "MN + 4M", "MN", NORMALISED)


def examine_orders(ends: Callable[..., bool], orders: Orders) -> bool:
    """Whether these are two orders of rows 0 to 5 that never end with room for three."""
    assert len(orders) == 2, f"{len(orders)} orders, and there are 2 GPUs"
    for order in orders:
        assert sorted(order) == list(range(6)), f"{order} is no order of the rows 0 to 5"
    assert not ends(orders, 3), "these orders end"
    return True
