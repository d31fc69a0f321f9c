"""Meters for the memory traffic of GPU kernels, and the softmax kernels that the book explains.

    import memtraffic
    from memtraffic.kernels.softmax import fused

    memtraffic.formula(fused.softmax)                         # reads MN, writes MN
    memtraffic.resources(fused.softmax, x, target="sm_90")    # registers, shared memory, spills
    memtraffic.occupancy(fused.softmax, x, target="gfx942")   # programs that fit a compute unit

A meter is imported when it is first used, and PyTorch with it.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtraffic import errors as errors
    from memtraffic import testing as testing
    from memtraffic.benchmark import bench as bench
    from memtraffic.compile import occupancy as occupancy
    from memtraffic.compile import resources as resources
    from memtraffic.gpus import find_gpu as find_gpu
    from memtraffic.kernels.softmax.op import softmax as softmax
    from memtraffic.meters.count import count as count
    from memtraffic.meters.counters import counters as counters
    from memtraffic.meters.formula import formula as formula
    from memtraffic.meters.sectors import sectors as sectors
    from memtraffic.op import Op as Op

__version__ = "0.1.0"
_MODULES = {
    "Op": "memtraffic.op",
    "bench": "memtraffic.benchmark",
    "count": "memtraffic.meters.count",
    "counters": "memtraffic.meters.counters",
    "find_gpu": "memtraffic.gpus",
    "formula": "memtraffic.meters.formula",
    "occupancy": "memtraffic.compile",
    "resources": "memtraffic.compile",
    "sectors": "memtraffic.meters.sectors",
    "softmax": "memtraffic.kernels.softmax.op",
}
__all__ = ["errors", "testing", *_MODULES]


class _WithTriton(MetaPathFinder):
    """Has `device` decide what runs kernels before Triton is imported; mends it when it is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "triton":
            return None
        import_module("memtraffic.device")
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def mended(module: ModuleType) -> None:
                execute(module)
                import_module("memtraffic.triton_adapter")

            spec.loader.exec_module = mended  # type: ignore[method-assign]
        return spec


if "triton" in sys.modules:
    import_module("memtraffic.triton_adapter")
sys.meta_path.insert(0, _WithTriton())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _MODULES:
        return import_module(f"memtraffic.{name}")  # which binds it here
    globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
