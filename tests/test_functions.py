"""What is a function, and what it is called; that meters take each kind is in the contract."""

import functools
import operator

import pytest
import torch

from memtraffic.functions import as_function, function_name


class Late(torch.nn.Module):
    async def forward(self, x):
        return x


class Double(torch.autograd.Function):
    pass


async def coroutine(x):
    return x


async def asynchronous(x):
    yield x


def generator(x):
    yield x


run_by_a_library = functools.wraps(coroutine)(lambda x: x)


@pytest.mark.parametrize("fn", [len, operator.itemgetter(0), torch.nn.ReLU(), run_by_a_library])
def test_as_function_returns_what_computes_as_it_is(fn):
    assert as_function(fn) is fn


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (generator, "generator does its work after"),
        (asynchronous, "asynchronous does its work after"),
        (functools.partial(coroutine), "coroutine does its work"),
        (Late(), "Late does its work after"),
        (torch.nn.Embedding, "missing 2 required positional arguments: 'num_embeddings' and"),
    ],
)
def test_as_function_of_what_is_none(fn, message):
    with pytest.raises(TypeError, match=message):
        as_function(fn)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (functools.partial(generator, 3), f"{__name__}.generator"),
        (Late(), f"{__name__}.Late"),
        (Double.apply, f"{__name__}.Double"),
        (len, "builtins.len"),
    ],
)
def test_function_name(fn, name):
    assert function_name(fn) == name
