import torch

from memtraffic.kernels.softmax import naive
from memtraffic.meters.count import count
from memtraffic.tensors import matrix


def test_reference_is_float64(dtype):
    x = matrix(3, 8, dtype)
    y = naive.reference(x)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y.sum(dim=1), torch.ones_like(y[:, 0]))


def test_softmax_traffic_of_each_line():
    m, n = 3, 5
    ops = count(naive.softmax, matrix(m, n)).ops
    assert [(op.name, op.read_elements, op.written_elements) for op in ops] == [
        ("amax", m * n, m),
        ("sub", m * n + m, m * n),
        ("exp", m * n, m * n),
        ("sum", m * n, m),
        ("div", m * n + m, m * n),
    ]


def test_softmax_has_a_gradient():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(naive.softmax, x)
