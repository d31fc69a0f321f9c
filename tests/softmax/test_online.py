from itertools import product

import torch
from cases import assert_softmax

from memtraffic import device
from memtraffic.compile import capture_launches
from memtraffic.gpus import DEFAULT_GPU, find_gpu
from memtraffic.kernels.softmax import online
from memtraffic.kernels.softmax.online import online_tile
from memtraffic.tensors import matrix

DEVICE = device.default()
INF, NAN = float("inf"), float("nan")


def test_softmax_reads_so_many_columns_at_a_time():
    [launch] = capture_launches(lambda x: online.softmax(x, block=16, num_warps=2), matrix(5, 78))
    assert (launch.constants["BLOCK"], launch.options["num_warps"]) == (16, 2)


def test_online_kernel_takes_float64_below_any_float32():
    """The running maximum starts at minus infinity: no other number stands for it."""
    x = torch.full((2, 40), -1e300, dtype=torch.float64, device=DEVICE)
    x[1, 20:] = -INF
    y = torch.empty_like(x)
    with device.device_guard(x):
        online.online_kernel[(1,)](
            y, *y.stride(), x, *x.stride(), *x.shape, ROWS=2, BLOCK=16, ALIGN=1
        )
    assert_softmax(lambda _: y, x)


# ---- online_tile


def test_online_tile_is_64_bytes_per_lane():
    for gpu, itemsize in product((DEFAULT_GPU, find_gpu("MI300X")), (2, 4, 8)):
        tile = online_tile(2**24, itemsize, gpu)
        assert tile.block * itemsize == 64 * gpu.warp_size * tile.num_warps
        assert online_tile(5, itemsize, gpu).block == 8  # no wider than the row
