"""Which element of a block each register of each lane of each warp holds.

Triton writes a layout in one of several forms. All are linear: the element is the exclusive or of
one element for each bit of the register's, the lane's and the warp's number that is set. These
elements are the layout's *bases* (https://arxiv.org/abs/2505.23819).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from memtraffic.errors import CompileError

Index: TypeAlias = tuple[int, ...]
Indices: TypeAlias = np.ndarray[Any, Any]
HARDWARE = ("register", "lane", "warp")


@dataclass(frozen=True)
class Layout:
    """A linear layout of a block.

    shape: of the block, whose sizes are powers of two. registers, lanes, warps: the bases, one for
    each bit, the lowest first: an element as its place in the block, row after row. A base of 0,
    or one that the bases before it add up to, holds another copy.
    """

    shape: Index
    registers: Index
    lanes: Index
    warps: Index

    @functools.cached_property
    def copies(self) -> tuple[int, int, int]:
        """The bits of the register's, lane's and warp's number that only make further copies."""
        rows: list[int] = []  # the bases so far, reduced, each with a highest bit of its own
        masks = []
        for bases in (self.registers, self.lanes, self.warps):
            mask = 0
            for bit, base in enumerate(bases):
                for row in rows:
                    base = min(base, base ^ row)
                if base:
                    rows.append(base)
                    rows.sort(reverse=True)
                else:
                    mask |= 1 << bit
            masks.append(mask)
        registers, lanes, warps = masks
        return registers, lanes, warps

    def elements(self, vector: int = 1, copies: bool = False) -> Indices:
        """The first element of each access of `vector` registers, by warp, access and lane.

        copies: with those of registers that hold a copy of another register, for which the compiler
        may use the other one. Shape: (warps, accesses, lanes).
        """
        registers = np.arange(0, 2 ** len(self.registers), vector)
        left_out = 0 if copies else self.copies[0] & ~(vector - 1)
        registers = registers[registers & left_out == 0]
        parts = (
            _combined(self.warps, np.arange(2 ** len(self.warps))),
            _combined(self.registers, registers),
            _combined(self.lanes, np.arange(2 ** len(self.lanes))),
        )
        return parts[0][:, None, None] ^ parts[1][:, None] ^ parts[2]

    def holders(self) -> Indices:
        """Which lanes of which warps hold the first copy of what they hold: (warps, 1, lanes)."""
        _, lane_copies, warp_copies = self.copies
        lanes = np.arange(2 ** len(self.lanes)) & lane_copies == 0
        warps = np.arange(2 ** len(self.warps)) & warp_copies == 0
        return warps[:, None, None] & lanes


def _combined(bases: Sequence[int], numbers: Indices) -> Indices:
    """For each number, the exclusive or of the bases of its bits."""
    found = np.zeros_like(numbers)
    for bit, base in enumerate(bases):
        found ^= np.where(numbers >> bit & 1, base, 0)
    return found


def layout_of(text: str, shape: Index, aliases: Mapping[str, str]) -> Layout:
    """The layout of a block of this shape, as Triton writes it.

    >>> layout_of("#ttg.blocked<{sizePerThread = [2], threadsPerWarp = [32], warpsPerCTA = [2], "
    ...     "order = [0]}>", (128,), {})
    Layout(shape=(128,), registers=(1,), lanes=(2, 4, 8, 16, 32), warps=(64,))

    text: an alias, such as `#blocked`, or what one stands for. aliases: by their names.
    Raises CompileError for a form that is not known here.
    """
    bases = _bases(text.strip(), shape, aliases)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    flat = (
        tuple(sum(map(int.__mul__, base, strides)) for base in bases[name]) for name in HARDWARE
    )
    return Layout(shape, *flat)


def _bases(text: str, shape: Index, aliases: Mapping[str, str]) -> dict[str, list[Index]]:
    """The bases of a layout, as indices of the block."""
    text = aliases.get(text, text)
    if found := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", text):
        dim = int(found[1])
        parent = _bases(found[2], (*shape[:dim], 1, *shape[dim:]), aliases)
        bases = {name: [base[:dim] + base[dim + 1 :] for base in parent[name]] for name in HARDWARE}
        bases["register"] = [base for base in bases["register"] if any(base)]
        return bases
    fields = dict(re.findall(r"(\w+) = (\[[\d, \[\]]*\])", text))
    read = {name: _numbers(value) for name, value in fields.items()}
    if text.startswith("#ttg.blocked<"):
        return _fitted(_blocked(read), shape, read["order"])
    if text.startswith("#ttg.linear<"):
        bases = {name: [tuple(base) for base in read.get(name, [])] for name in HARDWARE}
        return _fitted(bases, shape, range(len(shape) - 1, -1, -1))
    raise CompileError(f"the layout {text.split('<')[0]} of a load or store is not known here")


def _numbers(text: str) -> list[Any]:
    """Numbers, or lists of them, between brackets."""
    if "[" in text[1:]:
        return [_numbers(part) for part in re.findall(r"\[[\d, ]*\]", text[1:-1])]
    return [int(number) for number in re.findall(r"\d+", text)]


def _blocked(fields: Mapping[str, Sequence[int]]) -> dict[str, list[Index]]:
    """The bases of a blocked layout, before it is fitted to a shape."""
    order, rank = fields["order"], len(fields["order"])
    names = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
    stride, bases = [1] * rank, {}
    for hardware, name in zip(HARDWARE, names, strict=True):
        found = []
        for axis in order:  # the one whose elements are next to each other comes first
            for _ in range(int(math.log2(fields[name][axis]))):
                found.append(_along(axis, stride[axis], rank))
                stride[axis] *= 2
        bases[hardware] = found
    return bases


def _along(axis: int, place: int, rank: int) -> Index:
    return (*(0,) * axis, place, *(0,) * (rank - axis - 1))


def _fitted(
    bases: dict[str, list[Index]], shape: Index, order: Sequence[int]
) -> dict[str, list[Index]]:
    """The bases for a block of this shape: further registers where the layout is smaller.

    Where it is larger, what lies beyond the block is a copy.
    """

    def inside(base: Index) -> Index:
        return tuple(at if at < size else 0 for at, size in zip(base, shape, strict=True))

    covered = [1] * len(shape)
    for base in itertools.chain(*bases.values()):
        covered = [max(size, 1 << at.bit_length()) for size, at in zip(covered, base, strict=True)]
    fitted = {name: [inside(base) for base in bases[name]] for name in HARDWARE}
    for axis in order:
        size = covered[axis]
        while size < shape[axis]:
            fitted["register"].append(_along(axis, size, len(shape)))
            size *= 2
    return fitted
