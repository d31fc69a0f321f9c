"""Launches, the cache of plans, and what launchers ask of operands."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from memtraffic import device
from memtraffic.gpus import find_gpu
from memtraffic.kernels import launch
from memtraffic.kernels.launch import Launch, cached, find_plan, keep_plan, takes_ptx
from memtraffic.kernels.operands import check_operands, common_divisor, shifted_vector
from memtraffic.tensors import matrix

DEVICE = device.default()
check = partial(check_operands, "rung", max_cols=32768)


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


def test_launch_runs_on_the_tensors_of_each_call():
    x = matrix(6, 5).view(2, 3, 5)
    run = scale(torch.empty_like(x), x)
    for other in (x, x + 1):
        y = torch.full_like(x, float("nan"))
        assert run(y, other) is None
        assert torch.equal(y, 3 * other)


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
        (_scale_kernel, (3, 2), [y.data_ptr(), x.data_ptr(), 5, 2, 8]),
        (_scale_kernel, (3, 2), [other.data_ptr(), y.data_ptr(), 5, 2, 8]),
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
    assert y[-1, -1, -1].item() == 6


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


def other_calls(x):
    """Calls like that of `x`, each different in one thing that a plan depends on."""
    m, n = x.shape
    memory = torch.zeros(2 * m * n + 64, device=x.device)
    return {
        "width": (x[:, : n - 2], {}),
        "stride": (memory[: 2 * m * n].view(m, 2 * n)[:, :n], {}),
        "transposed": (memory[: m * n].view(n, m).t(), {}),
        "dtype": (x.half(), {}),
        "alignment": (memory[1 : m * n + 1].view(m, n), {}),
        "alignment-to-8": (memory[2 : m * n + 2].view(m, n), {}),
        "option": (x, {"num_warps": 2}),
        "the-same-of-another-option": (x, {"rows": 2}),
    }


def test_cached_plans_once_for_each_kind_of_call(plan):
    x = matrix(6, 64)
    further = torch.zeros(400, device=DEVICE)[4:388].view(6, 64)  # by 16 bytes
    found = {plan(it, torch.empty_like(it)) for it in (x, x + 1, further)}
    assert found == {1}
    for case, (it, options) in other_calls(x).items():
        other = plan(it, torch.empty_like(it), **options)
        assert other not in found, case
        assert plan(it, torch.empty_like(it), **options) == other, case
        found.add(other)
    assert cached(lambda x, y: "of another kernel")(x, x) == "of another kernel"


class Elsewhere:
    """A matrix like one of 4 rows of 8, on a second GPU, which need not be there."""

    dtype, shape = torch.float32, torch.Size((4, 8))

    def stride(self):
        return 8, 1

    def data_ptr(self):
        return 0

    def get_device(self):
        return 1


def test_cached_plans_are_of_one_gpu_and_not_of_a_meter(plan):
    x, elsewhere = torch.zeros(4, 8, device=DEVICE), Elsewhere()
    assert (plan(x, x), plan(elsewhere, elsewhere)) == (1, 2)
    with device.capturing_launches():
        assert plan(x, x) == 3
    with device.capturing_launches(find_gpu("gfx942")):
        assert plan(x, x) == 4
    with device.capturing_launches(find_gpu("H100")):
        assert plan(x, x) == 5
    assert plan(x, x) == 1


# ---- operands


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda x: x.to("meta"), "a meta tensor: ", id="meta"),
        pytest.param(torch.Tensor.to_sparse, "sparse_coo", id="coo"),
        pytest.param(torch.Tensor.to_sparse_csr, "sparse_csr", id="csr"),
        pytest.param(torch._neg_view, r"negated .*resolve_neg\(\)", id="negated"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_check_operands_wants_dense_tensors_with_data(make, message):
    with pytest.raises(TypeError, match=f"^rung: x is .*{message}"):
        check(make(torch.eye(8, device=DEVICE)))


def test_check_operands_counts_rows_in_32_bits():
    x = torch.empty(1, 0, device=DEVICE).expand(2**30 + 1, 0)
    with pytest.raises(ValueError, match=r"1073741825 rows, more than 1073741824$"):
        check(x)
    assert check(x[1:]).shape == (2**30, 0)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        pytest.param((8, 4096), None, 4, id="packed"),
        pytest.param((8, 6), None, 2, id="a-multiple-of-2"),
        pytest.param((8, 781), None, 1, id="odd"),
        pytest.param((8, 4104, torch.bfloat16), None, 8, id="16-bytes-of-half"),
        pytest.param(matrix(8, 9)[:, :8], None, 1, id="odd-stride"),
        pytest.param(matrix(8, 10)[:, :8], None, 2, id="even-stride"),
        pytest.param(matrix(8, 16)[:, ::2], None, 1, id="column-stride-2"),
        pytest.param(matrix(1, 16)[:, ::2], None, 1, id="column-stride-2-of-one-row"),
        pytest.param(matrix(8, 1).expand(8, 8), None, 1, id="column-stride-0"),
        pytest.param(matrix(1, 8).expand(8, 8), None, 4, id="row-stride-0"),
        pytest.param(matrix(8, 8)[:, :1], None, 1, id="one-column"),
        pytest.param((8, 8), matrix(8, 9)[:, :8], 1, id="odd-stride-of-y"),
        pytest.param((8, 8), matrix(8, 16)[:, ::2], 1, id="column-stride-of-y"),
    ],
)
def test_common_divisor(x, y, expected):
    x = x if isinstance(x, torch.Tensor) else matrix(*x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y
    assert common_divisor(x, y) == expected


def odd(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        pytest.param(odd(4, 41), odd(4, 41), 4, id="odd-width"),
        pytest.param(odd(4, 42), odd(4, 42), 4, id="two-of-four"),
        pytest.param(odd(4, 41).half(), odd(4, 41).half(), 8, id="float16"),
        pytest.param(odd(4, 41).half(), odd(4, 41), 1, id="two-dtypes"),
        pytest.param(odd(4, 40), odd(4, 40), 1, id="whole-vectors"),
        pytest.param(odd(4, 44)[:, :41], odd(4, 41), 1, id="other-strides"),
        pytest.param(odd(4, 45)[:, :41], odd(4, 41), 4, id="strides-alike"),
        pytest.param(odd(165)[1:].view(4, 41), odd(4, 41), 1, id="starts-at-the-second"),
        pytest.param(odd(41, 4).t(), odd(41, 4).t(), 1, id="transposed"),
        pytest.param(odd(2, 3, 41), odd(2, 3, 41), 4, id="batches"),
    ],
)
def test_shifted_vector(x, y, expected):
    assert shifted_vector([y, x]) == expected
