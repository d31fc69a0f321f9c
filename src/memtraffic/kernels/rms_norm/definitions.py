"""RMS norm of each row of a matrix, and the gradient of its input, as operations."""

import functools
from typing import Any

import torch
from torch import Tensor

from memtraffic.kernels.rms_norm.op import reference
from memtraffic.op import Op
from memtraffic.tensors import matrix

EPS = 1e-6


def backward_reference(x: Tensor, weight: Tensor, dy: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of `x`, from that of the result and `1 / sqrt(mean(x**2) + eps)`."""
    rstd = rstd[:, None]
    xhat, inner = x * rstd, dy * weight
    return rstd * (inner - xhat * (inner * xhat).mean(dim=1, keepdim=True))


def _matrix_and_gradient(m: int, n: int, **options: Any) -> tuple[Tensor, ...]:
    x, dy = matrix(m, n, **options), matrix(m, n, seed=1, **options)
    weight = matrix(1, n, seed=2, **options)[0]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x, weight, dy, (x.to(wide).square().mean(1) + EPS).rsqrt()


RMS_NORM = Op(
    name="rms_norm",
    inputs="M,N N",
    reference=functools.partial(reference, eps=EPS),
    roundings=8,
    kernels={"rms_norm": "memtraffic.kernels.rms_norm.op:rms_norm"},
)

RMS_NORM_BACKWARD = Op(
    name="rms_norm_backward",
    inputs=_matrix_and_gradient,
    reference=backward_reference,
    roundings=16,
)
