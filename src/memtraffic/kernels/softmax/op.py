"""`memtraffic.softmax`: what `torch.softmax` computes, with the least traffic."""

import operator as op
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtraffic.kernels.autograd import Results, Run, operation, operator
from memtraffic.kernels.launch import Launch
from memtraffic.kernels.operands import FLOATS, accumulated, check_floats
from memtraffic.kernels.softmax.planning import plan
from memtraffic.kernels.tiling import MAX_ROW

is_autocast = torch.is_autocast_enabled  # of GPUs


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax of `x` along a dimension, as `torch.softmax` computes it, with less traffic.

    >>> from memtraffic import device
    >>> softmax(torch.zeros(2, 4, device=device.default()))[0].tolist()
    [0.25, 0.25, 0.25, 0.25]

    x: tensor of float32, float16, bfloat16 or float64, of any shape and strides, on a GPU or,
    where kernels are interpreted, on the CPU. dtype: of the result; `x` is converted to it first.
    out: what the result is written to, of that dtype. Float16 and bfloat16 are accumulated in
    float32, float64 in itself. The result is contiguous, and equal bit for bit from call to call.

    Each element is read once and each result written once, where a row fits one program, or as many
    programs as fit the GPU at once; if some of these are held up for long, the others read their
    parts again. Longer rows, and rows that do not fit one program and are of float64 or not
    contiguous, are read twice. A row has up to 2**24 columns. Nothing is copied but a tensor of
    integers, which needs a `dtype`.

    It works with autograd, also twice, with autocast (which asks for float32 on a GPU), CUDA
    graphs, `torch.compile`, `torch.func` and `torch.jit.trace`; in forward mode it is PyTorch's.

    Errors are of PyTorch's kinds: TypeError for a `dim` that is no int, IndexError for one that `x`
    does not have, NotImplementedError for another dtype or layout, RuntimeError for another device,
    for an `out` that does not fit, and for rows of more than 2**24 columns.
    """
    if type(dim) is not int:  # 1.0 would find the plans of 1
        dim = _index(dim)
    if dtype is None:
        if is_autocast() and isinstance(x, Tensor) and x.is_cuda:
            dtype = accumulated(x)
    elif isinstance(x, Tensor) and x.dtype not in FLOATS:
        x = x.to(dtype=dtype)
    if out is None:
        return _apply(x, (dim, dtype))
    return _SOFTMAX.into(out, x, dim, dtype)


def _index(dim: Any) -> Any:
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"softmax: dim is a {type(dim).__name__}, not an int")
    return dim if isinstance(dim, torch.SymInt) else op.index(dim)


def _check_dim(dim: int, shape: Sequence[int]) -> None:
    if not -max(1, len(shape)) <= dim < max(1, len(shape)):
        raise IndexError(
            f"softmax: dim {dim} is out of range for a tensor of {len(shape)} dimensions "
            f"{tuple(shape)}"
        )


def _check(x: Tensor, dim: int, dtype: torch.dtype | None) -> None:
    """Raises what `softmax` does for an `x` that its kernels do not take."""
    check_floats("softmax", x.dtype, x.dtype if dtype is None else dtype)
    _check_dim(dim, x.shape)
    # While a function is compiled, both may be symbols, and a condition would fix their values.
    columns = x.shape[dim] if x.dim() and isinstance(dim, int) else 1
    if isinstance(columns, int) and columns > MAX_ROW:
        raise RuntimeError(f"softmax: {columns} columns, more than {MAX_ROW}")


# ---- the two operators


def _plan_forward(
    results: tuple[Tensor], tensors: tuple[Tensor], dim: int, dtype: torch.dtype | None
) -> Run:
    def part(y: Tensor, x: Tensor) -> None:
        forward(x, -1, y.dtype, out=y)

    return plan(part, (*results, *tensors), dim, backward=False)


def _plan_backward(
    results: tuple[Tensor], tensors: tuple[Tensor, Tensor], dim: int, dtype: torch.dtype
) -> Run:
    def part(dx: Tensor, y: Tensor, dy: Tensor) -> None:
        backward(dy, y, -1, dx.dtype, out=dx)

    [dx], (dy, y) = results, tensors
    run = plan(part, (dx, y, dy), dim, backward=True)
    run = run.unwrapped() if isinstance(run, Launch) else run
    return lambda dx, dy, y: run(dx, y, dy)


def _results(x: Tensor, dim: int, dtype: torch.dtype | None) -> Results:
    return [(x.shape, dtype or x.dtype)]


def _results_of_backward(
    dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype
) -> Results:
    return [(y.shape, dtype)]


def _batch(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[Tensor, int]:
    """The softmax of a batch, or its backward, is that along the next dimension."""
    *tensors, dim, dtype = arguments
    tensors = [
        x.expand(info.batch_size, *x.shape) if at is None else x.movedim(at, 0)
        for x, at in zip(tensors, in_dims, strict=False)
    ]
    run = (_FORWARD if len(tensors) == 1 else _BACKWARD).registered
    _check_dim(dim, tensors[0].shape[1:])
    if tensors[0].dim() == 1:  # of scalars
        return run(*(x[:, None] for x in tensors), 1, dtype)[:, 0], 0
    return run(*tensors, dim % (tensors[0].dim() - 1) + 1, dtype), 0


def _backward_in_pytorch(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    dy = dy.to(y.dtype)
    return (y * (dy - (y * dy).sum(dim, keepdim=True))).to(dtype)


_FORWARD = operator(
    "softmax", "(Tensor x, SymInt dim, ScalarType? dtype) -> Tensor",
    _plan_forward, _results, _check, _batch,
)  # fmt: skip
_BACKWARD = operator(
    "softmax_backward", "(Tensor dy, Tensor y, SymInt dim, ScalarType dtype) -> Tensor",
    _plan_backward, _results_of_backward, batch=_batch,
)  # fmt: skip
_SOFTMAX = operation(
    _FORWARD,
    _BACKWARD,
    save=lambda arguments, results: (results, (arguments[1], arguments[0].dtype)),
    reference=_backward_in_pytorch,
    in_pytorch=torch.softmax,
)
_apply = _SOFTMAX.apply


def forward(
    x: Tensor, dim: int, dtype: torch.dtype | None, out: Tensor | None = None
) -> Tensor:
    """`softmax` without autograd and without PyTorch's dispatcher."""
    y: Tensor = _FORWARD.launch(x, (dim, dtype), out)
    return y


def backward(
    dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The gradient of a tensor of `dtype`, from its softmax `y` and the gradient of that."""
    dx: Tensor = _BACKWARD.launch(dy, (y, dim, dtype), out)
    return dx
