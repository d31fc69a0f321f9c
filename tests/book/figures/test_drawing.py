import subprocess
import sys

import matplotlib.pyplot as plt
import pytest
from drawings import assert_legible, texts, title

from memtraffic_book import figures
from memtraffic_book.figures import drawing

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests


@pytest.mark.slow
def test_import_leaves_the_settings_as_they_are():
    program = (
        "import matplotlib.pyplot as plt; before = dict(plt.rcParams);"
        "from memtraffic_book import figures; assert dict(plt.rcParams) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_all_is_what_pages_use():
    assert all(hasattr(figures, name) for name in figures.__all__)
    assert sorted(figures.__all__, key=str.lower) == sorted(set(figures.__all__), key=str.lower)


def test_style_is_for_what_a_page_draws_itself():
    ax = figures.axes()
    with figures.style():
        inside = ax.annotate("inside", (0.5, 0.5))
    assert inside.get_color().lstrip("#") == figures.INK.lstrip("#")


def test_style_keeps_what_a_backend_sets(monkeypatch):
    """In a notebook, the first figure loads a backend that makes pyplot interactive."""
    monkeypatch.setitem(plt.rcParams, "interactive", False)
    with figures.style():
        plt.rcParams["interactive"] = True
    assert plt.rcParams["interactive"]


def test_text_width_is_that_of_the_drawn_text():
    ax = drawing.board()
    with figures.style():
        drawn = drawing.write(ax, 1, 0.5, "16 registers")
    drawing.finish(ax, 1, "")
    ax.figure.canvas.draw()
    found = drawn.get_window_extent().width / ax.figure.dpi
    assert drawing.text_width("16 registers") == pytest.approx(found, rel=0.05)


def test_wrap_keeps_words_and_evens_lines():
    text = "An SM holds seven programs, and then its registers are full."
    lines = drawing.wrap(text, 2).split("\n")
    assert " ".join(lines) == text
    widths = [drawing.text_width(line) for line in lines]
    assert max(widths) <= 2 and min(widths) > 0.5 * max(widths)
    assert drawing.wrap("incomprehensibilities", 0.5) == "incomprehensibilities"


def test_wrap_does_not_part_a_number_from_its_unit():
    lines = drawing.wrap("It needs 24 KiB to run and 3 MB to end", 0.75).split("\n")
    assert len(lines) > 3
    assert all(any(it in line for line in lines) for it in ("24 KiB", "3 MB"))


def test_finish_cuts_the_board_and_writes_its_title():
    ax = drawing.board()
    sentence = "A sentence that is too long for one line of the figure says what it shows."
    assert drawing.finish(ax, 2, sentence) is ax
    assert tuple(ax.get_ylim()) == (2, 0) and tuple(ax.get_xlim()) == (0, drawing.WIDTH)
    assert ax.get_position().height * ax.figure.get_figheight() == pytest.approx(2)
    assert title(ax) == sentence and "\n" in ax.figure.get_suptitle()


def test_key_breaks_at_the_edge():
    ax = drawing.board()
    samples = [drawing.Sample(f"the meaning of {i}", {"fc": "white"}) for i in range(3)]
    end = drawing.key(ax, 0.2, samples)
    drawing.finish(ax, end, "")
    heights = [text.get_position()[1] for text in ax.texts]
    assert texts(ax) == [sample.text for sample in samples]
    assert heights == sorted(heights) and len(set(heights)) == 2 and end > max(heights)


@pytest.mark.parametrize(
    ("what", "draw"),
    [
        ("pixels high", lambda ax: drawing.write(ax, 1, 0.5, "small", size=8)),
        ("leaves the figure", lambda ax: drawing.write(ax, 3.9, 0.5, "beyond the edge")),
        ("lies on", lambda ax: [drawing.write(ax, 1 + x, 0.5, "on it") for x in (0, 0.1)]),
        ("powers", lambda ax: drawing.write(ax, 1, 0.5, "$10^9$")),
    ],
    ids=["small", "outside", "overlap", "power"],
)
def test_assert_legible_refuses(what, draw):
    ax = drawing.board()
    draw(ax)
    drawing.finish(ax, 1, "")
    with pytest.raises(AssertionError, match=what):
        assert_legible(ax.figure)
    plt.close(ax.figure)
