import functools
import importlib
import re
from dataclasses import asdict, replace

import pytest
import torch

from memtraffic import device
from memtraffic.errors import CompileError, NoGpuError, NoKernelError
from memtraffic.gpus import TARGETS, find_gpu

pytest.importorskip("triton", reason="Triton is not installed")

import kernels
import sector_kernels
import triton.language as tl
from blocked_kernels import matmul

from memtraffic.compile import assembly, capture_launches, compile_launches, resources, worker
from memtraffic.compile.compiler import _unlaunchable
from memtraffic.compile.launches import Launch
from memtraffic.kernels.softmax import fused, masked, naive, persistent, tiled
from memtraffic.residency import Resources, amd


def empty(m, n, dtype=torch.float32):
    return torch.empty(m, n, dtype=dtype, device=device.default())


FEW = ("sm_75", "sm_90", "gfx942", "gfx1100")  # what is compiled for all targets is slow
OTHERS = tuple(target for target in TARGETS if target not in FEW)


@functools.cache
def fused_on(*targets):
    """The resources of the fused kernel for a row of 4096 columns, by target."""
    [launch] = capture_launches(fused.softmax, empty(1, 4096))
    compiled = compile_launches([(launch, target) for target in targets])
    return dict(zip(targets, compiled, strict=True))


@pytest.mark.parametrize(
    "target", [*FEW, *(pytest.param(target, marks=pytest.mark.slow) for target in OTHERS)]
)
def test_resources_of_the_fused_kernel(target):
    kernel = fused_on(*(FEW if target in FEW else OTHERS))[target]
    gpu = find_gpu(target)
    assert (kernel.kernel, kernel.target) == ("_softmax_fused_kernel", target)
    assert kernel.num_warps == 8
    assert kernel.spill_bytes == kernel.static_shared_bytes == 0  # Triton's are dynamic
    assert kernel.shared_bytes == 8 * 4  # a number for each warp
    assert 8 <= kernel.registers <= 255
    lane = 4096 // (8 * gpu.warp_size)
    assert kernel.load_bits == kernel.store_bits == {128: lane * 32 // 128}
    assert kernel.schedule == ("load", "reduce", "exp", "reduce", "store")
    assert list(kernel.instructions) == sorted(kernel.instructions)

    def calls(*names):
        return sum(n for name, n in kernel.instructions.items() if name.startswith(names))

    assert calls("LDG.E", "buffer_load", "global_load") == sum(kernel.load_bits.values())
    assert calls("MUFU.EX2", "v_exp_f32") == lane
    if gpu.vendor == "nvidia":
        assert (kernel.layout.lanes, kernel.layout.warps) == ((32,), (8,))
        assert not any((kernel.vgprs, kernel.sgprs, kernel.allocated_vgprs, kernel.llvm_waves))
    else:
        assert kernel.allocated_vgprs >= kernel.registers >= kernel.vgprs > 0
        assert kernel.agprs == 0  # nothing is multiplied
        assert 112 >= kernel.allocated_sgprs >= kernel.sgprs >= 8
        assert waves_by_our_rules(kernel) == kernel.llvm_waves


def waves_by_our_rules(kernel):
    """Waves per SIMD of what a wave is given, which LLVM counts, too."""
    given = kernel.allocated_vgprs, 0, kernel.allocated_sgprs
    return min(amd.waves_by_limit(*given, find_gpu(kernel.target)).values())


@pytest.mark.slow
@pytest.mark.parametrize("target", FEW)
def test_resources_of_rungs_of_any_width(target):
    for softmax in (masked.softmax, persistent.softmax):
        [kernel] = resources(softmax, empty(64, 781), target=target, num_warps=8)
        assert kernel.spill_bytes == 0 and kernel.load_bits and kernel.store_bits


# ---- accesses


@pytest.mark.slow
def test_resources_on_sm_90():
    """What decides how wide an access is."""
    given = empty(1, 1024), empty(1, 2048)[:, ::2], empty(1, 1028)[:, 1:1025]
    contiguous, strided, unaligned = (
        resources(kernels.strided, x, target="sm_90")[0] for x in given
    )
    assert {*contiguous.load_bits} == {128}
    assert max(*strided.load_bits, *unaligned.load_bits) < 128
    assert strided.store_bits == contiguous.store_bits == {128: 2}
    [half] = resources(fused.softmax, empty(1, 4096, torch.float16), target="sm_90")
    assert half.load_bits == {128: 4096 // 256 * 16 // 128}


def test_resources_of_a_kernel_that_spills():
    """A lane holds 64 of the row's elements: too many for 32 registers."""
    few = functools.partial(kernels.scaled, num_warps=1, maxnreg=32)
    [spilling] = resources(few, empty(1, 2048), target="sm_90")
    assert spilling.registers <= 32
    assert spilling.spill_bytes >= 4 * (64 - 32)  # 4 bytes per element without a register


@pytest.mark.parametrize(("waves", "most"), [(2, 256), (8, 64)])
def test_resources_waves_per_eu_limits_registers(waves, most):
    options = {"num_warps": 4, "waves_per_eu": waves}
    [kernel] = resources(fused.softmax, empty(1, 16384), target="gfx942", **options)
    assert kernel.registers <= most
    assert (kernel.registers == 64) == (kernel.spill_bytes > 0) == (waves == 8)
    assert kernel.llvm_waves == waves == waves_by_our_rules(kernel)
    assert (kernel.allocated_vgprs > kernel.registers) == (waves == 2)  # than it uses


def test_resources_amd_addresses_by_buffer_up_to_2_gib():
    """As in a launch, AMD's compiler is told whether 32 bits reach all of a tensor."""
    [small] = capture_launches(tiled.softmax, empty(1, 4096))
    aligned = {path: [["tt.divisibility", 16]] for path in small.attributes}
    large = replace(small, attributes=aligned)
    found = compile_launches([(small, "gfx942"), (large, "gfx942")])
    for kernel, by, not_by in zip(found, ("buffer", "global"), ("global", "buffer"), strict=True):
        assert kernel.instructions[f"{by}_load_dwordx4"] == kernel.load_bits[128]
        assert f"{not_by}_load_dwordx4" not in kernel.instructions
        assert kernel.layout is not None
        assert kernel.schedule == ("load", "reduce", "exp", "reduce", "store")


# ---- what else a kernel uses


def test_resources_as_text_and_dict():
    kernel = Resources("k", "sm_90", 4, 32, 8, 64, {128: 2, 32: 1}, {})
    assert str(kernel) == (
        "k for sm_90, 4 warps: 32 registers, 8 bytes spilled, 64 bytes shared; "
        "loads: 1 of 32 bits + 2 of 128 bits; stores: none"
    )
    assert "; cannot be launched: why" in str(replace(kernel, unlaunchable="why"))
    assert kernel.num_ctas == 1
    assert not any([*asdict(replace(kernel, num_ctas=0)).values()][7:])  # what it was not given


# ---- options


@pytest.mark.slow
def test_resources_and_assembly_take_options():
    x, many = empty(1, 4096), fused_on(*FEW)["gfx942"]
    [few] = resources(fused.softmax, x, target="gfx942", num_warps=4)
    assert (few.num_warps, many.num_warps) == (4, 8)
    assert few.load_bits[128] == 2 * many.load_bits[128]
    [text] = assembly(fused.softmax, x, target="gfx942", keep="_load_dwordx4", num_warps=4)
    assert len(text.splitlines()) == few.load_bits[128]
    [wide] = resources(fused.softmax, x, target="gfx942", num_warps=32)  # of 64 threads
    assert wide.unlaunchable == "2048 threads per program, and gfx942 takes 1024"
    [one] = resources(persistent.softmax, empty(4, 4096), target="sm_90", num_stages=2)
    assert one.schedule.count("copy") == 2  # a function that takes them is given them
    for stages, copies in ((1, 0), (3, 6)):  # and the compiler those of any other
        product = matmul(64, 64, 64), "M,K K,N", (256, 256, 256)
        [one] = resources(*product, dtype="float16", target="sm_90", num_stages=stages)
        assert one.schedule.count("copy") == copies


def test_resources_of_inputs_and_of_a_product():
    """An option that is None is not given."""
    options = dict.fromkeys(("num_warps", "num_stages", "waves_per_eu"))
    found = resources(fused.softmax, "M,4096", (1,), target="h200", **options)
    assert found == [fused_on(*FEW)["sm_90"]]


@pytest.mark.parametrize(
    ("fn", "target", "options", "error", "said"),
    [
        (fused.softmax, "sm_90", {"waves_per_eu": 2}, ValueError, "waves_per_eu"),
        (fused.softmax, "gfx942", {"waves_per_eu": 9}, ValueError, "is 9: .* gfx942 holds 8"),
        (functools.partial(kernels.scaled, maxnreg=32), "gfx942", {}, ValueError, "maxnreg"),
        (fused.softmax, "sm_90", {"depth": 2}, TypeError, "depth"),
        (kernels.never_compiles, "sm_90", {}, CompileError, "_kernel does not compile for sm_90"),
        (naive.softmax, "sm_90", {}, NoKernelError, r"naive\.softmax launched no Triton kernel"),
    ],
)
def test_resources_of_what_does_not_compile(fn, target, options, error, said):
    """Not with an option that no compiler of the target takes, nor at all."""
    with pytest.raises(error, match=said):
        resources(fn, empty(1, 64), target=target, **options)


# ---- targets and errors


def test_compile_launches_starts_no_process_for_no_work(monkeypatch):
    monkeypatch.setattr(worker, "WORKER", None)
    assert compile_launches([]) == []


@pytest.mark.skipif(device.HAS_GPU, reason="that one is asked for")
def test_resources_without_a_gpu():
    """By default it is asked for; what a function does without one may be another thing."""
    with pytest.raises(NoGpuError, match="GPU"):
        resources(fused.softmax, empty(1, 64))
    with pytest.raises(NoKernelError, match=r"stand_in\(\)"):
        resources(naive.softmax, empty(1, 64), target="sm_90")


@pytest.mark.parametrize(
    ("module", "name"),
    [("__main__", "_my_kernel"), ("kernels", "function.<locals>._my_kernel")],
)
def test_compile_launches_of_a_kernel_that_no_other_process_can_import(monkeypatch, module, name):
    monkeypatch.setattr(device, "INTERPRETED", True)
    cell = Launch(module, name, {}, {}, {}, {"num_warps": 4})
    with pytest.raises(CompileError, match="_my_kernel"):
        compile_launches([(cell, "sm_90")])
    monkeypatch.setattr(sector_kernels._half.fn, "__module__", "__main__")
    with pytest.raises(CompileError, match="_half is defined in a cell or a script: put it"):
        resources(lambda x: sector_kernels._half[(1,)](x), "4,", target="sm_90")


def test_resources_of_a_kernel_that_is_defined_in_a_function():
    """With what it finds there, in each of its configurations."""
    fns = [sector_kernels.defined_inside(256, dtype) for dtype in (tl.float32, tl.float16)]
    for fn in fns:
        found = resources(fn, "256,", target="sm_90")
        assert [kernel.load_bits for kernel in found] == [{64: 1}, {128: 2}]
    plain, rounded = ({*assembly(fn, "256,", target="sm_90", keep="F2F")} for fn in fns)
    assert plain == {""} and "" not in rounded


KERNEL = """
import triton
import triton.language as tl
from {package}.constants import FACTOR

@triton.jit
def _kernel(x_ptr, FACTOR: tl.constexpr):
    tl.store(x_ptr, FACTOR + 1)

def launch(x):
    _kernel[(1,)](x, FACTOR=FACTOR)
"""


@pytest.mark.parametrize("file", ["02-kernel.py", "__init__.py"])  # as of Triton's tutorials
def test_resources_of_a_kernel_that_is_found_by_its_folder(tmp_path, monkeypatch, file):
    """Another process finds it where this process did, although that is no longer on the path."""
    package = tmp_path / f"package_of_{len(file)}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "constants.py").write_text("FACTOR = 1000\n")
    (package / file).write_text(KERNEL.format(package=package.name))
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        name = "" if file == "__init__.py" else ".02-kernel"
        module = importlib.import_module(package.name + name)
    [text] = assembly(module.launch, empty(1, 4), target="gfx942")
    assert "0x447a4000" in text  # the float 1001


# ---- assembly


@pytest.mark.parametrize(
    ("target", "keep", "first", "end"),
    [
        ("sm_90", "LDG", "LDG.E.128 ", "EXIT"),
        ("gfx942", "_load_dwordx4", "buffer_load_dwordx4 ", "s_endpgm"),
    ],
)
def test_assembly(target, keep, first, end):
    """The whole code, an instruction a line, and the lines that are kept."""
    x = empty(1, 4096)
    [text], [kept] = (assembly(fused.softmax, x, target=target, keep=it) for it in ("", keep))
    lines = text.splitlines()
    assert len(lines) == sum(fused_on(*FEW)[target].instructions.values())
    assert not [it for it in lines if ";" in it or "/*" in it or it != it.strip()]
    assert sum(line.startswith(end) for line in lines) == 1
    assert kept.splitlines() == [line for line in lines if keep in line]
    assert all(line.startswith(first) for line in kept.splitlines()), kept


# ---- launches that no GPU makes


@pytest.mark.parametrize(
    ("target", "threads", "shared", "message"),
    [
        ("sm_90", 1024, 227 * 1024, ""),
        ("gfx942", 64, 64 * 1024 + 1, "65537 bytes shared per program, and gfx942 has 65536"),
        ("sm_75", 2048, 64 * 1024 + 1, "2048 threads per program, .*; 65537 bytes shared .*"),
    ],
)
def test_unlaunchable(target, threads, shared, message):
    assert re.fullmatch(message, _unlaunchable(threads, shared, find_gpu(target)))
