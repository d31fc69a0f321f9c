"""`memtraffic.softmax`: what `torch.softmax` computes, with the least traffic.

From top to bottom: the function; what runs on plain tensors, by a plan that is kept; the gradient;
the operators, by which PyTorch's transforms and compiler see all this; and which kernel a plan
takes. The tiles are in `rule.py`.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from memtraffic import device, torch_adapter
from memtraffic.device import capture, planning_gpu
from memtraffic.kernels.launch import Launch, find_plan, keep_plan
from memtraffic.kernels.operands import DTYPES, divisor_of_rows, shifted_vector
from memtraffic.kernels.softmax import chunks, gradient, online, rule, split
from memtraffic.kernels.softmax.definitions import backward_reference
from memtraffic.torch_adapter import (
    FORWARD_MODE,
    LEVEL,
    active_modes,
    has_derivatives,
    has_left_vmap,
    has_storage,
    is_recorded,
    is_tracing,
    is_transformed,
    of_other_levels,
    primals,
)

FLOATS = (*DTYPES, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter)
MAX_BATCHES = 65535  # of a grid's second dimension

# What a call asks, bound once.
is_autocast, is_grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled
is_compiling, index = torch.compiler.is_dynamo_compiling, operator.index
is_tensor: Callable[[object], bool] = torch.is_tensor
# With a single GPU, none other can be the current one.
current_gpu = torch_adapter.current_gpu if torch.cuda.device_count() > 1 else None


def softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax of `x` along a dimension, as `torch.softmax` computes it, with less traffic.

    >>> from memtraffic import device
    >>> softmax(torch.zeros(2, 4, device=device.default()))[0].tolist()
    [0.25, 0.25, 0.25, 0.25]

    x: tensor of float32, float16, bfloat16 or float64, of any shape and strides, on a GPU or,
    where kernels are interpreted, on the CPU. dtype: of the result; `x` is converted to it first.
    Float16 and bfloat16 are accumulated in float32, float64 in itself. The result is contiguous,
    and equal bit for bit from call to call.

    Each element is read once and each result written once, where a row fits one program, or as many
    programs as fit the GPU at once; if some of these are held up for long, the others read their
    parts again. Longer rows, and rows of float64 that do not fit one program, are read twice, and
    their gradient is in lines of PyTorch. A tensor is copied first if it is of integers, which
    needs a `dtype`, and if its rows are neither adjacent nor short, or lie in more than two
    strides. A row has up to 2**24 columns.

    It works with autograd, also twice and in forward mode, with autocast (which asks for float32 on
    a GPU), CUDA graphs, `torch.compile`, `torch.func` and `torch.export`.

    Raises TypeError for what is no tensor and for a `dim` that is no int, IndexError for one that
    `x` does not have, NotImplementedError for another dtype, device or layout, and for a nested
    tensor, and RuntimeError for rows of more than 2**24 columns.
    """
    plain, dim = _is_plain(x), index(dim)
    if not plain and not is_tensor(x):
        if has_torch_function((x,)):  # such as what `torch.fx` traces with
            return handle_torch_function(softmax, (x,), x, dim, dtype=dtype)
        raise TypeError(f"softmax: x is a {type(x).__name__}, not a tensor")
    if dtype is None:
        dtype = x.dtype
        if is_autocast() and x.is_cuda and dtype in DTYPES:
            dtype = torch.float32
    elif x.dtype not in FLOATS:
        x = x.to(dtype)
    if not plain:
        return _dispatched(x, dim, dtype)
    if x.requires_grad and is_recorded(x):
        return _apply(_forward, x, dim, dtype)
    return _forward(x, dim, dtype)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has values in memory, and no transform or mode looks on but a meter's."""
    if is_compiling() or FORWARD_MODE[LEVEL] >= 0 or is_transformed() or is_tracing():
        return False
    if active_modes() and not capture():
        return False
    # The memory of a negative tensor holds minus what it stands for.
    return type(x) in PLAIN and not x.is_neg() and not x.is_meta


# ---- on plain tensors


def _forward(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    gpu = x.get_device()
    if current_gpu and gpu != -1 and gpu != current_gpu():
        with torch.cuda.device(gpu):
            return _forward(x, dim, dtype)
    try:
        key = (
            capture(), gpu, kind := x.dtype, x.shape, (packed := x.is_contiguous()) or x.stride(),
            (x.data_ptr() or -1) & 15, dim, dtype,
        )  # fmt: skip
    except RuntimeError:  # no memory of its own, as a batch of `is_grads_batched=True`
        if has_left_vmap(x):
            raise RuntimeError("softmax: the tensor has left its torch.vmap") from None
        return _dispatched(x, dim, dtype)
    run = find_plan(key)
    # The former costs the host less.
    y = torch.empty_like(x) if packed and kind == dtype else _packed(x, dtype)
    if run is None:
        _check(x, dim, dtype)
        run = keep_plan(key, _plan((y, x), dim))
    run(y, x)
    return y


def _dispatched(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    if x.is_nested or x.layout != torch.strided:
        which, instead = f"of layout {x.layout}", "x.to_dense()"
        if x.is_nested:
            which, instead = f"nested, {which}", "each tensor of x.unbind()"
        raise NotImplementedError(f"softmax: the tensor is {which}: pass {instead}")
    return SOFTMAX(x, dim, dtype)


def backward(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The gradient of a plain tensor of `dtype`, from its softmax `y` and the gradient of that."""
    gpu = y.get_device()
    if current_gpu and gpu != -1 and gpu != current_gpu():
        with torch.cuda.device(gpu):
            return backward(dy, y, dim, dtype)
    key = (
        capture(), gpu, dy.dtype, dy.shape, dy.stride(), (dy.data_ptr() or -1) & 15,
        y.dtype, y.stride(), (y.data_ptr() or -1) & 15, dim, dtype,
    )  # fmt: skip
    run = find_plan(key)
    dx = _packed(y, dtype)
    if run is None:
        run = keep_plan(key, _plan((dx, y, dy), dim))
    run(dx, y, dy)
    return dx


def _packed(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _check(x: Tensor, dim: int, dtype: torch.dtype) -> None:
    for it in (x.dtype, dtype):
        if it not in FLOATS:
            raise NotImplementedError(f"softmax: {it}, and it takes {FLOATS}")
    if not (x.is_cuda or x.is_meta or device.INTERPRETED or capture()):
        raise NotImplementedError(
            f"softmax: the tensor is on the {x.device}, not on a GPU"
        )
    _check_dim(dim, x.shape)
    n_cols = x.shape[dim] if x.dim() else 1
    if isinstance(n_cols, int) and n_cols > rule.MAX_ROW:  # it may be a symbol
        raise RuntimeError(f"softmax: {n_cols} columns, more than {rule.MAX_ROW}")


def _check_dim(dim: int, shape: Sequence[int]) -> None:
    if not -max(1, len(shape)) <= dim < max(1, len(shape)):
        raise IndexError(
            f"softmax: dim {dim} is out of range for a tensor of {len(shape)} dimensions "
            f"{tuple(shape)}"
        )


# ---- the gradient


class _Softmax(Function):
    """`run` computes: the plan of plain tensors, or the operator below autograd."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, dim: int, dtype: torch.dtype) -> Any:
        y = run(x, dim, dtype)
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)
        ctx.dim, ctx.dtype = dim, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, _gradient(dy, ctx.saved_tensors[0], ctx.dim, ctx.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, _run: Any, dx: Tensor, *_options: Any) -> Any:
        with of_other_levels():
            [y] = primals(ctx.saved_tensors)
            return _gradient(dx, y, ctx.dim, y.dtype)  # the Jacobian is symmetric


_apply = torch_adapter.bare_apply(_Softmax)


def _gradient(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    if _is_plain(dy) and _is_plain(y) and has_storage(dy) and not is_grad_enabled():
        return backward(dy, y, dim, dtype)
    return SOFTMAX_BACKWARD(dy, y, dim, dtype)


def _gradient_in_level(
    run: Callable[..., Tensor], dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype
) -> Tensor:
    """As `run` computes it, and in lines of PyTorch where it has derivatives itself."""
    compute = _in_pytorch if has_derivatives(dy) or has_derivatives(y) else run
    return compute(dy, y, dim, dtype)


def _in_pytorch(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    accumulated = torch.promote_types(y.dtype, torch.float32)
    dx = backward_reference(y.to(accumulated), dy.to(accumulated), dim)
    return dx.to(y.dtype).to(dtype)


# ---- the operators


def _fake(*arguments: Any) -> Tensor:
    *_, like, dim, dtype = arguments
    _check(like, dim, dtype)
    return _packed(like, dtype)


def _batch(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[Tensor, int]:
    """The softmax of a batch, or its backward, is that along the next dimension."""
    *tensors, dim, dtype = arguments
    tensors = [
        x.expand(info.batch_size, *x.shape) if at is None else x.movedim(at, 0)
        for x, at in zip(tensors, in_dims, strict=False)
    ]
    run = SOFTMAX if len(tensors) == 1 else SOFTMAX_BACKWARD
    _check_dim(dim, tensors[0].shape[1:])
    if tensors[0].dim() == 1:  # of scalars
        return run(*(x[:, None] for x in tensors), 1, dtype)[:, 0], 0
    return run(*tensors, dim % (tensors[0].dim() - 1) + 1, dtype), 0


SOFTMAX = torch_adapter.define_operator(
    "softmax(Tensor x, int dim, ScalarType dtype) -> Tensor", _forward, _fake, _batch
)
SOFTMAX_BACKWARD = torch_adapter.define_operator(
    "softmax_backward(Tensor dy, Tensor y, int dim, ScalarType dtype) -> Tensor",
    backward, _fake, _batch,
)  # fmt: skip
torch_adapter.at_autograd(SOFTMAX, _apply, torch_adapter.level_apply(_Softmax))
torch_adapter.at_autograd(SOFTMAX_BACKWARD, _gradient_in_level)


# ---- which kernel


def _plan(tensors: Sequence[Tensor], dim: int) -> Callable[..., None]:
    """What computes the first of `tensors` from the others: (y, x), or (dx, y, dy)."""
    if not tensors[0].numel():
        return lambda *tensors: None
    if not all(x.data_ptr() for x in tensors):  # no plan is kept for the address 0
        raise RuntimeError("softmax: the memory of a tensor was freed")
    if not tensors[0].dim():
        tensors = [x.view(1) for x in tensors]
    dim %= tensors[0].dim()
    sizes, strides = as_rows(tensors, dim)
    *outer, batches, n_rows, n_cols = sizes
    gpu, inputs = planning_gpu(tensors[0]), len(tensors) - 1
    itemsize = max(x.element_size() for x in tensors)
    adjacent = all(s[-1] == 1 for s in strides) or n_cols == 1
    vector = shifted_vector(tensors, strides)
    if adjacent:
        tile = rule.op_tile(batches * n_rows, n_cols, itemsize, inputs, gpu, vector)
    else:
        tile = rule.column_tile(n_cols, n_rows)
    one_batch = adjacent and batches == 1  # as the kernels of long rows need it
    if outer or batches > MAX_BATCHES or not (tile or one_batch):
        return _with_rows_last(dim)
    align = divisor_of_rows(tensors, n_cols, strides)
    by_tensor = list(zip(tensors, strides, strict=True))
    if tile:
        return Launch(
            (chunks.softmax_kernel, gradient.softmax_backward_kernel)[inputs - 1],
            (triton.cdiv(n_rows, tile.rows), batches),
            (*(it for x, s in by_tensor for it in (x, *s)), n_rows, n_cols),
            rule.tile_constants(tile, n_rows, n_cols, align, gpu),
            num_warps=tile.num_warps,
        ).run
    arguments = tuple(it for x, s in by_tensor for it in (x, *s[1:]))
    if adjacent and tensors[-1].dtype in DTYPES and tensors[0].dtype in DTYPES:
        kernel = (split.split_kernel, gradient.split_backward_kernel)[inputs - 1]
        how = split.best_split(n_cols, itemsize, inputs, align, vector, gpu, n_rows)
        with suppress(split.TooManyPrograms):  # in passes, then
            return split.split_launch(
                kernel, arguments, n_rows, n_cols, how, align=align, vector=vector
            ).run
    if inputs == 2:
        return lambda dx, y, dy: dx.copy_(_in_pytorch(dy, y, dim, dx.dtype))
    one = rule.pass_tile(n_cols, itemsize, gpu)
    return Launch(
        online.online_kernel, (n_rows,), (*arguments, n_rows, n_cols),
        {"ROWS": 1, "BLOCK": one.block, "ALIGN": align}, num_warps=one.num_warps,
    ).run  # fmt: skip


def _with_rows_last(dim: int) -> Callable[..., None]:
    """Copies the tensors, where no launch reaches all of their rows as they lie."""

    def run(to: Tensor, *others: Tensor) -> None:
        rows = [x.movedim(dim, -1).contiguous() for x in reversed(others)]
        compute: Any = _forward if len(rows) == 1 else backward
        to.copy_(compute(*rows, -1, to.dtype).movedim(-1, dim))

    return run


def as_rows(tensors: Sequence[Tensor], dim: int) -> tuple[list[int], list[list[int]]]:
    """Tensors of one shape as batches of matrices whose rows lie along `dim`.

    Returns the sizes, (..., batch, M, N), and each tensor's strides. Dimensions that follow one
    another in all of the tensors are joined, so there are few. The order of rows is that of the
    last tensor's memory.
    """
    shape, last = tensors[-1].shape, tensors[-1]
    others = [i for i in range(len(shape)) if i != dim and shape[i] != 1]
    sizes: list[int] = []
    steps: list[list[int]] = []  # of each size, those of the tensors
    for i in sorted(others, key=last.stride, reverse=True):
        here = [x.stride(i) for x in tensors]
        if steps and steps[-1] == [shape[i] * step for step in here]:
            sizes[-1] *= shape[i]
            steps[-1] = here
        else:
            sizes.append(shape[i])
            steps.append(here)
    missing = max(0, 2 - len(sizes))
    sizes = [1] * missing + sizes + [shape[dim]]
    steps = [[0] * len(tensors)] * missing + steps + [[x.stride(dim) for x in tensors]]
    return sizes, list(map(list, zip(*steps, strict=True)))
