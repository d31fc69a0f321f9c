"""What the folded cells of `book/backward.ipynb` do, on data where a claim is false, too."""

import pytest
import torch

from memtraffic import softmax
from memtraffic.kernels.softmax import masked
from memtraffic_book.chapters import backward


def test_check_differences_refuses_a_gradient_without_the_sum():
    x, dy = torch.tensor([[1.0, 2, 4], [0.5, -1, 2]], dtype=torch.float64)
    y = torch.softmax(x, 0)

    def loss(x):
        return (torch.softmax(x, 0) * dy).sum()

    backward.check_differences(loss, x, y * (dy - (y * dy).sum()))
    with pytest.raises(AssertionError, match="finite differences"):
        backward.check_differences(loss, x, y * dy)


def test_check_gradient_refuses_another_one():
    backward.check_gradient(softmax)
    with pytest.raises(AssertionError, match="5 x 781"):
        backward.check_gradient(lambda x: torch.log_softmax(x, 1))


@pytest.mark.slow
def test_check_kept_counts_what_attention_keeps():
    backward.check_kept(softmax)
    with pytest.raises(AssertionError, match="8704 elements with y"):
        backward.check_kept(backward.FromX.apply)


def test_check_losses_quotes_both_and_refuses_one_that_does_not_fall():
    right, wrong = torch.tensor([1.0, 0.32]), torch.tensor([1.0, 0.43])
    backward.check_losses(right, right, wrong)
    with pytest.raises(AssertionError, match="wrong gradient"):
        backward.check_losses(right, right, torch.tensor([1.0, 0.9]))


def test_check_graphs_refuses_an_operation_that_breaks_the_graph():
    with pytest.raises(AssertionError, match="graphs"):
        backward.check_graphs(torch.compiler.disable(masked.softmax), softmax)


def test_judges_refuse_a_backward_without_the_sum():
    for op in (backward.SOFTMAX_BACKWARD, backward.LOG, backward.FROM_X):
        with pytest.raises(AssertionError):
            backward.judge(op)(torch.mul)
