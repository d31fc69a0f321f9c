"""Row softmax, one program a row: each element is read once and written once.

Traffic: reads MN, writes MN. Ends where a row is not a power of two wide, and where it outgrows one program's registers.
"""

import torch
import triton
import triton.language as tl

from memtraffic import machine
from memtraffic.ladder.operands import output

MAX_COLS = 32768  # 32 elements a thread; the next power of two would spill


def reference(x):
    """The same softmax in float64."""
    return torch.softmax(x.double(), dim=1)


@triton.jit
def _fused_kernel(y_ptr, x_ptr, y_row_stride, x_row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride outgrows int32 at 2**31
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row_stride + cols).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * y_row_stride + cols, y.to(y_ptr.dtype.element_ty))


def num_warps(n_cols):
    """Warps a program, so that a thread holds at most 32 elements of the row."""
    most = 1024 // machine.warp_size()  # a program has at most 1024 threads
    return max(4, min(most, n_cols // 512))


def softmax(x):
    """Softmax of each row of `x`, a power of two wide. Told in book/fused.ipynb.

    >>> softmax(torch.zeros(2, 4, device=machine.device()))[0].tolist()
    [0.25, 0.25, 0.25, 0.25]

    x: tensor of shape (M, N), float32, float16 or bfloat16, its rows contiguous, on a
    GPU or, interpreted, on the CPU. Returns a new tensor of x's shape and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape.
    """
    y = output("fused", x, None, MAX_COLS)
    n_rows, n_cols = x.shape
    if n_cols == 0 or n_cols & (n_cols - 1):
        raise ValueError(f"fused: {n_cols} columns, not a power of two")
    if n_cols > 1 and x.stride(1) != 1:
        raise ValueError(f"fused: columns lie {x.stride(1)} apart, not 1")
    if n_rows:
        with machine.on(x):
            _fused_kernel[(n_rows,)](
                y, x, y.stride(0), x.stride(0),
                BLOCK=n_cols, num_warps=num_warps(n_cols),
            )  # fmt: skip
    return y
