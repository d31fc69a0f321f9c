"""Solves for the formula of a function's traffic, `5MN + 2M`, from counts at enough shapes.

The counts are integers and so is the arithmetic: the coefficients of MN, M, N and 1 are the exact solution, in fractions, of
an over-determined system (the normal equations of a least-squares fit; the fit must leave nothing over), and they must then
foretell the counts at shapes that took no part in the fit.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch

from memtraffic import machine
from memtraffic.progress import progress
from memtraffic.traffic.count import count

TERMS = {
    "MN": lambda m, n: m * n,
    "M": lambda m, n: m,
    "N": lambda m, n: n,
    "1": lambda m, n: 1,
}
FIT = ((2, 8), (3, 16), (5, 32), (7, 4), (4, 64), (6, 16), (3, 5), (5, 12), (8, 21))
HELD_OUT = (
    (9, 8),
    (4, 2),
    (11, 64),
    (2, 4096),
    (3, 1024),
    (5, 781),
    (13, 7),
    (2, 1823),
)


class FormulaError(Exception):
    """A function's traffic is not of the form a MN + b M + c N + d; the message shows where and by how much."""


@dataclass(frozen=True)
class Formula:
    """Traffic in elements of a matrix of M rows and N columns: coefficients of MN, M, N and 1."""

    reads: dict[str, Fraction]
    writes: dict[str, Fraction]
    fitted: tuple
    checked: tuple
    refused: tuple = ()

    def __str__(self):
        return f"reads {_polynomial(self.reads)}, writes {_polynomial(self.writes)}"

    def elements(self, m, n):
        """The elements read and written at M = `m`, N = `n`, as ints where they are whole."""
        sides = (_evaluate(side, m, n) for side in (self.reads, self.writes))
        return tuple(int(side) if side.denominator == 1 else side for side in sides)


def formula(fn, inputs=None, fit=FIT, held_out=HELD_OUT):
    """The `Formula` of `fn`, a function of the tensors `inputs(M, N)` gives (one random float32 matrix by default).

    >>> print(formula(lambda x: x.exp()))
    reads MN, writes MN

    fit, held_out: the shapes (M, N) to solve and to check at. A shape that `fn` refuses with a ValueError is left out of both
    and listed in `Formula.refused`.

    Raises FormulaError, with the residuals, if no such formula exists, or if too few shapes are left; CountError as `count`.
    """
    inputs = inputs or random_matrix
    counts, refused = {}, []
    for shape in progress((*fit, *held_out), "counting"):
        try:
            traffic = count(fn, *inputs(*shape))
        except ValueError as error:
            refused.append((*shape, str(error)))
            continue
        counts[shape] = (traffic.read_elements, traffic.written_elements)
    fitted, checked = (
        [shape for shape in shapes if shape in counts] for shapes in (fit, held_out)
    )
    if len(fitted) <= len(TERMS) or len(checked) < 2:
        why = f"; {refused[0][0]} x {refused[0][1]}: {refused[0][2]}" if refused else ""
        raise FormulaError(
            f"{len(fitted)} shapes to solve at and {len(checked)} to check at are too few{why}"
        )
    sides = []
    for side, verb in enumerate(("reads", "writes")):
        solution = _solve([(shape, counts[shape][side]) for shape in fitted])
        misses = [
            (shape, counts[shape][side], residual)
            for shape in (*fitted, *checked)
            if (residual := counts[shape][side] - _evaluate(solution, *shape))
        ]
        if misses:
            misses.sort(key=lambda miss: -abs(miss[2]))
            rows = "; ".join(
                f"{m} x {n}: {verb} {found}, {float(left):+.4g}"
                for (m, n), found, left in misses[:4]
            )
            best = " + ".join(
                f"{float(value):.4g} {term}" for term, value in solution.items()
            )
            raise FormulaError(
                f"what it {verb} is not of the form a MN + b M + c N + d: the nearest, {best}, misses {len(misses)} of "
                f"{len(fitted) + len(checked)} shapes, most of all {rows}"
            )
        sides.append(solution)
    return Formula(*sides, tuple(fitted), tuple(checked), tuple(refused))


def random_matrix(m, n):
    """One float32 matrix of shape (m, n), normally distributed, the same each time, where this machine's kernels run."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(m, n, generator=generator).to(machine.device()),)


def _evaluate(coefficients, m, n):
    return sum(coefficients[term] * of(m, n) for term, of in TERMS.items())


def _solve(counts):
    """The least-squares coefficients of `counts`, pairs of ((m, n), elements), exactly, by Gaussian elimination."""
    rows = [
        ([Fraction(of(*shape)) for of in TERMS.values()], Fraction(found))
        for shape, found in counts
    ]
    size = len(TERMS)
    system = [
        [sum(terms[i] * terms[j] for terms, _ in rows) for j in range(size)]
        + [sum(terms[i] * found for terms, found in rows)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = next((row for row in range(i, size) if system[row][i]), None)
        if pivot is None:
            raise FormulaError(
                f"the shapes {', '.join(f'{m} x {n}' for (m, n), _ in counts)} do not tell the terms apart"
            )
        system[i], system[pivot] = system[pivot], system[i]
        system[i] = [value / system[i][i] for value in system[i]]
        for row in range(size):
            if row != i:
                system[row] = [
                    a - system[row][i] * b
                    for a, b in zip(system[row], system[i], strict=True)
                ]
    return {term: system[i][size] for i, term in enumerate(TERMS)}


def _polynomial(coefficients):
    """Coefficients as text: {"MN": 5, "M": 2, "N": 0, "1": 0} is `5MN + 2M`."""
    text = ""
    for term, value in coefficients.items():
        if value:
            size = "" if abs(value) == 1 and term != "1" else str(abs(value))
            size = f"({size})" if "/" in size and term != "1" else size
            sign = (
                (" - " if value < 0 else " + ") if text else ("-" if value < 0 else "")
            )
            text += sign + size + ("" if term == "1" else term)
    return text or "0"
