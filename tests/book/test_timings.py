from types import SimpleNamespace

import pytest
import torch

from memtraffic.tensors import MEMORY_LAYOUTS
from memtraffic_book import implementation, measurements
from memtraffic_book.measurements import (
    autotune_cost,
    bench_layouts,
    bench_option,
    caller_times,
    implementations,
    launch_overhead,
)

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
    frame = launch_overhead(impls, (4, 8), calls=3)
    assert list(frame.columns) == ["impl", "m", "n", "dtype", "host_us"]
    assert frame["impl"].tolist() == ["ours", "theirs"]
    assert frame["host_us"].tolist() == pytest.approx([1e6 / 3] * 2)
    ours, theirs = ([(name, (4, 8)), WAIT, CLOCK, *[(name, (4, 8))] * 3, CLOCK] for name in impls)
    assert events == 20 * (ours + theirs)


def test_launch_overhead_is_the_median_of_its_rounds(logged, monkeypatch):
    readings = iter([0.0, 900.0] + 19 * [0.0, 3.0])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr(measurements, "time", clock)
    frame = launch_overhead({"ours": logged("ours")}, (4, 8), calls=3)
    assert frame["host_us"].tolist() == pytest.approx([1e6])


def test_caller_times_of_the_gpu_and_of_the_host(events, logged):
    """On the GPU as `bench`; until the call returns; and until its result is there."""
    impls = {name: logged(name) for name in ("ours", "theirs")}
    frame = caller_times(impls, [(4, 8), (2, 16)], dtype="float16", calls=4)
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
    frame = autotune_cost(logged("fixed"), logged("tuned"), shapes, dtype="float16")
    assert frame.to_dict("records") == [
        {"m": m, "n": n, "dtype": "float16", "host_first_ms": pytest.approx(1e3)}
        | {"us": pytest.approx(1), "tuned_us": pytest.approx(2)}
        for m, n in shapes
    ]
    first = [WAIT, CLOCK, ("tuned", (4, 8)), WAIT, CLOCK]
    assert events[:7] == [*first, ("fixed", (4, 8)), ("tuned", (4, 8))]


TIMES = ["us", "us_p20", "us_p80", "gb_per_s"]


def keys(frame):
    """The rows without their times."""
    return [tuple(row) for row in frame.drop(columns=TIMES).itertuples(index=False)]


def test_bench_option_has_a_row_for_each_value_that_is_not_refused(timed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pytest.importorskip("triton", reason="Triton is not installed")
    shapes = [(4, 64), (2, 4096)]
    frame = bench_option(implementation("tiled"), shapes, "num_warps", [1, 3, 4], dtype="bfloat16")
    assert list(frame.columns) == ["num_warps", "m", "n", "dtype", *TIMES, "copy_us"]
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
        bench_option(implementation("naive"), [(4, 64)], "rows", [1])


def test_bench_layouts_has_a_row_for_each_layout(timed):
    frame = bench_layouts(implementation("naive"), [4, 6], dtype="float16")
    assert list(frame.columns) == ["layout", "m", "n", "dtype", *TIMES]
    assert keys(frame) == [(layout, 4, 6, "float16") for layout in MEMORY_LAYOUTS]
    assert frame["gb_per_s"][0] == pytest.approx(2 * 4 * 6 * 2 / 1e3)
    calls = [call for [call], _ in timed]
    strides = [MEMORY_LAYOUTS[layout](4, 6) for layout in frame["layout"]]
    assert [call.args[0].stride() for call in calls] == strides
    assert {call.args[0].dtype for call in calls} == {torch.float16}


@pytest.mark.gpu
def test_launch_overhead_on_a_gpu():
    impls = implementations(["torch.softmax", "persistent"])
    frame = launch_overhead(impls, (64, 1024))
    assert frame["host_us"].between(1, 10_000).all()
    frame = caller_times(impls, [(4096, 16384)])
    assert (frame["us"] < frame["host_wait_us"]).all()
