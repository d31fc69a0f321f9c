"""The judge of numerics: is a result right, to within the rounding of its own dtype?"""

from contextlib import contextmanager

import torch

ROUNDINGS = 4  # of one unit in the last place each: what the operations of a softmax may add up to


def tolerance(reference, dtype):
    """How far each element of a row may be from `reference`: a few roundings of the largest value of its row."""
    return (
        ROUNDINGS * torch.finfo(dtype).eps * reference.abs().amax(dim=-1, keepdim=True)
    )


def assert_close(got, reference, dtype):
    """Refuses `got` unless it has the dtype `dtype`, the shape of `reference` (float64) and, nearly, its values."""
    assert reference.dtype == torch.float64, (
        f"the reference is {reference.dtype}, not float64"
    )
    assert torch.isfinite(reference).all(), "the reference is not finite"
    assert got.dtype == dtype, f"dtype {got.dtype}, not {dtype}"
    assert got.shape == reference.shape, (
        f"shape {tuple(got.shape)}, not {tuple(reference.shape)}"
    )
    error = (got.double() - reference).abs()
    wrong = ~(error <= tolerance(reference, dtype))  # a NaN is not <= anything
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {where}: "
            f"{got[where].item()}, not {reference[where].item()}"
        )


def assert_sums(got, reference):
    """Refuses `got` unless each of its rows adds up to what that of `reference` does, 1 in a softmax.

    Each element may be off by a few roundings of the largest: all of the small ones could be missing. A sum may be off by two
    roundings to the dtype, by some of float32, and by half of the smallest number of the dtype for each element.
    """
    finfo = torch.finfo(got.dtype)
    sums, right = got.double().sum(dim=-1), reference.sum(dim=-1)
    relative = 2 * finfo.eps + 2 * ROUNDINGS * torch.finfo(torch.float32).eps
    room = relative * right.abs()
    room += got.shape[-1] * finfo.smallest_normal * finfo.eps / 2
    wrong = ~((sums - right).abs() <= room)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} rows add up wrongly, the first at {where}: "
            f"to {sums[where].item()}, not {right[where].item()}"
        )


@contextmanager
def nan_memory():
    """While this lasts, memory that PyTorch allocates and nobody has written yet holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def assert_softmax(fn, x):
    """Refuses `fn` unless `fn(x)` is the softmax of each row of `x`, judged against float64 of the same input.

    What `fn` allocates and does not write is wrong, and so is a changed input; NaN is right where float64 gives NaN, and
    only there; every other row adds up to 1. Raises AssertionError, which says where.
    """
    before = x.clone()
    with nan_memory():
        got = fn(x)
    reference = torch.softmax(before.double(), dim=1)
    nan = reference.isnan()
    assert torch.equal(got.isnan(), nan), (
        f"NaN in {int((got.isnan() != nan).sum())} wrong places"
    )
    got, reference = got.masked_fill(nan, 0), reference.masked_fill(nan, 0)
    assert_close(got, reference, x.dtype)
    assert_sums(got, reference)
    assert torch.equal(x.nan_to_num(), before.nan_to_num()), "the input was changed"


def is_softmax(fn, x):
    """Whether `assert_softmax` accepts `fn` on `x`."""
    try:
        assert_softmax(fn, x)
    except AssertionError:
        return False
    return True
