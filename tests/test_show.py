import matplotlib
import pandas as pd
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from memtraffic import show
from memtraffic.ladder import naive
from memtraffic.traffic.count import Access, Op


@pytest.fixture
def shown(monkeypatch):
    """What is displayed: a list of pairs of the object and the keywords."""
    found = []
    monkeypatch.setattr(
        show, "display", lambda value, **options: found.append((value, options))
    )
    return found


@pytest.fixture
def figures():
    """Closes the figures of a test, once each could be drawn."""
    yield
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()
    plt.close("all")


# ---- numbers with their unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (show.us(5.67), "5.7 µs"),
        (show.us(101.4), "101 µs"),
        (show.us(12345.6), "12,346 µs"),
        (show.gb_per_s(3957.2), "3957 GB/s"),
        (show.times(1.034), "1.03x"),
        (show.size(16384), "16.4 kB"),
        (show.size(999_900), "999.9 kB"),
        (show.size(1e6), "1.0 MB"),
        (show.size(268510464), "268.5 MB"),
        (show.size(4294967296), "4,295.0 MB"),
        (show.percent(0.916), "91.6 %"),
        (show.percent(-0.05), "-5.0 %"),
    ],
)
def test_numbers_carry_their_unit(text, expected):
    assert text == expected


# ---- text


def test_a_claim_that_holds(capsys):
    show.claim("naive reads 5MN + 2M", True)
    assert capsys.readouterr().out == "✓ naive reads 5MN + 2M\n"


@pytest.mark.parametrize("holds", [False, 0, pd.Series([1.0]).lt(0).all()])
def test_a_claim_that_does_not_hold(holds, capsys):
    with pytest.raises(AssertionError, match=r"^does not hold: it is faster$"):
        show.claim("it is faster", holds)
    assert capsys.readouterr().out == ""


def test_an_exercise_is_open_until_it_is_tried(capsys):
    show.check("twice two", None, None)
    assert capsys.readouterr().out == "○ twice two: your turn\n"
    show.check("twice two", 4, lambda attempt: attempt == 4)
    assert capsys.readouterr().out == "✓ twice two\n"
    show.check("twice two", 5, lambda attempt: attempt == 4)
    assert capsys.readouterr().out == "✗ twice two: not yet\n"
    show.check("twice two", "4", lambda attempt: attempt - 4 == 0)
    assert capsys.readouterr().out.startswith("✗ twice two: not yet (TypeError: ")


def test_an_answer_of_zero_is_an_answer(capsys):
    show.check("twice two", 0, lambda attempt: attempt == 4)
    assert capsys.readouterr().out == "✗ twice two: not yet\n"


def test_glue_keeps_a_value_for_the_text(shown):
    show.glue("ratio", "4.0x")
    mime = "application/papermill.record/"
    [(data, options)] = shown
    assert data == {f"{mime}text/plain": "'4.0x'"}
    assert options == {
        "raw": True,
        "metadata": {"scrapbook": {"name": "ratio", "mime_prefix": mime}},
    }


def test_source_is_shown_as_python(shown):
    show.source(naive.softmax, naive.softmax_argmax)
    [(markdown, _)] = shown
    assert markdown.data.startswith("```python\ndef softmax(x):\n")
    assert "\n\n\ndef softmax_argmax(x):\n" in markdown.data
    assert markdown.data.endswith("\n```")
    assert "amax(dim=1, keepdim=True)" in markdown.data


def test_a_diff_shows_both(shown):
    show.diff(naive.softmax, naive.softmax_argmax)
    [(markdown, _)] = shown
    first, *lines, last = markdown.data.splitlines()
    assert (first, last) == ("```diff", "```")
    assert "-def softmax(x):" in lines
    assert "+def softmax_argmax(x):" in lines
    assert "-    return numerator / denominator" in "\n".join(lines)
    assert not [line for line in lines if line.startswith(("@@", "---", "+++"))]


def test_a_diff_of_equals_has_no_change(shown):
    show.diff(naive.softmax, naive.softmax)
    [(markdown, _)] = shown
    assert not [line for line in markdown.data.splitlines() if line.startswith("+")]


def test_the_source_of_a_kernel_is_that_of_its_function(shown):
    pytest.importorskip("triton", reason="Triton is not installed")
    import kernels

    show.source(kernels._tuned_kernel)
    show.source(kernels._unmasked_kernel)
    show.diff(kernels._unmasked_kernel, kernels._masked_kernel)
    texts = [markdown.data for markdown, _ in shown]
    assert "def _twice_kernel(y_ptr" in texts[0]
    assert "tl.load(x_ptr + offsets)" in texts[1]
    assert (
        "+    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols)" in texts[2]
    )


def test_a_table_as_text_and_html():
    table = show.Table(
        ["name", "reads & writes"], [["<naive>", "5MN"], ["fused", '"MN"']]
    )
    assert repr(table) == 'name | reads & writes\n<naive> | 5MN\nfused | "MN"'
    assert table._repr_html_() == (
        '<table class="dataframe"><tr><th>name</th><th>reads &amp; writes</th></tr>'
        "<tr><td>&lt;naive&gt;</td><td>5MN</td></tr><tr><td>fused</td><td>&quot;MN&quot;</td></tr></table>"
    )


@pytest.mark.parametrize("as_frame", [False, True], ids=["dicts", "frame"])
def test_a_table_of_rows(as_frame, shown):
    rows = [{"impl": "copy", "us": 5.0}, {"impl": "naive", "us": 20.0}]
    show.table(
        pd.DataFrame(rows) if as_frame else rows,
        implementation=lambda row: row["impl"],
        time_each_=lambda row: show.us(row["us"]),
        whole=lambda row: 3,
    )
    [(table, _)] = shown
    assert repr(table) == (
        "implementation | time each | whole\ncopy | 5.0 µs | 3\nnaive | 20 µs | 3"
    )


# ---- figures


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_axes_have_labels(figures):
    ax = show.axes("columns", "GB/s", size=(5, 3))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("columns", "GB/s")
    assert tuple(ax.figure.get_size_inches()) == (5, 3)


def test_bars_start_at_zero_and_say_their_value(figures):
    ax = show.bars(["copy", "naive"], [4000, 800], ["4000 GB/s", "800 GB/s"], "GB/s")
    assert [bar.get_width() for bar in ax.patches] == [4000, 800]
    assert {bar.get_x() for bar in ax.patches} == {0}
    assert ax.get_xlim()[0] == 0
    assert ax.get_xlim()[1] > 4000
    assert texts(ax) == ["4000 GB/s", "800 GB/s"]
    assert ax.yaxis_inverted()
    assert ax.get_xlabel() == "GB/s"


def test_cells_show_who_touched_what(figures):
    accesses = [
        Access((0, 0, 0), "read", "x_ptr", (0, 1, 2)),
        Access((1, 0, 0), "read", "x_ptr", (3, 4, 4)),
        Access((0, 0, 0), "written", "y_ptr", (8,)),
    ]
    ax = show.cells(accesses, (3, 3), "x_ptr")
    assert texts(ax)[:9] == ["0", "1", "2", "3", "4 (2 times)", "5", "6", "7", "8"]
    assert texts(ax)[9:] == ["program 0", "program 1", "nobody"]
    colors = [patch.get_facecolor() for patch in ax.patches]
    white = matplotlib.colors.to_rgba("white")
    assert [color == white for color in colors] == [False] * 5 + [True] * 4
    assert colors[0] == colors[2] != colors[3]


def test_cells_of_a_kernel(figures):
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.ladder import fused
    from memtraffic.traffic.count import count
    from memtraffic.traffic.formula import random_matrix

    accesses = count(fused.softmax, *random_matrix(3, 4), trace=True).accesses
    for argument in ("x_ptr", "y_ptr"):
        ax = show.cells(accesses, (3, 4), argument)
        assert texts(ax) == [
            *map(str, range(12)),
            "program 0",
            "program 1",
            "program 2",
        ]


def boxes(ax):
    """The boxes of a drawing, as (column, row, width, height)."""
    return [(*box.get_xy(), box.get_width(), box.get_height()) for box in ax.patches]


def test_lanes_are_numbered_within_their_warp(figures):
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.targets import Layout

    ax = show.lanes(Layout((1, 2), (2, 3), (2, 1)), (4, 12))
    first, second = ["0", "1", "2"] * 2, ["3", "4", "5"] * 2
    warp_0, warp_1 = [" warp 0"], [" warp 1"]
    assert texts(ax) == [
        *(first + warp_0 + second + warp_0),
        *(first + warp_1 + second + warp_1),
    ]
    assert boxes(ax)[:2] == [(0, 0, 2, 1), (2, 0, 2, 1)]
    assert boxes(ax)[-1] == (10, 3, 2, 1)
    colors = [box.get_facecolor() for box in ax.patches]
    assert len(set(colors[:12])) == len(set(colors[12:])) == 1
    assert colors[0] != colors[12]
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 12), (4, 0))


def test_warps_may_stand_side_by_side(figures):
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.targets import Layout

    ax = show.lanes(Layout((2, 1), (2, 1), (1, 2)), (8, 2))
    assert texts(ax) == ["0", "0", " warp 1", "1", "1", " warp 1"] * 2
    assert boxes(ax)[:3] == [(0, 0, 1, 2), (1, 0, 1, 2), (0, 2, 1, 2)]


SWEPT = pd.DataFrame(
    [
        ("copy", 0, 64, 10.0),
        ("warps", 1, 64, 20.0),
        ("warps", 2, 64, 8.0),
        ("copy", 0, 4096, 30.0),
        ("warps", 2, 4096, 40.0),
    ],
    columns=("impl", "value", "n", "us"),
)


def test_a_share_is_the_speed_over_that_of_the_copy():
    grid = show.share(SWEPT)
    assert (grid.index.tolist(), grid.columns.tolist()) == ([1, 2], [64, 4096])
    assert grid.loc[1, 64] == 0.5
    assert grid.loc[2].tolist() == [1.25, 0.75]
    assert pd.isna(grid.loc[1, 4096])


def test_heatmaps_frame_what_is_chosen(figures):
    frames = {"float32": SWEPT, "bfloat16": SWEPT[SWEPT["n"] == 64]}
    figure = show.heatmaps(
        frames, "warps", lambda title, n: {"float32": 2, "bfloat16": 1}[title]
    )
    single, half = figure.axes
    assert texts(single) == ["50", "125", "75"]
    assert boxes(single) == [(0, 1, 1, 1), (1, 1, 1, 1)]
    assert boxes(half) == [(0, 0, 1, 1)]
    assert [label.get_text() for label in single.get_xticklabels()] == ["64", "4096"]
    assert [label.get_text() for label in single.get_yticklabels()] == ["1", "2"]
    assert (single.get_ylabel(), half.get_title("left")) == (
        "warps",
        "bfloat16: percent of a copy",
    )


WORK = ("reduce", "store")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        pytest.param(
            ("for", "load", *WORK, "end"),
            [(0, 1, 3), (3, 4, 6), (6, 7, 9)],
            id="one-stage",
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
def test_the_spans_of_tiles(schedule, expected):
    assert show.spans(schedule, 3) == expected


def test_a_timeline_shows_each_tile_on_its_way_and_in_use(figures):
    one, two = (
        ("for", "load", *WORK, "end"),
        ("copy", "for", "wait 0", *WORK, "copy", "end"),
    )
    panels = show.timeline({"one stage": one, "two stages": two}, 2).axes
    assert [panel.get_title("left") for panel in panels] == ["one stage", "two stages"]
    assert [(col, width) for col, _, width, _ in boxes(panels[0])] == [
        *((0, 1), (1, 2)),
        *((3, 1), (4, 2)),
    ]
    assert [(col, width) for col, _, width, _ in boxes(panels[1])] == [
        *((0, 2), (2, 2)),
        *((4, 2), (6, 2)),
    ]
    assert panels[0].yaxis_inverted()


def test_the_ladder_has_both_sides(figures):
    frame = pd.DataFrame(
        {"impl": ["copy", "naive", "fused"], "gb_per_s": [4000.0, 800.0, 3900.0]}
    )
    moved = {"copy": 2e9, "naive": 8e9, "fused": 2e9}
    bytes_moved, bandwidth = show.ladder(frame, moved).axes
    assert [bar.get_width() for bar in bytes_moved.patches] == [2, 8, 2]
    assert texts(bytes_moved) == ["2.00 GB", "8.00 GB", "2.00 GB"]
    assert [bar.get_width() for bar in bandwidth.patches] == [4000, 800, 3900]
    assert texts(bandwidth) == ["4000 GB/s", "800 GB/s", "3900 GB/s"]
    assert bytes_moved.get_xlim()[0] == bandwidth.get_xlim()[0] == 0


def test_the_flow_reads_to_the_left_and_writes_to_the_right(figures):
    ops = [Op("amax", 5000, 5, 20000, 20), Op("sub", 5005, 5000, 20020, 20000)]
    ax = show.flow(ops, 5000)
    assert [bar.get_width() for bar in ax.patches] == [-1, -1.001, 0.001, 1]
    assert texts(ax) == ["", "", "M", ""]


def test_a_level_is_named_and_the_axis_starts_at_zero(figures):
    ax = show.axes("columns", "GB/s")
    ax.plot([256, 1024], [1000, 3000])
    show.level(ax, 4000, "copy")
    assert texts(ax) == ["copy"]
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] > 4000


def test_powers_of_two_are_evenly_spaced(figures):
    ax = show.axes("columns", "GB/s")
    ax.plot([256, 512, 1024], [1000, 2000, 3000])
    show.powers_of_two(ax, [256, 512, 1024])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["256", "1024"]
    assert ax.get_ylim()[0] == 0
    show.powers_of_two(ax, [256, 512, 1024, 2048])  # the last has a mark
    assert [label.get_text() for label in ax.get_xticklabels()] == ["512", "2048"]


def test_a_staircase_has_steps_and_kernels_on_or_under_them(figures):
    stairs = {
        "registers": ([1, 2, 3, 4], [8, 4, 2, 2]),
        "with LDS": ([1, 2, 3, 4], [3, 3, 2, 1]),
    }
    points = {"fused": (2, 4), "persistent": (3, 1)}
    ax = show.staircase(stairs, points, "registers", "programs")
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
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("registers", "programs")


def test_a_grid_shows_whole_numbers_and_leaves_out_none(figures):
    values = [[1, 16, None], [8, None, 2]]
    columns = [("T4", "sm_75"), "H200", 64]
    ax = show.grid(values, ["256", "1024"], columns, "programs", "GPU", "columns")
    assert texts(ax) == ["1", "16", "8", "2"]
    assert boxes(ax) == [(0, 0, 1, 1), (1, 0, 1, 1), (0, 1, 1, 1), (2, 1, 1, 1)]
    ticks = [label.get_text() for label in ax.get_xticklabels()]
    assert ticks == ["T4\nsm_75", "H200", "64"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["256", "1024"]
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 3), (2, 0))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("GPU", "columns")
    assert ax.get_title("left") == "programs"
    light = {
        sum(box.get_facecolor()[:3]): int(text)
        for box, text in zip(ax.patches, texts(ax), strict=True)
    }
    assert [light[it] for it in sorted(light)] == [16, 8, 2, 1]
    assert [text.get_color() == "white" for text in ax.texts] == [
        False,
        True,
        False,
        False,
    ]
    assert show.grid([[0, 3]], ["a"], [1, 2], "", "x").get_ylabel() == ""


def test_panels_are_widths_one_below_the_other(figures):
    rows = [
        ("copy", 256, 1000.0),
        ("copy", 1024, 3000.0),
        ("warps", 256, 900.0),
        ("warps", 1024, 2900.0),
    ]
    frame = pd.DataFrame(rows, columns=("impl", "n", "gb_per_s"))
    figure = show.panels({"float32": frame, "bfloat16": frame[:2]})
    assert [ax.get_title("left") for ax in figure.axes] == ["float32", "bfloat16"]
    assert [len(ax.lines) for ax in figure.axes] == [2, 1]
    assert sorted(texts(figure.axes[0])) == [" copy", " warps"]
    assert list(figure.axes[0].lines[1].get_ydata()) == [900, 2900]
