"""The figures of the book: charts, maps, and drawings of the machine and of what it does.

Each is a function that takes its data as arguments and says one sentence as its title: the one that
is passed as `title`, or one that it makes from the data. The first one sets the book's own style.
Sizes are in inches. Drawings of what is neither counted
nor measured are SVG files in `book/_static`.
"""

from memtraffic_book.figures.boards import (
    full_and_empty,
    machine,
    plot_thread_layout,
    sm_packing,
    strip,
)
from memtraffic_book.figures.charts import (
    mark_position,
    plot_bars,
    plot_lines,
    width_map,
)
from memtraffic_book.figures.drawing import ORANGE

__all__ = [
    "ORANGE",
    "full_and_empty",
    "machine",
    "mark_position",
    "plot_bars",
    "plot_lines",
    "plot_thread_layout",
    "sm_packing",
    "strip",
    "width_map",
]
