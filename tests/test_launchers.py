"""What holds for every launcher that takes rows of any width and any strides, and an `out`."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import machine
from memtraffic.judge import assert_close, assert_softmax
from memtraffic.traffic.count import count

pytest.importorskip("triton", reason="Triton is not installed")

from kernels import random

from memtraffic.ladder import fused, masked, persistent, warps
from memtraffic.ladder.operands import MAX_ROWS
from memtraffic.targets import compile_launches, launches

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAUNCHERS = {
    "masked": masked.softmax,
    "masked-pair": masked.softmax_pair,
    "warps": warps.softmax,
    "persistent": persistent.softmax,
}
EACH = pytest.mark.parametrize("fn", LAUNCHERS.values(), ids=LAUNCHERS)
INF = float("inf")


def rung(fn):
    """The name that the messages of `fn` begin with."""
    return fn.__module__.rpartition(".")[2]


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
        pytest.param(fused.MAX_COLS - 1, id="widest-but-one"),
        pytest.param(fused.MAX_COLS, id="widest"),
    ],
)
def test_right_at_any_width(fn, n, dtype):
    assert_softmax(fn, random(3, n, dtype))


@EACH
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 40),
    n=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    row_step=st.integers(0, 3),  # 0: one row, as often as there are rows
    col_step=st.integers(0, 3),
    transposed=st.booleans(),
)
def test_right_for_any_strides(fn, m, n, dtype, row_step, col_step, transposed):
    big = random(m * row_step + 1, n * col_step + 1, dtype)
    if transposed:
        big = big.t().contiguous().t()
    down, across = big.stride()
    x = big.as_strided((m, n), (down * row_step, across * col_step))
    assert_softmax(fn, x) if n else fn(x)


@EACH
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([1e30, -1e30, 0.0], id="huge"),
        pytest.param([-INF, 0.0, 1.0], id="one-minus-infinity"),
        pytest.param([-INF, -INF, -INF], id="all-minus-infinity"),
        pytest.param([INF, 0.0, 1.0], id="infinity"),
        pytest.param([float("nan"), 0.0, 1.0], id="nan"),
        pytest.param([-1e4, -1e4, -1e4], id="far-below-zero"),
        pytest.param([-3e38, -3e38, -3e38], id="lowest"),
        pytest.param([0.0, 0.0, 1000.0], id="maximum-in-the-tail"),
        pytest.param([-INF, -INF, 0.0], id="nothing-but-the-tail"),
        pytest.param([-INF] * 7, id="masked-lane-in-the-tail"),
    ],
)
def test_hard_rows(fn, row):
    rows = [row, [float(col) for col in range(len(row))]]
    assert_softmax(fn, torch.tensor(rows, device=machine.device()))


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
def test_views(fn, view):
    assert_softmax(fn, view(random(6, 20)))


@EACH
def test_a_new_result_is_contiguous(fn):
    assert fn(random(6, 20).t()).is_contiguous()


@EACH
@pytest.mark.parametrize("shape", [(0, 8), (4, 0)], ids=["no-rows", "no-columns"])
def test_an_empty_matrix(fn, shape):
    x = torch.empty(shape, device=machine.device(), dtype=torch.float16)
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
        pytest.param(
            lambda m, n: torch.empty(m * n + 1)[1:].view(m, n), id="unaligned"
        ),
        pytest.param(lambda m, n: torch.empty(2 * m, n)[::2], id="every-other-row"),
    ],
)
@pytest.mark.parametrize("n", [1, 8, 9])
def test_out_is_written_and_returned(fn, n, out):
    x = random(5, n)
    with torch.device(machine.device()):
        out = out(5, n)
    base = out._base.fill_(781.0)
    assert fn(x, out) is out
    assert_softmax(lambda _: out, x)
    assert (base == 781.0).sum() == base.numel() - out.numel(), "written past out"


@EACH
@pytest.mark.parametrize("n", [5, 6, 13])
def test_rows_of_both_may_end_where_16_bytes_do_not(fn, n):
    x, out = random(5, 16)[:, :n], torch.empty(5, 16, device=machine.device())
    assert_softmax(lambda x: fn(x, out[:, :n]), x)


@EACH
@pytest.mark.parametrize(
    ("x", "out", "error", "message"),
    [
        pytest.param(
            (2, 3), (2, 4), ValueError, r"out is \(2, 4\), not \(2, 3\)", id="shape"
        ),
        pytest.param(
            (2, 3), torch.float16, TypeError, "out is torch.float16 on", id="dtype"
        ),
        pytest.param(
            (2, 3), (2, 1), ValueError, "out repeats its elements", id="repeats-columns"
        ),
        pytest.param(
            (2, 3), (1, 3), ValueError, "out repeats its elements", id="repeats-rows"
        ),
        pytest.param((2, 3, 4), None, ValueError, r"not 3: \(2, 3, 4\)", id="3-d"),
        pytest.param(
            (1, 32769), None, ValueError, "32769 columns, more than", id="too-wide"
        ),
        pytest.param(torch.int32, None, TypeError, "not torch.int32", id="integers"),
    ],
)
def test_clear_errors(fn, x, out, error, message):
    device = machine.device()
    x = (
        torch.zeros(x, device=device)
        if isinstance(x, tuple)
        else torch.zeros(2, 3, device=device).to(x)
    )
    if isinstance(out, tuple):
        out = torch.zeros(out, device=device)
        out = out.expand(2, 3) if 1 in out.shape else out
    elif out is not None:
        out = torch.zeros(2, 3, device=device, dtype=out)
    with pytest.raises(error, match=rf"^{rung(fn)}: .*{message}"):
        fn(x, out)


@EACH
@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        ([[1.0]], None, "x is a list"),
        (None, None, "x is a NoneType"),
        (torch.zeros(1, 1).numpy(), None, "x is a ndarray"),
        (torch.zeros(2, 3), True, "out is a bool"),
    ],
)
def test_no_tensor(fn, x, out, message):
    x = x.to(machine.device()) if isinstance(x, torch.Tensor) else x
    with pytest.raises(TypeError, match=f"^{rung(fn)}: {message}, not a tensor$"):
        fn(x, out)


@EACH
def test_more_rows_than_32_bits_count(fn):
    x = torch.zeros(1, 1, device=machine.device()).expand(MAX_ROWS + 1, 1)
    with pytest.raises(ValueError, match=f"{MAX_ROWS + 1} rows, more than {MAX_ROWS}$"):
        fn(x)


@EACH
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        pytest.param((4, 40), (1, 1), id="one-element-on"),
        pytest.param((4, 40), (39, 1), id="a-row-too-near"),
        pytest.param((5, 4), (3, 4), id="rows-and-columns-meet"),
        pytest.param((4, 3), (0, 0), id="one-element"),
        pytest.param((4, 1), (0, 1), id="one-column"),
    ],
)
def test_an_out_that_repeats_its_elements(fn, shape, strides):
    memory = torch.zeros(200, device=machine.device())
    with pytest.raises(ValueError, match=rf"^{rung(fn)}: out repeats its elements"):
        fn(random(*shape), memory.as_strided(shape, strides))


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
def test_an_out_that_does_not(fn, shape, strides):
    memory = torch.zeros(200, device=machine.device())
    out = memory.as_strided(shape, strides)
    assert_softmax(lambda x: fn(x, out), random(*shape))


@EACH
@pytest.mark.parametrize("step", [-1, 1, 3])
def test_an_out_over_a_part_of_x(fn, step):
    memory = random(12, 9)
    x, out = memory[4:8], memory[4 + step : 8 + step]
    message = f"out begins {step * 9 * 4} bytes after x"
    with pytest.raises(ValueError, match=rf"^{rung(fn)}: {message}"):
        fn(x, out)
    with pytest.raises(ValueError, match=rf"^{rung(fn)}: out begins 0 bytes after x"):
        fn(memory[:9], memory[:9].t())


@EACH
def test_an_out_beside_x(fn):
    memory = random(12, 18)
    for x, out in (
        (memory[4:8], memory[8:]),
        (memory[4:8], memory[:4]),
        (memory[:, :9], memory[:, 9:]),
        (memory[:, ::2], memory[:, 1::2]),
        (memory, memory),
    ):
        right = torch.softmax(x.double(), dim=1)
        assert_close(fn(x, out), right, x.dtype)


# ---- where the tensor is


@EACH
@pytest.mark.skipif(machine.INTERPRETED, reason="interpreted kernels run on any device")
def test_a_cpu_tensor_where_a_gpu_runs(fn):
    with pytest.raises(TypeError, match=rf"^{rung(fn)}: .* on the cpu, not on a GPU"):
        fn(torch.zeros(2, 3))


@EACH
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_while_another_is_current(fn):
    for index in (0, 1):  # alike but for the GPU
        x = random(5, 9).to(f"cuda:{index}")
        with torch.cuda.device(0):
            assert_softmax(fn, x)
            assert fn(x).device == x.device


# ---- what it moves


@EACH
@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 781, 1000, 4096, 5000])
def test_each_element_is_touched_once(fn, n):
    traffic = count(fn, random(2, n), trace=True)
    for kind, argument in (("read", "x_ptr"), ("written", "y_ptr")):
        touched = Counter(
            (it.argument, offset)
            for it in traffic.accesses
            if it.kind == kind
            for offset in it.offsets
        )
        assert touched == Counter((argument, at) for at in range(2 * n))


# ---- far apart


@pytest.mark.skipif(not machine.HAS_GPU, reason="needs a GPU with 10 GB to spare")
@EACH
def test_past_two_to_the_31_elements(fn):
    m, n = 70000, 32768
    if torch.cuda.mem_get_info()[0] < 3 * m * n * 2:
        pytest.skip(f"{m} x {n} bfloat16 twice is more than this GPU has free")
    x = torch.randn(1, n, device=machine.device(), dtype=torch.bfloat16).repeat(m, 1)
    assert x.numel() > 2**31
    y = fn(x)
    assert torch.equal(y[-1], y[0])
    assert_softmax(lambda _: y[-3:], x[-3:])


def far(shape, strides):
    """A small matrix whose elements lie gigabytes apart; of the memory between them no page is touched."""
    x = torch.empty_strided(
        shape, strides, dtype=torch.float16, device=machine.device()
    )
    return x.copy_(random(*shape))


@pytest.mark.parametrize(
    "fn", [fused.softmax, *LAUNCHERS.values()], ids=["fused", *LAUNCHERS]
)
def test_row_offsets_outgrow_int32(fn):
    assert_softmax(fn, far((3, 4), (2**30, 1)))


@EACH
def test_column_offsets_outgrow_int32(fn):
    assert_softmax(fn, far((2, 3), (1, 2**30 + 8)))


@EACH
@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**30)], ids=["rows", "columns"])
def test_offsets_of_out_outgrow_int32(fn, strides):
    x, out = random(3, 3, torch.float16), far((3, 3), strides)
    assert_softmax(lambda x: fn(x, out), x)


# ---- compiled


@pytest.fixture(scope="module")
def spills():
    """Bytes that a thread spills on sm_90 at an odd width, by launcher and dtype."""
    cases = {}
    for name, fn in LAUNCHERS.items():
        for dtype in DTYPES:
            x = torch.empty(2, 781, dtype=dtype, device=machine.device())
            [cases[name, dtype]] = launches(fn, x)
    found = compile_launches([(launch, "sm_90") for launch in cases.values()])
    return {case: kernel.spill_bytes for case, kernel in zip(cases, found, strict=True)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_compiles_in_any_dtype(spills, name, dtype):
    assert spills[name, dtype] == 0
