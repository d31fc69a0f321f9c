"""The interpreter's memory, which tells a meter of each access, and where in the source it is."""

from __future__ import annotations

import dis
import functools
import os
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from memtraffic.triton_adapter.capture import Configuration
from memtraffic.triton_adapter.reach import Block

Access: TypeAlias = Literal["read", "written"]
BlockKind: TypeAlias = Literal["read", "written", "atomic"]


class Meter(Protocol):
    """What `interpreting` reports to.

    A meter that has `block` is also told of whole blocks, and of how kernels are launched:

    - `launched(kernel, args, options)` is called at the begin of each launch, after `launch`.
    - `block(kind, sites, block)` is one load, store or atomic operation of one program. kind: a
      `BlockKind`. sites: of the call, and of the calls of the functions that it is in, to the
      kernel's.
    """

    def launch(self, kernel: str, tensors: list[torch.Tensor]) -> AbstractContextManager[object]:
        """Entered for the time of one launch. tensors: its arguments as the caller gave them."""

    def bind(self, argument: str, tensor: torch.Tensor) -> None:
        """An argument as the interpreter sees it: on the CPU, where `access` has its addresses.

        Called for each tensor of a tuple; a tensor descriptor stands for its base. The first of a
        launch has number 1 in `access`.
        """

    def access(self, kind: Access, block: Block) -> None:
        """One load or store of one program, of the elements of a block that are not masked."""

    def autotuned(self, kernel: str, launches: Iterable[Configuration]) -> None:
        """An autotuned kernel is launched: `launches` are those of its configurations.

        They must be made one after the other, as they are got.
        """


Position: TypeAlias = tuple[int, int]  # a line and a column


class Site(NamedTuple):
    """Where in the source a call is made: from its first line and column to its last.

    inner: from where to where the calls among its arguments go.
    """

    file: str
    begin: Position
    end: Position
    inner: tuple[tuple[Position, Position], ...] = ()

    def marks(self, file: str, line: int, column: int) -> bool:
        """Whether the compiler marks what this call does with such a place.

        That is where its last argument begins.
        """
        place = line, column
        outside = not any(begin < place < end for begin, end in self.inner)
        return file == self.file and self.begin < place < self.end and outside


rewritten: dict[Any, Any] = {}  # by a kernel's function, what is interpreted


class Memory:
    """Stands for the interpreter's memory: reports each access to a meter, then makes it.

    meter: None for no reports.
    """

    def __init__(self, interpreter: Any) -> None:
        self.real, self._builder = interpreter._interpreter, interpreter.interpreter_builder
        self.meter: Any = None
        self.numbers: Any = 0  # of the arguments that the pointers of an access were made from
        self._kinds = self.real.RMW_OP

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _tell(self, kinds: list[Access], at: Any, mask: Any, size: int, whole: Any = None) -> None:
        """Tells of accesses of the unmasked elements, and, if asked for, of the whole block.

        at: pointers. size: bytes of an element. whole: as what the block is reported.
        """
        if self.meter is None:
            return
        addresses = np.asarray(at).astype(np.int64)
        numbers = np.broadcast_to(np.asarray(self.numbers, dtype=int), addresses.shape)
        where = tuple(self._builder.grid_idx), tuple(self._builder.grid_dim)
        block = Block(addresses, np.asarray(mask, dtype=bool), numbers, size, *where)
        for kind in kinds:
            self.meter.access(kind, block)
        if whole and hasattr(self.meter, "block"):
            self.meter.block(whole, _sites(), block)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._tell(["read"], pointers, mask, np.dtype(dtype).itemsize, "read")
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._tell(["written"], pointers, mask, value.dtype.itemsize, "written")
        return self.real.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._tell(["read", "written"], pointers, mask, value.dtype.itemsize, "atomic")
        kinds = self._kinds
        if operation == kinds.FADD and value.dtype.itemsize == 2:
            return self._added(pointers, value, mask)
        if value.dtype.kind == "f" and operation in (kinds.AND, kinds.OR, kinds.XOR, kinds.XCHG):
            bits = value.view(f"u{value.dtype.itemsize}")
            return self.real.atomic_rmw(operation, pointers, bits, mask, order).view(value.dtype)
        return self.real.atomic_rmw(operation, pointers, value, mask, order)

    def _added(self, pointers: Any, value: Any, mask: Any) -> Any:
        """What there was before numbers of 16 bits are added, one after the other."""
        kind = torch.float16 if value.dtype.kind == "f" else torch.bfloat16
        terms = torch.from_numpy(value.reshape(-1).view(np.int16)).view(kind)
        found, every = np.zeros(value.size, np.int16), np.ones(1, dtype=bool)
        for i in np.flatnonzero(mask):
            here = pointers.reshape(-1)[i : i + 1]
            found[i : i + 1] = before = self.real.load(here, every, found[:1], found.dtype)
            after = torch.from_numpy(before).view(kind) + terms[i]
            self.real.store(here, after.view(torch.int16).numpy(), every)
        return found.view(value.dtype).reshape(value.shape)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        every = np.ones(pointers.shape, dtype=bool)
        self._tell(["read"], pointers, every, value.dtype.itemsize, "atomic")
        found = self.real.atomic_cas(pointers, expected, value, order)
        self._tell(["written"], pointers, found == expected, value.dtype.itemsize)
        return found


def _sites() -> tuple[Site, ...]:
    """The call that is being made in a kernel's source, and those of the functions it is in."""
    kernels = {getattr(function, "__code__", None) for function in rewritten.values()}
    frames = [frame for frame, _ in traceback.walk_stack(None) if frame.f_code in kernels]
    return tuple(_calls(it.f_code, it.f_code.co_filename)[it.f_lasti // 2] for it in frames)


@functools.cache
def _calls(code: CodeType, path: str) -> list[Site]:
    """What each instruction of a function belongs to, which for some of them is a call.

    path: of its file, by which code of equal text differs.
    """
    file = os.path.basename(path)
    spans = [((a or 0, c or 0), (b or 0, d or 0)) for a, b, c, d in code.co_positions()]
    steps = (step for step in dis.get_instructions(code) if step.opname.startswith("CALL"))
    calls = {spans[step.offset // 2] for step in steps}

    def inner(begin: Position, end: Position) -> tuple[tuple[Position, Position], ...]:
        within = (it for it in calls if begin <= it[0] and it[1] <= end and it != (begin, end))
        return tuple(sorted(within))

    sites = {span: Site(file, *span, inner(*span)) for span in set(spans)}
    return [sites[span] for span in spans]
