"""Meters for GPU memory traffic, and the kernels of the book they prove.

    from memtraffic.traffic.count import count
    from memtraffic.traffic.formula import formula
    from memtraffic.ladder import fused, naive

Count what a function moves, solve for the formula, read it from hardware counters, compile for a GPU that is not there.
"""

from memtraffic import (
    machine as machine,
)  # first of all: it decides, before Triton is imported, who runs the kernels

__version__ = "0.1.0"
