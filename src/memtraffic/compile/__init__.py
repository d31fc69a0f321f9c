"""Compiles kernels for GPUs that are absent, and reads from the machine code what they use.

This needs neither a GPU nor a driver: Triton contains the compilers (LLVM for AMD, `ptxas` and
`cuobjdump` for NVIDIA). A process whose kernels are interpreted cannot compile them, so a worker
process does it there.
"""

from memtraffic.compile.compiler import assembly, compile_launches, occupancy, resources
from memtraffic.compile.launches import capture_launches

__all__ = ["assembly", "capture_launches", "compile_launches", "occupancy", "resources"]
