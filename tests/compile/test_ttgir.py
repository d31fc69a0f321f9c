"""What is read of kernels as the compiler writes them: the layout of a load, and the steps."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import kernels
from blocked_kernels import layer_norm_backward

from memtraffic.compile import resources
from memtraffic.kernels.softmax import persistent
from memtraffic.residency import BlockedLayout

COPIES = "copy for wait 0 reduce exp reduce store copy end wait 0"
PASSES = "for load reduce end for load exp reduce end for load exp store end"
NESTED = "for for load store end end store"


@pytest.mark.parametrize(
    ("fn", "shape", "options", "layout", "steps"),
    [
        (persistent.softmax, (4, 4096), {"num_stages": 2}, ((1, 4), (1, 32), (1, 4)), COPIES),
        (kernels.three_passes, (8192, 8), {}, ((1,), (32,), (4,)), PASSES),
        (layer_norm_backward(4, 2), (64, 8), {}, ((1,), (32,), (4,)), NESTED),
        (kernels.both_loads, (4, 8), {}, None, ""),  # of single numbers
    ],
)
def test_first_load_layout_and_schedule(fn, shape, options, layout, steps):
    [kernel] = resources(fn, "M,N", shape, target="sm_90", **options)
    assert kernel.layout == (layout and BlockedLayout(*layout))
    assert " ".join(kernel.schedule) == steps
