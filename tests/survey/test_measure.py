"""What runs under Nsight Compute, without it."""

import json
from contextlib import contextmanager
from importlib.metadata import version

import measure
import pytest
import survey
import torch

from memtraffic_book import marked_counters
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
        calls.append(gradient.shape)
        return 3 * x * x * gradient


calls: list[object] = []


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_run_counts_one_call_after_three(direction, monkeypatch, tmp_path):
    """A kernel that is not there is told by name, and one that fails by what it says."""
    marked = []

    @contextmanager
    def counted():
        before = len(calls)
        yield
        marked.append(len(calls) - before)

    def find_kernel(path, folder):
        return {"ours:cube": Cube, "ours:fails": torch.linalg.inv}[path]

    calls.clear()
    known = [
        survey.Published("numpy", "ours:cube", "M,N"),
        survey.Published("no-such-package", "nowhere:fn", "M,N"),
        survey.Published("numpy", "ours:fails", "M,N"),
    ]
    monkeypatch.setattr(survey, "read_kernels", lambda: known)
    monkeypatch.setattr(survey, "find_kernel", find_kernel)
    monkeypatch.setattr(measure, "counted", counted)
    monkeypatch.setenv("GEMS_VENDOR", "")
    monkeypatch.setenv("FLAGGEMS_CACHE_DIR", "")
    kernels = [f"{known[0].path} {direction} N=16", *(f"{k.path} {direction}" for k in known[1:])]
    measure.run(kernels, SIZES, str(tmp_path / "told"))
    ours, absent, failing = json.loads((tmp_path / "told").read_text())
    assert (ours["version"], ours["begun"], ours["missing"]) == (version("numpy"), True, "")
    assert (ours["kernel"], ours["at"]) == ("ours:cube", "M=4, N=16")
    assert absent["missing"].startswith("absent: PackageNotFoundError") and not absent["begun"]
    assert "square" in failing["missing"]
    assert marked == [1 if direction == "backward" else 0]
    warmed = marked_counters.WARMUP + 1
    assert calls == ([(4, 16)] * warmed if direction == "backward" else [])


@pytest.mark.parametrize("kernel", ["nowhere:fn forward", LIGER, f"{LIGER} sideways"])
def test_run_refuses_what_is_not_surveyed(kernel, tmp_path):
    with pytest.raises(LookupError, match="is no kernel of the survey"):
        measure.run([kernel], SIZES, str(tmp_path / "told"))


def test_run_finds_the_kernels_of_the_experiment():
    """They are there to be compared: each is in the survey, at sizes that the experiment gives."""
    arguments = EXPERIMENTS["survey_counters"].arguments
    for kernel in arguments["kernels"]:
        published, direction, _ = measure._find(kernel, arguments["sizes"])
        assert kernel.startswith(f"{published.path} {direction}")
