import pytest

from memtraffic.kernels.softmax import fused
from memtraffic.tensors import matrix


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        pytest.param(lambda: matrix(4, 781), "781", id="not-a-power-of-two"),
        pytest.param(lambda: matrix(4, 0), "0", id="no-columns"),
        pytest.param(lambda: matrix(1, 65536), "65536 .* 32768", id="over-max-cols"),
        pytest.param(lambda: matrix(4, 16)[:, ::2], "2", id="column-stride-2"),
        pytest.param(lambda: matrix(4, 6)[:, ::3], "3", id="two-columns-3-apart"),
        pytest.param(lambda: matrix(8, 4).T, "4", id="transposed"),
    ],
)
def test_softmax_refuses_and_repeats_the_numbers(make, numbers):
    with pytest.raises(ValueError, match=rf"^fused: .*\b{numbers}"):
        fused.softmax(make())


def test_softmax_plans_for_the_gpu_it_is_given():
    """The same row on wavefronts of 64 lanes takes half as many of them."""
    from memtraffic.compile import capture_launches
    from memtraffic.gpus import find_gpu

    x = matrix(1, 32768)
    warps = {
        target: capture_launches(fused.softmax, x, gpu=find_gpu(target))[0].options["num_warps"]
        for target in ("sm_90", "gfx942")
    }
    assert warps == {"sm_90": 32, "gfx942": 16}
