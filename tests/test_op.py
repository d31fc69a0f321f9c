import pytest
import torch

from memtraffic import names, runtime
from memtraffic.kernels.softmax.definitions import SOFTMAX, SOFTMAX_BACKWARD
from memtraffic.op import Op, find_op
from memtraffic.testing import assert_correct, is_correct

OPS = {name: find_op(name) for name in names.OPS}
EACH = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def softmax_backward(y, dy):
    return torch._softmax_backward_data(dy, y, 1, y.dtype)


FUNCTIONS = {"softmax": lambda x: torch.softmax(x, dim=1), "softmax_backward": softmax_backward}


@EACH
@pytest.mark.parametrize("layout", ["packed", "every other"])
def test_inputs(op, layout, dtype):
    name = str(dtype).removeprefix("torch.")
    inputs = op.inputs((5, 21), name, layout)
    assert {(x.shape, x.dtype, x.device) for x in inputs} == {((5, 21), dtype, runtime.device())}
    assert {x.stride() for x in inputs} == {(21, 1) if layout == "packed" else (42, 2)}
    again = op.inputs((5, 21), name, layout)
    assert all(map(torch.equal, inputs, again))
    assert len({x.sum().item() for x in inputs}) == len(inputs)


@EACH
def test_inputs_on_meta(op):
    assert {x.device.type for x in op.inputs((5, 21), device="meta")} == {"meta"}


@EACH
@pytest.mark.parametrize("shape", [(5,), (5, 21, 3)])
def test_inputs_of_another_shape(op, shape):
    with pytest.raises(ValueError, match=rf"{op.name}: .*M, N.*{shape[0]},"):
        op.inputs(shape)


def test_inputs_of_softmax_backward_are_a_softmax_and_its_gradient():
    y, dy = SOFTMAX_BACKWARD.inputs((5, 21))
    torch.testing.assert_close(y.sum(dim=1), torch.ones(5, device=y.device))
    assert (dy < 0).any()


@EACH
def test_reference_is_float64(op):
    assert op.reference(*(x.double() for x in op.inputs((5, 21)))).dtype == torch.float64


def test_reference_of_softmax_backward_is_autograd():
    x = torch.randn(5, 21, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 21, dtype=torch.float64)
    y = torch.softmax(x, dim=1)
    y.backward(dy)
    torch.testing.assert_close(SOFTMAX_BACKWARD.reference(y.detach(), dy), x.grad)


@pytest.mark.parametrize(("op", "tensors"), [(SOFTMAX, 2), (SOFTMAX_BACKWARD, 3)])
@pytest.mark.parametrize(("name", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_least_bytes(op, tensors, name, itemsize):
    assert op.least_bytes(*op.inputs((5, 21), name)) == tensors * 5 * 21 * itemsize


@EACH
def test_tolerance_is_of_the_largest_in_a_row(op, dtype):
    reference = torch.tensor([[1.0, -8.0], [0.5, 0.25]], dtype=torch.float64)
    finfo, largest = torch.finfo(dtype), torch.tensor([[8.0], [0.5]], dtype=torch.float64)
    expected = op.roundings * finfo.eps * largest + finfo.smallest_normal * finfo.eps / 2
    assert torch.equal(op.tolerance(reference, dtype), expected)


@EACH
@pytest.mark.parametrize("n", [1, 21, 32768])
def test_roundings_are_enough_for_pytorch(op, n, dtype):
    inputs = op.inputs((3, n), str(dtype).removeprefix("torch."))
    assert_correct(op, FUNCTIONS[op.name], *inputs)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda y, dy: y * dy, id="no-sum"),
        pytest.param(lambda y, dy: softmax_backward(dy, y), id="swapped"),
        pytest.param(lambda y, dy: torch.zeros_like(y), id="zeros"),
        pytest.param(lambda y, dy: softmax_backward(y, dy).double(), id="wider-dtype"),
        pytest.param(lambda y, dy: softmax_backward(y, dy.mul_(1.5)), id="changes-second"),
    ],
)
def test_softmax_backward_is_judged_on_both_inputs(wrong):
    inputs = SOFTMAX_BACKWARD.inputs((5, 21))
    assert is_correct("softmax_backward", softmax_backward, *inputs)
    assert not is_correct("softmax_backward", wrong, *inputs)


def test_op_of_integers_and_another_result():
    """Targets are indices, and the result has fewer dimensions than the input."""

    def inputs(m, n, **options):
        (x,) = SOFTMAX.inputs((m, n), **options)
        return x, torch.arange(m, device=x.device) % n

    def picked(x, target):
        return x.gather(1, target[:, None])[:, 0]

    op = Op("pick", ("M", "N"), inputs, picked, lambda x, target: 2 * target.numel() * 4)
    tensors = op.inputs((5, 3))
    assert_correct(op, picked, *tensors)
    assert not is_correct(op, lambda x, target: picked(x, target.flip(0)), *tensors)


def test_find_op():
    assert [find_op(name) for name in OPS] == list(OPS.values())
    assert find_op(SOFTMAX) is SOFTMAX
    assert find_op("memtraffic.kernels.softmax.definitions:SOFTMAX_BACKWARD") is SOFTMAX_BACKWARD


@pytest.mark.parametrize(
    "name", ["softmux", "no_such_module:SOFTMAX", "memtraffic.op:SOFTMUX", "memtraffic.op:find_op"]
)
def test_find_op_unknown(name):
    with pytest.raises(LookupError, match=name):
        find_op(name)
