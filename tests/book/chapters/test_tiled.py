"""What the folded cells of `book/tiled.ipynb` do, on data where a claim is false, too."""

import matplotlib.pyplot as plt
import pytest
import torch

from memtraffic import runtime
from memtraffic.kernels.softmax import masked
from memtraffic.kernels.softmax import tiled as kernel
from memtraffic_book.chapters import tiled as page

pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures itself")


def test_compare_warps_and_time_starts_quote_what_was_timed(glued, monkeypatch, capsys):
    page.compare_warps()
    page.time_starts()
    assert capsys.readouterr().out.count("✓") == 2
    us, tiles, fast = page.load()
    assert fast and glued["masked_us"] == f"{us['masked'][64]:.0f} µs"
    monkeypatch.setattr(page, "load", lambda: (us.assign(masked=us["masked"] * 3), tiles, fast))
    with pytest.raises(AssertionError, match="within 20 %"):
        page.compare_warps()
    with pytest.raises(AssertionError, match="at least half"):
        page.time_starts()


def test_show_dead_row_refuses_a_tile_without_one(capsys):
    mask = torch.tensor([[True] * 5 + [False] * 3, [False] * 8])
    page.show_dead_row(mask, torch.arange(16).reshape(2, 8))
    assert "[1.0, nan]" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="dead one is NaN"):
        page.show_dead_row(mask[[0, 0]], torch.arange(16).reshape(2, 8) % 15)


def test_draw_tiles_refuses_a_rule_that_loses(glued, monkeypatch, capsys):
    page.draw_tiles()
    assert "tiled_share" in glued and len(plt.get_fignums()) == 1
    us, tiles, fast = page.load()
    by_rule = tiles["rows"] * tiles["n"] * page.ITEMSIZE == page.RULE
    slow = tiles.assign(us=tiles["us"].where(~by_rule, tiles["us"] * 1.5))
    monkeypatch.setattr(page, "load", lambda: (us, slow, fast))
    with pytest.raises(AssertionError, match="10 % allowed"):
        page.draw_tiles()


def test_draw_narrow_refuses_a_slow_even_width(glued, monkeypatch, capsys):
    page.draw_narrow()
    assert glued["by_chance"].startswith("4 of 73") and len(plt.get_fignums()) == 1
    real = page.experiments

    def changed(*ids, **options):
        single, half = real(*ids, **options)
        hit = (single["n"] == 64) & (single["impl"] == "tiled")
        return single.assign(us=single["us"].where(~hit, single["us"] * 2)), half

    monkeypatch.setattr(page, "experiments", changed)
    with pytest.raises(AssertionError, match="85 % needed"):
        page.draw_narrow()


def test_examine_and_rows_of():
    assert page.rows_of(49) == 16 and page.rows_of(4096) == 1
    assert page.examine()(kernel.softmax)
    with pytest.raises(AssertionError):
        page.examine(page.scaled)(masked.softmax)
