import dataclasses
import functools
import json
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from memtraffic import benchmark, gpus, residency, runtime
from memtraffic.benchmark import baselines, timing
from memtraffic.kernels.softmax import naive
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.names import import_function
from memtraffic.tensors import MEMORY_LAYOUTS, matrix
from memtraffic.testing import assert_close
from memtraffic_book import build, catalog, measurements, peers, recording
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.measurements import (
    compare_with_driver,
    compile_for_targets,
    grid_sizes,
    implementation,
    launch_plans,
)

NAN = float("nan")


def implementations(*names):
    return measurements.implementations(names)


def test_implementations_of_names_and_of_options():
    found = measurements.implementations(["copy", "naive"])
    assert found == {"copy": baselines.copy, "naive": naive.softmax}
    with pytest.raises(LookupError, match="few wraps"):
        implementation("few wraps")
    pytest.importorskip("triton", reason="Triton is not installed")
    stages = {"2 stages": {"fn": "persistent", "num_stages": 2}}
    found = measurements.implementations({"tiled": "tiled", **stages})
    assert found["tiled"] is implementation("tiled")
    assert found["2 stages"].func is implementation("persistent")
    assert found["2 stages"].keywords == {"num_stages": 2}


@pytest.mark.parametrize("id", [id for id in EXPERIMENTS if id != "cdna_grids"])
def test_experiments_without_a_gpu(id, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match="GPU"):
        EXPERIMENTS[id].run()


def test_bench_programs_are_those_of_this_gpu(monkeypatch):
    calls = []
    gpu = dataclasses.replace(gpus.find_gpu("H200"), num_sms=10)
    monkeypatch.setattr(gpus, "this_gpu", lambda: gpu)
    monkeypatch.setattr(measurements, "bench_option", lambda *arguments: calls.append(arguments))
    measurements.bench_programs(naive.softmax, [64, 8], [0.25, 1, 24])
    assert calls == [(naive.softmax, [[64, 8]], "programs", [2, 10, 240])]


# ---- what is timed, by a timer that calls it once; the i-th function takes i + 1 µs

CASE = {"dtype": "float32", "layout": "packed", "shapes": [[8, 8]]}
TIMES = ["us", "us_p20", "us_p80"]


@pytest.fixture
def timed(timed, monkeypatch):
    """The functions that were timed, and with what options, on a GPU with two SMs."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    gpu = dataclasses.replace(gpus.find_gpu("H200"), num_sms=2)
    monkeypatch.setattr(gpus, "this_gpu", lambda *index: gpu)
    return timed


def test_bench_cases_go_through_types_layouts_and_shapes(timed):
    pytest.importorskip("triton", reason="Triton is not installed")
    cases = [
        {"dtype": "float32", "layout": "packed", "shapes": [[4, 8], [2, 16]]},
        {"dtype": "bfloat16", "layout": "transposed", "shapes": [[4, 6]]},
    ]
    frame = measurements.bench_cases(implementations("naive", "tiled"), cases, budget=0.1)
    assert list(frame.columns)[:5] == ["layout", "impl", "m", "n", "dtype"]
    assert frame.iloc[:, :5].to_numpy().tolist() == [
        [layout, impl, m, n, dtype]
        for layout, m, n, dtype in (
            ("packed", 4, 8, "float32"),
            ("packed", 2, 16, "float32"),
            ("transposed", 4, 6, "bfloat16"),
        )
        for impl in ("naive", "tiled")
    ]
    assert [options["budget"] for _, options in timed] == [0.1] * 3
    assert [call.args[0].stride() for call in timed[-1][0]] == [(1, 4)] * 2


def test_bench_dtypes_go_through_types(timed):
    shapes = [[4, 8], [2, 16]]
    frame = measurements.bench_dtypes(["float32", "bfloat16"], impls=["naive"], shapes=shapes)
    assert frame[["dtype", "m", "n"]].to_numpy().tolist() == [
        [dtype, m, n] for dtype in ("float32", "bfloat16") for m, n in shapes
    ]


def test_bench_cases_leave_out_what_is_refused(timed, capsys):
    """`fused` takes powers of two alone."""
    pytest.importorskip("triton", reason="Triton is not installed")
    shapes = {"shapes": [[4, 8], [4, 6]]}
    frame = measurements.bench_cases(implementations("fused", "naive"), [CASE | shapes])
    assert frame["impl"].tolist() == ["fused", "naive", "naive"]
    assert capsys.readouterr().err == (
        "fused at 4 x 6: refused: fused: 6 columns, not a power of two\n"
    )


def test_bench_beside_copy_takes_any_inputs(timed):
    pytest.importorskip("triton", reason="Triton is not installed")
    dtypes, impls = ["float32", "bfloat16"], catalog.CROSS_ENTROPIES
    shapes = [[4, 8], [2, 16]]
    fns = measurements.implementations(impls)
    frame = measurements.bench_beside_copy(
        impls=fns, inputs="M,N M:int64<N", shapes=shapes, dtypes=dtypes
    )
    assert frame[["dtype", "m", "n", "impl"]].to_numpy().tolist() == [
        [dtype, m, n, impl] for dtype in dtypes for m, n in shapes for impl in ("copy", *impls)
    ]
    us = 1e-6 * (1 + np.tile(range(3), 4))
    assert frame["us"].tolist() == pytest.approx((us * 1e6).tolist())
    itemsize = frame["dtype"].map({"float32": 4, "bfloat16": 2})
    assert frame["gb_per_s"].tolist() == pytest.approx((2 * 32 * itemsize / us * 1e-9).tolist())


def test_bench_rounds_are_rows_per_sm(timed):
    pytest.importorskip("triton", reason="Triton is not installed")
    frame = measurements.bench_rounds(
        implementations("naive", "tiled"), 8, [3, 5], [0, 4], dtype="float16"
    )
    assert list(frame.columns)[:6] == ["rounds", "extra", "impl", "m", "n", "dtype"]
    assert frame.iloc[:, :4].to_numpy().tolist() == [
        [rounds, extra, impl, 2 * rounds + extra]
        for rounds in (3, 5)
        for extra in (0, 4)
        for impl in ("naive", "tiled")
    ]
    assert set(frame["dtype"]) == {"float16"}


def test_bench_repeats_everything(timed):
    frame = measurements.bench_repeats(implementations("copy", "naive"), [[4, 8], [2, 16]], 3)
    keys = frame[["repeat", "m", "impl"]].to_numpy().tolist()
    assert keys == [[r, m, i] for r in (1, 2, 3) for m in (4, 2) for i in ("copy", "naive")]
    assert len(timed) == 3 * 2 * 2  # a trial of copies each


class Queue:
    """A GPU that starts each fourth kernel later: what it is asked for, and how long calls take."""

    def __init__(self, monkeypatch):
        self.launched, self.called = 0, []
        monkeypatch.setattr(runtime, "require_gpu", lambda what: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch())
        monkeypatch.setattr(timing, "flush_buffer", lambda: "flush")
        monkeypatch.setattr(timing, "queue_call", self.call)
        monkeypatch.setattr(timing, "elapsed", list)
        self.impls = {label: functools.partial(self.run, label) for label in ("copy", "naive")}

    def run(self, label, x):
        self.called.append((label, x.shape))

    def launch(self):
        self.launched += 1

    def call(self, fn, flush):
        assert flush == "flush"
        fn()
        self.launched += 3
        return 1.0 + self.launched % 4


def test_times_by_turn_are_counted_off(monkeypatch):
    queue = Queue(monkeypatch)
    frame = measurements.times_by_turn(queue.impls, [[4, 8], [2, 16]], [3, 4, 6], 5)
    assert list(frame.columns) == list(EXPERIMENTS["timing_turns"].schema)
    assert frame[["impl", "m", "n", "launches", "turn"]].to_numpy().tolist() == [
        [impl, m, n, launches, turn]
        for impl in ("copy", "naive")
        for m, n in ((4, 8), (2, 16))
        for launches in (3, 4, 6)
        for turn in (1, 2, 3, 4)
    ]
    kinds = frame.groupby(["impl", "m", "launches"])["turn_us"].nunique()
    assert kinds.tolist() == [4, 1, 2] * 4
    counts = [(it, queue.called.count(it)) for it in dict.fromkeys(queue.called)]
    both = [(label, shape) for label in ("copy", "naive") for shape in ((4, 8), (2, 16))]
    assert counts == [(it, 3 * (1 + 4 * 5)) for it in both]


def test_times_by_turn_takes_the_median_in_microseconds(monkeypatch):
    queue = Queue(monkeypatch)
    monkeypatch.setattr(timing, "elapsed", lambda calls: [1e-6, 2e-6, 3e-6, 4e-6] * 2 + [9e-6] * 4)
    frame = measurements.times_by_turn({"copy": queue.impls["copy"]}, [[4, 8]], [3], 3)
    assert frame["turn_us"].tolist() == pytest.approx([1, 2, 3, 4])


def test_bench_copies_times_each_of_them(timed):
    frame = measurements.bench_copies([[4, 8], [2, 16]], "bfloat16")
    names = list(benchmark.copies(matrix(4, 8)))
    assert frame["impl"].tolist() == 2 * names
    assert frame["gb_per_s"][0] == pytest.approx(2 * 2 * 32 / 1e3)
    assert set(frame["dtype"]) == {"bfloat16"}


def test_arithmetic_rates(timed, monkeypatch):
    """The clock waits so many cycles in 1 µs; then come three kinds, in 2, 3 and 4 µs."""
    pytest.importorskip("triton", reason="Triton is not installed")
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    frame = measurements.arithmetic(1)
    assert slept == [measurements.SLEEP_CYCLES]
    assert list(frame.columns) == ["what", "sms", "clock_ghz", *TIMES, "t_per_s", "per_clock"]
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


def test_bytes_in_flight_has_a_row_for_each_access_and_size(timed, monkeypatch):
    streams = []
    monkeypatch.setattr(measurements, "_stream", lambda y, x, *rest: streams.append((x, *rest)))
    frame = measurements.bytes_in_flight([1, 12], 2**-12)
    columns = ["access", "kib_per_sm", "sms", *TIMES, "gb_per_s", "latency_ns"]
    assert list(frame.columns) == columns
    assert [(kib, copy) for _, kib, copy in streams] == [
        (1, False), (12, False), (1, True), (12, True),
    ]  # fmt: skip
    n_bytes = 2**30 * 2**-12
    assert {x.nbytes for x, *_ in streams} == {n_bytes}
    assert frame["access"].tolist() == ["read", "read", "copy", "copy"]
    assert frame["gb_per_s"].tolist() == pytest.approx(
        [n_bytes / 1e3, n_bytes / 2e3, 2 * n_bytes / 3e3, 2 * n_bytes / 4e3]
    )
    # 2 SMs with 1 KiB each in flight: so many tiles one after the other in 1 µs
    assert frame["latency_ns"][0] == pytest.approx(1e3 / (n_bytes / 2048))
    assert frame["latency_ns"][3] == pytest.approx(4e3 / (n_bytes / 2 / 12 / 1024))


@pytest.mark.parametrize("kib", [1, 12, 64])
def test_stream_goes_through_everything(kib, timed):
    pytest.importorskip("triton", reason="Triton is not installed")
    x = matrix(1, 2**17).flatten()
    y = torch.zeros_like(x)
    measurements._stream(y, x, kib, False)
    assert not y.any()
    measurements._stream(y, x, kib, True)
    assert torch.equal(x, y)


def test_l2_read_is_cold_and_then_warm(timed):
    pytest.importorskip("triton", reason="Triton is not installed")
    frame = measurements.l2_read([0.5, 1])
    assert list(frame.columns) == ["cache", "mib", *TIMES, "gb_per_s"]
    assert frame["cache"].tolist() == ["cold", "cold", "warm", "warm"]
    assert frame["mib"].tolist() == [0.5, 1, 0.5, 1]
    assert [options["cold"] for _, options in timed] == [True, True, False, False]
    assert frame["gb_per_s"].tolist() == pytest.approx(2 * [2**19 / 1e3, 2**20 / 1e3])


def test_launch_floor_launches_what_it_says(timed, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic_book import exhibits

    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda x, READ, num_warps: launched.append((*grid, READ))

    monkeypatch.setattr(exhibits, "_idle_kernel", Kernel())
    frame = measurements.launch_floor(4096)
    assert list(frame.columns) == ["what", "programs", *TIMES]
    assert launched == [(1, False), (1, True), (2, False), (4096, False)]
    assert frame["programs"].tolist() == [0, 1, 1, 2, 4096]
    assert frame["us"].tolist() == pytest.approx([1, 2, 3, 4, 5])


def test_elementwise_times_five_operations_on_two_matrices(timed):
    frame = measurements.elementwise([4, 8])
    assert list(frame.columns) == ["what", *TIMES, "gb_per_s"]
    assert len(frame) == len(timed[0][0]) == 5
    assert frame["gb_per_s"].iloc[0] == pytest.approx(2 * 4 * 8 * 4 / 1e3)
    assert frame["us"].is_monotonic_increasing


SMALL = {
    "copies": {"shapes": [[4, 8]]},
    "arithmetic": {"trips": 1},
    "bytes_in_flight": {"kib_per_sm": [1, 4], "gib": 2**-12},
    "launch_floor": {"rows": 4},
    "naive_elementwise": {"shape": [4, 8]},
    "tiled_starts": {"programs": [2, 4], "warps": [1, 4]},
    "l2_read": {"mib": [0.5]},
    "timing_repeats": {"shapes": [[4, 8]], "repeats": 2},
    "timing_host": {"impls": ["torch.softmax"], "shapes": [[4, 8]]},
    "tiled_rule_float32": {"shapes": [[4, 781]]},
    "tiled_rule_bfloat16": {"shapes": [[4, 781]]},
    "persistent_rounds": {"n": 64, "rounds": [1, 2]},
    "persistent_suspects": {"shapes": [[4, 64]]},
    "persistent_suspects_plans": {"shape": [64, 16384]},
    "long_race": {"shapes": [[4, 64]]},
    "long_race_bfloat16": {"shapes": [[4, 64]]},
    "long_few": {"shapes": [[2, 3072]]},
    "long_few_whole": {"shapes": [[2, 3072]]},
    "long_parts": {"shapes": [[2, 64]], "values": [16, 32]},
    "long_plans": {"shape": [2, 16384]},
    "backward_race": {"shapes": [[4, 64]]},
    "backward_recompute": {"shapes": [[4, 64]]},
    "backward_steps": {"shape": [1, 8, 16], "heads": 2, "steps": 2},
    "your_kernel_rms": {"shapes": [[4, 8]]},
    "your_kernel_race": {"shapes": [[4, 8]]},
    "winners": {
        "impls": ["copy", "torch.softmax", "tiled", "persistent"],
        "cases": [case | {"shapes": [[4, 64]]} for case in catalog.CASES],
    },
}


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=[pytest.mark.slow] * id.endswith("plans")) for id in SMALL]
)
def test_experiments_have_their_columns(id, timed, monkeypatch):
    """Experiments in small, as far as they go without a GPU: `run` compares the columns."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    subject = EXPERIMENTS[id]
    assert SMALL[id].keys() <= subject.arguments.keys()
    small = dataclasses.replace(subject, arguments=subject.arguments | SMALL[id])
    frame = small.run()
    assert len(frame) and not frame.isna().any().any()
    numbers = {c.name for c in subject.columns if c.tolerance}
    assert all(frame[name].dtype.kind in "if" for name in numbers)


@pytest.mark.slow
def test_resident_plans(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(runtime, "require_gpu", lambda what: None)
    monkeypatch.setattr(gpus, "this_gpu", lambda *index: gpus.find_gpu("H200"))
    frame = measurements.resident_plans(
        {label: implementation(catalog.SUSPECTS[label]) for label in ("tiled", "2 stages")},
        [64, 16384],
    )
    assert frame["warps"].tolist() == [16, 16]
    assert frame["resident"].tolist() == [2, 2]
    assert (frame["shared_bytes"] // 65536).tolist() == [0, 1]
    assert frame["registers"].between(32, 128).all()


def test_count_cases_has_the_rows_of_each_case(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    calls = []

    def counters(fn, shape):
        calls.append((fn, shape))
        return pd.DataFrame({"kernel": ["a", "b"], "ns": [len(calls), 0]})

    monkeypatch.setattr(measurements.hardware, "counters", counters)
    impls = implementations("tiled", "naive")
    frame = measurements.count_cases(impls, [["tiled", [4, 8]], ["naive", [2, 16]]])
    assert frame.columns.tolist() == ["impl", "m", "n", "kernel", "ns"]
    assert frame.to_numpy().tolist() == [
        ["tiled", 4, 8, "a", 1],
        ["tiled", 4, 8, "b", 0],
        ["naive", 2, 16, "a", 2],
        ["naive", 2, 16, "b", 0],
    ]
    assert calls == [(implementation("tiled"), (4, 8)), (naive.softmax, (2, 16))]


def test_compare_writes_0_where_nothing_was_timed(monkeypatch):
    asked = []

    def compare(fns, inputs, shapes, *, judge, **options):
        asked.append((list(fns.values()), shapes, options))
        rows = [[name, 8, value, value, ""] for name, value in zip(fns, (2.0, NAN), strict=False)]
        return pd.DataFrame(rows, columns=["impl", "n", "us", "gb_per_s", "note"])

    monkeypatch.setattr(benchmark, "bench", compare)
    monkeypatch.setattr(runtime, "require_gpu", lambda what: None)
    shapes, few = [[4, 8], [4, 16]], [[4, 16]]
    frame = measurements.compare(
        implementations("copy"),
        shapes,
        implementations("compile(naive)"),
        few,
        dtype="bfloat16",
        budget=1,
    )
    functions = [baselines.copy, baselines.compiled]
    options = {"only": {"compile(naive)": few}, "dtype": "bfloat16", "budget": 1}
    assert asked == [(functions, shapes, options)]
    assert frame["us"].tolist() == frame["gb_per_s"].tolist() == [2, 0]
    assert recording.from_csv(recording.to_csv(frame))["us"].tolist() == [2, 0]


SCOREBOARD = [id for id in EXPERIMENTS if id.startswith("scoreboard_")]


@pytest.mark.parametrize("id", [id for id in SCOREBOARD if "us" in EXPERIMENTS[id].schema])
def test_scoreboard_is_recorded_and_read_as_the_catalog_says(id, recorded, timed, monkeypatch):
    """Everything but the timer and the compiler runs, at two widths."""

    monkeypatch.setattr(measurements, "ROUNDS", 1)
    monkeypatch.setattr(measurements, "WAITS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for package in ("flag_gems", "liger_kernel", "quack"):  # as if they were not installed
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("MEMTRAFFIC_TUTORIALS", "nowhere")
    arguments = EXPERIMENTS[id].arguments | {"shapes": [[4, 8], [4, 24]]}
    if "compiled" in arguments:
        arguments |= {"compiled": ["masked"], "compiled_shapes": [[4, 24]]}
    if "calls" in arguments:
        arguments |= {"calls": 1}
    subject = dataclasses.replace(EXPERIMENTS[id], arguments=arguments)
    monkeypatch.setitem(catalog.EXPERIMENTS, id, subject)
    folder = build.record_experiments([id])
    frame = recording.read(folder, subject)
    notes = frame["note"] if "note" in frame else pd.Series("", frame.index)
    reasons = {"fused": "refused: fused: 24 columns, not a power of two"}
    absent = {name for name in frame["impl"] if peers.find_peer(name)}
    for impl, n, us, note in zip(frame["impl"], frame["n"], frame["us"], notes, strict=True):
        reason = reasons.get(impl, "") if n == 24 else ""
        assert note.startswith("absent") if impl in absent else note == reason
        assert (us == 0) == bool(note)
    assert set(frame["impl"]) == {*arguments["impls"], *arguments.get("compiled", [])}


def test_gradients_are_those_of_a_softmax():
    x = matrix(3, 5)
    y = torch.softmax(x, dim=1)
    wanted = SOFTMAX_BACKWARD.reference(y.double(), x.double())
    for label in ("torch.softmax, gradient", "memtraffic.softmax, gradient"):
        assert_close(implementation(catalog.CALLERS[label])(x), wanted, x.dtype)
    assert not x.requires_grad and x.grad is None


def test_counters_are_of_functions_that_another_process_can_import(timed, monkeypatch):
    """Nothing but ncu is missing: each function, operation and shape is looked at before."""
    pytest.importorskip("triton", reason="Triton is not installed")
    jobs = []

    def profile(worker, job):
        jobs.append(json.loads(json.dumps(job)))
        return "report"

    monkeypatch.setattr(measurements.hardware, "profile", profile)
    empty = pd.DataFrame(columns=measurements.hardware.COLUMNS)
    monkeypatch.setattr(measurements.hardware, "parse", lambda report: empty.copy())
    for id, subject in EXPERIMENTS.items():
        if "ncu" in subject.needs.commands and not id.startswith(("survey", "scoreboard")):
            subject.run()
    assert len(jobs) > 20
    assert all(callable(import_function(job["fn"])) for job in jobs)
    assert {"memtraffic.benchmark.baselines:compiled_persistent_reduction", "naive"} <= {
        job["fn"] for job in jobs
    }


# ---- training


@pytest.fixture
def trains(monkeypatch):
    """Trainings whose i-th step has the loss 1 / i; and the steps of each, as they were taken."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic_book import attention

    made = []

    def training(softmax, shape, **options):
        steps = []
        made.append((softmax, shape, options, steps))

        def step():
            steps.append("eager")
            return torch.tensor(1 / len(steps))

        return step

    def captured(step):
        for _ in range(attention.WARMUP_STEPS):
            step()

        def replay():
            loss = step()
            made[-1][-1][-1] = "replayed"
            return loss

        return replay

    monkeypatch.setattr(runtime, "require_gpu", lambda what: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(attention, "training", training)
    monkeypatch.setattr(attention, "captured", captured)
    return made


def test_training_losses_are_those_of_each_step(trains):
    frame = measurements.training_losses(catalog.BOTH, [1, 8, 16], 2, 0.5, 3)
    assert frame.to_dict("records") == [
        {"softmax": name, "step": i, "loss": pytest.approx(1 / i)}
        for name in catalog.BOTH
        for i in (1, 2, 3)
    ]
    assert [options for _, _, options, _ in trains] == [{"heads": 2, "lr": 0.5}] * 2


def test_step_times_compares_losses_after_as_many_steps(trains):
    """The steps that warm up a graph count as well."""
    frame = measurements.step_times(catalog.BOTH, [1, 8, 16], 2, 0.5, 20)
    assert frame[["softmax", "launch"]].to_numpy().tolist() == [
        [name, launch] for name in catalog.BOTH for launch in ("eager", "graph")
    ]
    assert frame["loss"].tolist() == pytest.approx([1 / 20] * 4)
    assert (frame[["host_us", "host_wait_us"]] > 0).all(axis=None)
    assert list(EXPERIMENTS["backward_host"].run().columns) == list(frame.columns)
    del trains[4:]
    assert [options["capturable"] for _, _, options, _ in trains] == [False, True] * 2
    timed = measurements.IN_A_ROW + measurements.WAITS
    assert [steps.count("replayed") for *_, steps in trains] == [0, 17 + timed] * 2
    assert [len(steps) for *_, steps in trains] == [20 + timed] * 4


def test_step_counters_adds_up_the_kernels(timed, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    calls = []

    def counters(fn, inputs, shape):
        calls.append((fn.__name__, shape, inputs))
        counted = {name: [1, 20] for name in measurements.hardware.METRICS}
        return pd.DataFrame({"kernel": ["a", "b"]} | counted)

    monkeypatch.setattr(measurements.hardware, "counters", counters)
    subject = EXPERIMENTS["backward_step_counters"]
    frame = subject.run()
    assert frame["softmax"].tolist() == catalog.BOTH
    assert frame["kernels"].tolist() == [2, 2]
    assert (frame[list(measurements.hardware.METRICS)] == 21).all(axis=None)
    [first, second] = calls
    assert first[1:] == second[1:] == ((2, 4096, 512), "B,L,W")
    assert [first[0], second[0]] == ["step_with_torch", "step_with_ours"]


def test_steps_can_be_made_in_another_process():
    """Their names lead back to them, and their inputs can be read."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.names import import_path
    from memtraffic.op import find_op
    from memtraffic_book.attention import STEPS

    assert list(STEPS) == catalog.BOTH
    for step in STEPS.values():
        assert import_function(import_path(step)) is step
    [x] = find_op("B,L,W").arguments((2, 4, 8)).positional
    assert x.shape == (2, 4, 8)


def fake_plan(x, y, *, num_warps=None, num_stages=None):
    if num_warps and num_warps > 4:
        refusals = {8: ValueError, 16: RuntimeError}
        raise refusals.get(num_warps, ValueError)("more than a lane can hold")
    used = SimpleNamespace(num_warps=num_warps or x.shape[1], registers=32, shared_bytes=64)
    plan = {"used": used, "compiled": num_warps, "constants": {"STAGES": 2}}
    return SimpleNamespace(**plan, per_sm=5, grid=(x.shape[0], 1))


@pytest.fixture
def planned(monkeypatch):
    """A launcher of `persistent` that plans without compiling, for an H200."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.kernels.softmax import persistent

    monkeypatch.setattr(runtime, "require_gpu", lambda what: None)
    monkeypatch.setattr(gpus, "this_gpu", lambda: gpus.find_gpu("H200"))
    monkeypatch.setattr(persistent, "plan", fake_plan)


def test_launch_plans(planned):
    frame = launch_plans(7, [8, 16], "bfloat16")
    same = {"stages": 2, "registers": 32, "shared_bytes": 64, "resident": 5, "programs": 7}
    assert frame.to_dict("records") == [{"n": n, "warps": n} | same for n in (8, 16)]


def test_compare_with_driver_asks_about_each_kernel_and_other_sizes(planned, monkeypatch):
    """The fake driver answers by the rules, and one more for the kernels of 2 warps."""
    asked, gpu = [], gpus.find_gpu("H200")

    def driver(kernel, num_warps, shared_bytes):
        asked.append((kernel, num_warps, shared_bytes))
        ours = residency.nvidia.resident_programs(32, shared_bytes, num_warps, gpu)
        return ours + (kernel == 2)

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


def test_compare_with_driver_on_amd(planned, monkeypatch):
    monkeypatch.setattr(gpus, "this_gpu", lambda: gpus.find_gpu("MI300X"))
    with pytest.raises(RuntimeError, match="MI300X"):
        compare_with_driver(1)


# ---- GPUs that are not here

TARGETS = ("gfx942", "gfx1100", "sm_86", "sm_90")


@pytest.fixture(scope="module")
def compiled():
    """The persistent kernel on GPUs with little and with much shared memory."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return compile_for_targets(TARGETS, (1024, 16384), (None, 8))


def tile(target, n):
    from memtraffic.kernels.tiling import tile_shape

    return tile_shape(n, 4, gpus.find_gpu(target))


@pytest.mark.slow
def test_compile_for_targets_has_a_kernel_for_each_combination(compiled):
    keys = [(t, n, warps) for t in TARGETS for n in (1024, 16384) for warps in (None, 8)]
    assert list(compiled) == keys
    for (target, n, num_warps), kernel in compiled.items():
        assert (kernel.kernel, kernel.target) == ("_softmax_persistent_kernel", target)
        assert kernel.num_warps == (num_warps or tile(target, n).num_warps)
        assert {"for", "store", "end"} <= set(kernel.schedule)


@pytest.mark.parametrize(
    ("target", "n", "tiles"),
    [
        pytest.param("gfx942", 16384, 0, id="gfx942-holds-no-tile-more"),
        pytest.param("gfx1100", 16384, 0, id="gfx1100-holds-no-tile-more"),
        pytest.param("sm_86", 16384, 1, id="sm_86-holds-one"),
        pytest.param("sm_90", 16384, 2, id="sm_90-holds-two"),
        pytest.param("gfx942", 1024, None, id="gfx942-narrow"),
        pytest.param("sm_86", 1024, 2, id="sm_86-narrow"),
    ],
)
@pytest.mark.slow
def test_compile_for_targets_prefetches_what_shared_memory_holds(compiled, target, n, tiles):
    gpu = gpus.find_gpu(target)
    for num_warps in (None, 8):
        kernel = compiled[target, n, num_warps]
        assert kernel.shared_bytes <= gpu.shared_per_program
        if tiles is not None:  # and the scratch of the reductions
            assert 0 <= kernel.shared_bytes - tiles * tile(target, n).rows * n * 4 <= 1024
        if gpu.vendor == "nvidia":
            assert kernel.schedule[: tiles + 1] == ("copy",) * tiles + ("for",)


@pytest.mark.slow
def test_grid_sizes_fill_all_processors(compiled, monkeypatch):
    calls = []

    def compile_for_targets(targets, ns, num_warps):
        calls.append((list(targets), ns, num_warps))
        return {key: kernel for key, kernel in compiled.items() if key[2] == 8}

    monkeypatch.setattr(measurements, "compile_for_targets", compile_for_targets)
    frame = grid_sizes([1024, 16384], 8)
    assert calls == [(list(gpus.TARGETS), [1024, 16384], (8,))]
    rows = {(row["target"], row["n"]): row for row in frame.to_dict("records")}
    assert list(rows) == [(target, n) for target in TARGETS for n in (1024, 16384)]
    for (target, n), row in rows.items():
        gpu = gpus.find_gpu(target)
        assert (row["gpu"], row["processors"]) == (gpu.product, gpu.num_sms)
        assert row["resident"] == residency.resident_programs(compiled[target, n, 8]) >= 1
        assert row["programs"] == row["processors"] * row["resident"]


@pytest.mark.gpu
def test_measurements_on_a_gpu():
    assert len(measurements.pointer_latency(64, 520)) == 1
    assert len(measurements.bench_copies([[4096, 781]])) == 6
    rates = measurements.arithmetic(16)
    assert rates["per_clock"].between(1, 256).all() and rates["clock_ghz"].between(0.3, 4).all()
    flow = measurements.bytes_in_flight([1, 64], 0.125).set_index(["access", "kib_per_sm"])
    assert flow["gb_per_s"]["read", 1] < flow["gb_per_s"]["read", 64]
    assert flow["latency_ns"].between(100, 10_000).all()
    assert (measurements.l2_read([1])["us"] > 0).all()
    assert (measurements.launch_floor(64)["us"] > 0).all()
    impls = implementations("tiled", "persistent")
    assert (measurements.resident_plans(impls, [64, 16384])["resident"] >= 1).all()
    plans = launch_plans(4096, [256, 32768])
    assert (plans["registers"] > 0).all() and (plans["resident"] >= 1).all()
    assert len(measurements.bench_programs(impls["persistent"], [4096, 1024], [0.5, 2])) == 2


@pytest.mark.gpu
def test_compare_with_driver_on_a_gpu():
    if not isinstance(gpus.this_gpu(), gpus.NvidiaGpu):
        pytest.skip("needs a GPU of NVIDIA's")
    frame = compare_with_driver(64)
    assert (frame["asked"] == frame["equal"]).all()
    assert frame["asked"].tolist()[1] == 32 * frame["asked"].tolist()[0] > 1000


# ---- on the host's clock, of an option and of layouts

CLOCK, WAIT = "clock", "wait"


@pytest.fixture
def events(monkeypatch, timed):
    """What happened, in order: functions called, the GPU waited for, the clock read.

    The clock advances one second at each reading. The functions of these tests log their calls.
    """
    log = []

    def perf_counter():
        log.append(CLOCK)
        return float(log.count(CLOCK))

    monkeypatch.setattr(measurements, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append(WAIT))
    return log


@pytest.fixture
def logged(events):
    """Makes a function that logs its name and the shape of its input."""
    return lambda name: lambda x: events.append((name, tuple(x.shape)))


def test_launch_overhead_does_not_wait_for_the_calls(events, logged):
    impls = {name: logged(name) for name in ("ours", "theirs")}
    frame = measurements.launch_overhead(impls, (4, 8), calls=3)
    assert list(frame.columns) == ["impl", "m", "n", "dtype", "host_us"]
    assert frame["impl"].tolist() == ["ours", "theirs"]
    assert frame["host_us"].tolist() == pytest.approx([1e6 / 3] * 2)
    ours, theirs = ([(name, (4, 8)), WAIT, CLOCK, *[(name, (4, 8))] * 3, CLOCK] for name in impls)
    assert events == 20 * (ours + theirs)


def test_launch_overhead_is_the_median_of_its_rounds(logged, monkeypatch):
    readings = iter([0.0, 900.0] + 19 * [0.0, 3.0])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr(measurements, "time", clock)
    frame = measurements.launch_overhead({"ours": logged("ours")}, (4, 8), calls=3)
    assert frame["host_us"].tolist() == pytest.approx([1e6])


def test_caller_times_of_the_gpu_and_of_the_host(events, logged):
    """On the GPU as `bench`; until the call returns; and until its result is there."""
    impls = {name: logged(name) for name in ("ours", "theirs")}
    frame = measurements.caller_times(impls, [(4, 8), (2, 16)], dtype="float16", calls=4)
    times = ["us", "us_p20", "us_p80", "host_us", "host_wait_us"]
    assert list(frame.columns) == ["impl", "m", "n", "dtype", *times]
    keys = [(name, m, n) for m, n in ((4, 8), (2, 16)) for name in impls]
    assert list(zip(frame["impl"], frame["m"], frame["n"], strict=True)) == keys
    assert frame["us"].tolist() == pytest.approx([1, 2, 1, 2])
    assert frame["host_us"].tolist() == pytest.approx(4 * [1e6 / 4])
    assert frame["host_wait_us"].tolist() == pytest.approx(4 * [1e6])
    call = ("theirs", (2, 16))
    assert events[-500:] == 100 * [WAIT, CLOCK, call, WAIT, CLOCK]


def test_autotune_cost_times_the_first_call_on_the_host(events, logged):
    shapes = [(4, 8), [2, 16]]
    frame = measurements.autotune_cost(logged("fixed"), logged("tuned"), shapes, dtype="float16")
    assert frame.to_dict("records") == [
        {"m": m, "n": n, "dtype": "float16", "host_first_ms": pytest.approx(1e3)}
        | {"us": pytest.approx(1), "tuned_us": pytest.approx(2)}
        for m, n in shapes
    ]
    first = [WAIT, CLOCK, ("tuned", (4, 8)), WAIT, CLOCK]
    assert events[:7] == [*first, ("fixed", (4, 8)), ("tuned", (4, 8))]


RATED = ["us", "us_p20", "us_p80", "gb_per_s"]


def keys(frame):
    """The rows without their times."""
    return [tuple(row) for row in frame.drop(columns=RATED).itertuples(index=False)]


def test_bench_option_has_a_row_for_each_value_that_is_not_refused(timed):
    pytest.importorskip("triton", reason="Triton is not installed")
    shapes = [(4, 64), (2, 4096)]
    frame = measurements.bench_option(
        implementation("tiled"), shapes, "num_warps", [1, 3, 4], dtype="bfloat16"
    )
    assert list(frame.columns) == ["num_warps", "m", "n", "dtype", *RATED, "copy_us"]
    assert keys(frame) == [
        (1, 4, 64, "bfloat16", pytest.approx(1)),
        (4, 4, 64, "bfloat16", pytest.approx(1)),
        (4, 2, 4096, "bfloat16", pytest.approx(1)),
    ]
    assert frame["us"].tolist() == pytest.approx([2, 3, 2])
    assert frame["gb_per_s"][0] == pytest.approx(2 * 4 * 64 * 2 / 2e3)
    [(tried, _), (first, _), *_] = timed
    assert first[0] is tried[0]
    assert [call.keywords for call in first[1:]] == [{"num_warps": 1}, {"num_warps": 4}]


def test_bench_option_of_what_is_no_option(timed):
    with pytest.raises(ValueError, match="rows"):
        measurements.bench_option(implementation("naive"), [(4, 64)], "rows", [1])


def test_bench_layouts_has_a_row_for_each_layout(timed):
    frame = measurements.bench_layouts(implementation("naive"), [4, 6], dtype="float16")
    assert list(frame.columns) == ["layout", "m", "n", "dtype", *RATED]
    assert keys(frame) == [(layout, 4, 6, "float16") for layout in MEMORY_LAYOUTS]
    assert frame["gb_per_s"][0] == pytest.approx(2 * 4 * 6 * 2 / 1e3)
    calls = [call for [call], _ in timed]
    strides = [MEMORY_LAYOUTS[layout](4, 6) for layout in frame["layout"]]
    assert [call.args[0].stride() for call in calls] == strides
    assert {call.args[0].dtype for call in calls} == {torch.float16}


@pytest.mark.gpu
def test_launch_overhead_on_a_gpu():
    impls = implementations("torch.softmax", "persistent")
    frame = measurements.launch_overhead(impls, (64, 1024))
    assert frame["host_us"].between(1, 10_000).all()
    frame = measurements.caller_times(impls, [(4096, 16384)])
    assert (frame["us"] < frame["host_wait_us"]).all()
