"""The same questions to every kernel: is it right, what does it touch, and what does it refuse?

A new kernel is one more line of SUBJECTS.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
import triton
from cases import DEVICE, INF, NAN, assert_touches_once, far, laid_out
from hypothesis import given, settings
from hypothesis import strategies as st

import memtraffic
from memtraffic.compile import capture_launches, resources
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import online, split
from memtraffic.kernels.softmax.rule import MAX_COLS, MAX_ROW
from memtraffic.meters.count import count
from memtraffic.names import import_function
from memtraffic.op import Op, find_op
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct

pytestmark = pytest.mark.usefixtures("bounds_checked")  # a wrong kernel must not end the process
HALF, SINGLE, DOUBLE = ("float16", "bfloat16"), ("float32",), ("float64",)
WIDTHS = {
    "one-column": 1, "block": 128, "one-past-block": 129, "odd": 781, "chunks": 2048,
    "one-past-chunks": 2049, "little-past-8192": 8320, "widest": MAX_COLS,
    "one-past-widest": MAX_COLS + 1, "long": 65537, "long-and-aligned": 131072,
}  # fmt: skip


def matrix_of(m, n, dtype):
    return (matrix(m, n, dtype),)


def softmax_and_gradient(m, n, dtype):
    return torch.softmax(matrix(m, n), 1).to(getattr(torch, dtype)), matrix(m, n, dtype, seed=1)


@dataclass(frozen=True)
class Subject:
    """A kernel under contract.

    fn: of the tensors that `make` makes for m, n and a dtype; its result is that of `op`. touches:
    how often it touches each element of what a pointer of the kernel points to. words: pointers to
    what programs tell one another, to vectors and to parts. beside: PyTorch's operations around the
    kernel. limit: columns; more are refused. any_width: not only powers of two. any_strides:
    columns need not be adjacent. errors: what it raises, see REFUSED.
    """

    name: str
    fn: Callable[..., torch.Tensor]
    touches: dict[str, int]
    op: str | Op = "softmax"
    make: Callable[..., tuple[torch.Tensor, ...]] = matrix_of
    dtypes: tuple[str, ...] = (*SINGLE, *HALF)
    limit: int = MAX_COLS
    any_width: bool = True
    any_strides: bool = True
    words: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    errors: str | None = "rung"

    def judge(self, dtype: str) -> Op:
        """The operation; in float64 its reference is itself rounded."""
        op = find_op(self.op)
        return replace(op, roundings=4 * op.roundings) if dtype == "float64" else op

    def takes(self, n: int) -> bool:
        return n <= self.limit and (self.any_width or n & (n - 1) == 0)

    def __str__(self) -> str:
        return self.name


def in_blocks(fn, parts, **options):
    """A rung in about so many blocks a row; in its own ones where a row has several anyway."""

    def rung(x):
        n = x.shape[-1] if isinstance(x, torch.Tensor) else 1
        block = max(8, triton.next_power_of_2(triton.cdiv(n, parts)))
        return fn(x, block=block, **options) if n <= 2100 else fn(x)

    return rung


def softmax_backward(y, dy):
    return torch.ops.memtraffic.softmax_backward(dy, y, 1, y.dtype)


ONCE = {"x_ptr": 1, "y_ptr": 1}
SLOTS = frozenset({"slots_ptr"})
FLOATS = (*SINGLE, *HALF, *DOUBLE)
SUBJECTS = [
    Subject("naive", import_function("naive"), {}, errors=None),
    Subject("fused", import_function("fused"), ONCE, any_width=False, any_strides=False),
    Subject("masked", import_function("masked"), ONCE),
    Subject("tiled", import_function("tiled"), ONCE),
    Subject("chunks", import_function("chunks"), ONCE),
    Subject("persistent", import_function("persistent"), ONCE),
    Subject("online", in_blocks(online.softmax, 5), {"x_ptr": 2, "y_ptr": 1}, limit=MAX_ROW),
    Subject(
        "split", in_blocks(split.softmax, 6, chunks=2), ONCE, limit=MAX_ROW,
        words=SLOTS, beside=("zeros",),
    ),
    Subject(
        "softmax", memtraffic.softmax, ONCE, dtypes=FLOATS, limit=MAX_ROW,
        words=SLOTS, beside=("zeros",), errors="operation",
    ),
    Subject(
        "softmax-backward", softmax_backward, {"y_ptr": 1, "dy_ptr": 1, "dx_ptr": 1},
        "softmax_backward", softmax_and_gradient,
        dtypes=FLOATS, limit=MAX_ROW, words=SLOTS, beside=("zeros",), errors=None,
    ),
]  # fmt: skip


def each(holds=lambda subject: True):
    """Parametrizes a test with the subjects for which something holds."""
    chosen = [subject for subject in SUBJECTS if holds(subject)]
    return pytest.mark.parametrize("it", chosen, ids=str)


WITH_KERNEL = each(lambda it: it.touches)


# ---- is it right?


@each()
@pytest.mark.parametrize(
    "n", [pytest.param(n, id=id, marks=[pytest.mark.slow] * (n > 8320)) for id, n in WIDTHS.items()]
)
def test_result_of_each_width(it, n):
    if not it.takes(n):
        pytest.skip("a width that it does not take")
    for dtype in it.dtypes[: None if n == WIDTHS["one-past-block"] else 1]:
        assert_correct(it.judge(dtype), it.fn, *it.make(3 if n <= 8320 else 1, n, dtype))


@pytest.mark.parametrize(
    "examples", [6, pytest.param(30, marks=pytest.mark.slow)], ids=["few", "many"]
)
@WITH_KERNEL
def test_result_of_any_matrix(it, examples):
    """Of any size, in any layout; the inputs of a backward each in its own."""
    # Where all columns of an input are one, a backward is a sum of what cancels out.
    repeats = [0] if it.op == "softmax" else []
    steps = st.sampled_from([1, 1, 2, 3, *repeats]) if it.any_strides else st.just(1)
    narrow = st.integers(0 if it.any_width else 1, 70)
    wide = st.integers(71, 2100) if it.any_width else st.sampled_from([128, 256, 2048])

    @settings(max_examples=examples, deadline=None)
    @given(data=st.data())
    def check(data):
        m, n = data.draw(st.integers(0, 7), "m"), data.draw(st.one_of(narrow, narrow, wide), "n")
        n = n if it.any_width else 2 ** (n.bit_length() - 1)
        dtype = data.draw(st.sampled_from(it.dtypes), "dtype")
        tensors = []
        for x in it.make(m, n, dtype):
            row_step, col_step = data.draw(st.sampled_from([1, 1, 2, 3, 0])), data.draw(steps)
            transposed = it.any_strides and data.draw(st.booleans())
            layout = dict(row_step=row_step, col_step=col_step, transposed=transposed)
            tensors.append(laid_out(x, offset=data.draw(st.integers(0, 9)), **layout))
        assert_correct(it.judge(dtype), contiguous, *tensors)

    def contiguous(*tensors):
        y = it.fn(*tensors)
        assert y.is_contiguous()
        return y

    check()


# Rows, by how much of them is replaced from the front and from the back.
ALL = slice(None)
HARD = {
    "nan-first": [(0, NAN)],
    "nan-last": [(-1, NAN)],
    "two-infinities": [(1, INF), (-2, INF)],
    "minus-infinity-first": [(slice(8), -INF)],
    "minus-infinity-in-between": [(slice(8, 32), -INF)],
    "minus-infinity-last": [(slice(32, None), -INF)],
    "all-but-the-last-minus-infinity": [(slice(-1), -INF)],
    "all-but-the-first-minus-infinity": [(slice(1, None), -INF)],
    "all-minus-infinity": [(ALL, -INF)],
    "infinity-among-minus-infinity": [(ALL, -INF), (3, INF)],
    "rises": [(slice(40), 400 * torch.arange(40))],
    "falls": [(slice(40), -200 * (torch.arange(40) // 4))],
    "maximum-first": [(ALL, -50.0), (0, 50.0)],
    "maximum-last": [(ALL, 0.0), (-1, 1e3)],
    "lowest": [(ALL, "min")],
    "huge": [(0, "max"), (1, "min")],
}


def hard_matrix(n, dtype):
    """The hard rows, and an ordinary one before and after them."""
    x = matrix(len(HARD) + 2, n, dtype)
    finfo = torch.finfo(x.dtype)
    for row, hard in zip(x[1:-1], HARD.values(), strict=True):
        for cols, value in hard:
            row[cols] = getattr(finfo, value) if isinstance(value, str) else value
    return x


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@each(lambda it: it.op == "softmax")
def test_result_of_hard_rows(it):
    """The rows are of five blocks, or of three parts of two chunks, where it takes such rows."""
    for dtype, n in zip(it.dtypes, (41, 40), strict=False):  # those of 41 start anywhere
        x = hard_matrix(n if it.any_width else 64, dtype)
        y = it.fn(x)
        assert_correct(it.judge(dtype), lambda _, y=y: y, x)
        assert torch.equal(y.isnan(), torch.softmax(x, 1).isnan())
        assert (y[x == -INF].nan_to_num() == 0).all()


@each()
def test_sums_are_of_float32(it):
    """One in float16 is infinite past 65504, one in bfloat16 stays at 256."""
    for dtype in HALF:
        tensors = [torch.ones_like(each) for each in it.make(2, 4096, dtype)]
        assert_correct(it.op, it.fn, *tensors)


@each(lambda it: it.errors != "rung" and it.touches)
def test_result_of_lazily_negated_tensors(it):
    """Their memory holds minus what they stand for, as in the imaginary part of a conjugate."""
    tensors = it.make(5, 64, "float32")
    assert torch.equal(it.fn(*[torch._neg_view(-x) for x in tensors]), it.fn(*tensors))


@each()
def test_results_are_new_memory_and_equal_bit_for_bit(it):
    tensors = it.make(5, 64, "float32")
    results = [it.fn(*tensors), it.fn(*tensors), it.fn(*(x.clone() for x in tensors))]
    assert all(torch.equal(y, results[0]) for y in results)
    storages = {x.untyped_storage().data_ptr() for x in (*tensors, *results)}
    assert len(storages) == len(tensors) + len(results)


# ---- what does it touch?


VIEWS = {
    "two": ({}, 2, 0),
    "300": ({}, 300, 0),
    "2055": ({}, 2055, 0),
    "one-column": ({}, 1, 0),
    "whole": ({}, 16, 0),
    "padded-rows": ({}, 24, 8),
    "unaligned": ({"offset": 1}, 16, 0),
    "rows-apart-by-3": ({"row_step": 3, "offset": 5}, 13, 0),
    "a-row-again-and-again": ({"row_step": 0}, 16, 0),
    "every-other-column": ({"col_step": 2}, 16, 0),
    "transposed": ({"transposed": True}, 16, 0),
}


@pytest.mark.parametrize(
    ("it", "layout", "n", "cut", "dtype"),
    [
        pytest.param(it, layout, n, cut, dtype, id=f"{name}-{dtype}-{it}")
        for name, (layout, n, cut) in VIEWS.items()
        for it in SUBJECTS
        for dtype in ("float32", "bfloat16")[: 1 if layout or n == 2055 else 2]
        if it.touches
        and it.takes(n - cut)
        and (it.any_strides or not {"col_step", "transposed"} & layout.keys())
    ],
)
def test_each_element_is_touched_as_often_as_is_said(it, layout, n, cut, dtype):
    """And in one kernel: nothing is copied.

    Rows of odd widths start anywhere; the last program has as many of them, fewer, or one.
    """
    tensors, results = [laid_out(x, **layout)[:, : n - cut] for x in it.make(6, n, dtype)], []
    traffic = count(lambda *given: results.append(it.fn(*given)), (*tensors,), trace=True)
    [_] = [op.name for op in traffic.ops if op.name not in it.beside]
    assert {access.argument for access in traffic.accesses} <= {*it.touches, *it.words}
    for (pointer, times), x in zip(it.touches.items(), (*tensors, *results), strict=True):
        assert_touches_once(traffic, pointer, x, times)


@each()
@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**30 + 8)], ids=["rows", "columns"])
def test_offsets_outgrow_int32(it, strides):
    """The rows far apart, and the columns."""
    if strides[1] > 1 and not it.any_strides:
        pytest.skip("strides that it does not take")
    tensors = it.make(4, 4, "float16")
    for i, x in enumerate(tensors):
        assert_correct(it.op, it.fn, *tensors[:i], far(x, strides), *tensors[i + 1 :])


@each(lambda it: (it.touches and it.limit == MAX_COLS) or it.name.startswith("softmax"))
def test_a_row_has_as_many_lanes_on_wider_warps(it):
    """It is planned for the GPU that it is captured for: half as many warps of 64 lanes."""
    lanes = []
    for gpu in map(find_gpu, ("H200", "MI300X", "H200")):
        [launch] = capture_launches(it.fn, *it.make(200, 32768, "float32"), gpu=gpu)
        lanes.append(launch.options["num_warps"] * gpu.warp_size)
    assert len({*lanes}) == 1 and lanes[0] >= 128


# ---- what does it refuse?


def zeros(*shape, **options):
    return torch.zeros(shape, device=DEVICE, **options)


# What is given; what a rung raises, and what the operation raises, as PyTorch does; what is said.
REFUSED = {
    "a-list": ([[1.0]], TypeError, TypeError, "x is a list"),
    "integers": (zeros(2, 4, dtype=torch.int32), TypeError, NotImplementedError, "torch.int32"),
    "float64": (zeros(2, 4).double(), TypeError, None, "not torch.float64"),
    "3-d": (zeros(2, 4, 4), ValueError, None, r"not 3: \(2, 4, 4\)"),
    "1-d": (zeros(4), ValueError, None, r"not 1: \(4,\)"),
    "meta": (zeros(2, 4).to("meta"), TypeError, None, "x is a meta"),
    "coo": (zeros(2, 4).to_sparse(), TypeError, None, "sparse_coo"),
    "negated": (torch._neg_view(zeros(2, 4)), TypeError, None, r"is negated .* x\.resolve_neg\(\)"),
    "gradient": (zeros(2, 4, requires_grad=True), RuntimeError, None, "x requires a gradient"),
}


def assert_refuses(it, x, of_rung, of_operation, says):
    for _ in range(2):  # nothing wrong is remembered
        with pytest.raises(of_rung if it.errors == "rung" else of_operation) as raised:
            it.fn(x)
        name = it.name if it.errors == "rung" else it.op
        assert re.match(f"{name}: .*{says}", str(raised.value)), raised.value


@each(lambda it: it.errors)
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(it, case):
    x, of_rung, of_operation, says = REFUSED[case]
    if it.errors == "operation" and not of_operation:
        pytest.skip("what it takes")
    assert_refuses(it, x, of_rung, of_operation, says)


@each(lambda it: it.errors)
def test_refuses_a_row_that_is_too_wide(it):
    x = zeros(1, 1).expand(2, it.limit + 1) if it.any_strides else zeros(1, 2 * it.limit)
    says = f"{x.shape[1]} columns, more than {it.limit}"
    assert_refuses(it, x, ValueError, RuntimeError, says)


@pytest.mark.slow
def test_all_compile_for_a_gpu_that_is_not_here():
    """The interpreter takes what a compiler does not."""

    def launch_all():
        for it in SUBJECTS:
            for n in filter(it.takes, (128, 1001, 70001)):
                it.fn(*it.make(3, n, "float32"))

    assert len({it.kernel for it in resources(launch_all, (), target="sm_90")}) == 9


@each(lambda it: it.errors)
@pytest.mark.gpu
def test_refuses_a_tensor_of_the_cpu(it):
    error = TypeError if it.errors == "rung" else NotImplementedError
    for m in (2, 0):
        with pytest.raises(error, match="on the cpu, not on a GPU"):
            it.fn(torch.zeros(m, 4))


@each(lambda it: it.errors)
def test_takes_what_requires_a_gradient_where_none_is_taken(it):
    x = matrix(4, 8).requires_grad_()
    with torch.no_grad():
        assert not it.fn(x).requires_grad


@WITH_KERNEL
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_result_on_a_second_gpu_while_another_is_current(it):
    for n, index in product(filter(it.takes, (8, 1024, 2**17)), (1, 0, 1)):  # alike but for the GPU
        tensors = [x.to(f"cuda:{index}") for x in it.make(5, n, "float32")]
        with torch.cuda.device(0):
            assert it.fn(*tensors).device == tensors[0].device
            assert_correct(it.op, it.fn, *tensors)
            assert torch.cuda.current_device() == 0


@WITH_KERNEL
@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 1000, MAX_COLS, 2**20])
def test_result_past_two_to_the_31_elements(it, n):
    m = 2**31 // n + 700
    tensors = it.make(7, n, "float16")
    if not it.takes(n) or (m > 2**30 and it.errors == "rung"):
        pytest.skip("a matrix that it does not take")
    if torch.cuda.mem_get_info()[0] < (len(tensors) + 2) * m * n * 2:
        pytest.skip(f"tensors of {m} x {n} are more than this GPU has free")
    tensors = [x.repeat(m // 7, 1) for x in tensors]
    y = it.fn(*tensors)
    assert torch.equal(y[-7:], y[:7])
    for part in (slice(0, 3), slice(-3, None), slice(m // 2, m // 2 + 3)):
        assert_correct(it.op, lambda *_, part=part: y[part], *(x[part] for x in tensors))
