import torch
from torch import nn

from memtraffic import device, softmax
from memtraffic_book import attention
from memtraffic_book.attention import Attention

HOW = ("with_torch", "with_ours", "fused")


def test_a_step_of_training_lowers_the_loss_with_either_softmax():
    x = torch.randn(2, 16, 32, device=device.default())
    for step in attention.STEPS.values():
        first, *_, last = (step(x).item() for _ in range(5))
        assert last < first
    models = [attention._trained(fn, 32)[0] for fn in (torch.softmax, softmax)]
    assert models[0] is not models[1] and [it.softmax for it in models] == [torch.softmax, softmax]


def test_attention_is_that_of_pytorch():
    model, x = Attention(torch.softmax, 32, 4), torch.randn(2, 16, 32)
    layers = model.queries, model.keys, model.values
    heads = [layer(x).view(2, 16, 4, 8).transpose(1, 2) for layer in layers]
    mixed = nn.functional.scaled_dot_product_attention(*heads)
    expected = model.mix(mixed.transpose(1, 2).reshape(2, 16, 32))
    assert expected.shape == (2, 16, 16) and expected.abs().max() > 0.1
    assert (model(x) - expected).abs().max() < 1e-6


def test_ways_to_attend_agree():
    q, k, v = torch.randn(3, 2, 4, 8, device=device.default())
    wanted = nn.functional.scaled_dot_product_attention(q, k, v)
    found = [getattr(attention, f"attend_{how}")(q, k, v) for how in HOW]
    assert all(torch.allclose(it, wanted, atol=1e-5) for it in found)
    # In this thread, which has a CUDA context: that of PyTorch's has none yet, and cuBLAS warns.
    with torch.autograd.set_multithreading_enabled(False):
        [of_q] = torch.autograd.grad(
            nn.functional.scaled_dot_product_attention(q.requires_grad_(), k, v), q, v
        )
        found = [getattr(attention, f"gradient_{how}")(q, k, v) for how in HOW]
    assert all(torch.allclose(it, of_q, atol=1e-5) for it in found)
