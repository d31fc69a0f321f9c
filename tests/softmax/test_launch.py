"""Checks of operands, the cache of plans, and what is planned on GPUs that need not be here."""

import inspect
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from memtraffic import device
from memtraffic.gpus import find_gpu
from memtraffic.kernels import launch
from memtraffic.kernels.launch import Plans, cached_launch, resident_launch
from memtraffic.kernels.operands import check_operands, has_internal_overlap, partially_overlaps
from memtraffic.kernels.softmax import persistent
from memtraffic.kernels.tiling import Tiling
from memtraffic.tensors import matrix

DEVICE = device.default()


def check(x, out=None):
    return check_operands("rung", x, out, 32768)


# ---- check_operands


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
    x = torch.eye(8, device=DEVICE)
    with pytest.raises(TypeError, match=f"x is .*{message}"):
        check(make(x))
    with pytest.raises(TypeError, match=f"out is .*{message}"):
        check(x, make(x.clone()))


def test_check_operands_counts_rows_in_32_bits():
    x = torch.zeros(1, 1, device=DEVICE).expand(2**30 + 1, 1)
    with pytest.raises(ValueError, match=r"1073741825 rows, more than 1073741824$"):
        check(x)
    with pytest.raises(TypeError, match="out is"):  # 2**30 rows are no objection
        check(x[1:], matrix(1, 1).half())


def test_has_internal_overlap():
    for m, n, row_stride, col_stride in product(range(5), range(5), range(7), range(7)):
        x = torch.empty_strided((m, n), (row_stride, col_stride))
        offsets = {r * row_stride + c * col_stride for r in range(m) for c in range(n)}
        assert has_internal_overlap(x) == (len(offsets) < m * n)


def test_partially_overlaps():
    memory = torch.zeros(40)
    a = memory[:8].view(2, 4)
    for start, overlap in ((0, False), (1, True), (7, True), (8, False), (20, False)):
        b = memory[start : start + 8].view(2, 4)
        assert partially_overlaps(a, b) == partially_overlaps(b, a) == overlap
    assert partially_overlaps(memory[:16].view(4, 4), memory[:16].view(4, 4).t())
    gap = memory[:16].view(2, 8)[:, :4]
    assert not partially_overlaps(gap, memory[4:12].view(2, 4))
    assert not partially_overlaps(memory[:0].view(0, 4), memory[:0].view(0, 4)[:, 1:])
    # Of different sizes: only what lies in the larger one shares its memory.
    large = memory[4:12].view(2, 4)
    for start, overlap in ((0, False), (2, True), (8, True), (12, False)):
        small = memory[start : start + 4]
        assert partially_overlaps(small, large) == partially_overlaps(large, small) == overlap
    half = memory[:8].view(torch.float16)[:8]  # two of its elements for one of the other
    assert partially_overlaps(half.view(2, 4), memory[:8].view(2, 4))


# ---- cached_launch, Plans


@pytest.fixture
def plans():
    """An empty cache, and a maker of plans that are told apart by their number."""
    launch._launches.forget()
    made = []

    def make(x, y, **options):
        made.append(options)
        return len(made)

    yield SimpleNamespace(make=make, made=made)
    launch._launches.forget()


OPTIONS = {"rows": None, "num_warps": None, "num_stages": None, "programs": None}


def test_cached_launch_of_the_same_call(plans):
    x, y = matrix(6, 64), matrix(6, 64)
    first = cached_launch(plans.make, y, x, **OPTIONS)
    assert cached_launch(plans.make, x, y.clone(), **OPTIONS) is first
    further = torch.zeros(400, device=DEVICE)[4:388].view(6, 64)  # by 16 bytes
    assert cached_launch(plans.make, x, further, **OPTIONS) is first
    assert cached_launch(plans.make, further, x, **OPTIONS) is first
    assert plans.made == [OPTIONS]


def other_calls(x, y):
    """Calls like that of `x` into `y`, each different in one thing that a plan depends on."""
    m, n = x.shape
    memory = torch.zeros(2 * m * n + 64, device=x.device)
    apart = memory[: 2 * m * n].view(m, 2 * n)[:, :n]
    by_4 = memory[1 : m * n + 1].view(m, n)
    by_8 = memory[2 : m * n + 2].view(m, n)
    return {
        "width": (x[:, : n - 2], y, {}),
        "stride": (apart, y, {}),
        "stride-of-out": (x, apart, {}),
        "dtype": (x.half(), y.half(), {}),
        "alignment": (by_4, y, {}),
        "alignment-to-8": (by_8, y, {}),
        "option": (x, y, {"num_warps": 2}),
    }


def test_cached_launch_of_any_other_call_is_its_own(plans):
    x, y = matrix(6, 64), matrix(6, 64)
    found = [cached_launch(plans.make, y, x, **OPTIONS)]
    for case, (x_, y_, options) in other_calls(x, y).items():
        plan = cached_launch(plans.make, y_, x_, **OPTIONS | options)
        assert plan not in found, case
        assert cached_launch(plans.make, y_, x_, **OPTIONS | options) is plan, case
        found.append(plan)
    assert cached_launch(lambda *args, **options: "other", y, x, **OPTIONS) == "other"


def test_plans_forget_what_was_not_asked_for_for_longest(monkeypatch):
    monkeypatch.setattr(launch, "CACHE_SIZE", 6)
    plans, made = Plans(), []

    def ask(key):
        return plans.find(key, lambda: made.append(key) or f"plan of {key}")

    for key in (1, 2, 3, 1, 4, 1, 5, 6, 1):  # 1 comes again and again
        assert ask(key) == f"plan of {key}"
    assert made == [1, 2, 3, 4, 5, 6]
    ask(7)
    for key in (1, 5, 6, 7):
        ask(key)
    assert made == [1, 2, 3, 4, 5, 6, 7], "one that was asked for lately was made again"
    assert len(plans.latest) + len(plans.before) <= 6
    ask(2)
    assert made[-1] == 2, "the oldest is still kept"


class Elsewhere:
    """A matrix like one of 4 rows of 8, on a second GPU, which need not be there."""

    device, dtype, shape = torch.device("cuda", 1), torch.float32, torch.Size((4, 8))
    is_cuda = True

    def stride(self):
        return 8, 1

    def data_ptr(self):
        return 0


def test_cached_launch_is_of_one_gpu_and_not_of_a_meter(plans, monkeypatch):
    monkeypatch.setattr(device, "INTERPRETED", False)
    x = torch.zeros(4, 8, device=DEVICE)

    def number(x=x):
        return cached_launch(plans.make, x, x)

    assert (number(), number(Elsewhere())) == (1, 2)
    with device.capturing_launches():
        assert number() == 3
    with device.capturing_launches(find_gpu("gfx942")):
        assert number() == 4
    with device.capturing_launches(find_gpu("H100")):
        assert number() == 5
    assert number() == 1


# ---- resident_launch


H200 = find_gpu("H200")
SHARED = H200.shared_per_program
KERNEL = persistent._softmax_persistent_kernel
MATRIX = torch.zeros(1, device=DEVICE)


def plan(stages=3, num_warps=4, n_tiles=10**6, gpu=H200, **options):
    constants = Tiling(1, 4096, num_warps, 4, stages).constants
    options["num_warps"] = num_warps
    return resident_launch(KERNEL, (MATRIX, MATRIX), constants, n_tiles, gpu, **options)


@pytest.mark.parametrize(
    ("bytes_per_stage", "stages"),
    [(SHARED // 3, 3), (SHARED // 3 + 1, 2), (SHARED // 2 + 1, 1), (SHARED, 1)],
)
def test_resident_launch_takes_fewer_stages_where_shared_memory_is_short(
    fake_gpu, bytes_per_stage, stages
):
    fake_gpu.shared = lambda stages: stages * bytes_per_stage
    found = plan()
    assert found.constants["STAGES"] == stages
    assert found.used.shared_bytes == stages * bytes_per_stage
    tried = [options["STAGES"] for *_, options in fake_gpu.compiled]
    assert tried == [*range(3, stages - 1, -1), stages]


@pytest.mark.parametrize(("min_stages", "tried"), [(1, 3), (2, 2), (3, 1)])
def test_resident_launch_of_too_much_shared_memory(fake_gpu, min_stages, tried):
    fake_gpu.shared = lambda stages: SHARED + stages
    with pytest.raises(RuntimeError, match=f" {SHARED + min_stages} bytes .* H200 has {SHARED}$"):
        plan(min_stages=min_stages)
    assert len(fake_gpu.compiled) == tried


@pytest.mark.parametrize(
    ("n_tiles", "registers", "shared", "options", "per_sm", "programs"),
    [
        pytest.param(10000, 64, 16384, {}, 8, 132 * 8, id="registers"),
        pytest.param(10000, 32, 100000, {}, 2, 132 * 2, id="shared-memory"),
        pytest.param(10000, 32, 0, {}, 16, 132 * 16, id="no-shared-memory"),
        pytest.param(1055, 64, 16384, {}, 8, 1055, id="fewer-tiles"),
        pytest.param(10000, 64, 16384, {"programs": 7}, 8, 7, id="as-asked"),
        pytest.param(5, 64, 16384, {"programs": 7}, 8, 5, id="fewer-than-asked"),
        pytest.param(10000, 64, 0, {"num_warps": 8}, 4, 132 * 4, id="more-warps"),
    ],
)
def test_resident_launch_launches_what_fits(
    fake_gpu, n_tiles, registers, shared, options, per_sm, programs
):
    fake_gpu.used, fake_gpu.shared = {"registers": registers}, lambda stages: shared
    found = plan(n_tiles=n_tiles, **options)
    assert (found.per_sm, found.grid) == (per_sm, (programs, 1))
    assert (found.used.registers, found.used.shared_bytes) == (registers, shared)


# 100 vector and 100 accumulation registers, in two files on gfx908, and in one since
@pytest.mark.parametrize(
    ("target", "vgprs", "sgprs", "num_warps", "per_sm"),
    [("gfx908", 100, 106, 4, 2), ("gfx942", 60, 106, 4, 7), ("gfx1100", 200, 100, 4, 7)],
)
def test_resident_launch_on_an_amd_gpu(fake_gpu, target, vgprs, sgprs, num_warps, per_sm):
    """By what a wave is given, of each kind of register."""
    gpu = find_gpu(target)
    fake_gpu.used = {"registers": 200, "allocated_vgprs": vgprs, "allocated_sgprs": sgprs}
    found = plan(1, num_warps, gpu=gpu)
    assert (found.per_sm, found.grid) == (per_sm, (per_sm * gpu.num_sms, 1))
    assert found.used.registers == 200


def test_resident_launch_of_a_program_that_no_sm_holds(fake_gpu):
    for target, registers, num_warps in (("sm_90", 255, 16), ("gfx942", 172, 16)):
        gpu = find_gpu(target)
        fake_gpu.used = {
            "registers": registers, "allocated_vgprs": registers, "allocated_sgprs": 16,
        }  # fmt: skip
        message = f"{num_warps} warps of {registers} registers do not fit an SM of {gpu.product}$"
        with pytest.raises(RuntimeError, match=message):
            plan(1, num_warps, gpu=gpu)


def test_plan_takes_one_stage_where_two_do_not_fit(fake_gpu):
    fake_gpu.shared = lambda stages: 10**6 * (stages - 1)
    x = matrix(64, 4096)
    assert persistent.plan(x, x, gpu=find_gpu("H200")).constants["STAGES"] == 1
    with pytest.raises(RuntimeError, match="1000000 bytes of shared memory"):
        persistent.plan(x, x, gpu=find_gpu("H200"), num_stages=2)


def test_softmax_launches_what_it_compiled(fake_gpu):
    launch._launches.forget()
    x, out = matrix(70, 9), torch.empty(9, 70, device=DEVICE).t()
    assert persistent.softmax(x, out) is out
    [(_, tensors, options), again] = fake_gpu.compiled  # to know how many fit, and to be launched
    [(_, grid, launched)] = fake_gpu.started
    assert again == (KERNEL, tensors, options)
    assert (grid, options.pop("num_warps")) == ((3, 1), 1)
    args = *tensors, *options.values()
    expected = {
        "y_row_stride": 1, "y_col_stride": 70, "x_row_stride": 9, "x_col_stride": 1,
        "n_rows": 70, "n_cols": 9, "ROWS": 32, "BLOCK": 16, "ALIGN": 1, "STAGES": 1,
    }  # fmt: skip
    for given in (args, launched):
        bound = inspect.signature(KERNEL.fn).bind(*given).arguments
        y_ptr, x_ptr = bound.pop("y_ptr"), bound.pop("x_ptr")
        if given is args:
            assert y_ptr is out and x_ptr is x
        else:
            assert (y_ptr, x_ptr) == (out.data_ptr(), x.data_ptr())
        assert bound == expected
    persistent.softmax(x, out)
    assert (len(fake_gpu.compiled), len(fake_gpu.started)) == (2, 2)
    launch._launches.forget()
