"""The folded cells of `book/backward.ipynb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtraffic import device, formula
from memtraffic.kernels.softmax import masked
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.op import Op
from memtraffic.tensors import SECTOR_BYTES, matrix
from memtraffic_book import claim, exhibits, experiment, figures, glue, prove, tables, units

M, N = 4096, 16384  # of the running example, in float32
MATRIX = 4 * M * N  # bytes
OURS, THEIRS, LINES = "our backward", "PyTorch's backward", "one line of PyTorch"
BOTH = ["torch.softmax", "memtraffic.softmax"]
WIDTHS = (1, 2, 31, 33, 64)  # of the exercises
Softmax = Callable[..., Tensor]


def show_moves() -> None:
    """Shows what each backward reads and writes, a line for each kernel of PyTorch's."""
    reads, writes = (
        4 * n for n in formula(exhibits.backward_lines, SOFTMAX_BACKWARD).elements(M, N)
    )
    seen = experiment("backward_torch_counters")
    seen["written"] = SECTOR_BYTES * seen["l2_write_sectors"]
    asked = seen["instruction_read_bytes"] / MATRIX
    ways = [("the least", 2 * MATRIX, MATRIX), (LINES, reads, writes)]
    ways += [
        (f"PyTorch, kernel {i}", row["l1_l2_read_bytes"], row["written"])
        for i, row in enumerate(seen.to_dict("records"), 1)
    ]
    tables.show(
        ways,
        backward=lambda way: way[0],
        reads=lambda way: units.format_bytes(way[1]),
        writes=lambda way: units.format_bytes(way[2]),
    )
    moved = seen["l1_l2_read_bytes"].sum() + seen["written"].sum()
    ratio = moved / (3 * MATRIX)
    claim(
        f"PyTorch's backward moves {units.format_ratio(ratio)} the least bytes (more than 1.5x "
        "needed).",
        ratio > 1.5,
    )
    claim(
        f"The loads of its 2 kernels ask for {units.format_ratio(asked[0])} and "
        f"{units.format_ratio(asked[1])} a matrix (2 and 3 expected, within 1 %).",
        len(asked) == 2 and abs(asked[0] / 2 - 1) < 0.01 and abs(asked[1] / 3 - 1) < 0.01,
    )
    glue("torch_moves", units.format_ratio(ratio))


def check_differences(loss: Callable[[Tensor], Tensor], x: Tensor, dx: Tensor) -> None:
    """Claims that `dx` is the slope of `loss` along each element of `x`."""
    nudges = 1e-5 * torch.eye(len(x), dtype=x.dtype)
    slopes = torch.stack([(loss(x + nudge) - loss(x - nudge)) / 2e-5 for nudge in nudges])
    error = (slopes - dx).abs().max()
    claim(f"The {len(x)} elements of dx agree with finite differences to 1e-8.", error < 1e-8)
    claim(f"The {len(x)} elements of dx add up to 0.", dx.sum().abs() < 1e-12)


def draw_race() -> None:
    """Draws the speed of three backwards over the width, in percent of an addition's."""
    raced = experiment("backward_race").pivot(index=["dtype", "n"], columns="impl", values="us")
    share = raced.rdiv(raced["copy"], axis=0)
    figures.plot_lines(
        {name: 100 * share.loc["float32"][name] for name in (OURS, THEIRS, LINES)},
        "columns (67 million numbers)",
        "speed, percent of an addition",
        title="A backward that moves the least is nearly as fast as an addition.",
        ticks=[256, 1024, 4096, 16384, 131072],
    )
    slowest = share[OURS].min()
    claim(
        f"At 6 widths in 2 types our backward has at least {100 * slowest:.0f} % of the speed of "
        "an addition (75 % needed).",
        slowest > 0.75,
    )
    gain = (raced[THEIRS] / raced[OURS]).min()
    claim(
        f"It is at least {units.format_ratio(gain)} as fast as PyTorch's (more than 1.2x needed).",
        gain > 1.2,
    )


def check_gradient(softmax: Softmax) -> None:
    """Claims that the gradient of `softmax` is PyTorch's."""

    def gradient(fn: Softmax) -> Tensor:
        x = matrix(5, 781).requires_grad_()
        [dx] = torch.autograd.grad(fn(x), x, matrix(5, 781, seed=1))
        return dx

    theirs = gradient(lambda x: torch.softmax(x, dim=1))
    apart = (gradient(softmax) - theirs).abs().max() / theirs.abs().max()
    claim("The gradients of 5 x 781 numbers agree with PyTorch's to 1e-6.", apart < 1e-6)


class FromX(torch.autograd.Function):
    """A softmax whose backward computes `y` again from `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return masked.softmax(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        y = torch.softmax(x, dim=1)
        return y * (dy - (y * dy).sum(dim=1, keepdim=True))


def kept(softmax: Softmax) -> int:
    """How many elements a softmax of 64 x 64 scores and its product with 64 x 8 values keep."""
    found = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    scores, values = matrix(64, 64).requires_grad_() * 1, matrix(64, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        softmax(scores) @ values
    return sum(tensor.numel() for tensor in found.values())


def check_kept(softmax: Softmax) -> None:
    """Claims what attention keeps if its softmax keeps y, and if it keeps x."""
    of_y, of_x = kept(softmax), kept(FromX.apply)
    claim(
        f"A softmax of 64 x 64 scores and its product with values keep {of_y} elements with y, and "
        f"{of_x} with x.",
        of_x - of_y == 64 * 64,
    )


def check_losses(theirs: Tensor, ours: Tensor, wrong: Tensor) -> None:
    """Claims how far three losses fall in 20 steps."""
    apart = (ours / theirs - 1).abs().max()
    claim("In 20 steps our losses and PyTorch's differ by less than 1 in 10,000.", apart < 1e-4)
    fell, fell_wrong = theirs[-1] / theirs[0], wrong[-1] / wrong[0]
    claim(
        f"The loss falls to {100 * fell:.0f} % in 20 steps, and to {100 * fell_wrong:.0f} % with "
        "the wrong gradient.",
        fell < fell_wrong < 0.8,
    )
    glue("fell", f"{100 * fell:.0f} %")
    glue("fell_wrong", f"{100 * fell_wrong:.0f} %")


def show_steps() -> None:
    """Shows what a step of training moves with two softmaxes, and how long its kernels take."""
    moved = experiment("backward_step_counters").set_index("softmax")
    moved["bytes"] = moved["dram_read_bytes"] + moved["dram_write_bytes"]
    tables.show(
        BOTH,
        softmax=str,
        DRAM_traffic=lambda name: units.format_bytes(moved["bytes"][name]),
        kernels=lambda name: units.format_us(moved["ns"][name] / 1000),
    )
    saved, faster = (moved[it][BOTH[1]] / moved[it][BOTH[0]] for it in ("bytes", "ns"))
    claim(
        f"With our softmax a step moves {units.format_ratio(saved)} the bytes of a step with "
        "PyTorch's (less than 0.95x needed).",
        saved < 0.95,
    )
    glue("fewer", f"{100 * (1 - saved):.0f} %")
    glue("less_time", f"{100 * (1 - faster):.0f} %")
    glue("scores", units.format_bytes(2 * 8 * 4096 * 4096 * 4))


def check_graphs(registered: Softmax, package: Softmax) -> None:
    """Claims how many graphs the compiler makes of a softmax between two operations."""
    x = torch.randn(4, 8, device=device.default())

    def graphs(softmax: Softmax) -> int:
        found = []

        def keep(graph: Any, inputs: Any) -> Any:  # in place of the compiler
            found.append(graph)
            return graph.forward

        torch.compile(lambda x: softmax(2 * x) + 1, backend=keep)(x)
        return len(found)

    kept_out = torch.compiler.disable(masked.softmax)
    found = [graphs(it) for it in (kept_out, registered, package)]
    claim(
        f"Where the compiler may not read the launcher it makes {found[0]} graphs, and with the "
        f"registered operation {found[1]}, as with memtraffic.softmax.",
        found == [2, 1, 1],
    )


# ---- judges of the exercises


def _log_inputs(m: int, n: int, **options: Any) -> tuple[Tensor, Tensor]:
    y, dy = matrix(m, n, **options), matrix(m, n, seed=1, **options)
    return y.copy_(torch.log_softmax(y.float(), dim=1)), dy


def _log_backward(y: Tensor, dy: Tensor) -> Tensor:
    return dy - y.exp() * dy.sum(dim=1, keepdim=True)


def _backward_of_x(x: Tensor, dy: Tensor) -> Tensor:
    assert SOFTMAX_BACKWARD.reference is not None
    return SOFTMAX_BACKWARD.reference(torch.softmax(x, dim=1), dy)


LOG = Op("log_softmax_backward", _log_inputs, _log_backward, roundings=16)
FROM_X = Op("backward_of_x", "M,N M,N", _backward_of_x, roundings=16)


def judge(op: Op = SOFTMAX_BACKWARD) -> Callable[[Callable[..., Tensor]], bool]:
    """A judge of functions that read two matrices and write one: the result of `op`."""
    return lambda fn: prove.exam(fn, reads="2MN", writes="MN", op=op, widths=WIDTHS)
