from dataclasses import replace

import pytest
import torch

from memtraffic import device, residency, resources
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.testing import assert_close, assert_correct, assert_traffic
from memtraffic_book import exhibits

pytestmark = pytest.mark.slow  # together they take several seconds


# ---- kernels that are measured


def test_arithmetic_kernel_computes_chains():
    """Each keeps its numbers between 0 and 1, and ends where its chain has its fixed point."""
    y = torch.empty(2 * 64, device=device.default())
    ends = {"exp2": 0.6411857, "exp": 0.5671433, "multiply-add": 1.0}
    for what, end in ends.items():
        exhibits._arithmetic_kernel[(2,)](y, 20, WHAT=what, STEPS=8, BLOCK=64)
        assert_close(y, torch.full_like(y, end).double(), y.dtype, roundings=16)
    exhibits._arithmetic_kernel[(2,)](y, 0, WHAT="exp2", STEPS=8, BLOCK=64)
    assert_close(y, torch.arange(128, device=y.device).double() * 1e-9, y.dtype)


def compiled(kernel, *arguments, **constants):
    """The resources of a kernel on one program, for sm_90."""

    def launch(x):
        kernel[(1,)](*(x if it is X else it for it in arguments), **constants)

    [found] = resources(launch, X, target="sm_90")
    return found


X = torch.empty(8192, device=device.default())


def test_arithmetic_kernel_has_an_instruction_for_each_result():
    for what, instruction in (("exp2", "MUFU.EX2"), ("exp", "MUFU.EX2"), ("multiply-add", "FFMA")):
        options = dict(WHAT=what, STEPS=8, BLOCK=1024, num_warps=8)
        kernel = compiled(exhibits._arithmetic_kernel, X, 256, **options)
        assert kernel.instructions[instruction] == 8 * 4  # of 4 elements per lane
        assert kernel.instructions.get("STG.E.128") == 1 and not kernel.load_bits
        assert residency.resident_programs(kernel) == 8  # no lane of an SM is idle


@pytest.mark.parametrize(
    ("block", "warps", "loads", "copied"),
    [(256, 2, 1, 32), (2048, 8, 2, 0)],
)
def test_stream_kernel_has_one_tile_in_flight(block, warps, loads, copied):
    """One load of 16 bytes per lane, twice in the largest tile: neither unrolled nor prefetched."""
    kernel = compiled(exhibits._stream_kernel, X, X, 32, copied, BLOCK=block, num_warps=warps)
    assert kernel.load_bits == {128: loads} and kernel.schedule[:2] == ("for", "load")
    assert residency.resident_programs(kernel) >= 8


def test_pointer_chase_kernel_follows_the_chain():
    x = torch.tensor([3, -1, 7, 2, -1], device=device.default())  # 0 -> 3 -> 2 -> 7
    y = torch.zeros(1, dtype=torch.int64, device=device.default())
    for hops, at in ((0, 3), (1, 2), (2, 7)):
        exhibits._pointer_chase_kernel[(1,)](y, x, hops)
        assert y.item() == at


def test_transpose_through_lds():
    x = torch.arange(128.0 * 128, device=device.default()).view(128, 128)
    assert torch.equal(exhibits.transpose(x), x.T)


def test_backward_is_right():
    op = replace(SOFTMAX_BACKWARD, roundings=16)  # the lines round each operation
    for n, dtype in ((1, "float32"), (781, "float32"), (2176, "bfloat16")):
        inputs = op.arguments((5, n), dtype).positional
        assert_correct(SOFTMAX_BACKWARD, exhibits.backward_ours, *inputs)
        assert_correct(op, exhibits.backward_lines, *inputs)
    traffic = dict(fit=[(5, 781)], held_out=())
    assert_traffic(exhibits.backward_ours, "2MN", "MN", SOFTMAX_BACKWARD, **traffic)
    assert_traffic(exhibits.backward_lines, "6MN + M", "3MN + M", SOFTMAX_BACKWARD, **traffic)
