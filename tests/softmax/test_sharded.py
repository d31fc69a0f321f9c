import pytest
import torch
from sharded_cases import DTYPES, WIDTHS, WORLD, answers, extremes, whole

import memtraffic
from memtraffic import runtime
from memtraffic.processes import run_ranks
from memtraffic.testing import assert_close, assert_row_sums

DEVICE, TIMEOUT = runtime.device(), 120


@pytest.fixture(scope="module")
def found():
    """What each rank found, on this machine."""
    return run_ranks(answers, WORLD, backend="gloo", timeout=TIMEOUT)


def joined(found, key, which, n_ranks):
    return torch.cat([each[key][which] for each in found[:n_ranks]], dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WIDTHS)
def test_sharded_softmax_is_that_of_the_whole_matrix(name, dtype, found):
    x = whole(name, dtype)
    y = joined(found, (name, dtype), 0, len(WIDTHS[name]))
    exact = torch.softmax(x.double(), 1)
    assert_close(y, exact, x.dtype)
    assert_row_sums(y, exact)
    assert_close(memtraffic.softmax(x.to(DEVICE)).cpu(), exact, x.dtype)  # as the op is
    for rank, width in enumerate(WIDTHS[name]):
        assert found[rank][name, dtype][0].shape == (x.shape[0], width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WIDTHS)
def test_sharded_softmax_has_the_gradient_of_the_whole_matrix(name, dtype, found):
    y = joined(found, (name, dtype), 0, len(WIDTHS[name])).double()
    dx = joined(found, (name, dtype), 1, len(WIDTHS[name]))
    dy = whole(name, dtype, seed=1).double()
    exact = y * (dy - (y * dy).sum(1, keepdim=True))
    assert_close(dx, exact, dx.dtype)


def test_sharded_softmax_treats_what_is_not_finite_as_the_op_does(found):
    y = torch.cat([each["extremes"] for each in found[:3]], dim=1)
    exact = torch.softmax(extremes().double(), 1)
    assert torch.equal(y.isnan(), exact.isnan()) and y.isnan().any(1).tolist()[:6] == [
        False, False, True, True, True, False,
    ]  # fmt: skip
    fine = ~exact.isnan().any(1)
    assert_close(y[fine], exact[fine], y.dtype)
    assert torch.equal(y.isnan(), memtraffic.softmax(extremes().to(DEVICE)).isnan().cpu())
