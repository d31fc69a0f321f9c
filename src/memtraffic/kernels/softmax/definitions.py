"""The softmax of each row of a matrix, and its backward."""

from typing import Any

import torch
from torch import Tensor

from memtraffic.kernels.softmax import naive
from memtraffic.op import Op
from memtraffic.tensors import matrix


def _sensitivity(x: Tensor) -> Tensor:
    """A rounding of `x - max` changes an element of the softmax as much as `x - max` is large.

    That is a third of the roundings: so in bfloat16, too, no normal number passes for 0.
    """
    y = naive.reference(x)
    return y * (1 + (y.amax(dim=1, keepdim=True) / y).log() / 3) if x.numel() else y


def backward_reference(y: Tensor, dy: Tensor, dim: int = 1) -> Tensor:
    """The gradient of a softmax `y` with respect to its input: `y * (dy - sum(y * dy))`."""
    product = y * dy
    return product - y * product.sum(dim, keepdim=True)


def _backward_terms(y: Tensor, dy: Tensor) -> Tensor:
    """Of the difference in `backward_reference`; in a row of few columns, much of it cancels."""
    product = (y * dy).abs()
    return product + y * product.sum(dim=1, keepdim=True)


def _softmax_and_gradient(m: int, n: int, **options: Any) -> tuple[Tensor, Tensor]:
    y, dy = matrix(m, n, **options), matrix(m, n, seed=1, **options)
    return y.copy_(torch.softmax(y.float(), dim=1)), dy


SOFTMAX = Op(
    name="softmax",
    inputs="M,N",
    reference=naive.reference,
    magnitude=_sensitivity,
    checks_row_sums=True,
)

SOFTMAX_BACKWARD = Op(
    name="softmax_backward",
    inputs=_softmax_and_gradient,
    reference=backward_reference,
    magnitude=_backward_terms,
)
