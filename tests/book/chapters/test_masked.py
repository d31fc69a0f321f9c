"""What the folded cells of `book/masked.ipynb` do, on data where a claim is false, too."""

import pytest
import torch
import triton
import triton.language as tl

from memtraffic.kernels.softmax import masked as kernel
from memtraffic_book import exhibits
from memtraffic_book.chapters import masked


def test_try_rows_refuses_dead_elements_that_count():
    with pytest.raises(AssertionError, match="On 3 rows of 5 numbers"):
        masked.try_rows(exhibits._no_other_kernel)


def test_try_softmaxes_passes_all_and_judges_one_right(monkeypatch):
    masked.try_softmaxes()
    monkeypatch.setattr(exhibits, "softmax_block_of_512", kernel.softmax)  # is right
    with pytest.raises(AssertionError, match="the judge passes 2"):
        masked.try_softmaxes()


def test_check_narrow_holds_at_wide_rows_alone():
    masked.time_narrow()
    masked.check_narrow(4096, at_least=0.9)
    with pytest.raises(AssertionError, match="At 64 columns"):
        masked.check_narrow(64, at_least=0.9)


@triton.jit
def _softmin_kernel(y_ptr, x_ptr, n_cols, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at, mask = tl.program_id(0) * n_cols + cols, cols < n_cols
    x = tl.load(x_ptr + at, mask=mask, other=OTHER)
    numerator = tl.exp(tl.min(x, axis=0) - x)
    tl.store(y_ptr + at, numerator / tl.sum(numerator, axis=0), mask=mask)


def softmin(x, other=float("inf")):
    y, n = torch.empty_like(x), x.shape[1]
    block = triton.next_power_of_2(n)
    _softmin_kernel[(x.shape[0],)](y, x, n, OTHER=other, BLOCK=block)
    return y


@pytest.mark.slow
def test_full_blocks_first_gives_a_hint():
    assert masked.full_blocks_first(softmin)
    with pytest.raises(AssertionError, match="where no element is dead"):
        masked.full_blocks_first(lambda x: softmin(x, 0.0))
