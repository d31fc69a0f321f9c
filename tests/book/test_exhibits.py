from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from memtraffic import gpus, residency, resources, runtime, softmax
from memtraffic.compile import capture_launches
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.testing import (
    assert_close,
    assert_correct,
    assert_softmax,
    assert_traffic,
)
from memtraffic_book import exhibits

pytestmark = pytest.mark.slow  # together they take several seconds


def test_softmax_dynamic_is_right():
    """Again with other numbers, when its plan is cached."""
    for n, dtype, seed in ((1, "float32", 0), (8193, "bfloat16", 0), (8193, "bfloat16", 1)):
        assert_softmax(exhibits.softmax_dynamic, matrix(3, n, dtype, seed=seed))
    nothing = torch.empty(0, 64, device=runtime.device())
    assert exhibits.softmax_dynamic(nothing).shape == (0, 64)
    [launch] = capture_launches(
        exhibits.softmax_dynamic, matrix(8, 16384), gpu=gpus.find_gpu("H200")
    )
    assert (launch.options["num_warps"], launch.constants["STAGES"]) == (8, 1)


def test_softmax_dynamic_moves_the_least_in_every_layout():
    """But for asking: once for each tile, and once more by each of 4 programs."""
    for layout in ("odd", "every other", "transposed"):
        *_, op = count(exhibits.softmax_dynamic, matrix(7, 500, layout=layout)).ops
        assert (op.read_elements - 11, op.written_elements - 11) == (3500, 3500)


def test_softmax_dynamic_starts_from_what_the_last_launch_left():
    exhibits._counter.cache_clear()
    a, b = matrix(7, 512), matrix(9, 512)
    for launch in range(1, 4):
        for x in (a, b):
            y = exhibits.softmax_dynamic(x)
            assert_close(y, torch.softmax(x.double(), dim=1), y.dtype)
            if runtime.INTERPRETED:  # then there are 4 programs
                turns = len(x) + 4
                assert exhibits._counter(x.device, len(x), 4).item() == launch * turns


# ---- kernels that are measured


def test_arithmetic_kernel_computes_chains():
    """Each keeps its numbers between 0 and 1, and ends where its chain has its fixed point."""
    y = torch.empty(2 * 64, device=runtime.device())
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


X = torch.empty(8192, device=runtime.device())


def test_arithmetic_kernel_has_an_instruction_for_each_result():
    for what, instruction in (("exp2", "MUFU.EX2"), ("exp", "MUFU.EX2"), ("multiply-add", "FFMA")):
        options = dict(WHAT=what, STEPS=32, BLOCK=1024, num_warps=8)
        kernel = compiled(exhibits._arithmetic_kernel, X, 256, **options)
        assert kernel.instructions[instruction] == 32 * 4  # of 4 elements per lane
        assert kernel.instructions.get("STG.E.128") == 1 and not kernel.load_bits
        assert residency.resident_programs(kernel) == 8  # no lane of an SM is idle


def test_stream_kernel_writes_a_sum_that_is_nan():
    """It copies, or reads and writes nothing else: `test_measurements` sees that."""
    x, y = matrix(1, 64 * 10).flatten(), torch.zeros(64 * 10, device=runtime.device())
    x[100] = float("nan")
    exhibits._stream_kernel[(3,)](y, x, 10, COPY=False, BLOCK=64)
    assert y.isnan().sum() == 1


@pytest.mark.parametrize(
    ("block", "warps", "loads", "copy"),
    [(256, 2, 1, True), (1024, 8, 1, False), (2048, 8, 2, True)],
)
def test_stream_kernel_has_one_tile_in_flight(block, warps, loads, copy):
    """One load of 16 bytes per lane, twice in the largest tile: neither unrolled nor prefetched."""
    kernel = compiled(exhibits._stream_kernel, X, X, 32, COPY=copy, BLOCK=block, num_warps=warps)
    assert kernel.load_bits == {128: loads} and kernel.schedule[:2] == ("for", "load")
    assert residency.resident_programs(kernel) >= 8


@pytest.mark.parametrize("read", [True, False])
def test_idle_kernel_changes_nothing_and_reads_one_element(read):
    x = matrix(1, 3)
    before = x.clone()
    exhibits._idle_kernel[(2,)](x, READ=read)
    assert torch.equal(x, before)
    assert compiled(exhibits._idle_kernel, X, READ=read).load_bits == ({32: 1} if read else {})


def test_pointer_chase_kernel_follows_the_chain():
    x = torch.tensor([3, -1, 7, 2, -1], device=runtime.device())  # 0 -> 3 -> 2 -> 7
    y = torch.zeros(1, dtype=torch.int64, device=runtime.device())
    for hops, at in ((0, 3), (1, 2), (2, 7)):
        exhibits._pointer_chase_kernel[(1,)](y, x, hops)
        assert y.item() == at


# ---- backward


@pytest.mark.parametrize(
    ("name", "roundings", "reads", "writes"),
    [
        ("backward_ours", 4, "2MN", "MN"),
        ("backward_torch", 4, "2MN", "MN"),
        ("backward_lines", 16, "6MN + M", "3MN + M"),  # rounds each operation
    ],
)
def test_backward_is_right_and_moves(name, roundings, reads, writes):
    op, fn = replace(SOFTMAX_BACKWARD, roundings=roundings), getattr(exhibits, name)
    for n, dtype in ((1, "float32"), (781, "float32"), (2176, "bfloat16")):
        assert_correct(op, fn, *op.arguments((5, n), dtype).positional)
    assert_traffic(fn, reads, writes, SOFTMAX_BACKWARD, fit=[(5, 781)], held_out=())


def test_softmax_converting_once_is_a_softmax_that_needs_more_registers(dtype):
    once = exhibits.softmax_converting_once
    assert_softmax(once, matrix(3, 2048, dtype))
    x = torch.empty(4, 8320, dtype=dtype, device=runtime.device())
    [found], [ours] = (resources(fn, x, target="sm_90") for fn in (once, softmax))
    more = found.registers / ours.registers
    assert more == 1 if dtype == torch.float32 else more > 1.3


@pytest.mark.parametrize("x", [matrix(3, 64), matrix(3, 4097), matrix(4096, 3).t()], ids=str)
def test_softmax_converting_once_refuses(x):
    with pytest.raises(ValueError, match="columns, strides"):
        exhibits.softmax_converting_once(x)
