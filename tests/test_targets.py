import pytest
import torch

from memtraffic import machine, targets
from memtraffic.targets import (
    TARGETS,
    CompileError,
    Launch,
    Layout,
    Resources,
    amd_usage,
    assembly,
    compile_launches,
    launches,
    resources,
)

pytest.importorskip("triton", reason="Triton is not installed")

import kernels

from memtraffic.ladder import fused, naive, persistent, warps


def empty(m, n, dtype=torch.float32):
    return torch.empty(m, n, dtype=dtype, device=machine.device())


@pytest.fixture(scope="module")
def fused_on():
    """The resources of the fused kernel for a row of 4096 columns, by target."""
    [launch] = launches(fused.softmax, empty(1, 4096))
    return dict(
        zip(
            TARGETS,
            compile_launches([(launch, target) for target in TARGETS]),
            strict=True,
        )
    )


@pytest.mark.parametrize("target", TARGETS)
def test_fused_compiles_for_each_target(fused_on, target):
    kernel = fused_on[target]
    assert (kernel.kernel, kernel.target, kernel.num_warps) == (
        "_fused_kernel",
        target,
        8,
    )
    assert kernel.spill_bytes == 0
    assert 8 <= kernel.registers <= 255
    assert kernel.shared_bytes > 0
    assert kernel.load_bits and kernel.store_bits


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx90a", "gfx942"])
def test_a_thread_moves_its_16_elements_in_128_bits_each(fused_on, target):
    threads = 8 * TARGETS[target][2]
    expected = {128: 4096 * 32 // 128 // threads}
    assert fused_on[target].load_bits == expected
    assert fused_on[target].store_bits == expected


@pytest.fixture(scope="module")
def on_sm_90():
    """The resources on sm_90 of several launches, by name."""
    wide = empty(8192, 8)
    made = {
        "contiguous": launches(kernels.strided, empty(1, 1024)),
        "strided": launches(kernels.strided, empty(1, 2048)[:, ::2]),
        "unaligned": launches(kernels.strided, empty(1, 1028)[:, 1:1025]),
        "half": launches(fused.softmax, empty(1, 4096, torch.float16)),
        "masked": launches(kernels.masked, empty(2, 781)),
        "tuned": launches(kernels.tuned, empty(2, 781)),
        "three-passes": launches(kernels.three_passes, wide),
    }
    found = iter(
        compile_launches(
            [(launch, "sm_90") for several in made.values() for launch in several]
        )
    )
    return {name: [next(found) for _ in several] for name, several in made.items()}


def widest(kernel):
    return max(kernel.load_bits)


def test_strided_loads_are_narrow(on_sm_90):
    [contiguous], [strided] = on_sm_90["contiguous"], on_sm_90["strided"]
    assert widest(contiguous) == 128
    assert widest(strided) < 128
    assert strided.store_bits == contiguous.store_bits == {128: 2}


def test_unaligned_loads_are_narrow(on_sm_90):
    [unaligned] = on_sm_90["unaligned"]
    assert widest(unaligned) < 128


def test_an_odd_width_makes_loads_narrow(on_sm_90):
    [masked] = on_sm_90["masked"]
    assert widest(masked) < 128


def test_half_the_bytes_take_half_the_loads(on_sm_90, fused_on):
    [half] = on_sm_90["half"]
    assert half.load_bits == {128: fused_on["sm_90"].load_bits[128] // 2}


def test_an_autotuned_kernel_is_compiled_in_each_configuration(on_sm_90):
    assert [kernel.num_warps for kernel in on_sm_90["tuned"]] == [4, 8]


def test_a_kernel_that_calls_others_and_loops(on_sm_90):
    [kernel] = on_sm_90["three-passes"]
    assert kernel.kernel == "_three_passes_kernel"
    assert sum(kernel.load_bits.values()) >= 3


def test_num_warps_may_be_overridden(fused_on):
    [few] = resources(fused.softmax, "gfx942", empty(1, 4096), num_warps=4)
    many = fused_on["gfx942"]
    assert (few.num_warps, many.num_warps) == (4, 8)
    assert few.registers > many.registers
    assert few.load_bits[128] == 2 * many.load_bits[128]


def test_an_unknown_target():
    with pytest.raises(
        LookupError, match=r"^no target is named 'sm_91': give one of sm_75, .*gfx942"
    ):
        resources(fused.softmax, "sm_91", empty(1, 64))


def test_a_function_without_kernels():
    assert resources(naive.softmax, "sm_90", empty(1, 64)) == []


def test_what_the_function_raises_is_passed_on():
    with pytest.raises(ValueError, match="781 columns"):
        resources(fused.softmax, "sm_90", empty(1, 781))
    assert torch.equal(
        fused.softmax(empty(1, 4).zero_()),
        torch.full((1, 4), 0.25, device=machine.device()),
    )


def test_a_kernel_that_does_not_compile():
    with pytest.raises(
        CompileError, match=r"_never_compiles_kernel does not compile for sm_90: .*"
    ):
        resources(kernels.never_compiles, "sm_90", empty(1, 4))


def test_a_kernel_defined_in_a_cell_cannot_be_found_by_another_process(monkeypatch):
    monkeypatch.setattr(machine, "INTERPRETED", True)
    cell = Launch("__main__", "_my_kernel", {}, {}, {}, {"num_warps": 4})
    with pytest.raises(
        LookupError,
        match=r"_my_kernel is defined in a cell or a script: .*put the kernel in a file",
    ):
        compile_launches([(cell, "sm_90")])


def test_a_launch_is_what_triton_specialises():
    [launch] = launches(fused.softmax, empty(3, 4096, torch.bfloat16))
    assert (launch.module, launch.qualname) == (
        "memtraffic.ladder.fused",
        "_fused_kernel",
    )
    assert launch.signature == {
        "y_ptr": "*bf16",
        "x_ptr": "*bf16",
        "y_row_stride": "i32",
        "x_row_stride": "i32",
        "BLOCK": "constexpr",
    }
    assert launch.constants == {"BLOCK": 4096}
    assert set(launch.attributes) == {(0,), (1,), (2,), (3,)}
    assert launch.options == {"num_warps": 8}


def test_an_argument_of_one_is_a_constant():
    [launch] = launches(kernels.strided, empty(1, 16))
    assert launch.constants == {"x_col_stride": 1, "BLOCK": 16}
    [launch] = launches(kernels.strided, empty(1, 34)[:, ::2])
    assert launch.signature["x_col_stride"] == "i32"


@pytest.mark.parametrize(
    ("stride", "told"), [(8, False), (16, True), (24, False), (32, True)]
)
def test_an_argument_divisible_by_16_is_told_to_the_compiler(stride, told):
    [launch] = launches(kernels.strided, empty(1, 16 * stride)[:, ::stride])
    assert ((2,) in launch.attributes) == told


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(True, "i1", id="bool"),
        pytest.param(781, "i32", id="int"),
        pytest.param(-(2**31), "i32", id="smallest-int32"),
        pytest.param(2**31, "i64", id="one-past-int32"),
        pytest.param(0.5, "fp32", id="float"),
    ],
)
def test_types_of_arguments(value, name):
    assert targets._type_name("kernel", "argument", value) == name


def test_an_argument_that_cannot_be_compiled():
    with pytest.raises(
        CompileError, match="k: cannot compile for an argument x of type str"
    ):
        targets._type_name("k", "x", "text")


def test_noting_launches_runs_no_kernel_and_leaves_nothing_behind():
    x = torch.zeros(2, 8, device=machine.device())
    y = torch.full((2, 8), 7.0, device=machine.device())

    def launch(x):
        kernels._masked_kernel[(2,)](y, x, 8, BLOCK=8, STORED=8)

    assert len(launches(launch, x)) == 1
    assert (y == 7).all()
    launch(x)
    assert (y == 0).all()


# ---- what the GPU dialect says

TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], order = [1, 0]}>
#blocked1 = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4], order = [1, 0]}>
#mma = #ttg.nvidia_mma<{versionMajor = 2}>
    %0 = tt.load %n_cols : !tt.ptr<i32> loc(#loc1)
    %1 = ttg.async_copy_global_to_local %p, %q mask %m other %c : tensor<8x64x!tt.ptr<f32>, #blocked> -> <8x64xf32> loc(#loc2)
    %2 = ttg.async_wait %1 {num = 3 : i32} loc(#loc3)
    scf.for %i = %a to %b step %s  : i32 {
      %3 = tt.load %p, %m, %c : tensor<8x64x!tt.ptr<f32>, #blocked1> loc(#loc4)
      scf.for %j = %a to %b step %s  : i32 {
        %4 = "tt.reduce"(%3) <{axis = 1 : i32}> ({
        ^bb0(%x: f32, %y: f32):
          %z = arith.addf %x, %y : f32
          tt.reduce.return %z : f32
        }) : (tensor<8x64xf32, #blocked1>) -> tensor<8xf32>
      } loc(#loc5)
      %5 = math.exp2 %3 : tensor<8x64xf32, #blocked1>
      %6 = math.exp %3 : tensor<8x64xf32, #blocked1>
      %7 = math.exp %w : f32
      scf.if %ok {
        tt.store %p, %5, %m : tensor<8x64x!tt.ptr<f32>, #blocked1>
      }
    } {tt.num_stages = 3 : i32} loc(#loc6)
    tt.store %o, %w : !tt.ptr<f32>
"""


def test_the_layout_is_that_of_the_first_load_of_a_block():
    assert targets._layout(TTGIR) == Layout((1, 4), (2, 16), (4, 1))
    loads = TTGIR.replace("async_copy_global_to_local", "other")
    assert targets._layout(loads) == Layout((1, 1), (1, 32), (1, 4))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="no-load"),
        pytest.param("%0 = tt.load %n : !tt.ptr<i32>", id="no-block"),
        pytest.param(TTGIR.replace(", #blocked>", ", #mma>"), id="not-blocked"),
    ],
)
def test_no_layout(text):
    assert targets._layout(text) is None


def test_the_schedule_is_in_the_order_of_the_text():
    assert " ".join(targets._schedule(TTGIR)) == (
        "copy wait 3 for load for reduce end exp exp store end"
    )
    assert targets._schedule("") == ()


def test_kernels_have_a_layout_and_a_schedule(fused_on, on_sm_90):
    for target in (name for name in TARGETS if name.startswith("sm_")):
        assert fused_on[target].layout.warps == (8,)
        assert fused_on[target].layout.lanes == (32,)
        assert fused_on[target].schedule == ("load", "reduce", "exp", "reduce", "store")
    [kernel] = on_sm_90["three-passes"]
    assert [step for step in kernel.schedule if step in ("for", "end")] == [
        "for",
        "end",
    ] * 3


def test_resources_as_text_and_dict():
    kernel = Resources("k", "sm_90", 4, 32, 8, 64, {128: 2, 32: 1}, {})
    assert str(kernel) == (
        "k for sm_90, 4 warps: 32 registers, 8 bytes spilled, 64 bytes shared; "
        "loads: 1 of 32 bits + 2 of 128 bits; stores: none"
    )
    assert kernel.as_dict()["load_bits"] == {128: 2, 32: 1}


@pytest.mark.parametrize(
    ("read", "suffix", "bits"),
    [
        (targets._sass_bits, ".128.SYS", 128),
        (targets._sass_bits, ".64", 64),
        (targets._sass_bits, "", 32),
        (targets._sass_bits, ".U16", 16),
        (targets._sass_bits, ".U8.CONSTANT", 8),
        (targets._amd_bits, "dwordx4", 128),
        (targets._amd_bits, "lds_dwordx4", 128),
        (targets._amd_bits, "dwordx2", 64),
        (targets._amd_bits, "dword", 32),
        (targets._amd_bits, "ushort", 16),
        (targets._amd_bits, "short", 16),
        (targets._amd_bits, "short_d16_hi", 16),
        (targets._amd_bits, "ubyte", 8),
        (targets._amd_bits, "b128", 128),
        (targets._amd_bits, "b64", 64),
        (targets._amd_bits, "b32", 32),
        (targets._amd_bits, "u16", 16),
        (targets._amd_bits, "d16_b16", 16),
        (targets._amd_bits, "d16_hi_b16", 16),
        (targets._amd_bits, "u8", 8),
    ],
)
def test_widths_of_instructions(read, suffix, bits):
    assert read(suffix) == bits


# ---- what a kernel uses beyond registers


AMD = [target for target, (backend, *_) in TARGETS.items() if backend == "hip"]
CUDA = [target for target, (backend, *_) in TARGETS.items() if backend == "cuda"]


@pytest.mark.parametrize("target", CUDA)
def test_nvidia_has_none_of_amds_registers_and_no_static_shared_memory(
    fused_on, target
):
    kernel = fused_on[target]
    assert kernel.static_shared_bytes == 0  # Triton's are dynamic
    assert kernel.shared_bytes == 8 * 4  # a number for each warp
    used = (kernel.vgprs, kernel.agprs, kernel.sgprs, kernel.llvm_waves)
    assert used == (0, 0, 0, 0)
    assert (kernel.allocated_vgprs, kernel.allocated_sgprs) == (0, 0)


@pytest.mark.parametrize("target", AMD)
def test_amd_has_registers_of_three_kinds(fused_on, target):
    kernel = fused_on[target]
    assert kernel.registers >= kernel.vgprs > 0
    assert kernel.agprs == 0  # nothing is multiplied
    assert 8 <= kernel.sgprs <= 112
    assert kernel.allocated_vgprs >= kernel.registers
    assert 112 >= kernel.allocated_sgprs >= kernel.sgprs
    assert 1 <= kernel.llvm_waves <= 16
    assert (kernel.static_shared_bytes, kernel.shared_bytes) == (0, 32)


@pytest.mark.parametrize(
    ("target", "name", "warp"), [("sm_90", "MUFU.EX2", 32), ("gfx942", "v_exp_f32", 64)]
)
def test_a_lane_calls_exp_once_an_element(fused_on, target, name, warp):
    found = fused_on[target].instructions
    calls = sum(count for key, count in found.items() if key.startswith(name))
    assert calls == 4096 // (8 * warp)


@pytest.mark.parametrize("target", TARGETS)
def test_the_widths_are_those_of_the_instructions(fused_on, target):
    kernel = fused_on[target]
    names = ("LDG.E", "buffer_load", "global_load")
    loads = [count for name, count in kernel.instructions.items() if name.startswith(names)]  # fmt: skip
    assert sum(loads) == sum(kernel.load_bits.values()) > 0
    assert list(kernel.instructions) == sorted(kernel.instructions)


def test_amd_loads_by_buffer_or_by_address(fused_on):
    x = empty(1, 4096)
    by_buffer = fused_on["gfx942"]
    [by_address] = resources(warps.softmax, "gfx942", x)
    assert by_buffer.instructions["buffer_load_dwordx4"] == by_buffer.load_bits[128]
    assert "global_load_dwordx4" not in by_buffer.instructions
    assert by_address.instructions["global_load_dwordx4"] == by_address.load_bits[128]
    assert "buffer_load_dwordx4" not in by_address.instructions
    assert by_buffer.layout is not None and by_address.layout is not None
    assert by_buffer.schedule == ("load", "reduce", "exp", "reduce", "store")


def test_names_of_instructions():
    lines = [
        "LDG.E R1, [R2]",
        "@P0 LDG.E R1, [R2]",
        "@!UP1 UMOV UR4, 0x1",
        "@!PT  EXIT",
        "EXIT",
        "v_exp_f32_e32 v4, v4",
    ]
    assert targets._names(lines) == {"EXIT": 2, "LDG.E": 2, "UMOV": 1, "v_exp_f32_e32": 1}  # fmt: skip
    assert targets._names([]) == {}


LLVM_SAYS = """
; Kernel info:
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


def test_what_llvm_says_of_a_kernel():
    assert amd_usage(LLVM_SAYS) == {
        "registers": 52,
        "spill_bytes": 16,
        "static_shared_bytes": 1000,
        "vgprs": 10,
        "agprs": 40,
        "sgprs": 22,
        "allocated_vgprs": 60,
        "allocated_sgprs": 24,
        "llvm_waves": 8,
    }


def test_where_there_are_no_accumulators_llvm_does_not_count_them():
    lines = [
        it
        for it in LLVM_SAYS.splitlines()
        if "Agprs" not in it and "TotalNumV" not in it
    ]
    found = amd_usage("\n".join(lines))
    assert (found["registers"], found["vgprs"], found["agprs"]) == (10, 10, 0)
    assert (found["allocated_vgprs"], found["allocated_sgprs"]) == (60, 24)


# ---- the assembly


@pytest.mark.parametrize(
    ("target", "keep", "first"),
    [
        ("sm_90", "LDG", "LDG.E.128 "),
        ("gfx942", "_load_dwordx4", "buffer_load_dwordx4 "),
    ],
)
def test_assembly_keeps_what_is_asked_for(fused_on, target, keep, first):
    [text] = assembly(fused.softmax, target, empty(1, 4096), keep=keep)
    lines = text.splitlines()
    assert all(line.startswith(first) for line in lines), lines
    assert {128: len(lines)} == fused_on[target].load_bits


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_assembly_is_the_whole_code_without_comments_and_addresses(fused_on, target):
    [text] = assembly(fused.softmax, target, empty(1, 4096))
    lines = text.splitlines()
    assert len(lines) == sum(fused_on[target].instructions.values())
    assert not [it for it in lines if ";" in it or "/*" in it or it != it.strip()]
    end = "EXIT" if target == "sm_90" else "s_endpgm"
    assert sum(line.startswith(end) for line in lines) == 1


def test_assembly_has_a_text_for_each_kernel_and_takes_options():
    assert assembly(naive.softmax, "sm_90", empty(1, 64)) == []
    x, loads = empty(1, 4096), "_load_dwordx4"
    [few] = assembly(fused.softmax, "gfx942", x, keep=loads, num_warps=4)
    assert len(few.splitlines()) == 4  # of 8 warps it would be 2
    with pytest.raises(LookupError, match=r"^no target is named 'sm_91'"):
        assembly(fused.softmax, "sm_91", x)


# ---- options


def test_stages_are_copies_in_flight():
    x = empty(512, 64, torch.float16)
    [one] = resources(kernels.products, "sm_90", x, num_stages=1)
    [three] = resources(kernels.products, "sm_90", x, num_stages=3)
    assert [it.schedule.count("copy") for it in (one, three)] == [0, 3]
    assert three.shared_bytes > one.shared_bytes


@pytest.mark.parametrize(("waves", "most"), [(2, 256), (8, 64)], ids=lambda it: f"{it}")
def test_waves_per_eu_is_how_many_registers_there_may_be(waves, most):
    options = {"num_warps": 4, "waves_per_eu": waves}
    [kernel] = resources(fused.softmax, "gfx942", empty(1, 16384), **options)
    assert kernel.registers <= most
    assert (kernel.registers == 64) == (kernel.spill_bytes > 0) == (waves == 8)
    assert kernel.llvm_waves == waves
    assert kernel.registers <= kernel.allocated_vgprs <= most
    assert 512 // (-(-kernel.allocated_vgprs // 8) * 8) == waves  # of 512, in eights


def test_waves_per_eu_is_none_of_nvidias_options(fused_on):
    [kernel] = resources(fused.softmax, "sm_90", empty(1, 4096), waves_per_eu=2)
    assert kernel == fused_on["sm_90"]


def test_an_option_of_none_is_none():
    options = dict.fromkeys(("num_warps", "num_stages", "waves_per_eu"))
    x = empty(1, 4096)
    found = targets._with_options(fused.softmax, "sm_90", [x], options)
    assert found == launches(fused.softmax, x)


@pytest.mark.parametrize(
    ("target", "stages", "num_warps"),
    [("sm_90", 2, 32), ("gfx942", 1, 16), ("gfx1100", 1, 32)],
)
def test_a_launcher_chooses_for_the_target(target, stages, num_warps):
    [launch] = launches(persistent.softmax, empty(4, 32768), target=target)
    assert launch.constants["STAGES"] == stages
    assert launch.options["num_warps"] == num_warps
    assert machine.target() is None
    [kernel] = resources(persistent.softmax, target, empty(4, 32768))
    assert kernel.num_warps == num_warps


def test_stages_reach_the_loop_that_has_its_own():
    [launch] = targets._with_options(
        persistent.softmax, "sm_90", [empty(4, 4096)], {"num_stages": 2}
    )
    assert launch.constants["STAGES"] == launch.options["num_stages"] == 2
    [launch] = targets._with_options(
        fused.softmax, "sm_90", [empty(4, 4096)], {"num_stages": 2}
    )
    assert launch.options["num_stages"] == 2


def test_launches_for_an_unknown_target():
    with pytest.raises(LookupError, match=r"^no target is named 'sm_999': give one"):
        launches(fused.softmax, empty(1, 4096), target="sm_999")


@pytest.mark.parametrize("ask", [resources, assembly])
def test_an_unknown_option_is_a_type_error(ask):
    with pytest.raises(TypeError, match=r"^resources: unknown options depth, warps$"):
        ask(fused.softmax, "sm_90", empty(1, 64), warps=4, depth=2, num_warps=4)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            "        /*0040*/   @P2 LDG.E.128 R8, desc[UR8][R46.64] ;   /* 0x0c1e */",
            id="sm_90",
        ),
        pytest.param(
            "    /*0040*/  @P2 LDG.E.128 R8, desc[UR8][R46.64]  &wr=0x4  ?trans1;  /* 0x0c1e */",
            id="sm_120-waits-and-transitions",
        ),
    ],
)
def test_an_instruction_is_read_without_what_follows_it(line):
    sass = f"\t.headerflags\n{line}\n        /* 0x000ea2000c1e1d00 */\n"
    assert targets._sass_lines(sass) == ["@P2 LDG.E.128 R8, desc[UR8][R46.64]"]
