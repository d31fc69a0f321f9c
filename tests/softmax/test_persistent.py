from collections import defaultdict
from functools import partial

import pytest
import torch
from cases import DEVICE, H200, assert_softmax, cases

from memtraffic import residency
from memtraffic.compile import resources
from memtraffic.kernels.softmax import persistent
from memtraffic.meters.count import count
from memtraffic.tensors import matrix

KERNEL = persistent._softmax_persistent_kernel
pytestmark = pytest.mark.usefixtures("no_plans")


# ---- who does what


@pytest.mark.parametrize("programs", [2, 5, 100])
@pytest.mark.parametrize(
    ("m", "n", "rows"),
    [
        pytest.param(11, 600, 1, id="a-row-per-tile"),
        pytest.param(27, 100, 4, id="last-tile-not-full"),
    ],
)
def test_softmax_strides_over_tiles(m, n, rows, programs):
    softmax, x = partial(persistent.softmax, programs=programs), matrix(m, n)
    assert_softmax(softmax, x)
    traffic = count(softmax, x, trace=True)
    workers = defaultdict(set)
    for access in traffic.accesses:
        for row in {offset // n for offset in access.offsets}:
            workers[row].add(access.program)
    assert workers == {row: {(row // rows % programs, 0, 0)} for row in range(m)}
    assert traffic.read_elements == traffic.written_elements == m * n


# ---- plan


PLANS = {
    "registers": (10000, (64, 16384), {}, 132 * 8),
    "shared-memory": (10000, (32, 100000), {}, 132 * 2),
    "fewer-tiles": (1055, (64, 16384), {}, 1055),
    "as-asked": (10000, (64, 16384), {"programs": 7}, 7),
    "fewer-than-asked": (5, (64, 16384), {"programs": 7}, 5),
    "more-warps": (10000, (64, 0), {"num_warps": 8}, 132 * 4),
}


@cases(("n_tiles", "used", "options", "programs"), PLANS)
def test_plan_launches_what_fits(fake_gpu, n_tiles, used, options, programs):
    fake_gpu.used = dict(zip(("registers", "shared_bytes"), used, strict=True))
    x = matrix(1, 4096).expand(n_tiles, 4096)
    assert persistent.plan(x, x, gpu=H200, **options).grid == (programs, 1)
    [first, again] = fake_gpu.compiled  # to know how many fit; to be launched
    assert first[0] is again[0] and first[2] == again[2]


# ---- compiled


@pytest.mark.parametrize("wide", [1024, pytest.param(32768, marks=pytest.mark.slow)])
def test_compiled_stages_are_tiles_in_flight(wide):
    """And a program fits an SM, its loads as wide as the rows permit."""

    def launch_all():
        for n, stages in ((781, None), (wide, 2), (4096, 4)):
            persistent.softmax(torch.empty(9, n, device=DEVICE), num_stages=stages)

    odd, *aligned = resources(launch_all, (), target=H200)
    work = ("reduce", "exp", "reduce", "store")
    assert odd.schedule == ("for", "load", *work, "end")
    for stages, kernel in zip((2, 4), aligned, strict=True):
        start = kernel.schedule.index("for")
        assert kernel.schedule[:start] == ("copy",) * (stages - 1)
        assert kernel.schedule[start + 1] == f"wait {stages - 2}"
        body = kernel.schedule[start + 2 : kernel.schedule.index("end")]
        assert sorted(body) == sorted([*work, "copy"])
        assert set(kernel.load_bits) == {128}
    for kernel in (odd, *aligned):
        assert kernel.spill_bytes == 0
        assert residency.resident_programs(kernel, H200) >= 1
