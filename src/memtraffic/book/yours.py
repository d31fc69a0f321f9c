"""The kernels of the chapter *Your kernel*, in a file of their own as a reader's would be.

`rms_norm`: a program per row. Traffic: reads MN, and the N weights in each program; writes MN.
`rms_norm_loop`: a program takes many rows. Traffic: reads MN + N per program, writes MN.
`cross_entropy`: loss and gradient in one kernel. Traffic: reads MN + 2M, writes MN + M. It ends
where a row of logits no longer fits the registers of one program.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from memtraffic import runtime
from memtraffic.gpus import planning_gpu
from memtraffic.ladder.tiling import MAX_COLS, max_warps

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

    >>> x = torch.full((2, 4), 3.0, device=runtime.device())
    >>> rms_norm(x, torch.ones_like(x[0]))[0, 0].item()
    0.99999...

    x: a packed matrix of 1 to 32768 columns. w: as many weights as `x` has columns. Raises
    ValueError otherwise.
    """
    y, (block, warps) = torch.empty_like(x), _program("rms_norm", x)
    with runtime.device_guard(x):
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
    with runtime.device_guard(x):
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
    n_rows, n_cols,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(row, tl.int64) * n_cols
        x = tl.load(x_ptr + first + cols, mask=mask, other=-float("inf")).to(tl.float32)
        target = tl.load(target_ptr + row).to(tl.int32)
        at_target = tl.load(x_ptr + first + target).to(tl.float32)
        row_max = tl.max(x, axis=0)
        numerator = tl.exp(x - row_max)
        total = tl.sum(numerator, axis=0)
        tl.store(loss_ptr + row, row_max + tl.log(total) - at_target)
        dx = numerator * (1 / total) - tl.where(cols == target, 1.0, 0.0)
        tl.store(dx_ptr + first + cols, dx, mask=mask)


def cross_entropy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each row of logits, and the gradient of their sum.

    >>> x, target = (torch.tensor(it, device=runtime.device()) for it in ([[0.0] * 4], [1]))
    >>> loss, dx = cross_entropy(x, target)
    >>> dx[0].tolist()
    [0.25, -0.75, 0.25, 0.25]

    x: logits, a packed matrix of 1 to 32768 columns. target: int64, for each row the column that
    is right. Returns the losses in float32, and the gradient in the dtype of `x`. Raises ValueError
    for other matrices.
    """
    block, warps = _program("cross_entropy", x)
    n_rows, n_cols = x.shape
    loss, dx = x.new_empty(n_rows, dtype=torch.float32), torch.empty_like(x)
    programs, stages, gpu = n_rows, 1, planning_gpu(x)
    row_bytes = block * x.element_size()
    if warps == max_warps(gpu) and 2 * row_bytes <= gpu.shared_per_program:
        programs, stages = gpu.num_sms, 3  # one program fills an SM: let it request rows ahead
    with runtime.device_guard(x):
        _cross_entropy_kernel[(programs,)](
            loss, dx, x, target, n_rows, n_cols,
            BLOCK=block, STAGES=stages, num_warps=warps,
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
    if x.dim() != 2 or not x.is_contiguous() or not 0 < x.shape[1] <= MAX_COLS:
        raise ValueError(
            f"{name}: takes a packed matrix of 1 to {MAX_COLS} columns, not {tuple(x.shape)} "
            f"of strides {x.stride()}"
        )
    block = triton.next_power_of_2(x.shape[1])
    gpu = planning_gpu(x)
    return block, max(4, min(max_warps(gpu), block // (32 * gpu.warp_size)))
