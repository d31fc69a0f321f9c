"""What the folded cells of `book/fused.ipynb` do, on data where a claim is false, too."""

import pytest
import torch

from memtraffic import resources
from memtraffic.kernels.softmax import fused as kernel
from memtraffic_book.chapters import fused

X = torch.tensor([[1.0, 2, 3, 4, 5], [0, 0, 0, 0, 9], [7, 7, 7, 7, 7]])


def test_compare_rows_refuses_one_wrong_element():
    y = torch.softmax(X[:, :4], dim=1)
    fused.compare_rows(y, X)
    y[2, 3] += 1e-3
    with pytest.raises(AssertionError, match="less than 1e-6"):
        fused.compare_rows(y, X)


@pytest.mark.slow
def test_compiled_kernel_is_held_and_counted():
    compiled = fused.show_who_holds_what(1024)
    fused.count_exchanges(compiled, 1024)
    with pytest.raises(AssertionError, match="shuffles"):
        fused.count_exchanges(compiled, 512)
    [narrow] = resources(kernel.softmax, torch.empty(1, 1024), target="sm_90")
    with pytest.raises(AssertionError):
        fused.count_exchanges(narrow, 1024)


def test_examine_and_reads_row_0_judge_answers():
    assert fused.examine(lambda x: torch.softmax(x, dim=1))(kernel.softmax)
    for op in (fused.half, fused.center):
        with pytest.raises(AssertionError):
            fused.examine(op)(kernel.softmax)
    assert not fused.reads_row_0(lambda x: x + 1)
