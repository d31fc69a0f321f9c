"""A small attention layer, of which the chapter `backward` trains a step, and attention alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memtraffic import device, softmax

Softmax = Callable[..., Tensor]
HEADS, RATE = 8, 0.003  # of the layer that is trained; of Adam


def _attend(softmax: Softmax, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (..., length, width) each, whose scores are (..., length, length)."""
    return softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1) @ v


class Attention(nn.Module):
    """Attention with a given softmax: from (B, S, width) to (B, S, width / 2)."""

    def __init__(self, softmax: Softmax, width: int, heads: int) -> None:
        super().__init__()
        self.softmax, self.heads = softmax, heads
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width // 2)

    def forward(self, x: Tensor) -> Tensor:
        # (B, heads, S, width / heads)
        q, k, v = (self.split(layer(x)) for layer in (self.queries, self.keys, self.values))
        return self.mix(_attend(self.softmax, q, k, v).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """The heads of `x`: from (B, S, width) to (B, heads, S, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


@functools.cache
def _trained(softmax: Softmax, width: int) -> tuple[Attention, torch.optim.Optimizer]:
    model = Attention(softmax, width, HEADS).to(device.default())
    return model, torch.optim.Adam(model.parameters(), lr=RATE)


def _step(softmax: Softmax, x: Tensor) -> Tensor:
    """A step of training, in which a layer learns to say the first half of each position of `x`.

    x: of (batch, length, width). Returns the loss before the step.
    """
    model, optimizer = _trained(softmax, x.shape[-1])
    optimizer.zero_grad()
    loss = (model(x) - x[..., : x.shape[-1] // 2]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def step_with_torch(x: Tensor) -> Tensor:
    """A step of training on `x` whose attention calls `torch.softmax`."""
    return _step(torch.softmax, x)


def step_with_ours(x: Tensor) -> Tensor:
    """A step of training on `x` whose attention calls `memtraffic.softmax`."""
    return _step(softmax, x)


STEPS = {"torch.softmax": step_with_torch, "memtraffic.softmax": step_with_ours}


# ---- attention alone, for what one should call in place of a softmax of scores


def attend_with_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (heads, length, width) each, whose scores go through `torch.softmax`."""
    return _attend(torch.softmax, q, k, v)


def attend_with_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (heads, length, width) each, whose scores go through `memtraffic.softmax`."""
    return _attend(softmax, q, k, v)


def attend_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (heads, length, width) each, by PyTorch's kernel that keeps no scores."""
    q, k, v = (it[None] for it in (q, k, v))  # its fast kernels take four dimensions
    return nn.functional.scaled_dot_product_attention(q, k, v)[0]


def _gradient(attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The gradient of `attend` by its queries, which costs those of keys and values as well."""
    leaves = [it.detach().requires_grad_() for it in inputs]
    return torch.autograd.grad(attend(*leaves), leaves, inputs[2])[0]


gradient_with_torch = functools.partial(_gradient, attend_with_torch)
gradient_with_ours = functools.partial(_gradient, attend_with_ours)
gradient_fused = functools.partial(_gradient, attend_fused)
