import itertools
import math
import random
import re
from fractions import Fraction

import blocked_kernels as blocked
import kernels
import pytest
import torch
from triton.runtime import driver

from memtraffic import device
from memtraffic.errors import AccessError, FormulaError
from memtraffic.meters import counts as module
from memtraffic.meters.counts import FIT, Counts
from memtraffic.meters.formula import formula
from memtraffic.meters.polynomials import least_squares, parse, polynomial
from memtraffic.stand_in import stand_in
from memtraffic.testing import assert_traffic

SMALL = ((2, 8), (4, 16), (6, 32), (8, 4), (4, 10))
OTHERS = ((2, 12), (6, 10))


@pytest.fixture
def small_grids(monkeypatch):
    """Of fewer programs, as interpreted ones take their time."""
    monkeypatch.setattr(module, "MAX_PROGRAMS", 300)


GRID = [*itertools.product((1, 2, 3), (2, 5), (1, 4), (3, 7, 101))]


@pytest.mark.parametrize(
    ("fn", "inputs", "text"),
    [
        (lambda x: x.sum(), None, "reads MN, writes 1"),
        (lambda x: x.T, None, "reads 0, writes 0"),
        (lambda x: x[1:, 1:].exp(), None, "reads MN - M - N + 1, writes MN - M - N + 1"),
        (lambda x: x[0, 2:].exp(), None, "reads N - 2, writes N - 2"),
        (torch.add, "M,128 128,", "reads 128M + 128, writes 128M"),
        (lambda x: x @ x.T @ x @ x.T, "M,N", "reads MM + 5MN, writes 2MM + MN"),
        (lambda q, k: torch.softmax(q @ k.mT, -1), "B,S,D B,S,D",
         "reads BSS + 2BSD, writes 2BSS"),
        (lambda x: x.new_zeros(x.numel() ** 2), "N", "reads 0, writes NN"),
    ],
)  # fmt: skip
def test_formula_as_text(fn, inputs, text):
    assert formula(fn, inputs).text == text


def test_formula_prints_its_range():
    found = formula(torch.exp)
    assert str(found) == f"reads MN, writes MN\n{found.evidence}"
    assert "M to 301, N to 4099; outside: not tried" in str(found)
    forward, backward, *range_ = str(formula(torch.exp, backward=True)).splitlines()
    assert (forward, backward) == ("forward: reads MN, writes MN", "backward: reads 2MN, writes MN")
    assert range_ == formula(torch.exp, backward=True).evidence.splitlines()


HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("text", "coefficients", "again"),
    [
        ("5MN + 2M", (5, 2, 0, 0), "5MN + 2M"),
        ("(1/2)MN - 3", (HALF, 0, 0, -3), "(1/2)MN - 3"),
        ("MN + (1/2)M - (1/2)N", (1, HALF, -HALF, 0), "MN + (1/2)M - (1/2)N"),
        ("M + M", (0, 2, 0, 0), "2M"),
        ("3NM", (3, 0, 0, 0), "3MN"),
        ("0", (0, 0, 0, 0), "0"),
        ("MN + 3ceil(N/256)*M", (1, 0, 0, 0, 3), "MN + 3M*ceil(N/256)"),
        ("ceil(NM/8)*ceil(N/2)", (0, 0, 0, 0, 1), "ceil(MN/8)*ceil(N/2)"),
        ("-(1/2)*ceil(M/3)", (0, 0, 0, 0, -HALF), "-(1/2)*ceil(M/3)"),
    ],
)
def test_parse(text, coefficients, again):
    parsed = parse(text, "MN")
    assert (tuple(parsed.values()), polynomial(parsed)) == (coefficients, again)


@pytest.mark.parametrize(
    "text", ["", "KM", "MN 2M", "MN +", "2 x", "1/2", "mn", "M^2", "ceil(N)", "M*", "ceil(K/2)"]
)
def test_parse_of_something_else(text):
    with pytest.raises(ValueError, match="is not a formula such as"):
        parse(text, "MN")


def test_formula_in_fractions():
    found = formula(lambda x: x[: x.shape[0] // 2].exp(), fit=SMALL, held_out=OTHERS)
    assert found.text == "reads (1/2)MN, writes (1/2)MN"
    assert (found.fitted, found.checked) == (SMALL, OTHERS)
    assert found.elements(3, 3) == (Fraction(9, 2),) * 2


def test_formula_keeps_coefficients_and_shapes():
    found = formula(lambda x: x.max(dim=1))
    assert found.reads == {"MN": 1, "M": 0, "N": 0, "1": 0}
    assert found.writes == {"MN": 0, "M": 2, "N": 0, "1": 0}
    large = {(301, 2), (2, 4099), (301, 4099)}
    assert (found.fitted, len(found.checked), found.refused) == (FIT, 8, ())
    assert large < {*found.checked} and not {*FIT} & {*found.checked}
    elements = found.elements(4096, 12672)
    assert elements == (4096 * 12672, 2 * 4096)
    assert {type(number) for number in elements} == {int}
    assert found.tried == {"M": (2, 301), "N": (2, 4099)}
    assert (found.together, found.steps) == ((301, 4099), {})
    assert found.holds(301, 4099) and not found.holds(302, 4) and not found.holds(4, 5000)


def taking(condition, error=ValueError):
    """A function of matrices, or of vectors, whose sizes fulfil a condition."""

    def fn(x):
        if not condition(*x.shape):
            raise error(f"{x.shape[-1]} is not taken")
        return x.exp()

    return fn


@pytest.mark.parametrize("error", [ValueError, AssertionError, NotImplementedError])
def test_formula_leaves_out_refused_shapes(error):
    found = formula(taking(lambda m, n: n % 2 == 0, error))
    assert found.text == "reads MN, writes MN"
    odd = [(m, n) for m, n in FIT if n % 2]
    assert found.refused == tuple((m, n, f"{n} is not taken") for m, n in odd)
    assert not set(odd) & {*found.fitted, *found.checked}


@pytest.mark.parametrize(
    ("fit", "held_out", "message"),
    [
        (SMALL[:4], OTHERS, "4 shapes to solve at are too few: it takes 5"),
        ((), None, "0 shapes to solve at"),
        (SMALL, OTHERS[:1], "1 shapes to check at are too few: it takes 2"),
        ([(2, n) for n in (4, 8, 16, 32, 64)], OTHERS, "not tell the terms of apart: 2 x 4, 2 x 8"),
    ],
)
def test_formula_of_too_few_shapes(fit, held_out, message):
    with pytest.raises(FormulaError, match=message):
        formula(torch.exp, fit=fit, held_out=held_out)


def test_formula_of_wide_rows_is_checked_at_few_of_them():
    found = formula(torch.exp, "M,65536")
    assert found.text == "reads 65536M, writes 65536M" and len(found.checked) == 2


@pytest.mark.parametrize("inputs", [None, lambda m, n: refuse()])
def test_formula_of_what_refuses_every_shape(inputs):
    with pytest.raises(FormulaError, match=r"refuse refuses every shape, 2 x 8 with: never"):
        formula(refuse, inputs)


def refuse(*args):
    raise ValueError("never")


def test_formula_that_does_not_exist():
    """The message has what was counted at the smallest shapes, and no polynomial."""
    each = "2 at 4 x 2, 3 at 3 x 5, 3 at 5 x 3, 4 at 2 x 8"
    with pytest.raises(FormulaError, match=rf"^it writes no sum of products of M, N: {each}$"):
        formula(lambda x: torch.ones(math.isqrt(x.numel()), device=x.device))


@pytest.mark.slow
@pytest.mark.usefixtures("small_grids")
def test_formula_of_a_kernel_that_leaves_its_tensors():
    """It has a formula where it stays in them, and the evidence says what it does elsewhere."""
    found = formula(kernels.dropped_mask)
    assert (found.text, found.steps) == ("reads MN, writes MN", {"N": "powers of two"})
    assert re.search(r"8 others, 4 refused: .* outside x_ptr, of shape \(3, 5\)", found.evidence)
    message = r"outside x_ptr, .* It was at 4\. If .* as fit= and held_out="
    with pytest.raises(AccessError, match=message):
        formula(kernels.dropped_mask, "M,3")
    shapes = [(3, 8), (5, 16), (4, 32), (7, 64), (2, 5)]
    with pytest.raises(AccessError, match="It was at 2 x 5"):
        formula(kernels.dropped_mask, fit=shapes)


@pytest.mark.parametrize(("widest", "tried"), [(2000, 1031), (1024, 1024)])
def test_formula_of_narrow_rows(widest, tried):
    """Wider rows take another way, as in a kernel that chooses its blocks by the width."""
    fn = twice_where(lambda at: at[1] > widest)
    found = formula(fn)
    assert found.text == "reads MN, writes MN"
    assert found.tried == {"M": (2, 301), "N": (2, tried)}
    text = r"wider rows have another formula: it reads MN at all but \d of 17"
    assert re.search(text, found.evidence)
    with pytest.raises(AssertionError, match="2 x 4099"):
        assert_traffic(fn, "MN", "MN")


def twice_where(odd):
    return lambda x: x.exp().exp() if odd(x.shape) else x.exp()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            lambda at: at[1] > 1000,
            r"^it reads MN at all but 4 of 17 shapes: 2 x 4099 \(there 16396, not",
        ),
        (lambda at: at == (4, 64), r"^it reads MN at all but 4 x 64 \(there 512, not 256\)$"),
        (lambda at: at[0] > 300, r"2 of 17 shapes: 301 x 2 \(there 1204, not 602\), 301 x 4099 "),
    ],
)
def test_formula_must_hold_at_every_shape(odd, message):
    with pytest.raises(FormulaError, match=message):
        formula(twice_where(odd))


def test_refusal_solves_in_fractions_only_what_has_a_solution(monkeypatch):
    """A refusal with four sizes and dozens of shapes took a minute after the last count."""
    calls = []

    def solve(terms, symbols, numbers):
        calls.append(numbers)
        return least_squares(terms, symbols, numbers)

    monkeypatch.setattr(module, "least_squares", solve)
    with pytest.raises(FormulaError, match=r"^it reads BSHD at all but "):
        formula(twice_where(lambda at: at[3] > 1000), "B,S,H,D", fit=GRID)
    assert len(calls) < 40


# ---- the range


@pytest.mark.parametrize(
    ("inputs", "size", "low", "high"),
    [
        ("M,N", 1, 100, 700), ("M,N", 1, 129, 255), ("M,N", 1, 1025, 2048), ("M,N", 0, 16, 31),
        ("M,N", 0, 65, 128), ("N", 0, 2049, 4096), ("K,M,N", 0, 33, 64), ("K,M,N", 2, 300, 500),
    ],
)  # fmt: skip
def test_formula_holds_at_no_size_of_an_octave_that_costs_more(inputs, size, low, high):
    """Octaves are seen even where those before and after them have one formula."""
    fn = twice_where(lambda at: low <= at[size] <= high)
    try:
        found = formula(fn, inputs)
    except FormulaError as error:
        assert "at all but" in str(error)
    else:  # that of narrow rows
        assert not any(
            found.holds(*(n if i == size else 8 for i in range(len(found.symbols))))
            for n in range(low, high + 1)
        )
        assert found.tried["N"][1] < low


@pytest.mark.parametrize("inputs", ["N", "M,N", "K,M,N"])
def test_formula_tries_each_octave(inputs):
    found = formula(torch.exp, inputs)
    assert [len(ranges) for ranges in found.ranges.values()] == [1] * len(found.symbols)
    assert {*found.tried.values()} <= {(n, most) for n in (1, 2, 3) for most in (301, 4099)}


def test_formula_says_which_octaves_were_not_tried():
    found = formula(torch.exp, fit=[*SMALL, (3, 5)], held_out=[(5, 3), (300, 4000)])
    assert found.ranges == {"M": [(2, 8), (257, 300)], "N": [(3, 32), (2049, 4000)]}
    assert "M to 8 and from 257 to 300, N to 32 and from 2049 to 4000; outside" in str(found)
    assert found.holds(8, 32) and found.holds(260, 2049)
    assert not any(found.holds(*at) for at in [(9, 8), (8, 33), (256, 8), (2, 2048), (4, 500)])


def test_formula_says_in_which_steps_it_was_tried():
    found = formula(taking(lambda m, n: n & (n - 1) == 0))
    assert found.steps == {"N": "powers of two"}
    assert found.ranges["N"] == [(2, 4096)] and len(found.refused) == 4
    assert found.holds(300, 2048) and not found.holds(300, 2047)
    assert "M to 301, N to 4096 in powers of two; outside: not tried" in found.evidence


def test_formula_of_shapes_of_ones_own_is_checked_at_their_multiples():
    fit = [(20 + m, 64 * n) for m, n in ((1, 1), (2, 3), (5, 2), (8, 5), (3, 4))]
    found = formula(torch.exp, fit=fit)
    assert found.fitted == tuple(fit)
    assert found.steps == {"N": "multiples of 64"}
    assert "M from 21 to 301, N to 4160 in multiples of 64;" in found.evidence
    assert not found.holds(20, 64) and found.holds(300, 640) and not found.holds(300, 650)


# ---- counts that are not repeatable, inputs that are refused


def test_formula_refuses_a_function_that_keeps_results():
    kept = {}

    def cached(x):
        if x.shape not in kept:
            kept[x.shape] = x.exp()
        return kept[x.shape]

    message = "at 3 x 16 it reads 48 elements the first time and 0 the second"
    with pytest.raises(FormulaError, match=message):
        formula(cached)
    kept.clear()
    with pytest.raises(FormulaError, match="it reads 15 elements the first time and 0"):
        formula(cached, "3,5")


def numbered(m, n, calls=itertools.count()):  # noqa: B008
    return torch.ones(m, n, device=device.default()), next(calls)


def drawn(m, n):
    return torch.ones(m, n, device=device.default()), torch.rand(m, n)


def test_formula_blames_inputs_that_differ_between_two_calls():
    """Also where only numbers differ; not where traffic is the same for all values."""
    with pytest.raises(FormulaError, match="two calls of numbered, so seed them") as error:
        formula(lambda x, call: x.exp() if call % 3 else x, numbered)
    assert "keep results" not in str(error.value)
    assert formula(torch.mul, drawn).text == "reads 2MN, writes MN"


def test_formula_blames_inputs_that_differ_where_there_is_no_formula():
    """The first shapes, which are counted twice, gave the same by luck."""
    with pytest.raises(FormulaError, match=r"no sum of .* two calls of drawn, so seed them"):
        formula(lambda x, at: x[: int(1 + at.sum()) if x.numel() > 50 else None].exp(), drawn)


def test_formula_leaves_out_what_only_the_first_call_moves():
    table = []

    def fn(x):
        if not table:
            table.append(torch.ones(7, device=x.device).exp())
        return x.exp()

    found = formula(fn)
    assert found.text == "reads MN, writes MN"
    assert "at 2 x 8 it reads 23 elements the first time and 16 later" in found.evidence


def test_formula_leaves_out_what_inputs_refuse():
    def inputs(m, n):
        if n > 1000:
            raise AssertionError("no so wide")
        return torch.ones(m, n, device=device.default())

    found = formula(torch.exp, inputs)
    assert (found.text, found.tried["N"]) == ("reads MN, writes MN", (2, 725))
    assert (11, 2897, "no so wide") in found.refused


# ---- bytes


def test_formula_in_bytes():
    found = formula(lambda x, w: (x * w).float(), "M,N N:fp64", dtype="bfloat16")
    assert (found.elements(2, 3), found.bytes(2, 3)) == ((15, 12), (84, 72))
    assert polynomial(found.read_bytes) == "10MN + 8N"


# ---- kernels that work in blocks


@pytest.mark.slow
@pytest.mark.usefixtures("small_grids")
def test_formula_keeps_grids_small():
    """A program an element: a size still reaches a hundred, or the range says less."""
    found = formula(blocked.add_bias(1, 1))
    assert found.text == "reads 2MN, writes MN"
    assert found.tried == {"M": (2, 128), "N": (2, 128)}
    counted = max(math.prod(shape) for shape in (*found.fitted, *found.checked))
    assert counted <= 300 and "together to" in found.evidence


# Kernels that work in blocks: the inputs, and what they read and write, or what the refusal says.
BLOCKED = {
    ("partial_sums", 256): ("N", "N", "ceil(N/256)"),
    ("partial_sums", 1024): ("M,N", "MN", "ceil(MN/1024)"),
    ("two_stages", 64, 32): ("N", "N + ceil(N/64)", "ceil(N/64) + ceil(N/2048)"),
    ("group_scales", 128): ("M,N", "MN", "MN + M*ceil(N/128)"),
    ("group_scales", 96): ("M,N", "MN", "MN + M*ceil(N/96)"),
    ("layer_norm_backward", 10**6, 48): ("M,N", "MN + N*ceil(M/48)", "MN + N*ceil(M/48) + N"),
    ("add_bias", 8, 64, True): ("M,N", "MN + 64*ceil(M/8)*ceil(N/64)", "MN"),
    ("matmul", 64, 32, 64): ("M,K K,N", "MK*ceil(N/32) + KN*ceil(M/64)", "MN"),
    ("add_bias", 256, 64, False, True): ("M,N", "reads 0 at all but .* 301 x 2 .*--fit and "),
    ("blur", 64): ("M,N", "it reads MN at all but "),
}


@pytest.mark.slow
@pytest.mark.usefixtures("small_grids")
@pytest.mark.parametrize(("kernel", "found"), BLOCKED.items(), ids=lambda it: str(it))
def test_formula_is_right_in_the_range_that_it_prints(kernel, found):
    """What is printed equals the count at five shapes drawn from the range; all else is refused."""
    (name, *parameters), (inputs, *texts) = kernel, found
    fn = getattr(blocked, name)(*parameters)
    if len(texts) == 1:
        with pytest.raises(FormulaError, match=texts[0]):
            formula(fn, inputs)
        return
    found, rng = formula(fn, inputs), random.Random(0)
    assert found.text == "reads {}, writes {}".format(*texts)
    assert len(found.checked) >= 4 and not {*found.checked} & {*found.fitted}
    assert_traffic(fn, *texts, inputs, fit=found.fitted[:7], held_out=found.checked)
    counts, wanted = Counts(fn, inputs), []
    while len(wanted) < 5:
        shape = tuple(
            round(low * (high / low) ** rng.random()) for low, high in found.tried.values()
        )
        wanted += [shape] if found.holds(*shape) else []
    counts.add((), wanted, limit=True)
    assert len(counts.traffic) >= 3
    for shape in counts.traffic:
        assert found.elements(*shape) == tuple(
            counts.moved(0, side)[shape] for side in ("reads", "writes")
        ), shape


@pytest.mark.slow
def test_formula_of_blocks_must_hold_at_large_multiples():
    """Blocks that are larger where both sizes are: only the check of large shapes sees it."""
    small, large = blocked.add_bias(64, 256), blocked.add_bias(128, 256)
    with pytest.raises(FormulaError, match="at all but"):
        formula(lambda x: (large if x.shape[0] > 300 and x.shape[1] > 1000 else small)(x))


@pytest.mark.slow
def test_narrow_rows_of_one_block_have_no_formula_of_their_own():
    """All rows that were tried are in one block, whose end no count has seen."""
    counts = Counts(blocked.blur(2048))
    assert counts.run() is None and counts.narrower("") is None


# ---- grids of as many programs as a GPU has SMs


ASKS = {
    "torch": lambda x: torch.cuda.get_device_properties(x.device).multi_processor_count,
    "triton": lambda x: driver.active.utils.get_device_properties(0)["multiprocessor_count"],
    "memtraffic": lambda x: device.planning_gpu(x).num_sms,
    "nobody": lambda x: 132,
}


@pytest.mark.skipif(device.HAS_GPU, reason="a GPU answers itself")
@pytest.mark.parametrize(("whom", "each"), [*itertools.product(ASKS, (1, 8))])
def test_formula_says_that_a_grid_depends_on_the_number_of_sms(whom, each, monkeypatch):
    """Also where the grid is never full; not of a number that is written down."""
    monkeypatch.setattr(module, "LARGE", (23,))
    monkeypatch.setattr(module, "WIDE", (47,))
    with stand_in():
        found = formula(lambda x: blocked.layer_norm_backward(each * ASKS[whom](x) or 1)(x))
    most = f"number of SMs: tried up to {found.tried['M'][1]} programs"
    assert any(most in note for note in found.notes) == (whom != "nobody")


# ---- any inputs


def powers(*shape):
    return all(n & (n - 1) == 0 for n in shape)


def multiples(unit):
    return lambda *shape: not any(n % unit for n in shape)


@pytest.mark.parametrize(
    ("inputs", "condition"),
    [
        *((inputs, powers) for inputs in ("N,N", "M,N")),
        *((inputs, multiples(128)) for inputs in ("N", "M,N")),
        *((inputs, multiples(16)) for inputs in ("L,M,N", "K,L,M,N")),
    ],
)
def test_formula_of_sizes_that_a_kernel_takes(inputs, condition):
    moved = inputs.replace(",", "")
    assert formula(taking(condition), inputs).text == f"reads {moved}, writes {moved}"


@pytest.mark.parametrize("symbols", ["N", "LMN", "KLMN"])
def test_formula_of_powers_of_two_takes_few_shapes(symbols):
    found = formula(taking(powers), ",".join(symbols))
    assert found.text == f"reads {symbols}, writes {symbols}"
    assert 0 < len(found.fitted) - 2 ** len(symbols) <= 3


def test_formula_of_too_many_sizes():
    with pytest.raises(FormulaError, match=r"5 sizes \(A, B, C, D, E\) are more than 4"):
        formula(torch.exp, "A,B,C,D,E")


def test_formula_leaves_out_inputs_that_cannot_be_made():
    assert formula(lambda x, at: x.exp(), "M,N M:int8<N").tried["N"] == (2, 128)


def test_formula_backward_that_does_not_exist():
    with pytest.raises(FormulaError, match=r"^the backward pass reads"):
        formula(lambda x: x * (x if x.shape[1] < 100 else x.detach()), backward=True)
