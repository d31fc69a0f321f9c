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


NUMBERS = {"M": 3, "N": 5, "K": 4, "B": 2}


@pytest.mark.parametrize(
    ("text", "sizes", "shapes"),
    [
        ("N M,N", "MN", [(5,), (3, 5)]),
        ("M,K K,N", "MKN", [(3, 4), (4, 5)]),
        ("M:int64<N N,K", "NKM", [(3,), (5, 4)]),
        ("B,M,N,K", "BMNK", [(2, 3, 5, 4)]),
        ("N,N 128,", "N", [(5, 5), (128,)]),
        ("3 w=N", "N", [(5,)]),
    ],
)
def test_find_op_of_shapes(text, sizes, shapes):
    op = find_op(text)
    assert op.sizes == tuple(sizes)
    tensors = op.arguments([NUMBERS[size] for size in sizes]).tensors
    assert [x.shape for x in tensors] == shapes
    assert {x.device for x in tensors} == {device.default()}
    assert all(x.float().std() > 0.1 for x in tensors)


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
    ([x, w, i], _) = made("M,N N:bf16 M:int64", 3, 5, dtype="float16")
    assert (x.dtype, w.dtype, i.dtype) == (torch.float16, torch.bfloat16, torch.int64)


def test_find_op_are_different_and_the_same_each_time():
    first, second = made("M,N M,N N N", 3, 5), made("M,N M,N N N", 3, 5)
    assert all(map(torch.equal, first[0], second[0]))
    assert len({x.sum().item() for x in first[0]}) == 4
    assert torch.equal(first[0][1], matrix(3, 5, seed=1))


@pytest.mark.parametrize(
    ("text", "below"),
    [
        ("M:int64<N", 5),
        ("M:int32<7", 7),
        ("M:int64 N,30", 5),  # the smallest size
        ("M,M:uint8<256 N", 256),  # all that a byte holds
    ],
)
def test_find_op_of_whole_numbers(text, below):
    inputs = find_op(text)
    [x, *_] = inputs.arguments([{"M": 1000, "N": 5}[name] for name in inputs.sizes]).positional
    assert (x.min(), x.max()) == (0, below - 1)
    assert made("M:int8", 4000)[0][0].max() == 127
    with pytest.raises(InputsError, match="below 128, not below 200"):
        made("M:int8<200", 4000)


# ---- other values


def test_find_op_of_values():
    """By position, and by name."""
    found, keywords = made("3 -4 1e-6 .5 -2. -inf true False None eps=-2. flag=true")
    assert repr(found) == "(3, -4, 1e-06, 0.5, -2.0, -inf, True, False, None)"
    assert keywords == {"eps": -2, "flag": True}


def test_arguments_that_no_memory_holds():
    with pytest.raises(InputsError, match=r"'M,N' cannot be made with M=4\d*, N=4\d*: "):
        find_op("M,N").arguments((2**62, 2**62))


# ---- what cannot be read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are none"),
        ("reduction=mean", "'mean' is no tensor"),
        ("M,N:float31", "did you mean 'float32'"),
        ("M,N:bf16<5", "whole numbers, such as M:int64<5"),
        ("0,", "'0' is not a positive"),
        ("MN", "commas between them, such as M,N"),
        ("=3", "name=value"),
        ("a=1 a=2", "a is given twice"),
        ("a=1 M,N", "stands after a="),
    ],
)
def test_find_op_that_cannot_be_read(text, message):
    with pytest.raises(InputsError, match=message) as caught:
        find_op(text)
    assert "\n" not in str(caught.value)


ALPHABET = st.sampled_from([*"MNKabn019.,:<=-+eE ' \t\n_", "int64", "bf16", "None", "eps=", "é"])


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
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
