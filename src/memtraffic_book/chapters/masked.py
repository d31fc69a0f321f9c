"""The folded cells of `book/masked.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtraffic import count, device
from memtraffic.kernels.softmax import masked
from memtraffic.testing import assert_correct
from memtraffic_book import claim, exhibits, experiment, glue, prove, tables, units
from memtraffic_book.recording import speeds

FIRST = (16384, 8193)  # what answers the first exercise
NARROW = 1024, 512, 256, 128, 64  # columns

# What the exercises compute.
SOFTMAX = "lambda x: torch.softmax(x, dim=1)"
SOFTMIN = "lambda x: torch.softmax(-x, dim=1)"


def try_softmaxes() -> None:
    """Shows what a careless check and the judge say of four softmaxes, three of which are wrong."""

    def nobody(x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.empty_like(x) if out is None else out

    def careless(fn: Callable[..., Tensor], x: Tensor) -> bool:
        used = masked.softmax(x)
        y = fn(x, used) if fn is nobody else fn(x)
        return torch.allclose(y, torch.softmax(x, dim=1))

    def judge(fn: Callable[..., Tensor], x: Tensor) -> bool:
        try:
            assert_correct("softmax", fn, x)
        except AssertionError:
            return False
        return True

    suspects: dict[str, Callable[..., Tensor]] = {
        "no other": exhibits.softmax_no_other,
        "block of 512": exhibits.softmax_block_of_512,
        "writes nothing": nobody,
        "masked": masked.softmax,
    }
    even, odd = (torch.rand(3, n, device=device.default()) - 2 for n in (512, 781))
    passed = {name: careless(fn, even) for name, fn in suspects.items()}
    right = {name: judge(fn, odd) for name, fn in suspects.items()}
    tables.show(
        suspects,
        kernel=str,
        careless_check=lambda name: "looks right" if passed[name] else "refused",
        judge=lambda name: "right" if right[name] else "refused",
    )
    found = [name for name, holds in right.items() if holds]
    claim(
        f"The careless check passes {sum(passed.values())} of 4 softmaxes, the judge passes "
        f"{len(found)}: masked.",
        all(passed.values()) and found == ["masked"],
    )
    glue("passed", str(sum(passed.values())))


def time_the_cheat() -> None:
    """Claims how fast a kernel looks that leaves out most of a row."""
    us = experiment("masked_narrow").set_index("impl")["us"]
    row = torch.zeros(1, 4096, device=device.default())
    done = count(exhibits.softmax_block_of_512, row).read_elements
    looks = us["masked"] / us["block of 512"]
    claim(
        f"At 4096 columns the block of 512 reads {done} numbers of a row, and looks "
        f"{units.format_ratio(looks)} as fast as masked.",
        done == 512 and looks > 3,
    )
    glue("at_4096", units.format_share(speeds(experiment("map_float32"))["masked"][4096]))


def time_narrow() -> None:
    """Shows the speed of `masked` at narrower and narrower rows."""
    share = speeds(experiment("map_float32"))["masked"]
    tables.show(NARROW, columns_=str, speed_of_a_copy=lambda n: units.format_share(share[n]))


def check_narrow(n: int, at_least: float) -> None:
    """Claims that `masked` keeps up with a copy at `n` columns. Raises where it does not."""
    share = speeds(experiment("map_float32"))["masked"][n]
    claim(
        f"At {n} columns masked reaches {units.format_share(share)} of the speed of a copy "
        f"(at least {units.format_share(at_least)} needed).",
        share >= at_least,
    )


# ---- what the answers are examined for


def examine(op: str) -> Callable[[Any], bool]:
    """A judge of functions that compute `op` of a matrix of any width."""
    return lambda fn: prove.exam(fn, op=op)
