"""Solves for the formula of a function's traffic, such as `5MN + 2M`, from counts at enough shapes.

Counts are integers, and the arithmetic is exact: the coefficients of products of the sizes, such as
MN, M, N and 1, solve an over-determined system by least squares, in fractions. Its residual must be
zero, and the solution must also predict the counts at shapes that took no part in solving it.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

from memtraffic.errors import FormulaError
from memtraffic.functions import as_function, function_name
from memtraffic.inputs import AnyInputs, find_inputs
from memtraffic.meters.count import Traffic, count, count_passes
from memtraffic.progress import progress

Shape: TypeAlias = tuple[int, ...]
Round: TypeAlias = tuple[Sequence[Shape], Sequence[Shape]]  # to solve at, to check at

SYMBOLS = ("M", "N")
FIT: tuple[Shape, ...] = (
    *((2, 8), (3, 16), (5, 32), (7, 4), (4, 64), (6, 16)),
    *((3, 5), (5, 12), (8, 21)),
)
HELD_OUT: tuple[Shape, ...] = (
    *((9, 8), (4, 2), (11, 64), (2, 4096), (3, 1024)),
    *((5, 781), (13, 7), (2, 1823)),
)
MAX_SYMBOLS = 4
MAX_POWER = 3  # of one size in one product
MIN_CHECKED = 2


@dataclass(frozen=True)
class Formula:
    """Traffic in elements, as a sum of products of sizes.

    reads, writes: the coefficients of the products, such as MN, M, N and 1, where BHSS is B times H
    times the square of S. fitted, checked: the shapes that the formula was solved and checked at.
    refused: the shapes that the function refused, each followed by its reason. symbols: the sizes.
    backward: the formula of the backward pass, where it was asked for.
    """

    reads: dict[str, Fraction]
    writes: dict[str, Fraction]
    fitted: tuple[Shape, ...]
    checked: tuple[Shape, ...]
    refused: tuple[tuple[Any, ...], ...] = ()
    symbols: tuple[str, ...] = SYMBOLS
    backward: Formula | None = None

    def __str__(self) -> str:
        text = f"reads {polynomial(self.reads)}, writes {polynomial(self.writes)}"
        return text if self.backward is None else f"forward: {text}\nbackward: {self.backward}"

    def elements(self, *shape: int) -> tuple[int | Fraction, int | Fraction]:
        """The elements read and written, as ints where they are whole.

        shape: a number for each of `symbols`.
        """
        reads, writes = (_evaluate(s, self.symbols, shape) for s in (self.reads, self.writes))
        return _whole(reads), _whole(writes)


def parse_formula(reads: str, writes: str, symbols: Sequence[str] = SYMBOLS) -> Formula:
    """The `Formula` that reads and writes these numbers of elements, solved at no shape.

    >>> parse_formula("5MN + 2M", "MN").elements(3, 5)
    (81, 15)

    reads, writes: as `Formula` prints them, with the letters of a product in any order. symbols:
    the sizes. Raises ValueError for text of another form and for other letters.
    """
    return Formula(_parse(reads, symbols), _parse(writes, symbols), (), (), (), tuple(symbols))


def formula(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    *,
    fit: Sequence[Shape] | None = None,
    held_out: Sequence[Shape] | None = None,
    dtype: str = "float32",
    backward: bool = False,
) -> Formula:
    """The `Formula` of the traffic of `fn`.

    >>> print(formula(lambda x: x.exp() - x[:, :1]))
    reads 2MN + M, writes 2MN
    >>> import torch
    >>> print(formula(torch.matmul, "M,K K,N"))
    reads MK + KN, writes MN

    fn: what `functions.as_function` takes. inputs: what `fn` is called with: a specification, see
    `inputs.find_inputs`; an operation; or a function of sizes such as `m` and `n` that returns
    tensors. By default it is one matrix, M,N. dtype: of the tensors whose specification names none.
    fit, held_out: the shapes, such as (M, N), to solve and to check at; they are chosen if not
    given. A shape that `fn` refuses with a ValueError is left out of both and listed in
    `Formula.refused`. backward: the result has the formula of the backward pass, too.

    Raises FormulaError, with the residuals, if there is no such formula or too few shapes are left;
    what `count` raises; and what else `fn` raises.
    """
    counts = Counts(fn, inputs, backward=backward, dtype=dtype)
    first, *more = plan(len(counts.symbols))
    if fit is not None or held_out is not None:
        first = first[0] if fit is None else fit, first[1] if held_out is None else held_out
        more = []
    counts.add(*first)
    while more and counts.too_few():
        counts.add(*more.pop(0))
    if reason := counts.too_few():
        raise FormulaError(reason)
    found = _solve_all(counts)
    while found is None and more:
        counts.add(*more.pop(0))
        found = _solve_all(counts)
    if found is None:
        raise _no_formula(counts, first)
    last = None
    for reads, writes in reversed(found):
        last = Formula(
            reads,
            writes,
            counts.fitted,
            counts.checked,
            tuple(counts.refused),
            counts.symbols,
            last,
        )
    assert last is not None
    return last


# ---- counts


@dataclass
class Counts:
    """The traffic of a function by shape, counted at rounds of shapes.

    traffic: by shape, that of the forward pass and, if asked for, that of the backward pass.
    refused: the shapes that the function refused with a ValueError, each with its reason.
    """

    fn: Callable[..., object]
    inputs: AnyInputs = None
    backward: bool = False
    dtype: str = "float32"
    traffic: dict[Shape, tuple[Traffic, ...]] = field(default_factory=dict)
    refused: list[tuple[Any, ...]] = field(default_factory=list)
    fitted: tuple[Shape, ...] = ()
    checked: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        self.function, self.made_by = as_function(self.fn), find_inputs(self.inputs)
        if len(self.symbols) > MAX_SYMBOLS:
            raise FormulaError(
                f"{len(self.symbols)} sizes ({', '.join(self.symbols)}) are more than "
                f"{MAX_SYMBOLS}: put numbers in place of some"
            )
        if bad := [symbol for symbol in self.symbols if not re.fullmatch("[A-Z]", symbol)]:
            raise FormulaError(f"the size {bad[0]!r} is not an upper-case letter")

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes."""
        return self.made_by.sizes

    def add(self, fit: Sequence[Shape], held_out: Sequence[Shape]) -> None:
        """Counts at further shapes, to solve at and to check at."""
        for shape in progress((*fit, *held_out), "counting"):
            arguments = self.made_by.arguments(shape, self.dtype)
            try:
                if self.backward:
                    self.traffic[shape] = count_passes(self.function, arguments)
                else:
                    self.traffic[shape] = (count(self.function, inputs=arguments),)
            except ValueError as error:
                self.refused.append((*shape, str(error)))
        self.fitted += tuple(shape for shape in fit if shape in self.traffic)
        self.checked += tuple(shape for shape in held_out if shape in self.traffic)

    def too_few(self) -> str:
        """Why the shapes do not suffice to solve for each product of sizes; "" if they do."""
        if not self.symbols and self.traffic:  # a number, counted twice
            return ""
        if len(self.fitted) > 2 ** len(self.symbols) and len(self.checked) >= MIN_CHECKED:
            return ""
        few = (
            f"{len(self.fitted)} shapes to solve at and {len(self.checked)} to check at are too few"
        )
        if not self.refused:
            return few
        *shape, reason = self.refused[0]
        if not self.traffic:
            at = f"{_size(shape)} with ValueError" if shape else "ValueError"
            return f"{function_name(self.fn)} refuses every shape, {at}: {reason}"
        return f"{few}; refused {_size(shape)}: {reason}"

    def elements(self, which: int, verb: str) -> dict[Shape, int]:
        """What a pass, 0 or 1, "reads" or "writes", by shape."""
        return {
            shape: passes[which].read_elements
            if verb == "reads"
            else passes[which].written_elements
            for shape, passes in self.traffic.items()
        }


def plan(symbols: int) -> list[Round]:
    """Rounds of shapes for a number of sizes: to solve at, and to check at.

    The first round is counted, and further ones where a function refuses too many of its shapes or
    where its traffic has squares. In each round there are enough powers of two for a function that
    takes nothing else; the last rounds have multiples of 16 and of 128.
    """
    if not symbols:
        return [([()], [()])]
    products, inner = 2**symbols, symbols - 1
    powers = _grid([(2, 4, 8)] * inner, (4, 8, 16, 32, 64))
    others = _grid([(1, 3, 5, 6, 7)] * inner, (3, 5, 12, 21, 30))
    wide = _grid([(2, 3, 4)] * inner, (781, 1024, 2048, 128))
    first = powers[: products + 3] + others[:5], wide[:4] + others[5:8]
    second = powers[products + 3 : 3 * products + 5] + others[8:10], wide[4:6]
    rounds: list[Round] = [(FIT, HELD_OUT) if symbols == 2 else first, second]
    for unit in (16, 128) if symbols < 3 else (16,):
        multiples = [unit * times for times in (1, 2, 4)]
        aligned = _grid([multiples] * inner, [unit * times for times in (1, 3, 2, 5, 4, 6, 8)])
        rounds.append((aligned[: products + 3], aligned[products + 3 : products + 6]))
    seen: set[Shape] = set()
    unseen = []
    for sides in rounds:
        unseen.append(tuple([shape for shape in side if shape not in seen] for side in sides))
        seen.update(*sides)
    return unseen  # type: ignore[return-value]


def _grid(inner: Sequence[Sequence[int]], last: Sequence[int]) -> list[Shape]:
    """Every combination of sizes, in an order in which neighbours differ in each of them."""
    shapes = list(itertools.product(*inner, last))
    step = next(n for n in itertools.count(5 * len(shapes) // 8) if math.gcd(n, len(shapes)) == 1)
    return [shapes[step * i % len(shapes)] for i in range(len(shapes))]


# ---- solving


def _solve_all(
    counts: Counts,
) -> list[tuple[dict[str, Fraction], dict[str, Fraction]]] | None:
    """For each pass the coefficients of what it reads and writes; None if a side has none."""
    passes = 2 if counts.backward else 1
    found = []
    for which in range(passes):
        reads = solve(counts.elements(which, "reads"), counts)
        writes = solve(counts.elements(which, "writes"), counts)
        if reads is None or writes is None:
            return None
        found.append((reads, writes))
    return found


def solve(elements: Mapping[Shape, int], counts: Counts) -> dict[str, Fraction] | None:
    """The coefficients of products that give a number of elements at every shape; None if none do.

    First each size occurs at most once in a product. Then more powers are tried, the fewest
    products first, as long as there are more shapes to solve at than products.
    """
    symbols, shapes = counts.symbols, counts.fitted
    powers = sorted(
        itertools.product(range(1, MAX_POWER + 1), repeat=len(symbols)),
        key=lambda most: math.prod(power + 1 for power in most),
    )
    simple = products_of(symbols)
    for most in powers:
        terms = products_of(symbols, most)
        if len(terms) >= len(shapes) and most != powers[0]:
            break
        solution = _least_squares(terms, symbols, {shape: elements[shape] for shape in shapes})
        if solution and all(
            _evaluate(solution, symbols, shape) == found for shape, found in elements.items()
        ):
            return {term: c for term, c in solution.items() if c or term in simple}
    return None


def products_of(symbols: Sequence[str], most: Sequence[int] | None = None) -> list[str]:
    """The products of sizes in which each size occurs at most so often; by default, once.

    >>> products_of("MN")
    ['MN', 'M', 'N', '1']
    >>> products_of("M", [2])
    ['MM', 'M', '1']
    """
    most = most or [1] * len(symbols)
    powers = itertools.product(*(range(power, -1, -1) for power in most))
    by_degree = sorted(powers, key=lambda each: -sum(each))
    return [
        "".join(symbol * power for symbol, power in zip(symbols, each, strict=True)) or "1"
        for each in by_degree
    ]


def _least_squares(
    terms: Sequence[str], symbols: Sequence[str], elements: Mapping[Shape, int]
) -> dict[str, Fraction] | None:
    """The least-squares coefficients of a number of elements by shape, exactly.

    >>> _least_squares(["M", "1"], "M", {(1,): 5, (2,): 7, (3,): 9})
    {'M': Fraction(2, 1), '1': Fraction(3, 1)}

    None if the shapes do not tell the products apart.
    """
    rows = [[_product(term, symbols, shape) for term in terms] for shape in elements]
    columns, right = list(zip(*rows, strict=True)), list(elements.values())
    normal = [[Fraction(sum(map(operator.mul, a, b))) for b in (*columns, right)] for a in columns]
    for i in range(len(terms)):  # Gauss and Jordan
        pivot = next((row for row in normal[i:] if row[i]), None)
        if pivot is None:
            return None
        normal.remove(pivot)
        pivot = [value / pivot[i] for value in pivot]
        normal = [[a - row[i] * b for a, b in zip(row, pivot, strict=True)] for row in normal]
        normal.insert(i, pivot)
    return {term: row[-1] for term, row in zip(terms, normal, strict=True)}


def _no_formula(counts: Counts, shapes: Round) -> FormulaError:
    """Says of the first pass and side without a formula what is nearest, and what it misses."""
    fit, held_out = ([shape for shape in each if shape in counts.traffic] for each in shapes)
    symbols = counts.symbols
    terms = products_of(symbols)
    if len(fit) <= len(terms):  # the function refuses too many of them
        fit, held_out = list(counts.fitted), list(counts.checked)
    for which, verb in itertools.product(range(2 if counts.backward else 1), ("reads", "writes")):
        elements = counts.elements(which, verb)
        if solve(elements, counts) is not None:
            continue
        nearest = _least_squares(terms, symbols, {shape: elements[shape] for shape in fit})
        if nearest is None:
            return FormulaError(
                f"the shapes {', '.join(map(_size, fit))} do not tell the terms apart"
            )
        residuals = {
            shape: elements[shape] - _evaluate(nearest, symbols, shape)
            for shape in (*fit, *held_out)
        }
        missed = sorted(filter(residuals.get, residuals), key=lambda shape: -abs(residuals[shape]))
        worst = "; ".join(
            f"{_size(shape)}: {verb} {elements[shape]}, {float(residuals[shape]):+.4g}"
            for shape in missed[:4]
        )
        what = f"the backward pass {verb}" if which else f"it {verb}"
        return FormulaError(
            f"what {what} is no sum of products of {', '.join(symbols)}; "
            f"the nearest: {polynomial(nearest, digits=4)}, misses {len(missed)} of "
            f"{len(residuals)} shapes, most of all {worst}"
        )
    raise AssertionError("every side has a formula")


def _product(term: str, symbols: Sequence[str], shape: Shape) -> int:
    return math.prod(shape[symbols.index(letter)] for letter in term if letter != "1")


def _evaluate(
    coefficients: Mapping[str, Fraction], symbols: Sequence[str], shape: Shape
) -> Fraction:
    each = (value * _product(term, symbols, shape) for term, value in coefficients.items())
    return sum(each, Fraction())


def _whole(number: Fraction) -> int | Fraction:
    return int(number) if number.denominator == 1 else number


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


# ---- text


def _parse(text: str, symbols: Sequence[str]) -> dict[str, Fraction]:
    """The coefficients of a polynomial as text: the inverse of `polynomial`."""
    coefficients = dict.fromkeys(products_of(symbols), Fraction())
    left, first = text.replace(" ", ""), True
    while left or first:
        found = re.match(r"([+-]?)(?:\((\d+/\d+)\)|(\d+))?([A-Z]*)", left)
        assert found is not None
        sign, ratio, whole, letters = found.groups()
        foreign = set(letters) - set(symbols)
        if not (ratio or whole or letters) or not (sign or first) or foreign:
            example = "5MN + 2M" if tuple(symbols) == SYMBOLS else f"2{''.join(symbols)} + 1"
            sizes = f"; its sizes are {', '.join(symbols)}" if foreign else ""
            raise ValueError(
                f"{text!r} is not a formula such as {example!r}: what is {left!r}?{sizes}"
            )
        term = "".join(sorted(letters, key=list(symbols).index)) or "1"
        size = Fraction(ratio or whole or 1)
        coefficients[term] = coefficients.get(term, Fraction()) + (-size if sign == "-" else size)
        left, first = left[found.end() :], False
    return coefficients


def polynomial(coefficients: Mapping[str, Fraction], digits: int | None = None) -> str:
    """Coefficients as text: exact, or rounded to a number of digits.

    >>> polynomial({"MN": Fraction(5, 2), "M": Fraction(-1), "N": Fraction(0), "1": Fraction(3)})
    '(5/2)MN - M + 3'
    >>> polynomial({"MN": Fraction(-12, 7), "1": Fraction(-451, 10)}, digits=4)
    '-1.714 MN - 45.1'
    """
    text = ""
    for term, value in coefficients.items():
        if not value:
            continue
        text += (" - " if value < 0 else " + ") if text else ("-" if value < 0 else "")
        size = str(abs(value)) if digits is None else f"{float(abs(value)):.{digits}g}"
        if term == "1":
            text += size
        elif digits is not None:
            text += f"{size} {term}"
        elif "/" in size:
            text += f"({size}){term}"
        else:
            text += term if size == "1" else size + term
    return text or "0"
