"""Row softmax in five PyTorch operations, each of which reads memory and writes memory.

Traffic: reads 5MN + 2M, writes 3MN + 2M. Ends where the bytes matter: a softmax needs
to read each element once and to write it once.
"""

import torch
from torch import Tensor


def reference(x: Tensor) -> Tensor:
    """The softmax of each row in float64, which every rung is held against."""
    return torch.softmax(x.double(), dim=1)


def softmax(x: Tensor) -> Tensor:
    """Softmax of each row of `x`. Explained in book/naive.ipynb.

    >>> softmax(torch.zeros(2, 4))[0].tolist()
    [0.25, 0.25, 0.25, 0.25]

    x: floating-point tensor of shape (M, N) on any device; it may require a gradient.
    Returns a new tensor of x's shape and dtype.
    """
    row_max = x.amax(dim=1, keepdim=True)  # reads MN, writes M
    shifted = x - row_max  # reads MN + M, writes MN; keeps exp from overflowing
    numerator = shifted.exp()  # reads MN, writes MN
    denominator = numerator.sum(dim=1, keepdim=True)  # reads MN, writes M
    return numerator / denominator  # reads MN + M, writes MN
