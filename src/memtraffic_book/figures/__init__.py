"""The figures of the book: charts, maps, and drawings of the machine and of what it does.

Each is a function that takes its data as arguments and says one sentence as its title: the one that
is passed as `title`, or one that it makes from the data. Each draws in the book's own style and
leaves Matplotlib's settings as they are; `style` does the same for what a page draws itself. Sizes
are in inches.
"""

from memtraffic_book.figures.charts import (
    axes,
    flights,
    log2_axis,
    mark_level,
    mark_position,
    plot_bars,
    plot_lines,
    plot_staircase,
    roofline,
    times,
)
from memtraffic_book.figures.drawing import BLUE, GREEN, GRID, INK, MUTED, ORANGE, RED, style
from memtraffic_book.figures.hardware import five_trips, machine
from memtraffic_book.figures.maps import (
    fastest,
    heatmap,
    relative_speed,
    winners,
)
from memtraffic_book.figures.matrices import mask, plot_access_map, sectors
from memtraffic_book.figures.rivals import rivals
from memtraffic_book.figures.sums import running_sum
from memtraffic_book.figures.threads import (
    ReductionSteps,
    lanes,
    plot_thread_layout,
    reduction,
    reduction_steps,
    register_file,
    registers_of_row,
    sm_packing,
    wave_reduction,
)
from memtraffic_book.figures.timelines import (
    Span,
    plan,
    plan_shared,
    rounds,
    take_turns,
    timeline,
)

__all__ = [
    "BLUE",
    "GREEN",
    "GRID",
    "INK",
    "MUTED",
    "ORANGE",
    "RED",
    "ReductionSteps",
    "Span",
    "axes",
    "fastest",
    "five_trips",
    "flights",
    "heatmap",
    "lanes",
    "log2_axis",
    "machine",
    "mark_level",
    "mark_position",
    "mask",
    "plan",
    "plan_shared",
    "plot_access_map",
    "plot_bars",
    "plot_lines",
    "plot_staircase",
    "plot_thread_layout",
    "reduction",
    "reduction_steps",
    "register_file",
    "registers_of_row",
    "relative_speed",
    "rivals",
    "roofline",
    "rounds",
    "running_sum",
    "sectors",
    "sm_packing",
    "style",
    "take_turns",
    "timeline",
    "times",
    "wave_reduction",
    "winners",
]
