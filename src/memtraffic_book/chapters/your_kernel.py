"""The folded cells of `book/your-kernel.ipynb`, and the judges of its exercises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from memtraffic import count, device
from memtraffic.op import Op
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct
from memtraffic_book import claim, experiment, glue, prove, tables, units

MATRIX = 4 * 8192 * 8192  # bytes
ROW, LOOP = "RMS norm, row", "RMS norm, loop"
SHOWN = {"copy": "copy", "RMS norm, PyTorch": "F.rms_norm", ROW: "a program per row", LOOP: "loop"}
REQUESTED, SENT = "instruction_read_bytes", "dram_read_bytes"
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def show_levels() -> None:
    """Shows what each level of memory sends to both RMS norms, and claims who answers."""
    frame = experiment("your_kernel_rms_counters").set_index("kernel")
    frame = frame.rename(index=lambda name: SHOWN[LOOP if "loop" in name else ROW])
    tables.show(
        frame.index,
        kernel=str,
        instructions_request=lambda it: units.format_bytes(frame[REQUESTED][it]),
        L2_sends=lambda it: units.format_bytes(frame["l1_l2_read_bytes"][it]),
        DRAM_sends=lambda it: units.format_bytes(frame[SENT][it]),
    )
    glue("half", f"{experiment('roof')['l2_mib'][0] * 2**20 / 2e6:.0f} MB")
    asked, came = (frame[name][SHOWN[ROW]] / MATRIX for name in (REQUESTED, SENT))
    claim(
        f"A program per row requests {units.format_ratio(asked)} the bytes of the matrix, as "
        f"counted, and DRAM sends {units.format_ratio(came)}.",
        abs(asked - 2) < 0.02 and came < 1.05,
    )


def show_clock() -> None:
    """Shows the times of both RMS norms beside a copy, and claims what the loop changes."""
    timed = experiment("your_kernel_rms").set_index("impl")
    us = timed["us"]
    tables.show(
        SHOWN,
        what=lambda name: SHOWN[name],
        time_=lambda name: units.format_us(us[name]),
        speed_of_a_copy=lambda name: units.format_percent(us["copy"] / us[name]),
    )
    change = f"{100 * (us[LOOP] / us[ROW] - 1):.1f} %"
    claim(
        f"The loop takes {change} longer: its 20th percentile is above the other's 80th.",
        timed["us_p20"][LOOP] > timed["us_p80"][ROW],
    )
    glue("change", change)


def show_loss() -> None:
    """Shows the times of the loss with its gradient beside a copy, and claims what is gained."""
    race = experiment("your_kernel_race").pivot(index="impl", columns="dtype", values="us")
    names = {"copy": "copy of the logits", "cross-entropy, PyTorch": "PyTorch, both passes"}
    names |= {"cross-entropy": "one kernel"}
    tables.show(
        names,
        what=lambda name: names[name],
        float32=lambda name: units.format_us(race["float32"][name]),
        bfloat16=lambda name: units.format_us(race["bfloat16"][name]),
    )
    over, theirs = (race.loc[name] / race.loc["copy"] for name in [*names][:0:-1])
    claim(
        f"In 2 types one kernel takes at most {units.format_ratio(over.max())} the time of a copy, "
        f"and PyTorch at least {units.format_ratio(theirs.min())}.",
        over.max() <= 1.1 and theirs.min() > 2.5,
    )


# ---- losses and norms, and the judges of the exercises


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * w


RMS_NORM = Op("RMS norm", "M,N N", _rms_norm, 8)
LAYER = Op("layer norm", "M,N N", lambda x, w: F.layer_norm(x, x.shape[1:], eps=1e-6) * w, 8)
SUM = Op("the sum", "M,N M,N N", lambda x, r, w: x + r, 8)
NORM = Op("the norm of the sum", "M,N M,N N", lambda x, r, w: _rms_norm(x + r, w), 8)
judge_layer_norm = partial(prove.exam, reads="2MN", op=LAYER)


def judge_add_and_norm(fn: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Examines a function of x, r and w that returns `x + r` and its RMS norm."""
    prove.exam(lambda *args: fn(*args)[0], "3MN", "2MN", SUM)
    return prove.exam(lambda *args: fn(*args)[1], "3MN", "2MN", NORM)


def _gradient(x: Tensor, target: Tensor) -> Tensor:
    one = F.one_hot(target.clamp(min=0), x.shape[1])
    return (x.softmax(dim=1) - one) * (target >= 0)[:, None]


def _judged(fn: Loss, padded: bool) -> tuple[Tensor, Tensor]:
    """Logits of 9 rows, and their targets; what `fn` makes of them is right."""
    rows = torch.arange(9, device=device.default())
    x, target = matrix(9, 781), (rows * 7).masked_fill(padded & (rows % 3 == 1), -100)
    each: list[Callable[..., Tensor]] = [partial(F.cross_entropy, reduction="none"), _gradient]
    for i, reference in enumerate(each):
        op = Op("the loss", "M,N M:int64<N", reference, 8)
        assert_correct(op, lambda *args, i=i: fn(*args)[i], x, target)
    return x, target


def check_loss(fn: Loss) -> None:
    """Claims that `fn` returns losses and their gradient."""
    m, n = _judged(fn, padded=False)[0].shape
    claim(f"On {m} x {n} logits the losses and their gradient agree with float64.", True)


def judge_padding(fn: Loss) -> bool:
    """Examines losses and gradients, and that rows with the target -100 are not read."""
    x, target = _judged(fn, padded=True)
    rows, found = int((target >= 0).sum()), count(fn, (x, target)).read_elements
    if found > rows * x.shape[1] + 2 * len(x):
        raise AssertionError(f"with {rows} of {len(x)} rows to read it reads {found} elements")
    return True
