"""The example that says which softmax to call; no package is needed here, and no GPU."""

import functools
import importlib.metadata
import math
import runpy
import sys
from types import SimpleNamespace

import decide as example
import pytest
import torch

from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct
from memtraffic_book import measurements
from memtraffic_book.catalog import EXPERIMENTS


@pytest.fixture
def packages(monkeypatch):
    """Modules that stand for the packages, and compute as PyTorch does."""

    def softmax(x, dim=1):
        return torch.softmax(x, dim)

    def backward(dy, y, dim, dtype):
        return SOFTMAX_BACKWARD.reference(y, dy).to(dtype)

    made = SimpleNamespace(liger_softmax=softmax, softmax=softmax, softmax_backward=backward)
    for name in ("liger_kernel.transformers.functional", "flag_gems.ops", "quack"):
        parts = name.split(".")
        for i in range(len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), made)
    monkeypatch.setenv("GEMS_VENDOR", "nvidia")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [it for it in example.CANDIDATES if "compile" not in it])
def test_candidates_have_a_gradient(name, dtype, packages):
    softmax = example.CANDIDATES[name]
    x = matrix(5, 792, dtype)
    assert_correct("softmax", softmax, x)
    assert_correct(example.WITH_GRADIENT, functools.partial(example.with_gradient, softmax), x)


def test_quack_refuses_rows_that_it_would_call_wrong(packages):
    for dtype, n in (("float32", 782), ("bfloat16", 780)):
        with pytest.raises(ValueError, match=f"whole 16 bytes, not {n}"):
            example.quack(matrix(3, n, dtype))


def test_version_of_what_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"flag-gems": "5.0.2"}.__getitem__)
    assert [example.version(it) for it in ("FlagGems", "Liger", "copy")] == ["5.0.2", "", ""]


@pytest.mark.parametrize("id", ["decision_float32", "decision_gradient_float32"])
def test_decide_measures_what_the_book_records(id, timed, monkeypatch):
    """Everything but the graphs, the clock and the compiler runs, at two widths."""
    for package in ("flag_gems", "liger_kernel"):  # as if they were not installed
        monkeypatch.setitem(sys.modules, package, None)
    names = ("torch.softmax", "Liger", "FlagGems")
    monkeypatch.setattr(example, "CANDIDATES", {name: example.CANDIDATES[name] for name in names})
    monkeypatch.setattr(example, "ROUNDS", 2)
    monkeypatch.setattr(example, "ROUND_US", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    subject = EXPERIMENTS[id]
    assert callable(runpy.run_path(measurements.DECIDE)["decide"])
    monkeypatch.setattr(runpy, "run_path", lambda path: vars(example))
    frame = measurements.decide(**subject.arguments | {"shapes": [[4, 8], [4, 49]]})
    assert list(frame.columns) == list(subject.schema)
    assert list(frame["impl"]) == ["copy", *names] * 2 and not frame.isna().any(axis=None)
    absent = frame["impl"].isin(["Liger", "FlagGems"])
    assert frame.loc[absent, "note"].str.startswith("absent").all()
    for column, others in (("us", absent), ("eager_us", absent | (frame["impl"] == "copy"))):
        assert ((frame[column] > 0) == ~others).all()


def test_draw_is_of_its_seed_and_covers_the_space():
    shapes = example.draw(2000, "a")
    assert example.draw(2, "a") == shapes[:2] != example.draw(2, "b")
    assert max(m * n for m, n in shapes) <= 2**30
    for sizes in zip(*shapes, strict=True):
        counts = [sum(math.log2(it) // 5 == part for it in sizes) for part in range(4)]
        assert min(counts) > 250


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # compilers and packages warn of what they like
@pytest.mark.parametrize("options", [[], ["--gradient"]])
def test_decide_on_a_gpu(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decide.py", "64x781", "--drawn", "1", *options])
    example.main()
    said = capsys.readouterr().out
    assert said.count("64 x 781, by ") == 3 and "not measured" not in said
