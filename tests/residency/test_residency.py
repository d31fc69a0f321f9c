"""The module around the rules of each vendor."""

import json
from dataclasses import replace

import pytest
import torch

from memtraffic import residency, runtime
from memtraffic.compile import Resources
from memtraffic.gpus import TARGETS, Gpu, find_gpu


def kernel(target, num_warps=4, **used):
    """Resources of a kernel for `target` that needs little beyond `used`."""
    used = {"registers": 32, "spill_bytes": 0, "shared_bytes": 0} | used
    return Resources("k", target, num_warps, **used)


def test_programs_by_limit_nvidia():
    """By registers and shared memory, whatever the fields of AMD's hold."""
    one = kernel("sm_90", registers=69, shared_bytes=32784, vgprs=500, sgprs=500)
    limits = {"registers": 7, "shared": 6, "warps": 16, "blocks": 32}
    assert residency.programs_by_limit(one) == limits
    assert residency.resident_programs(one) == 6


def test_programs_by_limit_amd():
    """By what a wave is given of each kind of register, whatever it uses of it."""
    used = {"registers": 128, "vgprs": 100, "agprs": 28, "sgprs": 90}
    one = kernel("gfx942", shared_bytes=20000, allocated_vgprs=128, allocated_sgprs=90, **used)
    limits = {"vgprs": 4, "waves": 8, "sgprs": 8, "lds": 3, "groups": 16}
    assert residency.programs_by_limit(one) == limits
    assert residency.resident_programs(one) == 3
    assert residency.programs_by_limit(replace(one, allocated_vgprs=129))["vgprs"] == 3
    assert residency.programs_by_limit(replace(one, allocated_sgprs=101))["sgprs"] == 7
    used = dict.fromkeys(used, 500)
    assert residency.programs_by_limit(replace(one, **used)) == limits


@pytest.mark.parametrize("target", TARGETS)
def test_programs_by_limit_are_whole_numbers(target):
    one = kernel(target, shared_bytes=5000, allocated_vgprs=30, allocated_sgprs=30)
    assert {type(programs) for programs in residency.programs_by_limit(one).values()} == {int}


def test_programs_by_limit_of_another_gpu():
    one, turing = kernel("sm_90"), find_gpu("sm_75")
    assert residency.programs_by_limit(one, turing)["blocks"] == 16
    assert (residency.resident_programs(one), residency.resident_programs(one, turing)) == (16, 8)
    assert residency.report(one, turing)["processors"] == 40


def test_programs_by_limit_of_an_unknown_target():
    with pytest.raises(LookupError):
        residency.programs_by_limit(kernel("gfx1030"))


def test_programs_by_limit_without_rules():
    """A GPU of a third vendor gets no answer by mistake."""
    shared = {"shared_per_sm": 1, "shared_per_program": 1, "shared_granularity": 1}
    names = {"vendor": "intel", "backend": "xpu", "target": "pvc", "product": "Max"}
    other = Gpu(
        **names, architecture="pvc", num_sms=1, warp_size=16, **shared,
        prefetches_to_shared_memory=False,
    )  # fmt: skip
    with pytest.raises(TypeError):
        residency.programs_by_limit(kernel("pvc"), other)


@pytest.mark.parametrize(
    ("one", "binding", "resident", "processors", "gpu"),
    [
        pytest.param(kernel("sm_90", registers=255), "registers", 2, 132, "H200", id="registers"),
        pytest.param(kernel("sm_90", shared_bytes=50000), "shared", 4, 132, "H200", id="shared"),
        pytest.param(kernel("sm_90"), "registers", 16, 132, "H200", id="the-first-of-equals"),
        pytest.param(kernel("sm_120", 1, registers=8), "blocks", 24, 170, "RTX 5090", id="blocks"),
        pytest.param(
            kernel("sm_90", 16, registers=255), "registers", 0, 132, "H200", id="none-fits"
        ),
        pytest.param(kernel("gfx942", 16, allocated_vgprs=64), "vgprs", 2, 304, "MI300X", id="amd"),
        pytest.param(
            kernel("gfx1100", 1, allocated_vgprs=24), "waves", 64, 48, "RX 7900 XTX", id="rdna"
        ),
    ],
)
def test_report(one, binding, resident, processors, gpu):
    report = residency.report(one)
    assert report == {
        "kernel": "k",
        "target": one.target,
        "gpu": gpu,
        "num_warps": one.num_warps,
        "limits": residency.programs_by_limit(one),
        "binding": binding,
        "resident": resident,
        "processors": processors,
        "programs": resident * processors,
    }
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize(
    ("target", "product"),
    [("sm_90", "H200"), ("h100", "H100"), (find_gpu("MI300X"), "MI300X")],
    ids=["target", "product", "gpu"],
)
def test_occupancy_compiles_for_a_gpu(target, product):
    pytest.importorskip("triton")
    from memtraffic.kernels.softmax import masked

    x = torch.empty(8, 1000, device=runtime.device())
    [report] = residency.occupancy(masked.softmax, target, x, num_warps=16)
    gpu = find_gpu(product)
    assert (report["gpu"], report["target"], report["num_warps"]) == (product, gpu.target, 16)
    slots = {"nvidia": ("warps", 4), "amd": ("waves", 2)}[gpu.vendor]  # of 64 or 32 waves
    assert report["limits"][slots[0]] == slots[1] == report["resident"]


def test_occupancy_of_an_unknown_gpu():
    with pytest.raises(LookupError):
        residency.occupancy(lambda x: x, "gfx1030", torch.empty(1, 1))


@pytest.mark.parametrize("target", TARGETS)
def test_resident_programs_on_each_target(target):
    small = {"registers": 16, "allocated_vgprs": 16, "allocated_sgprs": 16}
    assert residency.resident_programs(kernel(target, 1, **small)) >= 16
