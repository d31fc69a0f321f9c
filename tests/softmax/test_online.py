import torch
from cases import assert_softmax

from memtraffic import device
from memtraffic.compile import capture_launches
from memtraffic.kernels.softmax import online
from memtraffic.tensors import matrix

DEVICE = device.default()


def test_softmax_reads_so_many_columns_at_a_time():
    [launch] = capture_launches(lambda x: online.softmax(x, block=16, num_warps=2), matrix(5, 78))
    assert (launch.constants["BLOCK"], launch.options["num_warps"]) == (16, 2)


def test_online_kernel_takes_float64_below_any_float32():
    """The running maximum starts at minus infinity: no other number stands for it."""
    x = torch.full((2, 40), -1e300, dtype=torch.float64, device=DEVICE)
    x[1, 20:] = -float("inf")
    y = torch.empty_like(x)
    with device.device_guard(x):
        online.online_kernel[(1,)](
            y, *y.stride(), x, *x.stride(), *x.shape, ROWS=2, BLOCK=16, ALIGN=1
        )
    assert_softmax(lambda _: y, x)
