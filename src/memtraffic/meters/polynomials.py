"""Polynomials in sizes, such as `5MN + 2M`: as text, at a shape, and through numbers, exactly.

A term is a product of sizes and of numbers of blocks, such as `MN` or `M*ceil(N/256)`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

Shape: TypeAlias = tuple[int, ...]
Polynomial: TypeAlias = dict[str, Fraction]  # the coefficients of products, such as MN

SYMBOLS = ("M", "N")
MAX_POWER = 3  # of one size in one product
ROUNDING = 1e-7  # of a residual in floating point, relative, where the exact one is zero
LIKELY = [*(2**k for k in range(1, 16)), *(3 * 2**k for k in range(1, 10))]  # lengths of a block
LENGTHS = [*LIKELY, *sorted({*range(3, 256), *range(256, 1024, 8)} - {*LIKELY})]
_FACTOR = r"(?:[A-Z]|ceil\([A-Z]+/[1-9]\d*\))"


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


def least_squares(
    terms: Sequence[str], symbols: Sequence[str], elements: Mapping[Shape, int]
) -> Polynomial | None:
    """The least-squares coefficients of a number of elements by shape, exactly.

    >>> least_squares(["M", "1"], "M", {(1,): 5, (2,): 7, (3,): 9})
    {'M': Fraction(2, 1), '1': Fraction(3, 1)}

    None if the shapes do not tell the products apart.
    """
    matrix = _products(terms, symbols, elements, object)
    right = np.array([*elements.values()], object)
    normal = matrix.T @ np.column_stack([matrix, right])
    before = 1
    for i in range(len(terms)):  # Gauss and Jordan, in whole numbers as Bareiss does it
        nonzero = np.flatnonzero(normal[i:, i])
        if not nonzero.size:
            return None
        normal[[i, i + nonzero[0]]] = normal[[i + nonzero[0], i]]
        others = np.arange(len(terms)) != i
        product = normal[others, i, None] * normal[i]
        normal[others] = (normal[i, i] * normal[others] - product) // before
        before = normal[i, i]
    return {term: Fraction(row[-1], before) for term, row in zip(terms, normal, strict=True)}


def _in_blocks(symbols: Sequence[str]) -> Iterator[list[str]]:
    """The terms that each choice of blocks allows, the likeliest choice first.

    First one size is in blocks, then the product of several, two sizes, one size in two ways, and
    one with its squares.
    """

    def terms(parts: Mapping[str, Sequence[str]], *left_out: str) -> list[str]:
        each = (parts.get(it, [it, ""]) for it in symbols if it not in left_out)
        return [product("*".join(factors), symbols) for factors in itertools.product(*each)]

    for length, s in itertools.product(LENGTHS, symbols):
        yield terms({s: [s, f"ceil({s}/{length})", ""]})
    groups = [it for n in range(2, 5) for it in itertools.combinations(symbols, n)]
    for length, some in itertools.product(LIKELY, groups):
        flat = f"ceil({''.join(some)}/{length})"
        yield products_of(symbols) + [product(flat + it, symbols) for it in terms({}, *some)]
    for (s, t), one, two in itertools.product(itertools.combinations(symbols, 2), LIKELY, LIKELY):
        yield terms({s: [s, f"ceil({s}/{one})", ""], t: [t, f"ceil({t}/{two})", ""]})
    for s, (one, two) in itertools.product(symbols, itertools.combinations(LIKELY, 2)):
        yield terms({s: [s, f"ceil({s}/{one})", f"ceil({s}/{two})", ""]})
    for length, s in itertools.product(LIKELY, symbols):
        b = f"ceil({s}/{length})"
        yield terms({s: [s + s, f"{s}*{b}", f"{b}*{b}", s, b, ""]})


def product(text: str, symbols: Sequence[str]) -> str:
    """The term of some factors: sizes in the order of the symbols, then numbers of blocks.

    >>> product("ceil(NM/256)*KM", "MKN"), product("", "MKN")
    ('MK*ceil(MN/256)', '1')
    """
    order = [*symbols].index
    factors = sorted(blocks_of(text), key=lambda it: (it[1] > 1, sorted(map(order, it[0])), it[1]))
    letters = "".join(it for it, n in factors if n == 1)
    blocks = [f"ceil({''.join(sorted(it, key=order))}/{n})" for it, n in factors if n > 1]
    return "*".join(filter(None, [letters, *blocks])) or "1"


@functools.cache
def blocks_of(term: str) -> tuple[tuple[str, int], ...]:
    """The factors of a term, each as sizes and how many elements of their product a block has.

    >>> blocks_of("M*ceil(N/256)")
    (('M', 1), ('N', 256))
    """
    found = re.findall(r"ceil\(([A-Z]+)/(\d+)\)|([A-Z])", term)
    return tuple((sizes or size, int(length or 1)) for sizes, length, size in found)


def solutions(
    numbers: Mapping[Shape, int], symbols: Sequence[str], *, blocks: bool = False
) -> Iterator[Polynomial]:
    """The polynomials that give a number at every shape.

    First each size occurs at most once in a product. Then more powers are tried, the fewest
    products first, and then, if asked for, numbers of blocks, as long as there are more shapes than
    products.
    """
    powers = itertools.product(range(1, MAX_POWER + 1), repeat=len(symbols))
    simple, *others = sorted((products_of(symbols, most) for most in powers), key=len)
    forms = itertools.chain(others, _in_blocks(symbols) if blocks else ())
    enough = (terms for terms in forms if len(terms) < len(numbers))
    for terms in itertools.chain([simple], enough):
        if may_solve(terms, symbols, numbers):
            solution = least_squares(terms, symbols, numbers)
            if solution and not odd_ones(solution, symbols, numbers):
                yield solution


def may_solve(terms: Sequence[str], symbols: Sequence[str], numbers: Mapping[Shape, int]) -> bool:
    """Whether there is a solution but for rounding: fractions take a hundred times as long."""
    right = np.array([*numbers.values()], dtype=float)
    matrix = _products(terms, symbols, numbers, float) / np.maximum(right, 1)[:, None]
    matrix /= np.abs(matrix).max(axis=0)
    found, *_ = np.linalg.lstsq(matrix, right > 0, rcond=None)
    return float(np.abs(matrix @ found - (right > 0)).max()) <= ROUNDING


def _products(
    terms: Sequence[str], symbols: Sequence[str], shapes: Iterable[Shape], dtype: type
) -> np.ndarray[Any, Any]:
    """Products of sizes, a row a shape and a column a term. dtype: float, or object for ints."""
    rows = [*shapes]
    sizes: dict[str, Any] = {
        symbol: np.array([shape[i] for shape in rows], dtype) for i, symbol in enumerate(symbols)
    }
    matrix: Any = np.ones((len(rows), len(terms)), dtype)
    for column, term in zip(matrix.T, terms, strict=True):
        for letters, length in blocks_of(term):
            size = functools.reduce(operator.mul, (sizes[it] for it in letters))
            column *= size if length == 1 else -(-size // length)
    return matrix


def odd_ones(
    near: Polynomial, symbols: Sequence[str], numbers: Mapping[Shape, int]
) -> dict[Shape, int | Fraction]:
    """The shapes at which a polynomial is not the number, and what it is there."""
    values = {shape: evaluate(near, symbols, shape) for shape in numbers}
    return {shape: value for shape, value in values.items() if value != numbers[shape]}


def evaluate(
    coefficients: Mapping[str, Fraction], symbols: Sequence[str], shape: Sequence[int]
) -> int | Fraction:
    """A polynomial at a shape, as an int where it is whole.

    >>> evaluate({"MN": Fraction(1, 2), "M*ceil(N/3)": Fraction(3)}, "MN", (3, 4))
    24
    """
    sizes, number = dict(zip(symbols, shape, strict=True)), Fraction()
    for term, value in coefficients.items():
        each = ((math.prod(sizes[it] for it in some), n) for some, n in blocks_of(term))
        number += value * math.prod(-(-size // n) for size, n in each)
    return int(number) if number.denominator == 1 else number


def parse(text: str, symbols: Sequence[str]) -> Polynomial:
    """The coefficients of a polynomial as text: the inverse of `polynomial`.

    >>> parse("2M + 5NM", "MN")["MN"]
    Fraction(5, 1)
    >>> parse("MN + 3*ceil(N/256)*M", "MN")["M*ceil(N/256)"]
    Fraction(3, 1)

    Raises ValueError for text of another form and for letters that are no symbols.
    """
    coefficients = dict.fromkeys(products_of(symbols), Fraction())
    left, first = text.replace(" ", ""), True
    while left or first:
        found = re.match(rf"([+-]?)(?:\((\d+/\d+)\)|(\d+))?((?:\*?{_FACTOR})*)", left)
        assert found is not None
        sign, ratio, whole, factors = found.groups()
        foreign = {it for letters, _ in blocks_of(factors) for it in letters} - set(symbols)
        if not (ratio or whole or factors) or not (sign or first) or foreign:
            example = "5MN + 2M" if tuple(symbols) == SYMBOLS else f"2{''.join(symbols)} + 1"
            sizes = f"; its sizes are {', '.join(symbols)}" if foreign else ""
            raise ValueError(
                f"{text!r} is not a formula such as {example!r}: what is {left!r}?{sizes}"
            )
        term = product(factors, symbols)
        size = Fraction(ratio or whole or 1)
        coefficients[term] = coefficients.get(term, Fraction()) + (-size if sign == "-" else size)
        left, first = left[found.end() :], False
    return coefficients


def polynomial(coefficients: Mapping[str, Fraction]) -> str:
    """Coefficients as text.

    >>> polynomial({"MN": Fraction(5, 2), "M": Fraction(-1), "N": Fraction(0), "1": Fraction(3)})
    '(5/2)MN - M + 3'
    """
    text = ""
    for term, value in coefficients.items():
        if not value:
            continue
        text += (" - " if value < 0 else " + ") if text else ("-" if value < 0 else "")
        size = str(abs(value))
        factor = "" if size == "1" else f"({size})" if "/" in size else size
        times = "*" if factor and term.startswith("ceil") else ""
        text += size if term == "1" else factor + times + term
    return text or "0"
