"""The formula of a function's traffic, such as `5MN + 2M`, and where it was tried.

`counts` solves for it, and says how. A formula says how large the shapes are at which it was
checked: beyond that it was not tried, nor in octaves of a size in which no number was.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from memtraffic.errors import AccessError, FormulaError
from memtraffic.meters.counts import REFUSALS, Counts, is_power, octave, shape_text
from memtraffic.meters.polynomials import SYMBOLS, Polynomial, Shape, evaluate, polynomial
from memtraffic.op import AnyInputs
from memtraffic.progress import progress_bar

OWN_SHAPES = "give such shapes as fit= and held_out=, or --fit and --check"
ADVICE = (
    "Where sizes are multiples of a kernel's blocks, or its grid is full, there may be a formula: "
    f"{OWN_SHAPES}"
)
MAX_LEAST = 3  # a range that starts here starts at the beginning


@dataclass(frozen=True)
class Formula:
    """Traffic as a sum of products of sizes, and where it was tried.

    reads, writes: in elements, the coefficients of the products, such as MN, M, N and 1, where BHSS
    is B times H times the square of S; of a kernel that works in blocks, also of products such as
    M*ceil(N/256), where ceil(N/256) is how many blocks of 256 elements hold N. read_bytes,
    write_bytes: the same in bytes, for the dtypes that it was solved with. fitted, checked: the
    shapes that the formula was solved and checked at. refused: the shapes that the function
    refused, each followed by its reason. symbols: the sizes. backward: the formula of the backward
    pass, where it was asked for. notes: what a reader should know of the counts, as sentences.
    """

    reads: Polynomial
    writes: Polynomial
    fitted: tuple[Shape, ...] = ()
    checked: tuple[Shape, ...] = ()
    refused: tuple[tuple[Any, ...], ...] = ()
    symbols: tuple[str, ...] = SYMBOLS
    backward: Formula | None = None
    read_bytes: Polynomial = field(default_factory=dict)
    write_bytes: Polynomial = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}\n{self.evidence}" if self.fitted else self.text

    @property
    def text(self) -> str:
        """The formula alone, without where it was tried."""
        text = f"reads {polynomial(self.reads)}, writes {polynomial(self.writes)}"
        return text if self.backward is None else f"forward: {text}\nbackward: {self.backward.text}"

    def elements(self, *shape: int) -> tuple[int | Fraction, int | Fraction]:
        """The elements read and written, as ints where they are whole.

        shape: a number for each of `symbols`. Whether it was tried is for `holds` to say.
        """
        reads, writes = (evaluate(it, self.symbols, shape) for it in (self.reads, self.writes))
        return reads, writes

    def bytes(self, *shape: int) -> tuple[int | Fraction, int | Fraction]:
        """The bytes read and written, as `elements` gives the elements."""
        return replace(self, reads=self.read_bytes, writes=self.write_bytes).elements(*shape)

    @property
    def tried(self) -> dict[str, tuple[int, int]]:
        """The smallest and the largest number that was tried for each size."""
        sizes = zip(self.symbols, self._sizes, strict=True)
        return {symbol: (min(numbers), max(numbers)) for symbol, numbers in sizes}

    @property
    def together(self) -> Shape:
        """The shape, of those tried, in which all sizes are large."""
        most = [max(numbers) for numbers in self._sizes]

        def least(shape: Shape) -> float:
            each = zip(shape, most, strict=True)
            return min((math.log(n + 1) / math.log(high + 1) for n, high in each), default=0)

        return max((*self.fitted, *self.checked), key=least, default=())

    @property
    def steps(self) -> dict[str, str]:
        """The sizes that were tried only in "powers of two", or in "multiples of" a number."""
        steps = zip(self.symbols, map(_step, self._sizes), strict=True)
        return {symbol: step for symbol, step in steps if step}

    @property
    def _sizes(self) -> list[tuple[int, ...]]:
        return list(zip(*self.fitted, *self.checked, strict=True))

    @property
    def ranges(self) -> dict[str, list[tuple[int, int]]]:
        """For each size the first and the last number of the octaves in a row that were tried.

        An octave has the numbers that a block of one power of two is made for: 129 to 256.
        """
        return dict(zip(self.symbols, map(_ranges, self._sizes), strict=True))

    def holds(self, *shape: int) -> bool:
        """Whether a shape is in the range that was tried.

        It is below one shape, in the same steps, and each of its sizes is in `ranges`. A function
        may still move something else for a part of an octave in which no number was tried, or where
        several sizes are in octaves that were not tried together.

        >>> found = formula(lambda x: x.exp())
        >>> found.holds(300, 4000), found.holds(300, 5000)
        (True, False)
        """
        sizes = zip(self._sizes, shape, strict=True)
        ranges = zip(self.ranges.values(), shape, strict=True)
        between = all(any(low <= n <= high for low, high in each) for each, n in ranges)
        steps = all(_step(numbers) == _step((*numbers, n)) for numbers, n in sizes)
        below = (all(map(operator.ge, tried, shape)) for tried in (*self.fitted, *self.checked))
        return between and steps and any(below)

    @property
    def evidence(self) -> str:
        """What the formula rests on, as lines of text: how many shapes, and up to which.

        >>> print(formula(lambda x: x.exp()).evidence)
        solved at 9 shapes, checked at 8 others
        M to 301, N to 4099; outside: not tried
        """
        text = f"solved at {len(self.fitted)} shapes, checked at {len(self.checked)} others"
        if self.refused:
            text += f", {len(self.refused)} refused: {self.refused[0][-1]}"
        each = []
        for (symbol, ranges), numbers in zip(self.ranges.items(), self._sizes, strict=True):
            least, step = max(math.gcd(*numbers), MAX_LEAST), _step(numbers)
            parts = (f"{f'from {low} ' if low > least else ''}to {high}" for low, high in ranges)
            each.append(f"{symbol} {' and '.join(parts)}" + (f" in {step}" if step else ""))
        if not self.holds(*(high for _, high in self.tried.values())):
            each.append(f"together to {shape_text(self.together)}")
        lines = [text, *([f"{', '.join(each)}; outside: not tried"] if each else [])]
        return "\n".join([*lines, *self.notes])


def formula(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    *,
    fit: Sequence[Shape] | None = None,
    held_out: Sequence[Shape] | None = None,
    dtype: str = "float32",
    backward: bool = False,
    config: int | None = None,
) -> Formula:
    """The `Formula` of the traffic of `fn`, in elements, of which a complex number is one.

    >>> print(formula(lambda x: x.exp() - x[:, :1]))
    reads 2MN + M, writes 2MN
    solved at 9 shapes, checked at 8 others
    M to 301, N to 4099, together to 301 x 2049; outside: not tried
    >>> import torch
    >>> formula(torch.matmul, "M,K K,N").text
    'reads MK + KN, writes MN'

    fn: what `functions.as_function` takes. inputs: what `fn` is called with: a specification, see
    `op.find_op`; an operation; or a function of sizes such as `m` and `n` that returns
    tensors. By default it is one matrix, M,N. dtype: of the tensors whose specification names none.
    fit, held_out: the shapes, such as (M, N), to solve and to check at. They are chosen if not
    given: small ones to solve at, and larger ones to check at, in every octave of each size, which
    is a multiple of what divides it in all of `fit`. If no formula holds at those, its factors may
    be numbers of blocks, such as ceil(N/256), which is checked on both sides of the ends of blocks;
    then rows of at most a thousand elements are tried, and `Formula.notes` says so. Left
    out, and listed in `Formula.refused`, are shapes that `fn` or `inputs` refuses with a
    ValueError, an AssertionError or a NotImplementedError, and those at which a kernel leaves its
    tensors, if it does not at others. backward: the result has that of the backward pass, too.
    config: of autotuned kernels, as for `count`.

    Raises FormulaError if there is no such formula, if too few shapes are left, or if a second
    count of the same shape differs; what `count` raises; and what else `fn` raises.
    """
    counts, chosen = Counts(fn, inputs, backward, dtype, config), fit is None and held_out is None
    with progress_bar("counting, shape") as counts.show:
        found, odd, advice = None, "", ""
        try:
            if (found := counts.run(fit, held_out)) is None:
                odd = counts.no_formula()
                advice = f". {ADVICE}" if any(counts.launches.values()) else ""
        except AccessError as error:
            odd = f"{error} It was at {shape_text(counts.shape)}." if counts.shape else str(error)
            advice, counts = f" If it takes only whole blocks, {OWN_SHAPES}", counts.fresh()
            with suppress(FormulaError):  # too few shapes are left
                found = counts.run() if chosen else None
        if found is None and chosen and counts.fitted:
            found = counts.in_blocks()
        if found is None and counts.refusals is not REFUSALS:
            raise AccessError(odd + advice)
        if found is None and (found := counts.narrower(odd) if chosen else None) is None:
            raise FormulaError(odd + advice)
    names = "fitted", "checked", "refused", "symbols"
    evidence: dict[str, Any] = {name: tuple(getattr(counts, name)) for name in names}
    evidence["notes"] = counts.remarks()
    forward, *others = (Formula(**(sides | evidence)) for sides in found)
    return replace(forward, backward=others[0]) if others else forward


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last number of each row of octaves."""
    octaves, least, most = {*map(octave, numbers)}, min(numbers), max(numbers)
    first = sorted(k for k in octaves if k - 1 not in octaves)
    last = sorted(k for k in octaves if k + 1 not in octaves)
    rows = zip(first, last, strict=True)
    return [(max(least, 2**start // 2 + 1), min(most, 2**end)) for start, end in rows]


def _step(numbers: Sequence[int]) -> str:
    """What numbers have in common."""
    if all(map(is_power, numbers)):
        return "powers of two"
    return f"multiples of {unit}" if (unit := math.gcd(*numbers)) > 1 else ""
