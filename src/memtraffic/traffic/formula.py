"""Solves for the formula of a function's traffic, such as `5MN + 2M`, from counts at enough shapes.

Counts are integers, and the arithmetic is exact: the coefficients of MN, M, N and 1 solve an
over-determined system by least squares, in fractions. Its residual must be zero, and the solution
must also predict the counts at shapes that took no part in solving it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from memtraffic.ops import SOFTMAX, Op
from memtraffic.progress import progress
from memtraffic.traffic.count import count

TERMS: dict[str, Callable[[int, int], int]] = {
    "MN": lambda m, n: m * n,
    "M": lambda m, n: m,
    "N": lambda m, n: n,
    "1": lambda m, n: 1,
}
FIT = ((2, 8), (3, 16), (5, 32), (7, 4), (4, 64), (6, 16), (3, 5), (5, 12), (8, 21))
HELD_OUT = ((9, 8), (4, 2), (11, 64), (2, 4096), (3, 1024), (5, 781), (13, 7), (2, 1823))

Shape = tuple[int, int]


class FormulaError(Exception):
    """A function's traffic is not of the form a MN + b M + c N + d; the message says where."""


@dataclass(frozen=True)
class Formula:
    """Traffic in elements, for a matrix of M rows and N columns.

    reads, writes: the coefficients of MN, M, N and 1. fitted, checked: the shapes that the formula
    was solved and checked at. refused: the shapes (M, N) that the function refused, and its reason.
    """

    reads: dict[str, Fraction]
    writes: dict[str, Fraction]
    fitted: tuple[Shape, ...]
    checked: tuple[Shape, ...]
    refused: tuple[tuple[int, int, str], ...] = ()

    def __str__(self) -> str:
        return f"reads {_polynomial(self.reads)}, writes {_polynomial(self.writes)}"

    def elements(self, m: int, n: int) -> tuple[int | Fraction, int | Fraction]:
        """The elements read and written at M = `m`, N = `n`, as ints where they are whole."""
        reads, writes = (_evaluate(side, m, n) for side in (self.reads, self.writes))
        return _whole(reads), _whole(writes)


def parse_formula(reads: str, writes: str) -> Formula:
    """The `Formula` that reads and writes these numbers of elements, solved at no shape.

    >>> parse_formula("5MN + 2M", "MN").elements(3, 5)
    (81, 15)

    reads, writes: as `Formula` prints them. Raises ValueError for text of another form.
    """
    return Formula(_parse(reads), _parse(writes), (), ())


def formula(
    fn: Callable[..., object],
    inputs: Op | Callable[[int, int], tuple[Tensor, ...]] | None = None,
    fit: Sequence[Shape] = FIT,
    held_out: Sequence[Shape] = HELD_OUT,
) -> Formula:
    """The `Formula` of the traffic of `fn`.

    >>> print(formula(lambda x: x.exp() - x[:, :1]))
    reads 2MN + M, writes 2MN

    inputs: an operation, which makes the tensors that `fn` takes, or a function of M and N that
    returns them; by default one random float32 matrix of shape (M, N), as softmax takes.
    fit, held_out: the shapes (M, N) to solve and to check at. A shape that `fn` refuses with a
    ValueError is left out of both and listed in `Formula.refused`.

    Raises FormulaError, with the residuals, if there is no such formula or too few shapes are left;
    what `count` raises; and what else `fn` raises.
    """
    op = SOFTMAX if inputs is None else inputs
    make_inputs = (lambda m, n: op.inputs((m, n))) if isinstance(op, Op) else op
    counts: dict[Shape, tuple[int, int]] = {}
    refused = []
    for shape in progress((*fit, *held_out), "counting"):
        try:
            traffic = count(fn, *make_inputs(*shape))
        except ValueError as error:
            refused.append((*shape, str(error)))
            continue
        counts[shape] = (traffic.read_elements, traffic.written_elements)
    fitted, checked = ([s for s in shapes if s in counts] for shapes in (fit, held_out))
    if not counts and refused:
        m, n, why = refused[0]
        raise FormulaError(f"the function refuses every shape, {m} x {n} with: {why}")
    if len(fitted) <= len(TERMS) or len(checked) < 2:
        why = "".join(f"; refused {m} x {n}: {why}" for m, n, why in refused[:1])
        raise FormulaError(
            f"{len(fitted)} shapes to solve at and {len(checked)} to check at are too few{why}"
        )
    sides = []
    for side, verb in enumerate(("reads", "writes")):
        elements = {shape: counts[shape][side] for shape in (*fitted, *checked)}
        solution = _solve({shape: elements[shape] for shape in fitted})
        residuals = {s: found - _evaluate(solution, *s) for s, found in elements.items()}
        if any(residuals.values()):
            raise _no_formula(verb, solution, elements, residuals)
        sides.append(solution)
    reads, writes = sides
    return Formula(reads, writes, tuple(fitted), tuple(checked), tuple(refused))


def _no_formula(
    verb: str,
    nearest: dict[str, Fraction],
    elements: dict[Shape, int],
    residuals: dict[Shape, Fraction],
) -> FormulaError:
    missed = sorted(filter(residuals.get, residuals), key=lambda shape: -abs(residuals[shape]))
    worst = "; ".join(
        f"{m} x {n}: {verb} {elements[m, n]}, {float(residuals[m, n]):+.4g}" for m, n in missed[:4]
    )
    return FormulaError(
        f"what it {verb} is not of the form a MN + b M + c N + d; "
        f"the nearest: {_polynomial(nearest, digits=4)}, misses {len(missed)} of {len(elements)} "
        f"shapes, most of all {worst}"
    )


def _solve(elements: Mapping[Shape, int]) -> dict[str, Fraction]:
    """The least-squares coefficients of a number of elements by shape, exactly.

    >>> _solve({(m, n): 5 * m * n + 2 * m for m, n in FIT})["MN"]
    Fraction(5, 1)
    """
    from sympy import Matrix
    from sympy.matrices.exceptions import NonInvertibleMatrixError

    terms = Matrix([[term(*shape) for term in TERMS.values()] for shape in elements])
    try:
        solution = (terms.T * terms).LUsolve(terms.T * Matrix(list(elements.values())))
    except NonInvertibleMatrixError:
        shapes = ", ".join(f"{m} x {n}" for m, n in elements)
        raise FormulaError(f"the shapes {shapes} do not tell the terms apart") from None
    return {
        term: Fraction(int(value.p), int(value.q))
        for term, value in zip(TERMS, solution, strict=True)
    }


def _evaluate(coefficients: Mapping[str, Fraction], m: int, n: int) -> Fraction:
    return sum((coefficients[term] * of(m, n) for term, of in TERMS.items()), Fraction())


def _whole(number: Fraction) -> int | Fraction:
    return int(number) if number.denominator == 1 else number


def _parse(text: str) -> dict[str, Fraction]:
    """The coefficients of a polynomial as text: the inverse of `_polynomial`."""
    coefficients, left = dict.fromkeys(TERMS, Fraction()), text.replace(" ", "")
    first = True
    while left or first:
        found = re.match(r"([+-]?)(?:\((\d+/\d+)\)|(\d+))?(MN|M|N|)", left)
        assert found is not None
        sign, ratio, whole, term = found.groups()
        if not (ratio or whole or term) or not (sign or first):
            raise ValueError(f"{text!r} is not a formula such as '5MN + 2M': what is {left!r}?")
        size = Fraction(ratio or whole or 1)
        coefficients[term or "1"] += -size if sign == "-" else size
        left, first = left[found.end() :], False
    return coefficients


def _polynomial(coefficients: Mapping[str, Fraction], digits: int | None = None) -> str:
    """Coefficients as text: exact, or rounded to a number of digits.

    >>> _polynomial({"MN": Fraction(5, 2), "M": Fraction(-1), "N": Fraction(0), "1": Fraction(3)})
    '(5/2)MN - M + 3'
    >>> _polynomial({"MN": Fraction(-12, 7), "1": Fraction(-451, 10)}, digits=4)
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
