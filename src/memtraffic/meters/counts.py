"""Counts what a function moves at enough shapes, and solves for the formulas of it.

Counts are integers, and the arithmetic is exact: the coefficients of products of the sizes, such as
MN, M, N and 1, solve an over-determined system by least squares, in fractions. Its residual must be
zero. Shapes to solve at are small. The solution must also predict the counts at shapes that took no
part in solving it, and these are large: each size in turn a few hundred or thousand, then one in
each octave below that, then all sizes together, so that a kernel runs several programs along each
axis of its grid. An octave has the numbers that a block of one power of two is made for: 129 to
256.

A kernel that works in blocks reads some of its inputs once a block. Numbers of blocks, such as
ceil(N/256), are factors of the products then; all shapes that were counted are solved at, and the
solution must predict the counts on both sides of the ends of blocks.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memtraffic import device
from memtraffic.errors import AccessError, FormulaError, InputsError, said
from memtraffic.functions import as_function, function_name
from memtraffic.meters.count import TooMuchWork, Traffic, Work, allowance, count, nothing_ran
from memtraffic.meters.polynomials import (
    Polynomial,
    Shape,
    blocks_of,
    evaluate,
    least_squares,
    may_solve,
    odd_ones,
    polynomial,
    products_of,
    solutions,
)
from memtraffic.op import AnyInputs, find_op
from memtraffic.triton_adapter.launch import Grid

Passes: TypeAlias = list[dict[str, Polynomial]]  # for each, the polynomial of each of `SIDES`

FIT: tuple[Shape, ...] = (  # of each octave up to 8 rows and 128 columns
    *((2, 8), (3, 16), (5, 32), (4, 2), (4, 64), (6, 4)),
    *((3, 5), (5, 12), (8, 97)),
)
# The large sizes to check at, the first that is taken: an odd number, or a power of two. Only the
# last size, which is that of a row, is tried in the thousands.
LARGE = (301, 256, 128)
WIDE = (4099, 4096, 1031, 1024)
# At one of the shapes that are chosen: programs, loads and stores of kernels, elements in all.
MAX_PROGRAMS, MAX_ACCESSES, MAX_ELEMENTS = 1_500, 6_000, 2**24
# On blocks, which take most of the time: at all shapes together. One to check at may take a part of
# those that are left, and always the least number.
MAX_OPERATIONS, PART, LEAST_OPERATIONS = 500_000, 4, 10_000
MAX_SEARCH = 80_000  # operations on blocks, in all rounds for squares, or at the ends of blocks
SPREAD = 50, 11, 270, 90, 3, 150, 520, 900, 1700, 3500  # sizes at which blocks are looked for
MAX_SPREAD = 2**17  # elements there
MAX_TRIES = 8  # lengths of blocks that shapes at their ends may contradict
USUAL_SHAPES = 20  # until there is a formula; about as many where blocks are looked for
FEW_PROGRAMS = 2  # along an axis of a grid: what blocks do at their ends may not show
MAX_SYMBOLS = 4
MOST_SHAPES = 4  # that a message lists
MIN_CHECKED = 2
# What is counted of each pass: the field of a `Formula`, and that of a `Traffic`.
SIDES = {
    "reads": "read_elements",
    "writes": "written_elements",
    "read_bytes": "read_bytes",
    "write_bytes": "written_bytes",
}
REFUSALS = (ValueError, AssertionError, NotImplementedError)


@dataclass
class Counts:
    """The traffic of a function by shape, counted at rounds of shapes.

    traffic: by shape, that of the forward pass and, if asked for, that of the backward pass.
    launches: by shape, the kernels that ran, each with its grid. refused: the shapes that the
    function refused, each with its reason. fitted, checked: the others that were counted, to solve
    and to check at. shape: the one that is counted, or was last. notes: what a reader should know
    of the counts, as sentences. config: of autotuned kernels, as for `count`.
    """

    fn: Callable[..., object]
    inputs: AnyInputs = None
    backward: bool = False
    dtype: str = "float32"
    config: int | None = None
    refusals: tuple[type[Exception], ...] = REFUSALS
    traffic: dict[Shape, tuple[Traffic, ...]] = field(default_factory=dict)
    launches: dict[Shape, list[tuple[str, Grid]]] = field(default_factory=dict)
    refused: list[tuple[Any, ...]] = field(default_factory=list)
    fitted: tuple[Shape, ...] = ()
    checked: tuple[Shape, ...] = ()
    shape: Shape = ()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.function, self.made_by = as_function(self.fn), find_op(self.inputs)
        self.symbols = self.made_by.sizes
        if len(self.symbols) > MAX_SYMBOLS:
            raise FormulaError(
                f"{len(self.symbols)} sizes ({', '.join(self.symbols)}) are more than "
                f"{MAX_SYMBOLS}: put numbers in place of some"
            )
        self._held: dict[Shape, int] = {}  # by shape, elements of the arguments
        self._operations, self._least_operations = MAX_OPERATIONS, LEAST_OPERATIONS  # that are left
        self._left_out: set[Shape] = set()  # refused, or too large
        self._unmade: InputsError | None = None
        self._expected = USUAL_SHAPES
        self.show: Callable[[int, int], object] = lambda done, total: None  # how far this is

    def run(
        self,
        fit: Sequence[Shape] | None = None,
        held_out: Sequence[Shape] | None = None,
        least: int | None = None,
    ) -> Passes | None:
        """Counts at these shapes, or at those that are chosen, and solves.

        least: how many shapes to solve at are enough, if there are as many; by default, one more
        than there are products of sizes.
        Returns for each pass the polynomial of each of `SIDES`; None if one has none.
        Raises FormulaError for too few shapes and for counts that are not repeatable, InputsError
        for a shape of another number of sizes.
        """
        check = self.made_by.check
        held_out = held_out if held_out is None else [check(shape) for shape in held_out]
        needed, squares = 2 ** len(self.symbols) + bool(self.symbols), 3 ** len(self.symbols)
        rounds = plan(len(self.symbols)) if fit is None else [[check(shape) for shape in fit]]
        if fit and least is not None:
            needed = min(least, len(fit))
        while rounds and len(self.fitted) < needed:
            self.add(rounds.pop(0), (), limit=fit is None)
        if len(self.fitted) < needed:
            raise self._too_few("solve", len(self.fitted), needed)
        self._count_again()
        found = self._solve()
        with self._at_most(MAX_SEARCH):
            while found is None and rounds and len(self.fitted) <= squares:
                self.add(rounds.pop(0), (), limit=True)
                found = self._solve()
        if not any(traffic.ops for passes in self.traffic.values() for traffic in passes):
            self.notes.append(nothing_ran())
        if held_out is not None:
            self.add((), held_out)
        elif found is not None or fit is None:
            self._check_large(found or [])
        if self.symbols and found and least is None and len(self.checked) < MIN_CHECKED:
            raise self._too_few("check", len(self.checked), MIN_CHECKED)
        return self._solve() if found else None

    def fresh(self) -> Counts:
        """The same function, uncounted; a shape at which it leaves its tensors is refused."""
        refusals = (*REFUSALS, AccessError)
        return Counts(self.fn, self.inputs, self.backward, self.dtype, self.config, refusals)

    def add(self, fit: Sequence[Shape], held_out: Sequence[Shape], limit: bool = False) -> None:
        """Counts at further shapes, to solve at and to check at.

        limit: leaves out those at which kernels have too many programs or accesses.
        """
        for shape in (*fit, *held_out):
            self._counted(shape, limit)
        new = [shape for shape in dict.fromkeys(fit) if shape not in self.fitted]
        self.fitted += tuple(shape for shape in new if shape in self.traffic)
        self.checked += tuple(shape for shape in held_out if shape in self.traffic)

    def moved(self, which: int, side: str) -> dict[Shape, int]:
        """One of `SIDES` of a pass, 0 or 1, by shape."""
        return {at: getattr(passes[which], SIDES[side]) for at, passes in self.traffic.items()}

    def _counted(self, shape: Shape, limit: bool) -> bool:
        """Counts at a shape, unless that was done or tried; whether there is a count."""
        if shape in self.traffic or shape in self._left_out:
            return shape in self.traffic
        self._left_out.add(shape)
        done = len(self._left_out) + len(self.traffic)
        self.show(done, max(done, self._expected))
        if limit and self.made_by.elements(shape) > MAX_ELEMENTS:
            return False
        work = Work(MAX_PROGRAMS, MAX_ACCESSES) if limit else Work()
        if limit and (self.fitted or not self._least_operations):
            work.operations = max(self._operations // PART, self._least_operations)
        try:
            passes = self._count(shape, work)
        except TooMuchWork:
            pass
        except self.refusals as error:
            self._unmade = error if isinstance(error, InputsError) else None
            self.refused.append((*shape, said(error) or type(error).__name__))
        else:
            if not work.exceeded:  # or the function caught the error
                self._left_out.remove(shape)
                self.traffic[shape] = passes
                self.launches[shape] = work.launches
        return shape in self.traffic

    def _count(self, shape: Shape, work: Work, trace: bool = False) -> tuple[Traffic, ...]:
        self.shape = shape
        arguments = self.made_by.arguments(shape, self.dtype)
        self._held[shape] = sum(x.numel() for x in arguments.tensors)
        try:
            with device.having(allowance, work):
                options: Any = {"backward": self.backward, "config": self.config}
                found = count(self.function, arguments, trace=trace, **options)
        finally:
            self._operations -= work.operated
        return (found, found.backward) if found.backward else (found,)

    @contextmanager
    def _at_most(self, operations: int) -> Iterator[None]:
        """Context manager: shapes are left out when these operations on blocks are used up."""
        before, least = self._operations, self._least_operations
        self._operations, self._least_operations = operations, 0
        yield
        self._operations += before - operations
        self._least_operations = least

    def trace(self, shape: Shape) -> tuple[Traffic, ...]:
        """The traffic of each pass at a shape, with the accesses of its kernels."""
        return self._count(shape, Work(), trace=True)

    def _too_few(self, use: str, number: int, least: int) -> Exception:
        """Why the shapes do not suffice to solve or to check at."""
        few = f"{number} shapes to {use} at are too few: it takes {least}"
        if self._left_out and not self.refused:
            few += f"; {len(self._left_out)} others would take too long"
        if not self.refused:
            return FormulaError(few)
        *shape, reason = self.refused[0]
        if self.traffic:
            return FormulaError(f"{few}; refused {shape_text(shape)}: {reason}")
        if self._unmade is not None:
            return self._unmade
        at = f"{shape_text(shape)} with: " if shape else ""
        return FormulaError(f"{function_name(self.fn)} refuses every shape, {at}{reason}")

    def _count_again(self) -> None:
        """Counts the first two shapes again, to see whether results are kept.

        What a function moves only at its very first call, to set itself up, is left out. Raises
        FormulaError for counts that are not repeatable.
        """
        first, second, *_ = *self.traffic, *self.traffic
        for shape in (second, first):
            before, again = self.traffic[shape], self._count(shape, Work())
            if not (differing := _difference(before, again)):
                continue
            at = f"at {shape_text(shape)} it {differing}" if shape else f"it {differing}"
            if first == second or shape == second or _difference(again, self._count(shape, Work())):
                why = self._unseeded() or ", as functions do that keep results"
                text = f"{function_name(self.fn)} cannot be counted: {at} the second time"
                raise FormulaError(text + why)
            self.traffic[shape] = again
            self.notes.append(f"the first call sets something up, which is left out: {at} later")

    def _unseeded(self) -> str:
        """Says that the inputs differ from call to call, and what to do; "" if they do not."""
        if not self.made_by.differ(self.shape, self.dtype):
            return ""
        differ = f"inputs differ between two calls of {self.made_by.name}"
        return f": {differ}, so seed them there, as torch.manual_seed(0) does"

    # ---- large shapes

    def _check_large(self, found: Passes, wide: Sequence[int] = WIDE) -> None:
        """Counts at large shapes, to check at: each size in turn, its octaves, then all together.

        found: predicts which would take too long; empty, if there is none. wide: what the last size
        may be.
        """
        large = [max(shape[i] for shape in self.traffic) for i in range(len(self.symbols))]
        for i, value in enumerate(large):
            large[i] = next((n for n in self._values(i, wide) if self._check(i, n, found)), value)
        for i in range(len(large)):
            for _ in range(2):
                few, grown = self._few_programs(), self._odd(i, 4 * large[i])
                if not few or not self._check(i, grown, found) or few == self._few_programs():
                    break
                large[i] = grown
        self._fill(found, wide[0])
        for k, i in itertools.product(range(7), range(len(large))):
            if len(self.checked) < MIN_CHECKED:  # what large shapes cost is too much: smaller ones
                self._check(i, self._odd(i, LARGE[-1] >> k), found)
        shape = tuple(max(shape[i] for shape in self.traffic) for i in range(len(large)))
        while not any(all(map(operator.ge, counted, shape)) for counted in self.traffic):
            if self._check_shape(shape, found):
                break
            i = max(range(len(shape)), key=lambda i: shape[i] // self._unit(i))
            half = shape[i] // 2 if is_power(shape[i]) else self._odd(i, shape[i] // 2)
            shape = (*shape[:i], max(half, self._unit(i)), *shape[i + 1 :])

    def _fill(self, found: Passes, wide: int) -> None:
        """Counts in the octaves of each size that have no count, of the last one up to `wide`.

        Where one size is large the others are small, so that all take about the same time.
        """
        last = len(self.symbols) - 1
        missing = [[*self._missing(i, wide if i == last else 1)] for i in range(last + 1)]
        small = min(self.fitted, key=math.prod)
        for sizes in itertools.zip_longest(*missing[:-1], *(it[::-1] for it in missing[-1:])):
            shape = tuple(n or other for n, other in zip(sizes, small, strict=True))
            if not self._check_shape(shape, found):
                for i, n in enumerate(sizes):
                    _ = n and (self._check(i, n, found) or self._check(i, 1 << octave(n), found))

    def _missing(self, i: int, most: int) -> Iterator[int]:
        """A number for a size in each octave below the largest, or `most`, that has no count."""
        known, unit = {octave(shape[i]) for shape in self.traffic}, self._unit(i)
        powers = all(is_power(shape[i]) for shape in self.fitted)
        for k in sorted({*range(min(known), max(*known, octave(most)))} - known):
            middle = 2**k if powers else self._odd(i, math.isqrt(2 ** (2 * k - 1)))
            n = middle if octave(middle) == k else 2**k // unit * unit
            if octave(n) == k:
                yield n

    def _values(self, i: int, wide: Sequence[int]) -> Iterator[int]:
        """Large numbers for a size, in the order to try them in."""
        known = max(shape[i] for shape in self.fitted)
        for value in (*wide, *LARGE) if i == len(self.symbols) - 1 else LARGE:
            if not is_power(value):
                yield self._odd(i, max(value, known + self._unit(i)))
            elif value > known and value % self._unit(i) == 0:
                yield value

    def _unit(self, i: int) -> int:
        """What divides a size in all shapes to solve at."""
        return math.gcd(*(shape[i] for shape in self.fitted))

    def _odd(self, i: int, value: int) -> int:
        """An odd multiple of the unit of a size, near a number."""
        return self._unit(i) * (value // self._unit(i) | 1)

    def _check(self, i: int, value: int, found: Passes) -> bool:
        """Whether there is a count where one size has this number and the others are small."""
        small = min(self.fitted, key=lambda shape: math.prod(shape) // shape[i])
        return self._check_shape((*small[:i], value, *small[i + 1 :]), found)

    def _check_shape(self, shape: Shape, found: Passes) -> bool:
        """Counts at a shape to check at, if that does not take too long; whether it did."""
        held = self.solve({each: self._held[each] for each in self.traffic})
        predicted = [*([held] if held else []), *(each[k] for each in found for k in SIDES)]
        elements = sum(evaluate(each, self.symbols, shape) for each in predicted)
        if shape in self.traffic or elements > MAX_ELEMENTS or not self._counted(shape, limit=True):
            return shape in self.traffic
        self.checked += (shape,)
        return True

    def _programs(self) -> dict[tuple[str, int, int], int]:
        """The most programs by axis of a grid: a kernel, which of its launches, and a number."""
        programs: dict[tuple[str, int, int], int] = {}
        for shape in self.traffic:
            seen = Counter[str]()
            for kernel, grid in self.launches[shape]:
                seen[kernel] += 1
                for axis, most in enumerate(grid):
                    key = kernel, seen[kernel], axis
                    programs[key] = max(most, programs.get(key, 1))
        return programs

    def _few_programs(self) -> dict[tuple[str, int, int], int]:
        """The axes of grids along which few programs ran at every shape, and how many."""
        few = {key: most for key, most in self._programs().items() if most <= FEW_PROGRAMS}
        return {at: n for at, n in few.items() if n > 1 or at[2] == 0}  # others may not be there

    def remarks(self) -> tuple[str, ...]:
        """`notes`, and what is to be known of grids: few programs ran, or the number of SMs counts.

        To see the latter, the shape that ran most programs is counted as on a GPU without SMs.
        """
        few = [
            f"{kernel} ran {'one program' if most == 1 else f'at most {most} programs'} along axis "
            f"{axis} of its grid at every shape"
            for (kernel, _, axis), most in self._few_programs().items()
        ]
        shape = max(self.traffic, key=lambda at: sum(math.prod(it) for _, it in self.launches[at]))
        there, work = copy_context(), Work()
        there.run(device.no_sms.set, True)
        with suppress(Exception):  # where it divides by their number
            there.run(self._count, shape, work)
        sms = {
            f"the grid of {kernel} depends on the GPU's number of SMs: tried up to "
            f"{math.prod(grid)} programs"
            for kernel, grid in self.launches[shape]
            if (kernel, grid) not in work.launches
        }
        return tuple(dict.fromkeys((*self.notes, *few, *sorted(sms))))  # once of each

    def narrower(self, odd: str) -> Passes | None:
        """What `run` returns if rows, the last size, are no wider than a thousand elements.

        odd: what is said of wider ones. None also where only those take more than a few programs.
        """
        most = self._programs()
        for narrow in (WIDE[2:], WIDE[3:]):
            self.traffic = {at: it for at, it in self.traffic.items() if at[-1] <= narrow[0]}
            self.checked = tuple(shape for shape in self.checked if shape in self.traffic)
            if (found := self._solve()) is None:
                return None
            self._check_large(found, narrow)
            now = self._programs().items()
            few = [key for key, n in now if n <= FEW_PROGRAMS and n < most.get(key, n)]
            if (found := self._solve()) and not few:
                self.notes.append(f"wider rows have another formula: {odd}")
                return found
        return None

    # ---- blocks

    def in_blocks(self) -> Passes | None:
        """What `run` returns if some factors of the products are numbers of blocks.

        All that was counted is solved at, and the ends of the blocks are checked at. Leaves the
        counts as they were, and returns None, if there is no such solution.
        """
        before = self.traffic.copy(), self.fitted, self.checked
        with self._at_most(3 * MAX_SEARCH):
            self._expected *= 2
            self.add((), self._spread(), limit=True)
            found: Passes | None = None
            for _ in range(MAX_TRIES):
                if not found:
                    self.fitted, self.checked = (*self.traffic,), self.checked[:0]
                if found := self._solve(blocks=True):
                    ends = dict.fromkeys(self._ends(found))
                    if not (new := [shape for shape in ends if shape not in self.traffic]):
                        self._check_large(found)
                        if self._solve(blocks=True) == found and len(self.checked) >= MIN_CHECKED:
                            return found
                    self.add((), new, limit=True)
                elif not self.checked:
                    break
        self.traffic, self.fitted, self.checked = before
        return None

    def _spread(self) -> list[Shape]:
        """Shapes of all kinds, up to some hundred and in the last size some thousand."""
        shapes = _grid([SPREAD[:4]] * (len(self.symbols) - 1), SPREAD)
        some = [shape for shape in shapes if math.prod(shape) <= MAX_SPREAD][
            : 4 + 4 * len(shapes[0])
        ]
        return [tuple(self._odd(*each) for each in enumerate(shape)) for shape in some]

    def _ends(self, found: Passes) -> Iterator[Shape]:
        """Shapes on both sides of the ends of the first two blocks of each length.

        The other sizes are small at the first, and two blocks long at the second.
        """
        terms = {term for each in found for side in SIDES for term in each[side]}
        blocks = {it for term in terms for it in blocks_of(term) if it[1] > 1}
        small = dict(zip(self.symbols, min(self.fitted, key=math.prod), strict=True))
        for (letters, length), k, beyond in itertools.product(sorted(blocks), (1, 2), (0, 1)):
            long = {size: 2 * n for size, n in blocks if len(size) == 1 and k > 1}
            shape, unit = small | long, self._unit(self.symbols.index(letters[-1]))
            n = k * length // math.prod(shape[it] for it in letters[:-1]) // unit + beyond
            yield tuple((shape | {letters[-1]: max(n, 1) * unit}).values())

    # ---- solutions

    def solve(self, numbers: Mapping[Shape, int], *, blocks: bool = False) -> Polynomial | None:
        """The polynomial that gives a number at every shape; None if none does.

        blocks: its factors may be numbers of blocks.
        """
        simple, fitted = products_of(self.symbols), {at: numbers[at] for at in self.fitted}
        for solution in solutions(fitted, self.symbols, blocks=blocks):
            if not odd_ones(solution, self.symbols, numbers):
                return {term: c for term, c in solution.items() if c or term in simple}
        return None

    def _solve(self, *, blocks: bool = False) -> Passes | None:
        """For each pass the polynomial of each of `SIDES`; None if one has none."""
        passes: Passes = [{} for _ in range(1 + self.backward)]
        for (which, sides), side in itertools.product(enumerate(passes), SIDES):
            if (found := self.solve(self.moved(which, side), blocks=blocks)) is None:
                return None
            sides[side] = found
        return passes

    def no_formula(self) -> str:
        """Of the first pass and side without a formula, what is nearest, and what it misses."""
        sides = itertools.product(range(1 + self.backward), SIDES)
        which, side = next(each for each in sides if self.solve(self.moved(*each)) is None)
        text = f"{'the backward pass' if which else 'it'} {self.describe(which, side)}"
        return text + self._unseeded()

    def describe(self, which: int, side: str) -> str:
        """What a pass reads or writes, as a formula or as what is nearest to one.

        Then it also says at which shapes it is something else.
        """
        moved, symbols = self.moved(which, side), self.symbols
        verb = next(verb for verb in SIDES if side.startswith(verb.removesuffix("s")))
        verb += ", in bytes," if "bytes" in side else ""
        if (found := self.solve(moved)) is not None:
            return f"{verb} {polynomial(found)}"
        fitted = {shape: moved[shape] for shape in self.fitted}
        if least_squares(products_of(symbols), symbols, fitted) is None:
            shapes = ", ".join(map(shape_text, self.fitted))
            return f"{verb} what these shapes do not tell the terms of apart: {shapes}"
        near = [(odd_ones(each, symbols, moved), each) for each in self._near(moved)]
        odd, best = min(near, key=lambda each: len(each[0]), default=(moved, {}))
        few = 2 * len(odd) <= len(moved)
        smallest = sorted(odd if few else moved, key=math.prod)[:MOST_SHAPES]
        if few:
            number = f"{len(odd)} of {len(moved)} shapes: " if len(odd) > 1 else ""
            each = (f"{shape_text(at)} (there {moved[at]}, not {odd[at]})" for at in smallest)
            return f"{verb} {polynomial(best)} at all but {number}{', '.join(each)}"
        each = (f"{moved[at]} at {shape_text(at)}" for at in smallest)
        return f"{verb} no sum of products of {', '.join(symbols)}: {', '.join(each)}"

    def _near(self, moved: Mapping[Shape, int]) -> Iterator[Polynomial]:
        """Solutions at some of the shapes: as many as leave few others out."""
        symbols, terms, fitted = self.symbols, products_of(self.symbols), self.fitted
        yield from solutions({shape: moved[shape] for shape in fitted}, symbols)
        parts = [[[shape for shape in fitted if shape != odd] for odd in fitted]]
        # Where blocks matter from some size or product of all on, the shapes below it have one.
        for some in (slice(None), *(slice(i, i + 1) for i in range(len(symbols)))):
            ordered = sorted(moved, key=lambda shape: (math.prod(shape[some]), math.prod(shape)))
            parts.append([ordered[:n] for n in range(len(ordered) - 1, len(terms), -1)])
        for each in parts:
            numbers = ({shape: moved[shape] for shape in part} for part in each)
            solved = next((part for part in numbers if may_solve(terms, symbols, part)), None)
            if solved and (found := least_squares(terms, symbols, solved)):
                yield found


def _difference(before: Sequence[Traffic], after: Sequence[Traffic]) -> str:
    """How two counts of one shape differ, in words; "" if they do not."""
    for (side, attribute), which in itertools.product(SIDES.items(), range(len(before))):
        one, two = (getattr(traffic[which], attribute) for traffic in (before, after))
        if one != two:
            verb, _, unit = side.partition("_")
            return f"{verb.removesuffix('s')}s {one} {unit or 'elements'} the first time and {two}"
    return ""


def octave(number: int) -> int:
    """Which octave a size is in: 8 for those of 129 to 256."""
    return (number - 1).bit_length()


def is_power(number: int) -> bool:
    return number & (number - 1) == 0


def plan(symbols: int) -> list[Sequence[Shape]]:
    """Rounds of shapes to solve at for a number of sizes.

    The first round is counted, and further ones where a function refuses too many of its shapes or
    where its traffic has squares. In each round there are enough powers of two for a function that
    takes nothing else; the last rounds have multiples of 16 and of 128. All of them are small.
    """
    if not symbols:
        return [[()]]
    products, inner = 2**symbols, symbols - 1
    powers = _grid([(2, 4, 8)] * inner, (4, 8, 16, 32, 64))
    others = _grid([(1, 3, 5, 6, 7)] * inner, (3, 5, 12, 21, 30, 7, 47, 98))
    first = FIT if symbols == 2 else (*powers[: products + 3], *others[:5])
    rounds = [first, [*powers[products + 3 : 3 * products + 5], *others[8:10]]]
    for unit in (16, 128) if symbols < 3 else (16,):
        multiples = [unit * times for times in (1, 2, 4)]
        aligned = _grid([multiples] * inner, [unit * times for times in (1, 3, 2, 5, 4, 6, 8)])
        rounds.append(aligned[: products + 6])
    return rounds


def _grid(inner: Sequence[Sequence[int]], last: Sequence[int]) -> list[Shape]:
    """Every combination of sizes, in an order in which neighbours differ in each of them."""
    shapes = list(itertools.product(*inner, last))
    step = next(n for n in itertools.count(7 * len(shapes) // 11) if math.gcd(n, len(shapes)) == 1)
    return [shapes[step * i % len(shapes)] for i in range(len(shapes))]


def shape_text(shape: Sequence[int]) -> str:
    """A shape as text.

    >>> shape_text((4, 64))
    '4 x 64'
    """
    return " x ".join(map(str, shape))
