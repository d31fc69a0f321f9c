import re

import pytest
import torch
from sharded_cases import (
    CASES,
    PLACEMENTS,
    UNEVEN,
    WIDTHS,
    WORLD,
    answers,
    extremes,
    targets,
    whole,
)  # fmt: skip

import memtraffic
from memtraffic import device
from memtraffic.processes import run_ranks
from memtraffic.testing import assert_close, assert_row_sums

pytestmark = pytest.mark.slow  # several processes each

DEVICE, TIMEOUT = device.default(), 600


@pytest.fixture(scope="module")
def found():
    """What each rank found, on this machine."""
    return run_ranks(answers, WORLD, backend="gloo", timeout=TIMEOUT)


def joined(found, key, which, n_ranks):
    return torch.cat([each[key][which] for each in found[:n_ranks]], dim=1)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_sharded_softmax_and_its_gradient_are_those_of_the_whole_matrix(name, dtype, found):
    x = whole(name, dtype)
    y = joined(found, (name, dtype), 0, len(WIDTHS[name]))
    exact = torch.softmax(x.double(), 1)
    assert_close(y, exact, x.dtype)
    assert_row_sums(y, exact)
    assert_close(memtraffic.softmax(x.to(DEVICE)).cpu(), exact, x.dtype)  # as the op is
    for rank, width in enumerate(WIDTHS[name]):
        assert found[rank][name, dtype][0].shape == (x.shape[0], width)
    dx = joined(found, (name, dtype), 1, len(WIDTHS[name]))
    y, dy = y.double(), whole(name, dtype, seed=1).double()
    assert_close(dx, y * (dy - (y * dy).sum(1, keepdim=True)), dx.dtype)


def test_sharded_softmax_treats_what_is_not_finite_as_the_op_does(found):
    y = torch.cat([each["extremes"] for each in found[:3]], dim=1)
    exact = torch.softmax(extremes().double(), 1)
    assert torch.equal(y.isnan(), exact.isnan()) and y.isnan().any(1).tolist()[:6] == [
        False, False, True, True, True, False,
    ]  # fmt: skip
    fine = ~exact.isnan().any(1)
    assert_close(y[fine], exact[fine], y.dtype)
    assert torch.equal(y.isnan(), memtraffic.softmax(extremes().to(DEVICE)).isnan().cpu())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", UNEVEN)
def test_sharded_cross_entropy_is_that_of_the_whole_matrix(name, dtype, found):
    ranks = len(WIDTHS[name])
    x = whole(name, dtype).double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(x, targets(x.shape[1]), reduction="none")
    [exact_dx] = torch.autograd.grad(exact, x, torch.arange(5.0).double() - 1)
    for each in found[:ranks]:
        assert_close(each["loss", name, dtype][0], exact, torch.float32)
    dx = joined(found, ("loss", name, dtype), 1, ranks)
    assert_close(dx, exact_dx, dx.dtype)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_sharded_softmax_of_a_dtensor(name, found):
    x, dy = (whole("halves", seed=i)[:, :9].double() for i in range(2))
    exact = torch.softmax(x, 1)
    for each in found[:2]:
        placed, y, dx = each["meshes"][name]
        assert placed
        assert_close(y, exact, y.dtype)
        assert_close(dx, exact * (dy - (exact * dy).sum(1, keepdim=True)), dx.dtype)


def test_sharded_cross_entropy_of_a_dtensor(found):
    x = whole("halves").double()
    exact = torch.nn.functional.cross_entropy(x, targets(128), reduction="none")
    for each in found[:2]:
        assert_close(each["meshes"]["loss"], exact, torch.float32)
        assert "partial sums; redistribute x first" in each["meshes"]["partial"]


def test_sharded_softmax_says_what_does_not_fit(found):
    expected = {
        "rows": ["RanksError.* rank 1 has 2 rows .* rank 0 has 3", "rank 0 has 3 .* rank 1 has 2"],
        "dtype": ["rank 1 has 2 rows of torch.float32", "rank 0 has 2 rows of torch.float16"],
        "integers": ["TypeError: .*not torch.int64", "RanksError: .* rank 0 refuses its part"],
        "targets": [r"ValueError: .*not \(2, 3\) and \(3,\)", "RanksError: .* rank 0 refuses"],
        "link": ["RanksError: .* not all ranks have symmetric memory .* ask for rung='collective'"]
        * 2,
        "wide": ["ValueError: .* hold 40000 columns .* ask for rung='collective'"] * 2,
        "absent": ["RanksError: .* all-gather of rank 0 of 2 failed", None],
    }
    for name, told in expected.items():
        for rank, pattern in enumerate(told):
            error = found[rank]["errors"].get(name)
            assert error is None if pattern is None else re.search(pattern, error), (name, error)
