from collections import defaultdict
from itertools import product

import pytest
import torch
from cases import assert_softmax, assert_touches_once

from memtraffic import device, residency
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.device import this_gpu
from memtraffic.gpus import find_gpu
from memtraffic.kernels import launch
from memtraffic.kernels.launch import INTERPRETED_PROGRAMS
from memtraffic.kernels.softmax import persistent
from memtraffic.kernels.tiling import common_divisor, tile_shape
from memtraffic.meters.count import count
from memtraffic.tensors import matrix

H200 = find_gpu("H200")


@pytest.fixture(autouse=True)
def _no_cached_plans():
    launch._launches.forget()


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
    assert persistent.plan(x, x).grid[0] == min(m, INTERPRETED_PROGRAMS)
    assert persistent.plan(x, x, programs=3).grid[0] == min(m, 3)


def test_plan_of_a_larger_tile_takes_fewer_stages(captured):
    x = matrix(64, 1024)
    found = persistent.plan(x, x, num_warps=16, rows=32)
    assert (found.constants["STAGES"], found.grid) == (2, (2, 1))


@pytest.mark.parametrize("name", ["programs", "num_stages"])
@pytest.mark.parametrize("value", [0, -1])
def test_plan_wants_one_program_and_stage_or_more(name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value}, not 1 or more$"):
        persistent.softmax(matrix(3, 5), **{name: value})
    assert persistent.softmax(matrix(3, 5), **{name: 1}).shape == (3, 5)


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


def test_softmax_passes_its_options_to_the_plan(captured):
    persistent.softmax(matrix(40, 512), rows=4, num_warps=2, num_stages=1, programs=3)
    [found] = launch._launches.latest.values()
    assert (found.options["num_warps"], found.grid) == (2, (3, 1))
    assert (found.constants["STAGES"], found.constants["ROWS"]) == (1, 4)


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
    [plan] = launch._launches.latest.values()
    assert plan.used.registers > 0 and plan.per_sm > 0
    assert plan.grid[0] <= this_gpu().num_sms * plan.per_sm
    y = torch.empty_like(x)
    persistent.plan(x, y)(y, x)
    assert all(torch.equal(y, other) for other in cached)
    assert_softmax(persistent.softmax, x)
