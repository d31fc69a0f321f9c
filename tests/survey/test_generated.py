"""What torch.compile generates for a GPU, counted without one."""

import pytest
import torch
from another_process import run_python
from generated import generated

from memtraffic import device
from memtraffic.errors import CountError

COMPILED = """
import torch
from memtraffic.stand_in import stand_in
from memtraffic.meters.count import count
from generated import generated

with stand_in():
    x = torch.randn(8, 2048)
    print(count(generated(lambda x: torch.softmax(x, dim=1), x), x))
    x, results = torch.randn(8, 8), []
    fn = generated(lambda x, y: (torch.relu(x @ y), x.sum()), x, x)
    print(count(lambda: results.append(fn(x, x)), ()))
[(product, total)] = results
assert torch.allclose(product, torch.relu(x @ x), atol=1e-5)
assert torch.allclose(total, x.sum(), atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.skipif(device.HAS_GPU, reason="a GPU answers itself")
def test_generated_softmax_reads_wide_rows_twice():
    """By default, inductor keeps a row of at most 1024 elements."""
    done = run_python("-W", "ignore", "-c", COMPILED, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    product = 2 * 64 + 64 + 64  # reads of the product, of the relu in place, and of the sum
    assert done.stdout.splitlines() == [
        f"reads {2 * 8 * 2048} elements, writes {8 * 2048} elements, in 1 operation",
        f"reads {product} elements, writes {64 + 64 + 1} elements, in 3 operations",
    ]


@pytest.mark.skipif(device.HAS_GPU, reason="there is a GPU to compile for")
def test_generated_needs_a_gpu_to_compile_for():
    with pytest.raises(CountError, match="stand_in"):
        generated(torch.exp, torch.zeros(3))
