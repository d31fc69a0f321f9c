"""What holds for every rung of the ladder, and what is special about the shortest of them."""

import re
import sys
from functools import partial

import pytest
import torch
from cases import assert_softmax

from memtraffic import device
from memtraffic.compile import capture_launches
from memtraffic.kernels.softmax import fused, masked, online
from memtraffic.meters.formula import formula
from memtraffic.names import RUNGS, import_function, import_path
from memtraffic.tensors import matrix

DEVICE = device.default()


def test_rungs_are_in_the_order_of_the_book():
    first = "naive", "fused", "masked", "tiled", "chunks"
    assert list(RUNGS) == [*first, "persistent", "online", "split"]
    assert [import_path(import_function(name)) for name in RUNGS] == list(RUNGS)


@pytest.mark.parametrize("name", RUNGS)
def test_formula_is_that_of_the_docstring(name):
    softmax = import_function(name)
    docstring = sys.modules[softmax.__module__].__doc__
    [traffic] = re.findall(r"Traffic: (reads .*?, writes .*?)\.\s", docstring)
    one_program = [(9, 8), (4, 2), (2, 700)]  # a row; of longer ones, split takes several
    assert str(formula(softmax, held_out=one_program)) == traffic


# ---- fused


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        pytest.param(lambda: matrix(4, 781), "781", id="not-a-power-of-two"),
        pytest.param(lambda: matrix(4, 0), "0", id="no-columns"),
        pytest.param(lambda: matrix(4, 6)[:, ::3], "3", id="two-columns-3-apart"),
        pytest.param(lambda: matrix(8, 4).T, "4", id="transposed"),
    ],
)
def test_fused_refuses_and_repeats_the_numbers(make, numbers):
    with pytest.raises(ValueError, match=rf"^fused: .*\b{numbers}"):
        fused.softmax(make())


# ---- masked, online


@pytest.mark.parametrize(("n", "warps"), [(781, 4), (5000, 16), (20000, 32)])
def test_warps_of_masked_are_by_the_block(n, warps):
    [launch] = capture_launches(masked.softmax, torch.empty(2, n, device=DEVICE))
    assert launch.options["num_warps"] == warps


def test_online_reads_so_many_columns_at_a_time():
    of = partial(online.softmax, block=16, num_warps=2)
    [launch] = capture_launches(of, matrix(5, 78))
    assert (launch.constants["BLOCK"], launch.options["num_warps"]) == (16, 2)


def test_online_kernel_takes_float64_below_any_float32():
    """The running maximum starts at minus infinity: no other number stands for it."""
    x = torch.full((2, 40), -1e300, dtype=torch.float64, device=DEVICE)
    x[1, 20:] = -float("inf")
    y = torch.empty_like(x)
    with device.device_guard(x):
        online.online_kernel[(1,)](
            y, *y.stride(), x, *x.stride(), *x.shape, ROWS=2, BLOCK=16, ALIGN=1
        )
    assert_softmax(lambda _: y, x)
