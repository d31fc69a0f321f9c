"""What a function is called with, and how it is written as text: `M,N N:bf16 M:int64<N eps=1e-6`.

An `Op` makes arguments: of such text, with numbers in place of its letters, or by a function.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memtraffic.errors import InputsError, unknown

if TYPE_CHECKING:  # a command reads a specification before it imports PyTorch
    from torch import Tensor

DEFAULT = "M,N"
DTYPES = {
    name: name
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
} | {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_SIZE = "[A-Z]|[0-9]+"
_TENSOR = re.compile(
    rf"(?P<sizes>(?:{_SIZE})(?:,(?:{_SIZE}))*,?)(?::(?P<dtype>\w+))?(?:<(?P<below>{_SIZE}))?"
)
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?inf|nan")
NO_VALUE = (
    "is no tensor, whose sizes are upper-case letters or numbers with commas between them, such as "
    "M,N or M:int64<N, and no number, true, false or None"
)
_WORDS = {"true": True, "True": True, "false": False, "False": False, "None": None}


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values, and in the lists, tuples and mappings among them.

    >>> import torch
    >>> [x.item() for x in tensors_in([torch.tensor(1), 2, {"x": [torch.tensor(3)]}])]
    [1, 3]
    """
    from torch import Tensor

    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values())


@dataclass(frozen=True)
class Arguments:
    """What a function is called with: by position and by keyword."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def call(self, fn: Callable[..., Any]) -> Any:
        """`fn` called with these arguments."""
        return fn(*self.positional, **self.keywords)

    def map(self, change: Callable[[Tensor], Tensor]) -> Arguments:
        """The same arguments with each tensor changed, in tuples, lists and mappings, too."""
        from memtraffic.torch_adapter import map_tensors

        return Arguments(*map_tensors(change, (self.positional, dict(self.keywords))))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them."""
        return list(tensors_in((self.positional, self.keywords)))


def arguments_of(values: Any) -> Arguments:
    """A tensor, a tuple or list of arguments, or a mapping of keyword arguments, as `Arguments`."""
    if isinstance(values, Arguments):
        return values
    if isinstance(values, Mapping):
        return Arguments((), values)
    return Arguments(tuple(values) if isinstance(values, (tuple, list)) else (values,))


@dataclass(frozen=True)
class Inputs:
    """A way to make arguments: `make(shape, dtype, layout)`, a number for each of `sizes`.

    sizes: letters, in the order of the tensor with most dimensions. shapes: of the tensors, in
    letters and numbers, as far as a text says them.
    """

    sizes: tuple[str, ...]
    make: Callable[[tuple[int, ...], str, str], Arguments]
    shapes: tuple[tuple[str, ...], ...] = ()


def read_size(text: str) -> int:
    """A size as text: a positive whole number. Raises InputsError for anything else."""
    if not re.fullmatch("[0-9]{1,18}", text) or not int(text):
        raise InputsError(f"{text[:40]!r} is not a positive whole number of at most 18 digits")
    return int(text)


# ---- from text


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a specification. dtype: "" is the caller's choice. below: "" is none."""

    text: str
    sizes: tuple[str, ...]
    dtype: str
    below: str

    @property
    def letters(self) -> list[str]:
        return [size for size in (*self.sizes, self.below) if size.isalpha()]

    def make(
        self, numbers: Mapping[str, int], smallest: int, dtype: str, layout: str, seed: int
    ) -> Tensor:
        import torch

        from memtraffic import device, tensors

        shape = [number_of(size, numbers) for size in self.sizes]
        of = getattr(torch, self.dtype or dtype)
        if of.is_floating_point and len(shape) == 2:
            m, n = shape
            return tensors.matrix(m, n, of, layout, seed=seed)
        here = device.default()
        generator = torch.Generator(here).manual_seed(seed)
        if of.is_floating_point:
            return torch.randn(shape, generator=generator, device=here).to(of)
        most = 2 if of == torch.bool else torch.iinfo(of).max + 1
        least = most if of == torch.bool else min(smallest, most)
        below = number_of(self.below, numbers) if self.below else least
        if below > most:
            raise InputsError(
                f"inputs: {self.text}: {of} holds whole numbers below {most}, not below {below}"
            )
        return torch.randint(below, shape, generator=generator, device=here).to(of)


def number_of(size: str, numbers: Mapping[str, int]) -> int:
    """What a size stands for: a letter for one of `numbers`, a number for itself."""
    return numbers[size] if size.isalpha() else int(size)


def parse(text: str) -> Inputs:
    """The `Inputs` of a specification.

    >>> parse("N M,N eps=1e-6").sizes
    ('M', 'N')

    A specification is a list of arguments with spaces between them. An argument is one of

    - `M,N`: a tensor. Its sizes are upper-case letters, which stand for numbers to be chosen, or
      numbers, as in `M,128`. A comma makes a size of a number that stands alone: `128,`.
    - `M,N:bf16`: a tensor of this dtype; without one, of that which `dtype` says. It holds normally
      distributed numbers; of bool, true and false.
    - `M:int64<N`: whole numbers from 0 to N - 1, such as indices into N rows or the targets of a
      cross-entropy. Without `<N`, they are below the smallest size of all tensors, so that they
      index any of them, and fit the dtype.
    - `3`, `1e-6`, `true`, `false`, `None`: this value.
    - `eps=1e-6`, `weight=N:bf16`: any of these, given by its name. They stand last.

    Raises InputsError for text that cannot be read.
    """
    given: list[tuple[str, Any]] = []  # each with its name, "" by position
    for argument in text.split():
        key, equals, value = argument.rpartition("=")
        named = [name for name, _ in given if name]
        if equals and not key.isidentifier():
            raise InputsError(f"inputs: {argument!r} is not of the form name=value")
        if equals and key in named:
            raise InputsError(f"inputs: {argument!r}: {key} is given twice")
        if not equals and named:
            raise InputsError(f"inputs: {argument!r} stands after {named[-1]}=: give it a name")
        given.append((key, _value(value)))
    if not given:
        raise InputsError("inputs: there are none; a matrix is 'M,N'")
    written = [value for _, value in given if isinstance(value, _Tensor)]
    by_dimensions = sorted(written, key=lambda tensor: -len(tensor.sizes))
    letters = tuple(dict.fromkeys(it for tensor in by_dimensions for it in tensor.letters))

    def make(shape: tuple[int, ...], dtype: str, layout: str) -> Arguments:
        numbers = dict(zip(letters, shape, strict=True))
        least = min((number_of(it, numbers) for x in written for it in x.sizes), default=1)
        try:
            made = [
                it.make(numbers, least, dtype, layout, seed) if isinstance(it, _Tensor) else it
                for seed, (_, it) in enumerate(given)
            ]
        except (RuntimeError, TypeError) as error:  # more elements than memory, or than 64 bits
            at = ", ".join(f"{name}={number}" for name, number in numbers.items())
            why = str(error).partition("\n")[0]
            raise InputsError(
                f"inputs: {text!r} cannot be made with {at or 'these sizes'}: {why}"
            ) from error
        n = sum(not name for name, _ in given)
        return Arguments(
            tuple(made[:n]), {name: it for (name, _), it in zip(given[n:], made[n:], strict=True)}
        )

    return Inputs(letters, make, tuple(tensor.sizes for tensor in written))


GRAMMAR = "\n\n".join((inspect.getdoc(parse) or "").split("\n\n")[2:4])  # for --help


def is_value(text: str) -> bool:
    """Whether text has the form of one argument: of a tensor, a number, a truth value or None."""
    forms = (_TENSOR, _INT, _FLOAT)
    return text in _WORDS or any(form.fullmatch(text) for form in forms)


def _value(text: str) -> Any:
    """A number, a truth value, None, or a `_Tensor`. Raises InputsError."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    found = _TENSOR.fullmatch(text)
    if found is None:
        raise InputsError(f"inputs: {text!r} {NO_VALUE}")
    sizes = tuple(size for size in found["sizes"].split(",") if size)
    dtype, below = found["dtype"] or "", found["below"] or ""
    dtype = find_dtype(dtype) if dtype else ""
    for size in (*sizes, below):
        if size.isdecimal():
            read_size(size)
    if below and "int" not in dtype:
        raise InputsError(f"inputs: {text!r}: < is for whole numbers, such as M:int64<{below}")
    return _Tensor(text, sizes, dtype, below)


def find_dtype(name: str) -> str:
    """The name that PyTorch has for a dtype: `bfloat16` for `bf16`. Raises InputsError."""
    if name not in DTYPES:
        raise InputsError(f"inputs: {unknown('dtype', name, DTYPES)}")
    return DTYPES[name]


# ---- from a function

_OPTIONS = ("dtype", "layout")


def of_function(function: Callable[..., Any]) -> Inputs:
    """The `Inputs` that a function makes, with a parameter of one letter for each size.

    >>> of_function(lambda m, k: torch.ones(m, k)).sizes
    ('M', 'K')

    It returns a tensor, a tuple of arguments, or a dict of keyword arguments. Keywords `dtype` and
    `layout` are given to it if it takes them. Raises TypeError for a parameter of another name.
    """
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(each.kind == kinds.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters}
    options = [option for option in _OPTIONS if takes_any or option in named]
    sizes = [
        each.name
        for each in parameters
        if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        and each.default is each.empty
        and each.name not in options
    ]
    if bad := [size for size in sizes if not re.fullmatch("[A-Za-z]", size)]:
        name = getattr(function, "__name__", "inputs")
        raise TypeError(
            f"inputs: {name} has a parameter {bad[0]!r}: parameters are sizes, of one letter, "
            "such as m and n"
        )

    def make(shape: tuple[int, ...], dtype: str, layout: str) -> Arguments:
        chosen = {"dtype": dtype, "layout": layout}
        return arguments_of(function(*shape, **{name: chosen[name] for name in options}))

    return Inputs(tuple(map(str.upper, sizes)), make)
