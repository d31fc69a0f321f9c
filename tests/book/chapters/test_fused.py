"""What the folded cells of `book/fused.ipynb` do, on data where a claim is false, too."""

import matplotlib
import pandas as pd
import pytest
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import triton
import triton.language as tl

from memtraffic import resources, runtime
from memtraffic.kernels.softmax import fused as kernel
from memtraffic_book.chapters import fused

pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures itself")


@triton.jit
def copy_rows(y_ptr, x_ptr, row_stride, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * row_stride + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))


X = torch.tensor([[1.0, 2, 3, 4, 5], [0, 0, 0, 0, 9], [7, 7, 7, 7, 7]])


@pytest.fixture(autouse=True)
def glued(monkeypatch):
    """What a function keeps for the prose."""
    kept = {}
    monkeypatch.setattr(fused, "glue", kept.__setitem__)
    yield kept
    plt.close("all")


@pytest.fixture(scope="module")
def race():
    """What the first folded cell returns, keeps for the prose, and how many figures it draws."""
    kept = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "glue", kept.__setitem__)
        return fused.draw_single_trip(), kept, len(plt.get_fignums())


def test_draw_single_trip_quotes_what_was_raced(race):
    raced, glued, drawn = race
    assert {"naive", "copy", "fused"} <= set(raced["impl"])
    us = raced.set_index("impl")["us"]
    assert glued["gap"] == f"{us['naive'] / us['copy']:.2f}x"
    assert drawn == 1


def test_check_offsets_refuses_those_of_another_row(capsys):
    fused.check_offsets(X, 1, torch.arange(5, 10))
    assert (
        capsys.readouterr().out
        == "✓ The elements of row 1 of a 3 x 5 matrix have offsets 5 to 9.\n"
    )
    with pytest.raises(AssertionError, match="does not hold"):
        fused.check_offsets(X, 1, torch.arange(5))


def test_trace_rows_sees_what_is_left_nan(capsys):
    y = X.clone()
    y[:, 4] = float("nan")
    fused.trace_rows(copy_rows, X, y)
    assert "12 of the 15" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="still NaN"):
        fused.trace_rows(copy_rows, X, X)


def test_compare_rows_refuses_one_wrong_element():
    y = torch.softmax(X[:, :4], dim=1)
    fused.compare_rows(y, X)
    y[2, 3] += 1e-3
    with pytest.raises(AssertionError, match="less than 1e-6"):
        fused.compare_rows(y, X)


@pytest.mark.slow
def test_compiled_kernel_is_held_and_counted(glued, capsys):
    compiled = fused.show_who_holds_what(torch.empty(1, fused.N), 1024)
    assert glued == {"row_kib": "64 KiB"}
    fused.count_exchanges(compiled, 1024)
    assert "20 shuffles: 10 for each" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="shuffles"):
        fused.count_exchanges(compiled, 512)
    [narrow] = resources(kernel.softmax, torch.empty(1, 1024), target="sm_90")
    with pytest.raises(AssertionError):
        fused.count_exchanges(narrow, 1024)


def test_compare_with_bytes_takes_the_gain_apart(race, glued, capsys):
    raced, *_ = race
    fused.compare_with_bytes(raced)
    assert glued["predicted"] == "4.00x" and capsys.readouterr().out.count("✓") == 3
    slow = raced.assign(us=raced["us"].where(raced["impl"] != "fused", raced["us"] * 3))
    with pytest.raises(AssertionError, match=r"2\.40x needed"):
        fused.compare_with_bytes(slow)


def test_show_multiples_refuses_widths_that_are_never_level(race, glued):
    raced, *_ = race
    micros, early, late = fused.draw_widths()
    assert isinstance(micros, pd.DataFrame) and {"copy", "fused", fused.KEPT} <= set(micros)
    fused.show_multiples(micros, early, late, raced)
    best = (micros.drop(columns=["copy", "fused"]).min(axis=1) / micros["fused"])[256]
    assert glued["best_low"] == f"{best:.2f}x"
    with pytest.raises(AssertionError, match="level with fused"):
        fused.show_multiples(micros, micros * 1.001, micros * 1.002, raced)


def test_examine_and_reads_row_0_judge_answers():
    assert fused.examine(lambda x: torch.softmax(x, dim=1))(kernel.softmax)
    for op in (fused.half, fused.center):
        with pytest.raises(AssertionError):
            fused.examine(op)(kernel.softmax)
    assert not fused.reads_row_0(lambda x: x + 1)
