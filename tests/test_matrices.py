import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import machine
from memtraffic.matrices import LAYOUTS, matrix, sectors


@pytest.mark.parametrize(
    ("layout", "n", "strides"),
    [
        ("packed", 6, (6, 1)),
        ("odd", 6, (7, 1)),
        ("odd", 7, (7, 1)),
        ("every other", 6, (12, 2)),
        ("transposed", 6, (1, 5)),
    ],
)
def test_how_a_matrix_lies(layout, n, strides):
    x = matrix(5, n, "bfloat16", layout)
    assert (x.shape, x.stride()) == ((5, n), strides)
    assert (x.dtype, x.device) == (torch.bfloat16, machine.device())
    assert x.untyped_storage().nbytes() == 2 * (
        4 * strides[0] + (n - 1) * strides[1] + 1
    )


def test_a_matrix_is_packed_float32_unless_told():
    x = matrix(5, 6)
    assert (x.dtype, x.stride()) == (torch.float32, (6, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_is_random(layout):
    torch.manual_seed(781)
    x, again = matrix(100, 200, layout=layout), matrix(100, 200, layout=layout)
    assert abs(x.mean()) < 0.05
    assert abs(x.std() - 1) < 0.05
    assert not torch.equal(x, again)


def test_an_unknown_layout():
    with pytest.raises(
        LookupError,
        match=r"^no layout is named 'od': give one of packed, odd, every other, transposed$",
    ):
        matrix(2, 2, layout="od")


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
    assert sectors(x) == sum(
        len(
            {
                (row * row_stride + col * col_stride) * x.element_size() // 32
                for col in range(n)
            }
        )
        for row in range(m)
    )


@pytest.mark.parametrize(
    ("layout", "a_row"), [("packed", 32), ("odd", 32.875), ("every other", 64)]
)
def test_sectors_of_a_layout(layout, a_row):
    assert sectors(matrix(8, 256, layout=layout)) == 8 * a_row
