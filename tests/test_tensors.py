import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import device
from memtraffic.tensors import MEMORY_LAYOUTS, matrix, sectors

STRIDES = {"packed": (6, 1), "odd": (7, 1), "every other": (12, 2), "transposed": (1, 5)}


@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
def test_matrix(layout):
    x = matrix(5, 6, "bfloat16", layout)
    assert (x.shape, x.stride()) == ((5, 6), STRIDES[layout])
    assert (x.dtype, x.device) == (torch.bfloat16, device.default())
    last = 4 * x.stride(0) + 5 * x.stride(1)
    assert x.untyped_storage().nbytes() == 2 * (last + 1)
    assert matrix(0, 8, layout=layout).shape == (0, 8)
    x = matrix(100, 200, layout=layout)
    assert abs(x.mean()) < 0.05
    assert abs(x.std() - 1) < 0.05
    assert torch.equal(matrix(100, 200, layout=layout), x)
    assert not torch.equal(matrix(100, 200, layout=layout, seed=1), x)
    assert torch.equal(matrix(100, 200, torch.float16, layout), x.half())


def test_matrix_on_meta():
    x = matrix(2**31, 5, "float16", "odd", device="meta")
    assert (x.device.type, x.stride(), x.dtype) == ("meta", (5, 1), torch.float16)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 12),
    n=st.integers(1, 40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    row_stride=st.integers(0, 50),
    col_stride=st.integers(0, 20),
)
def test_sectors_are_those_of_each_row(m, n, dtype, row_stride, col_stride):
    x = torch.empty_strided((m, n), (row_stride, col_stride), dtype=dtype)

    def sector(row, col):
        return (row * row_stride + col * col_stride) * x.element_size() // 32

    assert sectors(x) == sum(len({sector(row, col) for col in range(n)}) for row in range(m))
