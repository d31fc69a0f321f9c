import ast
import dataclasses
from pathlib import Path

import kernels
import pytest
import torch
from cases import DEVICE, assert_softmax, assert_touches_once

from memtraffic import compile as compiling
from memtraffic import device, testing
from memtraffic.benchmark.baselines import torch_softmax as right
from memtraffic.kernels.softmax import masked
from memtraffic.meters.count import Access, Traffic
from memtraffic.op import find_op, tolerance
from memtraffic.residency import Resources
from memtraffic.tensors import matrix
from memtraffic.testing import (
    assert_close,
    assert_correct,
    assert_row_sums,
    assert_sectors,
    bounds_checked,
    is_correct,
    poisoned_memory,
)


def rounded(dtype, shape=(5, 21)):
    """A softmax that was rounded once, and the reference."""
    reference = torch.softmax(matrix(*shape, dtype).double(), dim=1)
    return reference.to(dtype), reference


# ---- assert_close


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_assert_close_accepts_no_elements(shape):
    assert_softmax(right, torch.empty(shape, device=DEVICE))
    with pytest.raises(AssertionError):
        assert_close(torch.empty(1, 8), torch.empty(shape, dtype=torch.float64), torch.float32)


SPOILED = {
    "nan": lambda y: y.where(y < y.max(), float("nan")),
    "broadcastable": lambda y: y[:1],
    "wider-dtype": lambda y: y.double(),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_assert_close_refuses(spoil, dtype):
    y, reference = rounded(dtype)
    with pytest.raises(AssertionError):
        assert_close(spoil(y), reference, dtype)


@pytest.mark.parametrize("roundings", [4, 32])
def test_assert_close_refuses_twice_the_tolerance_anywhere(roundings, dtype):
    y, reference = rounded(dtype, (3, 8))
    room = tolerance(reference, dtype, roundings)
    for at in ((0, 0), (1, 4), (2, 7)):
        off = y.double()
        off[at] = reference[at] + 2 * room[at[0], 0]
        message = rf"1 of 24 elements are wrong, the first at \({at[0]}, {at[1]}\)"
        with pytest.raises(AssertionError, match=message):
            assert_close(off.to(dtype), reference, dtype, roundings)
        off[at] = reference[at] + room[at[0], 0] / 2
        assert_close(off.to(dtype), reference, dtype, roundings)


def test_assert_close_allows_the_best_subnormal():
    reference = torch.full((1, 4), 3.1e-8, dtype=torch.float64)
    assert_close(reference.half(), reference, torch.float16)
    with pytest.raises(AssertionError, match="4 of 4 elements are wrong"):
        assert_close(reference.half() * 2, reference, torch.float16)


def test_assert_close_refuses_a_reference_that_judges_nothing():
    y, reference = rounded(torch.float32)
    with pytest.raises(AssertionError, match="not float64"):
        assert_close(y, reference.float(), torch.float32)
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(y * float("nan"), reference * float("nan"), torch.float32)


# ---- bounds_checked


@pytest.mark.skipif(not device.INTERPRETED, reason="kernels are not interpreted")
def test_bounds_checked_refuses_an_access_before_it_is_made():
    with bounds_checked():
        assert kernels.dropped_mask(matrix(5, 16)).shape == (5, 16)
        with pytest.raises(Exception, match="reads 4 elements outside x_ptr"):
            kernels.dropped_mask(matrix(5, 12))


# ---- assert_row_sums


@pytest.mark.parametrize("n", [1, 32768])
def test_assert_row_sums(n, dtype):
    reference = torch.softmax((3 * matrix(3, n)).to(dtype).double(), dim=1)
    assert_row_sums(reference.to(dtype), reference)
    room = 2 * torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps
    room += n * 2.0**-25 if dtype == torch.float16 else 0
    for factor in (1 + 2 * room, 1 - 2 * room):
        with pytest.raises(AssertionError, match=r"^3 of 3 rows add up wrongly"):
            assert_row_sums((reference * factor).to(dtype), reference)


def test_assert_row_sums_sees_many_small_elements_that_are_missing():
    x = torch.linspace(0, 14, 300).repeat(2, 1).bfloat16().to(DEVICE)

    def most_are_zero(x):
        y = torch.softmax(x, dim=1)
        y[1, :225] = 0
        return y

    reference = torch.softmax(x.double(), dim=1)
    assert_close(most_are_zero(x), reference, x.dtype)
    with pytest.raises(AssertionError, match=r"^1 of 2 rows add up wrongly.* \(1,\)"):
        assert_row_sums(most_are_zero(x), reference)
    assert is_correct("softmax", lambda x: torch.softmax(x, dim=1), x)


# ---- assert_correct


def changes_its_input(x):
    y = right(x)
    x.add_(1)  # whose softmax is the same
    return y


WRONG = {
    "zeros": torch.zeros_like,
    "changed-input": changes_its_input,
    "elsewhere": lambda x: right(x).to("meta"),
    "tuple": lambda x: (right(x),),
}


@pytest.mark.parametrize("fn", WRONG.values(), ids=WRONG)
def test_assert_correct_refuses(fn):
    assert is_correct("softmax", right, matrix(3, 5))
    assert not is_correct("softmax", fn, matrix(3, 5))
    x = torch.tensor([[float("nan"), 0.0, 1.0]], device=DEVICE)
    assert is_correct("softmax", right, x) and not is_correct("softmax", torch.zeros_like, x)
    assert not is_correct("softmax", lambda x: (right(x), x.nan_to_num_())[0], x)


def small(y):
    """Where a softmax is small, but no smaller than any GPU has numbers."""
    return (y < y.amax(dim=1, keepdim=True) / 50) & (y > torch.finfo(y.dtype).smallest_normal * 4)


SMALL = {
    "zeroed": lambda y: y.where(~small(y), 0),
    "doubled": lambda y: y.where(~small(y), 2 * y),
    "swapped": lambda y: y.where(~small(y), y.roll(1, 1)),
    "a-row-shifted": lambda y: torch.cat([y[:1].roll(1, 1), y[1:]]),
}


@pytest.mark.parametrize("spread", [1, 6, 20])
@pytest.mark.parametrize("name", SMALL)
def test_assert_correct_sees_small_elements(name, spread, dtype):
    """However little they are beside the largest one of their row."""
    x = (torch.randn(64, 153, generator=torch.Generator().manual_seed(spread)) * spread).to(dtype)
    y = torch.softmax(x, dim=1)
    assert small(y)[0].any()
    assert_correct("softmax", lambda x: torch.softmax(x, dim=1), x)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_correct("softmax", lambda x: SMALL[name](y), x)


@pytest.mark.parametrize("distance", [2, 40, 80])
def test_assert_correct_sees_one_element_however_small(distance):
    x = torch.tensor([[0, -distance]]).bfloat16()
    y = torch.softmax(x, dim=1)
    for wrong in (0, 2):
        with pytest.raises(AssertionError, match="1 of 2 elements are wrong"):
            assert_correct("softmax", lambda x, factor=wrong: y * torch.tensor([1, factor]), x)


EMPTY = {
    "empty": lambda x: torch.empty(x.shape, dtype=torch.float64, device=x.device),
    "empty_like": torch.empty_like,
    "new_empty_strided": lambda x: x.new_empty_strided(x.shape, x.stride()),
    "operator": torch.ops.aten.empty_like.default,
}


@pytest.mark.parametrize("value", [0, float("nan")])
@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
def test_assert_correct_refuses_rows_that_nobody_wrote(empty, value):
    """Also where the result should be NaN."""

    def first_row_only(x):
        y = empty(x)
        y[0] = torch.softmax(x[0], dim=0)
        return y.to(x.dtype)

    x = matrix(3, 5)
    x[1:] = value
    told = "never written" if value else "10 of 15 elements are NaN.*"
    with poisoned_memory(), pytest.raises(AssertionError, match=rf"{told}, the first at \(1, 0\)"):
        assert_correct("softmax", first_row_only, x)
    assert_correct("softmax", lambda x: torch.softmax(x, dim=1), x)


def test_judges_have_no_assert_statements():
    """`python -O` drops them; the judge must stay as strict."""
    tree = ast.parse(Path(testing.__file__).read_text("utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


# ---- poisoned_memory


@pytest.mark.parametrize(("mode", "fill"), [(0, False), (1, True), (2, True)])
def test_poisoned_memory_restores_the_flags(mode, fill, monkeypatch):
    """mode: 1 is to warn of what is not deterministic, 2 to refuse it."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    torch.set_deterministic_debug_mode(mode)
    try:
        with pytest.raises(ZeroDivisionError), poisoned_memory():
            assert torch.empty(64, device=DEVICE).isnan().all()
            _ = 1 // 0
        assert torch.get_deterministic_debug_mode() == mode
        assert torch.utils.deterministic.fill_uninitialized_memory == fill
    finally:
        torch.set_deterministic_debug_mode(0)


# ---- assert_touches_once


def test_assert_touches_once():
    def traffic(*offsets, argument="x_ptr"):
        return Traffic(accesses=[Access((0, 0, 0), "read", argument, offsets)])

    x, once = torch.zeros(5, 2).t()[:, :2], (0, 2, 1, 3)
    assert_touches_once(traffic(*once), "x_ptr", x)
    for wrong in (traffic(*once, 0), traffic(*once, 4), traffic(*once, argument="y_ptr")):
        with pytest.raises(AssertionError, match="x_ptr: "):
            assert_touches_once(wrong, "x_ptr", x)


# ---- assert_traffic


FIVE = [(4, 2), (2, 8), (3, 5), (5, 3), (8, 4)]


def lines_of(fn, *args, **options):
    with pytest.raises(AssertionError) as caught:
        testing.assert_traffic(fn, *args, **options)
    return str(caught.value).splitlines()


def test_assert_traffic():
    testing.assert_traffic(torch.exp, "4B", "4B", inputs="B,4", dtype="bfloat16")
    with pytest.raises(ValueError, match="its sizes are B"):
        testing.assert_traffic(torch.exp, "MN", "MN", inputs="B,4")


def test_assert_traffic_says_what_differs_and_why():
    head, by_operation, by_argument = lines_of(kernels.twice, "MN", "MN", fit=FIVE, held_out=[])
    assert head == "kernels.twice reads 2MN, not MN: at 4 x 2, 16 elements, not 8"
    assert by_operation == "  by operation: _twice_kernel 16"
    assert by_argument.endswith(": x_ptr 16, of 8 elements several times")

    head, by_operation = lines_of(lambda x: (x - x[:, :1]).sum(), "2MN", "MN + 1")
    assert head.endswith("reads 2MN + M, not 2MN: at 4 x 2, 20 elements, not 16")
    assert by_operation == "  by operation: sub 12, sum 8"


def test_assert_traffic_once_sees_a_wrong_stride_inside_the_tensor():
    """It moves as many elements as the right one, so the formulas hold."""

    def strided(x, stride, launches=1):
        y = torch.empty_like(x)
        for _ in range(launches):
            kernels._strided_kernel[(1,)](y, x, stride, BLOCK=x.shape[0])
        return y

    at = {"inputs": "B", "fit": [(2**i,) for i in range(1, 7)], "held_out": [(256,), (4096,)]}
    both = ("x_ptr", "y_ptr")
    testing.assert_traffic(lambda x: strided(x, 1), "B", "B", once=both, **at)
    [said] = lines_of(lambda x: strided(x, 0), "B", "B", once=both, **at)
    assert said.endswith("at 2: 1 elements were read several times, such as x_ptr[0]")
    testing.assert_traffic(lambda x: strided(x, 0), "B", "B", once=["y_ptr"], **at)
    [said] = lines_of(lambda x: strided(x, 1, 2), "2B", "2B", once=["y_ptr"], **at)
    assert said.endswith("at 2: 2 elements were written several times, such as y_ptr[0]")
    large = at | {"fit": [(2**i,) for i in range(14, 20)], "held_out": [(2**20,)]}
    assert "several times" in lines_of(lambda x: strided(x, 0), "B", "B", once=both, **large)[0]
    [said] = lines_of(lambda x: strided(x, 1), "B", "B", once=["z_ptr"], **at)
    assert said.endswith("moves, in kernels, x_ptr, y_ptr, not z_ptr")


def test_assert_traffic_sees_one_shape_and_both_sides():
    """What is wrong at a single shape that is only checked is wrong."""

    def odd(x):
        return x.exp() if x.shape != (301, 4099) else x.exp().exp()

    size = 301 * 4099
    assert f"at 301 x 4099, {2 * size} elements, not {size}" in lines_of(odd, "MN", "MN")[0]
    said = lines_of(torch.exp, "2MN", "MN + M")
    assert [line.split()[1] for line in said if line[0] != " "] == ["reads", "writes"]


def test_assert_traffic_pins_bytes():
    def widens(x):
        return x.exp().float()

    testing.assert_traffic(widens, "2MN", "2MN", dtype="bfloat16", write_bytes="6MN")
    said = lines_of(widens, "2MN", "2MN", dtype="bfloat16", read_bytes="4MN", write_bytes="4MN")
    assert "writes, in bytes, 6MN, not 4MN: at 4 x 2, 48 bytes, not 32" in said[0]
    assert said[1] == "  by operation: exp 16, _to_copy 32"
    options = {"dtype": "bfloat16", "backward": ("2MN", "MN", None, "4MN")}
    assert "writes, in bytes, 2MN, not 4MN" in lines_of(torch.exp, "MN", "MN", **options)[0]


def test_assert_traffic_backward():
    def square(x):
        return x * x

    head, by_operation = lines_of(square, "2MN", "MN", backward=("5MN", "3MN"))
    assert head.startswith("the backward pass of ") and "reads 6MN, not 5MN" in head
    assert by_operation == "  by operation: mul 16, mul 16, add 16"
    for text in ("6MN", ("6MN",)):
        with pytest.raises(ValueError, match="backward: what it reads and what it writes"):
            testing.assert_traffic(square, "2MN", "MN", backward=text)


def test_assert_traffic_at_shapes_of_ones_own():
    def halved(x):
        return x[: x.shape[0] // 2].exp()

    assert "at 3 x 5" in lines_of(halved, "(1/2)MN", "(1/2)MN")[0]
    fit = [(64, 1), (128, 5), (192, 8), (256, 3), (64, 16), (192, 7)]
    testing.assert_traffic(halved, "(1/2)MN", "(1/2)MN", fit=fit, held_out=[(320, 9)])
    wrong = {"fit": [(320, 9)], "held_out": []}
    assert "at 320 x 9" in lines_of(halved, "(1/3)MN", "(1/2)MN", **wrong)[0]


def test_assert_traffic_of_a_kernel_that_leaves_its_tensors_and_of_no_shape():
    def refuse(x):
        raise ValueError("never")

    said = lines_of(kernels.dropped_mask, "MN", "MN")[0]
    assert said.startswith("kernels.dropped_mask is wrong at 3 x 5: ")
    assert "refuses every shape" in lines_of(refuse, "MN", "MN")[0]


# ---- assert_resources


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"spill_bytes": 8}, "spills 0 bytes per thread. Found: k for sm_90.* 8 bytes spilled"),
        ({"load_bits": {128: 1, 32: 1}}, "moves 128 bits per load"),
        ({"load_bits": {}}, "moves 128 bits per load"),
        ({"store_bits": {64: 1}}, "moves 128 bits per store"),
        ({"unlaunchable": "too large"}, "can be launched.*cannot be launched: too large"),
    ],
)
def test_assert_resources(facts, message, monkeypatch):
    """Spills are compared unless it is told otherwise."""

    def compiled(**facts):
        kernel = Resources("k", "sm_90", 4, 32, 0, 64, {128: 2}, {128: 1})
        found = [dataclasses.replace(kernel, **facts)]
        monkeypatch.setattr(compiling, "resources", lambda *args, **options: found)

    options = {"target": "sm_90", "load_bits": 128, "store_bits": 128}
    compiled(registers=32)
    testing.assert_resources(torch.exp, **options)
    compiled(**facts)
    with pytest.raises(AssertionError, match=message):
        testing.assert_resources(torch.exp, **options)
    compiled(spill_bytes=4)
    testing.assert_resources(torch.exp, target="sm_90", spill_bytes=None)
    with pytest.raises(ValueError, match="no GPU is named"):
        testing.assert_resources(torch.exp, target=[])


# ---- sectors


def test_assert_sectors_says_where():
    message = (
        r"masked\.softmax moves more than 1 times what it wants for sm_80: "
        r"_softmax_masked_kernel, masked\.py:\d+, load of 32 bits a lane: a request touches "
        r"\d\.\d+ sectors \(104 requests, .*\), at `x = tl\.load\("
    )
    with pytest.raises(AssertionError, match=message):
        assert_sectors(masked.softmax, shape=(4, 801), target=["sm_80"], moved_per_wanted=1)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 300])
def test_assert_correct_knows_what_cancels_in_a_backward(n):
    """Of two columns, the gradient is a difference of equals: its error is that of the terms."""
    y, dy = find_op("softmax_backward").arguments((1024, n)).positional
    assert_correct("softmax_backward", lambda y, dy: y * (dy - (y * dy).sum(1, True)), y, dy)
    for wrong in (lambda y, dy: y * dy, lambda y, dy: y * (dy - 1.0001 * (y * dy).sum(1, True))):
        assert not is_correct("softmax_backward", wrong, y, dy)
