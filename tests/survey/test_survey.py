"""The survey of kernels that others published, made of kernels of our own."""

import os
import sys

import kernels
import pandas as pd
import pytest
import survey
import torch

from memtraffic import device
from memtraffic.op import find_op
from memtraffic_book.survey import COLUMNS

pytestmark = pytest.mark.skipif(device.HAS_GPU, reason="a GPU answers itself")


def refusing(x):
    raise TypeError("this GPU is too old\nfor it")


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no backward yet")


def three(x, sizes, y, *, scale):
    assert (sizes, scale) == ([2], 3)
    return x + y


@pytest.fixture
def rows_of(monkeypatch):
    """The survey's rows of a kernel of this file, which is no module to import."""
    tuned = kernels._differing_kernel
    monkeypatch.setattr(tuned, "configs", list(tuned.configs))

    def rows(fn, inputs, **options):
        monkeypatch.setattr(survey, "find_kernel", lambda path, _: {"fn": fn, "tuned": tuned}[path])
        kernel = survey.Published("numpy", "fn", inputs, **options)
        return list(survey.count_kernel(kernel, survey.Path("nowhere")))

    return rows


def moved(row):
    return row.reads, row.writes, row.least_reads, row.least_writes


def test_count_kernel_of_both_passes(rows_of):
    forward, backward = rows_of(lambda x, weight: x * weight, "M,N N,")
    assert moved(forward) == ("MN + N", "MN", "MN + N", "MN")
    assert moved(backward)[2:] == ("2MN + N", "MN + N")
    assert [row.direction for row in (forward, backward)] == ["forward", "backward"]


def test_count_kernel_gives_numbers_where_there_is_no_formula(rows_of):
    """Or where there are more than two sizes."""
    [row] = rows_of(lambda x: torch.zeros(4 * (x.shape[0] // 4)), "M,2")
    m, k, n = (survey.AT[size] for size in "MKN")
    assert moved(row) == ("0", str(m // 4 * 4), str(2 * m), str(m // 4 * 4))
    assert row.at == f"M={m}"
    forward, backward = rows_of(torch.matmul, "M,K K,N")
    assert (forward.reads, forward.writes) == (str(m * k + k * n), str(m * n))
    assert forward.at == f"M={m}, K={k}, N={n}"
    assert backward.least_writes == str(m * k + k * n)


def test_count_kernel_says_why_it_cannot_count(rows_of):
    [row] = rows_of(refusing, "M,N")
    assert row.reason == "TypeError: this GPU is too old"
    forward, backward = rows_of(Broken, "M,N")
    assert (forward.reads, forward.reason) == ("MN", "")
    assert (backward.reads, backward.reason) == ("", "RuntimeError: no backward yet")


def test_count_kernel_prepares_what_it_counts(rows_of):
    """Arguments are set by name and by position, and one configuration is kept, and noted."""
    forward, *_ = rows_of(three, "M,N M,N", fixed='{"1": [2], "scale": 3}')
    assert (forward.reads, forward.writes) == ("2MN", "MN")
    [row] = rows_of(kernels.differing, "M,N", keep="tuned", note="ours")
    assert (row.reads, row.writes) == ("MN", "M")
    assert row.note == "_masked_kernel: STORED=1; ours"


def test_read_kernels_has_each_once_at_sizes_that_are_known():
    found = survey.read_kernels()
    assert len({(kernel.path, kernel.inputs) for kernel in found}) == len(found) == 122
    for kernel in found:
        letters = find_op(kernel.inputs).sizes
        assert set(letters) <= set(survey.AT)
        assert not (kernel.package == "torch" and letters)
        survey.with_fixed(print, kernel.fixed)


@pytest.mark.slow
def test_main_counts_what_is_installed(tmp_path, monkeypatch, capsys):
    """Of a tutorial, without what needs a GPU: a call at its top, and one that writes a file."""
    (tmp_path / "02-fused-softmax.py").write_text(
        "import torch\n"
        "def normalized(x):\n    return x.softmax(1)\n"
        "y = normalized(torch.zeros(2, 2, device='cuda'))\n"
        "def softmax(x):\n    return normalized(x)\n"
        "open('results.html', 'w').close()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    absent = survey.Published("no-such-package", "nowhere:fn", "M,N")
    known = [kernel for kernel in survey.read_kernels() if kernel.package == survey.TUTORIALS]
    monkeypatch.setattr(survey, "read_kernels", lambda: [absent, *known])
    survey.main(tmp_path, tmp_path / "survey.csv")
    assert "no-such-package is not installed" in capsys.readouterr().err
    found = pd.read_csv(tmp_path / "survey.csv", keep_default_na=False)
    assert tuple(found.columns) == COLUMNS
    assert found["reads"][0] == found["writes"][0] == "MN"
    assert not (tmp_path / "results.html").exists()
    assert found["reason"].iloc[-1].startswith("ModuleNotFoundError")
    survey.main(tmp_path / "nowhere", tmp_path / "survey.csv")
    assert f"{survey.TUTORIALS} is not installed: {len(found)} rows stay" in capsys.readouterr().err
    again = pd.read_csv(tmp_path / "survey.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(again, found)
