"""Times functions on a GPU, interleaved with one another, and turns the times into bandwidth.

Bandwidth is always the *least* traffic of the operation over the time: a softmax must read and
write each element once, 2MN elements, so a function that moves more than that shows a lower
bandwidth, not a higher one.
"""

from memtraffic.benchmark.baselines import find_implementation
from memtraffic.benchmark.copying import fastest_copy
from memtraffic.benchmark.loop import bench
from memtraffic.benchmark.timing import summary, time_interleaved

__all__ = [
    "bench",
    "fastest_copy",
    "find_implementation",
    "summary",
    "time_interleaved",
]
