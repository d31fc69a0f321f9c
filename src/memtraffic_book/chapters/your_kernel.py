"""The folded cells of `book/your-kernel.ipynb`, and the judges of its exercises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memtraffic import count, device, formula, resources
from memtraffic.op import Op
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct, assert_resources
from memtraffic_book import claim, experiment, glue, prove, tables, units, yours

ROWS, COLS, ITEMSIZE = 8192, 8192, 4
ROW, LOOP = "RMS norm, row", "RMS norm, loop"
SHOWN = {"copy": "copy", "RMS norm, PyTorch": "F.rms_norm", ROW: "a program per row", LOOP: "loop"}
PACKED: dict[str, Any] = {"layouts": ("packed",), "widths": (1, 2, 127, 781, 1024)}

RMS_NORM = Op(
    name="RMS norm",
    inputs="M,N N",
    reference=lambda x, w: x * (x.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * w,
    roundings=8,
)


def keep_reads(fn: Callable[..., Tensor]) -> None:
    """Claims how many times the numbers of the matrix an RMS norm reads, and keeps it."""
    reads, _ = formula(fn, "M,N N").elements(ROWS, COLS)
    times = float(reads) / (ROWS * COLS)
    claim(f"At {ROWS} x {COLS} it reads {times:.2f} times the numbers of the matrix.", times == 2)
    glue("reads", f"{times:.0f}")


def show_levels() -> None:
    """Shows what each level of memory sends to both RMS norms, and claims who answers."""
    frame = experiment("your_kernel_rms_counters").set_index("kernel")
    frame = frame.rename(index=lambda name: SHOWN[LOOP if "loop" in name else ROW])
    tables.show(
        frame.index,
        kernel=str,
        instructions_request=lambda it: units.format_bytes(frame["instruction_read_bytes"][it]),
        L2_sends=lambda it: units.format_bytes(frame["l1_l2_read_bytes"][it]),
        DRAM_sends=lambda it: units.format_bytes(frame["dram_read_bytes"][it]),
    )
    asked, came = (
        frame[name] / (ROWS * COLS * ITEMSIZE)
        for name in ("instruction_read_bytes", "dram_read_bytes")
    )
    row = SHOWN[ROW]
    claim(
        f"A program per row requests {units.format_ratio(asked[row])} the "
        f"bytes of the matrix, as counted, and DRAM sends {units.format_ratio(came[row])} (less "
        "than 1.05x needed).",
        abs(asked[row] - 2) < 0.02 and came[row] < 1.05,
    )


def show_clock() -> None:
    """Shows the times of both RMS norms beside a copy, and claims what the loop changes."""
    us = experiment("your_kernel_rms").set_index("impl")["us"]
    tables.show(
        SHOWN,
        what=lambda name: SHOWN[name],
        time_=lambda name: units.format_us(us[name]),
        speed_of_a_copy=lambda name: units.format_percent(us["copy"] / us[name]),
    )
    change = us[LOOP] / us[ROW] - 1
    claim(
        f"With the loop, the time changes by {100 * change:+.1f} % (less than 25 % needed).",
        abs(change) < 0.25,
    )
    glue("change", f"{100 * change:+.1f} %")


def claim_small() -> None:
    """Claims that the weights, which are read again, are far below half of L2."""
    weights, half = COLS * ITEMSIZE, experiment("roof")["l2_mib"][0] * 2**20 / 2
    claim(
        f"The {COLS} weights have {units.format_bytes(weights)}, and half of L2 has "
        f"{units.format_bytes(half)} (at least 100 times as much needed).",
        half > 100 * weights,
    )
    glue("half", f"{half / 1e6:.0f} MB")


# ---- the loss


def _less_one(x: Tensor, target: Tensor) -> Tensor:
    return x.softmax(dim=1) - F.one_hot(target, x.shape[1])


def _loss_op(**options: Any) -> Op:
    def inputs(m: int, n: int, **how: Any) -> tuple[Tensor, Tensor]:
        return matrix(m, n, **how), torch.arange(m, device=device.default()) * 7 % n

    return Op(inputs=inputs, roundings=8, **options)


def prove_loss() -> None:
    """Judges loss and gradient of `yours.cross_entropy`, and compares its counters with MN."""

    def gradient(x: Tensor, target: Tensor) -> Tensor:
        return yours.cross_entropy(x, target)[1]

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return yours.cross_entropy(x, target)[0]

    each = partial(F.cross_entropy, reduction="none")
    prove.correct(gradient, op=_loss_op(name="gradient", reference=_less_one), **PACKED)
    prove.correct(loss, op=_loss_op(name="loss", reference=each), dtypes=("float32",), **PACKED)
    prove.counters("your_kernel_counters")


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
    over = race.loc["cross-entropy"] / race.loc["copy"]
    theirs = race.loc["cross-entropy, PyTorch"] / race.loc["copy"]
    ratios = (units.format_ratio(it[dtype]) for dtype in race for it in (over, theirs))
    one, two, three, four = ratios
    claim(
        f"In bfloat16 one kernel takes {one} the time of a copy and PyTorch {two}, in float32 "
        f"{three} and {four} (at most 1.10x, and at least twice as much, needed).",
        over.max() <= 1.1 and (theirs > 2 * over).all(),
    )
    glue("over", units.format_ratio(over["float32"]))
    glue("pytorch_ratio", units.format_ratio(theirs["float32"]))


# ---- the judges of the exercises


def _normed(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], eps=1e-6) * w


LAYER_NORM = dataclasses.replace(RMS_NORM, name="layer norm", reference=_normed)
judge_layer_norm = partial(prove.exam, reads="2MN", op=LAYER_NORM)


def judge_add_and_norm(fn: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Examines a function of x, r and w that returns `x + r` and its RMS norm."""
    inputs = dataclasses.replace(RMS_NORM, name="add and norm", inputs="M,N M,N N")
    added = dataclasses.replace(inputs, reference=lambda x, r, w: x + r)
    norm = RMS_NORM.judged
    normed = dataclasses.replace(inputs, reference=lambda x, r, w: norm(x + r, w))
    prove.exam(lambda *args: fn(*args)[0], reads="3MN", writes="2MN", op=added)
    return prove.exam(lambda *args: fn(*args)[1], reads="3MN", writes="2MN", op=normed)


def judge_spills(fn: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Examines an RMS norm that spills nothing at 32768 columns and loops at 4096."""

    def empty(n: int) -> tuple[Tensor, Tensor]:
        here = device.default()
        return torch.empty(16, n, device=here), torch.empty(n, device=here)

    assert_resources(fn, empty(32768), target="sm_90", spill_bytes=0)
    [kernel] = resources(fn, empty(4096), target="sm_90")
    if kernel.kernel != "_rms_norm_loop_kernel":
        raise AssertionError(f"at 4096 columns it launches {kernel.kernel}")
    x, w = RMS_NORM.arguments((5, 781)).tensors
    assert_correct(RMS_NORM, fn, x, w)
    return True


def _padding(m: int, n: int) -> tuple[Tensor, Tensor]:
    rows = torch.arange(m, device=device.default())
    return matrix(m, n), (rows * 7 % n).masked_fill(rows % 3 == 1, -100)


def _padded_gradient(x: Tensor, target: Tensor) -> Tensor:
    return _less_one(x, target.clamp(min=0)) * (target >= 0)[:, None]


def judge_padding(fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> bool:
    """Examines losses and gradients, and that rows with the target -100 are not read."""
    each = partial(F.cross_entropy, reduction="none")
    for i, reference in enumerate((each, _padded_gradient)):
        op = _loss_op(name="padded", reference=reference)
        for m, n in ((1, 2), (7, 8), (9, 781)):
            assert_correct(op, lambda *args, i=i: fn(*args)[i], *_padding(m, n))
    x, target = _padding(9, 781)
    rows, found = int((target >= 0).sum()), count(fn, (x, target)).read_elements
    if found > rows * x.shape[1] + 2 * len(x):
        raise AssertionError(f"with {rows} of {len(x)} rows to read it reads {found} elements")
    return True
