import torch

from memtraffic.kernels.softmax import naive


def test_softmax_has_a_gradient():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(naive.softmax, x)
