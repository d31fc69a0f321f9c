"""What holds for every rung of the ladder."""

import re
import sys

import kernels
import pytest
import torch

from memtraffic import runtime
from memtraffic.errors import CountError
from memtraffic.meters.count import count
from memtraffic.meters.formula import formula
from memtraffic.names import RUNGS, import_function, import_path
from memtraffic.tensors import matrix
from memtraffic.testing import assert_softmax, assert_touches_once

DEVICE = runtime.device()
KERNEL_RUNGS = [name for name in RUNGS if name != "naive"]


@pytest.fixture(params=RUNGS)
def softmax(request):
    """The softmax of each rung."""
    return import_function(request.param)


def test_rungs_are_in_the_order_of_the_book():
    assert list(RUNGS) == ["naive", "fused", "masked", "tiled", "persistent"]
    assert [import_path(import_function(name)) for name in RUNGS] == list(RUNGS)


@pytest.mark.parametrize(
    ("m", "n"),
    [
        pytest.param(5, 1, id="one-column"),
        pytest.param(5, 2, id="two-columns"),
        pytest.param(1, 16, id="one-row"),
        pytest.param(7, 1024, id="one-program-per-row"),
        pytest.param(2, 32768, id="widest-row"),
        pytest.param(140, 8, id="more-programs-than-sms"),
    ],
)
def test_softmax(softmax, m, n, dtype):
    assert_softmax(softmax, matrix(m, n, dtype))


def test_softmax_of_large_values_does_not_overflow(softmax, dtype):
    x = matrix(6, 256, dtype) * 5000
    x[0] = torch.finfo(dtype).max / 4
    x[1] = -torch.finfo(dtype).max / 4
    assert_softmax(softmax, x)


def test_softmax_of_minus_infinity_is_zero(softmax, dtype):
    x = matrix(4, 64, dtype)
    x[0, :63] = x[1, ::2] = x[2, -1] = -float("inf")
    assert_softmax(softmax, x)
    y = softmax(x)
    assert (y[torch.isinf(x)] == 0).all()
    assert y[0, 63] == 1


def test_softmax_of_equal_values_is_uniform(softmax, dtype):
    assert (softmax(torch.full((3, 8), -3.0, dtype=dtype, device=DEVICE)) == 1 / 8).all()


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda wide: wide[:, :64], id="padded-rows"),
        pytest.param(lambda wide: wide[:, 3:67], id="unaligned-start"),
        pytest.param(lambda wide: wide[::2, :64], id="every-other-row"),
        pytest.param(lambda wide: wide[2:, 16:80], id="starts-at-third-row"),
        pytest.param(lambda wide: wide[:1, :64].expand(5, 64), id="row-stride-0"),
    ],
)
def test_softmax_of_rows_that_lie_apart(softmax, view):
    x = view(matrix(6, 100))
    assert_softmax(softmax, x)
    assert softmax(x).is_contiguous()


def test_softmax_without_rows(softmax):
    y = softmax(torch.empty(0, 8, device=DEVICE, dtype=torch.float16))
    assert (y.shape, y.dtype) == ((0, 8), torch.float16)


def test_softmax_is_new_memory(softmax):
    x = matrix(2, 8)
    assert softmax(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


# ---- what the rungs move


def test_formula_is_that_of_the_docstring(softmax):
    docstring = sys.modules[softmax.__module__].__doc__
    [traffic] = re.findall(r"Traffic: (reads .*?, writes .*?)\.\s", docstring)
    assert str(formula(softmax)) == traffic


def assert_moves_least(softmax, x):
    """Each element of `x` is read once, each of the result written once, and nothing else."""
    result = []
    traffic = count(lambda x: result.append(softmax(x)), x, trace=True)
    assert_touches_once(traffic, "x_ptr", x)
    assert_touches_once(traffic, "y_ptr", result[0])
    assert (traffic.read_elements, traffic.written_elements) == (x.numel(), x.numel())
    assert len(traffic.ops) == 1


@pytest.mark.parametrize("name", KERNEL_RUNGS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: matrix(5, 16), id="whole"),
        pytest.param(lambda: matrix(5, 1), id="one-column"),
        pytest.param(lambda: matrix(1, 16), id="one-row"),
        pytest.param(lambda: matrix(5, 24)[:, :16], id="padded-rows"),
        pytest.param(lambda: matrix(7, 16, "bfloat16")[2:], id="starts-at-third-row"),
    ],
)
def test_softmax_touches_each_element_once(name, make):
    assert_moves_least(import_function(name), make())


@pytest.mark.parametrize(
    "name",
    ["dropped_mask", "shortened_store", "skipped_row", "twice", "three_passes", "tuned"],
)
def test_assert_touches_once_finds_a_fault(name):
    assert_moves_least(kernels.masked, matrix(5, 12))
    with pytest.raises((AssertionError, CountError)):
        assert_moves_least(getattr(kernels, name), matrix(5, 12))
