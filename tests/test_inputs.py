import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import device
from memtraffic.errors import InputsError
from memtraffic.inputs import DTYPES, Arguments, tensors_in
from memtraffic.op import find_op
from memtraffic.tensors import MEMORY_LAYOUTS, matrix


def made(text, *shape, **options):
    arguments = find_op(text).arguments(shape, **options)
    return arguments.positional, dict(arguments.keywords)


# ---- tensors


@pytest.mark.parametrize(
    ("text", "shape", "expected"),
    [
        pytest.param("M,N", (3, 5), (3, 5), id="matrix"),
        pytest.param("B,H,S,D", (2, 3, 4, 5), (2, 3, 4, 5), id="four-sizes"),
        pytest.param("N,N", (4,), (4, 4), id="twice"),
        pytest.param("128,", (), (128,), id="number-alone"),
    ],
)
def test_find_op_of_a_shape(text, shape, expected):
    ([x], _) = made(text, *shape)
    assert (x.shape, x.device) == (expected, device.default())
    assert x.float().std() > 0.1


def test_find_op_by_default_is_the_matrix_of_a_softmax():
    for layout in MEMORY_LAYOUTS:
        ([x], _) = made(None, 3, 5, dtype="bfloat16", layout=layout)
        y = matrix(3, 5, "bfloat16", layout)
        assert torch.equal(x, y) and x.stride() == y.stride()


def test_find_op_of_a_dtype():
    """That of the tensor, or the caller's."""
    for name, dtype in DTYPES.items():
        ([x], _) = made(f"4,8:{name}")
        assert x.dtype == getattr(torch, dtype)
        assert x.float().unique().numel() > 1 and not x.float().isnan().any()
    ([x, w, i], _) = made("M,N N:fp16 M:int64", 3, 5, dtype="bfloat16")
    assert (x.dtype, w.dtype, i.dtype) == (torch.bfloat16, torch.float16, torch.int64)


def test_find_op_are_different_and_the_same_each_time():
    first, second = made("M,N M,N N N", 3, 5), made("M,N M,N N N", 3, 5)
    assert all(map(torch.equal, first[0], second[0]))
    assert len({x.sum().item() for x in first[0]}) == 4
    assert torch.equal(first[0][1], matrix(3, 5, seed=1))


@pytest.mark.parametrize(
    ("text", "below"),
    [
        pytest.param("M:int64<N", 5, id="letter"),
        pytest.param("M:int32<7", 7, id="number"),
        pytest.param("M:int64 N,30", 5, id="smallest-size"),
        pytest.param("M:int64<1 N", 1, id="one"),
        pytest.param("M,M:uint8<256 N", 256, id="all-of-a-byte"),
    ],
)
def test_find_op_of_whole_numbers(text, below):
    inputs = find_op(text)
    [x, *_] = inputs.arguments([{"M": 4000, "N": 5}[name] for name in inputs.sizes]).positional
    assert (x.min(), x.max()) == (0, below - 1)
    assert made("M:int8", 4000)[0][0].max() == 127
    with pytest.raises(InputsError, match="below 128, not below 200"):
        made("M:int8<200", 4000)


# ---- other values


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("-4", -4), ("1e-6", 1e-6), (".5", 0.5), ("-2.", -2.0), ("inf", float("inf")),
     ("true", True), ("False", False), ("None", None)],
)  # fmt: skip
def test_find_op_of_a_value(text, value):
    ((x,), keywords) = made(text)
    assert x == value and type(x) is type(value) and not keywords
    ((), keywords) = made(f"eps={text}")
    assert keywords == {"eps": value}


# ---- sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("M,N", "MN"), ("N M,N", "MN"), ("M,K K,N", "MKN"), ("M:int64<N N,K", "NKM"), ("3", ""),
     ("w=N", "N")],
)  # fmt: skip
def test_find_op_orders_sizes(text, sizes):
    assert find_op(text).sizes == tuple(sizes)


def test_arguments_that_no_memory_holds():
    with pytest.raises(InputsError, match=r"'M,N' cannot be made with M=4\d*, N=4\d*: "):
        find_op("M,N").arguments((2**62, 2**62))


# ---- what cannot be read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "there are none", id="nothing"),
        pytest.param("reduction=mean", "'mean' is no tensor", id="string"),
        pytest.param("M,N:float31", "did you mean 'float32'", id="misspelt-dtype"),
        pytest.param("M,N:complex64", "no dtype is named 'complex64'", id="unknown-dtype"),
        pytest.param("M,N<5", "whole numbers, such as M:int64<5", id="bound-without-dtype"),
        pytest.param("M,N:bf16<5", "whole numbers, such as M:int64<5", id="bound-of-floats"),
        pytest.param("0,", "'0' is not a positive", id="zero"),
        pytest.param("MN", "commas between them, such as M,N", id="comma-forgotten"),
        pytest.param("=3", "name=value", id="no-name"),
        pytest.param("a=1 a=2", "a is given twice", id="name-twice"),
        pytest.param("a=1 M,N", "stands after a=", id="position-after-name"),
    ],
)
def test_find_op_that_cannot_be_read(text, message):
    with pytest.raises(InputsError, match=message) as caught:
        find_op(text)
    assert "\n" not in str(caught.value)


ALPHABET = st.sampled_from([*"MNKabn019.,:<=-+eE ' \t\n_", "int64", "bf16", "None", "eps=", "é"])


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.lists(ALPHABET, max_size=12).map("".join))
def test_find_op_of_any_text(text):
    """It is read, and what it says can be made, or one line says why not."""
    try:
        inputs = find_op(text)
        if all(len(word) < 6 for word in text.replace(",", " ").split()):
            inputs.arguments([3] * len(inputs.sizes))
    except (InputsError, LookupError) as error:
        assert str(error) and "\n" not in str(error)


# ---- functions


@pytest.mark.parametrize(
    ("function", "positional", "keywords"),
    [
        (lambda m, k: torch.ones(m, k), 1, []),
        (lambda m, k: [torch.ones(m)], 1, []),
        (lambda m, k, dtype, *, layout: [dtype, layout], 2, []),
        (lambda m, k, **options: options, 0, ["dtype", "layout"]),
        (lambda m, k: {"x": torch.ones(m, k)}, 0, ["x"]),
        (lambda m, k, eps=1e-6, *, flag=True: (torch.ones(m, k), eps), 2, []),
    ],
)
def test_find_op_of_a_function(function, positional, keywords):
    inputs = find_op(function)
    arguments = inputs.arguments((3, 5))
    assert inputs.sizes == ("M", "K")
    assert (len(arguments.positional), [*arguments.keywords]) == (positional, keywords)


@pytest.mark.parametrize("wrong", [lambda rows, n: rows, 7, lambda m, two: m])
def test_find_op_of_what_makes_none(wrong):
    with pytest.raises(TypeError, match="inputs: "):
        find_op(wrong)


# ---- what is given


def test_arguments_tensors():
    x, w = torch.ones(3), torch.ones(2)
    arguments = Arguments((x, 3), {"w": w, "eps": 1e-6})
    assert [t.shape for t in arguments.tensors] == [(3,), (2,)]
    assert [t.shape for t in tensors_in([[(x,)], 1, {"w": {"w": w}}])] == [(3,), (2,)]
    doubled = arguments.map(lambda t: 2 * t)
    assert doubled.positional[0].tolist() == [2, 2, 2]
    assert doubled.positional[1] == 3 and doubled.keywords["eps"] == 1e-6
