"""A small attention layer that learns to look things up: the chapter `backward` trains it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from memtraffic import device, softmax

Softmax = Callable[..., Tensor]
Step = Callable[[], Tensor]
SOFTMAXES: dict[str, Softmax] = {"torch.softmax": torch.softmax, "memtraffic.softmax": softmax}


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
        scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, heads, S, S)
        weights = self.softmax(scores, -1)
        return self.mix((weights @ v).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """The heads of `x`: from (B, S, width) to (B, heads, S, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def look_up(batch: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Sequences to look things up in, and what is to be found: the same ones each time.

    >>> x, target = look_up(2, 16, 32)
    >>> x.shape, target.shape
    (torch.Size([2, 16, 32]), torch.Size([2, 16, 16]))

    Each position holds a name, a value, and the name of another position, whose value is its
    target. width: of a position, a multiple of 4: a quarter for each name, a half for the value.
    """
    generator = torch.Generator().manual_seed(0)
    names = torch.randn(batch, length, width // 4, generator=generator)
    values = torch.randn(batch, length, width // 2, generator=generator)
    others = torch.stack([torch.randperm(length, generator=generator) for _ in range(batch)])
    asked, found = (
        it.gather(1, others[..., None].expand(-1, -1, it.shape[-1])) for it in (names, values)
    )
    here = device.default()
    return torch.cat([asked, names, values], dim=-1).to(here), found.to(here)


def training(softmax: Softmax, shape: Sequence[int], *, heads: int, lr: float) -> Step:
    """A function that trains an `Attention` by one step and returns the loss before that step.

    >>> step = training(torch.softmax, (2, 16, 32), heads=2, lr=0.01)
    >>> first, second = step(), step()
    >>> bool(second < first)
    True

    shape: batch, length and width of `look_up`. heads: of the attention; they share the width. lr:
    the learning rate of Adam. Two trainings start with the same weights.
    """
    batch, length, width = shape
    x, target = look_up(batch, length, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Attention(softmax, width, heads).to(x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# ---- attention alone, for what one should call in place of a softmax of scores


def _attend(softmax: Softmax, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1) @ v


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


# ---- one step, for another process that counts what it moves


@functools.cache
def _training(name: str, shape: tuple[int, ...]) -> Step:
    return training(SOFTMAXES[name], shape, heads=8, lr=0.003)


def step_with_torch(x: Tensor) -> Tensor:
    """A step of training with `torch.softmax`, at the batch, length and width of `x`."""
    return _training("torch.softmax", tuple(x.shape))()


def step_with_ours(x: Tensor) -> Tensor:
    """A step of training with `memtraffic.softmax`, at the batch, length and width of `x`."""
    return _training("memtraffic.softmax", tuple(x.shape))()


STEPS = {"torch.softmax": step_with_torch, "memtraffic.softmax": step_with_ours}
