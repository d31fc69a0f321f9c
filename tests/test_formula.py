from fractions import Fraction

import pytest
import torch

from memtraffic import machine
from memtraffic.traffic import formula as module
from memtraffic.traffic.formula import (
    FIT,
    HELD_OUT,
    FormulaError,
    formula,
    random_matrix,
)

SMALL = ((2, 8), (4, 16), (6, 32), (8, 4), (4, 10))
OTHERS = ((2, 12), (10, 6))


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        pytest.param(lambda x: x.exp(), "reads MN, writes MN", id="elementwise"),
        pytest.param(lambda x: x + x, "reads 2MN, writes MN", id="coefficient"),
        pytest.param(
            lambda x: x - x[:, :1], "reads MN + M, writes MN", id="column-vector"
        ),
        pytest.param(lambda x: x - x[0], "reads MN + N, writes MN", id="row-vector"),
        pytest.param(lambda x: x.sum(), "reads MN, writes 1", id="constant"),
        pytest.param(lambda x: x.T, "reads 0, writes 0", id="nothing"),
        pytest.param(
            lambda x: x[1:].exp(), "reads MN - N, writes MN - N", id="negative"
        ),
        pytest.param(
            lambda x: x[1:, 1:].exp(),
            "reads MN - M - N + 1, writes MN - M - N + 1",
            id="all-terms",
        ),
        pytest.param(
            lambda x: x[0, 2:].exp(),
            "reads N - 2, writes N - 2",
            id="negative-constant",
        ),
    ],
)
def test_formulas_as_text(fn, text):
    assert str(formula(fn)) == text


def test_fractions_are_exact():
    found = formula(lambda x: x[: x.shape[0] // 2].exp(), fit=SMALL, held_out=OTHERS)
    assert str(found) == "reads (1/2)MN, writes (1/2)MN"
    assert found.reads == {"MN": Fraction(1, 2), "M": 0, "N": 0, "1": 0}


def test_coefficients_and_shapes_are_kept():
    found = formula(lambda x: x.max(dim=1))
    assert found.reads == {"MN": 1, "M": 0, "N": 0, "1": 0}
    assert found.writes == {"MN": 0, "M": 2, "N": 0, "1": 0}
    assert (found.fitted, found.checked, found.refused) == (FIT, HELD_OUT, ())
    assert found.elements(4096, 12672) == (4096 * 12672, 2 * 4096)


def test_several_inputs():
    def inputs(m, n):
        return torch.ones(m, n, device=machine.device()), torch.ones(
            n, m, device=machine.device()
        )

    assert (
        str(formula(lambda a, b: (a + b.T).sum(dim=0), inputs))
        == "reads 3MN, writes MN + N"
    )


def test_refused_shapes_take_no_part():
    def even(x):
        if x.shape[1] % 2:
            raise ValueError(f"{x.shape[1]} columns are odd")
        return x.exp()

    found = formula(even)
    assert str(found) == "reads MN, writes MN"
    assert found.refused == tuple(
        (m, n, f"{n} columns are odd") for m, n in (*FIT, *HELD_OUT) if n % 2
    )
    assert not {shape for shape in found.fitted + found.checked if shape[1] % 2}


def test_too_few_shapes_are_left():
    def refuse(x):
        raise ValueError("never")

    with pytest.raises(
        FormulaError,
        match=r"^0 shapes to solve at and 0 to check at are too few; 2 x 8: never$",
    ):
        formula(refuse)
    with pytest.raises(
        FormulaError, match=r"4 shapes to solve at and 2 to check at are too few$"
    ):
        formula(torch.exp, fit=SMALL[:4], held_out=OTHERS)
    with pytest.raises(
        FormulaError, match=r"5 shapes to solve at and 1 to check at are too few$"
    ):
        formula(torch.exp, fit=SMALL, held_out=OTHERS[:1])


def test_shapes_that_do_not_tell_the_terms_apart():
    with pytest.raises(
        FormulaError, match=r"the shapes 2 x 4, 2 x 8, .* do not tell the terms apart"
    ):
        formula(torch.exp, fit=[(2, n) for n in (4, 8, 16, 32, 64)])


def test_what_is_no_such_formula_shows_the_misses():
    with pytest.raises(
        FormulaError,
        match=r"what it writes is not of the form .* misses \d+ of 17 shapes, most of all .* x ",
    ):
        formula(lambda x: x @ x.T)


def test_a_formula_must_foretell_the_shapes_held_out():
    def reads_wide_rows_twice(x):
        return x.exp() if x.shape[1] <= 1000 else x.exp().exp()

    with pytest.raises(
        FormulaError,
        match=r"misses 3 of 17 shapes, most of all 2 x 4096: reads 16384, .8192; ",
    ):
        formula(reads_wide_rows_twice)


def test_other_errors_pass_through():
    def fail(x):
        raise TypeError("not this")

    with pytest.raises(TypeError, match=r"not this"):
        formula(fail)


def test_the_random_matrix_is_the_same_each_time():
    [a], [b] = random_matrix(3, 5), random_matrix(3, 5)
    assert a.shape == (3, 5)
    assert a.dtype == torch.float32
    assert a.device.type == machine.device().type
    assert torch.equal(a, b)
    assert not torch.equal(a[0], a[1])


def test_no_shape_is_both_solved_and_checked():
    assert not set(FIT) & set(HELD_OUT)
    assert len(FIT) > len(module.TERMS)


def test_half_an_element_stays_a_fraction():
    half = {"MN": Fraction(1, 2), "M": 0, "N": 0, "1": 0}
    assert module.Formula(half, half, (), ()).elements(3, 3) == (Fraction(9, 2),) * 2


def test_misses_are_signed_and_the_worst_comes_first():
    def narrow(x):
        return x.exp() if x.shape[1] <= 1000 else x[:, :1000].exp()

    worst = r"misses 3 of 17 shapes, most of all 2 x 4096: reads 2000, -6192; "
    with pytest.raises(module.FormulaError, match=worst):
        module.formula(narrow)


def test_a_formula_must_fit_where_it_was_solved():
    def twice_at_one_shape(x):
        return x.exp().exp() if x.shape == (5, 12) else x.exp()

    with pytest.raises(module.FormulaError, match=r"5 x 12: reads 120, \+"):
        module.formula(twice_at_one_shape)
