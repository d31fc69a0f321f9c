"""What the folded cells of `book/sectors.ipynb` do, on data where a claim is false, too."""

import pytest
import torch
import triton
import triton.language as tl

from memtraffic.kernels.softmax import masked
from memtraffic_book.chapters import sectors as page


@pytest.fixture(scope="module")
def counted():
    return page.recorded()


def test_compare_refuses_one_sector_more(counted):
    page.compare(counted)
    more = counted.copy()
    more.iloc[-1, more.columns.get_loc("store_sectors")] += 1
    with pytest.raises(AssertionError, match="467 of 468"):
        page.compare(more)


def test_compare_refuses_another_count_of_another_package(counted, monkeypatch):
    others = page.experiment("sectors_blind")
    more = others.assign(load_requests=others["load_requests"] + (others["refused"] == ""))
    monkeypatch.setattr(page, "experiment", lambda id, gpu: more)
    with pytest.raises(AssertionError, match="the counters of 0 are equal"):
        page.compare(counted)


def test_draw_odd_widths_refuses_requests_that_do_not_fall(counted):
    page.draw_odd_widths(counted)
    with pytest.raises(AssertionError, match="load requests"):
        page.draw_odd_widths(counted.assign(load_requests=100))


@pytest.mark.slow
def test_draw_lanes_and_show_bits_refuse_other_loads(monkeypatch):
    page.draw_lanes()
    page.show_bits()
    monkeypatch.setattr(page.tiled, "softmax", lambda x, **options: masked.softmax(x))
    with pytest.raises(AssertionError, match="4100 columns"):
        page.show_bits()


@triton.jit
def _column_kernel(y_ptr, x_ptr, n_rows, n_cols, ROWS: tl.constexpr):
    """The softmax of a column, by a program of its own."""
    rows = tl.arange(0, ROWS)
    offsets, mask = rows * n_cols + tl.program_id(0), rows < n_rows
    x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + offsets, numerator / tl.sum(numerator, axis=0), mask=mask)


def column_by_column(x):
    y, (m, n) = torch.empty_like(x), x.shape
    _column_kernel[(n,)](y, x, m, n, ROWS=triton.next_power_of_2(m))
    return y


@pytest.mark.slow
def test_judges_refuse_sectors_that_several_programs_touch():
    assert page.sixteenth(8) and not page.sixteenth(16)
    with pytest.raises(AssertionError, match="256 sectors are read 2048 times"):
        page.examine(page.softmax_of_columns)(column_by_column)


@pytest.mark.slow
def test_loads_64_bits_compiles():
    assert page.loads_64_bits(1004) and not page.loads_64_bits(1024)
    with pytest.raises(AssertionError, match="not between"):
        page.loads_64_bits(4)
