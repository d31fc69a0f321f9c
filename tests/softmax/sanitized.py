"""Runs each kernel, for test_sanitizer.py; with the argument `past-the-end`, a wrong one."""

import memtraffic.device  # noqa: F401  first

import sys  # isort: skip

import torch
import triton
import triton.language as tl
from contract.test_kernels import SUBJECTS

# For each way through a kernel: whole rows, odd rows, several odd rows in one program, split,
# passes.
WIDTHS = 77, 96, 197, 451, 512, 781, 2176, 4097, 20000, 40001, 70000


@triton.jit
def _past_the_end_kernel(ptr, n):
    tl.store(ptr + n + tl.program_id(0), 1.0)


def run():
    for it in SUBJECTS:
        for n in filter(it.takes, WIDTHS):
            for dtype in {*it.dtypes} - {"float16"}:
                it.fn(*it.make(21 if n < 1000 else 5, n, dtype))
        if it.any_strides:  # rows are adjacent in memory, not the columns
            it.fn(*(x.t() for x in it.make(1000, 70, "float32")))


if sys.argv[1:] == ["past-the-end"]:
    x = torch.zeros(1024, device="cuda")
    _past_the_end_kernel[(1,)](x, x.numel())
else:
    run()
torch.cuda.synchronize()
