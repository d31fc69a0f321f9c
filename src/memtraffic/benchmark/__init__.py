"""Times functions on a GPU, interleaved with one another, and turns the times into bandwidth.

Bandwidth is always the *least* traffic of the operation over the time: a softmax must read and
write each element once, 2MN elements, so a function that moves more than that shows a lower
bandwidth, not a higher one.
"""

from memtraffic.benchmark.baselines import BASELINES, find_implementation
from memtraffic.benchmark.comparing import compare
from memtraffic.benchmark.copying import copies, fastest_copy
from memtraffic.benchmark.overhead import autotune_cost, caller_times, launch_overhead
from memtraffic.benchmark.sweeps import bench, bench_beside_copy, bench_layouts, bench_option
from memtraffic.benchmark.timing import summary, time_interleaved

__all__ = [
    "BASELINES",
    "autotune_cost",
    "bench",
    "bench_beside_copy",
    "bench_layouts",
    "bench_option",
    "caller_times",
    "compare",
    "copies",
    "fastest_copy",
    "find_implementation",
    "launch_overhead",
    "summary",
    "time_interleaved",
]
