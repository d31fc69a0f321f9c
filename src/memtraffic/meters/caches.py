"""Predicts what L1 and L2 keep: the bytes between L1, L2 and DRAM, from the sectors of a launch.

The sectors that each load and store touches are replayed through a model of the caches, in an order
in which the programs may run. What it assumes:

- Caches start empty at each launch, as under Nsight Compute. They drop the line that was used the
  longest ago, and know which of its four sectors they hold [forum].
- Programs go to the SMs in turn, as many as are resident; the next one starts where one ends, up to
  `SPREAD` of a program's time late, drawn once. A program takes its time for the sectors that come
  from DRAM; whatever else it does takes `OTHER_TIME` of that.
- L1 takes what shared memory leaves [guide], of which `L1_SHARE` is of use. A store writes through
  it and leaves its sectors there, as in the model of Accel-Sim [accel].
- L2 has two partitions, and SMs read through the nearer one [a100], so that a sector may be held
  twice: `L2_SHARE` is of use. A store fetches nothing, and reaches DRAM once its line is dropped:
  what is still in L2 at the end of the launch is not written.
- Of stores of one instruction after the other to a sector, half reach L2 as a write of their own.

The least and the most are those of replays with all of both caches and with `LEAST` of them, and
`SLACK` beyond; with `STRAY_BYTES` for what no load or store makes, such as code and page tables;
and with a write for each request that stores to a sector.

`tests/meters/test_caches.py` compares this with 24 launches that an H200 counted. Seven of them
tuned `L1_SHARE`, `L2_SHARE`, `OTHER_TIME` and `SPREAD`, 14 set `SLACK`; that half of the stores to
one sector are merged was read off the other ten. From L2 to L1, 21 are right within 1 %, and 3 %
too little to 19 % too much is said of rows or weights that L1 keeps in part; from DRAM, 22 are
right within 1 % and two within 6 %; to DRAM, more than a few bytes are within 7 %, but 15 % where
L2 holds nearly everything; writes to L2 within 6 %. All numbers but one are within the bounds.

Not modelled: hints to evict, sets, other replacement, the order in which SMs become free, atomic
operations. Of an A100 and an H100, nothing was compared.

- [guide] CUDA C++ Programming Guide, "Compute Capabilities": the unified data cache of an SM, and
  the sizes that shared memory may have of it
- [a100] NVIDIA, "A100 Tensor Core GPU Architecture", its section on L2; taken for H100, H200, too
- [forum] https://forums.developer.nvidia.com/t/pascal-l1-cache/49571/14
- [accel] M. Khairy et al., "Accel-Sim", ISCA 2020, configurations of the simulator
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np

from memtraffic.errors import CountError
from memtraffic.gpus import KIB, Gpu
from memtraffic.tensors import SECTOR_BYTES
from memtraffic.triton_adapter.launch import Grid

Array: TypeAlias = np.ndarray[Any, Any]

SECTORS_PER_LINE = 4  # [forum]
# By product: L1 with shared memory of an SM [guide]; L2 by the datasheet, H200's by PyTorch.
CACHES = {
    "A100": (192 * KIB, 40 * KIB**2),
    "H100": (256 * KIB, 50 * KIB**2),
    "H200": (256 * KIB, 60 * KIB**2),
}
SHARED_KIB = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)  # what shared memory may take [guide]
L1_SHARE, L2_SHARE = 7 / 8, 0.6  # the share of each cache that is of use
LEAST = 3 / 4, 1 / 2  # and at least; both partitions of L2 may hold everything
OTHER_TIME, SPREAD = 0.01, 0.3  # of a program's time
SLACK = 0.01  # of the bounds, as the order is known no better
STRAY_BYTES = 2**20
SMS_APART = 2**48  # lines
REGION = 2**36  # sectors between the begins of two tensors, so that no two ever meet
BITS = np.array([number.bit_count() for number in range(1 << SECTORS_PER_LINE)])


@dataclass(frozen=True)
class Estimate:
    """A number that a counter should show, between the least and the most that are likely."""

    value: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.value:,} ({self.low:,} to {self.high:,})"

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.value + other.value, self.low + other.low, self.high + other.high)


@dataclass(frozen=True)
class Caches:
    """What moves between L1, L2 and DRAM, as the columns of `counters` of the same names.

    programs: how many were replayed, of all launches.
    """

    programs: int
    l1_l2_read_bytes: Estimate
    l2_write_sectors: Estimate
    dram_read_bytes: Estimate
    dram_write_bytes: Estimate

    as_dict = asdict

    def __str__(self) -> str:
        named = ", ".join(f"{name} {it}" for name, it in vars(self).items() if name != "programs")
        return f"predicted of {self.programs:,} programs: {named}"

    def __add__(self, other: Caches) -> Caches:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Caches(**sums)


@dataclass
class Trace:
    """The sectors that the loads and stores of one launch touch, in the order of each program.

    resident: programs that an SM holds at once. shared_bytes: shared memory of each. made: of each
    access the program, whether it stores, its first address, its sectors.
    """

    resident: int
    shared_bytes: int
    made: list[tuple[Grid, bool, int, Array]] = field(default_factory=list)

    def add(self, program: Grid, store: bool, touched: Array, starts: Sequence[int]) -> None:
        """Takes an access. touched: addresses of its elements. starts: those of all tensors."""
        if touched.size:
            begin, tensors = int(touched.min()), np.unique([0, *starts])
            number = int(np.searchsorted(tensors, begin, side="right"))
            start = -(-tensors[number - 1] // SECTOR_BYTES)
            sectors = np.unique(touched // SECTOR_BYTES) - start + number * REGION
            self.made.append((program, store, begin, sectors))

    def accesses(self, programs: bool | int) -> tuple[Array, Array, Array, Array]:
        """Of each access the program, whether it stores, and how many sectors; and all of these.

        programs: how many there would be, or True for those that made them: each further one moves
        the accesses as from one program to the next. Raises CountError where steps are not equal.
        """
        ordered = sorted(self.made, key=lambda access: access[0][::-1])
        grid, stores, begins, sectors = zip(*ordered, strict=True)
        counts = np.array([*Counter(grid).values()])  # of the accesses of each program
        known, store = len(counts), np.array(stores)
        program = np.repeat(np.arange(known), counts)
        sizes, joined = np.array([each.size for each in sectors]), np.concatenate(sectors)
        if programs is True or programs == known:
            return program, store, sizes, joined
        alike = known > 1 and (counts == counts[0]).all()
        table = np.array(begins).reshape(known if alike else 1, -1)
        steps = table[1 % len(table)] - table[0]
        if not alike or (table != table[0] + np.arange(len(table))[:, None] * steps).any():
            raise CountError("caches: from program to program, accesses take no equal steps")
        if (steps * known % SECTOR_BYTES).any():
            raise CountError(f"caches: {known} programs end within a sector: trace 32, or more")
        copies = -(-programs // known)
        copy = np.arange(copies)[:, None]
        shifts = np.repeat(np.tile(steps * known // SECTOR_BYTES, known), sizes)
        kept = (program := (program + copy * known).ravel()) < programs
        sizes, joined = np.tile(sizes, copies)[kept], (joined + copy * shifts).ravel()
        return program[kept], np.tile(store, copies)[kept], sizes, joined[: sizes.sum()]


def _through(
    line: Array, mask: Array, stored: Array, ends: Array, by_line: Array, size: float, chunk: int
) -> tuple[Array, int]:
    """The sectors of each row that are not in its cache, and the bytes of stores it dropped.

    line, mask, stored: of each row, which is what an access touches of a line: the line, a bit for
    each sector, whether it is stored. ends: where the rows of each cache begin, and the last one
    ends. by_line: the rows in the order of caches, lines, and time. size: of each cache, in bytes.
    chunk: rows that are let in before others are dropped.
    """
    capacity, count = int(size) // (SECTOR_BYTES * SECTORS_PER_LINE), len(line)
    new = _changes(line[by_line])
    new[ends[:-1]] = True
    again = np.flatnonzero(~new)
    previous, following = np.full((2, count), [[-1], [count]], dtype=np.int32)
    previous[by_line[again]] = by_line[again - 1]
    following[by_line[again - 1]] = by_line[again]
    held, staying = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    for begin, end in itertools.pairwise(ends):
        oldest = max(begin, end - capacity)  # where no line comes back
        if (previous[begin:end] >= 0).any():
            oldest = _drop(previous, following, held, begin, end, capacity, chunk)
        staying[oldest:end] = True
    # A line's stay in the cache begins with a miss; what its sectors hold since then is there.
    begins = np.flatnonzero(new | ~held[by_line])
    since = np.repeat(begins, np.diff(begins, append=count))
    mask, numbers = mask[by_line], np.arange(count, dtype=np.int32)
    missed = mask * (numbers == 0).astype(np.uint8)
    for bit in 1 << np.arange(SECTORS_PER_LINE, dtype=np.uint8):
        latest = np.maximum.accumulate(np.where(mask & bit, numbers, -1))
        missed[1:] |= np.where(latest[:-1] < since[1:], mask[1:] & bit, 0).astype(np.uint8)
    result = np.empty_like(missed)
    result[by_line] = missed
    dirty = np.bitwise_or.reduceat(mask * stored[by_line], begins)
    dropped = dirty[~np.logical_or.reduceat(staying[by_line], begins)]
    return result, SECTOR_BYTES * int(BITS[dropped].sum())


def _drop(
    previous: Array, following: Array, held: Array, begin: int, end: int, capacity: int, chunk: int
) -> int:
    """Notes in `held` which rows of one cache are in it; returns the oldest row that stays.

    The cache holds the lines of the latest rows, as many as fit: a window over the rows whose begin
    moves on when further lines come in.
    """
    oldest, lines = begin, 0
    for at in range(begin, end, chunk):
        to = min(end, at + chunk)
        held[at:to] = previous[at:to] >= oldest
        lines += to - at - int(np.count_nonzero(held[at:to]))
        while lines > capacity:
            some = slice(oldest, min(to, oldest + 2 * (lines - capacity) + chunk))
            last = np.cumsum(following[some] >= to)  # rows after which the line is not used again
            steps = min(int(np.searchsorted(last, lines - capacity)) + 1, len(last))
            lines, oldest = lines - int(last[steps - 1]), oldest + steps
    return oldest


def _changes(values: Array) -> Array:
    """Where a value is not the one before it; at the first, too."""
    return np.append(True, values[1:] != values[:-1])


class _Launch:
    """What the programs of a launch touch, to be replayed in some order.

    line, mask, access: of rows, in the order of programs. store, program: of accesses.
    """

    def __init__(self, trace: Trace, programs: bool | int, num_sms: int) -> None:
        self.program, store, sizes, sectors = trace.accesses(programs)
        access, line = np.repeat(np.arange(len(sizes)), sizes), sectors // SECTORS_PER_LINE
        at = np.flatnonzero(_changes(line) | _changes(access))
        bits = np.left_shift(1, sectors % SECTORS_PER_LINE).astype(np.uint8)
        self.line, self.access = line[at], access[at]
        self.mask, self.stored = np.bitwise_or.reduceat(bits, at), store[self.access]
        self.num_sms, self.resident = num_sms, trace.resident
        self.programs = int(self.program[-1]) + 1
        self.first = np.searchsorted(self.program, np.arange(self.programs))
        self.loaded = np.where(self.stored, 0, self.mask)
        self.order(self.loaded)

    def order(self, fetched: Array) -> None:
        """Puts the rows in the order of time. fetched: the sectors of each that come from DRAM."""
        weight = BITS[fetched] + OTHER_TIME * BITS[self.mask]
        cost = np.bincount(self.access, weight, len(self.program))
        before = np.cumsum(cost) - cost
        whole = np.bincount(self.program, cost)
        done = (before - before[self.first][self.program]) / whole[self.program]
        late = np.random.default_rng(0).uniform(0, SPREAD, self.programs)[self.program]
        time = (self.program // self.num_sms) / self.resident + late + done
        self.time = np.argsort(time[self.access], kind="stable")
        sm = (self.program % self.num_sms)[self.access[self.time]]
        self.by_sm = np.argsort(sm, kind="stable")  # of rows in time
        at = self.time[self.by_sm]
        ends = np.append(np.flatnonzero(_changes(sm[self.by_sm])), len(sm))
        by_line = np.argsort(sm[self.by_sm] * SMS_APART + self.line[at], kind="stable")
        self.l1 = self.line[at], self.mask[at], self.stored[at], ends, by_line
        self.by_line = np.argsort(self.line[self.time], kind="stable")

    def replay(self, l1_bytes: float, l2_bytes: float) -> tuple[list[int], Array]:
        """The four numbers of `Caches`, and the sectors of each row that come from DRAM.

        l1_bytes, l2_bytes: what is of use.
        """
        missed, stored = np.empty_like(self.mask), self.stored[self.time]
        missed[self.by_sm], _ = _through(*self.l1, l1_bytes, 64)
        missed[stored] = self.mask[self.time][stored]
        reads, writes = BITS[missed[~stored]].sum(), BITS[missed[stored]].sum()
        reach = missed != 0
        by_line = (np.cumsum(reach) - 1)[self.by_line[reach[self.by_line]]]
        l2 = self.line[self.time][reach], missed[reach], stored[reach], np.array([0, reach.sum()])
        below, dropped = _through(*l2, by_line, l2_bytes, 4096)
        below[stored[reach]] = 0
        fetched = np.zeros_like(self.mask)
        fetched[self.time[reach]] = below
        return [SECTOR_BYTES * reads, writes, SECTOR_BYTES * BITS[below].sum(), dropped], fetched


def check_known(gpu: Gpu, programs: int) -> None:
    """Raises CountError for a GPU whose caches are not known, ValueError for too few programs."""
    if gpu.product not in CACHES:
        known = ", ".join(CACHES)
        raise CountError(f"caches: those of {gpu.product} are not known, but of {known}")
    if programs < 1:
        raise ValueError(f"caches: {programs} programs")


def replay(trace: Trace, gpu: Gpu, requested: int, programs: bool | int = True) -> Caches:
    """What the caches of `gpu` do with a launch.

    trace: of at least one access. gpu: one that `check_known` lets pass. requested: sectors that
    its stores touch, those of each request by itself. programs: how many the launch would have, or
    True for those that were traced. Raises CountError for a launch that cannot be continued.
    """
    l1, l2 = CACHES[gpu.product]
    shared = trace.resident * (trace.shared_bytes + gpu.shared_per_sm - gpu.shared_per_program)
    l1 -= KIB * next(size for size in SHARED_KIB if size * KIB >= min(shared, gpu.shared_per_sm))
    launch = _Launch(trace, programs, gpu.num_sms)
    first, fetched = launch.replay(l1 * L1_SHARE, l2 * L2_SHARE)
    if not np.array_equal(fetched, launch.loaded):  # as was assumed
        launch.order(fetched)
        first, _ = launch.replay(l1 * L1_SHARE, l2 * L2_SHARE)
    others = launch.replay(l1, l2)[0], launch.replay(l1 * LEAST[0], l2 * LEAST[1])[0]
    low, high = (pick([first, *others], axis=0) for pick in (np.min, np.max))
    high[1] = max(high[1], requested * launch.programs // len({it[0] for it in trace.made}))
    first[1] = (first[1] + high[1]) // 2
    high = high * (1 + SLACK) + [STRAY_BYTES, 0, STRAY_BYTES, STRAY_BYTES]
    bounds = np.floor(low * (1 - SLACK)).astype(int), np.ceil(high).astype(int)
    estimates = (Estimate(*map(int, it)) for it in zip(first, *bounds, strict=True))
    return Caches(launch.programs, *estimates)
