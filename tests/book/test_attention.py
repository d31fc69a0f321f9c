import torch
from torch import nn

from memtraffic import device
from memtraffic_book import attention
from memtraffic_book.attention import Attention, look_up

HOW = ("with_torch", "with_ours", "fused")


def test_look_up_wants_the_value_of_the_position_that_is_named():
    x, target = look_up(3, 8, 16)
    asked, names, values = x.split([4, 4, 8], dim=-1)
    same = (asked[:, :, None] == names[:, None]).all(dim=-1)  # (batch, position, named position)
    assert (same.sum(dim=2) == 1).all() and (same.sum(dim=1) == 1).all()
    assert torch.equal(target, same.to(x.dtype) @ values)
    assert not torch.equal(same[0], same[1])
    assert torch.equal(look_up(3, 8, 16)[0], x)


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
