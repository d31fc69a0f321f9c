"""What runs under Nsight Compute, without it."""

import json
from contextlib import contextmanager

import measure
import pytest
import survey
import torch

from memtraffic_book import marked_counters
from memtraffic_book.catalog import EXPERIMENTS

LIGER = "liger_kernel.transformers.functional:liger_softmax"
SIZES = {"M": 4, "N": 8}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_run_counts_one_call_after_three(direction, monkeypatch, tmp_path):
    """A kernel that is not there is told by name, and one that fails by what it says."""
    calls = []

    def cube(x):
        calls.append(("forward", *x.shape))
        y = x**3
        y.register_hook(lambda gradient: calls.append(("backward", *gradient.shape)))
        return y

    @contextmanager
    def counted():
        calls.append("begin")
        yield
        calls.append("end")

    known = [
        survey.Published(package, path, "M,N")
        for package, path in (("numpy", "cube"), ("no-such-package", "none"), ("numpy", "fails"))
    ]
    found = {"cube": cube, "fails": torch.linalg.inv}
    monkeypatch.setattr(survey, "read_kernels", lambda: known)
    monkeypatch.setattr(survey, "find_kernel", lambda path, folder: found[path])
    monkeypatch.setattr(measure, "counted", counted)
    for name in survey.flag_gems_settings(""):
        monkeypatch.setenv(name, "")
    kernels = [f"cube {direction} N=16", *(f"{it.path} {direction}" for it in known[1:])]
    measure.run(kernels, SIZES, str(tmp_path / "told"))
    ours, absent, failing = json.loads((tmp_path / "told").read_text())
    assert (ours["kernel"], ours["at"], ours["begun"]) == ("cube", "M=4, N=16", True)
    assert ours["version"] == known[0].release and not ours["missing"]
    assert absent["missing"].startswith("absent: PackageNotFoundError") and not absent["begun"]
    assert "square" in failing["missing"]
    before = [("forward", 4, 16)] if direction == "backward" else []
    once = (direction, 4, 16)
    assert calls == [*before, once] * marked_counters.WARMUP + [*before, "begin", once, "end"]


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
