"""What is computed, as an object. Meters, assertions and benchmarks take an `Op`."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memtraffic import names
from memtraffic.errors import InputsError
from memtraffic.functions import function_name
from memtraffic.inputs import (
    DEFAULT,
    Arguments,
    Inputs,
    arguments_of,
    find_dtype,
    is_value,
    number_of,
    of_function,
    parse,
    read_size,
    tensors_in,
)
from memtraffic.tensors import held

_NAME = re.compile(r"[a-z_]\w+|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def tolerance(
    reference: Tensor, dtype: torch.dtype, roundings: float = 4, magnitude: Tensor | None = None
) -> Tensor:
    """How far each element may be from `reference`: a few ulps of its row's largest value.

    Half of the dtype's smallest subnormal number is added, because the best result may be that far.
    With a magnitude it is a few ulps of its own one, and the smallest normal number, below which a
    GPU may have no others, but for float16. reference: float64, of shape (..., N).
    """
    finfo = torch.finfo(dtype)
    least = finfo.smallest_normal
    if magnitude is None or dtype == torch.float16:
        least *= finfo.eps / 2
    size = reference.abs().amax(dim=-1, keepdim=True) if magnitude is None else magnitude.abs()
    return roundings * finfo.eps * size + least


def least_bytes(inputs: Iterable[Tensor], result: object) -> int:
    """The least that could be moved: the bytes of each input element and each new element once.

    >>> x = torch.zeros(2, 4)
    >>> least_bytes([x, x], (x.view(-1), x + 1))
    64

    result: a tensor, or tensors in tuples, lists and mappings. An element that several indices
    share, as in an expanded tensor or overlapping windows, counts once, and so does a tensor that
    is given twice. A result that lies in the memory of an input is not new.
    """
    given = list({(x.data_ptr(), x.shape, x.stride(), x.dtype): x for x in inputs}.values())
    known = {x.untyped_storage().data_ptr() for x in given if not x.is_meta}
    new = [
        x for x in tensors_in([result]) if x.is_meta or x.untyped_storage().data_ptr() not in known
    ]
    return sum(held(x) * x.element_size() for x in (*given, *new))


@dataclass(frozen=True, eq=False)
class Op:
    """An operation: the inputs it takes, and the result it must have.

    >>> op = Op("scale", "M,N N", reference=torch.mul)
    >>> op.sizes, op.least_bytes(op.arguments((3, 5)))
    (('M', 'N'), 140)

    name: as messages and tables call it. inputs: a specification, see `inputs.parse`, or a function
    of sizes, see `inputs.of_function`; or the arguments themselves. reference: the result, computed
    from inputs that are float64. roundings: how many ulps of its row's largest element a result may
    be off. magnitude: how large each element is, from the same inputs, with all that is rounded on
    the way to it; ulps are of these, then. checks_row_sums: whether the sum of each row is checked
    as well.

    Raises InputsError for a specification that cannot be read, TypeError for a function that takes
    no sizes.
    """

    name: str
    inputs: str | Callable[..., Any] | Arguments = DEFAULT
    reference: Callable[..., Tensor] | None = None
    roundings: float = 4
    magnitude: Callable[..., Tensor] | None = None
    checks_row_sums: bool = False

    def __post_init__(self) -> None:
        _ = self.made  # what cannot be read is an error here

    @cached_property
    def made(self) -> Inputs:
        """How the arguments are made."""
        if isinstance(self.inputs, Arguments):
            given = self.inputs
            return Inputs((), lambda *_: given)
        return parse(self.inputs) if isinstance(self.inputs, str) else of_function(self.inputs)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of the numbers that make a shape, such as `("M", "N")`."""
        return self.made.sizes

    def check(self, shape: Sequence[int] | None = None) -> tuple[int, ...]:
        """`shape` as a tuple. Raises InputsError unless it has a number for each of `sizes`."""
        names = ", ".join(self.sizes)
        if shape is None and self.sizes:
            raise InputsError(f"inputs {self.name!r}: {names} have no numbers: give a shape")
        numbers: Any = () if shape is None else shape
        if isinstance(numbers, (str, Tensor)) or not isinstance(numbers, Sequence):
            kind = f"a shape is a number for each size, not of type {type(shape).__name__}"
            raise InputsError(f"{self.name}: {kind}; several inputs are a tuple, such as (x, w)")
        if len(numbers) != len(self.sizes):
            names = names or "without sizes"
            raise InputsError(f"{self.name}: a shape is {names}, not {tuple(numbers)}")
        return tuple(numbers)

    def arguments(
        self,
        shape: Sequence[int] | None = None,
        dtype: str = "float32",
        layout: str = "packed",
    ) -> Arguments:
        """The arguments at these sizes, the same ones each time.

        shape: a number for each of `sizes`. dtype: of the tensors that name none. layout: of
        matrices, as of `tensors.matrix`. Raises what `check` raises, and InputsError for an unknown
        dtype.
        """
        return self.made.make(self.check(shape), find_dtype(dtype), layout)

    def differ(self, shape: Sequence[int], dtype: str = "float32") -> bool:
        """Whether two calls make other arguments, as a function that sets no seed does."""
        one, two = (self.arguments(shape, dtype) for _ in range(2))
        shape_of: Any = operator.attrgetter("shape")
        shapes, again = (it.map(shape_of) for it in (one, two))
        each = zip(one.tensors, two.tensors, strict=False)
        same = (torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in each)
        return shapes != again or not all(same)

    def elements(self, shape: Sequence[int] | None = None) -> int:
        """The elements of the largest tensor at these sizes, as far as a specification says it."""
        numbers = dict(zip(self.sizes, self.check(shape), strict=True))
        each = self.made.shapes or (self.sizes,)
        return max(math.prod(number_of(size, numbers) for size in sizes) for sizes in each)

    def least_bytes(self, arguments: Arguments, result: object = None) -> int:
        """The `least_bytes` of given arguments and a result.

        Without a result, it has the shape of the reference's and the first argument's dtype.
        """
        if result is None:
            [first, *_] = arguments.tensors
            meta = arguments.map(lambda x: exact(x.to("meta")))
            result = meta.call(self.judged).to(first.dtype)
        return least_bytes(arguments.tensors, result)

    @property
    def judged(self) -> Callable[..., Tensor]:
        """The reference. Raises ValueError for an operation without one."""
        if self.reference is None:
            raise ValueError(f"{self.name} has no reference to judge a result by")
        return self.reference


def exact(x: Tensor) -> Tensor:
    """What a reference is given for `x`: float64 where it holds floating-point numbers."""
    return x.double() if x.is_floating_point() else x


AnyInputs: TypeAlias = (
    Op | str | Tensor | Arguments | Sequence[Any] | Mapping[str, Any] | Callable[..., Any] | None
)


def find_op(inputs: AnyInputs = None) -> Op:
    """The `Op` of whatever a meter takes for inputs; of one matrix `M,N` for None.

    >>> find_op("softmax").sizes, find_op("M,K K,N").sizes
    (('M', 'N'), ('M', 'K', 'N'))
    >>> find_op((torch.ones(3), 1e-6)).arguments().positional
    (tensor([1., 1., 1.]), 1e-06)

    inputs: a tensor; a tuple or list of arguments; a dict of keyword arguments; a specification,
    see `inputs.parse`; a function of sizes, see `inputs.of_function`; an `Op`, which is returned;
    or the name of one: a name of ours, or `module:attribute` for any of these.

    Raises InputsError for a specification that cannot be read, LookupError for a name that leads
    nowhere, TypeError for anything else.
    """
    if isinstance(inputs, Op):
        return inputs
    if inputs is None:
        return Op(DEFAULT)
    if isinstance(inputs, str):
        text = " ".join(inputs.split())
        if is_value(text) or not _NAME.fullmatch(text):
            return Op(text, text)
        return find_op(names.import_named(text, names.OPS, "operation"))
    if isinstance(inputs, (Tensor, Arguments, Sequence, Mapping)):
        return Op("arguments", arguments_of(inputs))
    if not callable(inputs):
        raise TypeError(
            "inputs: tensors, text such as 'M,N', an Op or a function, not " + reprlib.repr(inputs)
        )
    return Op(function_name(inputs).rpartition(".")[2], inputs)


def read_sizes(op: Op, texts: Sequence[str], **defaults: int | None) -> tuple[int, ...]:
    """The numbers for the sizes of `op`: in their order, as `4096`, or by name, as `K=64`.

    >>> read_sizes(find_op("M,K K,N"), ["3", "N=5", "K=4"], M=16)
    (3, 4, 5)

    defaults: of sizes that `texts` does not name. Raises InputsError.
    """
    names = op.sizes
    wanted = ", ".join(names) or "none"
    found: dict[str, int] = {}
    for position, text in enumerate(texts):
        name, equals, number = text.rpartition("=")
        if not equals:
            if position >= len(names):
                raise InputsError(f"{text!r} is one size too many: {op.name!r} has {wanted}")
            name = names[position]
        if name not in names:
            raise InputsError(f"{text!r}: {op.name!r} has no size {name!r}; its sizes: {wanted}")
        if name in found:
            raise InputsError(f"{text!r}: {name} is {found[name]} already")
        found[name] = read_size(number)
    values = {name: value for name, value in defaults.items() if value is not None} | found
    if missing := [name for name in names if name not in values]:
        example = " ".join(f"{name}=1024" for name in missing)
        raise InputsError(f"{', '.join(missing)} of {op.name!r} has no number: add {example}")
    return tuple(values[name] for name in names)
