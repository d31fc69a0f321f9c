"""Row softmax in chunks: a program holds a wide row as several blocks, or several narrow rows.

Traffic: reads MN, writes MN. Ends where a row outgrows one program's registers.
Only the last chunk of a row has dead elements, and 16-bit numbers share registers.
"""

from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.operands import check_operands
from memtraffic.kernels.softmax.planning import row_tile, tile_constants, tile_programs
from memtraffic.kernels.softmax.rows import softmax_kernel
from memtraffic.kernels.tiling import MAX_COLS, common_divisor, shifted_vector


def softmax(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Softmax of each row of `x`, of any width to MAX_COLS. See book/chunks.ipynb.

    x: tensor of shape (M, N), float32, float16 or bfloat16, of any strides, on a GPU
    or, interpreted, on the CPU. Returns `out`, or a new tensor of x's shape and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape, and for
    rows that no program of the GPU holds, RuntimeError for a tensor that requires a
    gradient. A register spills at the widths of `planning.SPILLING`, which are launched
    by `memtraffic.softmax` with a limit.
    """
    y = check_operands("chunks", x, out, MAX_COLS)
    if not x.numel():
        return y
    n_rows, n_cols = x.shape
    adjacent, gpu = x.stride(1) == y.stride(1) == 1, planning_gpu(x)
    vector = shifted_vector((y, x), (y.stride(), x.stride())) if adjacent else 1
    tile = row_tile(n_cols, x.element_size(), 1, gpu, shifted=vector > 1)
    if tile is None:
        raise ValueError(
            f"chunks: {n_cols} columns do not fit a program of an {gpu.product}"
        )
    align = common_divisor(x, y)
    constants = tile_constants(tile, n_cols, vector, align, gpu, adjacent)
    with device_guard(x):
        softmax_kernel[(tile_programs(tile, n_rows, constants), 1)](
            y, 0, *y.stride(), x, 0, *x.stride(), n_rows, n_cols,
            **constants, num_warps=tile.num_warps,
        )  # fmt: skip
    return y
