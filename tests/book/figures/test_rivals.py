import pandas as pd
import pytest
from drawings import ticks, title

from memtraffic_book import figures

NAN = float("nan")
WIDTHS = [256, 384, 1024, 4096, 65536, 1048576]
SHARES = pd.DataFrame(
    {
        "ours": [0.9, 0.95, 1.0, 1.0, 0.9, 0.9],
        "QuACK": [0.8, 0.9, 0.9, 0.95, 0.95, NAN],
        "torch.softmax": [0.8, 0.8, 0.5, 0.5, 0.5, 0.5],
    },
    index=WIDTHS,
)

pytestmark = pytest.mark.slow


def test_rivals_has_a_panel_for_each_with_ours_behind():
    figure = figures.rivals(SHARES, "ours", "A sentence that says what the figure shows.")
    quack, torch = figure.axes
    assert title(quack) == "A sentence that says what the figure shows."
    assert [ax.texts[0].get_text() for ax in figure.axes] == ["QuACK", "torch.softmax"]
    for ax, name in ((quack, "QuACK"), (torch, "torch.softmax")):
        ours, theirs, level = ax.lines
        assert list(ours.get_ydata()) == pytest.approx(list(100 * SHARES["ours"]))
        assert list(theirs.get_ydata()) == pytest.approx(list(100 * SHARES[name].dropna()))
        assert list(level.get_ydata()) == [100, 100]
    assert quack.lines[1].get_linestyle() != torch.lines[1].get_linestyle()
    assert quack.lines[1].get_marker() != torch.lines[1].get_marker()
    assert ticks(torch.xaxis) == ["256", "4096", "65536"] and ticks(quack.xaxis) == [""] * 3


def test_rivals_hatches_where_the_other_is_ahead():
    figure = figures.rivals(SHARES, "ours", "A sentence.")
    ahead = [[path for it in ax.collections for path in it.get_paths()] for ax in figure.axes]
    assert [len(paths) for paths in ahead] == [1, 0]
    left, right = ahead[0][0].get_extents().intervalx
    assert 4096 < left < right == 65536


def test_rivals_of_many_widths_is_legible():
    shares = pd.DataFrame({"ours": 1.0, "other": 0.9}, index=range(256, 12673, 128))
    figure = figures.rivals(shares, "ours", "A sentence.")
    marked = figure.axes[0].lines[1].get_markevery()
    assert marked[0] == 0 and 5 < len(marked) < 20
