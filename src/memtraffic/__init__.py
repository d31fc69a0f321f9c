"""Meters for the memory traffic of GPU kernels, and the softmax kernels that the book explains.

    import memtraffic
    from memtraffic.kernels.softmax import fused

    memtraffic.formula(fused.softmax)                     # reads MN, writes MN
    memtraffic.resources(fused.softmax, "sm_90", x)       # registers, shared memory, spills
    memtraffic.occupancy(fused.softmax, "gfx942", x)      # programs that fit a compute unit

A meter is imported when it is first used.
"""

import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any


def _end(*_: object) -> None:
    """Ends a command that is interrupted, without a traceback of what it is importing."""
    os._exit(130)


# Python names itself `-m` until it runs `__main__`, which imports PyTorch when it has to.
_named = "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1] == __name__
if _named and sys.argv[0] == "-m":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
else:
    from memtraffic import runtime as runtime  # first: it decides, before Triton is imported

if TYPE_CHECKING:
    from memtraffic.benchmark import bench
    from memtraffic.compile import resources
    from memtraffic.kernels.softmax.op import softmax
    from memtraffic.meters.count import count
    from memtraffic.meters.counters import counters
    from memtraffic.meters.formula import formula
    from memtraffic.reporting import report
    from memtraffic.residency import occupancy

__version__ = "0.1.0"
__all__ = ["bench", "count", "counters", "formula", "occupancy", "report", "resources", "softmax"]

_MODULES = {
    "bench": "memtraffic.benchmark",
    "count": "memtraffic.meters.count",
    "counters": "memtraffic.meters.counters",
    "formula": "memtraffic.meters.formula",
    "occupancy": "memtraffic.residency",
    "report": "memtraffic.reporting",
    "resources": "memtraffic.compile",
    "softmax": "memtraffic.kernels.softmax.op",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
