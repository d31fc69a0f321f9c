"""What the folded cells of `book/persistent.ipynb` do, on data where a claim is false, too."""

import pytest
import torch
import triton
import triton.language as tl

from memtraffic.kernels.softmax import persistent as kernel
from memtraffic.kernels.softmax import tiled
from memtraffic_book.chapters import persistent as page


@pytest.mark.slow
def test_check_schedules_refuses_a_loop_that_never_asks_ahead(monkeypatch):
    page.check_schedules()
    two = page.compiled(16384, 2)
    monkeypatch.setattr(page, "compiled", lambda n_cols, num_stages: two)
    with pytest.raises(AssertionError):
        page.check_schedules()


@triton.jit
def _scale_kernel(y_ptr, x_ptr, w_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < n_cols)
    y = x / tl.sqrt(tl.sum(x * x, axis=0) / n_cols) * w
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


def row_norms(x, w):
    y = torch.empty_like(x)
    _scale_kernel[(len(x),)](y, x, w, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def test_judges_refuse_other_orders_and_weights_read_again():
    assert page.rows_of_programs(lambda x: tiled.softmax(x, rows=4), 7) == [[0, 1, 2, 3], [4, 5, 6]]
    with pytest.raises(AssertionError, match="no neighbours"):
        page.takes_neighbours(lambda x: kernel.softmax(x, rows=1, programs=3))
    with pytest.raises(AssertionError, match="not 3"):
        page.takes_neighbours(tiled.softmax)
    with pytest.raises(AssertionError, match="50 rows read the weights 50 times"):
        page.loads_weights_once(row_norms)
