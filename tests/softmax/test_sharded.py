import pytest
import torch
from cases import DEVICE
from rank_functions import CASES, WIDTHS, WORLD, answers, extremes, whole

import memtraffic
from memtraffic.testing import assert_close, assert_row_sums
from memtraffic_book.processes import run_ranks

pytestmark = pytest.mark.slow  # several processes

TIMEOUT = 600


@pytest.fixture(scope="module")
def found():
    """What each rank found, on this machine."""
    return run_ranks(answers, WORLD, backend="gloo", timeout=TIMEOUT)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_sharded_softmax_is_that_of_the_whole_matrix(name, dtype, found):
    x, parts = whole(name, dtype), [each[name, dtype] for each in found if (name, dtype) in each]
    assert tuple(part.shape for part in parts) == tuple((x.shape[0], n) for n in WIDTHS[name])
    y, exact = torch.cat(parts, dim=1), torch.softmax(x.double(), 1)
    assert_close(y, exact, x.dtype)
    assert_row_sums(y, exact)


def test_sharded_softmax_treats_what_is_not_finite_as_the_op_does(found):
    y = torch.cat([each["extremes"] for each in found], dim=1)
    exact = torch.softmax(extremes().double(), 1)
    assert torch.equal(y.isnan(), exact.isnan()) and y.isnan().any(1).tolist()[:6] == [
        False, False, True, True, True, False,
    ]  # fmt: skip
    fine = ~exact.isnan().any(1)
    assert_close(y[fine], exact[fine], y.dtype)
    assert torch.equal(y.isnan(), memtraffic.softmax(extremes().to(DEVICE)).isnan().cpu())
