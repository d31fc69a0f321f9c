"""The rules for NVIDIA's GPUs, against `cuda_occupancy.h`, the guide's table and the driver."""

import ctypes
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from residency import oracles

from memtraffic.gpus import GPUS, NvidiaGpu, find_gpu, this_gpu
from memtraffic.residency import nvidia
from memtraffic.tensors import matrix

H100, T4 = find_gpu("H100"), find_gpu("T4")


# ---- the vendor's header and table


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """The program that asks NVIDIA's header."""
    if why := oracles.no_header():
        pytest.skip(why)
    return oracles.build_header(tmp_path_factory.mktemp("header"))


def header_points(product):
    """(registers, shared bytes, warps): around every step of each limit, and random ones."""
    *_, shared, block = (1024 * kib for kib in oracles.NVIDIA_TABLE[product][1:])
    registers = [*range(0, 256, 8), *range(1, 256, 8), 254, 255, 257]
    points = [(count, 0, warps) for count in registers for warps in range(1, 34)]
    for blocks in range(1, 34):
        fits = shared // blocks - (shared - block)
        ends = [fits, fits // 128 * 128, fits // 256 * 256]
        sizes = {end + step for end in ends for step in (-1, 0, 1)}
        points += [(16, size, warps) for size in sizes for warps in (1, 2) if size >= 0]
    points += [(16, size, 1) for size in (block - 1, block, block + 1)]
    draw = random.Random(product)
    for _ in range(1000):
        most = draw.choice([0, 4096, 32768, block + 3000])
        points.append((draw.randint(1, 255), draw.randint(0, most), draw.randint(1, 33)))
    return points


@pytest.fixture(scope="module")
def header_answers(header):
    """The header's answers: by product, a dict of points to (error, resident, limits)."""
    found = {}
    for product in oracles.NVIDIA_TABLE:
        points = header_points(product)
        found[product] = dict(zip(points, oracles.ask_header(header, product, points), strict=True))
    return found


def differences(answers, gpu):
    """Where the rules for `gpu` differ from the header's answers; how many numbers it compared."""
    wrong, compared = [], 0
    for point, (error, resident, limits) in answers.items():
        ours = nvidia.programs_by_limit(*point, gpu)
        ours["resident"] = nvidia.resident_programs(*point, gpu)
        theirs = limits | {"resident": resident}
        given = {name: value for name, value in theirs.items() if value != oracles.NOT_GIVEN}
        compared += len(given)
        if error or any(ours[name] != value for name, value in given.items()):
            wrong.append((point, error, ours, theirs))
    return wrong, compared


@pytest.mark.oracle
def test_programs_by_limit_as_the_header_says(header_answers, capsys):
    compared = 0
    for product, answers in header_answers.items():
        wrong, numbers = differences(answers, find_gpu(product))
        assert not wrong, f"{product}: {len(wrong)} of {len(answers)} differ, as {wrong[:3]}"
        compared += numbers
    points = sum(map(len, header_answers.values()))
    with capsys.disabled():
        print(f"cuda_occupancy.h: {points} points, {compared} numbers, all equal")
    assert points > 20000
    residents = {
        resident for answers in header_answers.values() for _, resident, _ in answers.values()
    }
    assert residents > set(range(25)), "the points do not reach every occupancy"


@pytest.mark.oracle
@pytest.mark.parametrize(
    "change",
    [
        {"register_granularity": 128},
        {"subpartitions": 5},
        {"shared_granularity": 256},
        {"max_threads_per_program": 992},
        {"max_blocks_per_sm": 31},
    ],
    ids=lambda change: next(iter(change)),
)
def test_programs_by_limit_of_another_gpu_differ_from_the_header(header_answers, change):
    assert differences(header_answers["H100"], replace(H100, **change))[0]


@pytest.mark.oracle
@pytest.mark.parametrize("product", oracles.NVIDIA_TABLE)
def test_header_knows_the_shared_memory_of_an_sm(header, product):
    """It refuses more than an SM of this kind has, so the table's size is not too large."""
    [(error, *_)] = oracles.ask_header(header, product, [(16, 0, 1)])
    [(too_much, *_)] = oracles.ask_header(header, product, [(16, 0, 1)], shared_more=1)
    assert (error, bool(too_much)) == (0, True)


def test_gpus_are_those_of_nvidias_table():
    rows = {
        gpu.product: (
            gpu.target,
            gpu.num_sms,
            gpu.max_threads_per_sm,
            gpu.max_blocks_per_sm,
            gpu.shared_per_sm / 1024,
            gpu.shared_per_program / 1024,
        )
        for gpu in GPUS
        if isinstance(gpu, NvidiaGpu)
    }
    assert rows == oracles.NVIDIA_TABLE
    for product in rows:
        gpu = find_gpu(product)
        assert gpu.max_registers_per_thread == oracles.MAX_REGISTERS_PER_THREAD
        assert (gpu.warp_size, gpu.max_threads_per_program) == (32, 1024)
        assert (gpu.registers_per_sm, gpu.register_granularity) == (65536, 256)


# ---- cases worked out or measured


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "blocks"),
    [
        (24, 0, 1, 32), (32, 128, 32, 2), (36, 32, 4, 12), (40, 8208, 4, 12), (47, 0, 1, 32),
        (47, 8, 2, 20), (50, 0, 1, 32), (54, 16, 4, 9), (56, 64, 4, 9), (58, 64, 16, 2),
        (60, 4096, 1, 32), (63, 131200, 32, 1), (64, 6144, 1, 32), (64, 16400, 4, 8),
        (65, 4096, 1, 28), (71, 0, 1, 28), (79, 98336, 8, 2), (90, 0, 1, 20), (95, 8, 2, 10),
        (98, 32, 8, 2), (104, 16, 4, 4), (115, 64, 16, 1),
    ],
)  # fmt: skip
def test_resident_programs_that_the_driver_counted(registers, shared_bytes, num_warps, blocks):
    """Each measured on an H200 by cuOccupancyMaxActiveBlocksPerMultiprocessor."""
    assert nvidia.resident_programs(registers, shared_bytes, num_warps, H100) == blocks


@pytest.mark.parametrize(
    ("gpu", "shared_bytes", "blocks"),
    [
        pytest.param(H100, 0, 228, id="reserved-by-the-system"),
        pytest.param(H100, 6272, 32, id="fits-exactly"),
        pytest.param(H100, 6273, 31, id="one-byte-takes-128"),
        pytest.param(H100, 232448, 1, id="all"),
        pytest.param(H100, 232449, 0, id="more-than-all"),
        pytest.param(T4, 65536, 1, id="turing-reserves-nothing"),
        pytest.param(T4, 1, 256, id="turing-allocates-256"),
        pytest.param(T4, 0, 65536, id="turing-none"),
    ],
)
def test_programs_by_limit_shared(gpu, shared_bytes, blocks):
    assert nvidia.programs_by_limit(16, shared_bytes, 1, gpu)["shared"] == blocks


@pytest.mark.parametrize(
    ("registers", "num_warps", "blocks"),
    [
        pytest.param(32, 1, 64, id="fills-a-subpartition"),
        pytest.param(33, 1, 48, id="one-more-takes-256-per-warp"),
        pytest.param(40, 1, 48, id="to-the-end-of-the-256"),
        pytest.param(255, 1, 8, id="most"),
        pytest.param(54, 4, 9, id="warps-of-a-block-in-any-subpartition"),
        pytest.param(255, 32, 0, id="not-one-block"),
        pytest.param(256, 1, 0, id="more-than-a-thread-may-have"),
        pytest.param(0, 1, 65536, id="none"),
    ],
)
def test_programs_by_limit_registers(registers, num_warps, blocks):
    assert nvidia.programs_by_limit(registers, 0, num_warps, H100)["registers"] == blocks


@pytest.mark.parametrize(("num_warps", "slots"), [(1, 64), (3, 21), (32, 2), (33, 0)])
def test_programs_by_limit_warps_and_blocks(num_warps, slots):
    found = nvidia.programs_by_limit(16, 0, num_warps, H100)
    assert (found["warps"], found["blocks"]) == (slots, 32)
    assert list(found) == ["registers", "shared", "warps", "blocks"]


@pytest.mark.parametrize("point", [(-1, 0, 4), (32, -1, 4), (32, 0, 0), (32, 0, -4)])
def test_programs_by_limit_of_less_than_nothing(point):
    with pytest.raises(ValueError):
        nvidia.programs_by_limit(*point, H100)
    with pytest.raises(ValueError):
        nvidia.resident_programs(*point, H100)


# ---- the driver


@pytest.fixture
def driver(monkeypatch):
    """A CUDA driver that answers 7 and notes its calls; a test sets the errors it returns."""
    found = SimpleNamespace(calls=[], errors=[0, 0])

    def attribute(function, which, value):
        found.calls.append(("attribute", function.value, which.value, value.value))
        return found.errors[0]

    def occupancy(answer, function, threads, shared_bytes):
        found.calls.append(("occupancy", function.value, threads.value, shared_bytes.value))
        answer._obj.value = 7
        return found.errors[1]

    library = SimpleNamespace(
        cuFuncSetAttribute=attribute, cuOccupancyMaxActiveBlocksPerMultiprocessor=occupancy
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": library}[name])
    monkeypatch.setattr(nvidia, "this_gpu", lambda: H100)
    monkeypatch.setattr(nvidia, "function_handle", lambda compiled: compiled)
    return found


def test_driver_resident_programs_allows_all_shared_memory(driver):
    assert nvidia.driver_resident_programs(4711, 4, 50000) == 7
    assert driver.calls == [
        ("attribute", 4711, 8, 232448),  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ("occupancy", 4711, 128, 50000),
    ]


@pytest.mark.parametrize(
    ("errors", "number", "calls"),
    [
        pytest.param([1, 0], 1, 1, id="too-much-shared-memory"),
        pytest.param([0, 400], 400, 2, id="not-a-kernel"),
    ],
)
def test_driver_resident_programs_refused(driver, errors, number, calls):
    driver.errors = errors
    with pytest.raises(RuntimeError, match=f"error {number}"):
        nvidia.driver_resident_programs(4711, 4, 0)
    assert len(driver.calls) == calls


@pytest.mark.gpu
@pytest.mark.oracle
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a GPU made by NVIDIA")
def test_resident_programs_as_the_driver_says(capsys):
    from memtraffic.kernels.softmax import persistent

    gpu, draw, asked, wrong = this_gpu(), random.Random(0), 0, []
    for n in (8, 64, 781, 2048, 8192):
        x = matrix(64, n)
        for num_warps in (1, 4, 16):
            if n > 2048 * num_warps:
                continue  # more than a lane can hold
            for num_stages in (1, 3):
                options = {"num_warps": num_warps, "num_stages": num_stages}
                plan = persistent.plan(x, x.clone(), **options)
                sizes = [(num_warps, plan.used.shared_bytes), (4, 6272), (4, 6273)]
                for warps in range(1, 33):
                    most = gpu.shared_per_program
                    sizes += [(warps, shared) for shared in (0, most, most // warps)]
                    sizes += [(warps, draw.randint(0, most)) for _ in range(3)]
                for warps, shared in sizes:
                    ours = nvidia.resident_programs(plan.used.registers, shared, warps, gpu)
                    theirs = nvidia.driver_resident_programs(plan.compiled, warps, shared)
                    asked += 1
                    if ours != theirs:
                        wrong.append((plan.used.registers, warps, shared, ours, theirs))
    with capsys.disabled():
        print(f"driver: {asked} answers, {len(wrong)} differ")
    assert not wrong, wrong[:3]
    assert asked > 4000
