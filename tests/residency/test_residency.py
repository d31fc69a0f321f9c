"""The module around the rules of each vendor."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from memtraffic import device, residency
from memtraffic.compile import occupancy
from memtraffic.gpus import find_gpu


def kernel(target, num_warps=4, **used):
    """Resources of a kernel for `target` that needs little beyond `used`."""
    used = {"registers": 32, "spill_bytes": 0, "shared_bytes": 0} | used
    return residency.Resources("k", target, num_warps, **used)


def test_programs_by_limit_of_another_gpu():
    one, turing = kernel("sm_90"), find_gpu("sm_75")
    assert (residency.resident_programs(one), residency.resident_programs(one, turing)) == (16, 8)
    report = residency.Occupancy.of(one, turing)
    assert (report.resident, report.processors, report.limits["blocks"]) == (8, 40, 16)


def test_programs_by_limit_without_rules():
    """A target that is not in the table, and a GPU of a third vendor, get no answer by mistake."""
    with pytest.raises(LookupError):
        residency.programs_by_limit(kernel("gfx1030"))
    with pytest.raises(LookupError):
        residency.programs_by_limit(kernel("pvc"), SimpleNamespace(vendor="intel"))


UNUSED = {"registers": 500, "vgprs": 500, "agprs": 500, "sgprs": 500}


@pytest.mark.parametrize(
    ("one", "gpu", "binding", "limits"),
    [
        pytest.param(
            kernel("sm_90", **UNUSED | {"registers": 69, "shared_bytes": 32784}), "H200", "shared",
            {"registers": 7, "shared": 6, "warps": 16, "blocks": 32}, id="nvidia",
        ),
        pytest.param(
            kernel("sm_90"), "H200", "registers",
            {"registers": 16, "shared": 228, "warps": 16, "blocks": 32}, id="the-first-of-equals",
        ),
        pytest.param(
            kernel("sm_90", 16, registers=255), "H200", "registers",
            {"registers": 0, "shared": 228, "warps": 4, "blocks": 32}, id="none-fits",
        ),
        pytest.param(
            kernel("gfx942", shared_bytes=20000, allocated_vgprs=129, allocated_sgprs=90, **UNUSED),
            "MI300X", "vgprs", {"vgprs": 3, "waves": 8, "sgprs": 8, "lds": 3, "groups": 16},
            id="amd-by-what-a-wave-is-given",
        ),
    ],
)  # fmt: skip
def test_occupancy_of(one, gpu, binding, limits):
    report, sms, resident = residency.Occupancy.of(one), find_gpu(gpu).num_sms, limits[binding]
    assert residency.programs_by_limit(one) == report.limits == limits
    assert residency.resident_programs(one) == report.resident == resident == min(limits.values())
    assert (report.kernel, report.target, report.gpu) == ("k", one.target, gpu)
    assert (report.binding, report.processors, report.programs) == (binding, sms, resident * sms)
    assert json.loads(json.dumps(asdict(report))) == asdict(report)


def test_occupancy_compiles_for_a_gpu():
    """Of a product, not of the target that others share."""
    pytest.importorskip("triton")
    from memtraffic.kernels.softmax import masked

    x, gpu = torch.empty(8, 1000, device=device.default()), find_gpu("H100")
    [report] = occupancy(masked.softmax, x, target=gpu, num_warps=16)
    assert (report.gpu, report.target, report.num_warps) == ("H100", gpu.target, 16)
    assert report.limits["warps"] == 4 == report.resident  # of 64 warps


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_a_program_of_two_thread_blocks_takes_the_places_of_two(num_ctas):
    pytest.importorskip("triton")
    from kernels import _masked_kernel

    def clustered(x):
        _masked_kernel[(8,)](x, x, 1024, 1024, 1024, num_warps=16, num_ctas=num_ctas)

    [report] = occupancy(clustered, torch.empty(8, 1024, device=device.default()), target="h200")
    assert report.programs == 4 * report.processors // num_ctas


LLVM_SAYS = """
; codeLenInByte = 20
; TotalNumSgprs: 22
; NumVgprs: 10
; NumAgprs: 40
; TotalNumVgprs: 52
; ScratchSize: 16
; LDSByteSize: 1000 bytes/workgroup (compile time only)
; NumSGPRsForWavesPerEU: 24
; NumVGPRsForWavesPerEU: 60
; Occupancy: 8
; COMPUTE_PGM_RSRC2:SCRATCH_EN: 1
"""


def test_loaded_resources():
    """On NVIDIA the driver says what a kernel uses; on AMD its assembly does."""
    compiled = SimpleNamespace(name="k", metadata=SimpleNamespace(shared=48, num_warps=8))
    compiled._init_handles, compiled.n_regs, compiled.n_spills = lambda: None, 40, 2
    compiled.asm = {"amdgcn": LLVM_SAYS}
    nvidia = residency.loaded_resources(compiled, find_gpu("sm_90"))
    assert nvidia == residency.Resources("k", "sm_90", 8, 40, 8, 48)
    amd = residency.loaded_resources(compiled, find_gpu("gfx942"))
    counted = {"vgprs": 10, "agprs": 40, "sgprs": 22, "static_shared_bytes": 1000}
    given = {"allocated_vgprs": 60, "allocated_sgprs": 24, "llvm_waves": 8}
    assert amd == residency.Resources("k", "gfx942", 8, 52, 16, 48, **counted, **given)
