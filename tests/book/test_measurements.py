"""What the experiments measure, by a timer that calls things once: the i-th takes i + 1 µs."""

import dataclasses
import json
import re
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pytest
import torch
from cases import H200

from memtraffic import device, residency
from memtraffic.compile import assembly
from memtraffic.kernels.softmax import persistent
from memtraffic.names import import_function
from memtraffic.tensors import MEMORY_LAYOUTS
from memtraffic_book import attention, catalog, exhibits, measurements
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.measurements import compare_with_driver, implementation

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

SMALL = {
    "arithmetic": {"trips": 1},
    "backward_race": {"shapes": [[2, 64]]},
    "bytes_in_flight": {"kib_per_sm": [1, 12], "gib": 3 * 2**-16},
    "decision_attention": {"shapes": [[2, 8]]},
    "l2_read": {"mib": [2**-5, 2**-4]},
    "long_few": {"shapes": [[1, 3072]]},
    "map_float32": {"shapes": [[2, 64]]},
    "occupancy_latency": {"hops": 4},
    "occupancy_programs": {"shape": [64, 8], "programs_per_sm": [0.5, 1, 24]},
    "persistent_suspects": {"shapes": [[2, 64]]},
    "slots_in_flight": {"configurations": [[8, 8, 1], [3, 1, 64]], "gib": 3 * 2**-16},
    "tiled_layouts_bfloat16": {"shape": [4, 6]},
    "tiled_starts": {"programs": [0, 2, 4], "warps": [1, 8]},
    "timing_repeats": {"shapes": [[4, 8]], "repeats": 2},
    "your_kernel_race": {"shapes": [[4, 8], [2, 16]]},
}
CYCLES, RESULTS = measurements.SLEEP_CYCLES * 1e6, 24 * 2 * 1024 * 32
READ = 3 * 2**14 / 1e3  # GB/s in 1 µs
RACED = ["copy", *catalog.CROSS_ENTROPIES]
FOUND = [
    ("arithmetic", "what", ["exp2", "exp", "multiply-add"]),
    ("arithmetic", "clock_ghz", [CYCLES * 1e-9] * 3),  # of the first kernel, which waits
    ("arithmetic", "t_per_s", [RESULTS / us * 1e-6 for us in (2, 3, 4)]),
    ("arithmetic", "per_clock", [RESULTS / us * 1e6 / 2 / CYCLES for us in (2, 3, 4)]),
    ("bytes_in_flight", "kib_per_sm", [1, 12, 1, 12]),
    ("bytes_in_flight", "gb_per_s", [READ / 2, READ / 3, READ / 2, 2 * READ / 5]),
    # On 2 SMs, 24 tiles one after the other, or 2.
    ("bytes_in_flight", "latency_ns", [2e3 / 24, 3e3 / 2, 4e3 / 24, 5e3 / 2]),
    ("l2_read", "mib", [2**-5, 2**-4] * 2),
    ("l2_read", "gb_per_s", 2 * [2**15 / 1e3, 2**16 / 1e3]),
    ("occupancy_latency", "latency_ns", [1e3 / 4]),
    ("occupancy_programs", "programs", [1, 2, 48]),
    ("slots_in_flight", "slots", [64, 3, 64, 3]),
    ("slots_in_flight", "load_bytes", [4, 16, 4, 16]),
    ("slots_in_flight", "loads", [1, 16, 1, 16]),
    ("slots_in_flight", "flight_bytes", [8 * 2**10, 24 * 2**10] * 2),
    ("slots_in_flight", "gb_per_s", [READ / 2, READ / 3, READ / 2, 2 * READ / 5]),
    ("slots_in_flight", "copy_gb_per_s", [2 * READ] * 4),
    ("tiled_layouts_bfloat16", "gb_per_s", [2 * 4 * 6 * 2 / 1e3] * len(MEMORY_LAYOUTS)),
    ("tiled_starts", "programs", [0, 0, 2, 2, 4, 4]),
    ("tiled_starts", "warps", [1, 8] * 3),
    ("timing_repeats", "repeat", [1, 1, 1, 2, 2, 2]),
    ("your_kernel_race", "impl", RACED * 4),
    ("your_kernel_race", "dtype", [it for it in catalog.DTYPES for _ in "123456"]),
    ("your_kernel_race", "gb_per_s", [64 * b / us / 1e3 for b in (4, 2) for us in (1, 2, 3) * 2]),
]


@pytest.mark.parametrize("id", SMALL)
def test_experiments_in_small(id, timed):
    frame = run(id, **SMALL[id])
    for name, values in [(name, values) for of, name, values in FOUND if of == id]:
        text = isinstance(values[0], str)
        assert frame[name].tolist() == (values if text else pytest.approx(values)), name


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


@pytest.mark.parametrize("kib", [1, 2, 12, 24, 32, 48, 64])
def test_bytes_in_flight_come_of_programs_that_an_sm_holds(kib, timed):
    run("bytes_in_flight", kib_per_sm=[kib], gib=3 * 2**-16)
    programs, warps, elements = timed[-1][0][-1].args[2:]
    assert programs * warps * 32 * elements * 4 == kib * 1024
    assert elements == (8 if kib > 32 else 4) and programs * warps <= 64
    assert warps & (warps - 1) == 0


@pytest.mark.parametrize("id", ["bytes_in_flight", "slots_in_flight"])
def test_flows_read_or_copy_everything(id, timed):
    accesses = run(id, **SMALL[id])["access"]
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
        exhibits._stream_kernel[(3,)](x, x, len(x) // block, 0, BLOCK=block, num_warps=1)
        return x

    [code] = assembly(read, x, target=H200)
    order = re.findall(r"(LDG|STG)\.E\.128", code)
    assert order == ["LDG"] * loads + ["STG"] * loads


def test_idle_programs_are_launched_with_their_warps_and_none_for_0(timed, monkeypatch):
    kernel = mock.MagicMock()
    monkeypatch.setattr(exhibits, "_idle_kernel", kernel)
    run("tiled_starts", programs=[0, 2], warps=[1, 8])
    assert kernel.__getitem__.call_args_list == [mock.call((2,))] * 2
    assert [it.kwargs for it in kernel[0].call_args_list] == [{"num_warps": 1}, {"num_warps": 8}]


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
    assert all(callable(import_function(job["fn"])) for job in jobs)
    frame, counted = found["tiled_counters"]
    assert frame["layout"].tolist()[::2] == [job["layout"] for job in counted] == [*MEMORY_LAYOUTS]
    frame, counted = found["long_counters"]
    assert [job["shape"] for job in counted] == frame[["m", "n"]].to_numpy().tolist()[::2]
    assert frame["impl"].tolist()[::2] == [it for it, _ in catalog.LONG_COUNTED["cases"]]
    steps, _ = found["backward_step_counters"]
    assert steps["softmax"].tolist() == list(attention.STEPS)
    assert steps["kernels"].tolist() == [2, 2]
    assert (steps[list(METRICS)] == 21).all(axis=None)


# ---- plans


def test_compare_with_driver_asks_about_each_kernel_and_other_sizes(monkeypatch):
    """The fake driver answers by the rules, and one more for the kernels of 2 warps."""

    def plan(x, y, *, num_warps, num_stages):
        if num_warps > 4:
            raise (RuntimeError if num_warps == 16 else ValueError)("more than a lane can hold")
        return SimpleNamespace(compiled=num_warps)

    def driver(kernel, num_warps, shared_bytes):
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
