import pytest
import torch

from memtraffic import runtime
from memtraffic.gpus import DEFAULT_GPU, find_gpu
from memtraffic.kernels.softmax import online
from memtraffic.kernels.softmax.online import online_tile
from memtraffic.kernels.tiling import MAX_ROW
from memtraffic.meters.count import count
from memtraffic.meters.formula import formula
from memtraffic.tensors import matrix
from memtraffic.testing import assert_softmax, assert_touches_once

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


@EACH
@pytest.mark.parametrize("n", [65536, 100003])
def test_softmax_of_long_rows(fn, n):
    assert_softmax(fn, matrix(2, n, "bfloat16"))


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


def test_softmax_wider_than_any_row():
    with pytest.raises(ValueError, match=f"^online: {MAX_ROW + 1} columns, more than {MAX_ROW}$"):
        online.softmax(torch.zeros(1, 1, device=DEVICE).expand(1, MAX_ROW + 1))


# ---- what it moves


@pytest.mark.parametrize(
    ("fn", "reads"), [(online.softmax, 2), (online.softmax_three_passes, 3)], ids=PASSES
)
def test_formula(fn, reads):
    held_out = [(9, 8), (4, 2), (13, 7), (3, 129)]
    found = formula(lambda x: fn(x, block=16), held_out=held_out)
    assert str(found) == f"reads {reads}MN, writes MN"


@EACH
@pytest.mark.parametrize("layout", ["packed", "every other", "transposed"])
def test_softmax_touches_each_element_once_per_pass(fn, layout):
    x, written = matrix(3, 21, layout=layout), []
    traffic = count(lambda x: written.append(fn(x, block=16)), x, trace=True)
    assert_touches_once(traffic, "y_ptr", written[0])
    passes = 2 if fn is online.softmax else 3
    assert traffic.read_elements == passes * 3 * 21
    reads = [offset for it in traffic.accesses if it.kind == "read" for offset in it.offsets]
    assert {reads.count(offset) for offset in reads} == {passes}


# ---- online_tile


@pytest.mark.parametrize("gpu", [DEFAULT_GPU, find_gpu("MI300X")], ids=["H200", "MI300X"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_online_tile_is_64_bytes_per_lane(gpu, itemsize):
    tile = online_tile(2**24, itemsize, gpu)
    assert tile.block * itemsize == 64 * gpu.warp_size * tile.num_warps
    assert online_tile(5, itemsize, gpu).block == 8  # no wider than the row
