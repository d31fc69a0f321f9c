import functools
import importlib
import re
import sys
from dataclasses import replace

import pytest
import torch

from memtraffic import runtime
from memtraffic.errors import CompileError, NoGpuError, NoKernelError, UnknownGpuError
from memtraffic.gpus import GPUS, TARGETS, find_gpu

pytest.importorskip("triton", reason="Triton is not installed")

import kernels

from memtraffic.compile import (
    Launch,
    assembly,
    capture_launches,
    compile_launches,
    occupancy,
    resources,
    worker,
)
from memtraffic.compile.compiler import _unlaunchable
from memtraffic.kernels.softmax import fused, masked, naive, persistent, tiled
from memtraffic.residency import Resources

NVIDIA = [target for target, gpu in TARGETS.items() if gpu.vendor == "nvidia"]
AMD = [target for target, gpu in TARGETS.items() if gpu.vendor == "amd"]
SOFTMAXES = {
    "fused": (fused.softmax, 1024),
    "masked": (masked.softmax, 781),
    "masked-two-blocks": (masked.softmax_two_blocks, 781),
    "tiled": (tiled.softmax, 781),
    "persistent": (persistent.softmax, 781),
}


def empty(m, n, dtype=torch.float32):
    return torch.empty(m, n, dtype=dtype, device=runtime.device())


@pytest.fixture(scope="module")
def fused_on():
    """The resources of the fused kernel for a row of 4096 columns, by target."""
    [launch] = capture_launches(fused.softmax, empty(1, 4096))
    compiled = compile_launches([(launch, target) for target in TARGETS])
    return dict(zip(TARGETS, compiled, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_resources_fused(fused_on, target):
    kernel = fused_on[target]
    assert (kernel.kernel, kernel.target) == ("_softmax_fused_kernel", target)
    assert kernel.num_warps == 8
    assert kernel.spill_bytes == 0
    assert 8 <= kernel.registers <= 255
    assert kernel.shared_bytes > 0
    assert kernel.load_bits and kernel.store_bits


@pytest.mark.slow
@pytest.mark.parametrize("rung", SOFTMAXES)
def test_resources_of_each_rung_on_each_target(rung):
    softmax, n = SOFTMAXES[rung]
    jobs = []
    for target, gpu in TARGETS.items():
        [launch] = capture_launches(softmax, empty(64, n), gpu=gpu)
        jobs.append((launch, target))
    for kernel, (_, target) in zip(compile_launches(jobs), jobs, strict=True):
        assert kernel.target == target
        assert kernel.spill_bytes == 0
        assert 8 <= kernel.registers <= 255
        assert kernel.load_bits and kernel.store_bits


# ---- spills


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
def test_resources_of_a_kernel_that_spills_on_nvidia(target):
    """A lane holds 64 of the row's elements: too many for 32 registers."""
    row, launches = empty(1, 2048), []
    for options in ({}, {"maxnreg": 32}):
        launches += capture_launches(functools.partial(kernels.scaled, num_warps=1, **options), row)
    roomy, spilling = compile_launches([(launch, target) for launch in launches])
    assert spilling.registers <= 32 < roomy.registers
    assert roomy.spill_bytes == 0
    assert spilling.spill_bytes >= 4 * (64 - 32)  # 4 bytes per element without a register


@pytest.mark.slow
def test_resources_of_a_row_that_is_too_wide_for_a_warp():
    [kernel] = resources(kernels.scaled, empty(1, 8192), target="sm_90", num_warps=1)
    assert kernel.registers == 255
    assert kernel.spill_bytes > 0


@pytest.mark.parametrize(("waves", "most"), [(2, 256), (8, 64)], ids=lambda it: f"{it}")
def test_resources_waves_per_eu_limits_registers(waves, most):
    options = {"num_warps": 4, "waves_per_eu": waves}
    [kernel] = resources(fused.softmax, empty(1, 16384), target="gfx942", **options)
    assert kernel.registers <= most
    assert (kernel.registers == 64) == (kernel.spill_bytes > 0) == (waves == 8)
    assert kernel.llvm_waves == waves
    assert kernel.registers <= kernel.allocated_vgprs <= most
    assert 512 // (-(-kernel.allocated_vgprs // 8) * 8) == waves  # of 512, in eights


# ---- accesses


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx90a", "gfx942"])
def test_resources_a_lane_moves_its_elements_in_128_bits_each(fused_on, target):
    threads = 8 * find_gpu(target).warp_size
    expected = {128: 4096 * 32 // 128 // threads}
    assert fused_on[target].load_bits == expected
    assert fused_on[target].store_bits == expected


@pytest.fixture(scope="module")
def on_sm_90():
    """The resources on sm_90 of several launches, by name."""
    made = {
        "contiguous": capture_launches(kernels.strided, empty(1, 1024)),
        "strided": capture_launches(kernels.strided, empty(1, 2048)[:, ::2]),
        "unaligned": capture_launches(kernels.strided, empty(1, 1028)[:, 1:1025]),
        "half": capture_launches(fused.softmax, empty(1, 4096, torch.float16)),
        "masked": capture_launches(kernels.masked, empty(2, 781)),
        "tuned": capture_launches(kernels.tuned, empty(2, 781)),
        "three-passes": capture_launches(kernels.three_passes, empty(8192, 8)),
    }
    jobs = [(launch, "sm_90") for several in made.values() for launch in several]
    found = iter(compile_launches(jobs))
    return {name: [next(found) for _ in several] for name, several in made.items()}


def widest(kernel):
    return max(kernel.load_bits)


@pytest.mark.slow
def test_resources_strided_loads_are_narrow(on_sm_90):
    [contiguous], [strided] = on_sm_90["contiguous"], on_sm_90["strided"]
    assert widest(contiguous) == 128
    assert widest(strided) < 128
    assert strided.store_bits == contiguous.store_bits == {128: 2}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unaligned", "masked"])
def test_resources_loads_are_narrow_where_16_does_not_divide(on_sm_90, case):
    [kernel] = on_sm_90[case]
    assert widest(kernel) < 128


@pytest.mark.slow
def test_resources_half_the_bytes_take_half_the_loads(on_sm_90, fused_on):
    [half] = on_sm_90["half"]
    assert half.load_bits == {128: fused_on["sm_90"].load_bits[128] // 2}


@pytest.mark.slow
def test_resources_of_each_configuration(on_sm_90):
    assert [kernel.num_warps for kernel in on_sm_90["tuned"]] == [4, 8]


@pytest.mark.slow
def test_resources_of_a_kernel_that_calls_others_and_loops(on_sm_90):
    [kernel] = on_sm_90["three-passes"]
    assert kernel.kernel == "_three_passes_kernel"
    assert sum(kernel.load_bits.values()) >= 3
    assert [it for it in kernel.schedule if it in ("for", "end")] == ["for", "end"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_resources_widths_are_those_of_the_instructions(fused_on, target):
    kernel = fused_on[target]
    names = ("LDG.E", "buffer_load", "global_load")
    loads = (count for name, count in kernel.instructions.items() if name.startswith(names))
    assert sum(loads) == sum(kernel.load_bits.values()) > 0
    assert list(kernel.instructions) == sorted(kernel.instructions)


def test_resources_amd_addresses_by_buffer_up_to_2_gib():
    """As in a launch, AMD's compiler is told whether 32 bits reach all of a tensor."""
    [small] = capture_launches(tiled.softmax, empty(1, 4096))
    told = small.attributes
    assert ["tt.pointer_range", 32] in told[0,] and ["tt.pointer_range", 32] in told[3,]
    aligned = {path: [["tt.divisibility", 16]] for path in told}
    jobs = [(small, "gfx942"), (replace(small, attributes=aligned), "gfx942")]
    by_buffer, by_address = compile_launches(jobs)
    assert by_buffer.instructions["buffer_load_dwordx4"] == by_buffer.load_bits[128]
    assert "global_load_dwordx4" not in by_buffer.instructions
    assert by_address.instructions["global_load_dwordx4"] == by_address.load_bits[128]
    assert "buffer_load_dwordx4" not in by_address.instructions
    for kernel in (by_buffer, by_address):
        assert kernel.layout is not None
        assert kernel.schedule == ("load", "reduce", "exp", "reduce", "store")


# ---- what else a kernel uses


@pytest.mark.parametrize("target", NVIDIA)
def test_resources_nvidia_has_none_of_amds_registers(fused_on, target):
    kernel = fused_on[target]
    assert kernel.static_shared_bytes == 0  # Triton's are dynamic
    assert kernel.shared_bytes == 8 * 4  # a number for each warp
    used = (kernel.vgprs, kernel.agprs, kernel.sgprs, kernel.llvm_waves)
    assert used == (0, 0, 0, 0)
    assert (kernel.allocated_vgprs, kernel.allocated_sgprs) == (0, 0)
    assert (kernel.layout.lanes, kernel.layout.warps) == ((32,), (8,))
    assert kernel.schedule == ("load", "reduce", "exp", "reduce", "store")


@pytest.mark.parametrize("target", AMD)
def test_resources_amd_has_registers_of_three_kinds(fused_on, target):
    kernel = fused_on[target]
    assert kernel.registers >= kernel.vgprs > 0
    assert kernel.agprs == 0  # nothing is multiplied
    assert 8 <= kernel.sgprs <= 112
    assert kernel.allocated_vgprs >= kernel.registers
    assert 112 >= kernel.allocated_sgprs >= kernel.sgprs
    assert 1 <= kernel.llvm_waves <= 16
    assert (kernel.static_shared_bytes, kernel.shared_bytes) == (0, 32)


@pytest.mark.parametrize(("target", "name"), [("sm_90", "MUFU.EX2"), ("gfx942", "v_exp_f32")])
def test_resources_a_lane_calls_exp_once_per_element(fused_on, target, name):
    found = fused_on[target].instructions
    calls = sum(count for key, count in found.items() if key.startswith(name))
    assert calls == 4096 // (8 * find_gpu(target).warp_size)


def test_resources_as_text_and_dict():
    kernel = Resources("k", "sm_90", 4, 32, 8, 64, {128: 2, 32: 1}, {})
    assert str(kernel) == (
        "k for sm_90, 4 warps: 32 registers, 8 bytes spilled, 64 bytes shared; "
        "loads: 1 of 32 bits + 2 of 128 bits; stores: none"
    )
    assert kernel.as_dict()["load_bits"] == {128: 2, 32: 1}
    assert not any(list(kernel.as_dict().values())[7:])  # what it was not given


# ---- options


def test_resources_num_warps(fused_on):
    [few] = resources(fused.softmax, empty(1, 4096), target="gfx942", num_warps=4)
    many = fused_on["gfx942"]
    assert (few.num_warps, many.num_warps) == (4, 8)
    assert few.registers > many.registers
    assert few.load_bits[128] == 2 * many.load_bits[128]


@pytest.mark.slow
def test_resources_num_stages_are_copies_in_flight():
    x = empty(512, 64, torch.float16)
    [one] = resources(kernels.products, x, target="sm_90", num_stages=1)
    [three] = resources(kernels.products, x, target="sm_90", num_stages=3)
    assert [it.schedule.count("copy") for it in (one, three)] == [0, 3]
    assert three.shared_bytes > one.shared_bytes


@pytest.mark.slow
def test_resources_num_stages_reach_a_function_that_takes_them():
    [one] = resources(persistent.softmax, empty(4, 4096), target="sm_90", num_stages=1)
    [two] = resources(persistent.softmax, empty(4, 4096), target="sm_90", num_stages=2)
    assert [it.schedule.count("copy") for it in (one, two)] == [0, 2]


@pytest.mark.parametrize("ask", [resources, assembly])
def test_resources_waves_per_eu_is_not_an_option_on_nvidia(ask):
    with pytest.raises(ValueError, match="waves_per_eu"):
        ask(fused.softmax, empty(1, 4096), target="sm_90", waves_per_eu=2)


def test_resources_maxnreg_is_not_an_option_on_amd():
    with pytest.raises(ValueError, match="maxnreg"):
        resources(functools.partial(kernels.scaled, maxnreg=32), empty(1, 64), target="gfx942")


@pytest.mark.parametrize("ask", [resources, assembly])
def test_resources_unknown_option(ask):
    with pytest.raises(TypeError, match="depth"):
        ask(fused.softmax, empty(1, 64), target="sm_90", depth=2)


def test_resources_of_an_option_that_is_none(fused_on):
    options = dict.fromkeys(("num_warps", "num_stages", "waves_per_eu"))
    assert resources(fused.softmax, empty(1, 4096), target="sm_90", **options) == [
        fused_on["sm_90"]
    ]


# ---- targets and errors


@pytest.mark.parametrize("target", ["h200", find_gpu("H200")], ids=["product", "gpu"])
def test_resources_of_a_product_or_a_gpu(fused_on, target):
    assert resources(fused.softmax, empty(1, 4096), target=target) == [fused_on["sm_90"]]
    assert find_gpu("H200") in GPUS


@pytest.mark.parametrize("ask", [resources, assembly])
def test_resources_unknown_target(ask):
    with pytest.raises(UnknownGpuError, match="sm_91"):
        ask(fused.softmax, empty(1, 64), target="sm_91")


def test_compile_launches_unknown_target():
    with pytest.raises(UnknownGpuError, match="sm_999"):
        compile_launches([(Launch("kernels", "_k", {}, {}, {}, {}), "sm_999")])


def test_compile_launches_starts_no_process_for_no_work(monkeypatch):
    monkeypatch.setattr(worker, "WORKER", None)
    assert compile_launches([]) == []


@pytest.mark.parametrize("ask", [resources, occupancy, assembly])
def test_resources_of_a_function_without_a_kernel(ask):
    """What a function does without a GPU may be another thing: the message says how to get one."""
    with pytest.raises(NoKernelError, match=r"naive\.softmax launched no Triton kernel") as caught:
        ask(naive.softmax, empty(1, 64), target="sm_90")
    assert isinstance(caught.value, LookupError)
    assert ("stand_in()" in str(caught.value)) is not runtime.HAS_GPU


@pytest.mark.skipif(runtime.HAS_GPU, reason="that one is asked for")
def test_resources_without_a_target_is_for_the_gpu_that_is_here():
    with pytest.raises(NoGpuError, match="GPU"):
        resources(fused.softmax, empty(1, 64))


def test_resources_of_a_kernel_that_does_not_compile():
    with pytest.raises(CompileError, match=r"_never_compiles_kernel does not compile for sm_90"):
        resources(kernels.never_compiles, empty(1, 4), target="sm_90")


@pytest.mark.parametrize(
    ("module", "name"),
    [("__main__", "_my_kernel"), ("kernels", "function.<locals>._my_kernel")],
)
def test_compile_launches_of_a_kernel_that_no_other_process_can_import(monkeypatch, module, name):
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    cell = Launch(module, name, {}, {}, {}, {"num_warps": 4})
    with pytest.raises(CompileError, match="_my_kernel"):
        compile_launches([(cell, "sm_90")])


KERNEL = """
import triton
import triton.language as tl
from {package}.constants import FACTOR

@triton.jit
def _kernel(x_ptr, FACTOR: tl.constexpr):
    tl.store(x_ptr, FACTOR + {more})

def launch(x):
    _kernel[(1,)](x, FACTOR=FACTOR)
"""


@pytest.mark.parametrize("file", ["kernel.py", "__init__.py"])
def test_resources_of_a_kernel_that_is_edited(tmp_path, monkeypatch, file):
    """Another process compiles what is on disk now, and finds it where this process did."""
    package = tmp_path / f"package_of_{len(file)}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "constants.py").write_text("FACTOR = 1000\n")
    name, found = package.name, []
    for more in (1, 100):
        (package / file).write_text(KERNEL.format(package=package.name, more=more))
        for module in [it for it in sys.modules if it.split(".")[0] == name]:
            del sys.modules[module]
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            module = importlib.import_module(name if file == "__init__.py" else f"{name}.kernel")
        found += assembly(module.launch, empty(1, 4), target="gfx942")
    assert "0x447a4000" in found[0]  # the float 1001
    assert "0x44898000" in found[1]  # the float 1100


# ---- assembly


@pytest.mark.parametrize(
    ("target", "keep", "first"),
    [("sm_90", "LDG", "LDG.E.128 "), ("gfx942", "_load_dwordx4", "buffer_load_dwordx4 ")],
)
def test_assembly_keep(fused_on, target, keep, first):
    [text] = assembly(fused.softmax, empty(1, 4096), target=target, keep=keep)
    lines = text.splitlines()
    assert all(line.startswith(first) for line in lines), lines
    assert {128: len(lines)} == fused_on[target].load_bits


@pytest.mark.slow
@pytest.mark.parametrize(("target", "end"), [("sm_90", "EXIT"), ("gfx942", "s_endpgm")])
def test_assembly_is_the_whole_code(fused_on, target, end):
    [text] = assembly(fused.softmax, empty(1, 4096), target=target)
    lines = text.splitlines()
    assert len(lines) == sum(fused_on[target].instructions.values())
    assert not [it for it in lines if ";" in it or "/*" in it or it != it.strip()]
    assert sum(line.startswith(end) for line in lines) == 1


def test_assembly_takes_options():
    x, loads = empty(1, 4096), "_load_dwordx4"
    [few] = assembly(fused.softmax, x, target="gfx942", keep=loads, num_warps=4)
    assert len(few.splitlines()) == 4  # of 8 warps it would be 2


# ---- inputs, and launches that no GPU makes


def test_resources_of_inputs():
    by_tensor = resources(fused.softmax, empty(16, 4096), target="sm_90")
    assert resources(fused.softmax, "16,4096", target="sm_90") == by_tensor
    assert resources(fused.softmax, "M,4096", (16,), target="sm_90") == by_tensor
    with pytest.raises(ValueError, match="M"):
        resources(fused.softmax, "M,4096", target="sm_90")


@pytest.mark.slow
def test_resources_of_an_autograd_function_and_of_a_module():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return fused.softmax(x)

    class Layer(torch.nn.Module):
        def forward(self, x):
            return fused.softmax(x)

    for fn in (Function, Layer, Layer()):
        [kernel] = resources(fn, empty(16, 64), target="sm_90")
        assert kernel.kernel == "_softmax_fused_kernel"


@pytest.mark.parametrize(
    ("target", "threads", "shared", "message"),
    [
        ("sm_90", 1024, 227 * 1024, ""),
        ("sm_90", 2048, 0, "2048 threads per program, and sm_90 takes 1024"),
        ("gfx942", 64, 64 * 1024 + 1, "65537 bytes shared per program, and gfx942 has 65536"),
        ("sm_75", 2048, 64 * 1024 + 1, "2048 threads .*; 65537 bytes shared .* sm_75 has 65536"),
    ],
)
def test_unlaunchable(target, threads, shared, message):
    found = _unlaunchable(threads, shared, find_gpu(target))
    assert bool(found) == bool(message)
    assert re.fullmatch(message, found)


@pytest.mark.slow
def test_resources_say_that_a_kernel_cannot_be_launched():
    [kernel] = resources(fused.softmax, empty(16, 4096), target="sm_90", num_warps=64)
    assert kernel.unlaunchable.startswith("2048 threads per program")
    assert str(kernel).endswith(f"; cannot be launched: {kernel.unlaunchable}")
    [kernel] = resources(fused.softmax, empty(16, 4096), target="gfx942", num_warps=32)
    assert kernel.unlaunchable.startswith("2048 threads per program")  # a wave has 64
    [kernel] = resources(fused.softmax, empty(16, 4096), target="sm_90", num_warps=32)
    assert kernel.unlaunchable == "" and "launched" not in str(kernel)
