import pytest
import torch

from memtraffic import device

pytest.importorskip("triton", reason="Triton is not installed")

import kernels

from memtraffic.compile import capture_launches
from memtraffic.kernels.softmax import fused, naive


def empty(m, n):
    return torch.empty(m, n, device=device.default())


def test_capture_launches_keeps_configurations_heuristics_and_options():
    found = capture_launches(kernels.tuned, empty(2, 781))
    assert [launch.options["num_warps"] for launch in found] == [4, 8]
    assert len(capture_launches(kernels.own_tuned, empty(2, 8))) == 2  # and none is timed
    [launch] = capture_launches(kernels.heuristic, empty(2, 781))
    assert (launch.constants["BLOCK"], launch.options) == (1024, {"num_warps": 4})  # the default
    [launch] = capture_launches(lambda x: kernels.scaled(x, maxnreg=32, num_stages=2), empty(1, 8))
    assert launch.options == {"num_warps": 4, "maxnreg": 32, "num_stages": 2}
    assert capture_launches(naive.softmax, empty(1, 64)) == []


def test_capture_launches_runs_no_kernel_and_leaves_nothing_behind():
    x = torch.zeros(2, 8, device=device.default())
    y = torch.full((2, 8), 7.0, device=device.default())

    def launch(x):
        kernels._masked_kernel[(2,)](y, x, 8, BLOCK=8, STORED=8)

    assert len(capture_launches(launch, x)) == 1
    assert (y == 7).all()
    launch(x)
    assert (y == 0).all()


def test_capture_launches_passes_on_what_the_function_raises():
    with pytest.raises(ValueError, match="781 columns"):
        capture_launches(fused.softmax, empty(1, 781))
    assert device.runs_on_gpu() != device.INTERPRETED
    with pytest.raises(TypeError, match="_masked_kernel"):  # no argument for Triton
        capture_launches(lambda: kernels._masked_kernel[(1,)]("x", "y", 8, BLOCK=8, STORED=8))
