import pytest
import torch

from memtraffic import runtime
from memtraffic.gpus import DEFAULT_GPU, find_gpu
from memtraffic.kernels.softmax import online
from memtraffic.kernels.softmax.online import online_tile
from memtraffic.tensors import matrix
from memtraffic.testing import assert_softmax

DEVICE = runtime.device()
INF, NAN = float("inf"), float("nan")
PASSES = {"online": online.softmax, "three-passes": online.softmax_three_passes}
EACH = pytest.mark.parametrize("fn", PASSES.values(), ids=PASSES)


@EACH
@pytest.mark.parametrize(
    "n",
    [
        pytest.param(15, id="less-than-a-block"),
        pytest.param(16, id="block"),
        pytest.param(17, id="one-past-block"),
        pytest.param(32, id="two-blocks"),
        pytest.param(78, id="odd-number-of-blocks"),
    ],
)
def test_softmax_block_by_block(fn, n, dtype):
    assert_softmax(lambda x: fn(x, block=16, num_warps=1), matrix(5, n, dtype))


HARD = {
    "nan-in-the-first-block": {0: NAN},
    "nan-in-the-last-block": {70: NAN},
    "infinity-in-the-first-block": {3: INF},
    "infinity-in-the-last-block": {70: INF},
    "minus-infinity-first": dict.fromkeys(range(16), -INF),
    "minus-infinity-in-between": dict.fromkeys(range(16, 48), -INF),
    "all-minus-infinity": dict.fromkeys(range(71), -INF),
    "all-but-the-last": dict.fromkeys(range(70), -INF),
    "rises-from-block-to-block": {i: 40.0 * (i // 16) for i in range(71)},
    "falls-from-block-to-block": {i: -40.0 * (i // 16) for i in range(71)},
    "lowest": dict.fromkeys(range(71), -3.4028234663852886e38),
}


@EACH
@pytest.mark.parametrize("row", HARD.values(), ids=HARD)
def test_softmax_of_hard_rows(fn, row):
    x = matrix(3, 71)
    for col, value in row.items():
        x[1, col] = value
    assert_softmax(lambda x: fn(x, block=16), x)


def test_online_kernel_takes_float64_below_any_float32():
    """The running maximum starts at minus infinity: no other number stands for it."""
    x = torch.full((2, 40), -1e300, dtype=torch.float64, device=DEVICE)
    x[1, 20:] = -INF
    y = torch.empty_like(x)
    with runtime.device_guard(x):
        online.online_kernel[(1,)](
            y, *y.stride(), x, *x.stride(), *x.shape, ROWS=2, BLOCK=16, ALIGN=1, ONLINE=True
        )
    assert_softmax(lambda _: y, x)


@EACH
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 4, 5])
def test_online_kernel_with_several_rows_per_program(fn, rows, m):
    x = matrix(m, 70, layout="transposed")
    y = torch.full((m, 70), NAN, device=DEVICE)
    with runtime.device_guard(x):
        online.online_kernel[(-(-m // rows),)](
            y, *y.stride(), x, *x.stride(), *x.shape,
            ROWS=rows, BLOCK=32, ALIGN=1, ONLINE=fn is online.softmax,
        )  # fmt: skip
    assert_softmax(lambda _: y, x)


# ---- online_tile


@pytest.mark.parametrize("gpu", [DEFAULT_GPU, find_gpu("MI300X")], ids=["H200", "MI300X"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_online_tile_is_64_bytes_per_lane(gpu, itemsize):
    tile = online_tile(2**24, itemsize, gpu)
    assert tile.block * itemsize == 64 * gpu.warp_size * tile.num_warps
    assert online_tile(5, itemsize, gpu).block == 8  # no wider than the row
