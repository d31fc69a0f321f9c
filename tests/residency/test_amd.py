"""The rules for AMD's GPUs, against LLVM, for kernels that are made up."""

import random
from collections import defaultdict

import pytest
from residency import oracles

from memtraffic.gpus import GPUS, TARGETS, AmdGpu, find_gpu
from memtraffic.residency import amd

AMD_GPUS = [gpu for gpu in TARGETS.values() if isinstance(gpu, AmdGpu)]
MI100, MI300X = find_gpu("MI100"), find_gpu("MI300X")


# ---- kernels made up to use exactly so much


def llvm_points(product):
    """(target, VGPRs, AGPRs, SGPRs, LDS bytes, threads): around the steps of each limit.

    LDS comes in multiples of its granularity: LLVM divides by what a kernel declares and does not
    round that up.
    """
    row = oracles.AMD_TABLE[product]
    _, _, target, _, wave, file, granule, waves, _, lds, group_lds, unit = row
    ends = {file // n // granule * granule for n in range(1, waves + 1)} | {granule, 2 * granule}
    steps = sorted({end + i for end in ends for i in (0, 1) if end + i <= 256} | {256})
    points = [(count, 0, 0, 0, wave) for count in steps]
    if target in oracles.CDNA:
        points += [(8, count, 0, 0, wave) for count in steps[:: 1 if target == "gfx908" else 3]]
        points += [(255, count, 0, 0, wave) for count in (1, 3, 5, 100, 255, 256)]
        points.append((256, 256, 0, 0, wave))  # all that can be named
        draw = random.Random(target)
        vgprs, agprs = ([draw.randint(1, 256) for _ in range(5)] for _ in "va")
        points += [(v, a, 0, 0, wave) for v, a in zip(vgprs, agprs, strict=True)]
    sgprs = (80, 81, 88, 89, 100, 101, 102) if target in oracles.CDNA else (80,)
    points += [(1, 0, count, 0, wave) for count in sgprs]
    most = 1024 // wave
    for n in range(1, 9):  # n workgroups fit, or one less
        fits = lds * 1024 // n // unit * unit
        sizes = [size for size in (fits, fits + unit) if size <= group_lds * 1024]
        points += [(1, 0, 0, size, w * wave) for size in sizes for w in {most // 4, 4}]
    points += [(1, 0, 0, 0, n * wave) for n in range(1, most + 1)]
    return [(target, *point) for point in points]


def waves_by_our_rules(used, lds, num_warps, gpu):
    """Waves per SIMD as LLVM counts them: of whole workgroups, spread over the SIMDs."""
    limits = amd.programs_by_limit(*used, lds, num_warps, gpu)
    groups = min(limits[name] for name in ("waves", "lds", "groups") if name in limits)
    spread = max(1, -(-groups * num_warps // oracles.SIMDS))  # one wave can always run
    return min(*amd.waves_by_limit(*used, gpu).values(), spread)


@pytest.mark.oracle
def test_programs_by_limit_as_llvm_says():
    points = [it for product in oracles.AMD_TABLE for it in llvm_points(product)]
    wrong, waves = [], defaultdict(set)
    for point, (*used, theirs, wave) in zip(points, oracles.ask_llvm(points), strict=True):
        target, vgprs, agprs, sgprs, lds, threads = point
        gpu = find_gpu(target)
        waves[gpu].add(theirs)
        ours = waves_by_our_rules(used, lds, -(-threads // gpu.warp_size), gpu)
        if (ours, gpu.warp_size) != (theirs, wave):
            wrong.append((point, used, ours, theirs))
        # LLVM used what was asked for
        assert (used[0] >= vgprs, used[1], used[2] >= sgprs) == (True, agprs, True)
    assert not wrong, f"{len(wrong)} of {len(points)} differ, such as {wrong[:3]}"
    assert set(waves) == set(AMD_GPUS)
    for gpu, found in waves.items():
        assert max(found) == gpu.max_waves_per_simd and len(found) >= 8


# ---- the tables, and what no code tells


def test_gpus_are_those_of_amds_tables():
    def row(gpu):
        waves = gpu.vgprs, gpu.vgpr_granule, gpu.max_waves_per_simd, gpu.max_addressable_vgprs
        lds = gpu.shared_per_sm / 1024, gpu.shared_per_program / 1024, gpu.shared_granularity
        names = gpu.driver_name, gpu.datasheet_bytes_per_s / 1e12, gpu.target
        return *names, gpu.num_sms, gpu.warp_size, *waves, *lds

    rows = {gpu.product: row(gpu) for gpu in GPUS if isinstance(gpu, AmdGpu)}
    assert rows == oracles.AMD_TABLE


@pytest.mark.parametrize("gpu", AMD_GPUS, ids=lambda gpu: gpu.target)
def test_what_a_gpu_cannot_hold(gpu):
    """32 barriers per workgroup processor, 16 per compute unit: AMDGPUBaseInfo.cpp.

    No AMD GPU takes more than 1024 threads: "maximum flat work-group size" in LLVM's user guide.
    """
    groups = 16 if gpu.target in oracles.CDNA else 32
    assert amd.programs_by_limit(8, 0, 8, 0, 2, gpu)["groups"] == groups
    most = 1024 // gpu.warp_size
    assert min(amd.programs_by_limit(8, 0, 8, 0, most, gpu).values()) >= 1
    more = amd.programs_by_limit(8, 0, 8, 0, most + 1, gpu)
    assert [name for name, programs in more.items() if not programs] == ["waves"]
    lds = gpu.shared_per_program
    fits = [amd.programs_by_limit(8, 0, 8, size, 4, gpu)["lds"] > 0 for size in (lds, lds + 1)]
    assert fits == [True, False]
    half = 256 if gpu.target in oracles.CDNA else 0  # accumulation registers
    assert amd.waves_by_limit(256, half, 8, gpu)["vgprs"] >= 1
    more = amd.waves_by_limit(257, half, 8, gpu)
    assert more["vgprs"] == 0 and more["waves"] >= 1


def test_waves_by_limit_of_what_llvm_cannot_be_asked():
    """At least a granule is allocated, and no instruction names more than 102 scalar registers."""
    assert amd.waves_by_limit(0, 0, 8, find_gpu("gfx1100")) == {"vgprs": 64, "waves": 16}
    assert amd.waves_by_limit(0, 0, 500, MI300X) == {"vgprs": 64, "waves": 8, "sgprs": 7}


def test_programs_by_limit_leaves_out_what_cannot_bind():
    assert amd.programs_by_limit(8, 0, 8, 0, 1, MI100) == {"vgprs": 128, "waves": 40, "sgprs": 40}
    found = amd.programs_by_limit(8, 0, 8, 1, 2, MI100)
    assert found == {"vgprs": 64, "waves": 20, "sgprs": 20, "lds": 128, "groups": 16}
    assert min(amd.programs_by_limit(8, 250, 8, 0, 4, MI300X).values()) == 1


@pytest.mark.parametrize(
    "point",
    [(-1, 0, 0, 0, 4), (0, -1, 0, 0, 4), (0, 0, -1, 0, 4), (0, 0, 0, -1, 4), (8, 0, 8, 0, 0)],
)
def test_programs_by_limit_of_less_than_nothing(point):
    with pytest.raises(ValueError):
        amd.programs_by_limit(*point, MI300X)
