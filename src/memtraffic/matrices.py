"""The matrices that kernels are measured on: the same rows and columns, laid out in memory in several ways."""

import torch

from memtraffic import machine

# name: the strides of the rows and of the columns of an m x n matrix, in elements
LAYOUTS = {
    "packed": lambda m, n: (n, 1),
    "odd": lambda m, n: (n | 1, 1),
    "every other": lambda m, n: (2 * n, 2),
    "transposed": lambda m, n: (1, m),
}


def matrix(m, n, dtype="float32", layout="packed"):
    """An m x n matrix of normally distributed numbers, where this machine's kernels run.

    layout: `packed`, row after row; `odd`, rows an odd number of elements apart; `every other`, neighbouring columns two
    elements apart; `transposed`, column after column. Raises LookupError for another one.
    """
    if layout not in LAYOUTS:
        raise LookupError(
            f"no layout is named {layout!r}: give one of {', '.join(LAYOUTS)}"
        )
    row_stride, col_stride = LAYOUTS[layout](m, n)
    size = (m - 1) * row_stride + (n - 1) * col_stride + 1
    memory = torch.randn(size, device=machine.device()).to(getattr(torch, dtype))
    return memory.as_strided((m, n), (row_stride, col_stride))


def sectors(x):
    """The sectors of 32 bytes that the rows of the matrix `x` lie in, each counted once for each row that needs it.

    So many must come from L2 if every row is read by itself. `x` starts at a sector, as what PyTorch allocates does.
    """
    size = x.element_size()
    cols = torch.arange(x.shape[1]) * x.stride(1) * size
    starts = torch.arange(x.shape[0]) * x.stride(0) * size % 32
    alike, times = starts.unique(return_counts=True)
    touched = ((cols + start) // 32 for start in alike.tolist())
    return sum(
        it.unique().numel() * k for it, k in zip(touched, times.tolist(), strict=True)
    )
