import pytest
from drawings import boxes, texts, title

from memtraffic_book import figures

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests

TILES = [[1, 3], [2, 5], [4, 5]]


def wide(ax, tile):
    """The widths of a tile's boxes, in the picture's bars from the top, in units of the last 5."""
    unit = boxes(ax, "tile 2")[-1][2]
    return [round(box[2] / unit, 6) for box in boxes(ax, f"tile {tile}")]


def test_running_sum_draws_each_term_after_each_tile():
    ax = figures.running_sum(TILES)
    assert wide(ax, 0) == [0.25, 1, 0.0625, 0.25, 0.0625, 0.25]  # three times, then a quarter
    assert wide(ax, 1) == [0.125, 1, 0.125, 1]
    assert wide(ax, 2) == [0.5, 1]
    assert {"maximum 3, sum 1.25", "maximum 5, sum 1.4375", "maximum 5, sum 2.9375"} <= {*texts(ax)}
    assert title(ax) == "When the maximum rises, all old terms shrink by the same factor."


def test_running_sum_says_by_what_the_old_terms_shrink():
    ax = figures.running_sum(TILES)
    assert [text for text in texts(ax) if text.startswith("times")] == [
        "times 0.25",
        "times 1: no new maximum",
    ]
    lines = [line.get_xdata() for line in ax.lines if line.get_gid() == "end"]
    starts, ends = [start for start, _ in lines], [end for _, end in lines]
    bars = [boxes(ax, "tile 0")[1], boxes(ax, "tile 1")[1]]
    assert starts == pytest.approx([box[0] + box[2] for box in bars])
    first = boxes(ax, "tile 0")[3]  # of the second bar
    assert ends[0] == pytest.approx(first[0] + first[2])
    assert ends[1] == pytest.approx(starts[1])


def test_running_sum_of_another_base():
    ax = figures.running_sum([[0], [1]], base=10, title="A sentence.")
    assert {"maximum 1, sum 1.1", "times 0.1"} <= {*texts(ax)}
    assert title(ax) == "A sentence."


def test_running_sum_of_more_tiles_than_colours():
    figures.running_sum([[1]] * 6)
    with pytest.raises(ValueError, match="7 tiles, and 6"):
        figures.running_sum([[1]] * 7)
