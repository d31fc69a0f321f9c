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

    shape: of the block, whose sizes are powers of two. registers, lanes, warps: the bases, one for
    each bit, the lowest first: an element as its place in the block, row after row. A base of 0,
    or one that the bases before it add up to, holds another copy.
    """

    shape: Shape
    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]

    @functools.cached_property
    def copies(self) -> tuple[int, ...]:
        """The bits of the register's, lane's and warp's number that only make further copies."""
        rows: list[int] = []  # the bases so far, each without the highest bits of those before it
        masks = []
        for bases in (self.registers, self.lanes, self.warps):
            mask = 0
            for bit, base in enumerate(bases):
                for row in rows:
                    base = min(base, base ^ row)
                if base:
                    rows.append(base)
                else:
                    mask |= 1 << bit
            masks.append(mask)
        return tuple(masks)

    def elements(self, vector: int = 1, copies: bool = False) -> Indices:
        """The first element of each access of `vector` registers, by warp, access and lane.

        copies: with those of registers that hold a copy of another register, for which the compiler
        may use the other one. Shape: (warps, accesses, lanes).
        """
        registers = np.arange(0, 2 ** len(self.registers), vector)
        left_out = 0 if copies else self.copies[0] & ~(vector - 1)
        registers = registers[registers & left_out == 0]
        warps, held, lanes = map(_combined, (self.warps, self.registers, self.lanes))
        return warps[:, None, None] ^ held[registers, None] ^ lanes

    def holders(self) -> Indices:
        """Which lanes of which warps hold the first copy of what they hold: (warps, 1, lanes)."""
        _, lane_copies, warp_copies = self.copies
        lanes = np.arange(2 ** len(self.lanes)) & lane_copies == 0
        warps = np.arange(2 ** len(self.warps)) & warp_copies == 0
        return warps[:, None, None] & lanes


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
    shape, _ = block
    parts = linear.reg_bases, linear.lane_bases, linear.warp_bases
    places = (tuple(int(np.ravel_multi_index(base, shape)) for base in part) for part in parts)
    return Layout(shape, *places)
