"""RMSNorm, `y = x / sqrt(mean(x**2) + eps) * weight`, one program per row.

Traffic: reads MN for x and MN for the weight, which each program reads anew, and writes MN.
"""

import memtraffic  # noqa: F401  # before Triton: without a GPU, it has kernels interpreted
import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    y_ptr, y_row_stride,
    x_ptr, x_row_stride,
    weight_ptr,
    n_cols,
    eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    weight = tl.load(weight_ptr + cols, mask=mask)
    tl.store(y_ptr + row * y_row_stride + cols, x * scale * weight, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm of each row of the matrix `x`, whose columns lie one beside the other."""
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    _rms_norm_kernel[(n_rows,)](
        y, y.stride(0), x, x.stride(0), weight, n_cols, eps,
        BLOCK=triton.next_power_of_2(n_cols), num_warps=8,
    )  # fmt: skip
    return y
