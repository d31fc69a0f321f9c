"""Which argument of a kernel a pointer was made from, and what memory that argument has.

The interpreter's pointers are addresses. Their handle has the number of the argument as an
attribute, which pointers that are made of them keep. A pointer that went through memory, or was an
integer meanwhile, has none: it may reach all arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from memtraffic.errors import AccessError
from memtraffic.tensors import span
from memtraffic.triton_adapter.launch import Grid

Numbers: TypeAlias = np.ndarray[Any, Any]

NUMBER = "argument"  # the attribute: one number for all pointers of a block, or for each its own
# What makes pointers of pointers, without arithmetic.
MOVES = "bitcast broadcast cat expand_dims gather join reshape select splat split trans unsplat"
ADDRESS_TYPES = torch.int64, torch.uint64  # of a tensor that may hold some


def keep_numbers(interpreter: Any) -> None:
    """Lets the interpreter's pointers keep the number of their argument."""
    builder = interpreter.InterpreterBuilder
    for name in (f"create_{move}" for move in ("addptr", *MOVES.split())):
        if method := getattr(builder, name, None):
            setattr(builder, name, _keeping(method, moves=name != "create_addptr"))
    for kind in ("TensorDescHandle", "BlockPointerHandle"):  # the latter until Triton 3.8
        if owner := getattr(interpreter, kind, None):
            owner.materialize_pointers = _of_base(owner.materialize_pointers)


def _keeping(method: Callable[..., Any], moves: bool) -> Callable[..., Any]:
    """moves: that it does with numbers what it does with pointers."""

    @functools.wraps(method)
    def make(self: Any, *args: Any) -> Any:
        found = method(self, *args)
        given = [it.attr.get(NUMBER, 0) for it in args if _is_pointer(it)]
        if given:
            numbers = given[0]
            if moves and not all(isinstance(it, int) and it == numbers for it in given):
                numbers = [it.data for it in _each(method(self, *map(_numbers_of, args)))]
            for i, pointers in enumerate(_each(found)):
                pointers.attr[NUMBER] = numbers[i] if isinstance(numbers, list) else numbers
        return found

    return make


def _of_base(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def materialize(self: Any, *args: Any) -> Any:
        pointers, masks = method(self, *args)
        pointers.attr.update(self.base.attr)
        return pointers, masks

    return materialize


def _is_pointer(value: Any) -> bool:
    return hasattr(value, "attr") and bool(value.dtype.scalar.is_ptr())


def _numbers_of(value: Any) -> Any:
    """The numbers of pointers, in their place; what is no pointer as it is."""
    if not _is_pointer(value):
        return value
    numbers = np.broadcast_to(np.uint64(value.attr.get(NUMBER, 0)), value.data.shape)
    return type(value)(numbers, value.dtype)


def _each(found: Any) -> Any:
    return found if isinstance(found, tuple) else (found,)


class Block(NamedTuple):
    """What one load, store or atomic operation of a program touches: a block of elements.

    addresses: of each element's first byte. mask: whether it is touched. numbers: of the argument
    that the pointer to it was made from, 0 for none. itemsize: bytes of an element. program, grid:
    its indices, and how many there are.
    """

    addresses: Numbers
    mask: Numbers
    numbers: Numbers
    itemsize: int
    program: Grid
    grid: Grid


class Argument(NamedTuple):
    """A tensor among a kernel's arguments. start, end: of the memory that pointers to it reach."""

    name: str
    tensor: torch.Tensor
    start: int
    end: int

    def element(self, address: int) -> int:
        """The element, counted from the first, that an address is that of."""
        return (address - self.tensor.data_ptr()) // self.tensor.element_size()


class Reach:
    """The memory that the arguments of one launch have.

    A pointer reaches what the tensor that it was made from spans, and what other arguments span of
    the same storage. One that was made from no argument, but from a number, reaches them all.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel, self.arguments = kernel, list[Argument]()

    def bind(self, name: str, tensor: torch.Tensor) -> None:
        """Adds an argument, the next in number.

        A dimension without a stride does not say how far the kernel goes: as far as memory does.
        """
        start = tensor.data_ptr()
        end = start + span(tensor) * tensor.element_size()
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            storage = tensor.untyped_storage()
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.arguments.append(Argument(name, tensor, start, end))

    def split(self, kind: str, block: Block) -> Iterator[tuple[str, Numbers]]:
        """The unmasked elements by the argument they lie in, as bytes from its first element.

        Raises AccessError for what a pointer does not reach, unless it was made from a number and
        an argument may hold addresses.
        """
        addresses, numbers = block.addresses[block.mask], block.numbers[block.mask]
        for number in np.unique(numbers):
            left = addresses[numbers == number]
            for each in self._reached(number):
                inside = (left >= each.start) & (left < each.end)
                if inside.any():
                    yield each.name, left[inside] - each.tensor.data_ptr()
                    left = left[~inside]
            integers = (it for it in self.arguments if it.tensor.dtype in ADDRESS_TYPES)
            if left.size and (number or not any(integers)):
                raise AccessError(self._message(kind, left, number, block.program))

    def _reached(self, number: int) -> list[Argument]:
        if not 0 < number <= len(self.arguments):
            return [] if number else self.arguments
        own = self.arguments[number - 1]
        memory = own.tensor.untyped_storage().data_ptr()
        same = (it for it in self.arguments if it.tensor.untyped_storage().data_ptr() == memory)
        return [own, *same]

    def _message(self, kind: str, outside: Numbers, number: int, program: tuple[int, ...]) -> str:
        verb = "reads" if kind == "read" else "writes"
        what = f"{self.kernel} {verb} {outside.size} elements outside"
        if not 0 < number <= len(self.arguments):
            return f"{what} the tensors it was given, in program {program}"
        own, address = self.arguments[number - 1], int(outside[0])
        where = f"element {own.element(address)} of {span(own.tensor)}"
        for each in self.arguments:
            if each.start <= address < each.end:
                where += f", which is element {each.element(address)} of {each.name}"
        return (
            f"{what} {own.name}, of shape {tuple(own.tensor.shape)}: program {program} {verb} "
            f"{where}; is a mask missing?"
        )
