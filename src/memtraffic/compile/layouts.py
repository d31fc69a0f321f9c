"""Which element of a block each register of each lane of each warp holds.

Layouts are linear: the element is the exclusive or of one element for each bit of the register's,
the lane's and the warp's number that is set. These elements are the layout's *bases*, which Triton
computes (https://arxiv.org/abs/2505.23819).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from memtraffic.triton_adapter.layouts import Shape, linear_layouts

Indices: TypeAlias = np.ndarray[Any, Any]
_TYPE = re.compile(r"tensor<([\dx]+)x(?:!tt\.ptr<.*?>|\w+), (.*)>$")


@dataclass(frozen=True)
class Layout:
    """A linear layout of a block.

    registers, lanes, warps: the bases, one for each bit, the lowest first: an element as its place
    in the block, row after row. A base of 0, or one that the bases before it add up to, holds
    another copy.
    """

    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]

    @functools.cached_property
    def _held(self) -> tuple[Indices, Indices]:
        """What is held, by warp, register and lane, and whether it is the first copy of that.

        The first is in the lowest register of the lowest lane of the lowest warp that has one.
        """
        warps, lanes, registers = map(_combined, (self.warps, self.lanes, self.registers))
        held = warps[:, None, None] ^ lanes[:, None] ^ registers
        first = np.zeros(held.shape, dtype=bool)
        first.flat[np.unique(held, return_index=True)[1]] = True
        return held.swapaxes(1, 2), first.swapaxes(1, 2)

    def elements(self, vector: int = 1) -> Indices:
        """The first element of each access of `vector` registers, by warp, access and lane.

        Without those of registers that hold a copy of another register, for which the compiler uses
        the other one. Shape: (warps, accesses, lanes).
        """
        held, first = self._held
        return held[:, ::vector][:, first[0, ::vector, 0]]

    def holders(self) -> Indices:
        """Which lanes of which warps hold the first copy of what they hold: (warps, 1, lanes)."""
        return self._held[1][:, :1]


def _combined(bases: Sequence[int]) -> Indices:
    """For each number that has a bit for each base, the exclusive or of the bases of its bits."""
    found = np.zeros(1, dtype=np.int64)
    for base in bases:
        found = np.concatenate([found, found ^ base])
    return found


def read_layouts(ttgir: str, types: Sequence[str]) -> list[Layout | None]:
    """The layout of each block of pointers or numbers, by its type; None of what is no block.

    ttgir: the kernel whose types these are. Raises CompileError as `linear_layouts`.
    """
    found = [_TYPE.match(text) for text in types]
    blocks = [(tuple(map(int, it[1].split("x"))), it[2]) for it in found if it]
    linear = iter(zip(blocks, linear_layouts(ttgir, blocks), strict=True))
    return [_flat(*next(linear)) if it else None for it in found]


def _flat(block: tuple[Shape, str], linear: Any) -> Layout:
    """A layout whose bases are places in the block, row after row, in place of indices."""
    parts = linear.reg_bases, linear.lane_bases, linear.warp_bases
    shape, _ = block
    return Layout(*(tuple(int(np.ravel_multi_index(it, shape)) for it in part) for part in parts))
