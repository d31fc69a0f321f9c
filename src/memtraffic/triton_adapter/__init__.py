"""Every private part of Triton that this package touches, for Triton 3.6 to 3.9.

Triton has no public way to watch its interpreter, to see which kernels a function launches, to
compile a kernel for a GPU that is absent, or to start a compiled kernel. All of that is in this
package and nowhere else, so that a new version of Triton needs changes in one place. The functions
import Triton when they are called, not before.

While launches are captured or interpreted, methods of Triton's classes are replaced for the whole
process: a lock makes further threads that want the same wait for their turn.
"""

from contextlib import suppress

from memtraffic import device
from memtraffic.triton_adapter.mend import mend_interpreter

if device.HAS_TRITON and device.INTERPRETED:
    with suppress(AttributeError, ImportError):  # of a Triton that lacks something: a meter says so
        mend_interpreter()
