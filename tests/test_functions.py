import functools

import pytest
import torch

from memtraffic import runtime
from memtraffic.functions import as_function, function_name


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight


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


class Plain:
    pass


class Callable:
    def __call__(self, x):
        return x + 1


async def coroutine(x):
    return x


async def asynchronous(x):
    yield x


def generator(x):
    yield x


def wraps(fn):
    """What a library does that runs coroutines by itself."""

    @functools.wraps(fn)
    def run(x):
        return x

    return run


@pytest.mark.parametrize("fn", [torch.exp, len, Callable(), functools.partial(torch.add, other=1)])
def test_as_function_returns_a_function_as_it_is(fn):
    assert as_function(fn) is fn


def test_as_function_of_a_module():
    x, layer = torch.ones(3, 8, device=runtime.device()), Layer()
    assert as_function(layer) is layer
    assert torch.equal(as_function(Layer)(x), x)


def test_as_function_of_an_autograd_function():
    assert as_function(Double)(torch.ones(2)).tolist() == [2, 2]
    assert as_function(Double.apply)(torch.ones(2)).tolist() == [2, 2]


def test_as_function_of_a_coroutine_that_a_wrapper_runs():
    assert as_function(wraps(coroutine))(3) == 3


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        pytest.param(coroutine, r"coroutine is a coroutine function.*asyncio\.run", id="coroutine"),
        pytest.param(
            generator, r"generator is a generator.*list\(generator\(x\)\)", id="generator"
        ),
        pytest.param(asynchronous, "asynchronous generator function", id="asynchronous"),
        pytest.param(functools.partial(coroutine), "coroutine function", id="partial"),
        pytest.param(Late(), "Late is a coroutine function", id="module"),
        pytest.param(Plain, "Plain is a class", id="class"),
        pytest.param(Callable, "Callable is a class", id="class-of-callables"),
        pytest.param(Sized, "Sized cannot be made without arguments.*give an object", id="sized"),
        pytest.param(7, "int is int, not a function", id="number"),
    ],
)
def test_as_function_of_what_is_none(fn, message):
    with pytest.raises(TypeError, match=message):
        as_function(fn)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (generator, f"{__name__}.generator"),
        (functools.partial(generator, 3), f"{__name__}.generator"),
        (Layer(), f"{__name__}.Layer"),
        (Double.apply, f"{__name__}.Double"),
        (len, "builtins.len"),
    ],
)
def test_function_name(fn, name):
    assert function_name(fn) == name
