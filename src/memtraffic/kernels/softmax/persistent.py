"""Row softmax by persistent programs: as many as the GPU holds, each over many tiles.

Traffic: reads MN, writes MN. Ends where a row outgrows one program's registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu, runs_on_gpu
from memtraffic.gpus import Gpu
from memtraffic.kernels.launch import Launch, cached
from memtraffic.kernels.operands import check_operands, common_divisor
from memtraffic.kernels.softmax.rule import MAX_COLS, choose_num_stages, tile_shape
from memtraffic.kernels.softmax.tiled import _softmax_tile
from memtraffic.residency import loaded_resources, resident_programs
from memtraffic.triton_adapter.launch import compile_kernel

INTERPRETED_PROGRAMS = 4  # where no GPU says how many fit: enough to see them stride


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


@cached
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

    rows, num_warps, num_stages: of a program, and programs in all, instead of what the rule
    says. gpu: what to plan for; by default the GPU that runs it.

    Raises ValueError for options as `tile_shape` does, Triton's OutOfResources where a
    program needs more shared memory or registers than an SM has, and LookupError for an
    AMD GPU that `gpus` does not list.
    """
    (n_rows, n_cols), itemsize = x.shape, x.element_size()
    gpu = gpu or planning_gpu(x)
    tile = tile_shape(n_cols, itemsize, gpu, rows=rows, num_warps=num_warps)
    align, tile_bytes = common_divisor(x, y), tile.rows * tile.block * itemsize
    stages = num_stages or choose_num_stages(tile_bytes, align * itemsize, gpu)
    arguments = (y, *y.stride(), x, *x.stride(), n_rows, n_cols)
    constants = {
        "ROWS": tile.rows, "BLOCK": tile.block, "ALIGN": align, "STAGES": stages
    }  # fmt: skip
    kernel, warps = _softmax_persistent_kernel, tile.num_warps
    fitting = INTERPRETED_PROGRAMS
    if runs_on_gpu():
        compiled = compile_kernel(kernel, *arguments, **constants, num_warps=warps)
        fitting = gpu.num_sms * resident_programs(loaded_resources(compiled, gpu), gpu)
    grid = min(triton.cdiv(n_rows, tile.rows), programs or max(1, fitting))
    return Launch(kernel, (grid, 1), arguments, constants, num_warps=warps)


def softmax(
    x: Tensor,
    *,
    rows: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    programs: int | None = None,
) -> Tensor:
    """Softmax of each row of `x`, of any width to MAX_COLS. See book/persistent.ipynb.

    x: tensor of shape (M, N), float32, float16 or bfloat16, of any strides, on a GPU
    or, interpreted, on the CPU. rows, num_warps, num_stages, programs: as of `plan`.
    Returns a new tensor of x's shape and dtype. Raises TypeError for another dtype or
    device, ValueError for another shape, RuntimeError for a tensor that requires a
    gradient, and what `plan` raises.
    """
    y = check_operands("persistent", x, MAX_COLS)
    if x.numel():
        with device_guard(x):
            plan(
                x, y, rows=rows, num_warps=num_warps,
                num_stages=num_stages, programs=programs,
            )(y, x)  # fmt: skip
    return y
