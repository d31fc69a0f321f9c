import os

import pytest
import torch

from memtraffic.benchmark import baselines
from memtraffic.benchmark.baselines import BASELINES, copy
from memtraffic.kernels.softmax import naive
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close

ON_CPU = ("copy", "torch.softmax")


NAMES = [
    pytest.param(name, marks=[] if name in ON_CPU else pytest.mark.gpu)
    for name in BASELINES
    if "backward" not in name
]


@pytest.mark.filterwarnings("ignore")  # compilers warn of what they do
@pytest.mark.parametrize("name", NAMES)
def test_baselines_compute_what_they_are_named_for(name):
    x = matrix(64, 2048)
    y = BASELINES[name](x)
    assert_close(y, x.double() if name == "copy" else naive.reference(x), x.dtype)
    assert y.data_ptr() != x.data_ptr()


def test_compiled_keeps_its_assembler_to_itself(monkeypatch):
    """Inductor sets the path of another ptxas once, and Triton would use it for every kernel."""
    name, seen = baselines.PTXAS, []

    def compiled_by_inductor(x):
        if not seen:
            os.environ[name] = "inductor's"
        seen.append(os.environ[name])

    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(baselines, "_inductor", {})
    monkeypatch.setattr(baselines, "_compile", lambda multi_kernel: compiled_by_inductor)
    for fn in (baselines.compiled, baselines.compiled_persistent_reduction):
        fn(torch.ones(1))
        assert name not in os.environ
    monkeypatch.setenv(name, "the caller's")
    baselines.compiled(torch.ones(1))
    assert os.environ[name] == "the caller's"
    assert seen == ["inductor's", "inductor's", "the caller's"]


def test_copy_of_two_inputs_reads_both():
    x, y = matrix(3, 5), matrix(3, 5, seed=1)
    assert torch.equal(copy(x, y), x + y)
