"""The rules of occupancy against the makers' own code; and which of their numbers these comparisons would catch."""

import json
import random
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch

from memtraffic import machine, occupancy
from memtraffic.occupancy import amd, nvidia
from memtraffic.targets import (
    TARGETS,
    Resources,
    compile_launches,
    launches,
    resources,
)

pytest.importorskip("triton", reason="Triton is not installed")

import oracles

from memtraffic.ladder import fused, persistent, warps

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- NVIDIA, against cuda_occupancy.h


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """The program that asks NVIDIA's header."""
    if why := oracles.no_header():
        pytest.skip(why)
    return oracles.build_header(tmp_path_factory.mktemp("header"))


def nvidia_points(target, count):
    """(target, registers, shared bytes, warps): around every step of each limit, and `count` random ones."""
    *_, shared, block = (1024 * kib for kib in oracles.NVIDIA_TABLE[target])
    registers = [*range(0, 256, 8), *range(1, 256, 8), 254, 255, 257]
    points = [(target, it, 0, warps) for it in registers for warps in range(1, 34)]
    for blocks in range(1, 34):
        fits = shared // blocks - (shared - block)
        at = [fits, fits // 128 * 128, fits // 256 * 256]
        sizes = {it + step for it in at for step in (-1, 0, 1)}
        points += [
            (target, 16, it, warps) for it in sizes for warps in (1, 2) if it >= 0
        ]
    points += [(target, 16, it, 1) for it in (block - 1, block, block + 1)]
    draw = random.Random(target)
    for _ in range(count):
        most = draw.choice([0, 4096, 32768, block + 3000])
        sizes = (draw.randint(0, most), draw.randint(1, 33))
        points.append((target, draw.randint(1, 255), *sizes))
    return points


@pytest.fixture(scope="module")
def header_answers(header):
    """The answers of NVIDIA's header: a dict by point, for each target."""
    found = {}
    for target in nvidia.SMS:
        points = nvidia_points(target, 1000)
        answers = oracles.ask_header(header, points)
        found[target] = dict(zip(points, answers, strict=True))
    return found


def nvidia_differences(answers, sm):
    """How the rules for `sm` differ from the header's answers, limit by limit; and how many numbers were compared."""
    wrong, compared = [], 0
    for (target, registers, shared_bytes, num_warps), answer in answers.items():
        error, resident, theirs = answer
        ours = nvidia.limits(registers, shared_bytes, num_warps, sm)
        ours["resident"] = nvidia.resident(registers, shared_bytes, num_warps, sm)
        theirs = theirs | {"resident": resident}
        given = {
            name: value for name, value in theirs.items() if value != oracles.NOT_GIVEN
        }
        compared += len(given)
        if error or any(ours[name] != value for name, value in given.items()):
            point = (target, registers, shared_bytes, num_warps)
            wrong.append((point, error, ours, theirs))
    return wrong, compared


def test_nvidias_header_agrees_everywhere(header_answers, capsys):
    assert set(header_answers) == set(oracles.NVIDIA_TABLE)
    compared = 0
    for target, answers in header_answers.items():
        wrong, numbers = nvidia_differences(answers, nvidia.SMS[target])
        assert not wrong, f"{len(wrong)} of {len(answers)} differ, such as {wrong[:3]}"
        compared += numbers
    points = sum(map(len, header_answers.values()))
    with capsys.disabled():
        print(f"cuda_occupancy.h: {points} points, {compared} numbers, all equal")
    assert points > 20000
    residents = {
        it[1] for answers in header_answers.values() for it in answers.values()
    }
    assert residents > set(range(25)), "the points do not reach every occupancy"


@pytest.mark.parametrize("target", nvidia.SMS)
def test_nvidias_header_knows_the_shared_memory_of_an_sm(header, target):
    points = [(target, 16, 0, 1)]
    [(error, *_)] = oracles.ask_header(header, points)
    [(too_much, *_)] = oracles.ask_header(header, points, shared_more=1)
    assert (error, bool(too_much)) == (0, True)


def nvidia_table_differences(sm):
    """The sizes of `sm` that are not those of the table."""
    name, sms, threads, blocks, shared, block = oracles.NVIDIA_TABLE[sm.target]
    told = {
        "name": name,
        "sms": sms,
        "threads_per_sm": threads,
        "blocks_per_sm": blocks,
        "shared_per_sm": shared * 1024,
        "shared_per_block": block * 1024,
    }
    return [field for field, value in told.items() if getattr(sm, field) != value]


@pytest.mark.parametrize("target", nvidia.SMS)
def test_an_sm_is_that_of_nvidias_table(target):
    assert nvidia_table_differences(nvidia.SMS[target]) == []
    assert nvidia.SMS[target].target == target


# ---- AMD, against LLVM: kernels that Triton compiles


def triton_jobs():
    """Launches of the rungs at many sizes for every target, each of one dtype, which changes from one to the next."""
    jobs = []
    for rung, (first, step) in {warps: (6, 1), persistent: (7, 2)}.items():
        for d, dtype in enumerate(DTYPES):
            for k in range(first, 15, step):
                x = torch.empty(8, 2**k, dtype=dtype, device=machine.device())
                [launch] = launches(rung.softmax, x)
                launch = replace(launch, constants=launch.constants | {"ROWS": 1})
                for t, cu in enumerate(amd.CUS.values()):
                    for w in range(5):
                        elements = 2**k / (cu.wave_size * 2**w)
                        if elements <= 128 and (k + t + w) % 3 == d:
                            options = {"num_warps": 2**w}
                            jobs.append((replace(launch, options=options), cu.target))
    return jobs


@pytest.fixture(scope="module")
def triton_kernels():
    """What Triton made of `triton_jobs`, in two processes at a time where kernels are interpreted."""
    jobs = triton_jobs()
    if not machine.INTERPRETED:
        return compile_launches(jobs)
    with ThreadPoolExecutor() as pool:
        halves = pool.map(compile_launches, (jobs[::2], jobs[1::2]))
        return [kernel for half in halves for kernel in half]


def test_llvm_says_the_same_waves_of_tritons_kernels(triton_kernels, capsys):
    wrong, seen = [], defaultdict(set)
    for it in triton_kernels:
        cu = amd.CUS[it.target]
        ours = min(amd.waves(it.vgprs, it.agprs, it.sgprs, cu).values())
        given = (it.allocated_vgprs, 0, it.allocated_sgprs)
        if {ours, min(amd.waves(*given, cu).values())} != {it.llvm_waves}:
            wrong.append((ours, it))
        seen[it.target].add(ours)
    assert not wrong, f"{len(wrong)} of {len(triton_kernels)} differ: {wrong[:3]}"
    occupancies = {target: sorted(waves) for target, waves in seen.items()}
    with capsys.disabled():
        print(
            f"LLVM: {len(triton_kernels)} of Triton's kernels, all equal: {occupancies}"
        )
    assert 250 <= len(triton_kernels) <= 400
    assert set(seen) == set(amd.CUS)
    assert all(len(waves) >= 4 for waves in seen.values())
    assert {it.num_warps for it in triton_kernels} == {1, 2, 4, 8, 16}
    assert {it.kernel for it in triton_kernels} == {
        "_warps_kernel",
        "_persistent_kernel",
    }


@pytest.mark.parametrize("waves", [1])
def test_llvm_says_the_same_waves_of_a_kernel_compiled_for_few(waves):
    x = torch.empty(1, 16384, device=machine.device())
    options = {"num_warps": 4, "waves_per_eu": waves}
    [it] = resources(fused.softmax, "gfx942", x, **options)
    given = (it.allocated_vgprs, 0, it.allocated_sgprs)
    ours = min(amd.waves(*given, amd.CUS["gfx942"]).values())
    assert ours == it.llvm_waves == waves
    assert it.vgprs < it.allocated_vgprs


@pytest.mark.parametrize("target", amd.CUS)
def test_a_workgroup_of_more_than_1024_threads(target):
    """Which no AMD GPU takes: "maximum flat work-group size" in LLVM's user guide for AMDGPU."""
    cu = amd.CUS[target]
    most = 1024 // cu.wave_size
    assert amd.THREADS_PER_GROUP == 1024
    assert amd.resident(8, 0, 8, 0, most, cu) >= 1
    assert amd.resident(8, 0, 8, 0, most + 1, cu) == 0
    assert amd.limits(8, 0, 8, 0, most, cu)["waves"] >= 1
    more = amd.limits(8, 0, 8, 0, most + 1, cu)
    assert [name for name, programs in more.items() if not programs] == ["waves"]


@pytest.mark.parametrize("target", amd.CUS)
def test_a_wave_of_more_registers_than_it_can_name(target):
    cu = amd.CUS[target]
    most = oracles.AMD_TABLE[target][3]
    file = 2 * cu.vgprs if cu.agprs else cu.vgprs
    assert cu.most_vgprs == most <= file
    half = most // 2 if target.startswith("gfx9") else 0  # accumulators
    assert amd.limits(most - half, half, 8, 0, 1, cu)["vgprs"] >= 1
    more = amd.limits(most - half + 1, half, 8, 0, 1, cu)
    assert more["vgprs"] == 0 and more["waves"] >= 1


@pytest.mark.parametrize("target", ["gfx1100", "gfx1201"])
def test_rdna_names_256_registers_of_a_file_that_has_room_for_more(target):
    cu = amd.CUS[target]
    found = [amd.limits(it, 0, 8, 0, 1, cu)["vgprs"] for it in (256, 257)]
    assert found == [1536 // 264 * 4, 0]
    one = kernel(target, 1, vgprs=256, allocated_vgprs=256)
    assert occupancy.resident(one) == 20
    assert occupancy.resident(replace(one, allocated_vgprs=257)) == 0


# ---- AMD, against LLVM: kernels made to use exactly so much


def llvm_points(target):
    """(target, VGPRs, AGPRs, SGPRs, LDS bytes, threads): around every step of each limit that LLVM knows of.

    LDS comes in multiples of what a compute unit deals out: LLVM divides by what a kernel declares and does not round that up.
    What a piece is, LLVM tells elsewhere: see `oracles.LDS_PIECES`.
    """
    cu = amd.CUS[target]
    wave = 64 if target.startswith("gfx9") else 32
    unit = oracles.AMD_TABLE[target][2]
    granule = {"gfx908": 4, "gfx1100": 24, "gfx1201": 24}.get(target, 8)
    steps = sorted({v + i for v in range(0, 257, granule) for i in (-1, 0, 1)})
    steps = [it for it in steps if 0 < it <= 256] + [256]
    points = [(it, 0, 0, 0, wave) for it in steps]
    if target.startswith("gfx9"):
        points += [(8, it, 0, 0, wave) for it in steps]
        points += [(255, it, 0, 0, wave) for it in (1, 3, 5, 100, 255, 256)]
        points.append((256, 256, 0, 0, wave))  # all that can be named
        draw = random.Random(target)
        vgprs, agprs = ([draw.randint(1, 256) for _ in range(40)] for _ in "va")
        points += [(v, a, 0, 0, wave) for v, a in zip(vgprs, agprs, strict=True)]
    points += [(1, 0, it, 0, wave) for it in range(0, 103)]
    most = 1024 // wave
    for i, lds in enumerate(range(unit, 160 * 1024 + 1, unit)):
        if lds <= cu.lds_per_group and (i < 48 or i % 2):
            sizes = {1 + i % most, most // 4, 4}
            points += [(1, 0, 0, lds, warps * wave) for warps in sizes]
    points += [(1, 0, 0, 0, warps * wave) for warps in range(1, most + 1)]
    return [(target, *point) for point in points]


@pytest.fixture(scope="module")
def llvm_answers():
    """What LLVM says, `points` by target: dicts of points to (VGPRs, AGPRs, SGPRs, waves a SIMD, threads a wave)."""
    points = list(
        dict.fromkeys(it for target in oracles.AMD_TABLE for it in llvm_points(target))
    )
    found = oracles.ask_llvm(points)
    by_target = defaultdict(dict)
    for point, answer in zip(points, found["kernels"], strict=True):
        by_target[point[0]][point] = answer
    return found | {"points": dict(by_target)}


def waves_by_our_rules(used, lds, num_warps, cu):
    """Waves a SIMD as LLVM counts them: of whole workgroups spread over the SIMDs, but of as many as registers allow."""
    found = amd.limits(*used, lds, num_warps, cu)
    groups = min(found[name] for name in ("waves", "lds", "groups") if name in found)
    spread = max(1, -(-groups * num_warps // oracles.SIMDS))  # one wave can always run
    return min(*amd.waves(*used, cu).values(), spread)


def amd_differences(answers, cu):
    """How the rules and sizes of `cu` differ from what LLVM says."""
    wrong = []
    for point, (*used, theirs, wave) in answers["points"][cu.target].items():
        *_, lds, threads = point
        num_warps = -(-threads // cu.wave_size)
        ours = waves_by_our_rules(used, lds, num_warps, cu)
        if ours != theirs or wave != cu.wave_size:
            wrong.append((point, used, ours, theirs))
    if cu.lds_per_group != answers["most_lds"][cu.target]:
        wrong.append(("most LDS", answers["most_lds"][cu.target]))
    if cu.target in oracles.LDS_PIECES:
        pieces = [-(-size // cu.lds_unit) for size in oracles.LDS_STEPS]
        if pieces != answers["pieces"][cu.target]:
            wrong.append(("pieces of LDS", pieces, answers["pieces"][cu.target]))
    return wrong


def amd_table_differences(cu):
    """The sizes of `cu` that are not those of the table."""
    names = ("name", "cus", "lds_unit", "most_vgprs")
    told = zip(names, oracles.AMD_TABLE[cu.target], strict=True)
    return [field for field, value in told if getattr(cu, field) != value]


@pytest.mark.parametrize("target", amd.CUS)
def test_a_compute_unit_is_that_of_the_table(target):
    assert amd_table_differences(amd.CUS[target]) == []
    assert amd.CUS[target].target == target


@pytest.mark.parametrize("target", amd.CUS)
def test_llvm_says_the_same_waves_of_kernels_made_for_it(llvm_answers, target, capsys):
    answers, cu = llvm_answers["points"][target], amd.CUS[target]
    wrong = amd_differences(llvm_answers, cu)
    assert not wrong, f"{len(wrong)} of {len(answers)} differ, such as {wrong[:3]}"
    waves = Counter(answer[3] for answer in answers.values())
    with capsys.disabled():
        print(f"LLVM: {len(answers)} kernels for {target}, all equal: {dict(waves)}")
    assert max(waves) == cu.waves_per_simd
    assert len(waves) >= 8
    for point, (vgprs, agprs, sgprs, *_) in answers.items():  # as exact as asked for
        assert (vgprs >= point[1], agprs, sgprs >= point[3]) == (True, point[2], True)


@pytest.mark.parametrize("target", amd.CUS)
def test_what_breaks_the_limit_of_lds_is_what_llvm_refuses(llvm_answers, target):
    most, cu = llvm_answers["most_lds"][target], amd.CUS[target]
    assert amd.limits(8, 0, 8, most, 4, cu)["lds"] >= 1
    assert amd.limits(8, 0, 8, most + 1, 4, cu)["lds"] == 0


# ---- each number matters

NVIDIA_STEPS = {
    "sms": 1,
    "registers_per_sm": 1024,  # one piece for a warp of each partition
    "shared_per_sm": 128,
    "shared_per_block": 128,
    "warp_size": 1,
    "threads_per_sm": 32,  # a warp
    "blocks_per_sm": 1,
}
NVIDIA_RULES = {
    "REGISTER_UNIT": 128,
    "PARTITIONS": 1,
    "REGISTERS_PER_THREAD": 1,
    "THREADS_PER_BLOCK": 32,
    "REGISTERS_PER_BLOCK": 1024,
}
AMD_STEPS = {
    "cus": lambda cu: 1,
    "wave_size": lambda cu: 1,
    "waves_per_simd": lambda cu: 1,
    "vgprs": lambda cu: cu.vgpr_unit,
    "vgpr_unit": lambda cu: 1,
    "lds": lambda cu: 2 * oracles.AMD_TABLE[cu.target][2],  # of one, nothing more fits
    "lds_per_group": lambda cu: 1,
    "lds_unit": lambda cu: 256,
    "groups": lambda cu: 2,  # LLVM counts on 4 SIMDs: one of 2 waves does not show
    "simds": lambda cu: 1,
    "most_vgprs": lambda cu: 1,
}
CANNOT_MATTER = {
    ("REGISTERS_PER_BLOCK", 1): "a program of more than all registers of its partitions does not fit them either",
    **{
        (target, "groups", 1): "the places for waves hold no more programs of 2 waves"
        for target in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
    },
}  # fmt: skip


def directions(names, *before):
    """Parameters, each name with a step up and down, but for those that cannot matter."""
    return [
        pytest.param(*before, name, sign, id="-".join([*before, name, way]))
        for name in names
        for sign, way in ((1, "up"), (-1, "down"))
        if (*before, name, sign) not in CANNOT_MATTER
    ]


@pytest.mark.parametrize(
    ("target", "name", "sign"),
    [it for target in nvidia.SMS for it in directions(NVIDIA_STEPS, target)],
)
def test_each_size_of_an_sm_is_needed(header_answers, target, name, sign):
    sm = nvidia.SMS[target]
    other = replace(sm, **{name: getattr(sm, name) + sign * NVIDIA_STEPS[name]})
    found, _ = nvidia_differences(header_answers[target], other)
    if name == "sms":  # what no rule asks for
        assert not found and "sms" in nvidia_table_differences(other)
    else:
        assert found


@pytest.mark.parametrize(("name", "sign"), directions(NVIDIA_RULES))
def test_each_number_of_nvidias_rules_is_needed(
    header_answers, monkeypatch, name, sign
):
    value = getattr(nvidia, name) + sign * NVIDIA_RULES[name]
    monkeypatch.setattr(nvidia, name, value)
    found = [
        target
        for target, answers in header_answers.items()
        if nvidia_differences(answers, nvidia.SMS[target])[0]
    ]
    if (name, sign) == ("REGISTERS_PER_THREAD", 1):  # the header is wrong by one
        assert value != oracles.REGISTERS_PER_THREAD == value - 1
    else:
        assert found


@pytest.mark.parametrize("target", nvidia.SMS)
@pytest.mark.parametrize("factor", [0.5, 2])
def test_the_piece_of_shared_memory_is_needed(
    header_answers, monkeypatch, target, factor
):
    unit = int(factor * nvidia.shared_unit(nvidia.SMS[target]))
    monkeypatch.setattr(nvidia, "shared_unit", lambda sm: unit)
    assert nvidia_differences(header_answers[target], nvidia.SMS[target])[0]


def test_the_registers_of_a_block_follow_from_the_partitions(
    header_answers, monkeypatch
):
    """As CANNOT_MATTER says: raised to any number, nothing changes."""
    monkeypatch.setattr(nvidia, "REGISTERS_PER_BLOCK", 10**9)
    for target, answers in header_answers.items():
        assert not nvidia_differences(answers, nvidia.SMS[target])[0]


def test_the_registers_of_a_thread_are_those_that_an_instruction_can_name():
    assert nvidia.REGISTERS_PER_THREAD == oracles.REGISTERS_PER_THREAD
    sm = nvidia.SMS["sm_90"]
    assert [nvidia.resident(it, 0, 1, sm) for it in (255, 256)] == [8, 0]


def test_every_number_of_an_sm_is_among_those():
    assert set(NVIDIA_STEPS) | {"name", "target", "l2_bytes"} == {
        it.name for it in fields(machine.Limits)
    }
    numbers = {name for name, value in vars(nvidia).items() if type(value) is int}
    assert numbers == set(NVIDIA_RULES)


@pytest.mark.parametrize(
    ("target", "name", "sign"),
    [it for target in amd.CUS for it in directions(AMD_STEPS, target)],
)
def test_each_size_of_a_compute_unit_is_needed(llvm_answers, target, name, sign):
    cu = amd.CUS[target]
    other = replace(cu, **{name: getattr(cu, name) + sign * AMD_STEPS[name](cu)})
    found = amd_differences(llvm_answers, other)
    assert found or name in amd_table_differences(other)
    alone = ("cus", "lds_unit")  # no kernel of more than most_vgprs can be made
    assert found or name in alone or (name, sign) == ("most_vgprs", 1)


@pytest.mark.parametrize("target", amd.CUS)
def test_whether_accumulators_have_a_file_of_their_own_is_needed(llvm_answers, target):
    """Of `agprs` only that counts: where there is a file of its own it is as large as the other."""
    cu = amd.CUS[target]
    assert cu.agprs in (0, cu.vgprs)
    if not target.startswith("gfx9"):
        assert cu.agprs == 0  # there are no accumulators
        return
    other = replace(cu, agprs=0 if cu.agprs else cu.vgprs)
    assert amd_differences(llvm_answers, other)


def sgpr_steps():
    """(target, entry, which of its two numbers, change) of each number in `sgpr_waves` that can matter."""
    for target, cu in amd.CUS.items():
        for entry, (most, waves) in enumerate(cu.sgpr_waves):
            for change in (-1, 1):
                # waves beyond the cap are as many as the cap
                if min(waves + change, cu.waves_per_simd) != min(
                    waves, cu.waves_per_simd
                ):
                    yield target, entry, 1, change
                after = [it for _, it in cu.sgpr_waves[entry + 1 :]]
                if after and after[0] < cu.waves_per_simd and most < 10**9:
                    yield target, entry, 0, change * 2  # LLVM's kernels use even ones


@pytest.mark.parametrize(("target", "entry", "which", "change"), list(sgpr_steps()))
def test_each_step_of_scalar_registers_is_needed(
    llvm_answers, target, entry, which, change
):
    cu = amd.CUS[target]
    steps = [list(pair) for pair in cu.sgpr_waves]
    steps[entry][which] += change
    other = replace(cu, sgpr_waves=tuple(map(tuple, steps)))
    assert amd_differences(llvm_answers, other)


def test_every_number_of_a_compute_unit_is_among_those():
    others = {"target", "name", "agprs", "sgpr_waves"}
    assert set(AMD_STEPS) | others == {it.name for it in fields(amd.CU)}


@pytest.mark.parametrize(
    "target", [it[0] for it in CANNOT_MATTER if len(it) == 3], ids=str
)
def test_the_places_for_workgroups_follow_from_those_for_waves(llvm_answers, target):
    """As CANNOT_MATTER says: raised to any number, nothing changes."""
    other = replace(amd.CUS[target], groups=10**9)
    assert not amd_differences(llvm_answers, other)


# ---- the module around the rules


def kernel(target, num_warps=4, **used):
    """Resources of a kernel for `target` that needs little but for what is told."""
    return Resources("k", target, num_warps, **{"registers": 32, "spill_bytes": 0, "shared_bytes": 0} | used)  # fmt: skip


@pytest.mark.parametrize("target", [*nvidia.SMS, *amd.CUS])
def test_a_processor_is_found_by_its_target(target):
    assert occupancy.processor(target).target == target


@pytest.mark.parametrize("target", ["sm_91", "gfx1030", "", "H200"])
def test_an_unknown_processor_names_those_that_are_known(target):
    known = ", ".join([*nvidia.SMS, *amd.CUS])
    with pytest.raises(LookupError) as error:
        occupancy.processor(target)
    assert str(error.value) == f"no target is named {target!r}: give one of {known}"


def test_a_kernel_for_nvidia_is_counted_by_its_registers_and_shared_memory():
    one = kernel("sm_90", registers=69, shared_bytes=32784, vgprs=500, sgprs=500)
    assert occupancy.limits(one) == {"registers": 7, "shared": 6, "warps": 16, "blocks": 32}  # fmt: skip
    assert occupancy.resident(one) == 6


def test_a_kernel_for_amd_is_counted_by_each_kind_of_register():
    used = {"registers": 128, "vgprs": 100, "agprs": 28, "sgprs": 90}
    used |= {"allocated_vgprs": 128, "allocated_sgprs": 90}
    one = kernel("gfx942", shared_bytes=20000, **used)
    assert occupancy.limits(one) == {"vgprs": 4, "waves": 8, "sgprs": 8, "lds": 3, "groups": 16}  # fmt: skip
    assert occupancy.resident(one) == 3
    assert occupancy.limits(replace(one, allocated_vgprs=129))["vgprs"] == 3
    assert occupancy.limits(replace(one, allocated_sgprs=101))["sgprs"] == 7
    other = replace(one, target="gfx908", allocated_vgprs=100)
    assert occupancy.limits(other)["vgprs"] == 2
    assert occupancy.limits(replace(other, allocated_vgprs=84))["vgprs"] == 3
    used = dict.fromkeys(("registers", "vgprs", "agprs", "sgprs"), 500)
    assert occupancy.limits(replace(one, **used)) == occupancy.limits(one)


def test_another_processor_than_that_of_the_kernel():
    one = kernel("sm_90", registers=32)
    turing = occupancy.processor("sm_75")
    assert (occupancy.resident(one), occupancy.resident(one, turing)) == (16, 8)
    assert occupancy.limits(one, turing)["blocks"] == 16


@pytest.mark.parametrize(
    ("one", "binding", "resident", "processors", "gpu"),
    [
        pytest.param(kernel("sm_90", registers=255), "registers", 2, 132, "H200", id="registers"),
        pytest.param(kernel("sm_90", shared_bytes=50000), "shared", 4, 132, "H200", id="shared"),
        pytest.param(kernel("sm_90"), "registers", 16, 132, "H200", id="the-first-of-equals"),
        pytest.param(kernel("sm_120", 1, registers=8), "blocks", 24, 170, "RTX 5090", id="blocks"),
        pytest.param(kernel("sm_90", 16, registers=255), "registers", 0, 132, "H200", id="none-fits"),
        pytest.param(kernel("gfx942", 16, vgprs=64, allocated_vgprs=64), "vgprs", 2, 304, "MI300X", id="amd"),
        pytest.param(kernel("gfx1100", 1, vgprs=24, allocated_vgprs=24), "waves", 64, 48, "RX 7900 XTX", id="rdna"),
    ],
)  # fmt: skip
def test_a_report_has_it_all(one, binding, resident, processors, gpu):
    assert occupancy.report(one) == {
        "kernel": "k",
        "target": one.target,
        "gpu": gpu,
        "num_warps": one.num_warps,
        "limits": occupancy.limits(one),
        "binding": binding,
        "resident": resident,
        "processors": processors,
        "programs": resident * processors,
    }


def test_one_wave_needs_no_barrier_and_no_lds_no_piece():
    cu = amd.CUS["gfx908"]
    assert set(amd.limits(8, 0, 8, 0, 1, cu)) == {"vgprs", "waves", "sgprs"}
    assert amd.resident(8, 0, 8, 0, 1, cu) == 40
    assert amd.limits(8, 0, 8, 1, 2, cu) == {"vgprs": 64, "waves": 20, "sgprs": 20, "lds": 128, "groups": 16}  # fmt: skip
    assert "sgprs" not in amd.waves(8, 0, 8, amd.CUS["gfx1100"])


@pytest.mark.parametrize(
    ("vgprs", "agprs", "target", "waves"),
    [
        pytest.param(128, 0, "gfx942", 4, id="one-file"),
        pytest.param(5, 120, "gfx942", 4, id="accumulators-after-a-multiple-of-4"),
        pytest.param(5, 121, "gfx942", 3, id="one-accumulator-more"),
        pytest.param(5, 128, "gfx908", 2, id="a-file-of-their-own"),
        pytest.param(128, 5, "gfx908", 2, id="the-fuller-binds"),
        pytest.param(0, 0, "gfx1100", 64, id="never-less-than-a-piece"),
    ],
)
def test_accumulators(vgprs, agprs, target, waves):
    assert amd.waves(vgprs, agprs, 8, amd.CUS[target])["vgprs"] == waves


def test_the_script_is_the_tables():
    text = occupancy.script()
    head, tail = "window.occupancyData = ", ";"
    assert text.startswith(head) and text.endswith(tail)
    found = json.loads(text[len(head) : -len(tail)])
    assert set(found) == {"amd", "nvidia", "rules"}
    assert list(found["nvidia"]) == list(nvidia.SMS)
    assert list(found["amd"]) == list(amd.CUS)
    for target, told in found["nvidia"].items():
        assert machine.Limits(**told) == nvidia.SMS[target]
    for target, told in found["amd"].items():
        told["sgpr_waves"] = tuple(map(tuple, told["sgpr_waves"]))
        assert amd.CU(**told) == amd.CUS[target]
    assert found["rules"]["registersPerThread"] == 255
    assert (
        found["rules"]["threadsPerGroup"] == found["rules"]["threadsPerBlock"] == 1024
    )
    assert found["rules"]["sharedUnits"]["sm_75"] == 256


@pytest.mark.parametrize("change", [(-1, 0, 4), (32, -1, 4), (32, 0, 0), (32, 0, -4)])
def test_less_than_nothing_is_refused(change):
    registers, shared, num_warps = change
    with pytest.raises(ValueError, match=rf"^limits: {num_warps} warps"):
        nvidia.limits(registers, shared, num_warps, nvidia.SMS["sm_90"])
    with pytest.raises(ValueError, match=rf"^limits: {num_warps} warps"):
        amd.limits(registers, 0, 0, shared, num_warps, amd.CUS["gfx942"])


def test_each_target_has_a_processor_of_as_many_lanes():
    known = nvidia.SMS | amd.CUS
    assert known.keys() == TARGETS.keys()
    for target, unit in known.items():
        lanes = unit.wave_size if target in amd.CUS else unit.warp_size
        assert lanes == TARGETS[target][2]
