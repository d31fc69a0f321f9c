"""The figures: one judge for all of them, and what each says of its data."""

import functools
import itertools
import re
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from cases import H200

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import notebooks
import pandas as pd
from drawings import PHONE, SMALLEST, assert_legible, boxes, texts
from notebooks import BOOK

from memtraffic.gpus import find_gpu
from memtraffic.residency import BlockedLayout
from memtraffic_book import figures
from memtraffic_book.figures import boards, drawing

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests

SAYING = "A sentence that says what the figure shows, and that is longer than one line."
LINES = {name: pd.Series([i, i + 1.0, end], [32, 64, 128]) for i, (name, end) in enumerate(
    [("torch.softmax", 3.0), ("compile(naive)", 3.01), ("a", 1), ("b", 2), ("c", 2), ("copy", 2)]
)}  # fmt: skip
SPEEDS = pd.DataFrame(
    {
        "naive": [9, 9, 9, 19],
        "fused": [5, float("nan"), 7, 99],
        "ours": [99, 60, 98, 100],
    },
    [16, 33, 128, 1024],
)
LIT = {"dram_to_l2": "268 MB", "l2_to_l1": "805 MB", "l2_to_dram": "269 MB"}
SLOTS = "slots", "loads", "load_bytes", "flight_bytes", "share"
SMS = (64, 1, 4, 2**13, 0.57), (3, 16, 16, 3 * 2**13, 1.02)
LIMITS = {"registers": 7, "shared": 16, "warps": 16, "blocks": 32}


def marked(ax, *marks):
    for mark in marks:
        figures.mark_position(ax, *mark)
    return ax


DRAWN = {
    "bars": lambda: figures.plot_bars(
        ["copy", "naive"], [4000, 800], ["4000 GB/s", "800 GB/s"], "GB/s", SAYING, [True, False]
    ),
    "strip": lambda: figures.strip(
        ["DRAM", "L2", "L1", "warps"], ["16.4 kB", "2.1 MB", "268.4 MB"], title=SAYING
    ),
    "full-and-empty": lambda: figures.full_and_empty(
        [dict(zip(SLOTS, values, strict=True)) for values in SMS], title=SAYING
    ),
    "layout": lambda: figures.plot_thread_layout(
        BlockedLayout((1, 4), (2, 16), (2, 1)), (4, 64), title=SAYING
    ),
    "layout-of-two": lambda: figures.plot_thread_layout(
        BlockedLayout((1, 2), (2, 3), (2, 1)), (4, 12), title=SAYING
    ),
    "lines-log": lambda: figures.plot_lines(
        LINES,
        "rows",
        "GB/s",
        title=SAYING,
        ticks=[32, 64, 128],
        low={"a": LINES["a"] - 1},
        high=LINES,
    ),
    "machine": lambda: figures.machine(H200, LIT, "63 MB", SAYING),
    "machine-B200": lambda: figures.machine(find_gpu("B200"), {}, "126 MB", SAYING),
    "marks": lambda: marked(
        figures.plot_lines({"a": LINES["a"]}, "rows", "GB/s", title=SAYING),
        *((60, "half of L2", "left"), (80, "all of it", "right")),
    ),
    "packing": lambda: figures.sm_packing(LIMITS, title=SAYING),
    "width-map": lambda: figures.width_map(SPEEDS, ("naive", "ours"), title=SAYING),
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@functools.cache
def drawn(name):
    """The axes of a figure that is drawn once for all tests."""
    return DRAWN[name]()


@pytest.mark.parametrize("name", DRAWN)
def test_figure_is_legible_on_a_phone(name):
    """It says its sentence, is as wide as all, and tells lines apart by more than colour."""
    ax = drawn(name)
    assert ax.figure.get_suptitle().replace("\n", " ") == SAYING
    assert ax.figure.get_figwidth() == drawing.WIDTH
    assert_legible(ax.figure)
    named = [line for line in ax.lines if len(line.get_xdata()) > 2]
    looks = {(line.get_marker(), str(line._dash_pattern)) for line in named}
    assert len(looks) >= len({line.get_color() for line in named})


# ---- what each says of its data


def test_wrap_does_not_part_a_number_from_its_unit():
    lines = drawing.wrap("It needs 24 KiB to run and 3 MB to end", 0.75).split("\n")
    assert len(lines) > 3
    assert all(any(it in line for line in lines) for it in ("24 KiB", "3 MB"))


def test_plot_lines_names_each_at_its_end():
    ax = drawn("lines-log")
    assert texts(ax) == ["torch.\nsoftmax", "compile\n(naive)", "a", "b", "c", "copy"]
    assert [text.xy for text in ax.texts] == [(128, line.iloc[-1]) for line in LINES.values()]
    values = [list(line.get_ydata()) for line in ax.lines if line.get_gid() is None][:2]
    assert values == [list(line) for line in itertools.islice(LINES.values(), 2)]
    [bars] = ax.collections
    assert [tuple(it[:, 1]) for it in bars.get_segments()] == [(1, 2), (2, 3), (0, 1)]
    ticks = [label.get_text() for label in ax.get_xticklabels()]
    assert ticks == ["32", "64", "128"] and ax.get_ylim()[0] == 0


def test_plot_bars_draws_each_with_its_text():
    ax = drawn("bars")
    assert [bar.get_width() for bar in ax.patches] == [4000, 800]
    assert texts(ax) == ["4000 GB/s", "800 GB/s"]
    assert len({bar.get_facecolor() for bar in ax.patches}) == 2


def test_full_and_empty_draws_each_slot_and_each_load():
    ax = drawn("full-and-empty")
    assert len(boxes(ax, "filled")) == 64 + 3 and len(boxes(ax, "empty")) == 61
    assert len(boxes(ax, "load")) == 64 * 1 + 3 * 16
    assert {"57 %", "102 %", "8.2 kB in flight", "24.6 kB in flight"} <= {*texts(ax)}


def test_width_map_draws_odd_widths_apart():
    def lines(ax):
        return {
            line.get_gid(): [tuple(map(float, it)) for it in line.get_xydata()] for line in ax.lines
        }

    found = lines(drawn("width-map"))
    assert found == {
        "naive": [(16, 9), (128, 9), (1024, 19)], "naive, odd": [(33, 9)],
        "ours": [(16, 99), (128, 98), (1024, 100)], "ours, odd": [(33, 60)],
    }  # fmt: skip


def test_machine_draws_what_the_table_says():
    ax = drawn("machine")
    assert len(boxes(ax, "processor")) == H200.num_sms and len(boxes(ax, "lane")) == 4 * 32
    said = {"132 SMs", "with 256 KiB of registers", "L2 cache, 63 MB", *LIT.values()}
    assert said | {"shared memory\nup to 228 KiB"} <= {*texts(ax)}
    assert texts(ax).count("registers\n64 KiB") == 4
    arrows = [it.arrow_patch for it in ax.texts if getattr(it, "arrow_patch", None)]
    strong = [it for it in arrows if it.get_linewidth() > 2]
    assert (len(arrows), len(strong)) == (len(boards.SEGMENTS), len(LIT))


def test_strip_says_what_passes_between_neighbours():
    ax = drawn("strip")
    said = [text for text in texts(ax) if text]  # an arrow is a text of nothing
    assert said == ["DRAM", "L2", "L1", "warps", "16.4 kB", "2.1 MB", "268.4 MB"]
    assert len(boxes(ax, "stop")) == 4


def test_plot_thread_layout_numbers_lanes_within_their_warp():
    ax = drawn("layout-of-two")
    first, second = ["0", "1", "2"] * 2, ["3", "4", "5"] * 2
    assert [text for text in texts(ax) if text.isdigit()] == [*(first + second) * 2, "3", "6", "9"]
    assert "warp 1" in texts(ax) and len(boxes(ax)) == 24


def test_sm_packing_fills_until_the_first_is_full():
    ax = drawn("packing")
    assert len(boxes(ax, "taken")) == 4 * 7 and len(boxes(ax, "free")) == 9 + 9 + 25
    assert {"room for only 7", "room for 16", "shared memory", "warp slots"} <= {*texts(ax)}


# ---- drawings in files

DRAWINGS = sorted(it for it in (BOOK / "_static").glob("*.svg") if it.stem != "favicon")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", [it for it in DRAWINGS if it.stem != "poster"], ids=str)
def test_drawing_is_legible_on_a_phone(path):
    """It has a white ground, which a dark page inverts, and texts that are large and inside."""
    root = ET.parse(path).getroot()
    _, _, wide, high = map(float, root.get("viewBox").split())
    first = root.find(f"{SVG}path")
    assert first.get("fill") == "#ffffff" and f"H{wide:g}" in first.get("d")
    for text in root.iter(f"{SVG}text"):
        size = float(text.get("font-size", root.get("font-size")))
        assert size * PHONE / wide >= SMALLEST, text.text
        length = 72 * drawing.text_width(text.text, size, text.get("font-weight", "normal"))
        left = float(text.get("x"))
        left -= length * {None: 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        assert -1 <= left and left + length <= wide + 1, text.text
        assert 0 < float(text.get("y")) <= high, text.text


def test_drawings_stand_on_a_page_with_their_words():
    """Each is on a page, with an alternative text of a sentence or more."""
    pages = "".join(notebooks.markdown(notebooks.load(it)) for it in sorted(BOOK.glob("*.ipynb")))
    pages += "".join(it.read_text("utf-8") for it in sorted(BOOK.glob("*.md")))
    shown = re.findall(r"^!\[([^\]]+\.)\]\(_static/([\w-]+\.svg)\)$", pages, re.M)
    assert sorted({name for _, name in shown}) == [path.name for path in DRAWINGS]
    assert all(len(words.split()) > 8 for words, _ in shown)
