"""The roof of a kernel that moves memory: the fastest of several copies.

No copy is the fastest at every size, so a kernel may beat any single one of them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from memtraffic.benchmark import kernels
from memtraffic.benchmark.timing import time_interleaved
from memtraffic.kernels.softmax.rule import MAX_COLS
from memtraffic.tensors import span

Copy = Callable[[], Tensor]
FLAT = ((1024, 4), (1024, 8), (4096, 8))  # elements per program, warps


def copies(x: Tensor, other: Tensor | None = None) -> dict[str, Copy]:
    """Calls that copy `x`, by name; with a second input, calls that add the two.

    >>> from memtraffic import device
    >>> found = copies(torch.ones(2, 16, device=device.default()))
    >>> list(found)
    ['clone', 'copy_', '1024, 4 warps', '1024, 8 warps', '4096, 8 warps', 'tiles']
    >>> found["tiles"]().sum().item()
    32.0

    `clone` writes to new memory, the others overwrite a result that they keep. A name with numbers
    is a Triton kernel: the elements that a program copies, and its warps. It copies memory as it
    lies, so there is none for an `x` with gaps. `tiles` has the grid, the tiles and the warps of
    the rung `tiled`, and no arithmetic.
    """
    out = torch.empty_like(x)  # of x's strides, where x has no gaps
    found: dict[str, Copy]
    if other is None:
        found = {"clone": x.clone, "copy_": functools.partial(out.copy_, x)}
    else:
        add = functools.partial(torch.add, x, other)
        found = {"add": add, "add into": functools.partial(add, out=out)}
    inputs = (x,) if other is None else (x, other)
    if all(it.stride() == out.stride() and span(it) == it.numel() for it in inputs):
        for block, num_warps in FLAT:
            call = functools.partial(kernels.copy_flat, out, x, other, block, num_warps)
            found[f"{block}, {num_warps} warps"] = call
    if other is None and x.dim() == 2 and x.numel() and x.shape[1] <= MAX_COLS:
        packed = torch.empty_like(x, memory_format=torch.contiguous_format)
        found["tiles"] = functools.partial(kernels.copy_tiles, packed, x)
    return found


def fastest_copy(x: Tensor, other: Tensor | None = None) -> Copy:
    """The fastest of `copies`, found by timing each of them 32 times.

    Time the result again, beside what it is compared with: the least of several medians is a little
    too low. Raises RuntimeError without a GPU.
    """
    found = list(copies(x, other).values())
    samples = time_interleaved(found, budget=0)
    return min(zip(map(statistics.median, samples), range(len(found)), found, strict=True))[2]
