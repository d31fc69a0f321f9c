"""Runs each kernel once, for test_sanitizer.py; with the argument `past-the-end`, a wrong one."""

import memtraffic.device  # noqa: F401  first

import sys  # isort: skip

import torch
import triton
import triton.language as tl

from memtraffic import softmax
from memtraffic.kernels.softmax import chunks, fused, masked, online, persistent, split, tiled
from memtraffic.kernels.softmax.op import backward
from memtraffic.op import find_op

# A case for each kernel, and for each way through it: whole rows, odd rows, several odd rows in one
# program, columns, split, passes.
SHAPES = {
    (9, 96): ["float32", "bfloat16"],
    (21, 77): ["bfloat16"],
    (11, 197): ["bfloat16"],
    (5, 451): ["bfloat16"],
    (5, 781): ["float32", "bfloat16"],
    (5, 2176): ["float32", "bfloat16"],
    (5, 4097): ["float32", "bfloat16"],
    (3, 70000): ["float32", "bfloat16"],
    (3, 40001): ["float32", "float64"],
}
RUNGS = [rung.softmax for rung in (fused, masked, tiled, chunks, persistent, split)]


@triton.jit
def _past_the_end_kernel(ptr, n):
    tl.store(ptr + n + tl.program_id(0), 1.0)


def numbers(shape, name):
    dtype = getattr(torch, name)
    return torch.randn(shape, device="cuda").to(dtype)


def run():
    for shape, names in SHAPES.items():
        for name in names:
            y, dy = find_op("softmax_backward").arguments(shape, name).tensors
            softmax(dy)
            backward(dy, y, 1, y.dtype)
    x = numbers((1000, 70), "float32").t()  # whose rows are adjacent in memory, not the columns
    softmax(x)
    backward(x, x, 1, x.dtype)
    narrow = numbers((9, 512), "float32")
    for rung in RUNGS:
        rung(narrow)
    online.softmax(numbers((3, 20000), "bfloat16"))


if sys.argv[1:] == ["past-the-end"]:
    x = torch.zeros(1024, device="cuda")
    _past_the_end_kernel[(1,)](x, x.numel())
else:
    run()
torch.cuda.synchronize()
