import itertools

import pandas as pd
import pytest
from drawings import boxes, texts, title

from memtraffic_book import figures
from memtraffic_book.figures.maps import shade

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests

SWEPT = pd.DataFrame(
    [(1, 64, 20.0, 10.0), (2, 64, 8.0, 10.0), (2, 4096, 40.0, 30.0)],
    columns=("rows", "n", "us", "copy_us"),
)


def test_relative_speed_is_over_that_of_the_copy():
    speed = figures.relative_speed(SWEPT, "rows")
    assert (speed.index.tolist(), speed.columns.tolist()) == ([1, 2], [64, 4096])
    assert speed.loc[1, 64] == 0.5 and pd.isna(speed.loc[1, 4096])
    assert speed.loc[2].tolist() == [1.25, 0.75]


def test_shade_is_darker_where_values_are_higher():
    fills = [shade(value)[0] for value in (0.2, 0.3, 0.6, 0.9, 1.1, 1.2)]
    light = [sum(int(fill[i : i + 2], 16) for i in (1, 3, 5)) for fill in fills]
    assert light == sorted(light, reverse=True) and fills[0] == fills[1] and fills[4] == fills[5]
    assert [shade(value)[1] == "white" for value in (0.3, 1.1)] == [False, True]


VALUES = pd.DataFrame({1: [0.98, 0.5, None], 2: [0.9, 1.0, 0.65]}, index=[256, 1024, 32768])
WORDS = {
    "title": "Wider rows want more warps.",
    "rows": "columns",
    "columns": "warps",
    "frame": "the rule's choice",
}


def test_heatmap_frames_the_chosen_cells():
    chosen = {256: 1, 1024: 2, 32768: 2}
    ax = figures.heatmap(VALUES, lambda n, warps: chosen[n] == warps, **WORDS)
    assert len(boxes(ax, "cell")) == 5 and len(boxes(ax, "frame")) == 3
    numbers = [
        text.get_text() for text in ax.texts if text.get_text() in ("98", "90", "50", "100", "65")
    ]
    assert numbers == ["98", "90", "50", "100", "65"]
    bold = [text.get_text() for text in ax.texts if text.get_weight() == "bold"]
    assert bold == ["98", "100", "65"], "differs by more than the colour of its frame"
    assert {"columns ↓", "warps →", "the rule's choice"} <= {*texts(ax)}
    assert "number: speed in percent of a copy" in texts(ax)
    assert title(ax) == WORDS["title"]


def test_heatmap_frames_are_closed_and_apart():
    ax = figures.heatmap(VALUES.fillna(1), lambda n, warps: True, **WORDS)
    frames, cells = boxes(ax, "frame"), boxes(ax, "cell")
    for (x, y, wide, high), (cx, cy, cwide, chigh) in zip(frames, cells, strict=True):
        assert cx + 0.02 < x and x + wide < cx + cwide - 0.02
        assert cy + 0.02 < y and y + high < cy + chigh - 0.02
    assert all(box.get_linewidth() <= 2 for box in ax.patches if box.get_gid() == "frame")


def test_heatmap_of_many_columns_turns_their_names():
    wide = pd.DataFrame([[1.0] * 9] * 2, index=[1, 2], columns=[2**k for k in range(8, 17)])
    words = WORDS | {"rows": "rows per program", "columns": "columns of the matrix, float32"}
    ax = figures.heatmap(wide, lambda row, n: False, **words)
    turned = [text.get_text() for text in ax.texts if text.get_rotation() == 90]
    assert turned == [str(2**k) for k in range(8, 17)]
    assert not boxes(ax, "frame")


def won(**changes):
    cases = itertools.product(("float32", "bfloat16"), ("packed", "odd", "transposed"), (256, 4096))
    frame = pd.DataFrame(cases, columns=["dtype", "layout", "n"])
    frame["winner"] = ["tiled"] * 6 + ["torch.softmax"] * 4 + ["compile(naive)"] * 2
    frame["percent"] = [12.0, 1.0] * 6
    return frame.assign(**changes)


def test_winners_says_who_and_by_how_much():
    ax = figures.winners(won(), level=2)
    assert texts(ax).count("T\n+12 %") == 3 and texts(ax).count("TS\n+12 %") == 2
    assert texts(ax).count("C\n+12 %") == 1 and texts(ax).count("=") == 6
    assert len(boxes(ax, "tiled")) == 3 and len(boxes(ax, "level")) == 6
    assert {"T: tiled", "TS: torch.softmax", "C: compile(naive)", "=: level, within 2 %"} <= {
        *texts(ax)
    }
    assert texts(ax).count("packed") == 2 and {"float32", "bfloat16", "256", "4096"} <= {*texts(ax)}
    assert title(ax) == "tiled is the fastest in 3 of 12 cases."


def test_winners_differ_by_hatch_and_letter():
    ax = figures.winners(won(), letters={"tiled": "A", "torch.softmax": "B", "compile(naive)": "C"})
    looks = {box.get_gid(): box.get_hatch() or "" for box in ax.patches if box.get_gid()}
    assert len(set(looks.values())) == len(looks) == 3
    assert texts(ax).count("A\n+12 %") == 3 and texts(ax).count("A\n+1 %") == 3


def test_winners_lie_at_their_width_type_and_layout():
    frame = won(percent=range(1, 13))
    ax = figures.winners(frame)
    places = {
        text.get_text().split("+")[1]: text.get_position()
        for text in ax.texts
        if "+" in text.get_text()
    }
    for (_, one), (_, other) in itertools.combinations(frame.iterrows(), 2):
        a, b = (places[f"{it['percent']} %"] for it in (one, other))
        assert (a[1] == b[1]) == (one["n"] == other["n"])
        same = (one["dtype"], one["layout"]) == (other["dtype"], other["layout"])
        assert (a[0] == b[0]) == same


def test_winners_that_are_all_level():
    ax = figures.winners(won(), level=50, title="All are level.")
    assert texts(ax).count("=") == 12


@pytest.mark.parametrize("names", [["tiled", "torch", "t1"], ["a", "a b", "a c"]])
def test_winners_letters_are_apart(names):
    frame = won(winner=names * 4, percent=5.0)
    ax = figures.winners(frame)
    cells = {text.split("\n")[0] for text in texts(ax) if text.endswith("+5 %")}
    assert len(cells) == 3
