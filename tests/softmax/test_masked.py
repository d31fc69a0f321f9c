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


@pytest.mark.parametrize(
    ("n", "head", "tail"),
    [(3, 2, 1), (781, 512, 512), (5000, 4096, 1024), (8320, 8192, 128), (32767, 16384, 16384)],
)
def test_softmax_two_blocks_splits_a_row(n, head, tail):
    x = torch.empty(2, n, device=runtime.device())
    [launch] = capture_launches(masked.softmax_two_blocks, x)
    assert (launch.constants["HEAD"], launch.constants["TAIL"]) == (head, tail)


@pytest.mark.parametrize("n", [1, 2, 4096, 32768])
def test_softmax_two_blocks_of_a_power_of_two_is_one_block(n):
    x = torch.empty(2, n, device=runtime.device())
    launches = capture_launches(masked.softmax_two_blocks, x)
    assert launches == capture_launches(masked.softmax, x)


@pytest.mark.parametrize("fn", [masked.softmax, masked.softmax_two_blocks])
@pytest.mark.parametrize(
    ("n", "warps"), [(3, (4, 4)), (781, (4, 4)), (5000, (16, 8)), (20000, (32, 32))]
)
def test_softmax_num_warps(fn, n, warps):
    [launch] = capture_launches(fn, torch.empty(2, n, device=runtime.device()))
    assert launch.options["num_warps"] == warps[fn is masked.softmax_two_blocks]
