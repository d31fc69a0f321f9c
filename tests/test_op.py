import pytest
import torch

from memtraffic import names
from memtraffic.errors import InputsError
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.op import Op, find_op, least_bytes, read_sizes, tolerance
from memtraffic.testing import assert_correct, is_correct
from memtraffic.torch_adapter import softmax_backward

OPS = {name: find_op(name) for name in names.OPS}
EACH = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


FUNCTIONS = {"softmax": lambda x: torch.softmax(x, dim=1), "softmax_backward": softmax_backward}


@EACH
def test_tolerance_is_of_the_largest_in_a_row(op, dtype):
    reference = torch.tensor([[1.0, -8.0], [0.5, 0.25]], dtype=torch.float64)
    finfo, largest = torch.finfo(dtype), torch.tensor([[8.0], [0.5]], dtype=torch.float64)
    expected = op.roundings * finfo.eps * largest + finfo.smallest_normal * finfo.eps / 2
    assert torch.equal(tolerance(reference, dtype, op.roundings), expected)


@EACH
@pytest.mark.parametrize("n", [1, 21, 4096])  # of wider rows, the CPU sums less exactly
def test_roundings_are_enough_for_pytorch(op, n, dtype):
    inputs = op.arguments((3, n), str(dtype).removeprefix("torch.")).tensors
    assert_correct(op, FUNCTIONS[op.name], *inputs)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y, dy: y * dy,
        lambda y, dy: softmax_backward(dy, y),
        lambda y, dy: softmax_backward(y, dy.mul_(1.5)),  # changes its second input
    ],
)
def test_softmax_backward_is_judged_on_both_inputs(wrong):
    inputs = y, dy = SOFTMAX_BACKWARD.arguments((5, 21)).tensors
    torch.testing.assert_close(y.sum(dim=1), torch.ones(5, device=y.device))
    assert (dy < 0).any()
    assert is_correct("softmax_backward", softmax_backward, *inputs)
    assert not is_correct("softmax_backward", wrong, *inputs)


def test_op_of_integers_and_another_result():
    """Targets are indices, and the result has fewer dimensions than the input."""

    def picked(x, target):
        return x.gather(1, target[:, None])[:, 0]

    op = Op("pick", "M,N M:int64<N", picked)
    tensors = op.arguments((5, 3)).tensors
    assert_correct(op, picked, *tensors)
    assert not is_correct(op, lambda x, target: picked(x, (target + 1) % 3), *tensors)


def test_op_without_a_reference():
    with pytest.raises(ValueError, match="mine has no reference"):
        assert_correct(Op("mine"), torch.exp, torch.ones(3, 5))


# ---- the least traffic


@pytest.mark.parametrize(
    ("inputs", "result", "expected"),
    [
        (lambda x: [x], lambda x: x.exp_(), (24, 0)),
        (lambda x: [x], lambda x: x.view(-1)[4:], (24, 0)),
        (lambda x: [x, x], lambda x: (x + 1, [x * 2]), (24, 48)),
        (lambda x: [x[:, :1].expand(3, 8)], lambda x: x + 1, (3, 24)),
        (lambda x: [x[0].unfold(0, 3, 1)], lambda x: None, (8, 0)),  # windows that overlap
    ],
)
def test_least_bytes_of_tensors(inputs, result, expected):
    x = torch.ones(3, 8)
    assert least_bytes(inputs(x), result(x)) == 4 * sum(expected)


# ---- an operation by whatever a meter takes


def test_find_op():
    assert [find_op(name) for name in OPS] == list(OPS.values())
    assert find_op("memtraffic.kernels.softmax.definitions:SOFTMAX_BACKWARD") is SOFTMAX_BACKWARD
    assert find_op("memtraffic.inputs:DEFAULT").sizes == ("M", "N")  # what is named may be text


@pytest.mark.parametrize("texts", [["3", "5"], ["M=3", "N=5"], ["N=5", "M=3"], ["N=5"]])
def test_read_sizes(texts):
    assert read_sizes(find_op("M,N"), texts, M=3, N=None) == (3, 5)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["3", "5", "7"], "'7' is one size too many"),
        (["M=3", "K=5"], "no size 'K'; its sizes: M, N"),
        (["M=3", "M=5"], "M is 3 already"),
        (["3", "0"], "'0' is not a positive"),
        (["3", "1" * 5000], "is not a positive"),
    ],
)
def test_read_sizes_that_are_wrong(texts, message):
    with pytest.raises(InputsError, match=message):
        read_sizes(find_op("M,N"), texts)
