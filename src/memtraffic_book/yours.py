"""The kernels of the chapter *Your kernel*, in a file of their own as a reader's would be.

`rms_norm`: a program per row. Traffic: reads MN, and the N weights in each program; writes MN.
`rms_norm_loop`: a program takes many rows. Traffic: reads MN + N per program, writes MN.
`cross_entropy`: loss and gradient in one kernel. Traffic: reads MN + 2M, writes MN + 2M. It ends
where a row of logits no longer fits the registers of one program.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from memtraffic import device
from memtraffic.device import planning_gpu
from memtraffic.kernels.chunking import (
    load_chunks,
    max_of_chunks,
    numerators,
    softmax_of_chunk,
    store_chunk,
)
from memtraffic.kernels.launch import takes_ptx
from memtraffic.kernels.operands import VECTOR_BYTES
from memtraffic.kernels.softmax.rule import MAX_COLS, max_warps

# ---- RMS norm


@triton.jit
def _rms_norm_kernel(y_ptr, x_ptr, w_ptr, n_cols, eps, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    offsets = tl.program_id(0).to(tl.int64) * n_cols + cols
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    w = tl.load(w_ptr + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + offsets, x * scale * w, mask=mask)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * w` for each row of `x`, a program per row.

    >>> x = torch.full((2, 4), 3.0, device=device.default())
    >>> rms_norm(x, torch.ones_like(x[0]))[0, 0].item()
    0.99999...

    x: a packed matrix of 1 to 32768 columns. w: as many weights as `x` has columns. Raises
    ValueError otherwise.
    """
    y, (block, warps) = torch.empty_like(x), _program("rms_norm", x)
    with device.device_guard(x):
        _rms_norm_kernel[(x.shape[0],)](
            y, x, w, x.shape[1], eps, BLOCK=block, num_warps=warps
        )  # fmt: skip
    return y


@triton.jit
def _rms_norm_loop_kernel(y_ptr, x_ptr, w_ptr, n_rows, n_cols, eps, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    w = tl.load(w_ptr + cols, mask=mask).to(tl.float32)  # once, before the loop
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * n_cols + cols
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
        tl.store(y_ptr + offsets, x * scale * w, mask=mask)


def rms_norm_loop(x: Tensor, w: Tensor, eps: float = 1e-6, programs: int | None = None) -> Tensor:
    """`rms_norm` whose programs read the weights once and take row after row.

    programs: how many; by default four per SM of the GPU. Raises as `rms_norm` does.
    """
    y, (block, warps) = torch.empty_like(x), _program("rms_norm_loop", x)
    programs = min(x.shape[0], programs or 4 * planning_gpu(x).num_sms)
    with device.device_guard(x):
        _rms_norm_loop_kernel[(programs,)](y, x, w, *x.shape, eps, BLOCK=block, num_warps=warps)
    return y


def rms_norms(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What both kernels make, so that one run of a profiler sees both."""
    return rms_norm(x, w), rms_norm_loop(x, w)


def torch_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """PyTorch's own RMS norm."""
    return F.rms_norm(x, w.shape, w, 1e-6)


# ---- cross-entropy


@triton.jit
def _cross_entropy_kernel(
    loss_ptr, dx_ptr, x_ptr, target_ptr,
    n_cols,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WHOLE: tl.constexpr = CHUNKS - 1  # chunks that need no mask
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x_ptr += row * n_cols
    dx_ptr += row * n_cols
    target = tl.load(target_ptr + row)
    at_target = tl.load(x_ptr + target).to(tl.float32)
    chunks = load_chunks(x_ptr, 1, cols, n_cols, -float("inf"), BLOCK, CHUNKS, WHOLE)
    row_max = tl.max(max_of_chunks(chunks, CHUNKS, DTYPE), axis=0)
    total, kept = numerators(chunks, row_max, CHUNKS, DTYPE, PTX)
    row_sum = tl.sum(total, axis=0)
    scale = 1 / row_sum
    for i in tl.static_range(CHUNKS):
        dx = softmax_of_chunk(kept[i], row_max, scale, CHUNKS, DTYPE, PTX)
        store_chunk(dx_ptr, 1, dx, i, cols, n_cols, BLOCK, WHOLE)
    tl.store(loss_ptr + row, row_max + tl.log(row_sum) - at_target)
    tl.debug_barrier()  # all threads have written the softmax; replace one element
    tl.store(dx_ptr + target, tl.exp(at_target - row_max) * scale - 1)


def cross_entropy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each row of logits, and the gradient of their sum.

    >>> x, target = (torch.tensor(it, device=device.default()) for it in ([[0.0] * 4], [1]))
    >>> loss, dx = cross_entropy(x, target)
    >>> dx[0].tolist()
    [0.25, -0.75, 0.25, 0.25]

    x: logits, a packed matrix of 1 to 32768 columns. target: int64, for each row the column that
    is right. Returns the losses in float32, and the gradient in the dtype of `x`. Raises ValueError
    for other matrices.
    """
    _check("cross_entropy", x)
    (n_rows, n_cols), gpu = x.shape, planning_gpu(x)
    # Each thread holds up to 256 bytes of the row, and loads 16 of them at a time.
    row_bytes = triton.next_power_of_2(n_cols) * x.element_size()
    warps = max(1, row_bytes // (256 * gpu.warp_size))
    block = VECTOR_BYTES // x.element_size() * warps * gpu.warp_size
    loss, dx = x.new_empty(n_rows, dtype=torch.float32), torch.empty_like(x)
    with device.device_guard(x):
        _cross_entropy_kernel[(n_rows,)](
            loss, dx, x, target, n_cols,
            BLOCK=block, CHUNKS=triton.cdiv(n_cols, block), PTX=takes_ptx(gpu), num_warps=warps,
        )  # fmt: skip
    return loss, dx


def torch_cross_entropy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's loss, summed, and its gradient by autograd."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(x, target, reduction="sum")
    [dx] = torch.autograd.grad(loss, x)
    return loss, dx


def _program(name: str, x: Tensor) -> tuple[int, int]:
    """The block and the warps of a program that holds a row. Raises ValueError if none can."""
    _check(name, x)
    block = triton.next_power_of_2(x.shape[1])
    gpu = planning_gpu(x)
    return block, max(4, min(max_warps(gpu), block // (32 * gpu.warp_size)))


def _check(name: str, x: Tensor) -> None:
    if x.dim() != 2 or not x.is_contiguous() or not 0 < x.shape[1] <= MAX_COLS:
        raise ValueError(
            f"{name}: takes a packed matrix of 1 to {MAX_COLS} columns, not {tuple(x.shape)} "
            f"of strides {x.stride()}"
        )
