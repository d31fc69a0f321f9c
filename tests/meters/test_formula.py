import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from memtraffic import runtime
from memtraffic.errors import FormulaError, InputsError
from memtraffic.kernels.softmax.definitions import SOFTMAX, SOFTMAX_BACKWARD
from memtraffic.meters.formula import (
    FIT,
    HELD_OUT,
    Formula,
    formula,
    parse_formula,
    plan,
    products_of,
)

SMALL = ((2, 8), (4, 16), (6, 32), (8, 4), (4, 10))
WIDE = ((2, 8), (4, 16), (6, 32), (3, 4), (4, 10))
OTHERS = ((2, 12), (6, 10))


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        pytest.param(lambda x: x.exp(), "reads MN, writes MN", id="elementwise"),
        pytest.param(lambda x: x + x, "reads 2MN, writes MN", id="coefficient"),
        pytest.param(lambda x: x - x[:, :1], "reads MN + M, writes MN", id="column-vector"),
        pytest.param(lambda x: x - x[0], "reads MN + N, writes MN", id="row-vector"),
        pytest.param(lambda x: x.sum(), "reads MN, writes 1", id="constant"),
        pytest.param(lambda x: x.T, "reads 0, writes 0", id="nothing"),
        pytest.param(lambda x: x[1:].exp(), "reads MN - N, writes MN - N", id="negative"),
        pytest.param(
            lambda x: x[1:, 1:].exp(),
            "reads MN - M - N + 1, writes MN - M - N + 1",
            id="all-terms",
        ),
        pytest.param(lambda x: x[0, 2:].exp(), "reads N - 2, writes N - 2", id="negative-constant"),
    ],
)
def test_formula_as_text(fn, text):
    assert str(formula(fn)) == text


@pytest.mark.parametrize(
    ("text", "coefficients"),
    [
        ("MN", (1, 0, 0, 0)),
        ("5MN + 2M", (5, 2, 0, 0)),
        ("2M+5MN", (5, 2, 0, 0)),
        ("-M + N", (0, -1, 1, 0)),
        ("(1/2)MN - 3", (Fraction(1, 2), 0, 0, -3)),
        ("M + M", (0, 2, 0, 0)),
        ("3NM", (3, 0, 0, 0)),
        ("0", (0, 0, 0, 0)),
    ],
)
def test_parse_formula(text, coefficients):
    parsed = parse_formula(text, "N")
    assert tuple(parsed.reads.values()) == coefficients
    assert str(parse_formula(*str(parsed).removeprefix("reads ").split(", writes "))) == str(parsed)


@pytest.mark.parametrize("text", ["", "KM", "MN 2M", "MN +", "2 x", "1/2", "mn", "M^2"])
def test_parse_formula_of_something_else(text):
    with pytest.raises(ValueError, match="is not a formula such as"):
        parse_formula("MN", text)


def test_formula_begins_with_a_negative_term():
    found = formula(lambda x: x[0, x.shape[0] :].exp(), fit=WIDE, held_out=OTHERS)
    assert str(found) == "reads -M + N, writes -M + N"
    assert found.elements(2, 10) == (8, 8)
    half = formula(lambda x: x[0, x.shape[0] // 2 :].exp(), fit=SMALL, held_out=OTHERS)
    assert str(half) == "reads -(1/2)M + N, writes -(1/2)M + N"


def test_formula_in_fractions():
    found = formula(lambda x: x[: x.shape[0] // 2].exp(), fit=SMALL, held_out=OTHERS)
    assert str(found) == "reads (1/2)MN, writes (1/2)MN"
    assert found.reads == {"MN": Fraction(1, 2), "M": 0, "N": 0, "1": 0}
    assert found.elements(3, 3) == (Fraction(9, 2),) * 2


def test_formula_keeps_coefficients_and_shapes():
    found = formula(lambda x: x.max(dim=1))
    assert found.reads == {"MN": 1, "M": 0, "N": 0, "1": 0}
    assert found.writes == {"MN": 0, "M": 2, "N": 0, "1": 0}
    assert (found.fitted, found.checked, found.refused) == (FIT, HELD_OUT, ())
    elements = found.elements(4096, 12672)
    assert elements == (4096 * 12672, 2 * 4096)
    assert {type(number) for number in elements} == {int}


def test_formula_of_several_inputs():
    def inputs(m, n):
        return torch.ones(m, n, device=runtime.device()), torch.ones(n, m, device=runtime.device())

    found = formula(lambda a, b: (a + b.T).sum(dim=0), inputs)
    assert str(found) == "reads 3MN, writes MN + N"


def test_formula_of_an_op():
    found = formula(lambda y, dy: y * (dy - (y * dy).sum(dim=1, keepdim=True)), SOFTMAX_BACKWARD)
    assert str(found) == "reads 6MN + M, writes 3MN + M"
    assert formula(torch.exp, SOFTMAX) == formula(torch.exp)


def test_formula_leaves_out_refused_shapes():
    def even(x):
        if x.shape[1] % 2:
            raise ValueError(f"{x.shape[1]} columns are odd")
        return x.exp()

    found = formula(even)
    assert str(found) == "reads MN, writes MN"
    odd = [(m, n) for m, n in (*FIT, *HELD_OUT) if n % 2]
    assert found.refused == tuple((m, n, f"{n} columns are odd") for m, n in odd)
    assert not set(odd) & {*found.fitted, *found.checked}


@pytest.mark.parametrize(
    ("fit", "held_out", "message"),
    [
        pytest.param(SMALL[:4], OTHERS, "4 shapes to solve at and 2 to check at", id="solve"),
        pytest.param(SMALL, OTHERS[:1], "5 shapes to solve at and 1 to check at", id="check"),
        pytest.param([(2, n) for n in (4, 8, 16, 32, 64)], OTHERS, "2 x 4, 2 x 8", id="alike"),
    ],
)
def test_formula_of_too_few_shapes(fit, held_out, message):
    with pytest.raises(FormulaError, match=message):
        formula(torch.exp, fit=fit, held_out=held_out)


def test_formula_of_too_few_shapes_says_why_the_first_was_refused():
    def narrow(x):
        if x.shape[1] > 8:
            raise ValueError("too wide")
        return x.exp()

    with pytest.raises(FormulaError, match=r"3 x 16: too wide$") as caught:
        formula(narrow)
    assert str(caught.value).count("refused") == 1


def test_formula_of_a_function_that_refuses_every_shape():
    def refuse(x):
        raise ValueError("never")

    with pytest.raises(FormulaError, match=r"\.refuse refuses .* 2 x 8 with ValueError: never"):
        formula(refuse)


def test_formula_that_does_not_exist():
    """The message shows the nearest one, here beside NumPy's, with the signs of its terms."""
    terms = [[m * n, m, n, 1] for m, n in FIT]
    [a, b, c, d], *_ = np.linalg.lstsq(terms, [math.isqrt(m * n) for m, n in FIT])
    with pytest.raises(FormulaError) as caught:
        formula(lambda x: torch.ones(math.isqrt(x.numel()), device=x.device))
    nearest = f"the nearest: {a:.4g} MN + {b:.4g} M + {c:.4g} N + {d:.4g}, misses"
    assert nearest in str(caught.value)
    assert str(caught.value).count(": writes ") == 4  # of all the shapes it misses


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        pytest.param(
            lambda x: x.exp() if x.shape[1] <= 1000 else x.exp().exp(),
            r"misses 3 of 17 shapes, most of all 2 x 4096: reads 16384, \+8192; ",
            id="more-at-a-shape-held-out",
        ),
        pytest.param(
            lambda x: x.exp() if x.shape[1] <= 1000 else x[:, :1000].exp(),
            "misses 3 of 17 shapes, most of all 2 x 4096: reads 2000, -6192; ",
            id="less-at-a-shape-held-out",
        ),
        pytest.param(
            lambda x: x.exp().exp() if x.shape == (5, 12) else x.exp(),
            r"5 x 12: reads 120, \+",
            id="at-a-shape-solved-at",
        ),
        pytest.param(
            lambda x: x[:, 0].exp() if x.shape != (5, 781) else x.exp(),
            r"misses 1 of 17 shapes, most of all 5 x 781: reads 3905, \+3900$",
            id="at-one-shape",
        ),
    ],
)
def test_formula_must_fit_every_shape(fn, message):
    with pytest.raises(FormulaError, match=message):
        formula(fn)


def test_formula_checks_what_is_written():
    with pytest.raises(FormulaError, match="what it writes"):
        formula(lambda x: torch.ones(7 if x.shape == (5, 781) else 8))


def test_formula_passes_on_other_errors():
    def fail(x):
        raise TypeError("not this")

    with pytest.raises(TypeError, match="not this"):
        formula(fail)


def test_no_shape_is_both_solved_and_checked():
    assert not set(FIT) & set(HELD_OUT)
    assert len(FIT) > len(products_of("MN"))


def test_elements_of_a_formula():
    half = {"MN": Fraction(1, 2), "M": 0, "N": 0, "1": 0}
    whole = {"MN": 0, "M": Fraction(2), "N": Fraction(-1), "1": Fraction(3)}
    assert Formula(half, whole, (), ()).elements(3, 5) == (Fraction(15, 2), 4)


def test_formula_as_text_adds_and_subtracts_less_than_one():
    half = Fraction(1, 2)
    found = Formula({"MN": Fraction(1), "M": half}, {"MN": Fraction(1), "M": -half}, (), ())
    assert str(found) == "reads MN + (1/2)M, writes MN - (1/2)M"


# ---- any inputs


@pytest.mark.parametrize(
    ("fn", "inputs", "text"),
    [
        pytest.param(torch.matmul, "M,K K,N", "reads MK + KN, writes MN", id="three-sizes"),
        pytest.param(torch.exp, "N", "reads N, writes N", id="one-size"),
        pytest.param(torch.exp, "3,5", "reads 15, writes 15", id="no-size"),
        pytest.param(torch.add, "M,128 128,", "reads 128M + 128, writes 128M", id="numbers"),
        pytest.param(torch.add, "N M,N", "reads MN + N, writes MN", id="order-of-the-matrix"),
        pytest.param(torch.add, "M,N other=N", "reads MN + N, writes MN", id="keyword"),
        pytest.param(lambda x: x @ x.T, None, "reads 2MN, writes MM", id="square"),
        pytest.param(
            lambda x: x @ x.T @ x @ x.T, "M,N", "reads MM + 5MN, writes 2MM + MN", id="squares"
        ),
        pytest.param(
            lambda q, k: torch.softmax(q @ k.mT, -1),
            "B,H,S,D B,H,S,D",
            "reads BHSS + 2BHSD, writes 2BHSS",
            id="four-sizes",
        ),
        pytest.param(
            lambda x: x.new_zeros(x.numel() ** 2),
            "N",
            "reads 0, writes NN",
            id="square-of-one-size",
        ),
    ],
)
def test_formula_of_inputs(fn, inputs, text):
    assert str(formula(fn, inputs)) == text


def refusing(condition):
    """A product of matrices that takes no size for which `condition` fails."""

    def fn(a, b):
        for size in (*a.shape, *b.shape):
            if not condition(size):
                raise ValueError(f"{size} is not taken")
        return a @ b

    return fn


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param(lambda size: size & (size - 1) == 0, id="powers-of-two"),
        pytest.param(lambda size: size % 16 == 0, id="multiples-of-16"),
    ],
)
@pytest.mark.parametrize("inputs", ["M,K K,N", "N,N N,N"])
def test_formula_of_sizes_that_a_kernel_takes(condition, inputs):
    found = formula(refusing(condition), inputs)
    expected = "reads MK + KN, writes MN" if "K" in inputs else "reads 2NN, writes NN"
    assert str(found) == expected
    assert found.refused[0][-1].endswith("is not taken")


def test_formula_that_does_not_exist_for_the_sizes_that_a_kernel_takes():
    def fn(x):
        if x.shape[0] % 16 or x.shape[1] % 16:
            raise ValueError("not a multiple of 16")
        return x.exp() if x.shape[1] < 60 else x.exp().exp()

    with pytest.raises(FormulaError, match=r"the nearest: .* MN .* misses \d+ of \d\d shapes"):
        formula(fn)


def test_formula_of_multiples_of_128():
    def fn(x):
        if x.shape[-1] % 128:
            raise ValueError("not a multiple of 128")
        return x.exp()

    assert str(formula(fn)) == "reads MN, writes MN"
    assert str(formula(fn, "N")) == "reads N, writes N"


@pytest.mark.parametrize("symbols", range(5))
def test_plan_tells_the_products_apart(symbols):
    """Also by the powers of two of the first round alone; no shape comes twice."""
    rounds = plan(symbols)
    shapes = [shape for sides in rounds for side in sides for shape in side]
    if symbols:
        assert len(set(shapes)) == len(shapes)
    letters = "MNKL"[:symbols]
    powers = [shape for shape in rounds[0][0] if all(n & (n - 1) == 0 for n in shape)]
    for fit in (rounds[0][0], powers)[: 1 if symbols == 2 else 2]:
        numbers = [dict(zip(letters, shape, strict=True)) | {"1": 1} for shape in fit]
        rows = [[math.prod(map(n.get, term)) for term in products_of(letters)] for n in numbers]
        assert np.linalg.matrix_rank(np.array(rows, dtype=float)) == 2**symbols
        assert not symbols or (len(fit) > 2**symbols and len(rounds[0][1]) >= 2)


def test_formula_at_given_shapes():
    given = ((3, 4, 5), (5, 4, 3))
    found = formula(torch.matmul, "M,K K,N", held_out=given)
    assert (found.fitted, found.checked) == (tuple(plan(3)[0][0]), given)
    with pytest.raises(FormulaError, match="0 shapes to solve at"):
        formula(torch.exp, fit=())


def test_formula_of_too_many_sizes():
    with pytest.raises(FormulaError, match=r"5 sizes \(A, B, C, D, E\) are more than 4"):
        formula(torch.exp, "A,B,C,D,E")


def test_formula_of_inputs_that_cannot_be_made_is_no_refusal():
    with pytest.raises(InputsError, match="int8 holds whole numbers below 128, not below"):
        formula(lambda x, at: x, "M,N M:int8<N")


def test_formula_of_a_function_of_three_sizes():
    def inputs(m, k, n):
        return torch.ones(m, k, device=runtime.device()), torch.ones(k, n, device=runtime.device())

    assert str(formula(torch.matmul, inputs)) == "reads MK + KN, writes MN"


def test_formula_backward():
    found = formula(lambda x, w: x * w, "M,N N", backward=True)
    # dx = dy * w; dw = sum(dy * x)
    assert str(found) == (
        "forward: reads MN + N, writes MN\nbackward: reads 4MN + N, writes 2MN + N"
    )
    assert found.elements(2, 3) == (9, 6)
    assert found.backward.elements(2, 3) == (27, 15)


def test_formula_backward_that_does_not_exist():
    with pytest.raises(FormulaError, match="what the backward pass reads"):
        formula(Uneven, backward=True)


class Uneven(torch.autograd.Function):
    """Doubles, with a backward pass that reads half of the gradient of large matrices twice."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2 if dy.shape[1] < 100 else (dy * 1) * 2
