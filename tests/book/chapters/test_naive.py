"""What the folded cells of `book/naive.ipynb` do, on data where a claim is false, too."""

import pytest
import torch

from memtraffic import count
from memtraffic.kernels.softmax import naive as kernel
from memtraffic_book.chapters import naive as page


@pytest.fixture
def measured():
    """What counters saw of each line, as recorded."""
    return page.show_counters()


def test_show_ops_refuses_another_matrix():
    page.show_ops(count(kernel.softmax, torch.ones(3, 5)))
    with pytest.raises(AssertionError, match="81 elements"):
        page.show_ops(count(kernel.softmax, torch.ones(3, 6)))


def test_draw_maxima_refuses_lanes_that_each_load_one(measured):
    page.draw_maxima(measured)
    measured[1]["instruction_read_bytes"] = 2 * page.MATRIX
    with pytest.raises(AssertionError, match="at the instructions"):
        page.draw_maxima(measured)


def test_draw_late_refuses_lines_as_fast_as_exp(measured):
    page.draw_late(measured)
    for line in (1, 4):
        measured[line]["ns"] = measured[2]["ns"]
    with pytest.raises(AssertionError, match="more than"):
        page.draw_late(measured)


def test_answers_are_judged():
    assert page.examine("5MN + 2M", "3MN + 2M")(kernel.softmax)
    assert page.predicts(kernel.softmax)(("5MN + 2M", "3MN + 2M"))
    with pytest.raises(AssertionError):
        page.predicts(kernel.softmax)(("4MN + 2M", "3MN + 2M"))
    with pytest.raises(AssertionError, match="wrong at"):
        page.examine("5MN + 2M", "3MN + 2M", page.logs)(kernel.softmax)
