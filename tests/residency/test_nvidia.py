"""The rules for NVIDIA's GPUs, against `cuda_occupancy.h`, the guide's table and the driver."""

import random
import shutil

import pytest
import torch
from residency import oracles

from memtraffic.device import this_gpu
from memtraffic.gpus import GPUS, NvidiaGpu, find_gpu
from memtraffic.residency import loaded_resources, nvidia
from memtraffic.tensors import matrix

H100, T4 = find_gpu("H100"), find_gpu("T4")


# ---- the vendor's header and table


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """The program that asks NVIDIA's header."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++ to compile NVIDIA's header with")
    return oracles.build_header(tmp_path_factory.mktemp("header"))


def header_points(product):
    """(registers, shared bytes, warps): around every step of each limit, and random ones."""
    *_, shared, block = (1024 * kib for kib in oracles.NVIDIA_TABLE[product][-2:])
    registers = [*range(0, 256, 8), *range(1, 256, 8), 254, 255, 257]
    points = [(count, 0, warps) for count in registers for warps in range(1, 34)]
    for blocks in range(1, 34):
        fits = shared // blocks - (shared - block)
        ends = [fits, fits // 128 * 128, fits // 256 * 256]
        sizes = {end + step for end in ends for step in (-1, 0, 1)}
        points += [(16, size, warps) for size in sizes for warps in (1, 2) if size >= 0]
    points += [(16, size, 1) for size in (0, block - 1, block, block + 1)]
    draw = random.Random(product)
    for _ in range(1000):
        most = draw.choice([0, 4096, 32768, block + 3000])
        points.append((draw.randint(1, 255), draw.randint(0, most), draw.randint(1, 33)))
    return points


def differences(answers, gpu):
    """Where the rules for `gpu` differ from the header's answers."""
    for point, (error, resident, limits) in answers.items():
        ours = nvidia.programs_by_limit(*point, gpu)
        ours["resident"] = min(ours.values())
        theirs = limits | {"resident": resident}
        given = {name: value for name, value in theirs.items() if value != oracles.NOT_GIVEN}
        if error or any(ours[name] != value for name, value in given.items()):
            yield point, error, ours, theirs


@pytest.mark.oracle
def test_programs_by_limit_as_the_header_says(header):
    asked, residents = 0, set()
    for product in oracles.NVIDIA_TABLE:
        points = header_points(product)
        answers = dict(zip(points, oracles.ask_header(header, product, points), strict=True))
        wrong = [*differences(answers, find_gpu(product))]
        assert not wrong, f"{product}: {len(wrong)} of {len(answers)} differ, as {wrong[:3]}"
        asked += len(answers)
        # It refuses more than an SM of this kind has, so the table's size is not too large.
        [(too_much, *_)] = oracles.ask_header(header, product, [(16, 0, 1)], shared_more=1)
        assert too_much
        residents |= {resident for _, resident, _ in answers.values()}
    assert asked > 20000
    assert residents > set(range(25)), "the points do not reach every occupancy"


def test_gpus_are_those_of_nvidias_table():
    def row(gpu):
        sizes = gpu.num_sms, gpu.max_threads_per_sm, gpu.max_blocks_per_sm
        names = gpu.driver_name, gpu.datasheet_bytes_per_s / 1e12, gpu.target
        return *names, *sizes, gpu.shared_per_sm / 1024, gpu.shared_per_program / 1024

    rows = {gpu.product: row(gpu) for gpu in GPUS if isinstance(gpu, NvidiaGpu)}
    assert rows == oracles.NVIDIA_TABLE
    for product in rows:
        gpu = find_gpu(product)
        assert gpu.max_registers_per_thread == oracles.MAX_REGISTERS_PER_THREAD
        assert (gpu.warp_size, gpu.max_threads_per_program) == (32, 1024)
        assert (gpu.registers_per_sm, gpu.register_granularity) == (65536, 256)


# ---- cases worked out or measured


def test_programs_by_limit_of_what_the_header_does_not_say():
    """No thread may name 256 registers, and what is not used does not limit."""
    assert nvidia.programs_by_limit(256, 0, 1, H100)["registers"] == 0
    unused = nvidia.programs_by_limit(0, 0, 1, T4)
    assert unused["registers"] == unused["shared"] == 65536


@pytest.mark.parametrize("point", [(-1, 0, 4), (32, -1, 4), (32, 0, 0), (32, 0, -4)])
def test_programs_by_limit_of_less_than_nothing(point):
    with pytest.raises(ValueError):
        nvidia.programs_by_limit(*point, H100)


# ---- the driver


@pytest.mark.gpu
@pytest.mark.oracle
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a GPU made by NVIDIA")
def test_resident_programs_as_the_driver_says():
    from memtraffic.kernels.softmax import persistent

    gpu, draw, wrong = this_gpu(), random.Random(0), []
    for n, num_warps in ((8, 1), (781, 4), (8192, 16)):
        x = matrix(64, n)
        plan = persistent.plan(x, x.clone(), num_warps=num_warps, num_stages=3)
        used, most = loaded_resources(plan.compiled, gpu), gpu.shared_per_program
        points = [(num_warps, used.shared_bytes), (4, 6272), (4, 6273)]
        for warps in range(1, 33):
            drawn = [draw.randint(0, most) for _ in range(12)]
            points += [(warps, shared) for shared in (0, most, most // warps, *drawn)]
        for warps, shared in points:
            limits = nvidia.programs_by_limit(used.registers, shared, warps, gpu)
            theirs = nvidia.driver_resident_programs(plan.compiled, warps, shared)
            if min(limits.values()) != theirs:
                wrong.append((used.registers, warps, shared, limits, theirs))
    assert not wrong, wrong[:3]
