import pytest
import torch

from memtraffic.benchmark.baselines import BASELINES, copy, find_implementation
from memtraffic.ladder import naive
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close

ON_CPU = ("copy", "torch.softmax")


@pytest.mark.filterwarnings("ignore")  # compilers warn of what they do
@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=[] if it in ON_CPU else pytest.mark.gpu) for it in BASELINES],
)
def test_baselines_compute_what_they_are_named_for(name):
    x = matrix(64, 2048)
    y = BASELINES[name](x)
    assert_close(y, x.double() if name == "copy" else naive.reference(x), x.dtype)
    assert y.data_ptr() != x.data_ptr()


def test_copy_of_two_inputs_reads_both():
    x, y = matrix(3, 5), matrix(3, 5, seed=1)
    assert torch.equal(copy(x, y), x + y)


def test_find_implementation():
    assert find_implementation("copy") is copy
    assert find_implementation("naive") is naive.softmax
    assert find_implementation("memtraffic.ladder.naive:softmax") is naive.softmax
    assert find_implementation(naive.softmax) is naive.softmax
    with pytest.raises(LookupError, match=r"torch\.softmux"):
        find_implementation("torch.softmux")
