"""Row softmax by tiles: a program takes as many rows as fill its lanes, in accesses of 128 bits where the matrix permits.

Traffic: reads MN, writes MN. Ends where a row outgrows one program's registers.
"""

import functools
import math

import triton
import triton.language as tl

from memtraffic import machine
from memtraffic.ladder.fused import MAX_COLS
from memtraffic.ladder.operands import output

LANE_ELEMENTS = 64  # a lane that held more would have too few registers left
TILE_BYTES = 2048  # of blocks of narrow rows to a program


@triton.jit
def _softmax_tile(
    y_ptr,
    x_ptr,
    y_row_stride,
    y_col_stride,
    x_row_stride,
    x_col_stride,
    n_rows,
    n_cols,
    tile,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    n_cols = n_cols // ALIGN * ALIGN  # the same number: this shows what divides it
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    rows, cols = rows.to(tl.int64), cols.to(tl.int64)  # offsets outgrow int32
    at = rows * x_row_stride + cols * x_col_stride
    x = tl.load(x_ptr + at, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = numerator * (1 / tl.sum(numerator, axis=1)[:, None])  # one division a row
    at = rows * y_row_stride + cols * y_col_stride
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _warps_kernel(
    y_ptr,
    x_ptr,
    y_row_stride,
    y_col_stride,
    x_row_stride,
    x_col_stride,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    tile = tl.program_id(0)
    _softmax_tile(
        y_ptr, x_ptr, y_row_stride, y_col_stride, x_row_stride, x_col_stride,
        n_rows, n_cols, tile, ROWS, BLOCK, ALIGN,
    )  # fmt: skip


def align(x, y):
    """The number of elements, of at most 16 bytes in all, that divides rows and row strides of `x` and `y`.

    1 where columns are not neighbours. It is what the kernel may move in one access, given pointers divisible by 16.
    """
    if x.shape[1] > 1 and (x.stride(1) != 1 or y.stride(1) != 1):
        return 1
    return math.gcd(16 // x.element_size(), x.shape[1], x.stride(0), y.stride(0))


def choose(n_cols, itemsize, rows=None, num_warps=None, rung="warps"):
    """The shape of a program for rows of `n_cols` elements of `itemsize` bytes: `ROWS`, `BLOCK` and `num_warps`.

    One warp for each 1024 columns; of narrow rows, as many as make TILE_BYTES. rows, num_warps: instead of that.
    rung: whose name an error begins with.

    Raises ValueError for one that is no power of two, too many warps, or more than LANE_ELEMENTS elements a lane.
    """
    block = triton.next_power_of_2(n_cols)
    most = 1024 // machine.warp_size()  # a program has at most 1024 threads
    if rows is None:
        rows = max(1, TILE_BYTES // (block * itemsize))
    if num_warps is None:
        num_warps = max(1, min(most, block // 1024))
    for name, value in (("rows", rows), ("num_warps", num_warps)):
        if value < 1 or value & (value - 1):
            raise ValueError(f"{rung}: {name} is {value}, not a power of two")
    if num_warps > most:
        raise ValueError(f"{rung}: {num_warps} warps, more than {most}")
    lanes = num_warps * machine.warp_size()
    if rows * block > LANE_ELEMENTS * lanes:
        raise ValueError(
            f"{rung}: {rows} x {block} elements on {lanes} lanes, more than {LANE_ELEMENTS} a lane"
        )
    return {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}


def softmax(x, out=None, rows=None, num_warps=None):
    """Softmax of each row of `x`, of any width to MAX_COLS. Told in book/warps.ipynb.

    x: tensor of shape (M, N), float32, float16 or bfloat16, of any strides, on a GPU
    or, interpreted, on the CPU. rows, num_warps: of a program, powers of two, instead
    of what `choose` says. Returns `out`, or a new tensor of x's shape and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape, or for
    options as `choose` does.
    """
    y = output("warps", x, out, MAX_COLS)
    if x.numel():
        options = choose(x.shape[1], x.element_size(), rows, num_warps)
        with machine.on(x):
            _warps_kernel[(triton.cdiv(x.shape[0], options["ROWS"]),)](
                y, x, *y.stride(), *x.stride(), *x.shape, ALIGN=align(x, y), **options
            )
    return y


@functools.cache
def tuned_kernel():
    """The same kernel, which tries its configurations at each new width and keeps the fastest."""

    def fits(configs, arguments, **constants):
        def elements(config):
            lanes = config.num_warps * machine.warp_size()
            return config.kwargs["ROWS"] * constants["BLOCK"] / lanes

        return [it for it in configs if 1 <= elements(it) <= LANE_ELEMENTS]

    most = 1024 // machine.warp_size()
    return triton.autotune(
        configs=[
            triton.Config({"ROWS": rows}, num_warps=num_warps)
            for rows in (1, 2, 4, 8)
            for num_warps in (1, 2, 4, 8, 16, 32)
            if num_warps <= most
        ],
        key=["n_cols", "BLOCK", "ALIGN"],
        prune_configs_by={"early_config_prune": fits},
    )(_warps_kernel)


def softmax_tuned(x):
    """The same, its program chosen by `triton.autotune`: the first call at a width measures, those after it do not.

    x: as for `softmax`, on a GPU, of at least 32 columns, so that no lane is idle. There is no `out`: a kernel that is
    tried many times must not write over what it reads. Raises as `softmax`.
    """
    y = output("warps", x, None, MAX_COLS)
    if x.shape[1] < 32:
        raise ValueError(f"warps: {x.shape[1]} columns, too few to tune for")
    if x.numel():
        with machine.on(x):
            tuned_kernel()[lambda meta: (triton.cdiv(x.shape[0], meta["ROWS"]),)](
                y, x, *y.stride(), *x.stride(), *x.shape,
                BLOCK=triton.next_power_of_2(x.shape[1]), ALIGN=align(x, y),
            )  # fmt: skip
    return y
