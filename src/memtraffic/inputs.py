"""What a function is called with, written as text, such as `M,N N:bf16 M:int64<N eps=1e-6`."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from memtraffic.errors import InputsError
from memtraffic.functions import as_function

if TYPE_CHECKING:
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
_WORDS = {"true": True, "True": True, "false": False, "False": False, "None": None}


@dataclass(frozen=True)
class Arguments:
    """What a function is called with: by position and by keyword."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def call(self, fn: Callable[..., Any]) -> Any:
        """`fn` called with these arguments."""
        return fn(*self.positional, **self.keywords)

    def map(self, change: Callable[[Tensor], Tensor]) -> Arguments:
        """The same arguments with each tensor changed."""
        import torch

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, torch.Tensor) else value

        keywords = {name: changed(value) for name, value in self.keywords.items()}
        return Arguments(tuple(map(changed, self.positional)), keywords)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them."""
        import torch

        values = (*self.positional, *self.keywords.values())
        return [value for value in values if isinstance(value, torch.Tensor)]


@runtime_checkable
class MakesInputs(Protocol):
    """What makes inputs for given sizes, such as an `Op`. sizes: the names of these."""

    @property
    def sizes(self) -> tuple[str, ...]: ...

    def inputs(
        self, shape: tuple[int, ...], dtype: str = ..., layout: str = ...
    ) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Inputs:
    """A way to make the arguments of a function: `arguments`, for numbers in place of `sizes`.

    name: the specification. sizes: its letters, in the order of the tensor with most dimensions.
    shapes: of its tensors, in letters and numbers.
    """

    name: str
    sizes: tuple[str, ...]
    make: Callable[..., Arguments]
    shapes: tuple[tuple[str, ...], ...] = ()

    def elements(self, shape: Sequence[int]) -> int:
        """The elements of the largest tensor at these sizes, as far as a specification says it."""
        numbers = dict(zip(self.sizes, shape, strict=True))
        each = self.shapes or (self.sizes,)
        return max(math.prod(numbers.get(size) or int(size) for size in sizes) for sizes in each)

    def check(self, shape: Sequence[int]) -> None:
        """Raises ValueError unless `shape` has a number for each of `sizes`."""
        if len(shape) != len(self.sizes):
            names = ", ".join(self.sizes) or "without sizes"
            raise ValueError(f"{self.name}: a shape is {names}, not {tuple(shape)}")

    def arguments(
        self, shape: Sequence[int], dtype: str = "float32", layout: str = "packed"
    ) -> Arguments:
        """The arguments at these sizes, the same ones each time.

        shape: a number for each of `sizes`. dtype: of the tensors that name none. layout: of
        matrices, as of `tensors.matrix`. Raises what `check` raises.
        """
        self.check(shape)
        return self.make(tuple(shape), dtype, layout)


AnyInputs: TypeAlias = "str | Inputs | MakesInputs | Callable[..., Any] | Arguments | None"


def find_inputs(inputs: AnyInputs = None) -> Inputs:
    """The `Inputs` of a specification, an `Op` or a function; of one matrix `M,N` for None.

    >>> find_inputs("N M,N eps=1e-6").sizes
    ('M', 'N')
    >>> import torch
    >>> find_inputs(lambda m, k: torch.ones(m, k)).sizes
    ('M', 'K')

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

    A function has a parameter for each size, of one letter. It returns a tensor, a tuple of
    arguments, or a dict of keyword arguments. Raises InputsError for a specification that cannot be
    read, and TypeError for what is none of these.
    """
    if inputs is None:
        inputs = DEFAULT
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(inputs, Arguments):
        arguments = inputs
        return Inputs("arguments", (), lambda *_: arguments)
    if isinstance(inputs, str):
        return _parse(inputs)
    if isinstance(inputs, MakesInputs):
        op = inputs

        def make(shape: tuple[int, ...], dtype: str, layout: str) -> Arguments:
            return Arguments(op.inputs(shape, dtype, layout))

        return Inputs(getattr(op, "name", "inputs"), op.sizes, make)
    if not callable(inputs):
        raise TypeError(f"inputs: text such as 'M,N', an Op or a function, not {inputs!r}")
    return _of_function(inputs)


GRAMMAR = "\n\n".join((inspect.getdoc(find_inputs) or "").split("\n\n")[2:4])  # for --help


def given(tensors: Sequence[Any], inputs: AnyInputs = None) -> Arguments:
    """The arguments of a meter that takes either tensors or `inputs`, whose sizes are numbers.

    >>> given((), "3,5 eps=1e-6").keywords
    {'eps': 1e-06}

    Raises ValueError for both of them, for neither, and for a size that is a letter.
    """
    if inputs is None:
        return Arguments(tuple(tensors))
    if tensors:
        raise ValueError(f"{len(tensors)} tensors and inputs={inputs!r}: give one of the two")
    found = find_inputs(inputs)
    if found.sizes:
        letters = ", ".join(found.sizes)
        raise ValueError(
            f"inputs={found.name!r}: put a number in place of {letters}, such as '16,4096'"
        )
    return found.arguments(())


def bind(fn: Any, tensors: Sequence[Any], inputs: AnyInputs = None) -> Callable[[], Any]:
    """The call of `fn` with tensors or `inputs`, as `given`; `fn` is as of `as_function`."""
    function, arguments = as_function(fn), given(tensors, inputs)
    return lambda: arguments.call(function)


def read_sizes(inputs: Inputs, texts: Sequence[str], **defaults: int | None) -> tuple[int, ...]:
    """The numbers for the sizes of `inputs`: in their order, as `4096`, or by name, as `K=64`.

    >>> read_sizes(find_inputs("M,K K,N"), ["3", "N=5", "K=4"], M=16)
    (3, 4, 5)

    defaults: of sizes that `texts` does not name. Raises InputsError.
    """
    names = inputs.sizes
    wanted = ", ".join(names) or "none"
    found: dict[str, int] = {}
    for position, text in enumerate(texts):
        name, equals, number = text.rpartition("=")
        if not equals:
            if position >= len(names):
                raise InputsError(f"{text!r} is one size too many: {inputs.name!r} has {wanted}")
            name = names[position]
        if name not in names:
            raise InputsError(
                f"{text!r}: {inputs.name!r} has no size {name!r}; its sizes: {wanted}"
            )
        if name in found:
            raise InputsError(f"{text!r}: {name} is {found[name]} already")
        found[name] = read_size(number)
    values = {name: value for name, value in defaults.items() if value is not None} | found
    if missing := [name for name in names if name not in values]:
        example = " ".join(f"{name}=1024" for name in missing)
        raise InputsError(f"{', '.join(missing)} of {inputs.name!r} has no number: add {example}")
    return tuple(values[name] for name in names)


def read_size(text: str) -> int:
    """A size as text: a positive whole number. Raises InputsError for anything else."""
    if not re.fullmatch("[0-9]{1,1000}", text) or not int(text):
        raise InputsError(f"{text[:40]!r} is not a positive whole number")
    if int(text) >= 2**63:
        raise InputsError(f"{text[:40]} is no size: the largest is 2**63 - 1")
    return int(text)


# ---- from text


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a specification. dtype: "" is the caller's choice. below: "" is none."""

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

        from memtraffic import runtime, tensors

        def number(size: str) -> int:
            return numbers[size] if size.isalpha() else int(size)

        shape, of = [number(size) for size in self.sizes], getattr(torch, self.dtype or dtype)
        if of.is_floating_point and len(shape) == 2:
            m, n = shape
            return tensors.matrix(m, n, of, layout, seed=seed)
        device = runtime.device()
        generator = torch.Generator(device).manual_seed(seed)
        if of.is_floating_point:
            return torch.randn(shape, generator=generator, device=device).to(of)
        most = 2 if of == torch.bool else torch.iinfo(of).max + 1
        below = number(self.below) if self.below else min(smallest, most)
        if below > most:
            raise InputsError(
                f"inputs: {_text(self)}: {of} holds whole numbers below {most}, not below {below}"
            )
        below = most if of == torch.bool else below
        return torch.randint(below, shape, generator=generator, device=device).to(of)


def _text(tensor: _Tensor) -> str:
    comma = "," if len(tensor.sizes) == 1 and tensor.sizes[0].isdecimal() else ""
    text = ",".join(tensor.sizes) + comma
    text += f":{tensor.dtype}" if tensor.dtype else ""
    return text + (f"<{tensor.below}" if tensor.below else "")


def _parse(text: str) -> Inputs:
    """The `Inputs` of a specification. Raises InputsError."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument in text.split():
        key, equals, value = argument.rpartition("=")
        if equals and not key.isidentifier():
            raise InputsError(f"inputs: {argument!r} is not of the form name=value")
        if equals and key in keywords:
            raise InputsError(f"inputs: {argument!r}: {key} is given twice")
        if not equals and keywords:
            raise InputsError(
                f"inputs: {argument!r} stands after {[*keywords][-1]}=: give it a name"
            )
        if equals:
            keywords[key] = _value(value)
        else:
            positional.append(_value(value))
    values = [*positional, *keywords.values()]
    if not values:
        raise InputsError("inputs: there are none; a matrix is 'M,N'")
    tensors = [value for value in values if isinstance(value, _Tensor)]
    by_dimensions = sorted(tensors, key=lambda tensor: -len(tensor.sizes))
    letters = [letter for tensor in by_dimensions for letter in tensor.letters]

    def make(shape: tuple[int, ...], dtype: str, layout: str) -> Arguments:
        numbers = dict(zip(names, shape, strict=True))
        sizes = {size for tensor in tensors for size in tensor.sizes}
        least = min((numbers[s] if s.isalpha() else int(s) for s in sizes), default=1)

        def real(value: Any, seed: int) -> Any:
            if not isinstance(value, _Tensor):
                return value
            return value.make(numbers, least, dtype, layout, seed)

        try:
            made = [real(value, seed) for seed, value in enumerate(values)]
        except (RuntimeError, TypeError) as error:  # more elements than memory, or than 64 bits
            at = ", ".join(f"{name}={number}" for name, number in numbers.items())
            why = str(error).partition("\n")[0]
            raise InputsError(
                f"inputs: {text!r} cannot be made with {at or 'these sizes'}: {why}"
            ) from error
        named = zip(keywords, made[len(positional) :], strict=True)
        return Arguments(tuple(made[: len(positional)]), dict(named))

    names = tuple(dict.fromkeys(letters))
    return Inputs(" ".join(text.split()), names, make, tuple(tensor.sizes for tensor in tensors))


def _value(text: str) -> Any:
    """A number, a truth value, None, or a `_Tensor`. Raises InputsError."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > 1000:
        raise InputsError(f"inputs: {text[:20]}... has {len(text)} characters")
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    found = _TENSOR.fullmatch(text)
    if found is None:
        raise InputsError(f"inputs: {text!r} {_why_not(text)}")
    sizes = tuple(size for size in found["sizes"].split(",") if size)
    dtype, below = found["dtype"] or "", found["below"] or ""
    if dtype and dtype not in DTYPES:
        close = difflib.get_close_matches(dtype, DTYPES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputsError(
            f"inputs: {text!r}: no dtype {dtype}: {hint}Known are {', '.join(DTYPES)}"
        )
    dtype = DTYPES.get(dtype, "")
    for size in (*sizes, below):
        if size.isdecimal() and not 0 < int(size) < 2**63:
            raise InputsError(f"inputs: {text!r}: {size} is not a size from 1 to 2**63 - 1")
    if below and "int" not in dtype:
        why = (
            f"{dtype} has no largest number" if dtype else f"name the dtype, as in M:int64<{below}"
        )
        raise InputsError(f"inputs: {text!r}: < is for whole numbers: {why}")
    return _Tensor(sizes, dtype, below)


def _why_not(text: str) -> str:
    """Why this is no value, for a message that starts with it."""
    if not text:
        return "is empty: give a value after the ="
    if re.fullmatch("[A-Z]{2,4}", text):
        return f"is a word: sizes have commas between them: {','.join(text)}"
    if any(quote in text for quote in "'\"") or re.fullmatch(r"[A-Za-z_]\w+", text):
        why = "is a string, which no meter passes on: call your function from one of your own"
        close = difflib.get_close_matches(text, _WORDS, n=1)
        return f"{why}; did you mean {close[0]}?" if close else why
    if _TENSOR.fullmatch(re.sub(r"\b[a-z]\b", lambda size: size[0].upper(), text)):
        return "has a size in lower case: sizes are upper-case letters or numbers, such as M,N"
    return "is neither a tensor, such as M,N or M:int64<N, nor a number, true, false or None"


# ---- from a function


def _of_function(function: Callable[..., Any]) -> Inputs:
    name = getattr(function, "__name__", "inputs")
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in kinds and parameter.default is parameter.empty
    ]
    if bad := [parameter for parameter in parameters if not re.fullmatch("[A-Za-z]", parameter)]:
        raise TypeError(
            f"inputs: {name} has a parameter {bad[0]!r}: parameters are sizes, of one letter, "
            "such as m and n"
        )

    def make(shape: tuple[int, ...], dtype: str, layout: str) -> Arguments:
        made = function(*shape)
        if isinstance(made, Mapping):
            return Arguments((), made)
        return Arguments(tuple(made) if isinstance(made, (tuple, list)) else (made,))

    return Inputs(name, tuple(map(str.upper, parameters)), make)
