import math
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import assert_softmax, assert_touches_once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from memtraffic import device
from memtraffic.gpus import DEFAULT_GPU
from memtraffic.kernels import operands
from memtraffic.kernels.softmax import op, planning, split
from memtraffic.kernels.softmax.definitions import SOFTMAX, SOFTMAX_BACKWARD
from memtraffic.kernels.softmax.op import backward, softmax
from memtraffic.kernels.softmax.split import split_row
from memtraffic.kernels.tiling import MAX_ROW, Tiling
from memtraffic.meters.count import count
from memtraffic.op import Op
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct

DEVICE = device.default()
INF, NAN = float("inf"), float("nan")
FLOATS = {str(it).removeprefix("torch."): it for it in operands.FLOATS}


@pytest.fixture(autouse=True)
def _no_plans(narrow_of_few_rows):
    for it in (op._FORWARD, op._BACKWARD):
        it.plans.forget()


@pytest.fixture
def small(monkeypatch):
    """A GPU so small that a matrix of a few columns takes the kernels of the widest ones.

    Rows of more than 8 columns are in chunks of 4. Rows of more than 16 are split into parts of 16,
    in chunks of 8, over 6 SMs, so rows of more than 96 columns, and those of float64, are read
    twice. In other memory orders 16 columns fit as well.
    """
    gpu = replace(DEFAULT_GPU, num_sms=6)
    rule = planning.row_tile
    monkeypatch.setattr(planning, "planning_gpu", lambda x: gpu)
    monkeypatch.setattr(split, "planning_gpu", lambda x: gpu)

    def tile(n, *args, **options):
        if n <= 8:
            return rule(n, *args, **options)
        return planning.Tile(1, 4, -(-n // 4), 1) if n <= 16 else None

    monkeypatch.setattr(planning, "row_tile", tile)
    monkeypatch.setattr(planning, "COLUMN_TILE", 32)
    monkeypatch.setattr(planning, "best_split", lambda n, *args: split_row(n, 8, 2, 1))
    monkeypatch.setattr(planning, "online_tile", lambda *args: Tiling(1, 16, 1))


@pytest.fixture(params=["as-planned", "small"])
def either(request):
    """The kernels that matrices of a few columns take, and those that the widest take."""
    if request.param == "small":
        request.getfixturevalue("small")


def kernels_of(fn, *tensors):
    return [it.name for it in count(fn, tensors).ops]


# A matrix for each kernel: its shape, the dimension, the dtype.
KERNELS = {
    "narrow_kernel": ((5, 13), 1, "float32"),
    "softmax_kernel": ((5, 12), 1, "float32"),
    "softmax_kernel-edges": ((5, 13), 1, "float64"),
    "split_kernel": ((5, 40), 1, "float32"),
    "online_kernel": ((5, 40), 1, "float64"),
    "online_kernel-columns": ((40, 5), 0, "float32"),
    "online_kernel-longest": ((5, 100), 1, "float32"),
}
EACH = pytest.mark.parametrize(("shape", "dim", "name"), KERNELS.values(), ids=KERNELS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_is_tested(small, kernel):
    shape, dim, name = KERNELS[kernel]
    names = kernels_of(lambda x: softmax(x, dim), matrix(*shape, name))
    assert names[-1] == kernel.partition("-")[0]


def assert_softmax_along(dim, x):
    """The judge looks for rows along the last dimension, so they are moved there."""

    def reference(x):
        return torch.softmax(x, dim).movedim(dim, -1)

    # The reference to a result in float64 is itself rounded to float64.
    roundings = 16 if x.dtype == torch.float64 else SOFTMAX.roundings
    judged = Op("softmax", "M,N", reference, roundings, checks_row_sums=True)
    assert_correct(judged, lambda x: softmax(x, dim).movedim(dim, -1), x)


# ---- any shape, dimension, strides, dtype


def laid_out(sizes, order, gaps, repeats, offset, dtype):
    """A tensor whose dimensions lie in memory in `order`, with gaps between its elements."""
    strides, step = [0] * len(sizes), 1
    for at, gap in zip(order, gaps, strict=False):
        strides[at] = 0 if at == repeats else step + gap
        step = max(step, strides[at] * max(1, sizes[at]))
    memory = matrix(1, offset + step + 1, dtype).view(-1)
    return memory.as_strided(sizes, strides, offset)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    "examples", [20, pytest.param(100, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_softmax_of_any_tensor(either, examples):
    @settings(max_examples=examples, deadline=None)
    @given(data=st.data())
    def check(data):
        rank = data.draw(st.integers(1, 5), "rank")
        sizes = [data.draw(st.integers(0, 4)) for _ in range(rank)]
        dim = data.draw(st.integers(-rank, rank - 1), "dim")
        sizes[dim] = data.draw(st.integers(0, 40), "columns")
        x = laid_out(
            sizes,
            data.draw(st.permutations(range(rank))),
            data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=rank, max_size=rank)),
            data.draw(st.integers(0, 2 * rank)),  # the dimension that repeats its elements
            data.draw(st.integers(0, 3)),
            data.draw(st.sampled_from(operands.FLOATS), "dtype"),
        )
        special = data.draw(st.sampled_from([0.0, 0.0, NAN, INF, -INF]), "one element")
        if x.numel() and special:
            x[tuple(data.draw(st.integers(0, n - 1)) for n in sizes)] = special
        assert_softmax_along(dim, x)
        assert softmax(x, dim).is_contiguous()

    check()


@pytest.mark.parametrize("n", [13, 2176, 40000], ids=["rows", "chunks", "split"])
def test_softmax_is_as_precise_far_below_the_maximum_of_a_row(n):
    """Of elements that small, the judge of a row would take any.

    Compiled, `tl.exp(x)` is 2 to the power of `x * log2(e)`, and what that product is wrong by, the
    exponential is wrong by relative to itself: half an eps times x for its rounding, and 0.112 eps
    times x for that of log2(e). The 4 eps are for all else: 2 for `ex2.approx` [ptx], 2 for the sum
    and the division.

    [ptx] PTX ISA, `ex2`: a relative error of 2**-22 at most
    """
    x = -torch.arange(0, 7 * n, 7, device=DEVICE).remainder(80).float().repeat(2, 1)
    found, expected = softmax(x).double(), torch.softmax(x.double(), 1)
    assert expected.min() < 1e-32
    of_product = 0 if device.INTERPRETED else 0.612 * x.double().abs()
    bound = (4 + of_product) * torch.finfo(x.dtype).eps * expected
    assert ((found - expected).abs() <= bound).all()


def test_softmax_of_a_scalar():
    for dtype, dim in product(operands.FLOATS, (-1, 0)):
        y = softmax(torch.tensor(3.0, dtype=dtype, device=DEVICE), dim)
        assert (y.item(), y.shape, y.dtype) == (1.0, (), dtype)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)], ids=str)
def test_softmax_of_an_empty_tensor(shape):
    x = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    for dim in range(-len(shape), len(shape)):
        y = softmax(x, dim, dtype=torch.float32)
        assert (y.shape, y.dtype) == (shape, torch.float32)
    x.requires_grad_()
    softmax(x).sum().backward()
    assert x.grad.shape == shape


def far(x, strides):
    """The same numbers gigabytes apart; the memory between is never touched."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=DEVICE).copy_(x)


@pytest.mark.parametrize(
    "strides",
    [(2**30, 40, 1), (3, 1, 2**30), (1, 2**30, 3)],
    ids=["matrices", "columns", "rows"],
)
def test_offsets_outgrow_int32(either, strides):
    x, dy = (matrix(9, 3, "float16", seed=seed).view(3, 3, 3) for seed in (0, 1))
    for dim in range(3):
        apart = far(x, strides)
        assert_softmax_along(dim, apart)
        assert torch.equal(softmax(apart, dim, out=far(x, strides)), softmax(apart, dim))
    y, dx = softmax(x), torch.empty_like(x)
    expected = backward(dy, y, -1, y.dtype)
    for tensors in (
        (far(dy, strides), y, dx),
        (dy, far(y, strides), dx),
        (dy, y, far(x, strides)),
    ):
        found = backward(*tensors[:2], -1, y.dtype, out=tensors[2])
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_softmax_of_more_batches_than_a_grid_has(either, monkeypatch, dim):
    monkeypatch.setattr(planning, "MAX_BATCHES", 3)
    x = matrix(5 * 3, 24)[:, :20].unflatten(0, (5, 3))
    for view in (x, x[:, :2], x[:, ::2, ::3]):
        assert_softmax_along(dim, view)


# ---- dtype


def test_softmax_converts_first(either):
    for dtype, result, n in product(operands.FLOATS, operands.FLOATS, (13, 88)):
        x = matrix(2, n, torch.float64).to(dtype)
        y = softmax(x, dtype=result)
        assert y.dtype == result
        assert_softmax(lambda _, y=y: y, x.to(result))


def test_softmax_converts_what_does_not_fit(either):
    x = torch.tensor([[1e5, 1.0, -1e5], [6e4, 1.0, -1e5]], device=DEVICE)
    y = softmax(x, dtype=torch.float16)
    assert y[0].isnan().all()
    assert torch.equal(y[1], torch.softmax(x[1], 0, dtype=torch.float16))


@pytest.mark.parametrize("name", ["int64", "int32", "uint8", "bool", "float8_e5m2"])
def test_softmax_of_another_dtype_needs_one(name):
    x = torch.tensor([[1, 2, 0], [5, 0, 0]], device=DEVICE).to(getattr(torch, name))
    assert_softmax(lambda _: softmax(x, dtype=torch.float32), x.float())
    with pytest.raises(NotImplementedError, match=f"not implemented for torch.{name}"):
        softmax(x)


# ---- out


def test_softmax_into_an_out_of_another_dtype():
    x, out = matrix(3, 40), torch.empty(3, 40, dtype=torch.bfloat16, device=DEVICE)
    assert softmax(x, dtype=torch.bfloat16, out=out) is out
    assert_softmax(lambda _: out, x.bfloat16())


# ---- errors


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


ERRORS = {
    "dim-too-large": (lambda fn: fn(zeros(2, 3), 2), IndexError, r"dim 2 .* 2 .*\(2, 3\)"),
    "dim-too-small": (lambda fn: fn(zeros(2, 3), -3), IndexError, r"dim -3 .*\(2, 3\)"),
    "dim-of-a-scalar": (lambda fn: fn(zeros(), 1), IndexError, r"dim 1 .* 0 dimensions \(\)"),
    "dim-of-an-empty": (lambda fn: fn(zeros(2, 0), 2), IndexError, r"dim 2 .*\(2, 0\)"),
    "to-what-is-no-dtype": (lambda fn: fn(zeros(2, 3), 1, dtype=0), NotImplementedError, "not"),
    "to-integers": (
        lambda fn: fn(zeros(2, 3), 1, dtype=torch.int64), NotImplementedError, "torch.int64",
    ),
    "out-is-not-of-dtype": (
        lambda fn: fn(zeros(2, 3), 1, dtype=torch.float16, out=zeros(2, 3)),
        RuntimeError, "float32.*float16",
    ),
    "too-high": (
        lambda fn: fn(zeros(1, 1).expand(MAX_ROW + 1, 2), 0), RuntimeError, f"{MAX_ROW + 1} col",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, at an import
@pytest.mark.parametrize("case", ERRORS)
def test_softmax_refuses(case):
    """As PyTorch does, but for rows that are too long; meta tensors, too."""
    call, error, message = ERRORS[case]
    for place in (DEVICE, DEVICE, "meta"):  # nothing wrong is remembered
        with torch.device(place), pytest.raises(error, match=f"^softmax: .*{message}"):
            call(softmax)
    if case != "too-high":
        with pytest.raises(TypeError if case == "to-what-is-no-dtype" else error):
            call(torch.softmax)


@pytest.mark.parametrize("dim", [1.0, True, "1", None, torch.float32], ids=str)
def test_softmax_wants_an_int_for_a_dim(dim):
    """Also where 1 is planned, which equals 1.0 and True."""
    x = zeros(2, 3, device=DEVICE)
    softmax(x, 1)
    for fn in (softmax, torch.vmap(softmax, in_dims=(0, None))):
        with pytest.raises(TypeError, match=f"^softmax: dim is a {type(dim).__name__}, not an int"):
            fn(x, dim)
    assert torch.equal(softmax(x, torch.tensor(1)), softmax(x, 1))  # as torch.softmax


# ---- what it moves


VIEWS = {
    "columns": (lambda: matrix(5, 16), 0),
    "of-three-dimensions": (lambda: matrix(6, 16).view(2, 3, 16), 2),
    "dimension-in-the-middle": (lambda: matrix(6, 16).view(2, 3, 16), 1),
    "rows-in-another-order": (lambda: matrix(6, 16).view(2, 3, 16).transpose(0, 1), 2),
}


@pytest.mark.parametrize(("make", "dim"), VIEWS.values(), ids=VIEWS)
def test_softmax_touches_each_element_once(make, dim):
    x, written = make(), []
    traffic = count(lambda x: written.append(softmax(x, dim)), x, trace=True)
    assert [it.name for it in traffic.ops] == ["softmax_kernel"]  # nothing is copied
    assert_touches_once(traffic, "x_ptr", x)
    assert_touches_once(traffic, "y_ptr", written[0])
    assert (traffic.read_elements, traffic.written_elements) == (x.numel(), x.numel())


@pytest.mark.parametrize("n", [2049, 2056, 2063])
def test_rows_that_start_anywhere(n, dtype):
    """Whole vectors, and fewer elements before and after them than a vector has."""
    x = matrix(9, n, dtype)  # of which rows start at all distances from a vector
    x[2], x[3:5], x[3, 0], x[4, -1] = -INF, -50, 50, 50  # the maximum at an end of the row
    x[5, 0] = x[6, -1] = NAN
    assert_softmax(softmax, x)
    y, dy = SOFTMAX_BACKWARD.arguments((9, n), str(dtype).removeprefix("torch.")).tensors
    y[2, :3], y[3, -3:], y[4] = 1, 1, 0  # what the sum is made of lies at an end of the row
    dy[2, :3], dy[3, -3:] = 50, -50
    assert_correct("softmax_backward", lambda y, dy: backward(dy, y, 1, y.dtype), y, dy)


def test_softmax_of_batches_of_rows_that_start_anywhere():
    x = matrix(12, 2051).view(3, 4, 2051)
    assert_softmax(lambda x: softmax(x.view(3, 4, 2051)).view(12, 2051), x.view(12, 2051))
    assert_softmax(softmax, matrix(9, 4103)[:, :2051])  # an odd stride, and one of `out`
    out = matrix(9, 2055)[:, :2051]
    assert_softmax(lambda x: softmax(x, out=out), matrix(9, 2051))
    y, dy = torch.softmax(matrix(9, 2051), 1), matrix(9, 4103, seed=1)[:, :2051]
    assert_correct("softmax_backward", lambda y, dy: backward(dy, y, 1, y.dtype), y, dy)


@pytest.mark.parametrize(
    "n", [2051, pytest.param(9217, marks=pytest.mark.slow)], ids=["one-program", "split"]
)
def test_rows_that_start_elsewhere_in_each_tensor(n):
    x, y, dy, dx = (matrix(3, n + 4 * i, seed=i)[:, :n] for i in range(4))
    assert_softmax(lambda x: softmax(x, out=y), x)
    assert_correct("softmax_backward", lambda y, dy: backward(dy, y, 1, y.dtype, out=dx), y, dy)


@pytest.mark.parametrize(
    ("n", "name", "parts"),
    [
        (9215, "float32", 0), (9216, "float32", 9), (50257, "float32", 50),
        (65537, "bfloat16", 33),
        pytest.param(131072, "float32", 128, marks=pytest.mark.slow),
        pytest.param(131072, "bfloat16", 64, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_traffic_of_long_rows(n, name, parts):
    """Programs that share a row exchange a word for a 0 each, and read the words of all."""
    traffic = count(softmax, matrix(2, n, name))
    assert traffic.read_elements == 2 * n + 2 * parts * (parts + 1)
    assert traffic.written_elements == 2 * n + 2 * 2 * parts  # the 0, and the word


@pytest.mark.parametrize(("n", "kernels"), [(4, "softmax"), (5, "narrow")])
def test_traffic_of_softmax_and_its_gradient(n, kernels):
    def both(x, dy):
        torch.autograd.grad(softmax(x.requires_grad_()), x, dy)

    traffic = count(both, (matrix(3, n), matrix(3, n)))
    assert [it.name for it in traffic.ops] == [f"{kernels}_kernel", f"{kernels}_backward_kernel"]
    assert (traffic.read_elements, traffic.written_elements) == (3 * 3 * n, 2 * 3 * n)


def test_traffic_of_a_gradient_of_another_dtype():
    """It is converted where it is computed, by no operation of its own."""
    traffic = count(
        lambda x: softmax(x, dtype=torch.float32), matrix(3, 40, "float16"), backward=True
    )
    assert [[it.name for it in each.ops] for each in (traffic, traffic.backward)] == [
        ["softmax_kernel"],
        ["softmax_backward_kernel"],
    ]


@pytest.mark.parametrize("factor", [1, 0], ids=["any-gradient", "a-gradient-of-zero"])
def test_traffic_of_split_rows_backward(small, factor):
    """A sum of 0 must not look like one that nobody has written yet."""
    y, dy = SOFTMAX_BACKWARD.arguments((7, 40)).tensors
    dy *= factor
    traffic = count(lambda y, dy: backward(dy, y, 1, y.dtype), (y, dy), trace=True)
    zeros, kernel = traffic.ops
    assert kernel.name == "split_backward_kernel"
    slots = [it.offsets for it in traffic.accesses if it.argument == "slots_ptr"]
    assert set().union(*slots) == set(range(7 * 3))
    assert zeros.written_elements == 7 * 3
    assert kernel.written_elements == 7 * 40 + 7 * 3
    assert kernel.read_elements == 2 * 7 * 40 + 7 * 3 * (1 + 3)


@pytest.mark.parametrize(("dim", "name"), [(1, "float64"), (0, "float32")])
def test_traffic_in_two_passes(small, dim, name):
    x = matrix(18, 20, name)
    [kernel] = count(lambda x: softmax(x, dim), x).ops
    assert (kernel.read_elements, kernel.written_elements) == (2 * x.numel(), x.numel())
    [kernel] = count(lambda y, dy: backward(dy, y, dim, y.dtype), (x, x.clone())).ops
    assert kernel.name == "passes_backward_kernel"
    assert (kernel.read_elements, kernel.written_elements) == (4 * x.numel(), x.numel())


# ---- autograd


def gradient(fn, x, dy, **options):
    x = x.detach().requires_grad_()
    y = fn(x)
    return torch.autograd.grad(y, x, dy.to(y.dtype).expand_as(y), **options)[0]


@EACH
def test_gradient_of_softmax(small, shape, dim, name):
    x, dy = matrix(*shape, name), matrix(*shape, name, seed=1)
    for of in (dy, dy.t().contiguous().t(), dy[:, :1].expand(shape), dy[0, 0]):
        found = gradient(lambda x: softmax(x, dim), x, of)
        expected = gradient(lambda x: torch.softmax(x, dim), x.double(), of.double())
        size = expected.abs().amax(dim, keepdim=True) + torch.softmax(x, dim).amax(
            dim, keepdim=True
        )
        room = 8 * torch.finfo(x.dtype).eps * size
        assert ((found - expected).abs() <= room).all()


@pytest.mark.parametrize("n", [17, 40, 97])
def test_backward_of_each_dtype(small, n):
    for dtype in operands.FLOATS:
        y = torch.softmax(matrix(5, n, torch.float64), 1).to(dtype)
        dy = matrix(5, n, torch.float64, seed=1).to(dtype)
        assert_correct("softmax_backward", lambda y, dy: backward(dy, y, 1, y.dtype), y, dy)


@pytest.mark.parametrize(
    "examples", [15, pytest.param(80, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_backward_of_any_tensors(either, examples):
    @settings(max_examples=examples, deadline=None)
    @given(data=st.data())
    def check(data):
        rank = data.draw(st.integers(1, 4), "rank")
        sizes = [data.draw(st.integers(0, 4)) for _ in range(rank)]
        dim = data.draw(st.integers(-rank, rank - 1), "dim")
        sizes[dim] = data.draw(st.integers(1, 40), "columns")
        y, dy = (
            laid_out(
                sizes,
                data.draw(st.permutations(range(rank))),
                data.draw(st.lists(st.integers(0, 1), min_size=rank, max_size=rank)),
                data.draw(st.integers(0, 2 * rank)),
                data.draw(st.integers(0, 3)),
                "float32",
            )
            for _ in range(2)
        )
        y = y.sigmoid() if data.draw(st.booleans()) else y
        found = backward(dy, y, dim, y.dtype)
        y, dy = y.double(), dy.double()
        size = (y * dy).abs().sum(dim, keepdim=True).amax() if y.numel() else 0
        expected = y * (dy - (y * dy).sum(dim, keepdim=True))
        error = (found - expected).abs()
        assert found.shape == expected.shape and found.is_contiguous()
        assert (error <= 1e-6 * y.abs() * (dy.abs() + size) + 1e-12).all()

    check()


def test_gradient_has_the_dtype_of_x():
    for dtype, result in product(operands.FLOATS, repeat=2):
        x, dy = matrix(3, 13, torch.float64).to(dtype), matrix(3, 13, seed=1)
        found, expected = (
            gradient(lambda x, fn=fn, result=result: fn(x, 1, dtype=result), x, dy)
            for fn in (softmax, torch.softmax)
        )
        assert found.dtype == expected.dtype == dtype
        eps = max(torch.finfo(it).eps for it in (dtype, result))
        torch.testing.assert_close(found, expected, atol=4 * eps, rtol=0)


@EACH
def test_gradient_is_rounded_to_the_dtype_of_the_result(small, shape, dim, name):
    """As autograd of PyTorch would, which converts it afterwards."""
    x = matrix(*shape)
    found = gradient(lambda x: softmax(x, dim, dtype=torch.float16), x, matrix(*shape, seed=1))
    assert found.dtype == torch.float32 and found.any()
    assert torch.equal(found, found.half().float())


@pytest.mark.parametrize("row", [{0: NAN}, {3: -INF}, dict.fromkeys(range(8), -INF)], ids=str)
def test_gradient_is_nan_where_that_of_pytorch_is(row):
    x = matrix(3, 8)
    for col, value in row.items():
        x[1, col] = value
    for dy in (matrix(3, 8, seed=1), torch.full((3, 8), INF, device=DEVICE)):
        found, expected = (
            gradient(lambda x, fn=fn: fn(x, 1), x, dy) for fn in (softmax, torch.softmax)
        )
        assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("dim", [0, 1])
def test_gradcheck_in_passes(small, dim):
    x = matrix(*((2, 21) if dim else (21, 2)), torch.float64).requires_grad_()
    assert gradcheck(lambda x: softmax(x, dim), (x,), fast_mode=True)
    assert gradgradcheck(lambda x: softmax(x, dim), (x,), fast_mode=True)


def test_softmax_of_a_parameter_and_of_what_needs_no_gradient():
    x = matrix(3, 5)
    layer = torch.nn.Parameter(x.clone())
    assert type(softmax(layer)) is torch.Tensor
    softmax(layer)[:, 0].sum().backward()
    assert layer.grad.abs().sum() > 0
    assert softmax(layer).requires_grad
    with torch.no_grad():
        assert not softmax(layer).requires_grad
    assert not softmax(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(softmax(x), softmax(layer))


def negated(*shape):
    """A matrix that PyTorch negates when it is read: its memory holds minus its values."""
    x = torch.complex(matrix(*shape), matrix(*shape, seed=1)).conj().imag
    assert x.is_neg() and not x.is_conj()
    return x


def test_softmax_of_a_lazily_negated_tensor():
    x = negated(5, 40)
    assert_softmax(softmax, x)
    out = negated(5, 40)
    for source in (x, x.resolve_neg()):
        assert softmax(source, out=out) is out and out.is_neg()
        assert_softmax(lambda _: out, x)


def test_gradient_of_softmax_from_a_lazily_negated_gradient():
    """Autograd hands on `imag` of a conjugate as it is; and hooks may replace what is saved."""
    a, w = matrix(3, 5, seed=2), torch.complex(matrix(3, 5, seed=3), matrix(3, 5, seed=4))

    def loss(x, fn):
        return (torch.complex(a, fn(x, 1)).conj() * w).sum().real

    negate = torch.autograd.graph.saved_tensors_hooks(
        lambda y: y, lambda y: y if y.is_complex() else torch.complex(a, -y).conj().imag
    )
    plain = lambda x, fn: (fn(x, 1) * a).sum()  # noqa: E731
    for hooks, of in ((nullcontext(), loss), (negate, loss), (negate, plain)):
        with hooks:
            found, expected = (
                gradient(
                    lambda x, fn=fn, of=of: of(x, fn),
                    matrix(3, 5),
                    torch.tensor(1.0, device=DEVICE),
                )
                for fn in (softmax, torch.softmax)
            )
        torch.testing.assert_close(found, expected)


# ---- torch.library, torch.compile, torch.func


SAMPLES = {
    "columns": lambda: (matrix(3, 5).requires_grad_(), 0, None),
    "transposed": lambda: (matrix(3, 5).t().requires_grad_(), -1, None),
    "dtype": lambda: (matrix(3, 5, "bfloat16").requires_grad_(), 1, torch.float32),
    "scalar": lambda: (torch.tensor(1.0, device=DEVICE), 0, None),
    "one-row-far-from-the-next": lambda: (matrix(5, 7)[:1], 1, None),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_opcheck(sample):
    torch.library.opcheck(torch.ops.memtraffic.softmax.default, sample())


def test_opcheck_of_backward():
    y = torch.softmax(matrix(3, 5), 1).requires_grad_()
    sample = (matrix(3, 5, seed=1).requires_grad_(), y, 1, torch.bfloat16)
    torch.library.opcheck(torch.ops.memtraffic.softmax_backward.default, sample)


def test_softmax_of_fake_and_meta_tensors():
    y = softmax(torch.empty(2, 3, device="meta", dtype=torch.float16), dtype=torch.float32)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3), torch.float32, "meta")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = softmax(torch.empty(3, 2).t(), 0)
    assert (y.shape, y.stride()) == ((2, 3), (3, 1))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, at an import
def test_compiled_softmax_refuses_an_out_that_does_not_fit():
    torch._dynamo.reset()
    into = torch.compile(lambda x, out: softmax(x, out=out), backend="aot_eager")
    out = torch.zeros_like(matrix(3, 40, "float16"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="softmax: out is torch"):
            into(matrix(3, 40), out)
    assert not out.any()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, at an import
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.gpu, pytest.mark.slow])],
)
def test_compiled_softmax_is_equal_to_eager(backend):
    torch._dynamo.reset()

    def block(x, dim, dtype=None):
        return softmax(x.sin(), dim, dtype=dtype) * 2

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    for x in (matrix(3, 40), matrix(5, 40), matrix(5, 40).t(), matrix(6, 4).view(2, 3, 4)):
        for dim in (0, -1):
            torch.testing.assert_close(compiled(x, dim), block(x, dim))
    x, dy = matrix(3, 40), matrix(3, 40, seed=1)
    half = compiled(x, -1, torch.float16)
    torch.testing.assert_close(half, block(x, -1, torch.float16))
    found, expected = (gradient(lambda x, fn=fn: fn(x, 1), x, dy) for fn in (compiled, block))
    torch.testing.assert_close(found, expected)
    out = torch.empty_like(x)
    into = torch.compile(lambda x, out: softmax(x, out=out), backend=backend, fullgraph=True)
    into(x, out)
    assert torch.equal(out, softmax(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own forward mode
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_softmax_under_transforms(dtype):
    """Of rows and of columns, of a batch and each sample's; and the derivative of a derivative."""
    x = matrix(6, 5).view(2, 3, 5)
    for dim in (0, -1):
        found, expected = (
            (
                torch.func.jvp(of, (x,), (x.cos(),)),
                torch.vmap(torch.func.jacrev(of))(x),
                torch.func.hessian(lambda x, of=of: of(x).square().sum())(x),
            )
            for of in (
                lambda x, fn=fn, dim=dim: fn(x, dim, dtype=dtype) for fn in (softmax, torch.softmax)
            )
        )
        torch.testing.assert_close(found, expected)


def test_softmax_under_vmap():
    x = matrix(12, 5).view(4, 3, 5)
    for in_dim in (0, 1, 2):
        for dim in (0, 1, -1):
            found, expected = (
                torch.func.vmap(lambda x, fn=fn, dim=dim: fn(x, dim), in_dims=in_dim)(x)
                for fn in (softmax, torch.softmax)
            )
            torch.testing.assert_close(found, expected)
    nested = torch.func.vmap(torch.func.vmap(lambda x: softmax(x, 0, dtype=torch.float64)))(x)
    torch.testing.assert_close(nested, torch.softmax(x, -1, dtype=torch.float64))
    scalars = matrix(1, 7)[0]
    assert (torch.func.vmap(softmax)(scalars) == 1).all()
    scalar = scalars[0].requires_grad_()
    [found] = torch.autograd.grad(softmax(scalar), scalar, scalars, is_grads_batched=True)
    assert found.shape == (7,) and not found.any()


@pytest.mark.parametrize("dim", [2, 5, -3])
def test_dim_under_vmap_is_one_that_a_sample_has(dim):
    x = matrix(6, 4).view(2, 3, 4)
    backward_op = torch.ops.memtraffic.softmax_backward
    for fn in (
        lambda x: softmax(x, dim),
        lambda x: torch.ops.memtraffic.softmax(x, dim, None),
        lambda x: backward_op(x, x, dim, torch.float32),
    ):
        with pytest.raises(IndexError, match=rf"dim {dim} is out .* 2 dimensions \(3, 4\)"):
            torch.vmap(fn)(x)


def test_backward_under_vmap():
    """Each of the two may have the dimension of the batch, in any place; and one a gradient."""
    y, dy = (torch.softmax(matrix(12, 5, seed=seed), 1).view(4, 3, 5) for seed in (0, 1))

    def reference(dy, y, dim):
        product = y * dy
        return product - y * product.sum(dim, keepdim=True)

    for in_dims in ((0, 0), (1, 1), (2, 0), (0, None), (None, 1)):
        given = [
            x.movedim(0, batch) if batch is not None else x[0]
            for x, batch in zip((dy, y), in_dims, strict=True)
        ]
        for dim in (0, -1):
            found, expected = (
                torch.func.vmap(lambda dy, y, fn=fn, dim=dim: fn(dy, y, dim), in_dims=in_dims)(
                    *given
                )
                for fn in (
                    lambda dy, y, dim: torch.ops.memtraffic.softmax_backward(
                        dy, y, dim, torch.float32
                    ),
                    reference,
                )
            )
            torch.testing.assert_close(found, expected)


# ---- on a GPU


def in_another_process(source, seconds=300):
    """Runs Python source that may hang, in a process that can be ended."""
    script = "import torch, memtraffic\nfrom memtraffic import softmax\n" + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=seconds, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


LONG = [((64, 2**17), torch.float32), ((300, 100000), torch.bfloat16)]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 1000, 32768, 2**20], ids=str)
def test_softmax_past_two_to_the_31_elements(n):
    m = 2**31 // n + 600
    if torch.cuda.mem_get_info()[0] < 3 * m * n * 2:
        pytest.skip(f"{m} x {n} float16 twice is more than this GPU has free")
    x = torch.empty(m, n, device=DEVICE, dtype=torch.float16)
    for rows in x.split(2**28 // n):
        rows.normal_()
    x[-1], x[-2] = x[0], 0
    y = softmax(x)
    assert torch.equal(y[-1], y[0])
    for part in (slice(0, 3), slice(-3, None), slice(m // 2, m // 2 + 3)):
        assert_softmax(lambda _, part=part: y[part], x[part])
    dx = backward(x, y, 1, y.dtype)
    for part in (slice(0, 3), slice(-3, None)):
        expected = SOFTMAX_BACKWARD.reference(y[part].double(), x[part].double())
        torch.testing.assert_close(dx[part].double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), [((512, 1000), torch.float32), *LONG], ids=str)
def test_softmax_in_a_cuda_graph(shape, dtype):
    x = torch.randn(shape, device=DEVICE, dtype=dtype)
    softmax(x)  # planned and compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
    for _ in range(5):
        x.normal_()
        graph.replay()
        assert torch.equal(y, softmax(x))
        assert_softmax(lambda _: y[:3], x[:3])


@pytest.mark.gpu
def test_softmax_with_its_gradient_in_a_cuda_graph():
    x = torch.randn(64, 2**17, device=DEVICE, requires_grad=True)
    dy = torch.randn_like(x)

    def step():
        return torch.autograd.grad(softmax(x), x, dy)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = step()
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
        dy.normal_()
        graph.replay()
        assert torch.equal(dx, step())


@pytest.mark.gpu
def test_softmax_on_several_streams_at_once():
    """Programs of all launches share the GPU, and each looks for the words of its own alone."""
    in_another_process(
        """
        torch.manual_seed(0)
        xs = [torch.randn(64, n, device="cuda") for n in (2**17, 100000)]
        xs.append(torch.randn(9, 2**20, device="cuda", dtype=torch.bfloat16))
        expected = [softmax(x) for x in xs]
        streams = [torch.cuda.Stream() for _ in xs]
        torch.cuda.synchronize()
        for _ in range(200):
            found = []
            for x, stream in zip(xs, streams):
                with torch.cuda.stream(stream):
                    found.append(softmax(x))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))
        """
    )


@pytest.mark.gpu
@pytest.mark.slow
def test_softmax_of_split_rows_does_not_hang():
    in_another_process(
        """
        xs = [torch.randn(m, n, device="cuda") for m, n in ((1, 70000), (3, 100000), (500, 70000))]
        ys = [torch.empty_like(x) for x in xs]
        for i in range(100_000):
            j = i % 3 if i % 100 == 0 else i % 2
            softmax(xs[j], out=ys[j])
        torch.cuda.synchronize()
        for x, y in zip(xs, ys):
            torch.testing.assert_close(y, torch.softmax(x, 1))
        """,
        seconds=540,
    )


@pytest.mark.gpu
@pytest.mark.slow
def test_softmax_of_split_rows_beside_another_process():
    load = textwrap.dedent(
        """
        import torch
        a = torch.randn(4096, 4096, device="cuda")
        print("ready", flush=True)
        while True:
            for _ in range(20):
                a = (a @ a).clamp(-1, 1)
            torch.cuda.synchronize()
        """
    )
    other = subprocess.Popen([sys.executable, "-c", load], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "ready\n"
        in_another_process(
            """
            x = torch.randn(500, 100000, device="cuda")
            expected = softmax(x)
            for _ in range(1000):
                y = softmax(x)
            torch.testing.assert_close(y, torch.softmax(x, 1))
            assert torch.equal(y, expected)
            """
        )
        assert other.poll() is None, "the other process ended early"
    finally:
        other.kill()
        other.communicate()


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), [((512, 1000), torch.float32), *LONG], ids=str)
def test_softmax_is_equal_bit_for_bit_a_hundred_times(shape, dtype):
    x = torch.randn(shape, device=DEVICE, dtype=dtype)
    y = softmax(x)
    dx = backward(x, y, 1, dtype)
    for _ in range(100):
        assert torch.equal(softmax(x), y)
        assert torch.equal(backward(x, y, 1, dtype), dx)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_softmax_under_autocast(name):
    x = matrix(5, 40, name)
    with torch.autocast("cuda"):
        found, expected = softmax(x), torch.softmax(x, -1)
        halved = softmax(x, dtype=torch.float16)
    assert found.dtype == expected.dtype
    assert halved.dtype == torch.float16
    torch.testing.assert_close(found, expected)
    with torch.autocast("cuda"):
        found, expected = (
            gradient(lambda x, fn=fn: fn(x, -1), x, matrix(5, 40, seed=1))
            for fn in (softmax, torch.softmax)
        )
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_softmax_of_a_tensor_on_the_cpu():
    for x in (torch.zeros(2, 3), torch.zeros(0, 3)):
        with pytest.raises(RuntimeError, match=r"on the cpu, not on a GPU"):
            softmax(x)
    with pytest.raises(RuntimeError, match=r"out is .* on cpu, .* on cuda"):
        softmax(zeros(2, 3, device=DEVICE), out=zeros(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1000, 1024, 8320, 100000])
def test_softmax_of_views_of_another_alignment(n, dtype):
    memory = torch.randn(5 * n + 8, device=DEVICE).to(dtype)
    for offset in (0, 1, 2, 4, 8, 3, 0):
        x = memory[offset:][: 5 * n].view(5, n)
        assert_softmax(softmax, x)
        out = torch.empty(5 * n + 8, device=DEVICE, dtype=dtype)[offset:][: 5 * n].view(5, n)
        assert_softmax(lambda x, out=out: softmax(x, out=out), x)
        y = softmax(x)
        inputs = (y, x)
        assert_correct("softmax_backward", lambda y, dy: backward(dy, y, 1, y.dtype), *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "n", [1, 781, 2176, 8320, 32768, 49152, 65536, 100000, 131072, 2**20, 2**20 + 1, MAX_ROW]
)
def test_softmax_and_backward_on_the_gpu(n, name):
    x = matrix(max(2, 2**22 // n), n, name)
    assert_softmax(softmax, x)
    y, dy = SOFTMAX_BACKWARD.arguments(tuple(x.shape), name).tensors
    assert_correct("softmax_backward", lambda y, dy: backward(dy, y, 1, y.dtype), y, dy)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("n", [781, 4096, 2**17])
def test_softmax_on_another_gpu_than_the_current_one(n):
    for index in (1, 0, 1):
        x = matrix(9, n, device=f"cuda:{index}").requires_grad_()
        y = softmax(x)
        y.backward(dy := torch.randn_like(y))
        assert (y.device, x.grad.device) == (x.device, x.device)
        expected = torch.softmax(x.detach().double(), -1).requires_grad_()
        assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-9)
        gradient = expected * (dy - (expected * dy).sum(-1, keepdim=True))
        assert torch.allclose(x.grad.double(), gradient, rtol=1e-4, atol=1e-8)
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("requires_grad", "most"), [(False, 1.5), (True, 2.5)])
@pytest.mark.parametrize("shape", [(16, 64), (1, 70000)], ids=["rows", "split-rows"])
def test_softmax_costs_the_host_little(shape, requires_grad, most):
    """In times of torch.softmax's cost; launches are queued, so only the host counts."""
    import time

    x = torch.randn(shape, device=DEVICE, requires_grad=requires_grad)

    def seconds(fn):
        best = math.inf
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                fn()
            best = min(best, time.perf_counter() - start)
        return best / 200

    ours, theirs = seconds(lambda: softmax(x)), seconds(lambda: torch.softmax(x, -1))
    ratio = ours / theirs
    assert ratio <= most, f"{1e6 * ours:.1f} µs, {ratio:.2f} times {1e6 * theirs:.1f} µs"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own forward mode
def test_tangent_of_softmax_without_a_transform():
    x = matrix(3, 40)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.cos())
        found, expected = (
            torch.autograd.forward_ad.unpack_dual(of(dual, -1)).tangent
            for of in (softmax, torch.softmax)
        )
    torch.testing.assert_close(found, expected)
