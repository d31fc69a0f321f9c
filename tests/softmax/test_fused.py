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
