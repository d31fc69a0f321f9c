"""Hardware counters of many calls in one process, with reports as `ncu` writes them."""

import csv
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
from memtraffic_book import exhibits, marked_counters, recording
from memtraffic_book.catalog import EXPERIMENTS

MARK = marked_counters.MARKER
BLIND = [*csv.DictReader((marked_counters.SURVEY / "blind.csv").read_text("utf-8").splitlines())]


def report(*kernels, metrics=counters.METRICS):
    """What ncu prints for these kernels; each metric of the i-th is i, from 0."""
    header = ["ID", "Kernel Name", *metrics.values()]
    rows = [header, [""] * len(header)]
    rows += [[str(i), name, *[str(i)] * len(metrics)] for i, name in enumerate(kernels)]
    return "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)


@pytest.fixture
def ncu(monkeypatch):
    """Answers for ncu with a report, and with what the other process told of each kernel."""

    def put(names, *outcomes):
        def profile(worker, job, metrics):
            compile(worker, "worker", "exec")
            facts = dict.fromkeys(("package", "version", "kernel", "direction", "at"), "x")
            told = [facts | {"begun": begun, "missing": why} for begun, why in outcomes]
            Path(job["told"]).write_text(json.dumps(told))
            return report(*names) if names else ""

        monkeypatch.setattr(counters, "profile", profile)
        kernels = ["a:b forward"] * len(outcomes)
        return marked_counters.count_surveyed(kernels, {"M": 4, "N": 8})

    return put


def test_count_surveyed_adds_up_the_launches_of_each_pass_and_names_what_is_missing(ncu):
    """A package that is not there, and a kernel that fails halfway, have numbers of none."""
    names = ["warmup", MARK, "half", MARK, "a", "b", MARK, "c"]
    frame = ncu(names, (False, "no package"), (True, "failed"), (True, ""), (True, ""))
    assert list(frame["launches"]) == [0, 0, 2, 1]
    assert list(frame["dram_read_bytes"]) == [0, 0, 4 + 5, 7]
    assert list(frame["missing"]) == ["no package", "failed", "", ""]
    assert list(frame.columns) == list(EXPERIMENTS["survey_counters"].schema)
    assert list(ncu([], (False, "no package"))["launches"]) == [0]
    with pytest.raises(CountersError, match="2 calls were counted, ncu saw 1"):
        ncu([MARK, "a"], (True, ""), (True, ""))


@pytest.mark.skipif(device.HAS_GPU, reason="a GPU counts itself")
def test_counted_marks_where_a_kernel_begins(monkeypatch):
    """The order of things: the profiler starts, the marker, the kernel, and the profiler stops."""
    done = []
    launch = {(1,): lambda x: done.append("mark")}
    calls = SimpleNamespace(
        cudaProfilerStart=lambda: done.append("start"), cudaProfilerStop=lambda: done.append("stop")
    )
    monkeypatch.setattr(exhibits, MARK, launch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    with pytest.raises(RuntimeError, match="too old"):
        with marked_counters.counted():
            done.append("call")
            raise RuntimeError("too old")
    assert done == ["mark", "start", "mark", "call", "stop"]


# ---- sectors, predicted beside counted


@pytest.fixture
def counting(monkeypatch):
    """The other process is this one, for a GPU that is not there, and ncu numbers the kernels."""
    seen = []

    def of(*kernels):
        @contextmanager
        def begun():
            seen.append(MARK)
            yield
            seen.extend(kernels)

        def profile(worker, job, metrics):
            monkeypatch.setattr(sys, "argv", ["-c", json.dumps(job)])
            exec(worker, {})
            return report(*seen, metrics=metrics)

        monkeypatch.setattr(marked_counters, "counted", begun)
        monkeypatch.setattr(marked_counters, "_predict_alone", marked_counters._attempt)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # one at a time
        monkeypatch.setattr(counters, "require_counters", lambda: None)
        monkeypatch.setattr(counters, "profile", profile)
        monkeypatch.setattr(device, "this_gpu", lambda *index: gpus.find_gpu("H200"))
        return seen

    return of


@pytest.mark.slow
def test_count_sectors_predicts_beside_what_is_counted(counting):
    seen = counting("_softmax_masked_kernel", "somebody_elses")
    calls = {"masked": "M,N", "persistent": "M,N", "fused": "M,N", "no_such_package:fn": "M,N N,"}
    layouts = ["packed", "transposed"]
    frame = marked_counters.count_sectors(calls, [(8, 1000)], ["float32"], layouts)
    assert [*zip(frame["fn"], frame["layout"], strict=True)] == [*itertools.product(calls, layouts)]
    assert list(frame["shape"]) == ["8x1000"] * 8
    assert list(frame["store_sectors"]) == [1, 4, *[0] * 6]
    packed = sectors(import_function("masked"), shape=(8, 1000)).totals
    assert [frame[f"predicted_{name}"][0] for name in packed] == list(packed.values())
    assert frame["predicted_load_sectors"][1] == 8 * 1000  # a sector has a column of 8
    whys = frame["refused"]
    assert [why == "" for why in whys] == [*[True] * 4, *[False] * 4]
    assert seen.count(MARK) == 4  # what is not predicted is not called
    assert "1000" in whys[4]
    assert whys[6:].str.match("absent: .*no_such_package").all()
    absent = [recording.is_absent(row) for row in frame.to_dict("records")]
    assert absent == [fn == "no_such_package:fn" for fn in frame["fn"]]
    assert list(frame.columns) == list(EXPERIMENTS["sectors_packed"].schema)


@pytest.fixture
def tuner(monkeypatch):
    """An autotuned kernel of a class of its own, which chooses the last of what it has."""
    import sector_kernels
    from triton.runtime.autotuner import Autotuner

    class Choosing(Autotuner):
        def run(self, *args, **options):
            return super().run(*args, **options)

    def run(tuner, *args, **options):
        runs.append([*map(str, tuner.configs)])
        tuner.best_config = tuner.configs[-1]

    runs = []
    monkeypatch.setattr(Autotuner, "run", run)
    monkeypatch.setattr(sector_kernels._autotuned_kernel, "__class__", Choosing)
    monkeypatch.setattr(Choosing, "runs", runs, raising=False)
    return sector_kernels._autotuned_kernel


def test_count_sectors_counts_and_predicts_what_an_autotuner_chose_first(counting, tuner):
    """It chooses once: the second launch of a call has the choice, and so has what is counted."""
    counting("_autotuned_kernel", "_autotuned_kernel")
    call = {"sector_kernels:autotuned_twice": "N,"}
    before = tuner.configs
    frame = marked_counters.count_sectors(call, [[64]], ["float32"], ["packed"])
    assert frame["refused"].tolist() == [""]
    one_warp, four_warps = map(str, before)
    assert tuner.runs == [[one_warp, four_warps], *[[four_warps]] * 5] and tuner.configs is before
    row = frame.iloc[0]
    assert (row["refused"], row["load_requests"]) == ("", 3)
    assert row["predicted_load_requests"] == 2 * 4  # of four warps


@pytest.mark.slow
def test_a_process_of_its_own_may_end_or_take_too_long(monkeypatch):
    monkeypatch.setattr(marked_counters, "_attempt", eval)
    end = "__import__('os')._exit(7)", {}
    assert marked_counters._predict_alone("1 + 1", {}) == 2
    found = marked_counters._predict_alone(*end)
    assert found == (None, "process 0 terminated with exit code 7")
    monkeypatch.setattr(marked_counters, "SECONDS", 0.1)
    found = marked_counters._predict_alone("__import__('time').sleep(600)", {})
    assert found == (None, "ranks [0] of 1 still ran after 0.1 s")


def test_count_surveyed_sectors_asks_for_what_can_be_called_by_its_path(monkeypatch):
    def count(calls, *how):
        assert how == ([sizes], ["bfloat16"], ["packed"])
        return calls

    sizes = {"M": 160, "N": 128}
    monkeypatch.setattr(marked_counters, "count_sectors", count)
    asked = marked_counters.count_surveyed_sectors(sizes, "bfloat16", "blind.csv")
    assert asked == {row["path"]: row["inputs"] for row in BLIND}


def test_a_package_that_a_call_imports_may_be_absent():
    """As in `blind`, whose functions import what they adapt."""
    case = "blind:copy_kv_index", "M:int32<N", [160, 128], "float32", "packed"
    found, why = marked_counters._attempt(case, "H200")
    assert found is None and why.startswith("absent: ModuleNotFoundError: No module named 'lightll")


def test_every_blind_kernel_has_a_call():
    assert len({row["path"] for row in BLIND}) == len(BLIND) >= 37
    for row in BLIND:
        module, _, name = row["path"].partition(":")
        assert module != "blind" or callable(getattr(blind, name))
        find_op(row["inputs"]).arguments([160, 128][: len(find_op(row["inputs"]).sizes)])


# Another Triton, 3.6, compiled what was recorded: here columns that lie apart have other lanes.
ANOTHER = "every other"


def recorded_sectors(*ids):
    folder = recording.root() / recording.PUBLISHED
    return pd.concat([recording.read(folder, EXPERIMENTS[id]) for id in ids], ignore_index=True)


@pytest.mark.slow
def test_sectors_of_this_triton_are_the_recorded_ones_but_where_it_spreads_lanes_otherwise():
    """Predicted again at some of the recorded calls, drawn once; what is counted, a page says."""
    frame = recorded_sectors("sectors_packed", "sectors_layouts", "sectors_others")
    known = frame[frame["refused"] == ""].sample(12, random_state=7)
    differ = []
    for row in known.to_dict("records"):
        shape = [*map(int, row["shape"].split("x"))]
        case = row["fn"], row["inputs"], shape, row["dtype"], row["layout"]
        _, found, _ = marked_counters._predict(case, "H200")
        differ += [row["layout"]] * (found != {name: row[f"predicted_{name}"] for name in COUNTERS})
    assert {*differ} <= {ANOTHER} and len(differ) < len(known) / 4
