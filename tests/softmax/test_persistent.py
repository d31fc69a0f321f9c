import inspect
from collections import defaultdict
from itertools import product

import pytest
import torch
from cases import assert_softmax, assert_touches_once

from memtraffic import device, residency
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.device import this_gpu
from memtraffic.gpus import find_gpu
from memtraffic.kernels.operands import common_divisor
from memtraffic.kernels.softmax import persistent
from memtraffic.kernels.softmax.rule import tile_shape
from memtraffic.meters.count import count
from memtraffic.tensors import matrix

H200 = find_gpu("H200")
KERNEL = persistent._softmax_persistent_kernel
pytestmark = pytest.mark.usefixtures("no_plans")


@pytest.fixture
def captured():
    """No kernel is compiled, also where there is a GPU."""
    with device.capturing_launches():
        yield


# ---- who does what


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("m", "n", "rows"),
    [
        pytest.param(11, 600, 1, id="a-row-per-tile"),
        pytest.param(27, 100, 4, id="last-tile-not-full"),
        pytest.param(12, 128, 4, id="last-tile-full"),
    ],
)
def test_softmax_strides_over_tiles(m, n, rows, programs):
    x = matrix(m, n)
    traffic = count(lambda x: persistent.softmax(x, programs=programs), x, trace=True)
    assert_touches_once(traffic, "x_ptr", m * n)
    assert_touches_once(traffic, "y_ptr", m * n)
    assert len(traffic.ops) == 1
    workers = defaultdict(set)
    for access in traffic.accesses:
        for row in {offset // n for offset in access.offsets}:
            workers[row].add(access.program)
    assert workers == {row: {(row // rows % programs, 0, 0)} for row in range(m)}


@pytest.mark.parametrize("num_stages", [None, 1, 2, 4])
def test_softmax_for_any_stages_programs_and_rows(num_stages):
    x = matrix(11, 600)
    for programs, rows in product((None, 1, 3), (None, 2)):
        options = {"num_stages": num_stages, "programs": programs, "rows": rows}
        assert_softmax(lambda x, options=options: persistent.softmax(x, **options), x)


# ---- plan


@pytest.mark.parametrize("m", [1, 2, 3, 10])
def test_plan_never_has_more_programs_than_tiles(captured, m):
    x = matrix(m, 600)
    assert persistent.plan(x, x).grid[0] == min(m, persistent.INTERPRETED_PROGRAMS)
    assert persistent.plan(x, x, programs=3).grid[0] == min(m, 3)


def test_plan_of_a_larger_tile_takes_fewer_stages(captured):
    x = matrix(64, 1024)
    found = persistent.plan(x, x, num_warps=16, rows=32)
    assert (found.constants["STAGES"], found.grid) == (2, (2, 1))


@pytest.mark.parametrize(
    ("n", "dtype", "stages"),
    [
        (1004, torch.float32, 3),
        (1004, torch.float16, 1),
        (32768, torch.float32, 2),
        (32768, torch.bfloat16, 3),
    ],
)
def test_plan_chooses_the_stages(captured, n, dtype, stages):
    x = matrix(2, n, dtype)
    assert persistent.plan(x, x, num_stages=4).constants["STAGES"] == 4
    tile = tile_shape(n, x.element_size(), H200)
    expected = (tile.rows, tile.block, common_divisor(x, x), stages)
    assert tuple(persistent.plan(x, x).constants.values()) == expected


def test_plan_is_for_the_gpu_it_is_given(captured):
    x = matrix(2, 32768)
    for gpu, num_warps, stages in (("H200", 32, 2), ("L4", 32, 1), ("MI300X", 16, 1)):
        found = persistent.plan(x, x, gpu=find_gpu(gpu))
        assert (found.options["num_warps"], found.constants["STAGES"]) == (num_warps, stages)
    with device.capturing_launches(find_gpu("MI300X")):
        assert persistent.plan(x, x).options["num_warps"] == 16


def test_softmax_passes_its_options_to_the_plan(captured, no_plans):
    persistent.softmax(matrix(40, 512), rows=4, num_warps=2, num_stages=1, programs=3)
    [found] = no_plans.values()
    assert (found.options["num_warps"], found.grid) == (2, (3, 1))
    assert (found.constants["STAGES"], found.constants["ROWS"]) == (1, 4)


@pytest.mark.parametrize(
    ("n_tiles", "used", "options", "programs"),
    [
        pytest.param(10000, (64, 16384), {}, 132 * 8, id="registers"),
        pytest.param(10000, (32, 100000), {}, 132 * 2, id="shared-memory"),
        pytest.param(10000, (32, 0), {}, 132 * 16, id="no-shared-memory"),
        pytest.param(1055, (64, 16384), {}, 1055, id="fewer-tiles"),
        pytest.param(10000, (64, 16384), {"programs": 7}, 7, id="as-asked"),
        pytest.param(5, (64, 16384), {"programs": 7}, 5, id="fewer-than-asked"),
        pytest.param(10000, (64, 0), {"num_warps": 8}, 132 * 4, id="more-warps"),
    ],
)
def test_plan_launches_what_fits(fake_gpu, n_tiles, used, options, programs):
    fake_gpu.used = dict(zip(("registers", "shared_bytes"), used, strict=True))
    x = matrix(1, 4096).expand(n_tiles, 4096)
    assert persistent.plan(x, x, gpu=H200, **options).grid == (programs, 1)


# 100 vector and 100 accumulation registers, in two files on gfx908, and in one since
@pytest.mark.parametrize(
    ("target", "vgprs", "sgprs", "per_sm"),
    [("gfx908", 100, 106, 2), ("gfx942", 60, 106, 7), ("gfx1100", 200, 100, 7)],
)
def test_plan_launches_what_fits_an_amd_gpu(fake_gpu, target, vgprs, sgprs, per_sm):
    """By what a wave is given, of each kind of register."""
    gpu, x = find_gpu(target), matrix(1, 4096).expand(10**6, 4096)
    fake_gpu.used = {"registers": 200, "allocated_vgprs": vgprs, "allocated_sgprs": sgprs}
    assert persistent.plan(x, x, gpu=gpu, num_warps=4).grid == (per_sm * gpu.num_sms, 1)


def test_softmax_launches_what_it_compiled(fake_gpu, monkeypatch):
    monkeypatch.setattr("memtraffic.kernels.operands.device.HAS_GPU", False)
    x = matrix(9, 70).t()
    y = persistent.softmax(x)
    [(kernel, tensors, options), again] = fake_gpu.compiled  # to know how many fit; to be launched
    [(launched, grid, arguments)] = fake_gpu.started
    assert kernel is launched is again[0] is KERNEL and again[2] == options
    assert (grid, options.pop("num_warps")) == ((3, 1), 1)
    expected = {
        "y_row_stride": 9, "y_col_stride": 1, "x_row_stride": 1, "x_col_stride": 70,
        "n_rows": 70, "n_cols": 9, "ROWS": 32, "BLOCK": 16, "ALIGN": 1, "STAGES": 1,
    }  # fmt: skip
    for given, addresses in (
        ((*tensors, *options.values()), [tensors[0].data_ptr(), x.data_ptr()]),
        (arguments, [y.data_ptr(), x.data_ptr()]),
    ):
        bound = inspect.signature(KERNEL.fn).bind(*given).arguments
        pointers = [bound.pop("y_ptr"), bound.pop("x_ptr")]
        assert [getattr(it, "data_ptr", lambda it=it: it)() for it in pointers] == addresses
        assert bound == expected
    persistent.softmax(x)
    assert (len(fake_gpu.compiled), len(fake_gpu.started)) == (2, 2)


# ---- compiled


def on_sm_90(*calls):
    """For the rows of so many columns, with so many stages: the stages, and what it uses."""
    launches = [
        capture_launches(
            lambda x, stages=stages: persistent.softmax(x, num_stages=stages),
            torch.empty(9, n, dtype=dtype, device=device.default()),
            gpu=H200,
        )[0]
        for n, dtype, stages in calls
    ]
    kernels = compile_launches([(it, H200) for it in launches])
    return [(it.constants["STAGES"], kernel) for it, kernel in zip(launches, kernels, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        (torch.float32, (7, 781, 4096, 32768)),
        pytest.param(torch.bfloat16, (1, 1000, 8320, 32768), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_softmax_fits_an_sm(dtype, widths):
    for stages, kernel in on_sm_90(*((n, dtype, None) for n in widths)):
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes <= 227 * 1024
        assert residency.resident_programs(kernel, H200) >= 1
        if stages > 1:  # the copies are there, and of 16 bytes
            assert kernel.schedule[:stages][-2:] == ("copy", "for")
            assert set(kernel.load_bits) == {128}


def test_softmax_stages_are_tiles_in_flight():
    kernels = on_sm_90(*((4096, torch.float32, stages) for stages in (1, 2, 4)))
    work = ("reduce", "exp", "reduce", "store")
    for stages, kernel in kernels:
        start = kernel.schedule.index("for")
        if stages == 1:
            assert kernel.schedule == ("for", "load", *work, "end")
        else:
            assert kernel.schedule[:start] == ("copy",) * (stages - 1)
            assert kernel.schedule[start + 1] == f"wait {stages - 2}"
            body = kernel.schedule[start + 2 : kernel.schedule.index("end")]
            assert sorted(body) == sorted([*work, "copy"])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 781, 1000, 4096, 32768])
def test_softmax_of_a_cached_plan_is_that_of_a_new_one(n):
    x = matrix(1000, n, "bfloat16")
    cached = [persistent.softmax(x) for _ in range(2)]
    y = torch.empty_like(x)
    plan = persistent.plan.__wrapped__(x, y)
    assert plan.grid[0] <= this_gpu().num_sms * residency.resident_programs(
        residency.loaded_resources(plan.compiled, this_gpu()), this_gpu()
    )
    plan(y, x)
    assert all(torch.equal(y, other) for other in cached)
    assert_softmax(persistent.softmax, x)
