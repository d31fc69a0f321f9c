from collections import defaultdict

import pytest
import torch

from memtraffic import residency, runtime
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.gpus import find_gpu, this_gpu
from memtraffic.kernels import launch
from memtraffic.kernels.launch import INTERPRETED_PROGRAMS
from memtraffic.kernels.softmax import persistent
from memtraffic.kernels.tiling import common_divisor, tile_shape
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.testing import assert_softmax, assert_touches_once

H200 = find_gpu("H200")


@pytest.fixture(autouse=True)
def _no_cached_plans():
    launch._launches.forget()


@pytest.fixture
def captured():
    """No kernel is compiled, also where there is a GPU."""
    with runtime.capturing_launches():
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
@pytest.mark.parametrize("programs", [None, 1, 3])
@pytest.mark.parametrize("rows", [None, 2])
def test_softmax_for_any_stages_programs_and_rows(num_stages, programs, rows):
    options = {"num_stages": num_stages, "programs": programs, "rows": rows}
    assert_softmax(lambda x: persistent.softmax(x, **options), matrix(11, 600))


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
        (1024, torch.float32, 3),
        (1024, torch.float16, 3),
        (1002, torch.float32, 1),
        (1004, torch.float16, 1),
        (1004, torch.float32, 3),
        (8, torch.float32, 3),
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
    with runtime.capturing_launches(find_gpu("MI300X")):
        assert persistent.plan(x, x).options["num_warps"] == 16


def test_softmax_passes_its_options_to_the_plan(captured):
    persistent.softmax(matrix(40, 512), rows=4, num_warps=2, num_stages=1, programs=3)
    [found] = launch._launches.latest.values()
    assert (found.options["num_warps"], found.grid) == (2, (3, 1))
    assert (found.constants["STAGES"], found.constants["ROWS"]) == (1, 4)


# ---- compiled

WIDTHS = (1, 7, 128, 781, 1000, 4096, 8192, 8320, 16384, 32768)
FEWER = [
    (7, "float32"),
    (781, "float32"),
    (4096, "float32"),
    (32768, "float32"),
    (32768, "bfloat16"),
]
CASES = [
    pytest.param(n, dtype, marks=() if (n, dtype) in FEWER else pytest.mark.slow)
    for n in WIDTHS
    for dtype in ("float32", "float16", "bfloat16")
]


def on_sm_90(n, dtype, num_stages=None):
    """The stages of the kernel for rows of `n` columns, and what it uses."""
    x = torch.empty(9, n, dtype=getattr(torch, dtype), device=runtime.device())
    launches = capture_launches(lambda x: persistent.softmax(x, num_stages=num_stages), x)
    [kernel] = compile_launches([(launch, H200) for launch in launches])
    return launches[0].constants["STAGES"], kernel


@pytest.mark.parametrize(("n", "dtype"), CASES)
def test_softmax_fits_an_sm(n, dtype):
    stages, kernel = on_sm_90(n, dtype)
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= 227 * 1024
    assert residency.resident_programs(kernel, H200) >= 1
    if stages > 1:  # the copies are there, and of 16 bytes
        assert kernel.schedule[:stages][-2:] == ("copy", "for")
        assert set(kernel.load_bits) == {128}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_softmax_stages_are_tiles_in_flight(stages):
    _, kernel = on_sm_90(4096, "float32", stages)
    start = kernel.schedule.index("for")
    work = ("reduce", "exp", "reduce", "store")
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda x: x[:, :1002], id="narrower-of-the-same-block"),
        pytest.param(lambda x: x[:, :781].contiguous(), id="odd"),
        pytest.param(lambda x: x.flatten()[1:-1023].view(299, 1024), id="unaligned"),
        pytest.param(lambda x: x.flatten()[2:-1022].view(299, 1024), id="by-8-bytes"),
        pytest.param(lambda x: x[:, ::2], id="every-other"),
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[:7], id="fewer-rows"),
    ],
)
def test_softmax_of_another_kind_after_a_first(second):
    x = matrix(300, 1024)
    for _ in range(2):
        assert_softmax(persistent.softmax, x)
        assert_softmax(persistent.softmax, second(x))
