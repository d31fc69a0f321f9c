import pytest
import torch

from memtraffic import machine
from memtraffic.judge import (
    assert_close,
    assert_softmax,
    assert_sums,
    is_softmax,
    nan_memory,
    tolerance,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def right(dtype, shape=(5, 21)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    reference = torch.softmax(x.double(), dim=1)
    return reference.to(dtype), reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accepts_the_reference_rounded_once(dtype):
    assert_close(*right(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accepts_pytorch(dtype):
    x = torch.randn(5, 781, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_close(torch.softmax(x, dim=1), torch.softmax(x.double(), dim=1), dtype)


def test_accepts_no_rows():
    assert_close(
        torch.empty(0, 8), torch.empty(0, 8, dtype=torch.float64), torch.float32
    )


def changed(y, index, value):
    y = y.clone()
    y[index] = value
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(torch.zeros_like, id="zeros"),
        pytest.param(lambda y: torch.full_like(y, 1 / y.shape[1]), id="constant"),
        pytest.param(
            lambda y: y.amax(dim=1, keepdim=True).expand_as(y), id="row-constant"
        ),
        pytest.param(lambda y: changed(y, (3, 7), 1 - y[3, 7]), id="one-wrong-element"),
        pytest.param(lambda y: changed(y, (-1, -1), 0), id="last-element-not-written"),
        pytest.param(lambda y: changed(y, -1, 0), id="last-row-not-written"),
        pytest.param(lambda y: changed(y, (0, 0), float("nan")), id="one-nan"),
        pytest.param(lambda y: changed(y, (0, 0), float("inf")), id="one-inf"),
        pytest.param(lambda y: torch.full_like(y, float("nan")), id="all-nan"),
        pytest.param(lambda y: y.roll(1, dims=0), id="rows-shifted"),
        pytest.param(lambda y: y.roll(1, dims=1), id="columns-shifted"),
        pytest.param(lambda y: y * 1.05, id="scaled"),
        pytest.param(lambda y: y[:-1], id="row-missing"),
        pytest.param(lambda y: y[:1], id="broadcastable"),
        pytest.param(lambda y: y.T, id="transposed"),
        pytest.param(lambda y: y.double(), id="wider-dtype"),
        pytest.param(lambda y: y.int(), id="integers"),
    ],
)
def test_refuses(spoil, dtype):
    y, reference = right(dtype)
    with pytest.raises(AssertionError):
        assert_close(spoil(y), reference, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_refuses_each_element_that_is_off_by_twice_the_tolerance(dtype):
    y, reference = right(dtype, (3, 8))
    for index in range(y.numel()):
        row, col = divmod(index, 8)
        off = changed(
            y.double(),
            (row, col),
            reference[row, col] + 2 * tolerance(reference, dtype)[row, 0],
        ).to(dtype)
        with pytest.raises(
            AssertionError,
            match=rf"1 of 24 elements are wrong, the first at \({row}, {col}\)",
        ):
            assert_close(off, reference, dtype)


def test_refuses_a_reference_that_judges_nothing():
    y, reference = right(torch.float32)
    with pytest.raises(AssertionError, match=r"not float64"):
        assert_close(y, reference.float(), torch.float32)
    with pytest.raises(AssertionError, match=r"not finite"):
        assert_close(y * float("nan"), reference * float("nan"), torch.float32)


def matrix():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, generator=generator).to(machine.device())


def nan_somewhere(x):
    y = torch.softmax(x, dim=1)
    y[1, 2] = float("nan")
    return y


def changes_its_input(x):
    y = torch.softmax(x, dim=1)
    x.add_(1)  # whose softmax is the same
    return y


def zeroes_its_input(x):
    x.zero_()
    return torch.softmax(x, dim=1)


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(nan_somewhere, id="nan-for-a-number"),
        pytest.param(changes_its_input, id="changed-input"),
        pytest.param(zeroes_its_input, id="another-input"),
        pytest.param(lambda x: torch.softmax(x.double(), 1), id="float64"),
        pytest.param(lambda x: torch.softmax(x, 1).half(), id="float16"),
    ],
)
def test_no_softmax(fn):
    assert not is_softmax(fn, matrix())


def test_a_number_where_nan_is_right_is_refused():
    x = torch.tensor([[float("nan"), 0.0, 1.0]], device=machine.device())
    assert not is_softmax(torch.zeros_like, x)
    assert is_softmax(lambda x: torch.softmax(x, dim=1), x)


def test_fresh_memory_is_nan_for_a_while():
    with nan_memory():
        assert torch.empty(64, device=machine.device()).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_row_that_nobody_wrote():
    def first_row_only(x):
        y = torch.empty_like(x)
        y[0] = torch.softmax(x[0], dim=0)
        return y

    with pytest.raises(AssertionError, match="NaN in 10 wrong places"):
        assert_softmax(first_row_only, matrix())


def test_many_small_elements_that_are_missing():
    x = torch.linspace(0, 14, 300).repeat(2, 1).bfloat16().to(machine.device())

    def most_are_zero(x):
        y = torch.softmax(x, dim=1)
        y[1, :225] = 0
        return y

    reference = torch.softmax(x.double(), dim=1)
    assert_close(most_are_zero(x), reference, x.dtype)
    with pytest.raises(AssertionError, match=r"^1 of 2 rows add up wrongly.* \(1,\)"):
        assert_softmax(most_are_zero, x)
    assert is_softmax(lambda x: torch.softmax(x, dim=1), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 781, 32768])
def test_sums(n, dtype):
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(3, n, generator=generator)).to(dtype)
    reference = torch.softmax(x.double(), dim=1)
    assert_sums(reference.to(dtype), reference)
    room = 2 * torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps
    room += n * 2.0**-25 if dtype == torch.float16 else 0
    for factor in (1 + 2 * room, 1 - 2 * room):
        with pytest.raises(AssertionError, match=r"^3 of 3 rows add up wrongly"):
            assert_sums((reference * factor).to(dtype), reference)
