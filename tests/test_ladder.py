import re
import sys
from collections import Counter

import pytest
import torch

from memtraffic import ladder, machine
from memtraffic.judge import assert_close
from memtraffic.ladder import RUNGS, naive, name_of, resolve
from memtraffic.traffic.count import CountError, count
from memtraffic.traffic.formula import formula

NO_TRITON = "Triton is not installed"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNEL_RUNGS = [name for name in RUNGS if name != "naive"]


@pytest.fixture(params=RUNGS)
def rung(request):
    """The name of each rung."""
    if request.param in KERNEL_RUNGS:
        pytest.importorskip("triton", reason=NO_TRITON)
    return request.param


@pytest.fixture
def fused():
    pytest.importorskip("triton", reason=NO_TRITON)
    return resolve("fused")


@pytest.fixture
def nan_memory():
    """Memory that nobody has written yet holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2, 8, device=machine.device()).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def random(m, n, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(m * n)
    return (scale * torch.randn(m, n, generator=generator)).to(machine.device(), dtype)


def judged(rung, x):
    """The softmax of `x` by `rung`, once it is judged."""
    before = x.clone()
    y = resolve(rung)(x)
    assert_close(y, torch.softmax(x.double(), dim=1), x.dtype)
    assert torch.equal(x, before), "the input was changed"
    assert y.device == x.device
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n"),
    [
        pytest.param(5, 1, id="one-column"),
        pytest.param(5, 2, id="two-columns"),
        pytest.param(1, 16, id="one-row"),
        pytest.param(7, 1024, id="one-program-a-row"),
        pytest.param(2, 32768, id="widest-row"),
        pytest.param(300, 8, id="more-programs-than-sms"),
    ],
)
def test_softmax_is_right(rung, m, n, dtype, nan_memory):
    judged(rung, random(m, n, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_values_do_not_overflow(rung, dtype, nan_memory):
    x = random(6, 256, dtype, scale=5000.0)
    x[0] = torch.finfo(dtype).max / 4
    x[1] = -torch.finfo(dtype).max / 4
    judged(rung, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_infinity_is_no_weight(rung, dtype, nan_memory):
    x = random(4, 64, dtype)
    x[0, :63] = -float("inf")
    x[1, ::2] = -float("inf")
    x[2, -1] = -float("inf")
    y = judged(rung, x)
    assert (y[torch.isinf(x)] == 0).all()
    assert y[0, 63] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_values_share_equally(rung, dtype, nan_memory):
    y = judged(rung, torch.full((3, 8), -3.0, dtype=dtype, device=machine.device()))
    assert (y == 1 / 8).all()


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda wide: wide[:, :64], id="padded-rows"),
        pytest.param(lambda wide: wide[:, 3:67], id="unaligned-start"),
        pytest.param(lambda wide: wide[::2, :64], id="every-other-row"),
        pytest.param(lambda wide: wide[2:, 16:80], id="starts-at-third-row"),
        pytest.param(lambda wide: wide[:1, :64].expand(5, 64), id="row-stride-0"),
    ],
)
def test_rows_may_lie_apart(rung, view, nan_memory):
    y = judged(rung, view(random(6, 100)))
    assert y.is_contiguous()


def test_no_rows(rung):
    y = resolve(rung)(torch.empty(0, 8, device=machine.device(), dtype=torch.float16))
    assert y.shape == (0, 8)
    assert y.dtype == torch.float16


def test_result_is_new_memory(rung):
    x = random(2, 8)
    assert (
        resolve(rung)(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    )


def test_softmax_argmax_is_right():
    x = random(5, 21)
    assert_close(naive.softmax_argmax(x), torch.softmax(x.double(), dim=1), x.dtype)


def test_reference_is_float64(fused):
    from memtraffic.ladder.fused import reference

    x = random(3, 8, torch.float16)
    assert reference(x).dtype == torch.float64
    assert_close(fused(x), reference(x), x.dtype)


@pytest.mark.parametrize(
    ("make", "error", "numbers"),
    [
        pytest.param(
            lambda: random(4, 781), ValueError, "781", id="not-a-power-of-two"
        ),
        pytest.param(lambda: random(4, 0), ValueError, "0", id="no-columns"),
        pytest.param(
            lambda: random(1, 65536), ValueError, "65536 .* 32768", id="over-max-cols"
        ),
        pytest.param(
            lambda: random(4, 16)[:, ::2], ValueError, "2", id="column-stride-2"
        ),
        pytest.param(lambda: random(8, 4).T, ValueError, "4", id="transposed"),
        pytest.param(
            lambda: random(4, 8).view(2, 2, 8), ValueError, r"3.* \(2, 2, 8\)", id="3-d"
        ),
        pytest.param(lambda: random(1, 8)[0], ValueError, r"1.* \(8,\)", id="1-d"),
        pytest.param(lambda: random(4, 8).int(), TypeError, "int32", id="integers"),
        pytest.param(lambda: random(4, 8).double(), TypeError, "float64", id="float64"),
    ],
)
def test_fused_refuses_and_repeats_the_numbers(fused, make, error, numbers):
    with pytest.raises(error, match=rf"^fused: .*\b{numbers}"):
        fused(make())


@pytest.mark.skipif(machine.INTERPRETED, reason="interpreted kernels run on any device")
def test_fused_refuses_a_tensor_elsewhere(fused):
    with pytest.raises(TypeError, match=r"^fused: the tensor is on the cpu, "):
        fused(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("n", "warps"), [(1, 4), (2048, 4), (4096, 8), (16384, 32), (32768, 32)]
)
def test_a_thread_of_fused_holds_at_most_32_elements(fused, n, warps):
    from memtraffic.ladder.fused import num_warps

    assert num_warps(n) == warps
    assert n <= 32 * 32 * warps


# ---- what the rungs move


def test_docstring_tells_the_traffic(rung):
    softmax = resolve(rung)
    [told] = re.findall(
        r"Traffic: (reads .*?, writes .*?)\. ", sys.modules[softmax.__module__].__doc__
    )
    assert told == str(formula(softmax))


def test_naive_tells_the_traffic_of_each_line():
    m, n = 3, 5
    moved = [
        (op.name, op.read_elements, op.written_elements)
        for op in count(naive.softmax, random(m, n)).ops
    ]
    assert moved == [
        ("amax", m * n, m),
        ("sub", m * n + m, m * n),
        ("exp", m * n, m * n),
        ("sum", m * n, m),
        ("div", m * n + m, m * n),
    ]


def test_max_also_writes_the_indices():
    assert str(formula(naive.softmax_argmax)) == "reads 5MN + 2M, writes 3MN + 3M"
    [found, *_] = count(naive.softmax_argmax, random(3, 5)).ops
    assert (found.name, found.written_elements, found.written_bytes) == (
        "max",
        2 * 3,
        3 * 4 + 3 * 8,
    )


def assert_touches_once(softmax, x):
    """Each element of `x` is read once, each of the result written once, and nothing else is touched."""
    result = []
    traffic = count(lambda x: result.append(softmax(x)), x, trace=True)
    touched = Counter(
        (access.kind, access.argument, offset)
        for access in traffic.accesses
        for offset in access.offsets
    )
    expected = Counter()
    for kind, argument, tensor in (
        ("read", "x_ptr", x),
        ("written", "y_ptr", result[0]),
    ):
        expected.update(
            (kind, argument, row * tensor.stride(0) + col)
            for row in range(x.shape[0])
            for col in range(x.shape[1])
        )
    assert touched == expected
    assert len(traffic.ops) == 1


@pytest.mark.parametrize("name", KERNEL_RUNGS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: random(5, 16), id="whole"),
        pytest.param(lambda: random(5, 1), id="one-column"),
        pytest.param(lambda: random(1, 16), id="one-row"),
        pytest.param(lambda: random(5, 24)[:, :16], id="padded-rows"),
        pytest.param(
            lambda: random(7, 16, torch.bfloat16)[2:], id="starts-at-third-row"
        ),
    ],
)
def test_each_element_is_read_once_and_written_once(name, make):
    pytest.importorskip("triton", reason=NO_TRITON)
    assert_touches_once(resolve(name), make())


@pytest.mark.parametrize(
    "name",
    [
        "dropped_mask",
        "shortened_store",
        "skipped_row",
        "twice",
        "three_passes",
        "tuned",
    ],
)
def test_a_kernel_with_one_fault_is_found(name):
    pytest.importorskip("triton", reason=NO_TRITON)
    import kernels

    assert_touches_once(kernels.masked, random(5, 12))
    with pytest.raises((AssertionError, CountError)):
        assert_touches_once(getattr(kernels, name), random(5, 12))


# ---- names


def test_a_rung_is_found_by_its_name_and_named_by_its_function(rung):
    softmax = resolve(rung)
    assert callable(softmax)
    assert name_of(softmax) == rung
    assert RUNGS[rung] == f"{softmax.__module__}:softmax"


def test_any_function_is_found_by_its_module():
    assert resolve("memtraffic.ladder.naive:softmax_argmax") is naive.softmax_argmax
    assert name_of(naive.softmax_argmax) == "memtraffic.ladder.naive:softmax_argmax"
    assert name_of("any text") == "any text"


def test_a_function_is_found_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "found_here.py").write_text(
        "class Box:\n    def double(x):\n        return 2 * x\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    assert resolve("found_here:Box.double")(4) == 8
    assert name_of(resolve("found_here:Box.double")) == "found_here:Box.double"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "fusd",
            "no rung is named 'fusd': give one of naive, fused, masked, warps, persistent, or module:function",
            id="typo",
        ),
        pytest.param(
            "no_such_module:softmax",
            "cannot be imported: No module named 'no_such_module'",
            id="no-module",
        ),
        pytest.param(
            "memtraffic.ladder:softmux", "has no attribute 'softmux'", id="no-function"
        ),
        pytest.param(
            "memtraffic.ladder:RUNGS", "is dict, not a function", id="not-a-function"
        ),
    ],
)
def test_a_name_that_leads_nowhere(name, message):
    with pytest.raises(LookupError, match=message):
        resolve(name)


def test_a_function_no_other_process_can_import():
    with pytest.raises(LookupError, match=r"lambda.* put it in a file"):
        name_of(lambda x: x)
    cell = type(naive.softmax)(
        naive.softmax.__code__, {"__name__": "__main__"}, "softmax"
    )
    with pytest.raises(LookupError, match=r"softmax is defined in __main__"):
        name_of(cell)


def test_rungs_are_in_the_order_of_the_book():
    assert list(ladder.RUNGS) == ["naive", "fused", "masked", "warps", "persistent"]
