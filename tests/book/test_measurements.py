"""What the experiments measure, by a timer that calls things once: the i-th takes i + 1 µs."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from cases import cases

pytest.importorskip("triton", reason="Triton is not installed")

from memtraffic import device, gpus, residency
from memtraffic.compile import assembly
from memtraffic.kernels.softmax import persistent
from memtraffic.kernels.softmax.rule import tile_shape
from memtraffic.names import import_function
from memtraffic.tensors import MEMORY_LAYOUTS
from memtraffic_book import attention, catalog, exhibits, measurements
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.measurements import (
    compare_with_driver,
    compile_for_targets,
    implementation,
)

H200 = gpus.find_gpu("H200")
METRICS = measurements.hardware.METRICS


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


# ---- in small, as far as they go without a GPU: each takes its inputs and options

RACED = [*itertools.product(DTYPES := catalog.DTYPES, (4, 2), ("copy", *catalog.CROSS_ENTROPIES))]
CYCLES, RESULTS = measurements.SLEEP_CYCLES * 1e6, 24 * 2 * 1024 * 32
READ, COPIED = 3 * 2**14 / 1e3, 2 * 3 * 2**14 / 1e3  # GB/s in 1 µs
FLOWS = {"access": ["read", "read", "copy", "copy"], "us": [1, 2, 3, 4]}


@cases(
    ("id", "arguments", "found"),
    {
        "bench_dtypes": (
            "your_kernel_race",
            {"shapes": [[4, 8], [2, 16]]},
            {
                **dict(zip(("dtype", "m", "impl"), map(list, zip(*RACED)), strict=True)),
                "us": [1, 2, 3] * 4,
                "gb_per_s": [2 * 32 * b / us / 1e3 for b in (4, 2) for us in (1, 2, 3) * 2],
            },
        ),
        "bench_repeats": (
            "timing_repeats",
            {"shapes": [[4, 8]], "repeats": 2},
            {"repeat": [1, 1, 1, 2, 2, 2], "impl": catalog.REPEATED * 2, "us": [1, 2, 3] * 2},
        ),
        "bench_layouts": (
            "tiled_layouts_bfloat16",
            {"shape": [4, 6]},
            {"layout": [*MEMORY_LAYOUTS], "gb_per_s": [2 * 4 * 6 * 2 / 1e3] * 4},
        ),
        "bench_programs": (
            "occupancy_programs",
            {"shape": [64, 8], "programs_per_sm": [0.5, 1, 24]},
            {"programs": [1, 2, 48], "us": [2, 3, 4], "copy_us": [1, 1, 1]},
        ),
        "clock_waits_in_1_us": (
            "arithmetic",
            {"trips": 1},
            {
                "what": ["exp2", "exp", "multiply-add"],
                "clock_ghz": [CYCLES * 1e-9] * 3,
                "t_per_s": [RESULTS / us * 1e-6 for us in (2, 3, 4)],
                "per_clock": [RESULTS / us * 1e6 / 2 / CYCLES for us in (2, 3, 4)],
            },
        ),
        "latency_of_tiles_one_after_the_other": (
            "bytes_in_flight",
            {"kib_per_sm": [1, 12], "gib": 3 * 2**-16},
            FLOWS
            | {
                "kib_per_sm": [1, 12, 1, 12],
                "gb_per_s": [READ, READ / 2, COPIED / 3, COPIED / 4],
                "latency_ns": [1e3 / 24, 2e3 / 2, 3e3 / 24, 4e3 / 2],  # so many tiles on 2 SMs
            },
        ),
        "copy_of_1_us_beside": (
            "slots_in_flight",
            {"configurations": [[8, 8, 1], [3, 1, 64]], "gib": 3 * 2**-16},
            FLOWS
            | {
                **{"us": [2, 3, 4, 5], "programs": [8, 3, 8, 3], "warps": [8, 1, 8, 1]},
                **{"slots": [64, 3, 64, 3], "load_bytes": [4, 16, 4, 16], "loads": [1, 16, 1, 16]},
                "flight_bytes": [8192, 24 * 1024, 8192, 24 * 1024],
                "gb_per_s": [READ / 2, READ / 3, COPIED / 4, COPIED / 5],
                "copy_gb_per_s": [COPIED] * 4,
            },
        ),
        "l2_read": (
            "l2_read",
            {"mib": [2**-5, 2**-4]},
            {
                **{"cache": ["cold", "cold", "warm", "warm"], "mib": [2**-5, 2**-4] * 2},
                "gb_per_s": 2 * [2**15 / 1e3, 2**16 / 1e3],
            },
        ),
        "idle_programs": (
            "tiled_starts",
            {"programs": [0, 2, 4], "warps": [1, 8]},
            {"programs": [0, 0, 2, 2, 4, 4], "warps": [1, 8] * 3, "us": [1, 2, 3, 4, 5, 6]},
        ),
        "pointer_latency": ("occupancy_latency", {"hops": 4}, {"us": [1], "latency_ns": [250]}),
        "bench_option": ("tiled_rows_float32", {"shapes": [[2, 64]]}, {"copy_us": [1] * 6}),
        "compare": ("map_float32", {"shapes": [[2, 64]]}, {"impl": [*catalog.MAPPED]}),
        "converted": ("chunks_converted", {"shapes": [[2, 4096]]}, {"us": [1, 2]}),
        "attention": ("decision_attention", {"shapes": [[2, 8]]}, {"m": [2] * 6}),
        "suspects": ("persistent_suspects", {"shapes": [[2, 64]]}, {"us": [*range(1, 8)]}),
        "long": ("long_few", {"shapes": [[1, 3072]]}, {"us": [1, 2, 3, 4]}),
        "backward": ("backward_race", {"shapes": [[2, 64]]}, {"us": [1, 2, 3, 4] * 2}),
        "rms_norm": ("your_kernel_rms", {"shapes": [[2, 8]]}, {"us": [1, 2, 3, 4]}),
    },
)
def test_experiments_in_small(id, arguments, found, timed):
    frame = run(id, **arguments)
    for name, values in found.items():
        assert frame[name].tolist() == (
            values if isinstance(values[0], str) else pytest.approx(values)
        ), name


def test_bench_option_has_a_row_for_each_value_that_is_not_refused(timed):
    shapes, values = [(4, 64), (2, 4096)], [1, 4]  # 4096 columns are too many for a warp
    fn = implementation("tiled")
    frame = measurements.bench_option(fn, shapes, "num_warps", values, dtype="bfloat16")
    assert frame[["num_warps", "m", "n", "dtype", "copy_us", "us"]].to_numpy().tolist() == [
        [warps, m, n, "bfloat16", pytest.approx(1), pytest.approx(us)]
        for warps, m, n, us in ((1, 4, 64, 2), (4, 4, 64, 3), (4, 2, 4096, 2))
    ]
    with pytest.raises(ValueError, match="nothing takes rows"):
        measurements.bench_option(implementation("naive"), [(4, 64)], "rows", [1])


def test_what_is_timed_has_the_layout_or_the_cache_that_its_row_says(timed):
    frame = run("tiled_layouts_float32", shape=[4, 6])
    strides = [MEMORY_LAYOUTS[layout](4, 6) for layout in frame["layout"]]
    assert [call.args[0].stride() for [call], _ in timed] == strides
    timed.clear()
    frame = run("l2_read", mib=[2**-5])
    assert [options["cold"] for _, options in timed] == [it == "cold" for it in frame["cache"]]


@pytest.mark.parametrize("kib", [1, 2, 12, 24, 32, 48, 64, 3, 36])
def test_stream_programs_have_so_many_bytes_in_flight(kib):
    if kib in (3, 36):
        with pytest.raises(ValueError, match=f"{kib} KiB"):
            measurements.stream_programs(kib)
        return
    programs, warps, block = measurements.stream_programs(kib)
    assert programs * block * 4 == kib * 1024
    assert block * 4 == warps * 32 * 16 * (2 if kib > 32 else 1)
    assert programs * warps <= 64  # what an SM holds


@cases(
    ("id", "arguments"),
    {
        "bytes": ("bytes_in_flight", {"kib_per_sm": [1, 12], "gib": 3 * 2**-16}),
        "slots": ("slots_in_flight", {"configurations": [[8, 8, 1], [3, 1, 64]], "gib": 2**-16}),
    },
)
def test_flows_read_or_copy_everything(id, arguments, timed):
    accesses = run(id, **arguments)["access"]
    calls, _ = timed[-1]
    for access, call in zip(accesses, calls[-len(accesses) :], strict=True):
        y, x = call.args[:2]
        y.zero_()
        call()
        assert torch.equal(x, y) if access == "copy" else not y.any()


def test_slots_in_flight_issues_all_loads_of_a_tile_before_its_first_store():
    x, loads = torch.zeros(2**12), 16
    block = 32 * 4 * loads

    def read(x):
        exhibits._letters_kernel[(3,)](x, x, len(x) // block, 0, BLOCK=block, num_warps=1)
        return x

    [code] = assembly(read, x, target=H200)
    order = re.findall(r"(LDG|STG)\.E\.128", code)
    assert order == ["LDG"] * loads + ["STG"] * loads


def test_idle_programs_are_launched_with_their_warps_and_none_for_0(timed, monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda x, num_warps: launched.append((*grid, num_warps))

    monkeypatch.setattr(exhibits, "_idle_kernel", Kernel())
    run("tiled_starts", programs=[0, 2], warps=[1, 8])
    assert launched == [(2, 1), (2, 8)]


# ---- by hardware counters


def test_counters_are_of_functions_that_another_process_can_import(timed, monkeypatch):
    """Nothing but ncu is missing, which sees two kernels in each call."""
    jobs, found = [], {}

    def profile(worker, job, *others):
        jobs.append(json.loads(json.dumps(job)))
        return "report"

    kernels = pd.DataFrame({"kernel": ["a", "b"]} | {name: [1, 20] for name in METRICS})
    monkeypatch.setattr(measurements.hardware, "profile", profile)
    monkeypatch.setattr(measurements.hardware, "parse", lambda report: kernels)
    for id, subject in EXPERIMENTS.items():
        if "ncu" in subject.needs.commands and not id.startswith(("survey", "sectors")):
            before = len(jobs)
            found[id] = run(id), jobs[before:]
            assert len(found[id][0]) == (1 if id == "backward_step_counters" else 2) * len(
                found[id][1]
            )
    assert all(callable(import_function(job["fn"])) for job in jobs)
    assert {"memtraffic.benchmark.baselines:compiled_persistent_reduction", "naive"} <= {
        job["fn"] for job in jobs
    }
    frame, counted = found["tiled_counters"]
    assert frame["layout"].tolist()[::2] == [job["layout"] for job in counted] == [*MEMORY_LAYOUTS]
    frame, counted = found["long_counters"]
    assert [job["shape"] for job in counted] == frame[["m", "n"]].to_numpy().tolist()[::2]
    assert frame["impl"].tolist()[::2] == [it for it, _ in catalog.LONG_COUNTED["cases"]]
    assert {job["fn"] for job in counted} >= {"online", "split"}
    steps, _ = found["backward_step_counters"]
    assert steps["softmax"].tolist() == list(attention.STEPS)
    assert steps["kernels"].tolist() == [2, 2]
    assert (steps[list(METRICS)] == 21).all(axis=None)


# ---- plans


def test_compare_with_driver_asks_about_each_kernel_and_other_sizes(monkeypatch):
    """The fake driver answers by the rules, and one more for the kernels of 2 warps."""
    asked = []

    def plan(x, y, *, num_warps, num_stages):
        if num_warps > 4:
            raise (RuntimeError if num_warps == 16 else ValueError)("more than a lane can hold")
        return SimpleNamespace(compiled=num_warps)

    def driver(kernel, num_warps, shared_bytes):
        asked.append((kernel, num_warps, shared_bytes))
        limits = residency.nvidia.programs_by_limit(32, shared_bytes, num_warps, H200)
        return min(limits.values()) + (kernel == 2)

    used = SimpleNamespace(registers=32, shared_bytes=64)
    monkeypatch.setattr(device, "this_gpu", lambda: H200)
    monkeypatch.setattr(persistent, "plan", plan)
    monkeypatch.setattr(residency, "loaded_resources", lambda compiled, gpu: used)
    monkeypatch.setattr(residency.nvidia, "driver_resident_programs", driver)
    kernels = 2 * 10 * 3 * 3  # types, widths, numbers of warps that fit, stages
    assert compare_with_driver(1).to_dict("records") == [
        {"kernels": "as compiled", "asked": kernels, "equal": kernels * 2 // 3},
        {"kernels": "other sizes", "asked": 32 * kernels, "equal": 32 * kernels * 2 // 3},
    ]
    assert asked[0] == (1, 1, 64)
    others = {(w, 1237 * w * stages) for w in range(1, 33) for stages in (1, 2, 3)}
    assert {(warps, shared) for _, warps, shared in asked} == others | {(1, 64), (2, 64), (4, 64)}


# ---- GPUs that are not here


@pytest.mark.slow
def test_compile_for_targets_prefetches_what_shared_memory_holds():
    """So many tiles of 16384 columns, and scratch of the reductions; with the rule's warps, too."""
    tiles = {"gfx1100": 0, "sm_86": 1, "sm_90": 2}
    found = compile_for_targets(tiles, [16384]) | compile_for_targets(["sm_86"], [1024], [8])
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
