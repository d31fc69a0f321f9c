"""How the tests read a figure: its texts, its boxes, and whether a phone shows them legibly."""

import itertools
from unittest import mock

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.text import Text

PHONE = 343  # pixels that a figure is wide on a phone
SMALLEST = 11  # pixels, of text there


def texts(ax):
    return [text.get_text() for text in ax.texts]


def boxes(ax, gid=None):
    """The boxes of a drawing, as (x, y, width, height); all of them, or those of one meaning."""
    them = [box for box in ax.patches if isinstance(box, plt.Rectangle)]
    them = [box for box in them if gid in (None, box.get_gid())]
    return [(*box.get_xy(), box.get_width(), box.get_height()) for box in them]


def written(figure):
    """All texts that are drawn, with the places they take, in pixels."""
    drawn = []
    with mock.patch.object(Text, "draw", lambda text, renderer: drawn.append(text)):
        figure.canvas.draw()
    drawn = [it for it in drawn if it.get_visible() and it.get_text().strip()]
    return [(it, it.get_window_extent()) for it in drawn]


def assert_legible(figure):
    """Every text is inside the figure, large enough on a phone, and on no other text."""
    found = written(figure)
    pad = 2 * matplotlib.rcParams["savefig.pad_inches"]  # a notebook crops, and adds this
    wide = max(figure.get_tightbbox().width + pad, figure.get_figwidth())
    whole = figure.bbox.padded(0.01 * figure.dpi)
    for text, place in found:
        inside = all(whole.contains(*corner) for corner in place.corners())
        assert inside, f"{text.get_text()!r} leaves the figure"
        pixels = text.get_fontsize() / 72 * PHONE / wide
        assert pixels >= SMALLEST, f"{text.get_text()!r} is {pixels:.1f} pixels high on a phone"
        assert "$" not in text.get_text(), f"{text.get_text()!r}: powers are too small"
    for (one, a), (other, b) in itertools.combinations(found, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        apart = across <= 1 or down <= 0.2 * min(a.height, b.height)  # a line has empty edges
        assert apart, f"{one.get_text()!r} lies on {other.get_text()!r}"
