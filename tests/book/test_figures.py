import itertools
import subprocess
import sys

import matplotlib
import pandas as pd
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from memtraffic.book import figures
from memtraffic.compile import BlockedLayout
from memtraffic.tensors import matrix
from memtraffic.traffic.count import Access, OpTraffic, count


@pytest.fixture(autouse=True)
def drawn():
    """Draws the figures of a test, and closes them; Matplotlib's settings stay as they were."""
    before = dict(plt.rcParams)
    yield
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()
    plt.close("all")
    assert dict(plt.rcParams) == before


def texts(ax):
    return [text.get_text() for text in ax.texts]


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def boxes(ax):
    """The boxes of a drawing, as (column, row, width, height)."""
    return [(*box.get_xy(), box.get_width(), box.get_height()) for box in ax.patches]


# ---- style


@pytest.mark.slow
def test_import_leaves_the_settings_as_they_are():
    program = (
        "import matplotlib.pyplot as plt; before = dict(plt.rcParams);"
        "from memtraffic.book import figures; assert dict(plt.rcParams) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_axes_have_labels_and_the_style_of_the_book():
    ax = figures.axes("columns", "GB/s", size=(5, 3))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("columns", "GB/s")
    assert tuple(ax.figure.get_size_inches()) == (5, 3)
    assert ax.xaxis.label.get_color().lstrip("#") == figures.INK.lstrip("#")
    ax.plot([0, 1e6], [0, 1])  # ticks that are made after the style's end
    ax.figure.canvas.draw()
    for label in ax.get_xticklabels():
        assert (label.get_color(), label.get_fontsize()) == (figures.INK, 11)
    assert ax.xaxis.get_gridlines()[-1].get_color() == figures.GRID


def test_style_is_for_what_a_page_draws_itself():
    ax = figures.axes()
    with figures.style():
        inside = ax.annotate("inside", (0, 0))
    assert inside.get_color().lstrip("#") == figures.INK.lstrip("#")


def test_style_keeps_what_a_backend_sets(monkeypatch):
    """In a notebook, the first figure loads a backend that makes pyplot interactive."""
    monkeypatch.setitem(plt.rcParams, "interactive", False)
    with figures.style():
        plt.rcParams["interactive"] = True
    assert plt.rcParams["interactive"]


def test_mark_level_is_named_and_the_axis_starts_at_zero():
    ax = figures.axes("columns", "GB/s")
    ax.plot([256, 1024], [1000, 3000])
    figures.mark_level(ax, 4000, "copy")
    assert texts(ax) == ["copy"]
    assert ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > 4000


def test_mark_position_is_named():
    ax = figures.axes()
    figures.mark_position(ax, 30, "half of L2")
    assert list(ax.lines[0].get_xdata()) == [30, 30]
    assert texts(ax) == [" half of L2"]


def test_log2_axis_is_evenly_spaced():
    ax = figures.axes()
    ax.plot([256, 512, 1024], [1000, 2000, 3000])
    figures.log2_axis(ax, [256, 512, 1024])
    assert ticks(ax.xaxis) == ["256", "1024"]
    assert ax.get_ylim()[0] == 0
    figures.log2_axis(ax, [256, 512, 1024, 2048])  # the last has a tick
    assert ticks(ax.xaxis) == ["512", "2048"]


# ---- lines and bars


def test_plot_bars_start_at_zero_and_say_their_value():
    ax = figures.plot_bars(["copy", "naive"], [4000, 800], ["4000 GB/s", "800 GB/s"], "GB/s")
    assert boxes(ax) == [(0, pytest.approx(i - 0.325), w, 0.65) for i, w in enumerate((4000, 800))]
    assert ax.get_xlim()[0] == 0 and ax.get_xlim()[1] > 4000
    assert texts(ax) == ["4000 GB/s", "800 GB/s"]
    assert ticks(ax.yaxis) == ["copy", "naive"]
    assert ax.yaxis_inverted() and ax.get_xlabel() == "GB/s"


@pytest.mark.parametrize("log2", [True, False])
def test_plot_lines_are_named_at_their_ends_without_overlap(log2):
    x = [32, 64, 128]
    lines = {
        name: pd.Series([1.0, 2.0, end], x) for name, end in zip("abc", (3.0, 3.01, 1), strict=True)
    }
    ax = figures.plot_lines(lines, "rows", "GB/s", log2=log2)
    assert [list(line.get_ydata()) for line in ax.lines] == [list(line) for line in lines.values()]
    assert texts(ax) == [" b", " a", " c"]
    heights = [text.xy[1] for text in ax.texts]
    bottom, top = ax.get_ylim()
    assert all(a - b > 0.04 * (top - bottom) for a, b in itertools.pairwise(heights))
    assert [text.get_color() for text in ax.texts] == [ax.lines[i].get_color() for i in (1, 0, 2)]
    assert (ax.get_xscale() == "log") == log2
    assert ax.get_xlim()[1] > 128


WIDTHS = pd.DataFrame(
    [
        ("copy", 256, 1000.0),
        ("copy", 1024, 3000.0),
        ("tiled", 256, 900.0),
        ("tiled", 1024, 2900.0),
    ],
    columns=("impl", "n", "gb_per_s"),
)


def test_plot_widths_has_a_line_for_each_implementation():
    ax = figures.plot_widths(WIDTHS)
    copy, tiled = ax.lines
    assert (copy.get_linestyle(), copy.get_color()) == ("--", figures.MUTED)
    assert (tiled.get_linestyle(), list(tiled.get_ydata())) == ("-", [900, 2900])
    assert ax.get_xlabel() == "columns" and "GB/s" in ax.get_ylabel()


def test_plot_width_panels_are_one_below_the_other():
    figure = figures.plot_width_panels({"float32": WIDTHS, "bfloat16": WIDTHS[:2]})
    assert [ax.get_title("left") for ax in figure.axes] == ["float32", "bfloat16"]
    assert [len(ax.lines) for ax in figure.axes] == [2, 1]
    assert texts(figure.axes[0]) == [" copy", " tiled"]


def test_plot_roofline_bends_at_the_ridge():
    ax = figures.plot_roofline(50e12, 4e12, {"softmax": 0.625})
    roof, point = ax.lines
    assert list(roof.get_xdata()) == [0.1, 12.5, 100]
    assert list(roof.get_ydata()) == [0.4e12, 50e12, 50e12]
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (0.625, 2.5e12)
    assert "softmax" in texts(ax)


def test_plot_staircase_has_steps_and_points_on_or_under_them():
    stairs = {"registers": ([1, 2, 3, 4], [8, 4, 2, 2]), "with LDS": ([1, 2, 3, 4], [3, 3, 2, 1])}
    points = {"fused": (2, 4), "persistent": (3, 1)}
    ax = figures.plot_staircase(stairs, points, "registers", "programs")
    *lines, kernels = ax.lines
    for line, (x, y) in zip(lines, stairs.values(), strict=True):
        assert (list(line.get_xdata()), list(line.get_ydata())) == (x, y)
        assert line.get_drawstyle() == "steps-mid"
    assert len({line.get_color() for line in ax.lines}) == 3
    assert list(zip(*kernels.get_data(), strict=True)) == list(points.values())
    assert kernels.get_linestyle() == "None"
    assert texts(ax) == ["registers", "with LDS", "fused", "persistent"]
    assert [text.xy for text in ax.texts] == [(4, 2), (4, 1), (2, 4), (3, 1)]
    assert [text.get_ha() for text in ax.texts[2:]] == ["left", "right"]
    assert ax.get_ylim() == (0, pytest.approx(8.8))


# ---- what moves, and who holds it


def test_plot_op_traffic_reads_to_the_left_and_writes_to_the_right():
    ops = [OpTraffic("amax", 5000, 5, 20000, 20), OpTraffic("sub", 5005, 5000, 20020, 20000)]
    ax = figures.plot_op_traffic(ops, 5000)
    assert [bar.get_width() for bar in ax.patches] == [-1, -1.001, 0.001, 1]
    assert texts(ax) == ["", "", "M", ""]
    assert ticks(ax.yaxis) == ["amax", "sub"]


def test_plot_access_map_shows_who_touched_what():
    accesses = [
        Access((0, 0, 0), "read", "x_ptr", (0, 1, 2)),
        Access((1, 0, 0), "read", "x_ptr", (3, 4, 4)),
        Access((0, 0, 0), "written", "y_ptr", (8,)),
    ]
    ax = figures.plot_access_map(accesses, (3, 3), "x_ptr")
    assert texts(ax)[:9] == ["0", "1", "2", "3", "4 (2 times)", "5", "6", "7", "8"]
    assert texts(ax)[9:] == ["program 0", "program 1", "no program"]
    colors = [patch.get_facecolor() for patch in ax.patches]
    white = matplotlib.colors.to_rgba("white")
    assert [color == white for color in colors] == [False] * 5 + [True] * 4
    assert colors[0] == colors[2] != colors[3]


@pytest.mark.parametrize("argument", ["x_ptr", "y_ptr"])
def test_plot_access_map_of_a_kernel(argument):
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.ladder import fused

    accesses = count(fused.softmax, matrix(3, 4), trace=True).accesses
    ax = figures.plot_access_map(accesses, (3, 4), argument)
    assert texts(ax) == [*map(str, range(12)), "program 0", "program 1", "program 2"]


def test_plot_thread_layout_numbers_lanes_within_their_warp():
    ax = figures.plot_thread_layout(BlockedLayout((1, 2), (2, 3), (2, 1)), (4, 12))
    first, second = ["0", "1", "2"] * 2, ["3", "4", "5"] * 2
    expected = [[*first, f" warp {warp}", *second, f" warp {warp}"] for warp in (0, 1)]
    assert texts(ax) == expected[0] + expected[1]
    assert boxes(ax)[:2] == [(0, 0, 2, 1), (2, 0, 2, 1)]
    assert boxes(ax)[-1] == (10, 3, 2, 1)
    colors = [box.get_facecolor() for box in ax.patches]
    assert len(set(colors[:12])) == len(set(colors[12:])) == 1 and colors[0] != colors[12]
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 12), (4, 0))


def test_plot_thread_layout_of_warps_side_by_side():
    ax = figures.plot_thread_layout(BlockedLayout((2, 1), (2, 1), (1, 2)), (8, 2))
    assert texts(ax) == ["0", "0", " warp 1", "1", "1", " warp 1"] * 2
    assert boxes(ax)[:3] == [(0, 0, 1, 2), (1, 0, 1, 2), (0, 2, 1, 2)]


# ---- maps

SWEPT = pd.DataFrame(
    [(1, 64, 20.0, 10.0), (2, 64, 8.0, 10.0), (2, 4096, 40.0, 30.0)],
    columns=("rows", "n", "us", "copy_us"),
)


def test_relative_speed_is_over_that_of_the_copy():
    speed = figures.relative_speed(SWEPT, "rows")
    assert (speed.index.tolist(), speed.columns.tolist()) == ([1, 2], [64, 4096])
    assert speed.loc[1, 64] == 0.5 and pd.isna(speed.loc[1, 4096])
    assert speed.loc[2].tolist() == [1.25, 0.75]


def test_plot_heatmaps_frame_what_is_chosen():
    frames = {"float32": SWEPT, "bfloat16": SWEPT[:2]}
    chosen = {"float32": 2, "bfloat16": 1}
    figure = figures.plot_heatmaps(frames, "rows", lambda title, n: chosen[title], "rows a program")
    single, half = figure.axes
    assert texts(single) == ["50", "125", "75"]
    assert boxes(single) == [(0, 1, 1, 1), (1, 1, 1, 1)]
    assert boxes(half) == [(0, 0, 1, 1)]
    assert (ticks(single.xaxis), ticks(single.yaxis)) == (["64", "4096"], ["1", "2"])
    assert single.get_ylabel() == "rows a program"
    assert half.get_title("left") == "bfloat16: percent of a copy"


def test_plot_integer_map_is_darker_where_numbers_are_higher():
    columns = [("T4", "sm_75"), "H200"]
    ax = figures.plot_integer_map([[1, 16], [8, 2]], ["256", "1024"], columns, "programs", "GPU")
    assert texts(ax) == ["1", "16", "8", "2"]
    assert boxes(ax) == [(0, 0, 1, 1), (1, 0, 1, 1), (0, 1, 1, 1), (1, 1, 1, 1)]
    assert (ticks(ax.xaxis), ticks(ax.yaxis)) == (["T4\nsm_75", "H200"], ["256", "1024"])
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 2), (2, 0))
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title("left")) == ("GPU", "", "programs")
    light = [sum(box.get_facecolor()[:3]) for box in ax.patches]
    assert [text for _, text in sorted(zip(light, texts(ax), strict=True))] == ["16", "8", "2", "1"]
    assert [text.get_color() == "white" for text in ax.texts] == [False, True, False, False]


# ---- the loop over tiles, and the ladder

WORK = ("reduce", "store")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        pytest.param(
            ("for", "load", *WORK, "end"), [(0, 1, 3), (3, 4, 6), (6, 7, 9)], id="one-stage"
        ),
        pytest.param(
            ("copy", "for", "wait 0", *WORK, "copy", "end", "wait 0"),
            [(0, 2, 4), (4, 6, 8), (8, 10, 12)],
            id="two-stages",
        ),
        pytest.param(
            ("copy", "copy", "for", "wait 1", *WORK, "copy", "end", "wait 0"),
            [(0, 3, 5), (1, 7, 9), (5, 11, 13)],
            id="three-stages",
        ),
    ],
)
def test_tile_intervals(schedule, expected):
    assert figures.tile_intervals(schedule, 3) == expected


def test_plot_timeline_shows_each_tile_in_flight_and_in_use():
    schedules = {
        "one stage": ("for", "load", *WORK, "end"),
        "two stages": ("copy", "for", "wait 0", *WORK, "copy", "end"),
    }
    one, two = figures.plot_timeline(schedules, 2).axes
    assert [ax.get_title("left") for ax in (one, two)] == ["one stage", "two stages"]
    spans = [[(x, width) for x, _, width, _ in boxes(ax)] for ax in (one, two)]
    assert spans == [[(0, 1), (1, 2), (3, 1), (4, 2)], [(0, 2), (2, 2), (4, 2), (6, 2)]]
    assert one.yaxis_inverted()


def test_plot_ladder_has_both_sides():
    frame = pd.DataFrame({"impl": ["copy", "naive", "fused"], "gb_per_s": [4000.0, 800.0, 3900.0]})
    moved = {"fused": 2e9, "naive": 8e9, "copy": 2e9}
    bytes_moved, bandwidth = figures.plot_ladder(frame, moved).axes
    assert [bar.get_width() for bar in bytes_moved.patches] == [2, 8, 2]
    assert texts(bytes_moved) == ["2.00 GB", "8.00 GB", "2.00 GB"]
    assert [bar.get_width() for bar in bandwidth.patches] == [4000, 800, 3900]
    assert texts(bandwidth) == ["4000 GB/s", "800 GB/s", "3900 GB/s"]
    assert ticks(bandwidth.yaxis) == ["copy", "naive", "fused"]
    assert bytes_moved.get_xlim()[0] == bandwidth.get_xlim()[0] == 0
