import torch

from memtraffic.kernels.softmax import naive
from memtraffic.tensors import matrix


def test_reference_is_float64(dtype):
    x = matrix(3, 8, dtype)
    y = naive.reference(x)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y.sum(dim=1), torch.ones_like(y[:, 0]))


def test_softmax_has_a_gradient():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(naive.softmax, x)
