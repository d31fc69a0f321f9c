from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import machine
from memtraffic.judge import assert_softmax, is_softmax
from memtraffic.traffic.count import CountError, count

pytest.importorskip("triton", reason="Triton is not installed")

from memtraffic.ladder import fused, masked
from memtraffic.targets import launches, resources

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOTH = pytest.mark.parametrize(
    "fn", [masked.softmax, masked.softmax_pair], ids=["block", "pair"]
)
INF = float("inf")


def random(m, n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(m * 10007 + n)
    return torch.randn(m, n, generator=generator).to(machine.device(), dtype)


@BOTH
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
        pytest.param(masked.MAX_COLS - 1, id="widest-but-one"),
        pytest.param(masked.MAX_COLS, id="widest"),
    ],
)
def test_right_at_any_width(fn, n, dtype):
    assert_softmax(fn, random(3, n, dtype))


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 5),
    n=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    row_step=st.integers(1, 3),
    col_step=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_right_for_any_strides(fn, m, n, dtype, row_step, col_step, transposed):
    big = random(m * row_step + 1, n * col_step + 1, dtype)
    if transposed:
        big = big.t().contiguous().t()
    x = big[: m * row_step : row_step, : n * col_step : col_step]
    assert x.shape == (m, n)
    assert_softmax(fn, x) if n else fn(x)


@BOTH
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


@BOTH
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[:, :1].expand(6, 9), id="broadcast-columns"),
        pytest.param(lambda x: x[:1].expand(4, 20), id="broadcast-rows"),
        pytest.param(lambda x: x.t(), id="transposed"),
    ],
)
def test_views(fn, view):
    assert_softmax(fn, view(random(6, 20)))


@BOTH
def test_out_is_written_and_returned(fn):
    x = random(5, 9)
    out = torch.full((9, 5), float("nan"), device=machine.device()).t()
    assert fn(x, out) is out
    assert_softmax(lambda _: out, x)


@BOTH
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
            (2, 3), "repeats", ValueError, "out repeats its elements", id="repeats"
        ),
        pytest.param((2, 3, 4), None, ValueError, r"not 3: \(2, 3, 4\)", id="3-d"),
        pytest.param(
            (1, 40000), None, ValueError, "40000 columns, more than", id="too-wide"
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
    elif out == "repeats":
        out = torch.zeros(2, 1, device=device).expand(2, 3)
    elif out is not None:
        out = torch.zeros(2, 3, device=device, dtype=out)
    with pytest.raises(error, match=f"masked: .*{message}"):
        fn(x, out)


@pytest.mark.skipif(not machine.HAS_GPU, reason="needs a GPU")
def test_a_cpu_tensor_where_a_gpu_runs():
    with pytest.raises(TypeError, match="on the cpu, not on a GPU"):
        masked.softmax(torch.zeros(2, 3))


@BOTH
@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 781, 1000, 4096, 5000])
def test_each_element_is_touched_once(fn, n):
    traffic = count(fn, random(2, n), trace=True)
    for kind, argument in (("read", "x_ptr"), ("written", "y_ptr")):
        touched = Counter(
            offset
            for it in traffic.accesses
            if it.kind == kind
            for offset in it.offsets
        )
        assert touched == Counter(range(2 * n)), f"{kind} {argument}"


def test_a_kernel_without_its_mask_is_caught():
    import triton

    def unmasked(x):
        y = torch.empty_like(x)
        masked._masked_kernel[(x.shape[0],)](
            y, x, *y.stride(), *x.stride(), triton.next_power_of_2(x.shape[1]),
            BLOCK=triton.next_power_of_2(x.shape[1]),
        )  # fmt: skip
        return y

    with pytest.raises(CountError, match="outside the tensors it was given"):
        count(unmasked, random(3, 5))


def test_the_judge_refuses_what_is_not_written():
    assert is_softmax(masked.softmax, random(3, 5))
    assert not is_softmax(torch.empty_like, random(3, 5))


@pytest.mark.skipif(not machine.HAS_GPU, reason="needs a GPU with 10 GB to spare")
def test_past_two_to_the_31_elements():
    m, n = 70000, 32768
    if torch.cuda.mem_get_info()[0] < 3 * m * n * 2:
        pytest.skip(f"{m} x {n} bfloat16 twice is more than this GPU has free")
    x = torch.randn(1, n, device=machine.device(), dtype=torch.bfloat16).repeat(m, 1)
    assert x.numel() > 2**31
    y = masked.softmax(x)
    assert torch.equal(y[-1], y[0])
    assert_softmax(lambda _: y[-3:], x[-3:])


def far(shape, strides):
    """A small matrix whose elements lie gigabytes apart; of the memory between them no page is touched."""
    x = torch.empty_strided(
        shape, strides, dtype=torch.float16, device=machine.device()
    )
    return x.copy_(random(*shape))


@pytest.mark.parametrize(
    "fn",
    [fused.softmax, masked.softmax, masked.softmax_pair],
    ids=["fused", "block", "pair"],
)
def test_row_offsets_outgrow_int32(fn):
    assert_softmax(fn, far((3, 4), (2**30, 1)))


@BOTH
def test_column_offsets_outgrow_int32(fn):
    assert_softmax(fn, far((2, 3), (1, 2**30 + 8)))


@BOTH
@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**30)], ids=["rows", "columns"])
def test_offsets_of_out_outgrow_int32(fn, strides):
    x, out = random(3, 3, torch.float16), far((3, 3), strides)
    assert_softmax(lambda x: fn(x, out), x)


@BOTH
@pytest.mark.parametrize("n", [3, 781, 5000, 20000])
def test_launch_options(fn, n):
    [launch] = launches(fn, torch.empty(2, n, device=machine.device()))
    warps, constants = launch.options["num_warps"], launch.constants
    assert warps & (warps - 1) == 0
    if "HEAD" in constants:
        rest = n - constants["HEAD"]
        assert constants["TAIL"] // 2 < rest <= constants["TAIL"]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiles_in_any_dtype(fn, dtype):
    [kernel] = resources(
        fn, "sm_90", torch.empty(2, 781, dtype=dtype, device=machine.device())
    )
    assert kernel.spill_bytes == 0


@BOTH
@pytest.mark.parametrize("n", [1, 8, 9])
def test_out_at_widths_that_take_one_block(fn, n):
    out = torch.full((2, n), float("nan"), device=machine.device())
    assert fn(random(2, n), out) is out
    assert not out.isnan().any()


@BOTH
def test_a_new_result_is_contiguous(fn):
    assert fn(random(6, 20).t()).is_contiguous()


@BOTH
def test_out_that_repeats_rows(fn):
    out = torch.zeros(1, 3, device=machine.device()).expand(2, 3)
    with pytest.raises(ValueError, match="out repeats its elements"):
        fn(random(2, 3), out)
