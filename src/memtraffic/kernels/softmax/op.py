"""`memtraffic.softmax`: what `torch.softmax` computes, with the least traffic."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from memtraffic import runtime
from memtraffic.kernels.launch import partially_overlaps
from memtraffic.kernels.softmax.planning import Run, plan
from memtraffic.kernels.tiling import MAX_ROW
from memtraffic.runtime import capture

__all__ = ["softmax"]

PLAIN = (Tensor, torch.nn.Parameter)
# A name of a module takes longer to find in another module.
STRIDED = torch.strided
is_autocast = torch._C._is_any_autocast_enabled  # for any device
is_transformed = torch._C._are_functorch_transforms_active
active_modes = torch._C._len_torch_dispatch_stack
is_compiling = torch.compiler.is_dynamo_compiling
current_gpu = torch._C._cuda_getDevice if runtime.HAS_GPU else None
# How the code that torch.compile generates allocates: it costs less than torch.empty_like.
empty_on_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_PLANS = 4096

Allocate = Callable[[], Tensor]

# What writes the result, and what allocates one.
_plans: dict[tuple[object, ...], tuple[Run, Allocate]] = {}


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax of `x` along a dimension, as `torch.softmax` computes it, with less traffic.

    >>> softmax(torch.zeros(2, 4, device=runtime.device()))[0].tolist()
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
    graphs, `torch.compile` and `torch.func.vmap`; not with `torch.func.grad`, nor in forward mode.

    Errors are of PyTorch's kinds: TypeError for a `dim` that is no int, IndexError for one that `x`
    does not have,
    NotImplementedError for another dtype, RuntimeError for another device, for an `out` that does
    not fit, and for rows of more than 2**24 columns.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"softmax: x is a {type(x).__name__}, not a tensor")
    if type(dim) is not int:  # 1.0 would find the plans of 1
        dim = _index(dim)
    if dtype is not None and not x.is_floating_point():
        x = x.to(dtype)
    if (
        dtype is None
        and is_autocast()
        and x.is_cuda
        and torch.is_autocast_enabled("cuda")
    ):
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            "softmax: no derivative in forward mode: use torch.softmax"
        )
    if is_compiling() or not _is_plain(x) or (out is not None and not _is_plain(out)):
        if out is not None:
            _check_kind_of_out(x, dtype, out)
        _check_dim(dim, x.shape)  # as long as it is not that of a batch
        y: Tensor = torch.ops.memtraffic.softmax(x, dim, dtype)
        return y if out is None else out.copy_(y)
    if out is not None:
        _check_kind_of_out(x, dtype, out)
        _check_memory_of_out(x, out)
        increment_version(
            out
        )  # autograd may have saved what is about to be overwritten
    elif x.requires_grad and torch.is_grad_enabled():
        return _Softmax.apply(x, dim, dtype)
    return forward(x, dim, dtype, out)


def _is_plain(x: Tensor) -> bool:
    """Whether `x` is a tensor with memory, and no mode of PyTorch watches what is done to it."""
    return (
        type(x) in PLAIN
        and x.layout is STRIDED
        and not x.is_meta
        and not x.is_neg()  # its memory holds minus what it stands for
        and not is_transformed()
        and (active_modes() == 0 or runtime.is_capturing())
    )


def _check(x: Tensor, dim: int, dtype: torch.dtype | None) -> None:
    """Raises what `softmax` does for an `x` that its kernels do not take."""
    _check_kind(x, dim, dtype)
    if not x.is_cuda and not runtime.INTERPRETED and not runtime.is_capturing():
        raise RuntimeError(
            f"softmax: the tensor is on the {x.device.type}, not on a GPU"
        )


def _check_kind(x: Tensor, dim: int, dtype: torch.dtype | None) -> None:
    """The checks that need no memory: those of a tensor on the device `meta`, too."""
    for it in (x.dtype, dtype or x.dtype):
        if it not in FLOATS:
            names = ", ".join(str(known).removeprefix("torch.") for known in FLOATS)
            raise NotImplementedError(f"softmax: not implemented for {it}: {names}")
    _check_dim(dim, x.shape)
    # While a function is compiled, both may be symbols, and a condition would fix their values.
    columns = x.shape[dim] if x.dim() and isinstance(dim, int) else 1
    if isinstance(columns, int) and columns > MAX_ROW:
        raise RuntimeError(f"softmax: {columns} columns, more than {MAX_ROW}")


def _index(dim: Any) -> Any:
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"softmax: dim is a {type(dim).__name__}, not an int")
    return dim if isinstance(dim, torch.SymInt) else operator.index(dim)


def _check_dim(dim: int, shape: Sequence[int]) -> None:
    if not -max(1, len(shape)) <= dim < max(1, len(shape)):
        raise IndexError(
            f"softmax: dim {dim} is out of range for a tensor of {len(shape)} dimensions "
            f"{tuple(shape)}"
        )


def _check_kind_of_out(x: Tensor, dtype: torch.dtype | None, out: Tensor) -> None:
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        name = "x" if x.requires_grad else "out"
        raise RuntimeError(
            f"softmax: out= does not work with autograd: {name} requires a gradient"
        )
    wanted = dtype or x.dtype
    if out.dtype != wanted or out.device != x.device or out.shape != x.shape:
        raise RuntimeError(
            f"softmax: out is {out.dtype} {tuple(out.shape)} on {out.device}, and the result is "
            f"{wanted} {tuple(x.shape)} on {x.device}"
        )


def _check_memory_of_out(x: Tensor, out: Tensor) -> None:
    if any(
        n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)
    ):
        raise RuntimeError(
            f"softmax: out repeats its elements: its strides are {out.stride()}"
        )
    if partially_overlaps(out, x):
        apart = out.data_ptr() - x.data_ptr()
        raise RuntimeError(
            f"softmax: out starts {apart} bytes after x, and overlaps a part of it"
        )


def forward(
    x: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`softmax` without autograd and without PyTorch's dispatcher."""
    index = x.get_device()
    if current_gpu and index not in (-1, current_gpu()):
        with torch.cuda.device(index):
            return forward(x, dim, dtype, out)
    key: tuple[object, ...] = (
        x.dtype, x.shape, x.stride(), index, x.data_ptr() & 15, dim, dtype, capture(),
    )  # fmt: skip
    if out is not None:
        key = (*key, out.stride(), out.data_ptr() & 15)
    planned = _plans.get(key)
    if planned is None:
        _check(x, dim, dtype)
        y = (
            torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
            if out is None
            else out
        )
        run = plan(forward_into, (y, x), dim, backward=False) if x.numel() else _nothing
        _remember(key, run, y)
    else:
        run, allocate = planned
        y = allocate() if out is None else out
    run(y, x)
    return y


def _nothing(*tensors: Tensor) -> None:
    """What an empty tensor needs."""


def forward_into(y: Tensor, x: Tensor) -> None:
    """Writes the softmax of `x` along its last dimension into `y`."""
    forward(x, -1, None if x.dtype == y.dtype else y.dtype, y)


def backward(
    dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The gradient of a tensor of `dtype`, from its softmax `y` and the gradient `dy` of that.

    out: what the gradient is written to, of y's shape and of `dtype`.
    """
    index = y.get_device()
    if current_gpu and index not in (-1, current_gpu()):
        with torch.cuda.device(index):
            return backward(dy, y, dim, dtype, out)
    key: tuple[object, ...] = (
        dtype, y.dtype, dy.dtype, y.shape, y.stride(), dy.stride(), index,
        y.data_ptr() & 15, dy.data_ptr() & 15, dim, capture(),
    )  # fmt: skip
    if out is not None:
        key = (*key, out.stride(), out.data_ptr() & 15)
    planned = _plans.get(key)
    if planned is None:
        dx = torch.empty(y.shape, dtype=dtype, device=y.device) if out is None else out
        run = (
            plan(backward_into, (dx, y, dy), dim, backward=True)
            if y.numel()
            else _nothing
        )
        _remember(key, run, dx)
    else:
        run, allocate = planned
        dx = allocate() if out is None else out
    run(dx, y, dy)
    return dx


def backward_into(dx: Tensor, y: Tensor, dy: Tensor) -> None:
    """Writes `y * (dy - sum(y * dy))`, with the sum along the last dimension, into `dx`."""
    backward(dy, y, -1, dx.dtype, dx)


def _remember(key: tuple[object, ...], run: Run, result: Tensor) -> None:
    """Keeps what writes `result`, and what allocates a tensor like it on the current GPU."""
    like, dtype, device = (
        (tuple(result.shape), result.stride()),
        result.dtype,
        result.device,
    )
    allocate: Allocate = functools.partial(
        torch.empty_strided, *like, dtype=dtype, device=device
    )
    if empty_on_current_gpu and runtime.runs_on_gpu() and device.type == "cuda":
        allocate = functools.partial(empty_on_current_gpu, *like, dtype)
    if len(_plans) >= MAX_PLANS:
        _plans.pop(next(iter(_plans)), None)  # the oldest
    _plans[key] = run, allocate


# ---- autograd, torch.library


class _Softmax(torch.autograd.Function):
    """The softmax in eager mode: cheaper than the registered operation, and equal to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        y = forward(x, dim, dtype)
        ctx.save_for_backward(y)
        ctx.dim, ctx.dtype = dim, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        (y,) = ctx.saved_tensors
        # A gradient of the gradient is asked for, or gradients by the batch, which have no storage.
        if (
            torch.is_grad_enabled()
            or not _is_plain(dy)
            or not _is_plain(y)  # what is saved may be replaced by hooks
            or not torch._C._has_storage(dy)
        ):
            dx = torch.ops.memtraffic.softmax_backward(dy, y, ctx.dim, ctx.dtype)
        else:
            dx = backward(dy, y, ctx.dim, ctx.dtype)
        return dx, None, None


@torch.library.custom_op("memtraffic::softmax", mutates_args=())
def _softmax_op(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return forward(x, dim, dtype)


@torch.library.custom_op("memtraffic::softmax_backward", mutates_args=())
def _softmax_backward_op(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return backward(dy, y, dim, dtype)


@_softmax_op.register_fake
def _(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    _check_kind(x, dim, dtype)
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


@_softmax_backward_op.register_fake
def _(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(y.shape, dtype=dtype, device=y.device)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _softmax_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
    (y,) = ctx.saved_tensors
    return torch.ops.memtraffic.softmax_backward(dy, y, ctx.dim, ctx.dtype), None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, y, ctx.dim, _ = inputs
    ctx.save_for_backward(dy, y)


def _backward_gradient(ctx: Any, ddx: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """The gradients of dx = y * (dy - sum(y * dy)) with respect to dy and y, by PyTorch's lines."""
    dy, y = ctx.saved_tensors
    ddx, dim = ddx.to(y.dtype), ctx.dim
    from_dy = y * (ddx - (ddx * y).sum(dim, keepdim=True))
    from_y = ddx * (dy - (y * dy).sum(dim, keepdim=True)) - dy * (ddx * y).sum(
        dim, keepdim=True
    )
    return from_dy, from_y, None, None


def _vmap_softmax(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, int]:
    x = x.movedim(in_dims[0], 0)  # type: ignore[arg-type]
    _check_dim(dim, x.shape[1:])
    dim = dim % max(1, x.dim() - 1)
    if x.dim() == 1:  # of a scalar
        return torch.ops.memtraffic.softmax(x[:, None], 1, dtype)[:, 0], 0
    return torch.ops.memtraffic.softmax(x, dim + 1, dtype), 0


def _vmap_backward(
    info: Any,
    in_dims: tuple[int | None, ...],
    dy: Tensor,
    y: Tensor,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    dy, y = (
        x.expand(info.batch_size, *x.shape) if batch is None else x.movedim(batch, 0)
        for x, batch in zip((dy, y), in_dims, strict=False)
    )
    _check_dim(dim, y.shape[1:])
    dim = dim % max(1, y.dim() - 1)
    if y.dim() == 1:  # of a scalar
        dy, y = dy[:, None], y[:, None]
        return torch.ops.memtraffic.softmax_backward(dy, y, 1, dtype)[:, 0], 0
    return torch.ops.memtraffic.softmax_backward(dy, y, dim + 1, dtype), 0


_softmax_op.register_autograd(_softmax_gradient, setup_context=_save_softmax)
_softmax_backward_op.register_autograd(_backward_gradient, setup_context=_save_backward)
_softmax_op.register_vmap(_vmap_softmax)
_softmax_backward_op.register_vmap(_vmap_backward)
