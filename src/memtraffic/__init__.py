"""Meters for the memory traffic of GPU kernels, and the softmax kernels that the book explains.

    import memtraffic
    from memtraffic.ladder import fused

    memtraffic.formula(fused.softmax)                     # reads MN, writes MN
    memtraffic.resources(fused.softmax, "sm_90", x)       # registers, shared memory, spills
    memtraffic.occupancy(fused.softmax, "gfx942", x)      # programs that fit a compute unit

A meter is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memtraffic import runtime as runtime  # first: it decides, before Triton is imported

if TYPE_CHECKING:
    from memtraffic.benchmark import bench
    from memtraffic.compile import resources
    from memtraffic.residency import occupancy
    from memtraffic.traffic.count import count
    from memtraffic.traffic.counters import counters
    from memtraffic.traffic.formula import formula

__version__ = "0.1.0"
__all__ = ["bench", "count", "counters", "formula", "occupancy", "resources"]

_MODULES = {
    "bench": "memtraffic.benchmark",
    "count": "memtraffic.traffic.count",
    "counters": "memtraffic.traffic.counters",
    "formula": "memtraffic.traffic.formula",
    "occupancy": "memtraffic.residency",
    "resources": "memtraffic.compile",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
