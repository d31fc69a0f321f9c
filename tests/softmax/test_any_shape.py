"""What holds for every launcher that takes rows of any width and any strides, and an `out`."""

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import runtime
from memtraffic.compile import resources
from memtraffic.kernels.operands import DTYPES
from memtraffic.kernels.softmax import fused, masked, naive, online, persistent, split, tiled
from memtraffic.kernels.tiling import MAX_COLS
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close, assert_softmax, assert_touches_once

DEVICE = runtime.device()


def split_in_three(x, out=None):
    """A row by three programs, where it has so many columns."""
    block = max(16, triton.next_power_of_2(triton.cdiv(x.shape[-1], 3)))
    return split.softmax(x, out, block=block, chunks=1)


ONE_READ = {
    "masked": masked.softmax,
    "two-blocks": masked.softmax_two_blocks,
    "tiled": tiled.softmax,
    "persistent": persistent.softmax,
}
LAUNCHERS = ONE_READ | {
    "online": online.softmax,
    "split-in-three": split_in_three,
}
EACH = pytest.mark.parametrize("fn", LAUNCHERS.values(), ids=LAUNCHERS)
INF, NAN = float("inf"), float("nan")


@EACH
@pytest.mark.parametrize(
    "n",
    [
        pytest.param(1, id="one-column"),
        pytest.param(2, id="two"),
        pytest.param(127, id="one-short-of-block"),
        pytest.param(128, id="block"),
        pytest.param(129, id="one-past-block"),
        pytest.param(781, id="odd"),
        pytest.param(8320, id="little-past-8192"),
        pytest.param(MAX_COLS - 1, id="widest-but-one"),
        pytest.param(MAX_COLS, id="widest"),
    ],
)
def test_softmax_of_any_width(fn, n, dtype):
    assert_softmax(fn, matrix(3, n, dtype))


def strided(m, n, dtype, row_step, col_step, transposed):
    x = matrix(m * row_step + 1, n * col_step + 1, dtype)
    if transposed:
        x = x.t().contiguous().t()
    row_stride, col_stride = x.stride()
    return x.as_strided((m, n), (row_stride * row_step, col_stride * col_step))


@EACH
@pytest.mark.parametrize(
    "examples", [15, pytest.param(100, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_softmax_of_any_strides(fn, examples):
    @settings(max_examples=examples, deadline=None)
    @given(
        m=st.integers(0, 40 if fn in ONE_READ.values() else 8),  # interpreted slowly
        n=st.integers(0, 70),
        dtype=st.sampled_from(DTYPES),
        row_step=st.integers(0, 3),  # 0: the same row again and again
        col_step=st.integers(0, 3),
        transposed=st.booleans(),
    )
    def check(**case):
        assert_softmax(fn, strided(**case))

    check()


@EACH
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([1e30, -1e30, 0.0], id="huge"),
        pytest.param([-INF, 0.0, 1.0], id="one-minus-infinity"),
        pytest.param([-INF, -INF, -INF], id="all-minus-infinity"),
        pytest.param([INF, 0.0, 1.0], id="infinity"),
        pytest.param([NAN, 0.0, 1.0], id="nan"),
        pytest.param([-1e4, -1e4, -1e4], id="far-below-zero"),
        pytest.param([-3e38, -3e38, -3e38], id="lowest"),
        pytest.param([0.0, 0.0, 1000.0], id="maximum-in-the-tail"),
        pytest.param([-INF, -INF, 0.0], id="nothing-but-the-tail"),
        pytest.param([-INF] * 7, id="masked-lane-in-the-tail"),
    ],
)
def test_softmax_of_hard_rows(fn, row):
    rows = [row, [float(col) for col in range(len(row))]]
    assert_softmax(fn, torch.tensor(rows, device=DEVICE))


@EACH
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[:, :1].expand(6, 9), id="broadcast-columns"),
        pytest.param(lambda x: x[:1].expand(4, 20), id="broadcast-rows"),
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[:, 1:17], id="unaligned-start"),
        pytest.param(lambda x: x[:, :16], id="padded-rows"),
        pytest.param(lambda x: x[:, 3:4], id="one-column-of-many"),
    ],
)
def test_softmax_of_views(fn, view):
    x = view(matrix(6, 20))
    assert_softmax(fn, x)
    assert fn(x).is_contiguous()


@EACH
@pytest.mark.parametrize("shape", [(0, 8), (4, 0)], ids=["no-rows", "no-columns"])
def test_softmax_of_an_empty_matrix(fn, shape):
    x = torch.empty(shape, device=DEVICE, dtype=torch.float16)
    y, out = fn(x), torch.empty_like(x)
    assert (y.shape, y.dtype) == (shape, torch.float16)
    assert fn(x, out) is out


# ---- out


@EACH
@pytest.mark.parametrize(
    "out",
    [
        pytest.param(lambda m, n: torch.empty(n, m).t(), id="transposed"),
        pytest.param(lambda m, n: torch.empty(m, n + 1)[:, :n], id="odd-row-stride"),
        pytest.param(lambda m, n: torch.empty(m * n + 1)[1:].view(m, n), id="unaligned"),
        pytest.param(lambda m, n: torch.empty(2 * m, n)[::2], id="every-other-row"),
    ],
)
@pytest.mark.parametrize("n", [1, 8, 9])
def test_softmax_writes_and_returns_out(fn, n, out):
    x = matrix(5, n)
    with torch.device(DEVICE):
        out = out(5, n)
    base = out._base.fill_(781.0)
    assert fn(x, out) is out
    assert_softmax(lambda _: out, x)
    assert (base == 781.0).sum() == base.numel() - out.numel(), "written past out"


@EACH
@pytest.mark.parametrize("n", [5, 6, 13])
def test_softmax_where_rows_of_both_end_between_vectors(fn, n):
    x, out = matrix(5, 16)[:, :n], torch.empty(5, 16, device=DEVICE)
    assert_softmax(lambda x: fn(x, out[:, :n]), x)


@EACH
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        pytest.param((4, 40), (40, 1), id="packed"),
        pytest.param((3, 4), (4, 3), id="meet-past-the-end"),
        pytest.param((4, 1), (1, 0), id="one-column"),
        pytest.param((1, 4), (0, 2), id="one-row"),
        pytest.param((4, 3), (1, 4), id="transposed"),
    ],
)
def test_softmax_takes_an_out_that_does_not_repeat(fn, shape, strides):
    out = torch.zeros(200, device=DEVICE).as_strided(shape, strides)
    assert_softmax(lambda x: fn(x, out), matrix(*shape))


@EACH
def test_softmax_takes_an_out_beside_x_or_the_same(fn):
    memory = matrix(12, 18)
    for x, out in (
        (memory[4:8], memory[8:]),
        (memory[4:8], memory[:4]),
        (memory[:, :9], memory[:, 9:]),
        (memory[:, ::2], memory[:, 1::2]),
        (memory, memory),
    ):
        out = out[: x.shape[0]]
        expected = naive.reference(x)
        assert_close(fn(x, out), expected, x.dtype)


@EACH
def test_softmax_into_an_out_that_autograd_has_saved(fn):
    x = matrix(3, 4).requires_grad_()
    out = x.exp()  # its gradient is computed from its result
    with torch.no_grad():
        fn(out, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- what it moves


@pytest.mark.parametrize("fn", ONE_READ.values(), ids=ONE_READ)
@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 781, 1000, 4096, 5000])
def test_softmax_touches_each_element_once(fn, n):
    traffic = count(fn, matrix(2, n), trace=True)
    assert_touches_once(traffic, "x_ptr", 2 * n)
    assert_touches_once(traffic, "y_ptr", 2 * n)
    assert (traffic.read_elements, traffic.written_elements) == (2 * n, 2 * n)


# ---- far apart


@EACH
@pytest.mark.gpu
def test_softmax_past_two_to_the_31_elements(fn):
    m, n = 70000, 32768
    if torch.cuda.mem_get_info()[0] < 3 * m * n * 2:
        pytest.skip(f"{m} x {n} bfloat16 twice is more than this GPU has free")
    x = torch.randn(1, n, device=DEVICE, dtype=torch.bfloat16).repeat(m, 1)
    assert x.numel() > 2**31
    y = fn(x)
    assert torch.equal(y[-1], y[0])
    assert_softmax(lambda _: y[-3:], x[-3:])


def far(shape, strides):
    """A small matrix whose elements lie gigabytes apart; the memory between is never touched."""
    x = torch.empty_strided(shape, strides, dtype=torch.float16, device=DEVICE)
    return x.copy_(matrix(*shape))


@pytest.mark.parametrize("fn", [fused.softmax, *LAUNCHERS.values()], ids=["fused", *LAUNCHERS])
def test_softmax_row_offsets_outgrow_int32(fn):
    assert_softmax(fn, far((3, 4), (2**30, 1)))


@EACH
def test_softmax_column_offsets_outgrow_int32(fn):
    assert_softmax(fn, far((2, 3), (1, 2**30 + 8)))


@EACH
@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**30)], ids=["rows", "columns"])
def test_softmax_offsets_of_out_outgrow_int32(fn, strides):
    out = far((3, 3), strides)
    assert_softmax(lambda x: fn(x, out), matrix(3, 3, "float16"))


# ---- compiled


@pytest.mark.slow
@EACH
@pytest.mark.parametrize(
    "name",
    [
        "float32",
        pytest.param("float16", marks=pytest.mark.slow),
        pytest.param("bfloat16", marks=pytest.mark.slow),
    ],
)
def test_softmax_compiles_without_spills(fn, name):
    [kernel] = resources(fn, "sm_90", matrix(2, 781, name))
    assert kernel.spill_bytes == 0
