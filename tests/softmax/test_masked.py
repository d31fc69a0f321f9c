import pytest
import torch
import triton

from memtraffic import runtime
from memtraffic.compile import capture_launches
from memtraffic.errors import CountError
from memtraffic.kernels.softmax import masked
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.testing import is_softmax


def test_softmax_masked_kernel_without_its_mask():
    def unmasked(x):
        y = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[1])
        masked._softmax_masked_kernel[(x.shape[0],)](
            y, *y.stride(), x, *x.stride(), block, BLOCK=block
        )
        return y

    with pytest.raises(CountError, match="outside x_ptr"):
        count(unmasked, matrix(3, 5))


def test_is_softmax_refuses_what_is_not_written():
    assert is_softmax(masked.softmax, matrix(3, 5))
    assert not is_softmax(torch.empty_like, matrix(3, 5))


@pytest.mark.parametrize(("n", "warps"), [(3, 4), (781, 4), (5000, 16), (20000, 32)])
def test_softmax_num_warps(n, warps):
    [launch] = capture_launches(masked.softmax, torch.empty(2, n, device=runtime.device()))
    assert launch.options["num_warps"] == warps
