"""What the folded cells of `book/tiled.ipynb` do, on data where a claim is false, too."""

from pathlib import Path

import pytest
import torch
from notebooks import PYTHON, load, markdown

from memtraffic.kernels.softmax import masked
from memtraffic.kernels.softmax import tiled as kernel
from memtraffic_book import text
from memtraffic_book.chapters import tiled as page

BOOK = Path(__file__).resolve().parents[3] / "book"


def test_show_dead_row_refuses_a_tile_without_one():
    mask = torch.tensor([[True] * 5 + [False] * 3, [False] * 8])
    page.show_dead_row(mask, torch.arange(16).reshape(2, 8))
    with pytest.raises(AssertionError, match="dead one is NaN"):
        page.show_dead_row(mask[[0, 0]], torch.arange(16).reshape(2, 8) % 15)


def test_examine_and_rows_of():
    assert page.rows_of(49) == 16 and page.rows_of(4096) == 1
    assert page.examine()(kernel.softmax)
    with pytest.raises(AssertionError):
        page.examine(page.scaled)(masked.softmax)


def test_lines_that_the_page_prints_are_those_of_the_tile():
    printed = PYTHON.findall(markdown(load(BOOK / "tiled.ipynb")))[0].splitlines()
    code = [line.split("  #")[0].strip() for line in text.source(kernel._softmax_tile).splitlines()]
    assert len(printed) == 4 and {*printed} <= {*code}
