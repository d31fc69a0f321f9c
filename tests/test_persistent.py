import inspect
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from memtraffic import machine
from memtraffic.judge import assert_softmax
from memtraffic.machine import Limits
from memtraffic.occupancy import amd, nvidia
from memtraffic.traffic import count as counting
from memtraffic.traffic.count import count

pytest.importorskip("triton", reason="Triton is not installed")

from kernels import random
from test_nvidia import HOPPER

from memtraffic.ladder import persistent, warps
from memtraffic.targets import compile_launches, launches

needs_gpu = pytest.mark.skipif(machine.INTERPRETED, reason="needs a GPU")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNEL = persistent._persistent_kernel
SHARED = HOPPER.shared_per_block
NO_OPTIONS = (None,) * 4


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    """No plan of another test, nor of this one afterwards."""
    monkeypatch.setattr(persistent, "_held", {})


# ---- who does what


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("m", "n", "rows"),
    [
        pytest.param(11, 600, 1, id="a-row-a-tile"),
        pytest.param(27, 100, 4, id="last-tile-not-full"),
        pytest.param(12, 128, 4, id="last-tile-full"),
    ],
)
def test_each_row_is_done_once(m, n, rows, programs):
    x = random(m, n)
    traffic = count(lambda x: persistent.softmax(x, programs=programs), x, trace=True)
    touched, workers = Counter(), defaultdict(set)
    for it in traffic.accesses:
        touched.update((it.argument, offset) for offset in it.offsets)
        for row in {offset // n for offset in it.offsets}:
            workers[row].add(it.program)
    assert touched == Counter(
        (name, at) for name in ("x_ptr", "y_ptr") for at in range(m * n)
    )
    assert workers == {row: {(row // rows % programs, 0, 0)} for row in range(m)}
    assert len(traffic.ops) == 1


@pytest.mark.parametrize("programs", [1, 3])
def test_no_tile_is_empty(programs, monkeypatch):
    kinds = []

    def access(meter, kind, *args):
        kinds.append(kind)

    monkeypatch.setattr(counting._Meter, "access", access)
    count(lambda x: persistent.softmax(x, programs=programs), random(27, 100))
    assert kinds == ["read", "written"] * 7


@pytest.mark.parametrize("m", [1, 2, 3, 10])
def test_there_are_never_more_programs_than_tiles(m):
    x = random(m, 600)
    with machine.metered():
        assert persistent.plan(x, x).programs == min(m, persistent.INTERPRETED_PROGRAMS)
        assert persistent.plan(x, x, programs=3).programs == min(m, 3)


@pytest.mark.parametrize("num_stages", [None, 1, 2, 4])
@pytest.mark.parametrize("programs", [None, 1, 3])
@pytest.mark.parametrize("rows", [None, 2])
def test_right_for_any_stages_programs_and_rows(num_stages, programs, rows):
    options = {"num_stages": num_stages, "programs": programs, "rows": rows}
    assert_softmax(lambda x: persistent.softmax(x, **options), random(11, 600))


def test_a_larger_tile_takes_fewer_stages():
    x = random(64, 1024)
    with machine.metered():
        chosen = persistent.plan(x, x, num_warps=16, rows=32)
    assert chosen.constants["STAGES"] == 2
    assert chosen.programs == 2


def test_right_as_the_number_of_rows_changes():
    for m in (5, 9, 1, 9):
        assert_softmax(persistent.softmax, random(m, 600))


def test_looked_up_is_right_and_holds_nothing():
    assert_softmax(persistent.softmax_looked_up, random(5, 9))
    assert persistent._held == {}
    y = persistent.softmax_looked_up(torch.empty(0, 9, device=machine.device()))
    assert y.shape == (0, 9)


# ---- the plan


@pytest.mark.parametrize(
    ("tile_bytes", "piece_bytes", "expected"),
    [
        pytest.param(16384, 16, 3, id="three-fit"),
        pytest.param(131072, 16, 2, id="one-more-fits"),
        pytest.param(262144, 16, 1, id="none-more-fits"),
        pytest.param(SHARED - 1024, 16, 2, id="fits-exactly"),
        pytest.param(SHARED - 1023, 16, 1, id="one-byte-too-many"),
        pytest.param((SHARED - 1024) // 2, 16, 3, id="two-fit-exactly"),
        pytest.param((SHARED - 1024) // 2 + 1, 16, 2, id="two-do-not-fit"),
        pytest.param(2048, 8, 1, id="small-pieces"),
    ],
)
def test_stages(tile_bytes, piece_bytes, expected):
    assert persistent.stages(tile_bytes, piece_bytes, SHARED, "sm_90") == expected
    assert persistent.stages(tile_bytes, piece_bytes, SHARED, "gfx950") == 1


@pytest.mark.parametrize("name", ["programs", "num_stages"])
@pytest.mark.parametrize("value", [0, -1])
def test_programs_and_stages_are_at_least_one(name, value):
    with pytest.raises(ValueError, match=f"^persistent: {name} is {value}, not 1 or m"):
        persistent.softmax(random(3, 5), **{name: value})
    assert persistent.softmax(random(3, 5), **{name: 1}).shape == (3, 5)


@pytest.mark.parametrize(
    ("n", "dtype", "stages"),
    [
        (1024, torch.float32, 3),
        (1024, torch.float16, 3),
        (1002, torch.float32, 1),
        (1004, torch.float16, 1),
        (1004, torch.float32, 3),
        (8, torch.float32, 3),
        (32768, torch.float32, 2),
        (32768, torch.bfloat16, 3),
    ],
)
def test_the_stages_of_a_plan(n, dtype, stages):
    x = random(2, n, dtype)
    with machine.metered():
        constants = persistent.plan(x, x).constants
        assert persistent.plan(x, x, num_stages=4).constants["STAGES"] == 4
    shape = warps.choose(n, x.element_size())
    assert constants == {
        "ROWS": shape["ROWS"],
        "BLOCK": shape["BLOCK"],
        "ALIGN": warps.align(x, x),
        "STAGES": stages,
    }


# ---- plans are held


def test_the_same_call_has_the_same_plan():
    x, y = random(6, 64), random(6, 64)
    first = persistent.held_plan(x, y, *NO_OPTIONS)
    assert persistent.held_plan(y.clone(), x, *NO_OPTIONS) is first
    assert list(persistent._held.values()) == [first]
    assert persistent.plan(x, y) is not first


def other_calls(x, y):
    """Calls like that of `x` into `y`, each different in one way that a compiled kernel depends on."""
    m, n = x.shape
    memory = torch.zeros(2 * m * n + 64, device=x.device)
    apart = memory[: 2 * m * n].view(m, 2 * n)[:, :n]
    across = memory[: m * n].view(n, m).t()
    unaligned = memory[1 : m * n + 1].view(m, n)
    by_8 = memory[2 : m * n + 2].view(m, n)
    return {
        "width": (x[:, : n - 2], y),
        "rows": (x[1:], y[1:]),
        "stride": (apart, y),
        "transposed": (across, y),
        "stride-of-out": (x, apart),
        "dtype": (x.half(), y.half()),
        "alignment": (unaligned, y),
        "alignment-of-out": (x, unaligned),
        "alignment-to-8": (by_8, y),
        "alignment-of-out-to-8": (x, by_8),
        "num-warps": (x, y, 2),
        "num-stages": (x, y, None, 1),
        "programs": (x, y, None, None, 2),
        "rows-of-a-tile": (x, y, None, None, None, 2),
    }


def test_any_other_call_has_a_plan_of_its_own():
    x, y = random(6, 64), random(6, 64)
    plans = [persistent.held_plan(x, y, *NO_OPTIONS)]
    for case, (x_, y_, *options) in other_calls(x, y).items():
        options += [None] * (4 - len(options))
        chosen = persistent.held_plan(x_, y_, *options)
        assert not any(chosen is other for other in plans), case
        plans.append(chosen)
        assert persistent.held_plan(x_, y_, *options) is chosen, case


def test_the_plan_of_a_call_has_its_options():
    x = random(40, 512)
    with machine.metered():
        chosen = persistent.held_plan(x, x, 2, 1, 3, 4)
    assert (chosen.num_warps, chosen.programs) == (2, 3)
    assert (chosen.constants["STAGES"], chosen.constants["ROWS"]) == (1, 4)


def test_the_options_of_a_call_are_those_of_its_plan(monkeypatch):
    asked = []
    monkeypatch.setattr(persistent, "launch", lambda *args: None)
    monkeypatch.setattr(persistent, "plan", lambda x, y, *args: asked.append(args))
    x = random(40, 512)
    persistent.softmax(x, num_warps=2, num_stages=1, programs=3, rows=4)
    assert asked == [(2, 1, 3, 4)]


def test_not_too_many_plans_are_held(monkeypatch):
    monkeypatch.setattr(persistent, "_MOST_HELD", 3)
    held = []
    for n in (3, 4, 5, 6, 7, 7, 3):
        assert_softmax(persistent.softmax, random(4, n))
        held.append(len(persistent._held))
    assert held == [1, 2, 3, 1, 2, 2, 3]


# ---- compiled, with a stand-in for the compiler


class Compiled:
    """What `warmup` returns, its registers unknown until it is loaded."""

    def __init__(self, shared, registers, launched):
        self.metadata = SimpleNamespace(shared=shared)
        self._registers, self._launched, self._loaded = registers, launched, False

    @property
    def run(self):
        self._loaded = True

    @property
    def n_regs(self):
        return self._registers if self._loaded else None

    def __getitem__(self, grid):
        return lambda *args: self._launched.append((grid, args))


@pytest.fixture
def compiler(monkeypatch):
    """A compiler of which a test sets what a kernel takes, and sees what it was given; the GPU is like an H100."""
    found = SimpleNamespace(
        shared=lambda stages: 16, registers=32, warmed=[], launched=[], asked=[]
    )

    def limits(index=None):
        found.asked.append(index)
        return HOPPER

    def warmup(*args, grid, num_warps, **constants):
        found.warmed.append((args, constants, num_warps))
        shared = found.shared(constants["STAGES"])
        return Compiled(shared, found.registers, found.launched)

    monkeypatch.setattr(machine, "INTERPRETED", False)
    monkeypatch.setattr(machine, "limits", limits)
    monkeypatch.setattr(
        persistent, "_persistent_kernel", SimpleNamespace(warmup=warmup)
    )
    return found


def tall(m, n):
    """A matrix of many rows that takes little memory."""
    return torch.zeros(1, n, device=machine.device()).expand(m, n)


@pytest.mark.parametrize(
    ("bytes_a_stage", "stages"),
    [(SHARED // 3, 3), (SHARED // 3 + 1, 2), (SHARED // 2 + 1, 1), (SHARED, 1)],
)
def test_too_much_shared_memory_takes_fewer_stages(compiler, bytes_a_stage, stages):
    compiler.shared = lambda stages: stages * bytes_a_stage
    chosen = persistent.plan(tall(8, 1024), tall(8, 1024))
    assert chosen.constants["STAGES"] == stages
    assert chosen.shared_bytes == stages * bytes_a_stage
    assert [it["STAGES"] for _, it, _ in compiler.warmed] == list(
        range(3, stages - 1, -1)
    )


def test_too_much_shared_memory_for_one_stage(compiler):
    compiler.shared = lambda stages: SHARED + stages
    with pytest.raises(
        RuntimeError,
        match=f"^persistent: a program needs {SHARED + 1} bytes of shared memory, "
        f"like an H100 has {SHARED}$",
    ):
        persistent.plan(tall(8, 1024), tall(8, 1024))


def test_not_one_program_fits(compiler):
    compiler.registers = 255
    with pytest.raises(
        RuntimeError,
        match=r"^persistent: 32 warps of 255 registers do not fit an SM of like an H100$",
    ):
        persistent.plan(tall(8, 32768), tall(8, 32768))


@pytest.mark.parametrize(
    ("m", "registers", "shared", "options", "resident", "programs"),
    [
        pytest.param(10000, 64, 16384, {}, 8, 132 * 8, id="registers"),
        pytest.param(10000, 32, 100000, {}, 2, 132 * 2, id="shared-memory"),
        pytest.param(10000, 32, 0, {}, 16, 132 * 16, id="no-shared-memory"),
        pytest.param(1055, 64, 16384, {}, 8, 1055, id="fewer-tiles"),
        pytest.param(10000, 64, 16384, {"programs": 7}, 8, 7, id="as-asked"),
        pytest.param(5, 64, 16384, {"programs": 7}, 8, 5, id="fewer-than-asked"),
        pytest.param(10000, 64, 0, {"num_warps": 8}, 4, 132 * 4, id="more-warps"),
    ],
)
def test_as_many_programs_as_fit(
    compiler, m, registers, shared, options, resident, programs
):
    compiler.registers, compiler.shared = registers, lambda stages: shared
    chosen = persistent.plan(tall(m, 4096), tall(m, 4096), **options)
    assert (chosen.resident, chosen.programs) == (resident, programs)
    assert (chosen.registers, chosen.shared_bytes) == (registers, shared)


def test_a_tile_of_several_rows_is_one_tile(compiler):
    assert persistent.plan(tall(1001, 128), tall(1001, 128)).programs == 251


def test_what_is_compiled_is_what_is_launched(compiler):
    x, out = random(70, 9), torch.empty(9, 70, device=machine.device()).t()
    assert persistent.softmax(x, out) is out
    told = {
        "y_row_stride": 1, "y_col_stride": 70, "x_row_stride": 9, "x_col_stride": 1,
        "n_rows": 70, "n_cols": 9, "ROWS": 32, "BLOCK": 16, "ALIGN": 1, "STAGES": 1,
    }  # fmt: skip
    [(args, constants, num_warps)] = compiler.warmed
    [(grid, launched)] = compiler.launched
    assert (grid, num_warps) == ((3, 1, 1), 1)
    signature = inspect.signature(KERNEL.fn)
    for bound in (signature.bind(*args, **constants), signature.bind(*launched)):
        y_ptr, x_ptr = (bound.arguments.pop(name) for name in ("y_ptr", "x_ptr"))
        assert (y_ptr is out, x_ptr is x) == (True, True)
        assert bound.arguments == told
    persistent.softmax(x, out)
    assert (len(compiler.warmed), len(compiler.launched)) == (1, 2)
    persistent.softmax_looked_up(x)
    assert (len(compiler.warmed), len(compiler.launched)) == (2, 3)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_as_asked(compiler, num_stages):
    chosen = persistent.plan(tall(8, 1024), tall(8, 1024), num_stages=num_stages)
    assert chosen.constants["STAGES"] == num_stages
    assert len(compiler.warmed) == 1


class Elsewhere:
    """A matrix like those of 4 rows of 8, on a second GPU, which need not be there."""

    device, dtype, shape = torch.device("cuda", 1), torch.float32, torch.Size((4, 8))

    def stride(self, dim=None):
        return (8, 1) if dim is None else (8, 1)[dim]

    def element_size(self):
        return 4

    def data_ptr(self):
        return 0


def test_a_plan_is_of_one_gpu_and_not_of_a_meter(compiler):
    x, elsewhere = torch.zeros(4, 8, device=machine.device()), Elsewhere()
    compiled = persistent.held_plan(x, x, *NO_OPTIONS)
    assert persistent.held_plan(elsewhere, elsewhere, *NO_OPTIONS) is not compiled
    assert compiler.asked[-1] == 1
    with machine.metered():
        metered = persistent.held_plan(x, x, *NO_OPTIONS)
        assert metered.kernel is None
    with machine.metered("gfx942", 64):
        assert persistent.held_plan(x, x, *NO_OPTIONS) is not metered
    assert persistent.held_plan(x, x, *NO_OPTIONS) is compiled


# ---- on GPUs that are not there


def gpu(target):
    """The limits of a GPU of the kind of `target`, as PyTorch would tell them."""
    if target in nvidia.SMS:
        return nvidia.SMS[target]
    cu = amd.CUS.get(target, amd.CUS["gfx942"])
    return Limits(
        name=cu.name,
        sms=cu.cus,
        registers_per_sm=65536,
        shared_per_sm=cu.lds,
        shared_per_block=cu.lds_per_group,
        l2_bytes=4 * 2**20,
        warp_size=cu.wave_size,
        threads_per_sm=2048,
        blocks_per_sm=None,
        target=target,
    )


LLVM_SAYS = """
; TotalNumSgprs: {sgprs}
; NumVgprs: {vgprs}
; NumAgprs: {agprs}
; TotalNumVgprs: {total}
; ScratchSize: 0
; LDSByteSize: 0 bytes/workgroup (compile time only)
; NumSGPRsForWavesPerEU: {given[1]}
; NumVGPRsForWavesPerEU: {given[0]}
; Occupancy: 1
"""


class Made(Compiled):
    """A compiled kernel of either maker: LLVM's comments in its assembly, or registers known once it is loaded.

    given: vector and scalar registers of a wave, as many as it uses by default.
    """

    def __init__(self, target, registers, shared, launched, given=None):
        super().__init__(shared, registers[0], launched)
        vgprs, agprs, sgprs = registers
        total = -(-vgprs // 4) * 4 + agprs if agprs else vgprs
        both = max(vgprs, agprs) if target == "gfx908" else total
        used = {"sgprs": sgprs, "vgprs": vgprs, "agprs": agprs, "total": total}
        text = LLVM_SAYS.format(**used, given=given or (both, sgprs))
        self.asm = {"amdgcn": text}


@pytest.fixture
def elsewhere(monkeypatch):
    """Stands in for a GPU of any kind, and for its compiler: elsewhere(target, registers, shared) -> what was launched."""

    def settle(target, registers, shared=0, given=None):
        launched, limits = [], gpu(target)
        kernel = Made(target, registers, shared, launched, given)
        stand_in = SimpleNamespace(warmup=lambda *args, **options: kernel)
        monkeypatch.setattr(machine, "compiles", lambda: True)
        monkeypatch.setattr(machine, "limits", lambda index=None: limits)
        monkeypatch.setattr(machine, "warp_size", lambda: limits.warp_size)
        monkeypatch.setattr(persistent, "_persistent_kernel", stand_in)
        return launched

    return settle


FEW, MANY, MIXED = (32, 0, 16), (200, 0, 100), (100, 100, 106)


@pytest.mark.parametrize(
    ("target", "registers", "shared", "num_warps", "fits"),
    [
        pytest.param("sm_75", FEW, 0, 4, 8, id="sm_75-warps"),
        pytest.param("sm_75", MANY, 0, 4, 2, id="sm_75-registers"),
        pytest.param("sm_75", FEW, 20000, 4, 3, id="sm_75-shared"),
        pytest.param("sm_90", FEW, 0, 4, 16, id="sm_90-warps"),
        pytest.param("sm_90", MANY, 0, 4, 2, id="sm_90-registers"),
        pytest.param("sm_90", FEW, 32784, 4, 6, id="sm_90-shared"),
        pytest.param("sm_120", FEW, 0, 1, 24, id="sm_120-blocks"),
        pytest.param("sm_120", MANY, 0, 4, 2, id="sm_120-registers"),
        pytest.param("sm_120", FEW, 32784, 4, 3, id="sm_120-shared"),
        pytest.param("gfx908", FEW, 0, 4, 8, id="gfx908-registers"),
        pytest.param("gfx908", MIXED, 0, 4, 2, id="gfx908-two-files"),
        pytest.param("gfx908", FEW, 20000, 4, 3, id="gfx908-lds"),
        pytest.param("gfx90a", FEW, 0, 4, 8, id="gfx90a-waves"),
        pytest.param("gfx90a", MIXED, 0, 4, 2, id="gfx90a-one-file"),
        pytest.param("gfx942", FEW, 0, 4, 8, id="gfx942-waves"),
        pytest.param("gfx942", (60, 0, 106), 0, 4, 7, id="gfx942-scalar-registers"),
        pytest.param("gfx942", MIXED, 0, 8, 1, id="gfx942-more-warps"),
        pytest.param("gfx942", FEW, 30000, 4, 2, id="gfx942-lds"),
        pytest.param("gfx950", FEW, 30000, 4, 5, id="gfx950-more-lds"),
        pytest.param("gfx950", MANY, 0, 4, 2, id="gfx950-registers"),
        pytest.param("gfx1100", FEW, 0, 4, 16, id="gfx1100-waves"),
        pytest.param("gfx1100", MANY, 0, 4, 7, id="gfx1100-registers"),
        pytest.param("gfx1201", FEW, 40960, 4, 3, id="gfx1201-lds"),
        pytest.param("gfx1201", FEW, 0, 2, 32, id="gfx1201-workgroups"),
    ],
)
def test_the_grid_on_any_gpu(elsewhere, target, registers, shared, num_warps, fits):
    launched = elsewhere(target, registers, shared)
    x, processors = tall(10**6, 256), gpu(target).sms
    chosen = persistent.plan(x, x, num_warps=num_warps, rows=1)
    assert (chosen.resident, chosen.programs) == (fits, fits * processors)
    assert chosen.shared_bytes == shared
    told = -(-registers[0] // 4) * 4 + registers[1] if registers[1] else registers[0]
    assert chosen.registers == (registers[0] if target in nvidia.SMS else told)
    persistent.launch(chosen, x, x)
    assert [grid for grid, _ in launched] == [(fits * processors, 1, 1)]


@pytest.mark.parametrize(
    ("target", "registers", "given", "fits"),
    [
        pytest.param("gfx942", FEW, (32, 16), 8, id="as-used"),
        pytest.param("gfx942", FEW, (168, 16), 3, id="more-vector-registers"),
        pytest.param("gfx942", FEW, (32, 106), 7, id="more-scalar-registers"),
        pytest.param("gfx942", MIXED, (256, 106), 2, id="accumulators-among-them"),
        pytest.param("gfx908", MIXED, (132, 106), 1, id="of-the-fuller-file"),
        pytest.param("gfx1100", FEW, (192, 16), 8, id="rdna"),
    ],
)
def test_what_a_wave_is_given_counts_not_what_it_uses(
    elsewhere, target, registers, given, fits
):
    elsewhere(target, registers, given=given)
    x = tall(10**6, 256)
    chosen = persistent.plan(x, x, num_warps=4, rows=1)
    assert (chosen.resident, chosen.programs) == (fits, fits * gpu(target).sms)
    assert chosen.registers == registers[0] + registers[1]


@pytest.mark.parametrize("target", ["gfx1100", "gfx1201"])
def test_a_wave_cannot_be_given_more_registers_than_it_can_name(elsewhere, target):
    x = tall(9, 4096)
    elsewhere(target, FEW, given=(256, 16))
    assert persistent.plan(x, x, num_warps=4).resident == 5
    elsewhere(target, FEW, given=(257, 16))
    with pytest.raises(RuntimeError, match=r"^persistent: 4 warps of 32 registers do"):
        persistent.plan(x, x, num_warps=4)


@pytest.mark.parametrize("target", [*nvidia.SMS, *amd.CUS])
@pytest.mark.parametrize("m", [1, 7, 10**6])
def test_the_grid_is_never_empty(elsewhere, target, m):
    for registers in (FEW, MANY):
        elsewhere(target, registers, 16)
        chosen = persistent.plan(tall(m, 4096), tall(m, 4096), num_warps=4)
        assert 1 <= chosen.programs <= m
        assert chosen.programs <= chosen.resident * gpu(target).sms


@pytest.mark.parametrize(
    ("target", "registers", "num_warps"),
    [
        pytest.param("sm_75", (255, 0, 0), 16, id="sm_75"),
        pytest.param("sm_90", (255, 0, 0), 16, id="sm_90"),
        pytest.param("sm_120", (129, 0, 0), 16, id="sm_120"),
        pytest.param("gfx908", (132, 0, 16), 8, id="gfx908"),
        pytest.param("gfx942", (172, 0, 16), 16, id="gfx942"),
        pytest.param("gfx1100", (256, 0, 16), 32, id="gfx1100"),
    ],
)
def test_a_program_that_no_processor_holds(elsewhere, target, registers, num_warps):
    elsewhere(target, registers)
    x = tall(9, 16384)
    message = f"persistent: {num_warps} warps of {registers[0]} registers do not fit an SM of {gpu(target).name}"
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        persistent.plan(x, x, num_warps=num_warps)


@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_a_program_of_too_much_shared_memory(elsewhere, target):
    most = gpu(target).shared_per_block
    x = tall(9, 4096)
    elsewhere(target, FEW, most)
    assert persistent.plan(x, x).resident == 1
    elsewhere(target, FEW, most + 1)
    with pytest.raises(RuntimeError, match=f"needs {most + 1} bytes .* has {most}$"):
        persistent.plan(x, x)


def test_a_compute_unit_that_nobody_described(elsewhere):
    elsewhere("gfx1030", FEW)
    x = tall(9, 4096)
    with pytest.raises(LookupError) as error:
        persistent.plan(x, x)
    known = ", ".join([*nvidia.SMS, *amd.CUS])
    message = f"no target is named 'gfx1030': give one of {known}"
    assert str(error.value) == message


# ---- compiled


@pytest.fixture(scope="module")
def on_sm_90():
    """Pairs of constants and resources on sm_90, by width and dtype, and by number of stages."""
    found = {}
    for n in (1, 7, 128, 781, 1000, 4096, 8192, 8320, 16384, 32768):
        for dtype in DTYPES:
            x = torch.empty(9, n, dtype=dtype, device=machine.device())
            [found[n, dtype]] = launches(persistent.softmax, x)
    x = torch.empty(9, 4096, device=machine.device())
    for stages in (1, 2, 3, 4):
        [found[stages]] = launches(
            lambda x, stages=stages: persistent.softmax(x, num_stages=stages), x
        )
    compiled = compile_launches([(launch, "sm_90") for launch in found.values()])
    return {
        case: (launch.constants, kernel)
        for (case, launch), kernel in zip(found.items(), compiled, strict=True)
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 128, 781, 1000, 4096, 8192, 8320, 16384, 32768])
def test_a_program_fits_an_sm(on_sm_90, n, dtype):
    constants, kernel = on_sm_90[n, dtype]
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= 227 * 1024
    used = (kernel.registers, kernel.shared_bytes, kernel.num_warps)
    assert nvidia.resident(*used, HOPPER) >= 1
    if constants["STAGES"] > 1:  # the copies are there, and of 16 bytes
        assert kernel.schedule[: constants["STAGES"]][-2:] == ("copy", "for")
        assert set(kernel.load_bits) == {128}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_are_tiles_in_flight(on_sm_90, stages):
    _, kernel = on_sm_90[stages]
    start = kernel.schedule.index("for")
    work = ("reduce", "exp", "reduce", "store")
    if stages == 1:
        assert kernel.schedule == ("for", "load", *work, "end")
    else:
        assert kernel.schedule[:start] == ("copy",) * (stages - 1)
        assert kernel.schedule[start + 1] == f"wait {stages - 2}"
        body = kernel.schedule[start + 2 : kernel.schedule.index("end")]
        assert sorted(body) == sorted([*work, "copy"])


# ---- on a GPU


@needs_gpu
@pytest.mark.parametrize("n", [1, 781, 1000, 4096, 32768])
def test_what_is_held_is_what_is_looked_up(n):
    x = random(1000, n, torch.bfloat16)
    held = [persistent.softmax(x) for _ in range(2)]
    [chosen] = persistent._held.values()
    assert chosen.registers > 0 and chosen.resident > 0
    assert chosen.programs <= machine.limits().sms * chosen.resident
    assert all(torch.equal(y, persistent.softmax_looked_up(x)) for y in held)
    assert_softmax(persistent.softmax, x)


@needs_gpu
@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda x: x[:, :1002], id="narrower-of-the-same-block"),
        pytest.param(lambda x: x[:, :781].contiguous(), id="odd"),
        pytest.param(lambda x: x.flatten()[1:-1023].view(299, 1024), id="unaligned"),
        pytest.param(lambda x: x.flatten()[2:-1022].view(299, 1024), id="by-8-bytes"),
        pytest.param(lambda x: x[:, ::2], id="every-other"),
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[:7], id="fewer-rows"),
    ],
)
def test_a_second_call_of_another_kind(second):
    x = random(300, 1024)
    for _ in range(2):
        assert_softmax(persistent.softmax, x)
        assert_softmax(persistent.softmax, second(x))
