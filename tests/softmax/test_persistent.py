from collections import defaultdict
from functools import partial

import pytest
import torch
from cases import assert_softmax

from memtraffic import device, residency
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import persistent
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


@pytest.mark.parametrize("programs", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("m", "n", "rows"),
    [
        pytest.param(11, 600, 1, id="a-row-per-tile"),
        pytest.param(27, 100, 4, id="last-tile-not-full"),
    ],
)
def test_softmax_strides_over_tiles(m, n, rows, programs):
    traffic = count(lambda x: persistent.softmax(x, programs=programs), matrix(m, n), trace=True)
    workers = defaultdict(set)
    for access in traffic.accesses:
        for row in {offset // n for offset in access.offsets}:
            workers[row].add(access.program)
    assert workers == {row: {(row // rows % programs, 0, 0)} for row in range(m)}
    assert traffic.read_elements == traffic.written_elements == m * n


@pytest.mark.parametrize("num_stages", [None, 1, 2, 4])
@pytest.mark.parametrize(("programs", "rows"), [(None, None), (1, 2), (3, None)])
def test_softmax_for_any_stages_programs_and_rows(num_stages, programs, rows):
    options = {"num_stages": num_stages, "programs": programs, "rows": rows}
    assert_softmax(partial(persistent.softmax, **options), matrix(11, 600))


# ---- plan


@pytest.mark.parametrize(
    ("n", "dtype", "options", "stages"),
    [
        (1004, torch.float32, {}, 3),
        (1004, torch.float16, {}, 1),  # 8 bytes at a time
        (32768, torch.float32, {}, 2),
        (32768, torch.float32, {"gpu": find_gpu("L4")}, 1),
        (1024, torch.float32, {"rows": 32, "num_warps": 16}, 2),
        (1004, torch.float16, {"num_stages": 4}, 4),
    ],
)
def test_plan_chooses_the_stages(captured, n, dtype, options, stages):
    x = matrix(2, n, dtype)
    assert persistent.plan(x, x, **options).constants["STAGES"] == stages


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
def test_softmax_launches_what_it_compiled(fake_gpu, monkeypatch):
    monkeypatch.setattr("memtraffic.kernels.operands.device.HAS_GPU", False)
    x = matrix(9, 70).t()
    y = persistent.softmax(x)
    [(kernel, _, options), again] = fake_gpu.compiled  # to know how many fit; to be launched
    [(launched, grid, arguments)] = fake_gpu.started
    assert kernel is launched is again[0] and again[2] == options
    assert (grid, options.pop("num_warps")) == ((3, 1), 1)
    sizes = [*y.stride(), x.data_ptr(), *x.stride(), *x.shape]
    assert arguments == [y.data_ptr(), *sizes, *options.values()]
    assert options == {"ROWS": 32, "BLOCK": 16, "ALIGN": 1, "STAGES": 1}
    persistent.softmax(x)
    assert (len(fake_gpu.compiled), len(fake_gpu.started)) == (2, 2)


# ---- compiled


@pytest.fixture(scope="module")
def on_sm_90():
    """The kernels for rows of so many columns, with so many stages, compiled at once."""
    calls = [(n, None) for n in (781, 4096, 32768)] + [(4096, 1), (4096, 2), (4096, 4)]
    launches = [
        capture_launches(
            partial(persistent.softmax, num_stages=stages),
            torch.empty(9, n, device=device.default()),
            gpu=H200,
        )[0]
        for n, stages in calls
    ]
    return dict(zip(calls, compile_launches([(it, H200) for it in launches]), strict=True))


def test_softmax_fits_an_sm(on_sm_90):
    for kernel in on_sm_90.values():
        assert kernel.spill_bytes == 0
        assert residency.resident_programs(kernel, H200) >= 1
        if "copy" in kernel.schedule:
            assert set(kernel.load_bits) == {128}
    assert ["copy" in on_sm_90[n, None].schedule for n in (781, 4096, 32768)] == [False, True, True]


def test_softmax_stages_are_tiles_in_flight(on_sm_90):
    work = ("reduce", "exp", "reduce", "store")
    assert on_sm_90[4096, 1].schedule == ("for", "load", *work, "end")
    for stages in (2, 4):
        schedule = on_sm_90[4096, stages].schedule
        start = schedule.index("for")
        assert schedule[:start] == ("copy",) * (stages - 1)
        assert schedule[start + 1] == f"wait {stages - 2}"
        body = schedule[start + 2 : schedule.index("end")]
        assert sorted(body) == sorted([*work, "copy"])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 781, 4096, 32768])
def test_softmax_of_a_cached_plan_is_that_of_a_new_one(n):
    x = matrix(1000, n, "bfloat16")
    cached = [persistent.softmax(x) for _ in range(2)]
    y = torch.empty_like(x)
    persistent.plan.__wrapped__(x, y)(y, x)
    assert all(torch.equal(y, other) for other in cached)
    assert_softmax(persistent.softmax, x)
