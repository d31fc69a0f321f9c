"""Row softmax by persistent programs: as many as the GPU holds, each over many tiles.

Traffic: reads MN, writes MN. Ends where a row outgrows one program's registers.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.gpus import Gpu
from memtraffic.kernels.launch import Launch, cached_launch, resident_launch
from memtraffic.kernels.operands import check_operands
from memtraffic.kernels.softmax.tiled import _softmax_tile
from memtraffic.kernels.tiling import (
    MAX_COLS,
    choose_num_stages,
    common_divisor,
    tile_shape,
)


@triton.jit
def _softmax_persistent_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    n_rows, n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # A program starts at the tile of its number and steps by the number of programs.
    first, stride = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tl.cdiv(n_rows, ROWS), stride, num_stages=STAGES):
        _softmax_tile(
            y_ptr, y_row_stride, y_col_stride,
            x_ptr, x_row_stride, x_col_stride,
            n_rows, n_cols, tile, ROWS, BLOCK, ALIGN,
        )  # fmt: skip


def plan(
    x: Tensor,
    y: Tensor,
    *,
    rows: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    programs: int | None = None,
    gpu: Gpu | None = None,
) -> Launch:
    """The launch of the softmax of `x` into `y`, to be called with `y` and `x`.

    Options: as for `softmax`. gpu: what to plan for; by default the GPU that runs it.

    Raises ValueError for fewer than 1 program or stage and for options as `tile_shape`
    does; RuntimeError where a program needs more shared memory or registers than an SM
    has; LookupError for an AMD GPU that `gpus` does not list.
    """
    for name, value in (("num_stages", num_stages), ("programs", programs)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, not 1 or more")
    (n_rows, n_cols), itemsize = x.shape, x.element_size()
    gpu = gpu or planning_gpu(x)
    tile = tile_shape(n_cols, itemsize, gpu, rows=rows, num_warps=num_warps)
    align, tile_bytes = common_divisor(x, y), tile.rows * tile.block * itemsize
    stages = num_stages or choose_num_stages(tile_bytes, align * itemsize, gpu)
    return resident_launch(
        _softmax_persistent_kernel,
        (y, *y.stride(), x, *x.stride(), *x.shape),
        replace(tile, align=align, stages=stages).constants,
        triton.cdiv(n_rows, tile.rows),
        gpu,
        num_warps=tile.num_warps,
        min_stages=num_stages or 1,
        programs=programs,
    )


def softmax(
    x: Tensor,
    out: Tensor | None = None,
    *,
    rows: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    programs: int | None = None,
) -> Tensor:
    """Softmax of each row of `x`, of any width to MAX_COLS. See book/persistent.ipynb.

    x: tensor of shape (M, N), float32, float16 or bfloat16, of any strides, on a GPU
    or, interpreted, on the CPU. rows, num_warps, num_stages: of a program, and programs
    in all, instead of what `plan` chooses. Returns `out`, or a new tensor of x's shape
    and dtype. Raises TypeError for another dtype or device, ValueError for another
    shape, RuntimeError for a tensor that requires a gradient, and what `plan` raises.
    """
    y = check_operands("persistent", x, out, MAX_COLS)
    if x.numel():
        with device_guard(x):
            launch = cached_launch(
                plan, y, x, rows=rows, num_warps=num_warps,
                num_stages=num_stages, programs=programs,
            )  # fmt: skip
            launch(y, x)
    return y
