"""The judge of numerics: is a result right, to within the rounding of its own dtype?"""

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
