"""What the folded cells of `book/occupancy.ipynb` do, on data where a claim is false, too."""

import pytest

from memtraffic_book.chapters import occupancy


def test_draw_packing_refuses_other_limits():
    occupancy.draw_packing(69, 32_784, 4, (7, 6, 16, 32))
    with pytest.raises(AssertionError, match="allow 6 programs"):
        occupancy.draw_packing(69, 32_784, 4, (6, 6, 16, 32))
