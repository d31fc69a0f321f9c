"""What the experiments measure, by a timer that calls things once: the i-th takes i + 1 µs."""

import dataclasses
import inspect
import json
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from memtraffic import device, gpus, residency
from memtraffic.compile import assembly
from memtraffic.kernels.softmax import naive, persistent
from memtraffic.kernels.softmax.rule import tile_shape
from memtraffic.names import import_function, import_path
from memtraffic.tensors import MEMORY_LAYOUTS
from memtraffic_book import attention, catalog, exhibits, measurements
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.measurements import (
    compare_with_driver,
    compile_for_targets,
    implementation,
)

H200 = gpus.find_gpu("H200")


def implementations(*names):
    return measurements.implementations(names)


def run(id, **arguments):
    """The result of an experiment with some other arguments; `run` compares its columns."""
    subject = EXPERIMENTS[id]
    assert arguments.keys() <= subject.arguments.keys()
    frame = dataclasses.replace(subject, arguments=subject.arguments | arguments).run()
    assert len(frame) and not frame.isna().any(axis=None)
    numbers = [column.name for column in subject.columns if column.tolerance]
    assert all(frame[name].dtype.kind in "if" for name in numbers)
    return frame


@pytest.fixture
def timed(timed, monkeypatch):
    """The functions that were timed, and with what options, on a GPU with two SMs."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    gpu = dataclasses.replace(H200, num_sms=2)
    monkeypatch.setattr(device, "this_gpu", lambda *index: gpu)
    return timed


# ---- of implementations


def test_bench_dtypes_beside_a_copy_of_any_inputs(timed):
    dtypes, impls, shapes = ["float32", "bfloat16"], catalog.CROSS_ENTROPIES, [[4, 8], [2, 16]]
    frame = run("your_kernel_race", shapes=shapes)
    assert frame[["dtype", "m", "n", "impl"]].to_numpy().tolist() == [
        [dtype, m, n, impl] for dtype in dtypes for m, n in shapes for impl in ("copy", *impls)
    ]
    us = 1 + np.tile(range(3), 4)
    assert frame["us"].tolist() == pytest.approx(us.tolist())
    itemsize = frame["dtype"].map({"float32": 4, "bfloat16": 2})
    assert frame["gb_per_s"].tolist() == pytest.approx((2 * 32 * itemsize / us * 1e-3).tolist())


def test_bench_option_has_a_row_for_each_value_that_is_not_refused(timed):
    shapes, values = [(4, 64), (2, 4096)], [1, 4]  # 4096 columns are too many for a warp
    fn = implementation("tiled")
    frame = measurements.bench_option(fn, shapes, "num_warps", values, dtype="bfloat16")
    assert frame[["num_warps", "m", "n", "dtype", "copy_us"]].to_numpy().tolist() == [
        [warps, m, n, "bfloat16", pytest.approx(1)]
        for warps, m, n in ((1, 4, 64), (4, 4, 64), (4, 2, 4096))
    ]
    assert frame["us"].tolist() == pytest.approx([2, 3, 2])
    assert frame["gb_per_s"][0] == pytest.approx(2 * 4 * 64 * 2 / 2e3)
    [(tried, _), (first, _), *_] = timed
    assert first[0] is tried[0]
    assert [call.keywords for call in first[1:]] == [{"num_warps": 1}, {"num_warps": 4}]
    with pytest.raises(ValueError, match="nothing takes rows"):
        measurements.bench_option(implementation("naive"), [(4, 64)], "rows", [1])


def test_bench_programs_are_those_of_this_gpu(timed):
    frame = measurements.bench_programs(implementation("persistent"), [64, 8], [0.5, 1, 24])
    assert frame[["programs", "m", "n"]].to_numpy().tolist() == [[p, 64, 8] for p in (1, 2, 48)]


def test_bench_layouts_has_a_row_for_each_layout(timed):
    frame = measurements.bench_layouts(implementation("naive"), [4, 6], dtype="float16")
    assert frame[["layout", "m", "n", "dtype"]].to_numpy().tolist() == [
        [layout, 4, 6, "float16"] for layout in MEMORY_LAYOUTS
    ]
    assert frame["gb_per_s"][0] == pytest.approx(2 * 4 * 6 * 2 / 1e3)
    tensors = [call.args[0] for [call], _ in timed]
    strides = [MEMORY_LAYOUTS[layout](4, 6) for layout in frame["layout"]]
    assert [x.stride() for x in tensors] == strides
    assert {x.dtype for x in tensors} == {torch.float16}


# ---- of the GPU itself


def test_arithmetic_rates(timed, monkeypatch):
    """The clock waits so many cycles in 1 µs; then come three kinds, in 2, 3 and 4 µs."""
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    frame = run("arithmetic", trips=1)
    assert slept == [measurements.SLEEP_CYCLES]
    assert frame["what"].tolist() == ["exp2", "exp", "multiply-add"]
    results = 24 * 2 * 1024 * 32
    cycles = measurements.SLEEP_CYCLES * 1e6
    assert frame["clock_ghz"].tolist() == pytest.approx(3 * [cycles * 1e-9])
    assert frame["t_per_s"].tolist() == pytest.approx([results / us * 1e-6 for us in (2, 3, 4)])
    assert frame["per_clock"][0] == pytest.approx(results / 2e-6 / 2 / cycles)


@pytest.mark.parametrize("kib", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64])
def test_stream_programs_have_so_many_bytes_in_flight(kib):
    programs, warps, block = measurements.stream_programs(kib)
    assert programs * block * 4 == kib * 1024
    assert block * 4 == warps * 32 * 16 * (2 if kib > 32 else 1)
    assert programs * warps <= 64  # what an SM holds


@pytest.mark.parametrize("kib", [3, 6, 10, 36, 68])
def test_stream_programs_of_no_such_number(kib):
    with pytest.raises(ValueError, match=f"{kib} KiB"):
        measurements.stream_programs(kib)


def test_bytes_in_flight_has_a_row_for_each_access_and_size(timed):
    frame = run("bytes_in_flight", kib_per_sm=[1, 12], gib=3 * 2**-16)
    assert frame[["access", "kib_per_sm"]].to_numpy().tolist() == [
        ["read", 1], ["read", 12], ["copy", 1], ["copy", 12],
    ]  # fmt: skip
    n_bytes = 3 * 2**14
    assert frame["gb_per_s"].tolist() == pytest.approx(
        [n_bytes / 1e3, n_bytes / 2e3, 2 * n_bytes / 3e3, 2 * n_bytes / 4e3]
    )
    # 2 SMs with 1 KiB each in flight: so many tiles one after the other in 1 µs
    assert frame["latency_ns"][0] == pytest.approx(1e3 / (n_bytes / 2048))
    assert frame["latency_ns"][3] == pytest.approx(4e3 / (n_bytes / 2 / 12 / 1024))
    [(calls, _)] = timed
    for (x, y), call in (((call.args[1], call.args[0]), call) for call in calls):
        assert x.nbytes == n_bytes
        y.zero_()
        call()
        assert torch.equal(x, y) if call in calls[2:] else not y.any()


def test_slots_in_flight_reads_or_copies_with_as_many_slots_and_loads_as_it_says(timed):
    frame = run("slots_in_flight", configurations=[[8, 8, 1], [3, 1, 64]], gib=2**-16)
    assert frame.iloc[:, :7].to_numpy().tolist() == [
        [access, *numbers]
        for access in ("read", "copy")
        for numbers in ((8, 8, 64, 4, 1, 8192), (3, 1, 3, 16, 16, 24 * 1024))
    ]
    n_bytes = 2**14
    assert frame["copy_gb_per_s"].tolist() == pytest.approx([2 * n_bytes / 1e3] * 4)
    assert frame["gb_per_s"].tolist() == pytest.approx(
        [n_bytes / 2e3, n_bytes / 3e3, 2 * n_bytes / 4e3, 2 * n_bytes / 5e3]
    )
    calls, _ = timed[-1]  # before, the fastest copy is found
    x, y = (inspect.getclosurevars(calls[1].func).nonlocals[name] for name in "xy")
    for call in calls[1:]:
        y.zero_()
        call()
        assert torch.equal(x, y) if call in calls[3:] else not y.any()


@pytest.mark.parametrize("loads", [1, 4, 16])
def test_slots_in_flight_issues_all_loads_of_a_tile_before_its_first_store(loads):
    x, block = torch.zeros(2**12), 32 * 4 * loads

    def read(x):
        exhibits._letters_kernel[(3,)](x, x, len(x) // block, 0, BLOCK=block, num_warps=1)
        return x

    [code] = assembly(read, x, target=H200)
    order = re.findall(r"(LDG|STG)\.E\.128", code)
    assert order == ["LDG"] * loads + ["STG"] * loads


def test_l2_read_is_cold_and_then_warm(timed):
    frame = run("l2_read", mib=[2**-5, 2**-4])
    assert frame["cache"].tolist() == ["cold", "cold", "warm", "warm"]
    assert frame["mib"].tolist() == [2**-5, 2**-4] * 2
    assert [options["cold"] for _, options in timed] == [True, True, False, False]
    assert frame["gb_per_s"].tolist() == pytest.approx(2 * [2**15 / 1e3, 2**16 / 1e3])


def test_idle_programs_are_launched_with_their_warps_and_none_for_0(timed, monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda x, num_warps: launched.append((*grid, num_warps))

    monkeypatch.setattr(exhibits, "_idle_kernel", Kernel())
    frame = run("tiled_starts", programs=[0, 2, 4], warps=[1, 8])
    keys = [[n, warps] for n in (0, 2, 4) for warps in (1, 8)]
    assert frame[["programs", "warps"]].to_numpy().tolist() == keys
    assert launched == [(2, 1), (2, 8), (4, 1), (4, 8)]
    assert frame["us"].tolist() == pytest.approx([1, 2, 3, 4, 5, 6])


# What other tests of this file do not run, in small.
SMALL = {
    "timing_repeats": {"shapes": [[4, 8]]},
    "tiled_layouts_float32": {"shape": [2, 8]},
    "tiled_rows_float32": {"shapes": [[2, 64]]},
    "persistent_suspects": {"shapes": [[2, 64]]},
    "map_float32": {"shapes": [[2, 64]]},
    "chunks_converted": {"shapes": [[2, 4096]]},
    "decision_attention": {"shapes": [[2, 8]]},
    "occupancy_programs": {"shape": [4, 64]},
    "long_few": {"shapes": [[1, 3072]]},
    "backward_race": {"shapes": [[2, 64]]},
    "your_kernel_rms": {"shapes": [[2, 8]]},
}


@pytest.mark.parametrize("id", SMALL)
def test_experiments_in_small(id, timed):
    """As far as they go without a GPU: each implementation takes its inputs and options."""
    run(id, **SMALL[id])


# ---- by hardware counters


def test_count_cases_has_the_rows_of_each_case(monkeypatch):
    calls = []

    def count_each(several):
        calls.extend(several)
        return [pd.DataFrame({"kernel": ["a", "b"], "ns": [i, 0]}) for i in (1, 2)]

    monkeypatch.setattr(measurements, "count_each", count_each)
    impls = implementations("copy", "naive")
    frame = measurements.count_cases(impls, [["copy", [4, 8]], ["naive", [2, 16]]])
    assert frame.columns.tolist() == ["impl", "m", "n", "kernel", "ns"]
    assert frame.to_numpy().tolist() == [
        ["copy", 4, 8, "a", 1],
        ["copy", 4, 8, "b", 0],
        ["naive", 2, 16, "a", 2],
        ["naive", 2, 16, "b", 0],
    ]
    assert calls == [(impls["copy"], [4, 8], "packed"), (naive.softmax, [2, 16], "packed")]


def test_counters_are_of_functions_that_another_process_can_import(timed, monkeypatch):
    """Nothing but ncu is missing: each function, operation and shape is looked at before."""
    jobs = []

    def profile(worker, job, *others):
        jobs.append(json.loads(json.dumps(job)))
        return "report"

    monkeypatch.setattr(measurements.hardware, "profile", profile)
    empty = pd.DataFrame(columns=["kernel", *measurements.hardware.METRICS])
    monkeypatch.setattr(measurements.hardware, "parse", lambda report: empty.copy())

    def count_each(calls):
        jobs.extend({"fn": import_path(fn)} for fn, *_ in calls)
        return [empty.copy() for _ in calls]

    monkeypatch.setattr(measurements, "count_each", count_each)
    for id, subject in EXPERIMENTS.items():
        if "ncu" in subject.needs.commands and not id.startswith(("survey", "sectors", "bank")):
            subject.run()
    assert len(jobs) > 20
    assert all(callable(import_function(job["fn"])) for job in jobs)
    assert {"memtraffic.benchmark.baselines:compiled_persistent_reduction", "naive"} <= {
        job["fn"] for job in jobs
    }


def test_step_counters_adds_up_the_kernels(timed, monkeypatch):
    calls = []

    def counters(fn, inputs, shape):
        calls.append((fn, inputs, shape))
        counted = {name: [1, 20] for name in measurements.hardware.METRICS}
        return pd.DataFrame({"kernel": ["a", "b"]} | counted)

    monkeypatch.setattr(measurements.hardware, "counters", counters)
    frame = run("backward_step_counters")
    assert frame["softmax"].tolist() == list(attention.STEPS)
    assert frame["kernels"].tolist() == [2, 2]
    assert (frame[list(measurements.hardware.METRICS)] == 21).all(axis=None)
    assert calls == [(step, "B,L,W", (2, 4096, 512)) for step in attention.STEPS.values()]


# ---- plans


def fake_plan(x, y, *, num_warps=None, num_stages=None):
    if num_warps and num_warps > 4:
        refusals = {8: ValueError, 16: RuntimeError}
        raise refusals.get(num_warps, ValueError)("more than a lane can hold")
    return SimpleNamespace(compiled=num_warps)


@pytest.fixture
def planned(monkeypatch):
    """A launcher of `persistent` that plans without compiling, for an H200."""
    monkeypatch.setattr(device, "this_gpu", lambda: H200)
    monkeypatch.setattr(persistent, "plan", fake_plan)
    used = SimpleNamespace(registers=32, shared_bytes=64)
    monkeypatch.setattr(residency, "loaded_resources", lambda compiled, gpu: used)


def test_compare_with_driver_asks_about_each_kernel_and_other_sizes(planned, monkeypatch):
    """The fake driver answers by the rules, and one more for the kernels of 2 warps."""
    asked = []

    def driver(kernel, num_warps, shared_bytes):
        asked.append((kernel, num_warps, shared_bytes))
        limits = residency.nvidia.programs_by_limit(32, shared_bytes, num_warps, H200)
        return min(limits.values()) + (kernel == 2)

    monkeypatch.setattr(residency.nvidia, "driver_resident_programs", driver)
    kernels = 2 * 10 * 3 * 3  # types, widths, numbers of warps that fit, stages
    assert compare_with_driver(1).to_dict("records") == [
        {"kernels": "as compiled", "asked": kernels, "equal": kernels * 2 // 3},
        {"kernels": "other sizes", "asked": 32 * kernels, "equal": 32 * kernels * 2 // 3},
    ]
    assert len(asked) == 33 * kernels
    assert asked[0] == (1, 1, 64)
    others = {(w, 1237 * w * stages) for w in range(1, 33) for stages in (1, 2, 3)}
    assert {(warps, shared) for _, warps, shared in asked} == others | {(1, 64), (2, 64), (4, 64)}


# ---- GPUs that are not here


@pytest.mark.slow
def test_compile_for_targets_prefetches_what_shared_memory_holds():
    """So many tiles of 16384 columns, and scratch of the reductions; with the rule's warps, too."""
    tiles = {"gfx942": 0, "gfx1100": 0, "sm_86": 1, "sm_90": 2}
    found = compile_for_targets(tiles, [16384], [None]) | compile_for_targets(
        ["sm_86"], [1024], [8]
    )
    assert list(found) == [*((target, 16384, None) for target in tiles), ("sm_86", 1024, 8)]
    for (target, n, num_warps), kernel in found.items():
        gpu, copied = gpus.find_gpu(target), tiles[target] if n > 1024 else 2
        tile = tile_shape(n, 4, gpu)
        assert (kernel.kernel, kernel.target) == ("_softmax_persistent_kernel", target)
        assert kernel.num_warps == (num_warps or tile.num_warps)
        assert kernel.shared_bytes <= gpu.shared_per_program
        assert 0 <= kernel.shared_bytes - copied * tile.rows * n * 4 <= 1024
        if gpu.vendor == "nvidia":
            assert kernel.schedule[: copied + 1] == ("copy",) * copied + ("for",)


@pytest.mark.gpu
def test_measurements_on_a_gpu():
    assert len(measurements.pointer_latency(64, 520)) == 1
    rates = measurements.arithmetic(16)
    assert rates["per_clock"].between(1, 256).all() and rates["clock_ghz"].between(0.3, 4).all()
    flow = measurements.bytes_in_flight([1, 64], 0.125).set_index(["access", "kib_per_sm"])
    assert flow["gb_per_s"]["read", 1] < flow["gb_per_s"]["read", 64]
    assert flow["latency_ns"].between(100, 10_000).all()
    slots = measurements.slots_in_flight([[1, 1, 1], [3, 1, 64]], 0.125)["gb_per_s"]
    assert slots[0] < slots[1] and slots[2] < slots[3]
    assert (measurements.l2_read([1])["us"] > 0).all()
    assert (measurements.idle_programs([0, 64], [4])["us"] > 0).all()
    persistent = implementation("persistent")
    assert len(measurements.bench_programs(persistent, [4096, 1024], [0.5, 2])) == 2


@pytest.mark.gpu
def test_compare_with_driver_on_a_gpu():
    if not isinstance(device.this_gpu(), gpus.NvidiaGpu):
        pytest.skip("needs a GPU of NVIDIA's")
    frame = compare_with_driver(64)
    assert (frame["asked"] == frame["equal"]).all()
    assert frame["asked"].tolist()[1] == 32 * frame["asked"].tolist()[0] > 1000
