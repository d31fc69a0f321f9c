"""The folded cells of `book/many-gpus.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memtraffic.op import Op
from memtraffic.tensors import matrix
from memtraffic_book import claim, experiment, glue, prove, tables, units
from memtraffic_book.many_gpus import ALONE, COPY, DTENSOR, ONE, TWO
from memtraffic_book.processes import run_ranks

FIRST = 14  # what answers the first exercise
N = 16384  # columns of a part, in the case of the prose
LABELS = {COPY: COPY, ALONE: "part alone", ONE: ONE, TWO: TWO, DTENSOR: DTENSOR}
# What exercise 2 computes, in float64; as in Triton, a NaN is no maximum.
SUMS = (
    "lambda x: torch.stack([x.nan_to_num(-torch.inf).amax(1), "
    "(x - x.nan_to_num(-torch.inf).amax(1, keepdim=True)).exp().sum(1)], 1)"
)
SUMS_OF: Callable[[Tensor], Tensor] = eval(SUMS, {"torch": torch})


def two_numbers() -> Tensor:
    part = torch.tensor([[1.0, 3, 2], [5, 4, 5]][dist.get_rank()])
    part_max = part.max()
    numerators = torch.exp(part - part_max)
    posted = [torch.empty(2) for _ in range(2)]
    dist.all_gather(posted, torch.stack([part_max, numerators.sum()]))
    maxima, sums = torch.stack(posted).unbind(1)
    row_max = maxima.max()
    row_sum = (sums * torch.exp(maxima - row_max)).sum()
    return numerators * torch.exp(part_max - row_max) / row_sum


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
        "The softmax of a DTensor calls 1 collective, an all-gather, in which a rank sends MN "
        "elements.",
        ["all_gather" in name for name in calls] == [True]
        and sum(calls.values()) == 1
        and sent == m * n,
    )


def show_times() -> None:
    """Shows the time of each implementation, a row for each width of a part in float32."""
    times = experiment("many_gpus").query("dtype == 'float32'")
    us = times.pivot(index="n", columns="impl", values="us")
    cells = us.map(lambda it: units.format_us(it) if it > 0 else "–")
    shown = {label.replace(" ", "_"): cells[impl].get for impl, label in LABELS.items()}
    tables.show(us.index, columns=str, **shown)
    found, link = us.loc[N], 450e3  # bytes per µs, one way, by the H200's datasheet
    gain, cost = found[TWO] / found[ONE], found[DTENSOR] / found[ONE]
    claim(
        f"At {N} columns a GPU, one kernel is {units.format_ratio(gain)} as fast as two, and "
        f"{units.format_ratio(cost)} as fast as the DTensor.",
        gain > 1.1 and cost > 3,
    )
    told = {
        "alone": found[ALONE],
        "waits": found[ONE] - found[ALONE],
        "gathers": found[TWO] - 1.5 * found[COPY],  # an all-gather, beside three trips
        "dtensor": found[DTENSOR],
        "part": 4 * times["m"].iloc[0] * N / link,
    }
    for name, it in told.items():
        glue(f"{name}_us", units.format_us(it))


# ---- judges of the exercises


def _part_and_sums(m: int, n: int, **options: object) -> tuple[Tensor, Tensor]:
    x, other = (matrix(m, n, seed=seed, **options) for seed in (0, 1))  # type: ignore[arg-type]
    return x, torch.stack([SUMS_OF(x.float()), SUMS_OF(other.float())])


def _normalised(x: Tensor, all_sums: Tensor) -> Tensor:
    maxima, sums = all_sums.unbind(2)
    row_max = maxima.amax(dim=0)
    row_sum = (sums * (maxima - row_max).exp()).sum(dim=0)
    return (x - row_max[:, None]).exp() / row_sum[:, None]


NORMALISED = Op("own columns", _part_and_sums, _normalised, roundings=16)


def examine(reference: str) -> Callable[[Callable[..., Tensor]], bool]:
    """A judge of functions of a part that read it once and write two numbers a row."""
    return lambda fn: prove.exam(fn, "MN", "2M", reference)


def examine_normalised(fn: Callable[..., Tensor]) -> bool:
    """Whether `fn` of a part and the sums of two ranks gives the part's columns. Raises if not."""
    return prove.exam(fn, "MN + 4M", "MN", NORMALISED)
