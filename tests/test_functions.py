"""What is a function, and what it is called; that meters take each kind is in the contract."""

import functools

import pytest
import torch

from memtraffic.functions import as_function, function_name


class Sized(torch.nn.Module):
    def __init__(self, size):
        super().__init__()


class Late(torch.nn.Module):
    async def forward(self, x):
        return x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


class Callable:
    def __call__(self, x):
        return x + 1


async def coroutine(x):
    return x


async def asynchronous(x):
    yield x


def generator(x):
    yield x


def run_by_a_library(fn):
    @functools.wraps(fn)
    def run(x):
        return x

    return run


@pytest.mark.parametrize("fn", [len, Callable(), torch.nn.ReLU(), run_by_a_library(coroutine)])
def test_as_function_returns_what_computes_as_it_is(fn):
    assert as_function(fn) is fn


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        pytest.param(coroutine, "coroutine does its work after", id="coroutine"),
        pytest.param(generator, "generator does its work after", id="generator"),
        pytest.param(asynchronous, "asynchronous does its work after", id="asynchronous"),
        pytest.param(functools.partial(coroutine), "coroutine does its work", id="partial"),
        pytest.param(Late(), "Late does its work after", id="module"),
        pytest.param(Callable, "Callable is a class", id="class-of-callables"),
        pytest.param(Sized, "missing 1 required positional argument: 'size'", id="sized"),
        pytest.param(7, "int is int, not a function", id="number"),
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
