"""The softmax of each row of a matrix, and its backward."""

from typing import Any

import torch
from torch import Tensor

from memtraffic.kernels.softmax import naive
from memtraffic.op import Op
from memtraffic.tensors import matrix


def backward_reference(y: Tensor, dy: Tensor) -> Tensor:
    """The gradient of a row softmax `y` with respect to its input: `y * (dy - sum(y * dy))`."""
    product = y * dy
    return product - y * product.sum(dim=1, keepdim=True)


def _moved_once(*inputs: Tensor) -> int:
    """Bytes to read each input once and to write a result like the first of them once."""
    return sum(x.numel() * x.element_size() for x in (*inputs, inputs[0]))


def _matrix(m: int, n: int, **options: Any) -> tuple[Tensor]:
    return (matrix(m, n, **options),)


def _softmax_and_gradient(m: int, n: int, **options: Any) -> tuple[Tensor, Tensor]:
    y, dy = matrix(m, n, **options), matrix(m, n, seed=1, **options)
    return y.copy_(torch.softmax(y.float(), dim=1)), dy


SOFTMAX = Op(
    name="softmax",
    sizes=("M", "N"),
    make_inputs=_matrix,
    reference=naive.reference,
    least_bytes=_moved_once,
    checks_row_sums=True,
)

SOFTMAX_BACKWARD = Op(
    name="softmax_backward",
    sizes=("M", "N"),
    make_inputs=_softmax_and_gradient,
    reference=backward_reference,
    least_bytes=_moved_once,
)
