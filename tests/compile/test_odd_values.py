"""What the interpreter makes of odd values is what a GPU makes of them, or an error."""

import numpy as np
import odd_values
import pytest
import torch

from memtraffic import count, device
from memtraffic.errors import CountError
from memtraffic.triton_adapter.launch import triton_version

pytest.importorskip("triton", reason="Triton is not installed")

import kernels

# Where elements are combined in another order, or a GPU approximates: a few times the spacing of
# numbers near the largest one of a row.
ROUNDED = "x / z", "tl.exp(", "tl.log(", "tl.sum(", "tl.cumsum(", "tl.cumprod("
# A GPU adds to memory as if numbers below the normal ones were 0.
FLUSHED = ("tl.atomic_add(x, z) float32",)
# Since Triton 3.8 that of 0 is -0; the GPU's kernels are of 3.6.
SIGNED = () if triton_version() < (3, 8) else ("-x",)
REFUSED = {
    "equal numbers": ("tl.argmax(x, axis=1, tie_break_left=False) uint",),
    "NaN": ("tl.argmax(", "tl.argmin(", "tl.clamp(x, -2.0, 2.0)"),
}


def difference(case, found, expected):
    """How many elements differ."""
    if not found.dtype.is_floating_point:
        return int((found.view(torch.uint8) != expected.view(torch.uint8)).sum())
    info, (a, b) = torch.finfo(found.dtype), (found.double(), expected.double())
    equal = (a == b) & ((a != 0) | (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
    if case.expression in SIGNED:
        equal |= a == b
    if str(case).startswith(FLUSHED):
        equal |= (a - b).abs() <= 2 * info.tiny
    if any(it in case.expression for it in ROUNDED):
        largest = 2000 if case.kind in ("rows", "whole") else b.abs()
        equal |= (a - b).abs() <= 4 * info.eps * largest
    return int((~equal).sum())


@pytest.mark.slow
def test_odd_values_become_what_a_gpu_makes_of_them(tmp_path):
    """Of 655 operations on values of a dtype, 23 are refused: they depend on the layout."""
    by_case, stored = odd_values.load_kernels(tmp_path / "odd_kernels.py"), odd_values.read()
    different, refused = {}, 0
    for case in odd_values.cases():
        if str(case) not in stored:
            continue
        kept, kernel = [], by_case[case.kind, case.expression]
        try:
            count(lambda: kept.append(odd_values.run(case, kernel, "cpu")), ())  # noqa: B023
        except CountError as error:
            assert next(it for it, of in REFUSED.items() if str(case).startswith(of)) in str(error)
            refused += 1
            continue
        octets = np.frombuffer(bytearray(stored[str(case)]), np.uint8)
        expected = torch.from_numpy(octets).view(kept[0].dtype).reshape(kept[0].shape)
        if differ := difference(case, kept[0], expected):
            different[str(case)] = differ
    assert not different
    assert len(stored) == 655 and refused <= 23


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_descriptor_pads_with_nan(name):
    x = torch.ones(2, 16, device=device.default()).to(getattr(torch, name))
    y = x.repeat(1, 2)
    count(lambda: kernels._padded_kernel[(1,)](y, x, 2, 16, BLOCK=32), ())
    assert y.float().isnan().int().tolist() == [16 * [0] + 16 * [1]] * 2
