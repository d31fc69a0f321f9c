"""Hardware counters of many calls in one process, with reports as `ncu` writes them."""

import csv
import itertools
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import blind
import pandas as pd
import pytest
import torch

from memtraffic import gpus, runtime, sectors
from memtraffic.errors import CountersError
from memtraffic.kernels.softmax import naive
from memtraffic.meters import counters
from memtraffic.meters.sectors import COUNTERS
from memtraffic.names import import_function
from memtraffic.op import find_op
from memtraffic_book import exhibits, marked_counters, recording
from memtraffic_book.catalog import EXPERIMENTS

pytest.importorskip("triton", reason="Triton is not installed")

MARK = marked_counters.MARKER
CASES = (naive.softmax, [[4, 8], [2, 16]], ["float32", "bfloat16"])


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
        def profile(worker, job):
            compile(worker, "worker", "exec")
            facts = dict.fromkeys(("package", "version", "kernel", "direction", "at"), "x")
            told = [facts | {"begun": begun, "missing": why} for begun, why in outcomes]
            Path(job["told"]).write_text(json.dumps(told))
            return report(*names) if names else ""

        monkeypatch.setattr(counters, "profile", profile)
        kernels = ["a:b forward"] * len(outcomes)
        return marked_counters.count_surveyed(kernels, {"M": 4, "N": 8})

    return put


def test_count_surveyed_adds_up_the_launches_of_each_pass(ncu):
    frame = ncu([MARK, "a", "b", MARK, "c"], (True, ""), (True, ""))
    assert list(frame["launches"]) == [2, 1]
    assert list(frame["dram_read_bytes"]) == [1 + 2, 4]
    assert list(frame.columns) == list(EXPERIMENTS["survey_counters"].schema)


def test_count_surveyed_names_what_is_missing(ncu):
    """A package that is not there, and a kernel that fails halfway, have numbers of none."""
    names = ["warmup", MARK, "half", MARK, "a"]
    frame = ncu(names, (False, "no package"), (True, "failed"), (True, ""))
    assert list(frame["launches"]) == [0, 0, 1]
    assert list(frame["l2_write_sectors"]) == [0, 0, 4]
    assert list(frame["missing"]) == ["no package", "failed", ""]
    assert list(ncu([], (False, "no package"))["launches"]) == [0]
    with pytest.raises(CountersError, match="2 calls were counted, ncu saw 1"):
        ncu([MARK, "a"], (True, ""), (True, ""))


@pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU counts itself")
def test_counted_marks_where_a_kernel_begins(monkeypatch):
    """The order of things: the profiler starts, the marker, the kernel, and the profiler stops."""
    done = []
    launch = {(1,): lambda x, READ: done.append("mark")}
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


@pytest.mark.slow
def test_count_sectors_predicts_beside_what_is_counted(monkeypatch):
    """The other process is this one, for a GPU that is not there, and ncu numbers the kernels."""

    @contextmanager
    def begun():
        seen.append(MARK)
        yield
        seen.extend(["_softmax_masked_kernel", "somebody_elses"])

    def profile(worker, job, metrics):
        monkeypatch.setattr(sys, "argv", ["-c", json.dumps(job)])
        exec(worker, {})
        return report(*seen, metrics=metrics)

    seen = []
    monkeypatch.setattr(marked_counters, "counted", begun)
    monkeypatch.setattr(counters, "profile", profile)
    monkeypatch.setattr(gpus, "this_gpu", lambda: gpus.find_gpu("H200"))
    calls = {"masked": "M,N", "persistent": "M,N", "fused": "M,N", "no_such_package:fn": "M,N N,"}
    layouts = ["packed", "transposed"]
    frame = marked_counters.count_sectors(calls, [(8, 1000)], ["float32"], layouts, processes=0)
    assert [*zip(frame["fn"], frame["layout"], strict=True)] == [*itertools.product(calls, layouts)]
    assert list(frame["shape"]) == ["8x1000"] * 8
    assert list(frame["store_sectors"]) == [1, 4, *[0] * 6]
    packed = sectors(import_function("masked"), shape=(8, 1000)).totals
    assert [frame[f"predicted_{name}"][0] for name in packed] == list(packed.values())
    assert frame["predicted_load_sectors"][1] == 8 * 1000  # a sector has a column of 8
    whys = frame["refused"]
    assert [why == "" for why in whys] == [True, True, False, True, *[False] * 4]
    assert "copies asynchronously" in whys[2] and "1000" in whys[4]
    assert whys[6:].str.contains("no_such_package").all()
    assert list(frame.columns) == list(EXPERIMENTS["sectors_packed"].schema)


def test_a_prediction_has_the_configuration_that_the_counted_call_chose(monkeypatch):
    import sector_kernels

    tuner = sector_kernels._autotuned_kernel
    case = "sector_kernels:autotuned", "N,", [64], "float32", "packed"
    for config, requests in zip(tuner.configs, (1, 4), strict=True):

        def run(tuner, *args, config=config, **options):
            tuner.best_config = config

        chosen = {}
        with monkeypatch.context() as patch:
            patch.setattr(type(tuner), "run", run)
            with marked_counters._noting(chosen):
                sector_kernels.autotuned(torch.ones(64))
        assert chosen == {"_autotuned_kernel": [str(config)]}
        totals, kernels, why = marked_counters._predict(case, chosen, "H200")
        assert (totals["load_requests"], kernels, why) == (requests, [*chosen], "")


def test_every_blind_kernel_has_a_call():
    with (marked_counters.SURVEY / "blind.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert len({row["path"] for row in rows}) == len(rows) >= 37
    for row in rows:
        module, _, name = row["path"].partition(":")
        assert module != "blind" or callable(getattr(blind, name))
        find_op(row["inputs"]).arguments([160, 128][: len(find_op(row["inputs"]).sizes)])


@pytest.mark.slow
def test_recorded_sectors_of_neighbouring_stores_merge_on_their_way_to_l2():
    """Where rows are no multiple of 32 bytes; but no more merge than what is one sector."""
    [row] = recorded_sectors("masked_counters_781").to_dict("records")
    found = sectors(import_function("masked"), "softmax", (256, 781), target="H200").totals
    predicted = {name: 16 * n for name, n in found.items()}  # of 4096 rows, which repeat
    assert predicted["load_requests"] == row["load_instructions"]
    assert predicted["load_sectors"] == predicted["store_sectors"] == 489_472  # as ncu counted
    assert 4096 * 781 * 4 / 32 < row["l2_write_sectors"] < predicted["store_sectors"]


# Another Triton, 3.6, compiled what was recorded: here columns that lie apart have other lanes.
ANOTHER = "every other"
OF_THE_BOOK = ("sectors_packed", "sectors_layouts", "sectors_others")


def recorded_sectors(*ids):
    folder = recording.root() / recording.PUBLISHED
    return pd.concat([recording.read(folder, EXPERIMENTS[id]) for id in ids], ignore_index=True)


def off(frame):
    """Whose counts are not what was predicted."""
    return frame[(frame[[*COUNTERS]].values != frame[PREDICTED].values).any(axis=1)]


PREDICTED = [f"predicted_{name}" for name in COUNTERS]


def test_sectors_are_those_that_a_gpu_counted():
    """Of all kernels of the book that can be predicted, and all but two of others' kernels."""
    ours, others = recorded_sectors(*OF_THE_BOOK), recorded_sectors("sectors_survey")
    ours = ours[~ours["refused"].str.contains("not a power of two|columns lie")]  # by the rung
    refused = ours[ours["refused"] != ""]
    assert set(refused["fn"]) == {"persistent"} and len(refused) < len(ours) / 10
    assert refused["refused"].str.contains("cp.async").all()
    predicted = ours[ours["refused"] == ""]
    assert len(predicted) >= 120 and (predicted["load_requests"] > 0).all() and off(predicted).empty
    blind = recorded_sectors("sectors_blind")  # of packages that had never been tried
    blind = blind[blind["refused"] == ""]
    assert len(blind) >= 30 and off(blind).empty
    others = others[others["refused"] == ""]
    assert len(others) - len(off(others)) >= 30
    assert set(off(others)["fn"]) <= {
        "flag_gems.ops:nll_loss_forward",  # whose programs read what others add to
        "flag_gems.fused:cross_entropy_loss",  # autotuned
    }


def test_bank_conflicts_are_those_that_a_gpu_counted():
    counters = marked_counters.CONFLICTS["bank_conflicts"].split(",")
    assert sorted(it[-6:] for it in counters) == ["ld.sum", "st.sum"]
    frame = recorded_sectors("bank_conflicts")
    assert set(frame[frame["refused"] != ""]["fn"]) == {"fused", "persistent"}
    known = frame[frame["refused"] == ""]
    assert len(known) >= 46 and known["bank_conflicts"].any()
    assert (known["bank_conflicts"] == known["predicted_bank_conflicts"]).all()


@pytest.mark.slow
def test_sectors_of_this_triton_are_the_recorded_ones_but_where_it_spreads_lanes_otherwise():
    """Predicted again at some of the recorded calls, drawn once."""
    frame = recorded_sectors(*OF_THE_BOOK)
    known = frame[frame["refused"] == ""].sample(24, random_state=7)
    cases = [
        (
            row["fn"],
            row["inputs"],
            [*map(int, row["shape"].split("x"))],
            row["dtype"],
            row["layout"],
        )
        for _, row in known.iterrows()
    ]
    found = [marked_counters._predict(case, {}, "H200") for case in cases]
    assert [why for _, _, why in found] == [""] * len(cases)
    totals = [[it[name] for name in COUNTERS] for it, _, _ in found]
    were = known[PREDICTED].values.tolist()
    differ = [case for case, *it in zip(cases, totals, were, strict=True) if it[0] != it[1]]
    assert {layout for *_, layout in differ} <= {ANOTHER}
    assert len(differ) < len(cases) / 4
