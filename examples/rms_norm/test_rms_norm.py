"""What RMSNorm computes and what it costs. No test needs a GPU."""

import pytest
import torch
from memtraffic import count, occupancy
from memtraffic.meters.operations import rule
from memtraffic.testing import assert_resources, assert_traffic

from rms_norm import rms_norm

INPUTS = "M,N N eps=1e-6"  # x, its weight, and a keyword
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_result():
    x, weight = torch.randn(3, 781, device=DEVICE), torch.randn(781, device=DEVICE)
    torch.testing.assert_close(rms_norm(x, weight), torch.rms_norm(x, [781], weight, 1e-6))


def test_traffic():
    """PyTorch's operations, which keep x in memory between them, read three times as much of it."""
    assert_traffic(rms_norm, reads="2MN", writes="MN", inputs=INPUTS)


def test_traffic_in_bfloat16():
    traffic = count(rms_norm, inputs="8,4096:bf16 4096:bf16")
    assert traffic.read_bytes == 2 * 8 * 4096 * 2


@rule("aten::renorm")
def renorm(result, self, **options):
    """Tells memtraffic what this operation of PyTorch reads and writes, which it does not know."""
    return [self], [result]


def test_traffic_of_rows_that_are_scaled_to_a_norm_of_1():
    assert_traffic(lambda x: x.renorm(2, 0, 1.0), reads="MN", writes="MN")


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_resources(target):
    """No spills, and each thread loads and stores 16 bytes at a time."""
    inputs = "16,4096 4096,"
    assert_resources(rms_norm, inputs, target=target, load_bits=128, store_bits=128)


def test_narrow_rows_of_odd_width_are_not_vectorised():
    with pytest.raises(AssertionError, match="moves 128 bits per load"):
        assert_resources(rms_norm, "16,4095 4095,", target="sm_90", load_bits=128)


def test_occupancy():
    [kernel] = occupancy(rms_norm, "16,4096 4096,", target="sm_90")
    assert kernel.resident >= 4
