"""What the folded cells of `book/memory-wall.ipynb` do, on data where a claim is false, too."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from notebooks import code_cells, load

from memtraffic_book import exhibits, text
from memtraffic_book.chapters import memory_wall as page

BOOK = Path(__file__).resolve().parents[3] / "book"
X = torch.tensor([[1.0, 2, 3, 4, 5], [0, 0, 0, 0, 9], [7, 7, 7, 7, 7]])
RATES = pd.Series({"multiply-add": 32e12, "exp2": 4e12})


@pytest.fixture
def found(monkeypatch):
    """A function that sets what experiments return, by id."""

    def set_(**frames):
        monkeypatch.setattr(page, "experiment", lambda id, gpu=None: frames[id])
        monkeypatch.setattr(page, "experiments", lambda *ids, gpu=None: [frames[id] for id in ids])

    return set_


def test_trace_rows_sees_what_is_left_nan(capsys):
    y = X.clone()
    y[:, 4] = float("nan")
    page.trace_rows(exhibits.copy_rows, X, y)
    assert "12 of the 15" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="still NaN"):
        page.trace_rows(exhibits.copy_rows, X, X)


def test_kernel_of_the_page_is_the_one_that_was_timed():
    printed = [cell.source for cell in code_cells(load(BOOK / "memory-wall.ipynb"))]
    assert text.source(exhibits.copy_rows) in printed


@pytest.fixture
def timed(found):
    """Kernels half as fast as a copy at 128 columns, which take no others."""
    rows = [("copy", n, 10.0) for n in page.LADDER_AT]
    rows += [("naive", n, 20.0 if n == 128 else 0.0) for n in (128, 4096)]
    rows += [("masked", n, 20.0 if n == 128 else 0.0) for n in (128, 4096)]
    found(map_float32=pd.DataFrame(rows, columns=["impl", "n", "us"]))


def test_ladder_has_what_was_counted_beside_what_was_timed(timed, glued, monkeypatch, capsys):
    monkeypatch.setattr(page, "LADDER", ("naive", "masked"))
    page.keep_ladder()
    assert glued == {
        "naive_reads": "5MN + 2M", "naive_writes": "3MN + 2M", "naive_128": "50 %",
        "naive_4096": "–", "naive_5003": "–", "naive_65536": "–",
        "masked_reads": "MN", "masked_128": "50 %",
        "masked_4096": "–", "masked_5003": "–", "masked_65536": "–",
    }  # fmt: skip
    assert "reads fall from 5MN + 2M to MN" in capsys.readouterr().out


@pytest.mark.slow
def test_ladder_has_to_end_at_mn(timed, monkeypatch):
    monkeypatch.setattr(page, "LADDER", ("masked", "naive"))
    with pytest.raises(AssertionError, match="fall from MN"):
        page.keep_ladder()


def test_examine_judges_answers():
    assert page.examine(torch.clone)(exhibits.first_copy)
    with pytest.raises(AssertionError):
        page.examine(page.reverse)(exhibits.first_copy)
    with pytest.raises(AssertionError, match="reads MN, not 3MN"):
        page.examine(torch.clone, "3MN")(exhibits.first_copy)
