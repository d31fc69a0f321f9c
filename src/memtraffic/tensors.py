"""The matrices that kernels are tested and measured on: equal numbers, laid out in several ways."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import memtraffic.device
from memtraffic.errors import CountError, unknown

# Layout: the strides of the rows and of the columns of an m x n matrix, in elements.
MEMORY_LAYOUTS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "packed": lambda m, n: (n, 1),
    "odd": lambda m, n: (n | 1, 1),
    "every other": lambda m, n: (2 * n, 2),
    "transposed": lambda m, n: (1, m),
}
SECTOR_BYTES = 32  # what L2 delivers at least
MOST_MARKED = 2**28  # elements, a byte each


def matrix(
    m: int,
    n: int,
    dtype: str | torch.dtype = "float32",
    layout: str = "packed",
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """An m x n matrix of normally distributed numbers, the same ones for the same seed and device.

    >>> x = matrix(3, 4, "bfloat16", "transposed")
    >>> x.shape, x.stride()
    (torch.Size([3, 4]), (1, 3))

    dtype: a torch.dtype or its name. layout: `packed` stores row after row; `odd` stores rows an
    odd number of elements apart; `every other` leaves a gap after each element; `transposed` stores
    column after column. device: where kernels run by default; on `meta` the matrix has no numbers.

    Raises LookupError for an unknown layout.
    """
    if layout not in MEMORY_LAYOUTS:
        raise LookupError(unknown("layout", layout, MEMORY_LAYOUTS))
    device = torch.device(device or memtraffic.device.default())
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    row_stride, col_stride = MEMORY_LAYOUTS[layout](m, n)
    size = (m - 1) * row_stride + (n - 1) * col_stride + 1 if m and n else 0
    if device.type == "meta":
        memory = torch.empty(size, dtype=dtype, device=device)
    else:
        generator = torch.Generator(device).manual_seed(seed)
        memory = torch.randn(size, generator=generator, device=device).to(dtype)
    return memory.as_strided((m, n), (row_stride, col_stride))


def span(x: Tensor) -> int:
    """Elements from the first of `x` to its last in memory, gaps included; 0 if it is empty.

    >>> span(matrix(3, 4)), span(matrix(3, 4, layout="every other"))
    (12, 23)
    """
    if not x.numel():
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


def held(x: Tensor) -> int:
    """Elements of memory that `x` holds: one that several indices share counts once.

    >>> held(torch.ones(3, 1).expand(3, 5)), held(torch.arange(8).unfold(0, 3, 1))
    (3, 8)

    Raises CountError where the strides are neither nested nor multiples of each other and there are
    too many elements to mark.
    """
    levels: list[tuple[int, int]] = []  # steps and their numbers; each step leaves those before
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if not size:
            return 0
        if size == 1 or not stride:
            continue
        step, steps = levels[-1] if levels else (stride, 1)
        if stride % step == 0 and stride <= step * steps:
            levels[-1:] = [(step, steps + (size - 1) * stride // step)]
        elif stride > sum(step * (steps - 1) for step, steps in levels):
            levels.append((stride, size))
        else:
            return _marked(x)
    return math.prod(steps for _, steps in levels)


def _marked(x: Tensor) -> int:
    """As `held`, by a mark for each element of memory."""
    if max(span(x), x.numel()) > MOST_MARKED:
        raise CountError(
            f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} overlaps itself, and is "
            "too large to find how often"
        )
    marks = np.zeros(span(x), dtype=bool)  # not a tensor: PyTorch's operations are being counted
    np.lib.stride_tricks.as_strided(marks, x.shape, x.stride())[...] = True
    return int(marks.sum())


def sectors(x: Tensor) -> int:
    """Sectors of 32 bytes that the rows of the matrix `x` lie in, added up row by row.

    This is how many sectors L2 must deliver when each row is read separately: a sector that two
    rows share counts twice. It assumes that `x` starts on a sector boundary, as PyTorch's
    allocations do.

    >>> sectors(torch.zeros(2, 8)), sectors(torch.zeros(2, 16)[:, ::2])
    (2, 4)
    """
    cols = torch.arange(x.shape[1]) * x.stride(1) * x.element_size()
    starts = torch.arange(x.shape[0]) * x.stride(0) * x.element_size() % SECTOR_BYTES
    row_starts, counts = starts.unique(return_counts=True)
    return sum(
        count * ((cols + start) // SECTOR_BYTES).unique().numel()
        for start, count in zip(row_starts.tolist(), counts.tolist(), strict=True)
    )
