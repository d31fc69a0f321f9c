"""Hardware counters of calls; what another process does, this one does, and reports as `ncu`."""

import csv
import importlib.metadata
import itertools
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import blind
import pandas as pd
import pytest
import torch

from memtraffic import device, gpus, sectors
from memtraffic.errors import CountersError
from memtraffic.meters import counters
from memtraffic.meters.sectors import COUNTERS
from memtraffic.names import import_function
from memtraffic.op import find_op
from memtraffic_book import marked_counters, recording
from memtraffic_book.catalog import EXPERIMENTS

pytest.importorskip("triton", reason="Triton is not installed")


def report(kernels, numbers, metrics=counters.METRICS):
    """What ncu prints of these kernels, whose metrics are the next of some numbers."""
    header = ["ID", "Kernel Name", *metrics.values()]
    rows = [header, [""] * len(header)]
    rows += [["0", name, *[str(next(numbers))] * len(metrics)] for name in kernels]
    return "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)


def test_count_surveyed_adds_up_the_launches_of_each_pass(monkeypatch):
    """A package that is not there, and a kernel that fails halfway, have numbers of none."""
    numbers = itertools.count(1)
    passes = {"a": ("pq", ""), "b": ("", "no package"), "c": ("r", "failed"), "d": ("s", "")}

    def profile(worker, job):
        compile(worker, "worker", "exec")
        [kernel] = job["kernels"]
        launched, why = passes[kernel]
        told = dict.fromkeys(("package", "version", "kernel", "direction", "at"), kernel)
        told |= {"begun": bool(launched), "missing": why}
        Path(job["told"]).write_text(json.dumps([told]))
        return report(launched, numbers)

    monkeypatch.setattr(counters, "profile", profile)
    frame = marked_counters.count_surveyed([*passes], {"M": 4, "N": 8})
    assert list(frame.columns) == list(EXPERIMENTS["survey_counters"].schema)
    assert list(frame["kernel"]) == [*passes]
    assert list(frame["launches"]) == [2, 0, 0, 1]
    assert list(frame["l2_write_sectors"]) == [1 + 2, 0, 0, 4]
    assert list(frame["missing"]) == ["", "no package", "failed", ""]


@pytest.mark.skipif(device.HAS_GPU, reason="a GPU counts itself")
def test_counted_waits_for_what_came_before_and_for_what_it_counts(monkeypatch):
    done = []
    starts, stops = (lambda it=it: done.append(it) for it in ("start", "stop"))
    calls = SimpleNamespace(cudaProfilerStart=starts, cudaProfilerStop=stops)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    with pytest.raises(RuntimeError, match="too old"):
        with marked_counters.counted():
            done.append("call")
            raise RuntimeError("too old")
    assert done == ["wait", "start", "call", "wait", "stop"]


# ---- sectors, predicted beside counted


@pytest.fixture
def counting(monkeypatch):
    """The other processes are this one, for a GPU that is not there; ncu numbers the kernels."""

    def of(*kernels):
        @contextmanager
        def counted():
            yield
            reports.append(report(kernels, numbers, COUNTERS))

        def profile(worker, job, metrics):
            monkeypatch.setattr(sys, "argv", ["-c", json.dumps(job)])
            try:
                exec(worker, {})
            except Exception as error:
                raise CountersError(f"counters: {error}") from error
            return reports[-1]

        numbers, reports = itertools.count(1), []
        monkeypatch.setattr(marked_counters, "counted", counted)
        monkeypatch.setattr(marked_counters, "_attempt_alone", marked_counters._attempt)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # one at a time
        monkeypatch.setattr(counters, "require_counters", lambda: None)
        monkeypatch.setattr(counters, "profile", profile)
        monkeypatch.setattr(device, "this_gpu", lambda *index: gpus.find_gpu("H200"))
        return reports

    return of


@pytest.mark.slow
def test_count_sectors_predicts_beside_what_is_counted(counting):
    reports = counting("_softmax_masked_kernel", "somebody_elses")
    calls = {"masked": "M,N", "persistent": "M,N", "fused": "M,N", "no_such_package:fn": "M,N N,"}
    layouts = ["packed", "transposed"]
    frame = marked_counters.count_sectors(calls, [(8, 1000)], ["float32"], layouts)
    assert [*zip(frame["fn"], frame["layout"], strict=True)] == [*itertools.product(calls, layouts)]
    assert list(frame["shape"]) == ["8x1000"] * 8
    assert list(frame["store_sectors"]) == [1, 3, *[0] * 6]
    packed = sectors(import_function("masked"), shape=(8, 1000)).totals
    assert [frame[f"predicted_{name}"][0] for name in packed] == list(packed.values())
    assert frame["predicted_load_sectors"][1] == 8 * 1000  # a sector has a column of 8
    whys = frame["refused"]
    assert [why == "" for why in whys] == [True, True, False, True, *[False] * 4]
    assert len(reports) == 3  # what is not predicted is not called
    assert "copies asynchronously" in whys[2] and "1000" in whys[4]
    assert whys[6:].str.contains("no_such_package").all()
    assert list(frame.columns) == list(EXPERIMENTS["sectors_packed"].schema)


@pytest.fixture
def tuner(monkeypatch):
    """An autotuned kernel of a class of its own, which chooses its configurations in turn."""
    import sector_kernels
    from triton.runtime.autotuner import Autotuner

    class Choosing(Autotuner):
        def run(self, *args, **options):
            return super().run(*args, **options)

    def run(tuner, *args, **options):
        runs.append([*map(str, tuner.configs)])
        tuner.best_config = tuner.configs[-len(runs) % len(tuner.configs)]

    runs = []
    monkeypatch.setattr(Autotuner, "run", run)
    monkeypatch.setattr(sector_kernels._autotuned_kernel, "__class__", Choosing)
    monkeypatch.setattr(Choosing, "runs", runs, raising=False)
    return sector_kernels._autotuned_kernel


def test_count_sectors_counts_and_predicts_what_autotuners_chose_before(counting, tuner):
    """The first launch has the second configuration, and the second the first."""
    counting("_autotuned_kernel", "somebody_elses", "_autotuned_kernel")
    call = {"sector_kernels:autotuned_twice": "N,"}
    frame = marked_counters.count_sectors(call, [{"N": 64}], ["float32"], ["packed"])
    one_warp, four_warps = map(str, tuner.configs)
    chosen, counted = tuner.runs[:2], tuner.runs[2:]
    assert chosen == [[one_warp, four_warps]] * 2
    assert counted == [[four_warps], [one_warp]] * 2  # of which nothing is timed or compiled
    row = frame.iloc[0]
    assert (row["refused"], row["load_requests"], row["predicted_load_requests"]) == ("", 1 + 3, 5)


@pytest.mark.parametrize("count", [1, 3])
def test_count_sectors_refuses_a_kernel_that_runs_otherwise_than_it_chose(
    count, counting, tuner, monkeypatch
):
    """Where it is predicted, and where it is counted."""
    counting()
    case = "sector_kernels:autotuned_twice", "N,", [64], "float32", "packed"
    chosen = {"_autotuned_kernel": [str(tuner.configs[0])] * count}
    with pytest.raises(LookupError, match="_autotuned_kernel chose"):
        marked_counters._predict(case, chosen, "H200")
    assert "UnknownGpuError" in marked_counters._predict_alone(case, "H20")[1]
    monkeypatch.setattr(marked_counters, "_predict_alone", lambda *call: ((chosen, {}, []), ""))
    [row] = marked_counters.count_sectors({case[0]: "N,"}, [[64]], ["float32"], ["packed"]).values
    assert "_autotuned_kernel chose" in row[-1] and not row[5:-1].any()


@pytest.mark.slow
def test_a_process_of_its_own_may_fail_or_end_or_take_too_long(monkeypatch):
    run = marked_counters._attempt_alone
    fails = marked_counters._attempt(eval, "1 / 0")
    assert fails == (None, "ZeroDivisionError: division by zero")
    assert run(eval, "__import__('os')._exit(7)")[1] == "process 0 terminated with exit code 7"
    monkeypatch.setattr(marked_counters, "SECONDS", 0.1)
    assert run(eval, "__import__('time').sleep(600)")[1] == "ranks [0] of 1 still ran after 0.1 s"


def test_count_surveyed_sectors_asks_for_each_kernel_of_the_table(monkeypatch):
    """By a path and inputs that can be made; and says of which there is no package."""
    asked, sizes = {}, {"M": 160, "N": 128}

    def count(calls, *how):
        assert how == ([sizes], ["bfloat16"], ["packed"])
        asked.update(calls)
        return pd.DataFrame({"fn": [*calls], "refused": "cannot be predicted"})

    monkeypatch.setattr(marked_counters, "count_sectors", count)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: {name} - {"flashnn"})
    frame = marked_counters.count_surveyed_sectors(sizes, "bfloat16", "blind.csv")
    with (marked_counters.SURVEY / "blind.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    absent = "absent: flashnn is not installed"
    whys = [absent if row["package"] == "flashnn" else "cannot be predicted" for row in rows]
    assert frame["refused"].tolist() == whys and recording.is_absent({"refused": absent})
    assert [*asked.items()] == [(row["path"], row["inputs"]) for row in rows]
    assert len(asked) >= 37 and absent in whys
    for path, inputs in asked.items():
        module, _, name = path.partition(":")
        assert module != "blind" or callable(getattr(blind, name))
        find_op(inputs).arguments([sizes[letter] for letter in find_op(inputs).sizes])


# ---- as a GPU counted

OF_THE_BOOK = ("sectors_packed", "sectors_layouts", "sectors_others")
PREDICTED = [f"predicted_{name}" for name in COUNTERS]


def recorded_sectors(*ids):
    folder = recording.root() / recording.PUBLISHED
    return pd.concat([recording.read(folder, EXPERIMENTS[id]) for id in ids], ignore_index=True)


def test_sectors_are_those_that_a_gpu_counted():
    """Of all kernels that can be predicted, the book's and others'."""
    ours = recorded_sectors(*OF_THE_BOOK)
    ours = ours[~ours["refused"].str.contains("not a power of two|columns lie")]  # by the rung
    refused = ours[ours["refused"] != ""]
    waits = refused["refused"].str.contains("waits for other programs")  # as they share a row
    assert refused[waits][["shape", "dtype"]].values.tolist() == [["16x8320", "float32"]]
    assert set(refused[~waits]["fn"]) == {"persistent"} and len(refused) < len(ours) / 10
    assert refused[~waits]["refused"].str.contains("cp.async").all()
    predicted = ours[ours["refused"] == ""]
    blind = recorded_sectors("sectors_blind").query("refused == ''")  # never tried before
    assert len(predicted) == 117 and (predicted["load_requests"] > 0).all() and len(blind) >= 30
    for frame in (predicted, blind):
        assert frame[[*COUNTERS]].values.tolist() == frame[PREDICTED].values.tolist()


@pytest.mark.slow
def test_sectors_of_this_triton_are_the_recorded_ones_but_where_it_spreads_lanes_otherwise():
    """Predicted again at some of the recorded calls, drawn once.

    Another Triton, 3.6, compiled what was recorded: where every other column is one, lanes differ.
    """
    frame = recorded_sectors(*OF_THE_BOOK)
    known = frame[frame["refused"] == ""].sample(6, random_state=7)
    differ = set()
    for row in known.to_dict("records"):
        fn, inputs, shape, dtype, layout = (row[name] for name in known.columns[:5])
        case = fn, inputs, [*map(int, shape.split("x"))], dtype, layout
        totals, _ = marked_counters._predict(case, {}, "H200")
        if any(totals[name] != row[f"predicted_{name}"] for name in COUNTERS):
            differ.add((fn, shape, dtype, layout))
    assert {layout for *_, layout in differ} <= {"every other"} and len(differ) < len(known) / 4
