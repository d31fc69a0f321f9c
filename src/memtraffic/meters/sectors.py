"""Predicts what a GPU's counters say of loads and stores: requests and sectors, by line of source.

A warp's load or store is one request. It touches some sectors of 32 bytes of memory, and each of
them is fetched whole. Three things decide how many: which element each lane holds, how many bytes
it moves at once, and which addresses and masks the elements have. The first two are read from what
the compiler wrote for this very launch, the last from Triton's interpreter. Nothing is measured.

What the hardware does is modelled as follows. An instruction of a warp none of whose lanes is
active makes no request. An asynchronous copy (cp.async) is a load; those that a pipelined loop
would make past its end are not active. Lanes that hold copies of an element all load it, and one of
them stores it. A number that is no block is loaded by every lane of every warp, and stored by one
lane.

Of AMD's GPUs the same is said, with whole lines of the vector cache for sectors. That is not
confirmed on hardware: no such GPU has counted it.
"""

from __future__ import annotations

import functools
import linecache
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from torch import Tensor

from memtraffic import device
from memtraffic.compile.accesses import CompiledAccess, Kind, delayed_loads, describe, read_accesses
from memtraffic.compile.compiler import compiled_code
from memtraffic.compile.launches import launch_of
from memtraffic.errors import CountError, NoKernelError
from memtraffic.functions import as_function, check_finished, function_name
from memtraffic.gpus import Gpu, find_gpu
from memtraffic.meters.count import TrafficMeter, metered
from memtraffic.op import AnyInputs, find_op
from memtraffic.tensors import SECTOR_BYTES
from memtraffic.triton_adapter.capture import Configuration
from memtraffic.triton_adapter.launch import Grid, Kernel
from memtraffic.triton_adapter.memory import BlockKind, Site
from memtraffic.triton_adapter.reach import Block

Array: TypeAlias = np.ndarray[Any, Any]

NOWHERE = np.int64(2**62)  # the sector of a lane that is masked: above all others
# What Nsight Compute calls the totals.
COUNTERS = {
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
}
UNCONFIRMED = "Not confirmed on hardware: no GPU by AMD has counted them."
TABLE = ("kernel", "line", "kind", "bits", "requests", "sectors", "sectors_per_request")


@dataclass(frozen=True)
class AccessSectors:
    """What the warps of one launch do at one load or store of the source.

    launch: its number, from 0. file, line: where the load or store is, and `source`, what stands
    there. bits: what an instruction moves for each lane; 0 for an access that the compiler left
    out or merged with another. wanted_bytes: of the elements whose mask is true, each time.
    """

    launch: int
    kernel: str
    kind: Kind
    file: str
    line: int
    source: str
    bits: int
    requests: int
    sectors: int
    wanted_bytes: int
    sector_bytes: int = SECTOR_BYTES

    @property
    def sectors_per_request(self) -> float:
        """Sectors that a request touches on average; 0 without a request."""
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the sectors."""
        return self.sector_bytes * self.sectors

    def __str__(self) -> str:
        return (
            f"{self.kernel}, {self.file}:{self.line}, {self.kind} of {self.bits} bits a lane: a "
            f"request touches {self.sectors_per_request:.4g} sectors ({self.requests:,} requests, "
            f"{self.sectors:,} sectors, {self.wanted_bytes:,} bytes wanted and "
            f"{self.fetched_bytes:,} moved), at `{self.source}`"
        )


def _total(kind: Kind, name: str, about: str) -> Any:
    """A property of `Sectors`: the sum of a number of its accesses of a kind."""

    def total(found: Sectors) -> int:
        return sum(getattr(access, name) for access in found.accesses if access.kind == kind)

    return property(total, doc=about)


@dataclass
class Sectors:
    """What the warps of a function's kernels do, one entry for each load and store of the source.

    others: names of the operations of PyTorch that also ran, of whose kernels nothing is known.
    atomics: the lines with atomic operations, which other counters count. assumed: the autotuned
    kernels of whose configurations the first was taken, as what a GPU chooses is not known.
    confirmed: whether GPUs of the vendor have counted what was predicted for them.
    """

    target: str
    accesses: list[AccessSectors]
    others: list[str] = field(default_factory=list)
    atomics: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    confirmed: bool = True

    load_requests = _total("load", "requests", "Loads of warps, each made by at least one lane.")
    load_sectors = _total("load", "sectors", "Sectors that loads touch, each one's by itself.")
    store_requests = _total("store", "requests", "Stores of warps, each made by at least one lane.")
    store_sectors = _total("store", "sectors", "Sectors that stores touch, each one's by itself.")

    @property
    def totals(self) -> dict[str, int]:
        """The four totals by name: what the counters of `COUNTERS` say of a GPU's launches."""
        return {name: getattr(self, name) for name in COUNTERS}

    def as_dict(self) -> dict[str, Any]:
        """The totals, and the fields of each access, for JSON."""
        accesses = self.frame.to_dict("records")
        return {"target": self.target, **self.totals, **vars(self), "accesses": accesses}

    @property
    def frame(self) -> pd.DataFrame:
        """A DataFrame with a row for each access.

        Columns: the fields of `AccessSectors`, `sectors_per_request` and `fetched_bytes`.
        """
        derived = "sectors_per_request", "fetched_bytes"
        rows = [vars(it) | {name: getattr(it, name) for name in derived} for it in self.accesses]
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        if not self.accesses:
            return f"for {self.target}: no load or store of a Triton kernel"
        frame = self.frame
        frame["line"] = frame["file"] + ":" + frame["line"].astype(str)
        numbers = ["requests", "sectors", "wanted_bytes", "fetched_bytes"]
        formats = dict.fromkeys(numbers, "{:,}".format) | {"sectors_per_request": "{:.4g}".format}
        columns = [*TABLE, "wanted_bytes", "fetched_bytes"]
        table = frame[columns].to_string(index=False, formatters=formats)
        totals = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in self.totals.items())
        notes = {
            f"sectors are cache lines here. {UNCONFIRMED}": not self.confirmed,
            f"not counted: atomic operations at {', '.join(self.atomics)}": self.atomics,
            f"assumed of autotuned kernels: {'; '.join(self.assumed)}": self.assumed,
            f"not counted: what PyTorch runs for {', '.join(self.others)}": self.others,
        }
        there = (note for note, holds in notes.items() if holds)
        return "\n".join([table, f"for {self.target}: {totals}", *there])


def sectors(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    shape: Sequence[int] | None = None,
    *,
    target: str | Gpu = "sm_90",
    dtype: str = "float32",
    layout: str = "packed",
    config: int | None = None,
) -> Sectors:
    """Predicts the requests and the sectors of each load and store of the kernels of `fn`.

    >>> from memtraffic.kernels.softmax import masked
    >>> found = sectors(masked.softmax, shape=(8, 781), layout="every other")
    >>> found.load_requests, found.load_sectors, found.store_sectors
    (200, 1712, 956)

    fn, inputs, shape, dtype, layout: as for `memtraffic.count`. target: a GPU, or the name of one,
    such as "sm_90" or "H200", which need not be here. `fn` plans its launches for it, and each is
    compiled for it as Triton would: with the alignment of these tensors, and with what is known of
    these numbers. A tensor's memory is taken to start with a sector, as what PyTorch allocates
    does. An autotuned kernel has the configuration `config`, as for `count`, or that which it chose
    on a GPU before, in this process; without one, the first that it would try.

    Raises UnknownGpuError for an unknown target; NoKernelError if `fn` launches no kernel;
    CountError for one that copies by descriptor (TMA), waits for other programs or reads what they
    add to, or whose accesses cannot be told apart in the compiled code, or of which NVIDIA's
    assembler may leave some out or move them behind a branch; and what `count` and `resources`
    raise.
    """
    gpu = find_gpu(target)
    function, arguments = as_function(fn), find_op(inputs).arguments(shape, dtype, layout)
    meter = _SectorMeter(gpu, config)
    with metered(fn, meter, gpu):
        check_finished(arguments.call(function), CountError)
    if not meter.kernels:
        hint = device.stand_in_hint()
        raise NoKernelError(f"{function_name(fn)} launched no Triton kernel{hint}")
    return meter.sectors()


# ---- the hardware


def count_sectors(addresses: Array, active: Array, unit: int = SECTOR_BYTES) -> tuple[int, int]:
    """The requests of some instructions of a warp, and the sectors that these touch.

    >>> lanes = np.arange(32)
    >>> count_sectors(4 * lanes, lanes < 20), count_sectors(8 * lanes, lanes < 0)
    ((1, 3), (0, 0))

    addresses: of the first byte for each lane, of shape (..., lanes); no lane's bytes reach into
    another sector. active: whether the lane takes part, in a shape that fits. unit: bytes of a
    sector, a power of two.
    """
    places = np.where(active, addresses >> (unit.bit_length() - 1), NOWHERE)
    places = places.reshape(-1, places.shape[-1])
    places.sort(axis=1)
    requests = int((places[:, 0] != NOWHERE).sum())
    further = (places[:, 1:] != places[:, :-1]) & (places[:, 1:] != NOWHERE)
    return requests, requests + int(further.sum())


def count_access(
    access: CompiledAccess, warps: int, gpu: Gpu, itemsize: int, addresses: Array, mask: Array
) -> tuple[int, int]:
    """The requests and sectors of a block that a compiled access moves.

    warps: of the kernel. itemsize: bytes of an element. addresses, mask: in bytes, and of the
    block's elements. Raises CountError where an instruction does not move what these say.
    """
    store, lanes = access.kind == "store", gpu.warp_size
    if access.layout is None:
        first = last = np.zeros((1 if store else warps, lanes), dtype=np.int64)
        taking_part = np.ones(lanes, dtype=bool)  # as much as if one lane stored
        moved = itemsize
    else:
        vector = max(1, access.bits // (8 * itemsize))
        elements = access.layout.elements(vector)
        taking_part = np.broadcast_to(access.layout.holders() if store else True, elements.shape)
        first = elements.reshape(-1, elements.shape[-1])
        taking_part = taking_part.reshape(first.shape)
        step = functools.reduce(operator.xor, access.layout.registers[: vector.bit_length() - 1], 0)
        last = first ^ step
        moved = vector * itemsize
    begins = addresses[first]
    active = mask[first] & taking_part
    if moved > itemsize:
        same = (addresses[last] == begins + (moved - itemsize)) & mask[last]
        if not same[active].all():
            raise CountError("an instruction moves elements that are not next to each other")
    if gpu.vendor == "nvidia" and (begins[active] % moved).any():
        raise CountError(f"an address is no multiple of the {moved} bytes of an access")
    if access.copies and 2 * moved == gpu.sector_bytes:  # by 16 bytes, each two lanes a sector
        halves = begins - np.arange(lanes) % 2 * moved
        if (halves[active] % gpu.sector_bytes).any():
            raise CountError(
                f"asynchronous copies of {moved} bytes begin inside a sector, of which a GPU then "
                "fetches some twice: num_stages=1 makes ordinary loads"
            )
    return count_sectors(begins, active, gpu.sector_bytes)


# ---- what a launch does


class _Place:
    """A load or store of the source during one launch: what it is in the compiled kernel."""

    def __init__(
        self, site: Site, kind: Kind, compiled: list[CompiledAccess], warps: int, gpu: Gpu
    ) -> None:
        self.site, self.kind, self.compiled, self.warps = site, kind, compiled, warps
        self.gpu = gpu
        self.requests = self.sectors = self.wanted_bytes = 0
        self.program: Grid | None = None
        self.times: Counter[Grid] = Counter()  # that each program makes it
        self.blocks: list[tuple[Array, Array]] = []  # that it has moved, unless it is in a loop
        self.types = {access.type for access in compiled}
        self.in_loop = any(access.in_loop for access in compiled)

    def __str__(self) -> str:
        return f"the {self.kind} of {self.site.file}:{self.site.begin[0]}"

    def add(self, program: Grid, block: tuple[Array, Array], itemsize: int) -> None:
        """Takes a block that a program moves.

        Raises CountError if it is not known which of the compiled accesses moves it.
        """
        self.wanted_bytes += itemsize * int(block[1].sum())
        self.times[program] += 1
        self.itemsize = itemsize
        if self.in_loop and len(self.types) > 1:  # made again, perhaps, for another layout
            raise CountError(f"its {len(self.compiled)} instructions are spread differently")
        if self.in_loop:
            self.give(0, block)
        elif self.compiled:
            if self.blocks and program != self.program:
                self.settle()
            self.program = program
            self.blocks.append(block)

    def settle(self) -> None:
        """Gives the blocks of a program to the compiled accesses that move them.

        These are one for each time that the source's is made, as in an unrolled loop. Or the
        compiler has made it once, before a loop without changes.
        """
        blocks, self.blocks, number = self.blocks, [], len(self.compiled)
        if number == 1 and all(np.array_equal(blocks[0], block) for block in blocks):
            blocks = blocks[:1]
        if len(blocks) > number or (len(blocks) < number and len(self.types) > 1):
            raise CountError(f"a program makes it {len(blocks)} times, its instructions {number}")
        for number, block in enumerate(blocks):
            self.give(number, block)

    def give(self, number: int, block: tuple[Array, Array]) -> None:
        """Counts a block that the compiled access of this number moves."""
        how = self.compiled[number], self.warps, self.gpu, self.itemsize
        requests, sectors = count_access(*how, *block)
        self.requests += requests
        self.sectors += sectors

    def finish(self, launch: int, kernel: str, path: str) -> AccessSectors:
        """What this place did, once the launch has ended."""
        if self.blocks:
            self.settle()
        line = self.site.begin[0]
        where = self.site.file, line, linecache.getline(path, line).strip()
        bits = max((access.bits for access in self.compiled), default=0)
        counts = self.requests, self.sectors, self.wanted_bytes, self.gpu.sector_bytes
        return AccessSectors(launch, kernel, self.kind, *where, bits, *counts)


class _SectorMeter(TrafficMeter):
    """Compiles each launch, and counts the sectors of each block of the interpreted kernel."""

    def __init__(self, gpu: Gpu, config: int | None = None) -> None:
        super().__init__(trace=False, config=config)
        self.gpu = gpu
        self.found: list[AccessSectors] = []
        self.kernels: list[str] = []  # of each launch
        self.atomics: list[str] = []
        self.assumed: list[str] = []
        # By launch, as text, and function: one defined in a function may be several.
        self.code: dict[Any, tuple[list[CompiledAccess], int]] = {}

    def sectors(self) -> Sectors:
        """What it has seen."""
        names = (op.name for op in self.traffic.ops if op.name not in self.kernels)
        others, atomics = [*dict.fromkeys(names)], [*dict.fromkeys(self.atomics)]
        confirmed, assumed = self.gpu.vendor == "nvidia", [*dict.fromkeys(self.assumed)]
        return Sectors(self.gpu.target, self.found, others, atomics, assumed, confirmed)

    @contextmanager
    def launch(self, kernel: str, tensors: list[Tensor]) -> Iterator[None]:
        self.places: dict[tuple[Site, ...], _Place] = {}
        self.programs: set[Grid] = set()
        self.updated: set[int] = set()  # addresses of atomic operations
        self.starts: list[int] = []  # addresses of the memory of tensors
        with super().launch(kernel, tensors):
            yield
            self._check_matched(kernel)
            for place in self.places.values():
                with self._named(kernel, place):
                    self.found.append(place.finish(len(self.kernels), kernel, self.path))
        self.kernels.append(kernel)

    def autotuned(self, kernel: str, launches: Iterable[Configuration]) -> None:
        [first, *others] = launches
        super().autotuned(kernel, [first])
        if others:
            self.assumed.append(
                f"{kernel} with {first.config}, of {1 + len(others)} to choose from"
            )

    def bind(self, name: str, tensor: Tensor) -> None:
        super().bind(name, tensor)
        self.starts.append(tensor.untyped_storage().data_ptr())

    def _aligned(self, addresses: Array) -> Array:
        """The addresses if each tensor's memory began with a sector: that of a CPU need not."""
        if not any(start % self.gpu.sector_bytes for start in self.starts):
            return addresses
        starts = np.sort(np.array([0, *self.starts], dtype=addresses.dtype))
        begin = starts[np.searchsorted(starts, addresses, side="right") - 1]
        return addresses + (-begin) % self.gpu.sector_bytes

    def launched(self, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        launch = launch_of(kernel, args, options)
        if (key := (repr(launch), kernel.fn)) not in self.code:
            [code] = compiled_code([(launch, self.gpu)])
            self.code[key] = read_accesses(code), delayed_loads(code)
        self.compiled, self.delayed = self.code[key]
        self.warps = launch.options["num_warps"]
        self.path = kernel.fn.__code__.co_filename

    def block(self, kind: BlockKind, sites: tuple[Site, ...], block: Block) -> None:
        self.programs.add(block.program)
        mask = np.broadcast_to(block.mask, block.addresses.shape).reshape(-1)
        addresses = self._aligned(block.addresses.reshape(-1))
        touched = addresses[mask]
        if kind == "atomic":
            self.updated.update(touched.tolist())
            if sites:
                self.atomics.append(f"{sites[0].file}:{sites[0].begin[0]}")
            return
        if sites not in self.places:
            access: Kind = "load" if kind == "read" else "store"
            matching = self._matching(access, sites)
            self.places[sites] = _Place(sites[0], access, matching, self.warps, self.gpu)
        place = self.places[sites]
        assert self.kernel is not None
        with self._named(self.kernel.op.name, place):
            if kind == "read" and self.updated and not self.updated.isdisjoint(touched.tolist()):
                raise CountError(
                    "programs add to what it reads, and their order decides what it is"
                )
            place.add(block.program, (addresses, mask), block.itemsize)

    def _matching(self, kind: Kind, sites: tuple[Site, ...]) -> list[CompiledAccess]:
        """The compiled accesses of a call in the source."""
        return [
            it
            for it in self.compiled
            if it.kind == kind
            and len(it.where) == len(sites)
            and all(site.marks(*place) for site, place in zip(sites, it.where, strict=True))
        ]

    def _check_matched(self, kernel: str) -> None:
        """Raises CountError if accesses of the source and of the compiled kernel do not meet."""
        alike = all(it.times.keys() == self.programs for it in self.places.values())
        # That all programs come to a loop's accesses says that none of them passes the loop by.
        if self.delayed and not (alike and any(access.in_loop for access in self.compiled)):
            raise CountError(
                f"{kernel}: in the machine code, {self.delayed} loads come after a branch, and "
                "it is not known which programs take it"
            )
        met = {id(access) for place in self.places.values() for access in place.compiled}
        left = [access for access in self.compiled if id(access) not in met]
        for place in self.places.values():
            missing = [access for access in left if access.kind == place.kind]
            if missing and not place.compiled:
                raise CountError(
                    f"{kernel}: {place} is not found in the compiled kernel, which has one of "
                    f"{describe(missing[0].where)}"
                )

    @contextmanager
    def _named(self, kernel: str, place: _Place) -> Iterator[None]:
        """Context manager: an error inside says at which load or store it was."""
        try:
            yield
        except CountError as error:
            raise CountError(f"{kernel}: {place} cannot be counted: {error}") from None
