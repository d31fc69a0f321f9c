import itertools

import pandas as pd
import pytest
from drawings import boxes, texts, ticks, title, written

from memtraffic_book import figures

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests

# ---- axes and marks


def test_axes_have_labels_and_the_style_of_the_book():
    ax = figures.axes("columns", "GB/s", size=(4, 2), title="A sentence.")
    assert (ax.get_xlabel(), ax.get_ylabel(), title(ax)) == ("columns", "GB/s", "A sentence.")
    assert tuple(ax.figure.get_size_inches()) == (4, 2)
    assert ax.xaxis.label.get_color().lstrip("#") == figures.INK.lstrip("#")
    assert ax.yaxis.label.get_rotation() == 0
    ax.plot([0, 1e6], [0, 1])  # ticks that are made after the style's end
    ax.set_xticks([0, 1e6], ["0", "1"])
    ax.figure.canvas.draw()
    for label in ax.get_xticklabels():
        assert (label.get_color(), label.get_fontsize()) == (figures.INK, 10)
    assert ax.xaxis.get_gridlines()[-1].get_color() == figures.GRID


def test_mark_level_is_named_and_the_axis_starts_at_zero():
    ax = figures.axes("columns", "GB/s")
    ax.plot([256, 1024], [1000, 3000])
    figures.mark_level(ax, 4000, "copy")
    assert texts(ax) == ["copy"]
    assert list(ax.lines[-1].get_ydata()) == [4000, 4000]
    assert ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > 4000


def test_mark_level_keeps_what_is_higher_in_view():
    ax = figures.axes()
    ax.plot([256, 1024], [1000, 9000])
    figures.mark_level(ax, 4000, "copy")
    assert ax.get_ylim()[1] > 9000


def test_mark_position_is_named_beside_its_line():
    ax = figures.axes()
    ax.plot([0, 100], [0, 1])
    for value, text in ((30, "half of L2"), (95, "all of it, and some words more"), (97, "end")):
        figures.mark_position(ax, value, text)
    assert [list(line.get_xdata()) for line in ax.lines[1:]] == [[30] * 2, [95] * 2, [97] * 2]
    assert [text.get_ha() for text in ax.texts] == ["left", "right", "right"]
    heights = [text.xyann[1] for text in ax.texts]
    assert heights == sorted(heights) and len(set(heights)) == 3


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([256, 512, 1024], ["256", "512", "1024"]),
        ([2**k for k in range(8, 16)], ["512", "2048", "8192", "32768"]),
        ([0.25, 0.5, 1], ["0.25", "0.5", "1"]),
    ],
    ids=["all", "every-other", "fractions"],
)
def test_log2_axis_has_ticks_that_leave_room(values, labels):
    ax = figures.axes()
    ax.plot(values, [1000 + value for value in values])
    figures.log2_axis(ax, values)
    assert ticks(ax.xaxis) == labels
    assert ax.get_ylim()[0] == 0 and ax.get_xscale() == "log"


# ---- lines


@pytest.mark.parametrize("log2", [True, False])
def test_plot_lines_are_named_at_their_ends_without_overlap(log2):
    x = [32, 64, 128]
    lines = {
        name: pd.Series([1.0, 2.0, end], x) for name, end in zip("abc", (3.0, 3.01, 1), strict=True)
    }
    ax = figures.plot_lines(lines, "rows", "GB/s", log2=log2)
    assert [list(line.get_ydata()) for line in ax.lines] == [list(line) for line in lines.values()]
    assert texts(ax) == ["a", "b", "c"]
    assert [text.xy for text in ax.texts] == [(128, 3.0), (128, 3.01), (128, 1)]
    ax.figure.canvas.draw()
    a, b, c = (text.get_window_extent() for text in ax.texts)
    assert b.y0 > a.y0 > c.y0 and a.x0 > ax.transData.transform((128, 1))[0]
    middle = ax.transData.transform((128, 1))[1]
    assert c.y0 < middle < c.y1, "a name that is alone stands beside the end of its line"
    assert [text.get_color() for text in ax.texts] == [line.get_color() for line in ax.lines]
    assert (ax.get_xscale() == "log") == log2


def test_plot_lines_that_meet_are_named_in_the_order_drawn():
    x = [32, 64]
    lines = {"below": pd.Series([1, 3.001], x), "above": pd.Series([2, 3.0], x)}
    ax = figures.plot_lines(lines, "rows", "GB/s")
    ax.figure.canvas.draw()
    below, above = (text.get_window_extent() for text in ax.texts)
    assert above.y0 > below.y0


def test_plot_lines_differ_by_more_than_colour():
    lines = {name: pd.Series([i, i + 1.0], [1, 2]) for i, name in enumerate("abcdef")}
    ax = figures.plot_lines(lines, "rows", "GB/s", title="All of them rise.")
    assert len({line.get_color() for line in ax.lines}) == 6
    assert len({line.get_marker() for line in ax.lines}) == 6
    assert len({str(line.get_linestyle()) + str(line._dash_pattern) for line in ax.lines}) == 6
    assert title(ax) == "All of them rise."


def test_plot_lines_have_the_spread_of_their_points():
    x = [1, 2, 4]
    lines = {"copy": pd.Series([4.0, 5, 6], x), "tiled": pd.Series([3.0, 4, 5], x)}
    low = {"copy": lines["copy"] - 0.5, "tiled": lines["tiled"] - 1}
    high = {"copy": lines["copy"] + 0.25, "tiled": lines["tiled"] + 0.5}
    ax = figures.plot_lines(lines, "rows", "GB/s", low=low, high=high, level="copy")
    band, bars = ax.collections
    [path] = band.get_paths()
    assert (path.vertices[:, 1].min(), path.vertices[:, 1].max()) == (3.5, 6.25)
    spans = [tuple(segment[:, 1]) for segment in bars.get_segments()]
    assert spans == [(2, 3.5), (3, 4.5), (4, 5.5)]
    assert ax.get_xlabel() == "rows\n(grey band: level with copy)"
    without = figures.plot_lines(lines, "rows", "GB/s", low={"tiled": low["tiled"]}, high=high)
    assert len(without.collections) == 1 and without.get_xlabel() == "rows"


def test_plot_lines_of_long_names_break_them():
    x = [1, 2]
    lines = {name: pd.Series([1.0, 2.0], x) for name in ("torch.softmax", "compile(naive)", "copy")}
    ax = figures.plot_lines(lines, "rows", "GB/s")
    assert texts(ax) == ["torch.\nsoftmax", "compile\n(naive)", "copy"]


WIDTHS = pd.DataFrame(
    [
        ("copy", 256, 1000.0),
        ("copy", 1024, 3000.0),
        ("tiled", 256, 900.0),
        ("tiled", 1024, 2900.0),
    ],
    columns=("impl", "n", "gb_per_s"),
)


CURVE = pd.DataFrame(
    {"read": [337.0, 1296, 3855, 4436, 4465], "copy": [600.0, 1910, 3860, 3973, 3983]},
    index=[1, 4, 16, 32, 128],
)


def test_flights_marks_the_roof_and_what_kernels_have():
    ax = figures.flights(CURVE, 4270, {"tiled, 4096 columns": 16, "persistent": 64})
    assert list(ax.lines[0].get_ydata()) == list(CURVE["read"])
    level, *positions = ax.lines[2:]
    assert list(level.get_ydata()) == [4270, 4270]
    assert [line.get_xdata()[0] for line in positions] == [16, 64]
    said = " ".join(texts(ax)).replace("\n", " ")
    for text in ("read", "copy", "roof: 4270 GB/s", "tiled, 4096 columns: 16.0 kB"):
        assert text in said
    assert title(ax) == "An SM needs about 32 kB in flight before memory is busy all the time."
    assert ax.get_ylim()[1] > CURVE.max(axis=None)


# ---- rooflines


def test_roofline_has_a_ceiling_for_each_kind_of_arithmetic():
    roofs = {"multiply-adds": 28e12, "exponentials": 4e12}
    ax = figures.roofline(4e12, roofs, {"softmax": ("exponentials", 0.125)})
    slope, fma, fma_ridge, exp, exp_ridge, point = ax.lines
    assert all(y == pytest.approx(4e12 * x) for x, y in zip(*slope.get_data(), strict=True))
    assert slope.get_xdata()[1] == 7
    assert (list(fma.get_ydata()), list(exp.get_ydata())) == ([28e12] * 2, [4e12] * 2)
    assert (fma.get_xdata()[0], exp.get_xdata()[0]) == (7, 1)
    assert (fma_ridge.get_xdata()[0], exp_ridge.get_xdata()[0]) == (7, 1)
    assert fma.get_linestyle() != exp.get_linestyle()
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (0.125, 0.5e12)
    assert {"28 T multiply-adds/s", "4 T exponentials/s", "ridge 7", "ridge 1"} <= {*texts(ax)}
    assert {"softmax: 0.125\nexponentials\nper byte", "4000 GB/s, the roof"} <= {*texts(ax)}
    ax.figure.canvas.draw()
    [roof] = [text for text in ax.texts if text.get_text() == "4000 GB/s, the roof"]
    label = roof.get_window_extent()
    (x0, y0), (x1, _) = ax.transAxes.transform([(0, 0), (1, 1)])
    assert x0 < label.x0 < label.x1 < ax.transData.transform(roof.xy)[0] < x1 and label.y0 > y0
    assert title(ax) == (
        "Memory sets the time of softmax: it has 0.125 exponentials per byte, "
        "and the ridge is at 1."
    )
    said = [text.get_text() for text, _ in written(ax.figure)]
    assert "10 T" in said and "0.1" in said


def test_roofline_on_the_flat_part_is_set_by_arithmetic():
    ax = figures.roofline(4e12, {"multiply-adds": 28e12}, {"matmul": ("multiply-adds", 40)})
    assert title(ax).startswith("Arithmetic sets the time of matmul")
    assert ax.lines[-1].get_ydata()[0] == 28e12


# ---- bars and steps


def test_plot_bars_start_at_zero_and_say_their_value():
    ax = figures.plot_bars(["copy", "naive"], [4000, 800], ["4000 GB/s", "800 GB/s"], "GB/s")
    assert boxes(ax) == [(0, pytest.approx(i - 0.325), w, 0.65) for i, w in enumerate((4000, 800))]
    assert ax.get_xlim()[0] == 0 and ax.get_xlim()[1] > 4000
    assert texts(ax) == ["4000 GB/s", "800 GB/s"]
    assert ticks(ax.yaxis) == ["copy", "naive"]
    assert ax.yaxis_inverted() and ax.get_xlabel() == "GB/s"


def test_times_compares_the_longest_with_the_second():
    ax = figures.times({"multiply-adds": 6.1, "exponentials": 16.0, "bytes": 126.0})
    assert [bar.get_width() for bar in ax.patches] == [6.1, 16.0, 126.0]
    assert texts(ax) == ["6.1 µs", "16.0 µs", "126 µs"]
    assert title(ax) == "The bytes take 7.88x as long as the exponentials."
    colors = [bar.get_facecolor() for bar in ax.patches]
    assert colors[0] == colors[1] != colors[2]


def test_plot_staircase_has_steps_and_points_on_or_under_them():
    stairs = {"registers": ([1, 2, 3, 4], [8, 4, 2, 2]), "with LDS": ([1, 2, 3, 4], [5, 5, 5, 5])}
    points = {"fused": (2, 4), "persistent": (3, 1)}
    ax = figures.plot_staircase(stairs, points, "registers", "programs")
    *lines, kernels = ax.lines
    for line, (x, y) in zip(lines, stairs.values(), strict=True):
        assert (list(line.get_xdata()), list(line.get_ydata())) == (x, y)
        assert line.get_drawstyle() == "steps-mid"
    assert len({line.get_color() for line in ax.lines}) == 3
    assert lines[0].get_linestyle() != lines[1].get_linestyle()
    assert list(zip(*kernels.get_data(), strict=True)) == list(points.values())
    assert kernels.get_linestyle() == "None"
    assert texts(ax) == ["registers", "with LDS", "fused", "persistent"]
    assert [text.xy for text in ax.texts] == [(4, 2), (4, 5), (2, 4), (3, 1)]
    assert [text.get_ha() for text in ax.texts[2:]] == ["left", "right"]
    assert ax.get_ylim() == (0, pytest.approx(8.8))


def test_lines_of_equal_ends_stack_their_names():
    x = [1, 2]
    lines = {name: pd.Series([1.0, 2.0], x) for name in "abcd"}
    ax = figures.plot_lines(lines, "rows", "GB/s")
    ax.figure.canvas.draw()
    places = [text.get_window_extent() for text in ax.texts]
    middle = ax.transData.transform((2, 2.0))[1]
    assert sum((it.y0 + it.y1) / 2 for it in places) / 4 == pytest.approx(middle, abs=4)
    assert all(a.y1 <= b.y0 + 8 for a, b in itertools.pairwise(places))
