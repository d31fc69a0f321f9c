"""Polynomials in sizes, such as `5MN + 2M`: as text, at a shape, and through numbers, exactly."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

Shape: TypeAlias = tuple[int, ...]
Polynomial: TypeAlias = dict[str, Fraction]  # the coefficients of products, such as MN

SYMBOLS = ("M", "N")
MAX_POWER = 3  # of one size in one product
ROUNDING = 1e-6  # of a residual in floating point, where the exact one is zero


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


def solutions(numbers: Mapping[Shape, int], symbols: Sequence[str]) -> Iterator[Polynomial]:
    """The polynomials that give a number at every shape.

    First each size occurs at most once in a product. Then more powers are tried, the fewest
    products first, as long as there are more shapes than products.
    """
    powers = sorted(
        itertools.product(range(1, MAX_POWER + 1), repeat=len(symbols)),
        key=lambda most: math.prod(power + 1 for power in most),
    )
    for most in powers:
        terms = products_of(symbols, most)
        if len(terms) >= len(numbers) and most != powers[0]:
            break
        if may_solve(terms, symbols, numbers):
            solution = least_squares(terms, symbols, numbers)
            if solution and not odd_ones(solution, symbols, numbers):
                yield solution


def may_solve(terms: Sequence[str], symbols: Sequence[str], numbers: Mapping[Shape, int]) -> bool:
    """Whether there is a solution but for rounding: fractions take a hundred times as long."""
    matrix = _products(terms, symbols, numbers, float)
    matrix /= np.abs(matrix).max(axis=0)
    right = np.array([*numbers.values()], dtype=float)
    found, *_ = np.linalg.lstsq(matrix, right, rcond=None)
    return float(np.abs(matrix @ found - right).max()) <= ROUNDING * (1 + float(right.max()))


def _products(
    terms: Sequence[str], symbols: Sequence[str], shapes: Iterable[Shape], dtype: type
) -> np.ndarray[Any, Any]:
    """Products of sizes, a row a shape and a column a term. dtype: float, or object for ints."""
    powers = np.array([[term.count(symbol) for symbol in symbols] for term in terms], int)
    return np.prod(np.array([*shapes], dtype)[:, None] ** powers, axis=2)


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

    >>> evaluate({"MN": Fraction(1, 2), "M": Fraction(3)}, "MN", (3, 4))
    15
    """
    sizes = dict(zip(symbols, shape, strict=True)) | {"1": 1}
    each = (value * math.prod(sizes[it] for it in term) for term, value in coefficients.items())
    number = sum(each, Fraction())
    return int(number) if number.denominator == 1 else number


def parse(text: str, symbols: Sequence[str]) -> Polynomial:
    """The coefficients of a polynomial as text: the inverse of `polynomial`.

    >>> parse("2M + 5NM", "MN")["MN"]
    Fraction(5, 1)

    Raises ValueError for text of another form and for letters that are no symbols.
    """
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
        text += size if term == "1" else factor + term
    return text or "0"
