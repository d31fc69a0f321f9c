import ctypes
import random as draws
from types import SimpleNamespace

import pytest
import torch

from memtraffic import machine
from memtraffic.machine import Limits
from memtraffic.occupancy import nvidia

HOPPER = Limits(
    name="like an H100",
    sms=132,
    registers_per_sm=65536,
    shared_per_sm=233472,
    shared_per_block=232448,
    l2_bytes=50 * 2**20,
    warp_size=32,
    threads_per_sm=2048,
    blocks_per_sm=32,
)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "blocks"),
    [
        (24, 0, 1, 32),
        (32, 128, 32, 2),
        (36, 32, 4, 12),
        (40, 8208, 4, 12),
        (47, 0, 1, 32),
        (47, 8, 2, 20),
        (50, 0, 1, 32),
        (54, 16, 4, 9),
        (56, 64, 4, 9),
        (58, 64, 16, 2),
        (60, 4096, 1, 32),
        (63, 131200, 32, 1),
        (64, 6144, 1, 32),
        (64, 16400, 4, 8),
        (65, 4096, 1, 28),
        (71, 0, 1, 28),
        (79, 98336, 8, 2),
        (90, 0, 1, 20),
        (95, 8, 2, 10),
        (98, 32, 8, 2),
        (104, 16, 4, 4),
        (115, 64, 16, 1),
    ],
)
def test_blocks_that_the_driver_of_an_h200_counted(
    registers, shared_bytes, num_warps, blocks
):
    """Each measured there by cuOccupancyMaxActiveBlocksPerMultiprocessor."""
    assert nvidia.resident(registers, shared_bytes, num_warps, HOPPER) == blocks


@pytest.mark.parametrize(
    ("shared_bytes", "blocks"),
    [
        pytest.param(0, 228, id="what-the-system-keeps"),
        pytest.param(6272, 32, id="fits-exactly"),
        pytest.param(6273, 31, id="one-byte-takes-128"),
        pytest.param(232448, 1, id="all"),
        pytest.param(232449, 0, id="more-than-all"),
    ],
)
def test_the_limit_of_shared_memory(shared_bytes, blocks):
    assert nvidia.limits(16, shared_bytes, 1, HOPPER)["shared"] == blocks


@pytest.mark.parametrize(
    ("registers", "num_warps", "blocks"),
    [
        pytest.param(32, 1, 64, id="fills-a-partition"),
        pytest.param(33, 1, 48, id="one-more-takes-256-a-warp"),
        pytest.param(40, 1, 48, id="to-the-end-of-the-256"),
        pytest.param(255, 1, 8, id="most"),
        pytest.param(54, 4, 9, id="warps-of-a-block-in-any-partition"),
        pytest.param(255, 32, 0, id="not-one-block"),
        pytest.param(256, 1, 0, id="more-than-a-thread-may-have"),
        pytest.param(0, 1, 65536, id="none"),
    ],
)
def test_the_limit_of_registers(registers, num_warps, blocks):
    assert nvidia.limits(registers, 0, num_warps, HOPPER)["registers"] == blocks


def test_the_limits_of_warps_and_blocks():
    found = nvidia.limits(16, 0, 3, HOPPER)
    assert (found["warps"], found["blocks"]) == (21, 32)
    assert list(found) == ["registers", "shared", "warps", "blocks"]
    assert nvidia.limits(16, 0, 32, HOPPER)["warps"] == 2
    assert nvidia.limits(16, 0, 33, HOPPER)["warps"] == 0


def test_turing_keeps_no_shared_memory_and_deals_it_in_256_bytes():
    turing = nvidia.SMS["sm_75"]
    assert nvidia.limits(16, 65536, 1, turing)["shared"] == 1
    assert nvidia.limits(16, 1, 1, turing)["shared"] == 256


def test_the_sm_of_sm_90_is_that_of_an_h100():
    alike = ("registers_per_sm", "shared_per_sm", "shared_per_block", "warp_size")
    alike += ("sms", "threads_per_sm", "blocks_per_sm")
    for name in alike:
        assert getattr(nvidia.SMS["sm_90"], name) == getattr(HOPPER, name), name


@pytest.mark.skipif(machine.INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("n", [8, 781, 1024, 2048])
def test_the_driver_counts_the_same(n, num_warps):
    pytest.importorskip("triton", reason="Triton is not installed")
    from kernels import random

    from memtraffic.ladder import persistent

    x = random(64, n)
    kernel = persistent.plan(x, x.clone(), num_warps=num_warps).kernel
    driver = ctypes.CDLL("libcuda.so.1")
    for shared_bytes in (kernel.metadata.shared, 6272, 6273, 16384, 40000):
        blocks = ctypes.c_int()
        status = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks),
            ctypes.c_void_p(kernel.function),
            ctypes.c_int(32 * num_warps),
            ctypes.c_size_t(shared_bytes),
        )
        assert status == 0
        sm = machine.limits()
        expected = nvidia.resident(kernel.n_regs, shared_bytes, num_warps, sm)
        assert blocks.value == expected, f"{kernel.n_regs} registers, {shared_bytes}"


# ---- the driver


@pytest.fixture
def driver(monkeypatch):
    """A CUDA driver that answers 7 and notes what it is asked; a test sets the errors it returns."""
    found = SimpleNamespace(asked=[], errors=[0, 0], loaded=[])

    def attribute(function, which, value):
        found.asked.append(("attribute", function.value, which, value))
        return found.errors[0]

    def occupancy(answer, function, threads, shared_bytes):
        call = ("occupancy", function.value, threads, shared_bytes.value)
        found.asked.append(call)
        answer._obj.value = 7
        return found.errors[1]

    library = SimpleNamespace(
        cuFuncSetAttribute=attribute,
        cuOccupancyMaxActiveBlocksPerMultiprocessor=occupancy,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": library}[name])
    monkeypatch.setattr(nvidia, "limits_of_this_gpu", lambda: HOPPER)
    return found


class Unloaded:
    """A compiled kernel, whose handle is known once it is loaded."""

    function = None

    @property
    def run(self):
        self.function = 4711


def test_the_driver_is_asked_about_a_loaded_kernel_with_all_shared_memory(driver):
    assert nvidia.driver(Unloaded(), 4, 50000) == 7
    assert driver.asked == [
        ("attribute", 4711, 8, HOPPER.shared_per_block),
        ("occupancy", 4711, 128, 50000),
    ]


@pytest.mark.parametrize(
    ("errors", "number", "calls"),
    [
        pytest.param([1, 0], 1, 1, id="too-much-shared-memory"),
        pytest.param([0, 400], 400, 2, id="not-a-kernel"),
    ],
)
def test_what_the_driver_refuses_is_an_error(driver, errors, number, calls):
    driver.errors = errors
    with pytest.raises(RuntimeError, match=f"^driver: CUDA error {number}$"):
        nvidia.driver(Unloaded(), 4, 0)
    assert len(driver.asked) == calls


@pytest.mark.skipif(machine.INTERPRETED, reason="needs a GPU")
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a GPU of NVIDIA's")
def test_the_driver_counts_the_same_at_any_size(capsys):
    pytest.importorskip("triton", reason="Triton is not installed")
    from kernels import random

    from memtraffic.ladder import persistent

    sm, draw, asked, wrong = machine.limits(), draws.Random(0), 0, []
    for n in (64, 781, 2048, 8192):
        x = random(64, n)
        for num_warps in (4, 8, 16):
            for num_stages in (1, 3):
                it = persistent.plan(x, x.clone(), num_warps, num_stages)
                sizes = [(num_warps, it.shared_bytes)]
                for warps in range(1, 33):
                    most = sm.shared_per_block
                    sizes += [(warps, shared) for shared in (0, most, most // warps)]
                    sizes += [(warps, draw.randint(0, most)) for _ in range(3)]
                for warps, shared in sizes:
                    ours = nvidia.resident(it.registers, shared, warps, sm)
                    theirs = nvidia.driver(it.kernel, warps, shared)
                    asked += 1
                    if ours != theirs:
                        wrong.append((it.registers, warps, shared, ours, theirs))
    with capsys.disabled():
        print(f"driver: {asked} answers, {len(wrong)} differ")
    assert not wrong, wrong[:3]
    assert asked > 4000
