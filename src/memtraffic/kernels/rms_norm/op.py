"""`memtraffic.rms_norm`: what `torch.nn.functional.rms_norm` computes, with the least traffic."""

from dataclasses import replace
from typing import Any, SupportsFloat

import torch
import triton
from torch import Tensor
from torch.nn.functional import rms_norm as rms_norm_of_torch

from memtraffic.gpus import Gpu, planning_gpu
from memtraffic.kernels.autograd import Results, Run, operation, operator
from memtraffic.kernels.launch import Launch, resident_launch
from memtraffic.kernels.operands import accumulated, check_floats
from memtraffic.kernels.rms_norm.backward import (
    long_rms_norm_backward_kernel,
    rms_norm_backward_kernel,
)
from memtraffic.kernels.rms_norm.forward import long_rms_norm_kernel, rms_norm_kernel
from memtraffic.kernels.softmax.online import online_tile
from memtraffic.kernels.softmax.planning import Tile, common_divisor, row_tile, tile_constants
from memtraffic.kernels.tiling import MAX_ROW, VECTOR_BYTES

# Of the backward: warps, and the widest row, in columns, that a program of them holds beside its
# part of dweight, by the bytes of an element; of those that idle least the first is taken. From a
# sweep of widths on an H200.
WIDEST = {
    2: {8: 8192, 4: 5120, 16: 20480},
    4: {8: 4096, 4: 8192},
    8: {4: 1024, 8: 4096, 16: 8192},
}
# Longer rows are split: warps and chunks of a program, and what is taken where its programs would
# be more than the SMs.
SPLIT = {2: ((4, 2), (8, 4)), 4: ((8, 6),), 8: ()}
# Where one program fills an SM, it loads ahead: stages, by bytes of an element, warps and chunks.
STAGES = {(2, 16, 3): 3}
LOOKS = 2**31 - 1  # at a word that is not there yet, and will come


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: SupportsFloat | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight` along the last dimension, as PyTorch computes it.

    >>> from memtraffic import runtime
    >>> x = torch.full((2, 4), 3.0, dtype=torch.float16, device=runtime.device())
    >>> rms_norm(x, eps=0.0)[0].tolist()
    [1.0, 1.0, 1.0, 1.0]

    x: tensor of shape (..., N), of float32, float16, bfloat16 or float64, on a GPU or, where
    kernels are interpreted, on the CPU. weight: of shape (N,), of any of these dtypes. eps: by
    default that of float32, or of float64 for an `x` of it. out: what the result is written to.
    Returns it, or a packed tensor of x's shape and dtype; sums are of float32, or of float64.

    Each element is read once and written once, in rows of up to 32768 columns, and 16 bytes at a
    time where rows are aligned to them; longer rows are read twice. The weight is read once per
    program, from the caches. Columns may lie apart, which is slower; only leading dimensions that
    do not follow one another in memory are copied.

    It works with autograd, also twice, `torch.compile`, `torch.func` and `torch.jit.trace`; in
    forward mode it is PyTorch's. Errors are of PyTorch's kinds: NotImplementedError for another
    dtype or layout, RuntimeError for a scalar, for a weight of another shape, for another device,
    for an `out` that does not fit, and for rows of more than 2**24 columns.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"rms_norm: x is a {type(x).__name__}, not a tensor")
    if eps is None:
        eps = torch.finfo(accumulated(x)).eps
    elif not (isinstance(eps, (int, float)) or hasattr(eps, "__float__")):
        raise TypeError(f"rms_norm: eps is a {type(eps).__name__}, not a float")
    if out is None:
        return _RMS_NORM.apply(x, (weight, float(eps)))
    return _RMS_NORM.into(out, x, weight, float(eps))


def reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """The same in lines of PyTorch, of float64 for an `x` of it."""
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * weight


def _check(x: Tensor, weight: Tensor | None, eps: float) -> None:
    check_floats("rms_norm", *(it.dtype for it in (x, weight) if it is not None))
    if not x.dim():
        raise RuntimeError("rms_norm: x is a scalar, which has no rows")
    n = x.shape[-1]
    if weight is not None and tuple(weight.shape) != (n,):
        raise RuntimeError(f"rms_norm: weight is {tuple(weight.shape)}, not {(n,)}")
    if isinstance(n, int) and n > MAX_ROW:
        raise RuntimeError(f"rms_norm: {n} columns, more than {MAX_ROW}")


# ---- plans


def forward_tile(n_cols: int, itemsize: int, gpu: Gpu) -> Tile | None:
    """The tile of a program, that of softmax but for its widest rows; None if none fits.

    >>> from memtraffic.gpus import find_gpu
    >>> forward_tile(32768, 4, find_gpu("H200"))
    Tile(rows=1, block=8192, chunks=4, num_warps=32)
    """
    tile = row_tile(n_cols, itemsize, 1, gpu)
    if tile and (itemsize, tile.num_warps * gpu.warp_size) == (4, 512) and n_cols > 16384:
        block, num_warps = 4 * tile.block, 2 * tile.num_warps
        return Tile(1, block, triton.cdiv(n_cols, block), num_warps)
    return tile


def backward_tile(n_cols: int, itemsize: int, gpu: Gpu) -> tuple[Tile, int] | None:
    """The tile of a program, and how many programs share a row; None if none fits.

    >>> from memtraffic.gpus import find_gpu
    >>> backward_tile(12288, 2, find_gpu("H200"))
    (Tile(rows=1, block=4096, chunks=3, num_warps=16), 1)
    """
    narrow = row_tile(n_cols, itemsize, 2, gpu)
    if narrow and narrow.rows > 1:
        # A lane adds up whole vectors.
        block = max(narrow.block, VECTOR_BYTES // itemsize)
        return replace(narrow, block=block), 1
    vector = VECTOR_BYTES // itemsize
    fitting = [warps for warps, widest in WIDEST[itemsize].items() if n_cols <= widest]
    candidates = SPLIT[itemsize]  # of 64 bits, a sum outgrows half a word
    if fitting:
        num_warps = min(fitting, key=lambda it: -n_cols % (it * 32 * vector))
        candidates = ((num_warps, triton.cdiv(n_cols, num_warps * 32 * vector)),)
    for num_warps, chunks in candidates:
        lanes = max(num_warps * 32, gpu.warp_size)
        block = vector * lanes
        chunks = triton.cdiv(chunks * num_warps * 32, lanes)
        parts = triton.cdiv(n_cols, block * chunks)
        if lanes <= gpu.max_threads_per_program and parts <= gpu.num_sms:
            return Tile(1, block, chunks, lanes // gpu.warp_size), parts
    return None


def _rows(x: Tensor) -> Tensor:
    """The rows of `x` as a matrix: a view wherever there is one."""
    return x.reshape(-1, x.shape[-1])


def _ordered(constants: dict[str, Any], kernel: Any) -> dict[str, Any]:
    """Constants in the order of the kernel's parameters."""
    return {name: constants[name] for name in kernel.arg_names if name in constants}


def _plan_forward(results: Any, tensors: Any, eps: float) -> Run:
    (y, rstd), (x, weight) = results, tensors
    if not x.numel():
        return lambda *tensors: None
    gpu, matrices = planning_gpu(x), (_rows(y), _rows(x))
    n_rows, n_cols = matrices[1].shape
    strides = [it for matrix in matrices for it in (matrix, *matrix.stride())]
    of_weight = (x, 1) if weight is None else (weight, weight.stride(0))
    arguments = *strides, *of_weight, rstd, n_rows, n_cols
    align = common_divisor(matrices, x.shape, [it.stride() for it in matrices])
    constants = {"EPS": eps, "ALIGN": align, "WEIGHTED": weight is not None}
    tile = forward_tile(n_cols, x.element_size(), gpu)
    kernel: Any = rms_norm_kernel
    if tile is None:
        kernel, long = long_rms_norm_kernel, online_tile(n_cols, x.element_size(), gpu)
        constants |= {"BLOCK": long.block}
        grid, num_warps = n_rows, long.num_warps
    else:
        constants |= tile_constants(tile, n_cols, 1, align, gpu)
        grid, num_warps = triton.cdiv(n_rows, tile.rows), tile.num_warps
    constants = _ordered(constants, kernel)
    launch = Launch(kernel, (grid, 1), arguments, constants, num_warps=num_warps)

    def run(y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor | None) -> None:
        launch(_rows(y), _rows(x), x if weight is None else weight, rstd)

    return run


def _plan_backward(results: Any, tensors: Any, eps: float) -> Run:
    (dx, _), (dy, x, weight, rstd) = results, tensors
    if not x.numel():
        return lambda dx, dweight, *tensors: dweight.zero_()
    gpu, matrices = planning_gpu(x), (_rows(dx), _rows(dy), _rows(x))
    n_rows, n_cols = matrices[2].shape
    parts = torch.empty(1, n_cols, dtype=rstd.dtype, device=x.device)
    of_dx, of_dy, of_x = ((matrix, *matrix.stride()) for matrix in matrices)
    of_weight = (x, 1) if weight is None else (weight, weight.stride(0))
    arguments = *of_dx, parts, *of_dy, *of_x, *of_weight, rstd
    align = common_divisor(matrices, x.shape, [it.stride() for it in matrices])
    constants = {"ALIGN": align, "WEIGHTED": weight is not None}
    found = backward_tile(n_cols, x.element_size(), gpu)
    kernel: Any = rms_norm_backward_kernel
    if found is None:
        kernel, long = long_rms_norm_backward_kernel, online_tile(n_cols, 2 * x.element_size(), gpu)
        constants |= {"BLOCK": long.block}
        n_tiles, num_warps, team = n_rows, long.num_warps, 1
        arguments = *arguments, n_rows, n_cols
    else:
        tile, team = found
        width = tile.block * tile.chunks
        last = n_cols - (team - 1) * width  # columns of the last part
        constants |= tile_constants(tile, last, 1, align, gpu) | {"CHUNKS": tile.chunks}
        lanes = max(triton.next_power_of_2(team), gpu.warp_size * tile.num_warps)
        stages = STAGES.get((x.element_size(), tile.num_warps, tile.chunks), 1)
        constants |= {"SLOTS": lanes if team > 1 else 0, "LOOKS": LOOKS, "STAGES": stages}
        n_tiles, num_warps = triton.cdiv(n_rows, tile.rows), tile.num_warps
        slots = torch.empty(2, dtype=torch.int64, device=x.device) if team > 1 else 0
        arguments = *arguments, slots, n_rows, n_cols, team
    constants = _ordered(constants, kernel)
    launch = resident_launch(
        kernel, arguments, constants, n_tiles, gpu, num_warps=num_warps, team=team
    )
    programs = launch.grid[0] // team if weight is not None else 1

    def run(
        dx: Tensor, dweight: Tensor, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
    ) -> None:
        parts = torch.empty(programs, n_cols, dtype=rstd.dtype, device=x.device)
        launch(_rows(dx), parts, _rows(dy), _rows(x), x if weight is None else weight, rstd)
        if weight is not None:
            dweight.copy_(parts.sum(0))

    return run


# ---- the two operators


def _results(x: Tensor, weight: Tensor | None, eps: float) -> Results:
    return [(x.shape, x.dtype), (x.shape[:-1], accumulated(x))]


def _results_of_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float
) -> Results:
    of_weight = ((0,), x.dtype) if weight is None else (weight.shape, weight.dtype)
    return [(x.shape, x.dtype), of_weight]


def _backward_in_pytorch(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What the backward computes, from `x` anew, so that it has gradients."""
    wide = accumulated(x)
    wide_x, wide_dy = x.to(wide), dy.to(wide)
    rstd = (wide_x.square().mean(-1, keepdim=True) + eps).rsqrt()
    xhat = wide_x * rstd
    inner = wide_dy if weight is None else wide_dy * weight.to(wide)
    dx = rstd * (inner - xhat * (inner * xhat).mean(-1, keepdim=True))
    if weight is None:
        return dx.to(x.dtype), x.new_empty(0)
    return dx.to(x.dtype), (wide_dy * xhat).sum_to_size(weight.shape).to(weight.dtype)


_FORWARD = operator(
    "rms_norm", "(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    _plan_forward, _results, _check,
)  # fmt: skip
_BACKWARD = operator(
    "rms_norm_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float eps) -> (Tensor, Tensor)",
    _plan_backward,
    _results_of_backward,
)
_RMS_NORM = operation(
    _FORWARD,
    _BACKWARD,
    save=lambda arguments, results: ((*arguments[:2], results[1]), arguments[2:]),
    reference=_backward_in_pytorch,
    in_pytorch=lambda x, weight, eps: (rms_norm_of_torch(x, x.shape[-1:], weight, eps), None),
)


def forward(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm` without autograd and PyTorch's dispatcher, and `1 / sqrt(mean(x**2) + eps)`."""
    made: tuple[Tensor, Tensor] = _FORWARD.launch(x, (weight, eps))
    return made


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, from that of the result. rstd: as of `forward`."""
    made: tuple[Tensor, Tensor] = _BACKWARD.launch(dy, (x, weight, rstd, eps))
    return made
