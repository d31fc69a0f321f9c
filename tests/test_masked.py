import pytest
import torch

from memtraffic import machine
from memtraffic.judge import is_softmax
from memtraffic.traffic.count import CountError, count

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from kernels import random

from memtraffic.ladder import masked
from memtraffic.targets import launches


def test_a_kernel_without_its_mask_is_caught():
    def unmasked(x):
        y = torch.empty_like(x)
        masked._masked_kernel[(x.shape[0],)](
            y, x, *y.stride(), *x.stride(), triton.next_power_of_2(x.shape[1]),
            BLOCK=triton.next_power_of_2(x.shape[1]),
        )  # fmt: skip
        return y

    with pytest.raises(CountError, match="outside the tensors it was given"):
        count(unmasked, random(3, 5))


def test_the_judge_refuses_what_is_not_written():
    assert is_softmax(masked.softmax, random(3, 5))
    assert not is_softmax(torch.empty_like, random(3, 5))


@pytest.mark.parametrize(
    "fn", [masked.softmax, masked.softmax_pair], ids=["block", "pair"]
)
@pytest.mark.parametrize("n", [3, 781, 5000, 20000])
def test_launch_options(fn, n):
    [launch] = launches(fn, torch.empty(2, n, device=machine.device()))
    warps, constants = launch.options["num_warps"], launch.constants
    assert warps & (warps - 1) == 0
    if "HEAD" in constants:
        rest = n - constants["HEAD"]
        assert constants["TAIL"] // 2 < rest <= constants["TAIL"]
