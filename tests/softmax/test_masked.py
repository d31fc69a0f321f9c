import pytest
import torch

from memtraffic import device
from memtraffic.compile import capture_launches
from memtraffic.kernels.softmax import masked


@pytest.mark.parametrize(("n", "warps"), [(3, 4), (781, 4), (5000, 16), (20000, 32)])
def test_softmax_num_warps(n, warps):
    [launch] = capture_launches(masked.softmax, torch.empty(2, n, device=device.default()))
    assert launch.options["num_warps"] == warps
