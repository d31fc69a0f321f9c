"""Launches, the cache of plans, and what launchers ask of operands."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, cases

from memtraffic import device
from memtraffic.gpus import find_gpu
from memtraffic.kernels import launch
from memtraffic.kernels.launch import Launch, cached, find_plan, keep_plan, takes_ptx
from memtraffic.kernels.operands import check_operands, common_divisor, shifted_vector
from memtraffic.tensors import matrix


@triton.jit
def _scale_kernel(y_ptr, x_ptr, n_cols, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    batch, row = tl.program_id(1), tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    at = (batch * tl.num_programs(0) + row) * n_cols + cols
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=mask) * FACTOR, mask=mask)


def scale(y, x, factor=3):
    constants = {"FACTOR": factor, "BLOCK": triton.next_power_of_2(x.shape[-1])}
    grid = (x.shape[1], x.shape[0])
    return Launch(_scale_kernel, grid, (y, x, x.shape[-1]), constants, num_warps=1)


# ---- Launch


def test_launch_compiles_once_and_passes_addresses(fake_gpu):
    x, other = matrix(6, 5).view(2, 3, 5), matrix(6, 5).view(2, 3, 5)
    run = scale(y := torch.empty_like(x), x, factor=2)
    [(kernel, arguments, options)] = fake_gpu.compiled
    assert kernel is _scale_kernel
    assert arguments[0] is y and arguments[1] is x and arguments[2] == 5
    assert options == {"FACTOR": 2, "BLOCK": 8, "num_warps": 1}
    run(y, x)
    run.run(other, y)
    assert fake_gpu.started == [
        (_scale_kernel, (3, 2), [to.data_ptr(), of.data_ptr(), 5, 2, 8])
        for to, of in ((y, x), (other, y))
    ]
    assert len(fake_gpu.compiled) == 1


@pytest.mark.gpu
def test_launch_on_the_current_stream():
    """A launch on another stream than the current one would not wait for what comes before."""
    x = torch.zeros(64, 1024, 1024, device="cuda")
    y = torch.empty_like(x)
    run = scale(y, x)
    run(y, x)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.add_(1)
            run(y, x)
            wrong = (y != 3 * x).sum()
        torch.cuda.current_stream().wait_stream(stream)
        assert wrong.item() == 0


@pytest.mark.parametrize(("name", "expected"), [("H200", True), ("sm_75", True), ("MI300X", False)])
def test_takes_ptx_where_kernels_are_compiled(name, expected):
    gpu = find_gpu(name)
    with device.capturing_launches(gpu):
        assert takes_ptx(gpu) is expected
    assert takes_ptx(gpu) is (expected and device.runs_on_gpu())


# ---- the cache of plans


def test_keep_plan_keeps_so_many_plans(no_plans, monkeypatch):
    monkeypatch.setattr(launch, "CACHE_SIZE", 3)
    for key in range(7):
        assert find_plan((key,)) is None
        assert keep_plan((key,), f"plan of {key}") == find_plan((key,)) == f"plan of {key}"
        assert len(no_plans) <= 3


@pytest.fixture
def plan(no_plans):
    """A maker of plans that are told apart by their number."""
    made = []

    @cached
    def plan(x, y, *, rows=None, num_warps=None):
        made.append((rows, num_warps))
        return len(made)

    return plan


def test_cached_plans_once_for_each_kind_of_call(plan, other_matrices):
    x = matrix(6, 64)
    further = torch.zeros(400, device=DEVICE)[4:388].view(6, 64)  # by 16 bytes
    found = {plan(it, torch.empty_like(it)) for it in (x, x + 1, further)}
    assert found == {1}
    calls = [(it, {}) for it in other_matrices(x).values()]
    for it, options in (*calls, (x, {"num_warps": 2}), (x, {"rows": 2})):
        other = plan(it, torch.empty_like(it), **options)
        assert other not in found, (it.shape, it.stride(), options)
        assert plan(it, torch.empty_like(it), **options) == other
        found.add(other)
    assert cached(lambda x, y: "of another kernel")(x, x) == "of another kernel"


def test_cached_plans_are_of_one_gpu_and_not_of_a_meter(plan, monkeypatch):
    x = torch.zeros(4, 8, device=DEVICE)
    assert plan(x, x) == 1
    for i, gpu in enumerate((None, find_gpu("gfx942"), find_gpu("H100"))):
        with device.capturing_launches(gpu):
            assert plan(x, x) == 2 + i
    assert plan(x, x) == 1
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 1)  # a second GPU
    assert plan(x, x) == 5


# ---- operands


def test_check_operands_counts_rows_in_32_bits():
    check = partial(check_operands, "rung", max_cols=32768)
    x = torch.empty(1, 0, device=DEVICE).expand(2**30 + 1, 0)
    with pytest.raises(ValueError, match=r"1073741825 rows, more than 1073741824$"):
        check(x)
    assert check(x[1:]).shape == (2**30, 0)


ROWS = {  # what divides all of their addresses; the vector, where some start between multiples
    "packed": ([matrix(8, 4096)], 4, 1),
    "packed-half": ([matrix(8, 4104, torch.bfloat16)], 8, 1),
    "two-of-four": ([matrix(8, 6)], 2, 4),
    "odd": ([matrix(4, 41)], 1, 4),
    "odd-half": ([matrix(4, 41, "float16")], 1, 8),
    "odd-of-two-dtypes": ([matrix(4, 41, "float16"), matrix(4, 41)], 1, 1),
    "odd-stride": ([matrix(8, 9)[:, :8]], 1, 4),
    "odd-stride-of-another": ([matrix(8, 8), matrix(8, 9)[:, :8]], 1, 1),
    "other-strides": ([matrix(4, 41), matrix(4, 44)[:, :41]], 1, 1),
    "strides-alike": ([matrix(4, 41), matrix(4, 45)[:, :41]], 1, 4),
    "starts-at-the-second": ([matrix(1, 165)[0, 1:].view(4, 41)], 1, 1),
    "row-stride-0": ([matrix(1, 8).expand(8, 8)], 4, 1),
    "column-stride-2": ([matrix(8, 16)[:, ::2]], 1, 1),
    "column-stride-of-another": ([matrix(8, 8), matrix(8, 16)[:, ::2]], 1, 1),
    "transposed-and-odd": ([matrix(41, 4).t()], 1, 1),
    "batches": ([matrix(6, 41).view(2, 3, 41)], 1, 4),
}


@cases(("tensors", "divisor", "vector"), ROWS)
def test_accesses_are_as_wide_as_rows_permit(tensors, divisor, vector):
    assert common_divisor(*tensors) == divisor
    assert shifted_vector(tensors) == vector
