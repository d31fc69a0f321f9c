"""Requests and sectors predicted without a GPU: by hand, lane by lane, and as an H200 counted."""

import importlib
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import kernels
import numpy as np
import ptx
import pytest
import sector_kernels
import torch

from memtraffic import sectors
from memtraffic.compile.accesses import CompiledAccess
from memtraffic.compile.compiler import compiled_code
from memtraffic.compile.launches import launch_of
from memtraffic.compile.layouts import Layout
from memtraffic.errors import CountError
from memtraffic.functions import as_function
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import masked, online, persistent, tiled
from memtraffic.meters import sectors as meter
from memtraffic.meters.count import metered
from memtraffic.meters.sectors import count_sectors
from memtraffic.op import find_op
from memtraffic.triton_adapter.memory import Site

# ---- the hardware


@pytest.mark.parametrize("seed", range(8))
def test_count_sectors_lane_by_lane(seed):
    rng = np.random.default_rng(seed)
    addresses = rng.integers(0, rng.choice([64, 4096, 2**40]), (50, 32))
    active = rng.random((50, 32)) < rng.choice([0.03, 0.5, 1.0])
    unit = int(rng.choice([32, 64, 128]))
    loads = [("ld", at, 8, on) for at, on in zip(addresses, active, strict=True)]
    assert [*count_sectors(addresses, active, unit), 0, 0] == [*ptx.totals(loads, unit).values()]


@pytest.mark.parametrize(
    ("types", "in_loop", "starts", "active", "outcome"),
    [
        ("aa", True, [0, 0, 0], 64, 3),  # unrolled in a loop
        ("a", False, [0, 0, 0], 64, 1),  # before a loop
        ("ab", False, [0, 256], 64, 2),  # for each its own, as in an unrolled loop
        ("ab", False, [0], 64, "makes it 1 times, its instructions 2"),
        ("ab", False, [0, 0, 256], 64, "makes it 3 times, its instructions 2"),
        ("ab", True, [0, 0], 64, "2 instructions are spread differently"),
        ("a", False, [0], 31, "next to each other"),
        ("a", False, [4], 64, "multiple of the 8 bytes"),
    ],
)
def test_places_by_hand(types, in_loop, starts, active, outcome):
    """Of a warp each of whose lanes moves two numbers."""
    pairs, elements = Layout((1,), (2, 4, 8, 16, 32), ()), np.arange(64)
    each = [CompiledAccess("load", (), pairs, 64, in_loop, it) for it in types]
    how = Site("here.py", (1, 0), (1, 9)), "load"
    place = meter._Place(*how, each, 1, find_gpu("sm_90"))
    with nullcontext() if isinstance(outcome, int) else pytest.raises(CountError, match=outcome):
        for start in starts:
            place.add((0, 0, 0), (start + 4 * elements, elements < active), 4)
        assert place.finish(0, "kernel", "here.py").requests == outcome


# ---- kernels


@pytest.mark.parametrize(
    ("target", "lanes", "unit"),
    [("sm_90", 32, 32), ("gfx942", 64, 128), ("gfx90a", 64, 64), ("gfx1100", 32, 128)],
)
def test_sectors_by_hand(target, lanes, unit):
    """Rows of 781, by 4 bytes a lane: on sm_90, 24 instructions of 32 lanes and one of 13."""
    found = sectors(masked.softmax, shape=(8, 781), target=target)
    starts = [start + 781 * row for row in range(8) for start in range(0, 781, lanes)]
    assert found.load_requests == found.store_requests == len(starts)
    ends = [min(start + lanes, (start // 781 + 1) * 781) for start in starts]
    touched = sum(
        (4 * end - 1) // unit - 4 * start // unit + 1
        for start, end in zip(starts, ends, strict=True)
    )
    assert found.load_sectors == found.store_sectors == touched
    assert (touched == 956) == (target == "sm_90") == found.confirmed
    assert ("Not confirmed on hardware" in str(found)) != found.confirmed
    load, store = found.accesses
    assert (load.kind, load.bits, load.wanted_bytes) == ("load", 32, 8 * 781 * 4)
    assert load.fetched_bytes == unit * touched
    assert load.source.startswith("x = tl.load(") and store.source.startswith("tl.store(")


def test_sectors_on_amd_where_lanes_move_16_bytes_and_numbers_are_loaded_by_waves():
    found = sectors(sector_kernels.few, "512,:bf16", target="gfx942").totals
    assert found == dict(load_requests=128, load_sectors=128, store_requests=32, store_sectors=32)
    found = sectors(sector_kernels.scalar, "8,", target="gfx942").totals
    assert found == dict(load_requests=12, load_sectors=12, store_requests=3, store_sectors=3)
    with pytest.raises(CountError, match="no instruction is marked as that of"):
        sectors(sector_kernels.nested, "500,", target="gfx942")


# ---- the compiled kernels, thread by thread


class Beside(meter._SectorMeter):
    """Counts what the threads of a compiled kernel do, beside what is predicted."""

    def __init__(self, gpu):
        super().__init__(gpu)
        self.counted = dict.fromkeys(meter.COUNTERS, 0)

    @contextmanager
    def launch(self, kernel, tensors):
        from triton.runtime.interpreter import interpreter_builder

        with super().launch(kernel, tensors):
            yield
            grid = interpreter_builder.grid_dim
            for program in sorted(self.programs):
                run = ptx.Threads(self.text, self.given, program, grid, 32 * self.warps)
                for name, number in ptx.totals(run.accesses).items():
                    self.counted[name] += number

    def compile(self, jobs):
        self.codes = compiled_code(jobs)
        return self.codes

    def launched(self, kernel, args, options):
        with mock.patch.object(meter, "compiled_code", self.compile):  # which takes a while
            super().launched(kernel, args, options)
        launch, [code] = launch_of(kernel, args, options), self.codes
        self.text = code.assembly
        assert code.resources.store_bits
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        self.given = [
            named[name].data_ptr() if hasattr(named[name], "data_ptr") else int(named[name])
            for name, kind in launch.signature.items()
            if kind != "constexpr"
        ]


def predicted_and_counted(fn, inputs, shape=None, dtype="float32", layout="packed"):
    # Its threads read their memory, so it is that of a CPU.
    arguments = find_op(inputs).arguments(shape, dtype, layout).map(torch.Tensor.cpu)
    beside = Beside(find_gpu("sm_90"))
    with metered(fn, beside, beside.gpu):
        arguments.call(as_function(fn))
    return beside.sectors().totals, beside.counted


KERNELS = {
    "copies of a block in lanes and warps": (sector_kernels.few, "64,"),
    "a single number": (sector_kernels.scalar, "8,"),
    "a load for the address of a load": (sector_kernels.nested, "500,"),
    "functions": (sector_kernels.called, "1024,"),
    "a loop": (sector_kernels.loop, "1024, 256,"),
    "a transposed tile of bfloat16": (sector_kernels.transposed, "64,64:bf16"),
    "a product, and a sum": (sector_kernels.linear, "64,64:bf16 64,64:bf16 64,:bf16"),
    "a load that is made once": (sector_kernels.same_twice, "64,"),
    "rows in chunks": (tiled.softmax, "M,N", (5, 131)),
    "rows that start anywhere": (tiled.softmax, "M,N", (5, 131), "bfloat16", "odd"),
    "every other column": (online.softmax, "M,N", (5, 131), "float32", "every other"),
    "columns": (online.softmax, "M,N", (5, 131), "bfloat16", "transposed"),
    "copies in two stages": (partial(persistent.softmax, num_stages=2, programs=2), "9,1024"),
    "copies of odd rows": (partial(persistent.softmax, num_stages=3, programs=3), "7,77"),
    "copies by one program": (partial(persistent.softmax, num_stages=4, programs=1), "5,304"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_sectors_thread_by_thread(name):
    predicted, counted = predicted_and_counted(*KERNELS[name])
    assert predicted == counted
    assert predicted["store_requests"] > 0


# ---- what is refused, and what is left out


@pytest.mark.parametrize(
    ("fn", "inputs", "match"),
    [
        (kernels.descriptor, "16,64", "copies by descriptor"),
        (partial(persistent.softmax, num_stages=2), "8,1000:bf16", "begin inside a sector"),
        (sector_kernels.waiting, "1,", "^_waiting_kernel waits for other programs"),
        (sector_kernels.half, "1024,", "of 8 loads in PTX, 0 load the same .* the 4 of"),
        (sector_kernels.assembly_load, "64,", "is no tl.load or tl.store"),
        (sector_kernels.state, "16, 5,6", "the load of sector_kernels.py:.* spread differently"),
    ],
)
def test_sectors_refuses_a_kernel(fn, inputs, match):
    with pytest.raises(CountError, match=match):
        sectors(fn, inputs)


def test_sectors_refuses_loads_that_are_not_found(monkeypatch):
    monkeypatch.setattr(meter._SectorMeter, "_matching", lambda *_: [])
    with pytest.raises(CountError, match=r"the load of masked.py:\d+ is not found .* of masked.py"):
        sectors(masked.softmax, shape=(1, 8))


def test_sectors_refuses_loads_that_not_every_program_makes():
    starts = torch.arange(4, dtype=torch.int32)
    found = sectors(sector_kernels.delayed, [torch.ones_like(starts), starts])
    assert found.load_requests == 2 * 4 * 4  # by each of four warps
    for call in (sector_kernels.delayed, sector_kernels.silent):
        with pytest.raises(CountError, match="1 loads come after a branch, and"):
            sectors(call, [starts.clamp(max=1), starts])


def test_sectors_of_kernels_that_are_defined_in_a_function():
    """Each has its own constants."""
    fns = [sector_kernels.defined_inside(block) for block in (512, 64)]
    found = sectors(lambda x: [fn(x) for fn in fns], "512,").accesses
    assert [access.sectors for access in found] == [64, 64, 16, 8]
    assert {access.source[:16] for access in found} == {"own.store(y_ptr "}


def test_sectors_of_the_first_autotuning_configuration():
    """By 16 bytes a lane, four warps do what one does four times, but not with 64 elements."""
    found = sectors(sector_kernels.autotuned, "512,")
    assert [(it.launch, it.requests, it.sectors) for it in found.accesses] == [(0, 4, 64)] * 2
    found = sectors(sector_kernels.autotuned, "64,")
    assert found.load_requests == 1 and len(found.assumed) == 1
    assert "kernels: _autotuned_kernel with num_warps: 1" in str(found)


def test_sectors_of_the_configuration_that_was_chosen(monkeypatch):
    tuner, found = sector_kernels._autotuned_kernel, []
    for config in tuner.configs:
        monkeypatch.setitem(tuner.cache, ("torch.float32", "torch.float32"), config)
        found.append(sectors(sector_kernels.autotuned, "64,").load_requests)
    assert found == [1, 4]
    assert sectors(sector_kernels.autotuned, "64,", config=0).load_requests == 1


PLACED = """
import memtraffic, torch, triton
import triton.language as tl
{imported}

{decorated}@triton.jit
def placed_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), placed_get(x_ptr, tl.arange(0, BLOCK)))

def placed(x):
    placed_kernel[(1,)](torch.empty_like(x), x, BLOCK=1024)
"""
GET = """
import triton
import triton.language as tl
@triton.jit
def placed_get(x_ptr, at):
    return tl.load(x_ptr + at)
"""


@pytest.mark.slow
def test_sectors_of_a_kernel_that_was_compiled_elsewhere(tmp_path, monkeypatch):
    """Triton's cache knows a kernel by its text."""
    monkeypatch.syspath_prepend(tmp_path)
    for get, name, decorated in (
        ("placed_get_1", "placed_1", ""),
        ("placed_get_1", "placed_2", ""),  # moved to another file
        ("placed_get_2", "placed_2b", ""),  # what it calls was moved
        ("placed_get_2", "placed_2c", "@triton.heuristics({})\n"),
        ("placed_get_2", "placed_2c_again", "@triton.heuristics({})\n# one more line\n"),
    ):
        text = PLACED.format(imported=f"from {get} import placed_get", decorated=decorated)
        (tmp_path / f"{get}.py").write_text(GET)
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        found = sectors(importlib.import_module(name).placed, "1024,")
        line = 1 + text[: text.index("tl.store")].count("\n")
        places = [(access.file, access.line, access.sectors) for access in found.accesses]
        assert places == [(f"{get}.py", 6, 128), (f"{name}.py", line, 128)]


def test_sectors_leaves_out_atomic_operations_and_pytorch():
    found = sectors(lambda x: sector_kernels.histogram(x) + 1, "256:int32")
    assert [*found.totals.values()] == [16, 64, 0, 0]  # half of the four warps load copies
    assert len(found.atomics) == 1 and found.others == ["zeros", "add"]
    assert "not counted: atomic operations at sector_kernels.py:" in str(found)
    sectors(lambda x: sector_kernels.few(sector_kernels.histogram(x), 8, 8), "256:int32")
    with pytest.raises(CountError, match="add to what it reads"):
        sectors(sector_kernels.last, "4,")
