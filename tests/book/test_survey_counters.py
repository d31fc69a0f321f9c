"""Hardware counters of surveyed kernels, with reports as `ncu` writes them."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from memtraffic import runtime
from memtraffic.errors import CountersError
from memtraffic.meters import counters
from memtraffic_book import marked_counters, survey, survey_counters
from memtraffic_book.catalog import EXPERIMENTS

pytest.importorskip("triton", reason="Triton is not installed")

LIGER = "liger_kernel.transformers.functional:liger_softmax"
SIZES = {"M": 4, "N": 8}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        return 3 * x * x * gradient


def report(*kernels):
    """What ncu prints for these kernels; each metric of the i-th is i, from 0."""
    header = ["ID", "Kernel Name", *counters.METRICS.values()]
    rows = [header, [""] * len(header)]
    rows += [[str(i), name, *[str(i)] * len(counters.METRICS)] for i, name in enumerate(kernels)]
    return "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)


@pytest.fixture
def ncu(monkeypatch):
    """Answers for ncu with a report and what the process told of each kernel."""

    def put(text, *outcomes):
        def profile(worker, job, settings):
            compile(worker, "worker", "exec")
            assert settings["GEMS_VENDOR"] == "nvidia"
            told = [dict(zip(("version", "begun", "missing"), it, strict=True)) for it in outcomes]
            Path(job["told"]).write_text(json.dumps(told))
            return text

        monkeypatch.setattr(counters, "profile", profile)

    return put


def test_measure_adds_up_the_launches_of_each_pass(ncu):
    mark = marked_counters.MARKER
    ncu(report(mark, "a", "b", mark, "c"), ("1.0", True, ""), ("1.0", True, ""))
    frame = survey_counters.measure([f"{LIGER} forward", f"{LIGER} backward"], SIZES)
    assert list(frame["launches"]) == [2, 1]
    assert list(frame["dram_read_bytes"]) == [1 + 2, 4]
    assert list(frame["direction"]) == ["forward", "backward"]
    assert set(frame["at"]) == {"M=4, N=8"} and set(frame["missing"]) == {""}
    assert list(frame.columns) == list(EXPERIMENTS["survey_counters"].schema)


def test_measure_takes_sizes_of_a_kernel_of_its_own(ncu):
    ncu(report(marked_counters.MARKER, "a"), ("1.0", True, ""))
    frame = survey_counters.measure([f"{LIGER} forward N=512"], SIZES)
    assert list(frame["at"]) == ["M=4, N=512"]


def test_measure_names_what_is_missing(ncu):
    """A package that is not there, and a kernel that fails halfway, have numbers of none."""
    mark = marked_counters.MARKER
    ncu(
        report(mark, "half", mark, "a"),
        ("", False, "PackageNotFoundError: none"),
        ("1.0", True, "RuntimeError: half"),
        ("1.0", True, ""),
    )
    frame = survey_counters.measure([f"{LIGER} forward"] * 3, SIZES)
    assert list(frame["launches"]) == [0, 0, 1]
    assert list(frame["l2_write_sectors"]) == [0, 0, 3]
    assert list(frame["missing"]) == ["PackageNotFoundError: none", "RuntimeError: half", ""]
    assert set(frame["package"]) == {"liger-kernel"}


def test_measure_where_all_is_missing(ncu):
    ncu("", ("", False, "PackageNotFoundError: none"))
    frame = survey_counters.measure([f"{LIGER} forward"], SIZES)
    assert list(frame["launches"]) == [0]


def test_measure_refuses_a_report_with_other_kernels(ncu):
    ncu(report(marked_counters.MARKER, "a"), ("1.0", True, ""), ("1.0", True, ""))
    with pytest.raises(CountersError, match="2 kernels ran, ncu saw 1"):
        survey_counters.measure([f"{LIGER} forward"] * 2, SIZES)


@pytest.mark.parametrize("kernel", ["nowhere:fn forward", LIGER, f"{LIGER} sideways"])
def test_measure_refuses_what_is_not_surveyed(kernel):
    with pytest.raises(LookupError, match="is no kernel of the survey"):
        survey_counters.measure([kernel], SIZES)


def test_split_leaves_out_what_is_before_the_first_marker():
    names = ["warmup", marked_counters.MARKER, "a", marked_counters.MARKER]
    parts = marked_counters.split(pd.DataFrame({"kernel": names}))
    assert [list(part["kernel"]) for part in parts] == [["a"], []]


def test_marker_is_a_kernel():
    from memtraffic_book import exhibits

    assert marked_counters.MARKER in vars(exhibits)


def test_kernels_of_the_experiment_have_formulas():
    """They are there to be compared: each has a row with a formula, or a number without sizes."""
    frame, arguments = survey.load(), EXPERIMENTS["survey_counters"].arguments
    for kernel in arguments["kernels"]:
        path, direction, *_ = kernel.split()
        [row] = frame[(frame["kernel"] == path) & (frame["direction"] == direction)].to_dict(
            "records"
        )
        assert row["reads"] and not row["at"] and not row["note"].count("BLOCK"), kernel


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_worker_runs_each_pass(direction, monkeypatch, tmp_path):
    """Three calls to warm up, and one to count; a kernel that is not there is told by name."""
    calls, counted = [], []

    def double(call, outcome):
        calls.append(call())
        if outcome is not None:
            outcome["begun"] = True
            counted.append(calls[-1])

    known = (
        survey.Published("torch", f"{__name__}:Cube", "M,N"),
        survey.Published("no-such-package", "nowhere:fn", "M,N"),
    )
    monkeypatch.setattr(survey, "KERNELS", known)
    monkeypatch.setattr(survey, "find_kernel", lambda path, folder: Cube)
    monkeypatch.setattr(survey_counters, "_counted", double)
    kernels = [f"{kernel.path} {direction}" for kernel in known]
    job = {"kernels": kernels, "sizes": SIZES, "told": str(tmp_path / "told")}
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(job)])
    survey_counters._worker()
    first, second = json.loads((tmp_path / "told").read_text())
    assert first == {"version": version("torch"), "begun": True, "missing": ""}
    assert second["missing"].startswith("absent: PackageNotFoundError") and not second["begun"]
    assert len(calls) == marked_counters.WARMUP + 1 and len(counted) == 1
    [made] = counted
    if direction == "forward":
        assert made.shape == (4, 8)
    else:
        assert [x.shape for x in made] == [(4, 8)]


@pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU counts itself")
def test_counted_marks_where_a_kernel_begins(monkeypatch):
    """The order of things: the profiler starts, the marker, the kernel, and the profiler stops."""
    from memtraffic_book import exhibits

    done = []
    launch = {(1,): lambda x, READ: done.append("mark")}
    runtime_calls = SimpleNamespace(
        cudaProfilerStart=lambda: done.append("start"), cudaProfilerStop=lambda: done.append("stop")
    )
    monkeypatch.setattr(exhibits, "_idle_kernel", launch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime_calls)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    outcome = {"begun": False}
    survey_counters._counted(lambda: done.append("call"), outcome)
    assert done == ["mark", "start", "mark", "call", "stop"] and outcome["begun"]

    def fail():
        raise RuntimeError("too old")

    done.clear()
    with pytest.raises(RuntimeError, match="too old"):
        survey_counters._counted(fail, outcome)
    assert done[-1] == "stop"
