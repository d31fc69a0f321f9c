import math
import threading
from dataclasses import replace
from functools import partial

import kernels
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import runtime
from memtraffic.compile import resources
from memtraffic.gpus import DEFAULT_GPU
from memtraffic.ladder import split
from memtraffic.ladder.call import Call
from memtraffic.ladder.split import Split, collect, publish, split_rows
from memtraffic.tensors import matrix
from memtraffic.testing import assert_softmax, assert_touches_once
from memtraffic.traffic.count import count

DEVICE = runtime.device()
INF, NAN = float("inf"), float("nan")
in_parts = partial(split.softmax, block=16)


@pytest.fixture
def few_sms(monkeypatch):
    """A GPU of 8 SMs: a group of programs works on several rows, one after the other."""
    monkeypatch.setattr(split, "planning_gpu", lambda x: replace(DEFAULT_GPU, num_sms=8))


# ---- split_rows


@pytest.mark.parametrize(
    ("m", "n", "itemsize", "expected"),
    [
        pytest.param(100, 64, 4, Split(16, 4, 5), id="even"),
        pytest.param(100, 65, 4, Split(16, 5, 4), id="one-column-in-the-last"),
        pytest.param(100, 49, 4, Split(16, 4, 5), id="one-column-of-a-vector"),
        pytest.param(100, 36, 4, Split(12, 3, 6), id="parts-of-equal-size"),
        pytest.param(100, 36, 2, Split(16, 3, 6), id="whole-vectors-of-16-bytes"),
        pytest.param(2, 64, 4, Split(16, 4, 2), id="fewer-rows-than-groups"),
        pytest.param(100, 16, 4, Split(16, 1, 20), id="one-part"),
        pytest.param(100, 320, 4, Split(16, 20, 1), id="all-programs-on-a-row"),
    ],
)
def test_split_rows(m, n, itemsize, expected):
    assert split_rows(m, n, itemsize, block=16, resident=20) == expected


def test_split_rows_that_need_more_programs_than_fit():
    with pytest.raises(ValueError, match="321 columns needs 21 programs of 16, and 20 fit"):
        split_rows(100, 321, 4, block=16, resident=20)


@settings(max_examples=200, deadline=None)
@given(
    m=st.integers(1, 100),
    n=st.integers(1, 2**24),
    itemsize=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([16, 8192, 16384]),
    resident=st.integers(1, 2000),
)
def test_split_rows_covers_each_row(m, n, itemsize, block, resident):
    try:
        found = split_rows(m, n, itemsize, block, resident)
    except ValueError:
        assert n > block * resident
        return
    assert found.part_cols <= block
    assert found.part_cols * itemsize % 16 == 0  # so each part starts on a vector
    assert found.part_cols * found.parts >= n
    assert 1 <= found.groups <= m
    assert found.parts * found.groups <= resident


# ---- softmax


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 11])
def test_softmax_of_several_rows_per_group(few_sms, m, dtype):
    """3 parts, so 2 groups; each has rows for its slots' first set, second set, first again."""
    assert_softmax(in_parts, matrix(m, 40, dtype))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 33, 100, 113, 127, 128])
def test_softmax_of_up_to_eight_parts(few_sms, n):
    assert_softmax(in_parts, matrix(5, n))


@pytest.mark.parametrize("n", [8193, 100000])
def test_softmax_of_long_rows(n, dtype):
    assert_softmax(split.softmax, matrix(2, n, dtype))


def test_softmax_of_more_parts_than_lanes(monkeypatch):
    """A warp of 32 lanes looks at the slots of 40 programs."""
    assert_softmax(partial(split.softmax, block=16, num_warps=1), matrix(2, 640))


HARD = {
    "nan-in-one-part": {3: NAN},
    "nan-in-the-last-part": {39: NAN},
    "infinity-in-one-part": {20: INF},
    "a-part-of-minus-infinity": dict.fromkeys(range(16), -INF),
    "the-last-part-of-minus-infinity": dict.fromkeys(range(32, 40), -INF),
    "all-minus-infinity": dict.fromkeys(range(40), -INF),
    "all-but-one": dict.fromkeys(range(39), -INF),
    "parts-far-apart": {i: 200.0 * (i // 16) for i in range(40)},
    "lowest": dict.fromkeys(range(40), -3.4028234663852886e38),
    "negative-zero": dict.fromkeys(range(40), -0.0),
}


@pytest.mark.parametrize("row", HARD.values(), ids=HARD)
def test_softmax_of_hard_rows(few_sms, row):
    x = matrix(6, 40)
    for col, value in row.items():
        x[2, col] = value  # the rows of its group before and after it are ordinary ones
    assert_softmax(in_parts, x)


def test_softmax_that_needs_more_programs_than_fit(few_sms):
    with pytest.raises(ValueError, match="129 columns needs 9 programs of 16, and 8 fit"):
        in_parts(matrix(2, 129))


@pytest.mark.parametrize("y_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("x_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("n", [40, 88, 89], ids=["even", "parts-of-30-columns", "odd"])
def test_split_call_of_two_dtypes(few_sms, n, x_dtype, y_dtype):
    """A part has whole vectors of the narrower one, which ALIGN is of."""
    x = matrix(5, n, x_dtype)
    y = torch.full((5, n), NAN, dtype=getattr(torch, y_dtype), device=DEVICE)
    align = math.gcd(n, 16 // min(x.element_size(), y.element_size()))
    arguments = (y, *y.stride(), x, *x.stride())
    run = split.split_call(split.split_kernel, arguments, 5, n, block=32, align=align, num_warps=1)
    run(y, x)
    assert_softmax(lambda _: y, x.to(y.dtype))


def test_softmax_is_equal_bit_for_bit_each_time(few_sms):
    x = matrix(3, 40)
    first = in_parts(x)
    for _ in range(2):
        assert torch.equal(in_parts(x), first)


def test_softmax_leaves_no_thread(few_sms):
    if runtime.INTERPRETED:
        before = threading.active_count()
        in_parts(matrix(3, 40))
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(5)
        assert threading.active_count() <= before


# ---- what it moves


@pytest.mark.parametrize(
    ("m", "n", "parts", "groups"),
    [
        pytest.param(1, 16, 1, 1, id="one-program"),
        pytest.param(2, 40, 3, 2, id="a-row-per-group"),
        pytest.param(7, 40, 3, 2, id="rows-in-turn"),
        pytest.param(3, 128, 8, 1, id="one-group"),
    ],
)
def test_softmax_moves_the_least_and_two_words_per_program(few_sms, m, n, parts, groups):
    x, written = matrix(m, n), []
    traffic = count(lambda x: written.append(in_parts(x)), x, trace=True)
    zeros, kernel = traffic.ops
    assert_touches_once(traffic, "x_ptr", x)
    assert_touches_once(traffic, "y_ptr", written[0])
    assert (zeros.read_elements, zeros.written_elements) == (0, 4 * parts * groups)
    published = 2 * m * parts
    assert kernel.written_elements == m * n + published
    # An exchange reads its word. All programs have published before the first one looks.
    assert kernel.read_elements == m * n + published + m * parts * 2 * parts
    slots = {
        offset for it in traffic.accesses if it.argument == "slots_ptr" for offset in it.offsets
    }
    used = min(m, 2 * groups) // groups * groups if m > groups else m
    assert len(slots) == 2 * parts * used


@pytest.mark.parametrize("make", [
    pytest.param(lambda: matrix(5, 56)[:, :40], id="padded-rows"),
    pytest.param(lambda: matrix(5, 40, layout="transposed"), id="transposed"),
    pytest.param(lambda: matrix(1, 40).expand(5, 40), id="one-row-again-and-again"),
])  # fmt: skip
def test_softmax_of_views(few_sms, make):
    x = make()
    assert_softmax(in_parts, x)
    traffic = count(in_parts, x)
    assert [op.name for op in traffic.ops] == ["zeros", "split_kernel"]  # nothing is copied


# ---- publish, collect


@triton.jit
def _exchange_kernel(y_ptr, x_ptr, slots_ptr, n_rounds, SLOTS: tl.constexpr):
    """In each round, a program publishes its number and writes down those of all programs.

    The later ones come later: they look at memory, and so hand over, so many times before.
    """
    part, n_parts = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, SLOTS)
    tag = part * 0
    for i in range(n_rounds):
        tag += 1
        slots = slots_ptr + tag % 2 * n_parts
        for _ in range(3 * part):
            tl.load(slots, volatile=True)
        publish(slots + part, tl.load(x_ptr + i * n_parts + part), tag)
        found = collect(slots, n_parts, tag, SLOTS)
        tl.store(y_ptr + (i * n_parts + part) * SLOTS + lanes, found)


@triton.jit
def _one_is_silent_kernel(y_ptr, slots_ptr, n_parts, SLOTS: tl.constexpr):
    part = tl.program_id(0)
    if part != 1:
        publish(slots_ptr + part, part.to(tl.float32), part * 0 + 1)
    tl.store(y_ptr + part, tl.sum(collect(slots_ptr, n_parts, 1, SLOTS), axis=0))


def exchanged(x):
    """The numbers of each round, one round per row of `x`, as each program found them."""
    rounds, parts = x.shape
    y = torch.full((rounds, parts, 8), NAN, device=DEVICE)
    example = (y, x, x.to(torch.int64), rounds)
    constants = {"SLOTS": 8}
    Call(_exchange_kernel, (parts, 1), example, constants, num_warps=1, slots=2 * parts)(y, x)
    assert (y[..., parts:] == 0).all()  # where there is no slot
    return y[..., :parts]


@pytest.mark.parametrize("parts", [1, 2, 5, 8])
def test_publish_and_collect_round_by_round(parts):
    x = matrix(6, parts)
    assert torch.equal(exchanged(x), x[:, None].expand(6, parts, parts))


@pytest.mark.parametrize(
    "value", [0.0, -0.0, -1.0, INF, -INF, NAN, 1e-45, -3.4e38, 3.4e38], ids=str
)
def test_publish_keeps_every_bit(value):
    x = torch.full((3, 2), value, device=DEVICE)
    bits = x.view(torch.int32)[:, None].expand(3, 2, 2)
    assert torch.equal(exchanged(x).view(torch.int32), bits)


def test_collect_of_what_nobody_publishes_raises():
    """On a GPU it would hang."""
    if not runtime.INTERPRETED:
        pytest.skip("it would hang this GPU")
    y = torch.zeros(3, device=DEVICE)
    example = (y, y.to(torch.int64), 3)
    run = Call(_one_is_silent_kernel, (3, 1), example, {"SLOTS": 4}, num_warps=1, slots=3)
    error = kernels.ended(run, y)
    assert "3 programs wait" in str(error)


# ---- compiled


@pytest.mark.parametrize(
    ("name", "block"),
    [("float32", 8192), pytest.param("bfloat16", 16384, marks=pytest.mark.slow)],
)
def test_split_kernel_fits_the_registers_of_an_sm(name, block):
    x = torch.empty(4, 2**18, dtype=getattr(torch, name), device=DEVICE)
    [kernel] = resources(partial(split.softmax, block=block), "sm_90", x)
    assert kernel.spill_bytes == 0
    assert set(kernel.store_bits) == {128}
    assert set(kernel.load_bits) == {64, 128}  # words of the slots, and vectors of x


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16384, 65536, 131072, 2**20])
def test_softmax_of_as_many_rows_as_fill_the_gpu(n, dtype):
    x = matrix(2**26 // n, n, dtype)
    assert_softmax(split.softmax, x)


@pytest.mark.gpu
def test_softmax_of_more_columns_than_fit_the_gpu():
    with pytest.raises(ValueError, match="fit the GPU at once"):
        split.softmax(matrix(1, 2**24), block=1024)
