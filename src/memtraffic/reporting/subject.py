"""What a page is about, and the least that a function could move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memtraffic.functions import check_finished, function_name
from memtraffic.inputs import Arguments, Inputs
from memtraffic.meters.count import Traffic, count
from memtraffic.meters.formula import Formula, plan, polynomial, solve

Shape: TypeAlias = tuple[int, ...]


@dataclass
class Subject:
    """What a page is about, and what its sections found so far.

    shape: the sizes to compile and to measure at. formulas: of each pass; none where there is no
    formula. succeeded: whether any section has something to show.
    """

    fn: Callable[..., Any]
    made: Inputs
    dtype: str
    backward: bool
    shape: Shape
    formulas: tuple[Formula, ...] = ()
    succeeded: bool = False

    def at(self, shape: Shape) -> str:
        """A shape in words, such as "with M = 3, N = 5"."""
        sizes = zip(self.made.sizes, shape, strict=True)
        return "with " + (", ".join(f"{name} = {n}" for name, n in sizes) or "these inputs")

    def arguments(self, shape: Shape) -> Arguments:
        """What the function is called with at a shape."""
        return self.made.arguments(shape, self.dtype)

    def counted(self, shape: Shape, trace: bool = False) -> tuple[Traffic, ...]:
        """The traffic of each pass at a shape. trace: as for `count`."""
        options: Any = {"inputs": self.arguments(shape), "trace": trace}
        options |= {"backward": self.backward}
        found: Any = count(self.fn, **options)
        return found if self.backward else (found,)

    def small(self) -> Iterable[Shape]:
        """Shapes for a small case: the smallest first."""
        if self.formulas:
            return [min(self.formulas[0].fitted, key=smallness)]
        rounds = plan(len(self.made.sizes))
        every = {shape for sides in rounds for side in sides for shape in side}
        return sorted(every, key=smallness)


def smallness(shape: Shape) -> tuple[bool, int]:
    """What shapes for a small case are sorted by: sizes of 1 show too little."""
    return 1 in shape, math.prod(shape)


@dataclass
class Watched:
    """A function, and the elements of its arguments and results by the shape that it is called at.

    roles: which tensors among the arguments are read, and which are written.
    """

    subject: Subject
    shape: Shape = ()
    roles: list[tuple[bool, bool]] = field(default_factory=list)
    seen: dict[Shape, tuple[int, int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, _, name = function_name(self.subject.fn).rpartition(".")
        vars(self).update(__module__=module, __qualname__=name)  # what messages call it

    @property
    def inputs(self) -> Inputs:
        """The inputs of the subject, which say at which shape they are made."""

        def make(shape: Shape, dtype: str, layout: str) -> Arguments:
            self.shape = shape
            return self.subject.made.make(shape, dtype, layout)

        return replace(self.subject.made, make=make)

    def __call__(self, *args: Any, **options: Any) -> Any:
        arguments = Arguments(args, options)
        result = arguments.call(self.subject.fn)
        self.seen[self.shape] = once(self.subject.fn, arguments, result, self.roles, Tensor.numel)
        return result

    def least(self, which: int, found: Formula) -> list[str]:
        """The least that a pass reads and writes, as formulas."""
        columns = [(0, 1), (2, 3)][which]
        texts = []
        for column in columns:
            elements = {
                shape: self.seen[shape][column] for shape in (*found.fitted, *found.checked)
            }
            like: Any = found  # which has sizes and shapes, as `Counts` has
            solved = solve(elements, like)
            texts.append("no such sum" if solved is None else polynomial(solved))
        return texts


def once(
    fn: Any,
    arguments: Arguments,
    result: Any,
    roles: Sequence[tuple[bool, bool]],
    size: Callable[[Tensor], int],
) -> tuple[int, int, int, int]:
    """The least that is moved: read and written by the forward pass, and by the backward pass.

    roles: of each tensor among the arguments, whether it is read and whether it is written. size:
    of a tensor, in elements or in bytes. The backward pass reads what the forward pass reads and
    the gradients of its results, and writes those of what it reads.
    """
    given = arguments.tensors
    held = {x.untyped_storage().data_ptr() for x in given}
    new = [x for x in all_tensors([result]) if x.untyped_storage().data_ptr() not in held]
    roles = roles or [(True, False)] * len(given)
    read = [x for x, (is_read, _) in zip(given, roles, strict=True) if is_read]
    written = [x for x, (_, is_written) in zip(given, roles, strict=True) if is_written]
    read += list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
    written += new
    floats = [sum(size(x) for x in xs if x.is_floating_point()) for xs in (read, written)]
    reads, writes = sum(map(size, read)), sum(map(size, written))
    return reads, writes, reads + floats[1], floats[0]


def find_roles(fn: Callable[..., Any], arguments: Arguments) -> list[tuple[bool, bool]]:
    """Whether `fn` reads and writes each tensor among its arguments.

    >>> import torch
    >>> find_roles(lambda y, x: y.copy_(x), Arguments((torch.zeros(2), torch.ones(2))))
    [(False, True), (True, False)]

    It is run twice. What it changes, it writes. What it changes to the same from other numbers, it
    does not read. Raises TypeError for a result whose work is still to be done, such as a
    generator.
    """
    with torch.no_grad():
        first, second = (arguments.map(Tensor.clone) for _ in range(2))
        check_finished(first.call(fn))
        pairs = zip(arguments.tensors, first.tensors, strict=True)
        written = [not torch.equal(before, after) for before, after in pairs]
        if not any(written):
            return [(True, False) for _ in written]
        for x, is_written in zip(second.tensors, written, strict=True):
            if is_written:
                x.fill_(float("nan") if x.is_floating_point() else 1)
        second.call(fn)
        same = map(torch.equal, first.tensors, second.tensors)
        return [(not (w and s), w) for w, s in zip(written, same, strict=True)]


def all_tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from all_tensors(value.values())
        elif isinstance(value, (tuple, list)):
            yield from all_tensors(value)
