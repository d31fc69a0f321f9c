import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

import memtraffic
from memtraffic import device
from memtraffic.compile import capture_launches
from memtraffic.errors import CountError, LaunchError
from memtraffic.meters import count as module
from memtraffic.meters.count import Access, count
from memtraffic.meters.formula import formula
from memtraffic.meters.operations import OpTraffic

pytest.importorskip("triton", reason="Triton is not installed")

import kernels
import triton
import triton.language as tl
from another_process import run_python
from cases import cases


def matrix(m=3, n=12, dtype=torch.float32):
    return torch.arange(m * n).reshape(m, n).to(device.default(), dtype)


def ones(*shape):
    return torch.ones(*shape, device=device.default())


def totals(traffic):
    return traffic.read_elements, traffic.written_elements


def moved(fn, *tensors):
    """The elements that `fn(*tensors)` reads and writes."""
    return totals(count(fn, tensors))


# ---- PyTorch operations

TORCH = [
    pytest.param(lambda x: x + x, 72, 36, id="same-operand-twice"),
    pytest.param(lambda x: x - x[:, :1], 39, 36, id="broadcast-operand-read-once"),
    pytest.param(lambda x: x - x[:, :1].expand_as(x), 39, 36, id="expanded-operand-read-once"),
    pytest.param(lambda x: x.unfold(1, 3, 1).sum(), 36, 1, id="overlapping-windows-read-once"),
    pytest.param(lambda x: x // 2, 36, 36, id="floor-divide"),
    pytest.param(lambda x: x.sum(), 36, 1, id="reduction"),
    pytest.param(lambda x: x.T[2:].reshape(-1, 3)[None], 0, 0, id="views"),
    pytest.param(torch.empty_like, 0, 0, id="allocation"),
    pytest.param(torch.zeros_like, 0, 36, id="fill"),
    pytest.param(lambda x: x.zero_(), 0, 36, id="in-place-fill"),
    pytest.param(lambda x: x.fill_(x.sum()), 36 + 1, 1 + 36, id="in-place-fill-by-a-tensor"),
    pytest.param(lambda x: x.bernoulli_(x.clamp(0, 1)), 72, 72, id="chances"),
    pytest.param(lambda x: x.masked_fill_(x > 3, 0), 72 + 36, 72, id="in-place-choice"),
    pytest.param(lambda x: x.copy_(x.clone()), 72, 72, id="in-place-copy"),
    pytest.param(lambda x: torch.exp(x, out=torch.empty_like(x)), 36, 36, id="out"),
    pytest.param(lambda x: torch.cat([x, x[:1]]), 48, 48, id="list-of-operands"),
    pytest.param(lambda x: torch._foreach_neg([x, x[:1]]), 48, 48, id="list-of-results"),
    pytest.param(lambda x: torch._foreach_zero_([x, x.T]), 0, 72, id="list-of-fills"),
    pytest.param(lambda x: F.mse_loss(x, x[:1].expand_as(x)), 48, 1, id="loss"),
    pytest.param(lambda x: torch.addmm(x[:, :3], x, x.T), 72 + 9, 9, id="added-to"),
    pytest.param(lambda x: torch.addmm(x[:, :3], x, x.T, beta=0), 72, 9, id="added-to-nothing"),
    pytest.param(lambda x: x[:0].exp(), 0, 0, id="no-rows"),
    pytest.param(F.logsigmoid, 36, 36, id="no-buffer-that-only-a-cpu-has"),
]


@pytest.mark.parametrize(("fn", "reads", "writes"), TORCH)
def test_count_torch_operations(fn, reads, writes):
    """On meta tensors the same is counted."""
    traffic = count(fn, matrix())
    assert totals(traffic) == (reads, writes)
    assert count(fn, matrix().to("meta")) == traffic


AT = torch.tensor([2, 0, 2, 2], device=device.default())  # of three rows; one of them three times
OTHER = matrix()
PICTURES = torch.ones(2, 8, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64)


# Each index is read once, and each element that it names as often as it names it.
@pytest.mark.parametrize(
    ("fn", "reads", "writes"),
    [
        pytest.param(lambda x: F.embedding(AT, x), 4 + 48, 48, id="embedding"),
        pytest.param(lambda x: x[AT], 4 + 48, 48, id="rows-by-index"),
        pytest.param(lambda x: x[AT, AT], 8 + 4, 4, id="elements-by-index"),
        pytest.param(lambda x: x[x > 30], 36 + 36 + 5, 36 + 5, id="mask"),
        pytest.param(lambda x: x.gather(1, AT[:3, None].expand(3, 5)), 3 + 15, 15, id="gather"),
        pytest.param(lambda x: x.index_add_(0, AT, x[AT]), 52 + 4 + 96, 48 + 48, id="index-add"),
        pytest.param(lambda x: x.scatter_(1, AT[:3, None], OTHER), 3 + 3, 3, id="scatter-in-place"),
        pytest.param(lambda x: x.scatter(1, AT[:3, None], x), 6 + 36, 36, id="scatter-of-a-copy"),
        pytest.param(lambda x: x.scatter_add_(1, AT[:3, None], OTHER), 3 + 6, 3, id="scatter-add"),
        pytest.param(lambda x: x.index_put_((AT,), OTHER[0]), 4 + 12, 48, id="index-put-broadcast"),
        pytest.param(lambda x: x.index_put_((AT,), OTHER[0], True), 64, 48, id="index-put-add"),
        pytest.param(lambda x: F.nll_loss(*PICTURES), 18 + 18, 2, id="loss-of-pictures"),
        pytest.param(lambda x: x.sum().item(), 36 + 1, 1, id="number-of-python"),
        pytest.param(lambda x: x.tolist(), 36, 0, id="list"),
    ],
)
def test_count_what_needs_values(fn, reads, writes):
    assert moved(fn, matrix()) == (reads, writes)


def losses(targets, **options):
    x, y = ones(4, 8), torch.tensor(targets, device=device.default())
    traffic = count(lambda x: F.nll_loss(x, y, **options), x, backward=True)
    return [totals(each) for each in (traffic, traffic.backward)]


def test_count_loss():
    """A target and the element that it names; then the gradient, the targets, and their sum."""
    assert losses([1, 2, 3, 7]) == [(4 + 4, 2), (1 + 4 + 1, 32)]
    assert losses([1, 2, 3, 7], reduction="sum") == [(4 + 4, 2), (1 + 4, 32)]
    assert losses([1, 2, 3, 7], reduction="none")[1] == (4 + 4, 32)
    assert losses([1, 2, 3, 7], weight=ones(8)) == [(4 + 4 + 4, 2), (1 + 4 + 4 + 1, 32)]
    assert losses([1, -100, 3, -100])[0] == (4 + 2, 2)  # ignored
    assert losses([1, 2, 3, 1], ignore_index=1)[0] == (4 + 2, 2)


def test_count_what_an_index_names_without_values():
    """Meta tensors do where shapes say how many elements; a loss needs the values."""
    index = AT.to("meta")
    assert moved(lambda x: x[index], matrix().to("meta")) == (4 + 48, 48)
    x, y = ones(4, 8), AT
    with pytest.raises(CountError, match="depends on its values"):
        count(F.nll_loss, (x.to("meta"), y.to("meta")))


N = 259
HALVES = matrix(dtype=torch.float16)
REAL, COMPLEX = ones(N), ones(N).to(torch.complex64)


# A complex number is one element.
@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda: HALVES.max(dim=1), OpTraffic("max", 36, 6, 36 * 2, 3 * 2 + 3 * 8)),
        (lambda: HALVES.float(), OpTraffic("_to_copy", 36, 36, 36 * 2, 36 * 4)),
        (lambda: F.embedding(AT, HALVES), OpTraffic("embedding", 52, 48, 4 * 8 + 48 * 2, 48 * 2)),
        (lambda: kernels.twice(HALVES), OpTraffic("_twice_kernel", 72, 36, 72 * 2, 36 * 2)),
        (lambda: torch.polar(REAL, REAL), OpTraffic("polar", 2 * N, N, 2 * N * 4, N * 8)),
        (lambda: torch.complex(REAL, REAL), OpTraffic("complex", 2 * N, N, 2 * N * 4, N * 8)),
        (lambda: COMPLEX * REAL, OpTraffic("mul", 2 * N, N, N * 8 + N * 4, N * 8)),
        (lambda: COMPLEX.abs(), OpTraffic("abs", N, N, N * 8, N * 4)),
        (lambda: COMPLEX.real + 1, OpTraffic("add", N, N, N * 4, N * 4)),
    ],
)
def test_count_bytes_of_dtypes(fn, expected):
    assert count(fn, ()).ops == [expected]


def rare(of):
    return lambda x: kernels._rare_kernel[(1,)](x.int(), of)


LACKING = "^_rare_kernel cannot be interpreted: .*"
UNKNOWN = {
    "fft": (lambda x: torch.fft.fft(x), "_fft"),
    "data-dependent": (lambda x: x.nonzero(), "nonzero"),
    "sparse": (lambda x: x.to_sparse().sum(), "traffic is known"),
    "function": (lambda x: lambda: x.exp(), "of type function, before"),
    "thread": (lambda x: threading.Thread(target=x.exp).start(), "starts a thread"),
    "count": (lambda x: count(torch.exp, x), "cannot count"),
    "numpy": (lambda x: to_numpy(x), r"<lambda> makes.*NumPy.*use PyTorch"),
    "ufunc": (lambda x: np.exp(x.cpu()), "a NumPy array"),
    "dlpack": (lambda x: np.from_dlpack(x.cpu()), "a NumPy array"),
    "meta": (lambda x: kernels.masked(x.to("meta")), "_masked_kernel is a Triton kernel"),
    "read-outside": (
        kernels.dropped_mask,
        r"^_unmasked_kernel reads 4 elements outside x_ptr, of shape \(3, 12\): program \(2, 0",
    ),
    "unknown-memory": (
        lambda x: kernels._backwards_kernel[(1,)](x, Elsewhere(x), BLOCK=4),
        "an argument is a Elsewhere",
    ),
    "configurations-that-differ": (
        kernels.differing,
        "_masked_kernel: its 2 autotuning .* STORED=2 it reads",
    ),
    "assembly": (rare("assembly"), f"{LACKING}inline_asm"),
    "library": (rare("function"), f"{LACKING}__nv_mul24"),
    "mapping": (rare("mapping"), f"{LACKING}no attribute"),
}


@cases(("fn", "message"), UNKNOWN)
def test_count_refuses_what_it_does_not_know(fn, message):
    with pytest.raises(CountError, match=message):
        count(fn, matrix())
    assert to_numpy(torch.ones(1)) == [2] and moved(torch.exp, matrix()) == (36, 36)


def to_numpy(x):
    return x.cpu().numpy() + 1


class Elsewhere(kernels.Reversed):
    def data_ptr(self):
        return 16


def test_count_takes_a_module_and_a_class_for_results():
    layer = torch.nn.ReLU()
    for result in (layer, dict, (layer, layer)):
        assert moved(lambda x, result=result: (x.exp(), result)[1], matrix()) == (36, 36)


HIDDEN = {
    "compiled": lambda: torch.compile(torch.exp, backend="eager"),
    "compiled-inside": lambda: lambda x: torch.compile(torch.exp, backend="eager")(x),
    "scripted": lambda: torch.jit.script(double),
    "traced": lambda: torch.jit.trace(double, matrix()),
    "scripted-module-inside": lambda: torch.nn.Sequential(torch.jit.script(torch.nn.Softmax(1))),
}


@pytest.mark.parametrize("make", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_count_refuses_functions_that_hide_their_kernels(make):
    fn = make()
    with pytest.raises(CountError, match="hides its kernels"):
        count(fn, matrix())
    fn(matrix())


def double(x):
    return 2 * x


# ---- other threads


def started(x):
    thread = threading.Thread(target=kernels.masked, args=(x,))
    thread.start()
    thread.join(60)
    return kernels.masked(x)


BESIDE = {  # what works on a CPU, and is refused or seen where it is counted
    "operations": lambda x: x.exp().sum(),
    "kernel": kernels.masked,
    "functions-of-a-kernel-by-turns": lambda x: memtraffic.softmax(x.repeat(1, 4096)),
    "list": lambda x: torch.tensor(x.tolist()),
    "array": lambda x: torch.from_numpy(x.numpy() + 1),
    "thread": started,
    "compiled": lambda x: torch.compile(double, backend="eager", dynamic=False)(x),
    "traced": lambda x: torch.jit.trace(double, x)(x),
    "backward": lambda x: torch.func.grad(lambda x: x.exp().sum())(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(device.HAS_GPU, reason="there is no array of what a GPU holds")
@pytest.mark.parametrize("watch", [count, capture_launches])
@cases("work", BESIDE)
def test_count_leaves_other_threads_alone(work, watch):
    """What they do is done as it is elsewhere, and not counted."""
    x, y, results = matrix(5, 7) % 3, matrix(2, 9), []
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(work, x).result()

        def waits_for_the_other(y):
            kernels.masked(y)
            results.append(pool.submit(work, x).result(60))
            return kernels.masked(y)

        found = watch(waits_for_the_other, y)
    assert len(found) == 2 if watch is capture_launches else totals(found) == (36, 36)
    assert torch.equal(*results, expected)


def test_counts_of_several_threads():
    """Each counts its own, and leaves Triton and PyTorch as they were."""
    sizes = range(3, 9)
    before = torch.Tensor.tolist, threading.Thread.start, kernels._masked_kernel.run.__func__
    with ThreadPoolExecutor(len(sizes)) as pool:
        every = pool.map(lambda n: moved(kernels.masked, matrix(n, n)), sizes)
        plain = pool.map(lambda n: kernels.masked(matrix(n, n)), sizes)
    assert [*every] == [(n * n, n * n) for n in sizes]
    assert all(torch.equal(y, matrix(n, n)) for n, y in zip(sizes, plain, strict=True))
    after = torch.Tensor.tolist, threading.Thread.start, kernels._masked_kernel.run.__func__
    assert after == before


def test_count_of_a_thread_in_a_copy_of_the_context():
    """Its kernels belong to the function."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def elsewhere(x):
            return pool.submit(copy_context().run, kernels.masked, x).result(60)

        assert moved(elsewhere, matrix()) == (36, 36)


# ---- Triton kernels


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("shape", [(5, 12), (1, 4)])
@pytest.mark.parametrize("name", kernels.KNOWN)
def test_count_known_kernels(name, shape):
    fn, expected = kernels.KNOWN[name]
    assert moved(fn, matrix(*shape)) == expected(*shape)


def test_count_gathers():
    """An element that several lanes load counts once for each of them, in the trace too."""
    x, index = matrix(1, 8), torch.tensor([3, 3, 0, 7], device=device.default())
    traffic = count(kernels.gathered, (x, index), trace=True)
    assert traffic.ops == [OpTraffic("_gather_kernel", 4 + 4, 4, 4 * 8 + 4 * 4, 4 * 4)]
    assert [(access.argument, access.offsets) for access in traffic.accesses] == [
        ("index_ptr", (0, 1, 2, 3)),
        ("x_ptr", (3, 3, 0, 7)),
        ("y_ptr", (0, 1, 2, 3)),
    ]


def test_count_trace_of_a_view():
    """Offsets start at the first element of the view."""
    accesses = count(kernels.masked, matrix(4, 3)[2:], trace=True).accesses
    assert accesses == [
        Access((row, 0, 0), kind, f"{name}_ptr", (3 * row, 3 * row + 1, 3 * row + 2))
        for row in range(2)
        for kind, name in (("read", "x"), ("written", "y"))
    ]
    assert {type(offset) for access in accesses for offset in access.offsets} == {int}


def test_count_trace_around_an_autotuned_kernel():
    """Of its configurations one is kept, between what came before and what comes after."""

    def around(x):
        return kernels.masked(kernels.tuned(kernels.masked(x)))

    traffic = count(around, matrix(1, 3), trace=True)
    assert [op.name for op in traffic.ops] == ["_masked_kernel", "_twice_kernel", "_masked_kernel"]
    kinds = "".join(access.kind[0] for access in traffic.accesses)
    assert kinds == "rw" + "rrw" + "rw"
    assert {access.offsets for access in traffic.accesses} == {(0, 1, 2)}


def test_count_of_one_configuration(monkeypatch):
    """In each pass. Where a kernel has no other, it is that."""

    class Differing(kernels.Copy):
        backward = staticmethod(lambda ctx, dy: kernels.differing(dy))

    def written(config):
        return count(Differing.apply, matrix(), backward=True, config=config).backward

    assert [written(config).written_elements for config in (0, 1)] == [3, 6]
    for config in (2, -1):
        with pytest.raises(CountError, match=f"has 2 .*, 0 to 1: config={config} is none"):
            written(config)
    monkeypatch.setattr(kernels._differing_kernel, "configs", kernels._differing_kernel.configs[:1])
    assert written(2).written_elements == 3


def test_count_of_a_custom_operation():
    """It is what its function does, below autograd."""
    traffic = count(lambda x: kernels.doubled(x).sum(), matrix())
    each = [(op.name, *totals(op)) for op in traffic.ops]
    assert each == [("_masked_kernel", 36, 36), ("mul", 36, 36), ("sum", 36, 1)]
    assert str(traffic) == "reads 108 elements, writes 73 elements, in 3 operations"
    assert traffic.accesses == []
    with pytest.raises(RuntimeError, match="no autograd formula"):
        count(kernels.doubled, matrix(), backward=True)


def test_count_of_a_custom_operation_with_a_function_for_its_device():
    """It is what that function does, not what the general one does."""

    @torch.library.custom_op("memtraffic_tests::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    halved.register_kernel(device.default().type)(lambda x: (x + x) / 4)
    assert [op.name for op in count(halved, matrix()).ops] == ["add", "div"]


def test_count_of_a_step_of_an_optimizer():
    """PyTorch's profiler is told of each, which moves nothing."""
    weight = matrix()
    weight.grad = matrix()
    assert moved(torch.optim.SGD([weight], lr=0.1, foreach=False).step) == (72, 36)


def test_count_refuses_an_operation_of_a_library():
    """Its function cannot be found: only the dispatcher knows it."""
    library = torch.library.Library("memtraffic_tests", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CompositeExplicitAutograd")
    with pytest.raises(CountError, match=r"opaque\.default is not an operation"):
        count(torch.ops.memtraffic_tests.opaque, matrix())


@pytest.mark.skipif(device.HAS_GPU, reason="there is a GPU")
def test_count_says_that_nothing_ran():
    text = str(count(torch.t, "M,N", (2, 3)))
    assert "no operation of PyTorch ran" in text
    assert "within `stand_in()`" in text
    assert "within `stand_in()`" in formula(torch.t).evidence


FAILING = {
    "static-assertion": (
        lambda x: kernels.never_compiles(x),
        AssertionError,
        r"^_never_compiles_kernel: a block is never negative, at kernels\.py:\d+: tl\.static",
    ),
    "assertion-without-a-reason-in-a-function-that-it-calls": (
        lambda x: kernels._seed_kernel[(1,)](x),
        AssertionError,
        r"^_seed_kernel: tl\.static_assert\(seed.* fails, at kernels\.py:\d+: tl\.rand4x",
    ),
    "number-for-a-tensor": (
        lambda x: kernels._masked_kernel[(1,)](x, 16, 4, BLOCK=4, STORED=4),
        ValueError,
        r"^_masked_kernel: Unsupported ptr type.*'16,' are 16 elements.*kernels\.py:\d+: x =",
    ),
    "argument-left-out": (
        lambda x: kernels._masked_kernel[(1,)](x, x, 4, STORED=4),
        LaunchError,
        "^_masked_kernel is launched without BLOCK.*set TRITON_INTERPRET=0",
    ),
    "grid-left-out": (
        lambda x: kernels._masked_kernel(x, x, 4, BLOCK=4, STORED=4),
        LaunchError,
        r"^_masked_kernel is called without a grid: .* as _masked_kernel\[grid\]",
    ),
}


@cases(("launch", "error", "message"), FAILING)
def test_count_names_the_kernel_and_the_line_that_fail(launch, error, message):
    with pytest.raises(error, match=message):
        count(launch, matrix())


def test_count_warns_of_the_language_once():
    """Not in each program of each launch, nor at each shape of a formula."""

    def launch(x):
        kernels._rare_kernel[(5,)](x, "view")

    with pytest.warns(UserWarning, match="view is deprecated") as caught:
        count(launch, matrix())
        count(launch, matrix())
    assert len(caught) == 1


@triton.jit
def _row_kernel(y_ptr, x_ptr, row):
    x = tl.make_tensor_descriptor(x_ptr, [row + 1, 4], [4, 1], [1, 4])
    y = tl.make_tensor_descriptor(y_ptr, [1, 4], [4, 1], [1, 4])
    y.store([0, 0], x.load([row, 0]))


def test_count_refuses_a_read_of_one_argument_that_lands_in_another():
    x, y = sorted((torch.zeros(4), torch.zeros(4)), key=torch.Tensor.data_ptr)
    assert moved(lambda row: _row_kernel[(1,)](y, x, row), 0) == (4, 4)
    with pytest.raises(CountError, match=r"outside x_ptr, .*, which is element 0 of y_ptr"):
        count(lambda row: _row_kernel[(1,)](y, x, row), ((y.data_ptr() - x.data_ptr()) // 16,))

    def copy(shift):
        kernels._shifted_copy_kernel[(1,)](y, x, shift, BLOCK=4)

    assert moved(copy, 0) == (4, 4)
    with pytest.raises(CountError, match=r"outside x_ptr, .*, which is element 0 of y_ptr"):
        count(copy, ((y.data_ptr() - x.data_ptr()) // 4,))
    x, y = torch.zeros(2, 4)  # of one storage
    assert moved(copy, 4) == (4, 4)
    x, y = torch.zeros(8).as_strided((4,), (0,)), torch.zeros(4)  # a kernel may step as it likes
    assert moved(copy, 4) == (4, 4)
    with pytest.raises(CountError, match=r"outside x_ptr, .*: .* element 8 of 1"):
        count(copy, (5,))


@triton.jit
def _moved_kernel(y_ptr, x_ptr, kept_ptr, MOVE: tl.constexpr, SHIFT: tl.constexpr):
    """Reads and writes 2 elements of x and 2 of y by pointers that were moved about."""
    i, kept = tl.arange(0, 4), tl.load(kept_ptr + 3).to(tl.pointer_type(tl.float32))
    at_x, at_y = x_ptr + i % 2 + SHIFT, tl.where(i > 2, y_ptr + 1, kept)
    at = tl.where(i < 2, at_x, at_y)
    if MOVE == "join":
        at = tl.join(at, at).permute(1, 0).reshape(2, 2, 2)
    elif MOVE == "split":
        at = tl.split(tl.join(at_y, at))[1]
    elif MOVE == "gather":
        at = at.gather((i + 2) % 4, 0)
    tl.store(at, tl.load(at))


@pytest.mark.skipif(device.HAS_GPU, reason="the interpreter works on copies")
@pytest.mark.parametrize("move", ["where", "join", "split", "gather"])
def test_count_knows_of_which_argument_a_pointer_is(move):
    """Where one of them went through memory, too."""
    x, y = torch.zeros(2), torch.ones(2)
    kept = torch.tensor([0, 0, 0, y.data_ptr()])

    def launch(shift):
        _moved_kernel[(1,)](y, x, kept, move, shift)

    accesses = count(launch, (0,), trace=True).accesses
    found = {(it.argument, offset) for it in accesses for offset in it.offsets}
    assert found == {("kept_ptr", 3), *product(("x_ptr", "y_ptr"), (0, 1))}
    with pytest.raises(CountError, match=r"outside x_ptr, .* is element 0 of y_ptr"):
        count(launch, ((y.data_ptr() - x.data_ptr()) // 4,))


@triton.jit
def _addresses_kernel(kept_ptr, y_ptr, x_ptr):
    kept = tl.where(x_ptr.to(tl.int64) < 2**47, x_ptr.to(tl.int64), 0)
    tl.store(kept_ptr, kept)
    tl.store(kept_ptr + 1, (x_ptr + 3).to(tl.int64) - y_ptr.to(tl.int64))
    tl.store(kept_ptr + 2, x_ptr.to(tl.int64) % 4096)
    tl.store(kept_ptr + 3, (y_ptr + 1).to(tl.int64, bitcast=True))


@triton.jit
def _kept_addresses_kernel(y_ptr, kept_ptr, N: tl.constexpr):
    x_ptr = tl.load(kept_ptr).to(tl.pointer_type(tl.float32))
    at_y = tl.load(kept_ptr + 3).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(at_y + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N)))


@pytest.mark.skipif(device.HAS_GPU, reason="the interpreter works on copies")
def test_count_of_pointers_that_go_through_memory():
    """A pointer is its tensor's address while it is counted, too.

    So a kernel may reach tensors that it was not given.
    """
    x, y, kept = torch.arange(4.0), torch.zeros(8), torch.zeros(4, dtype=torch.int64)

    def passed(n):
        _addresses_kernel[(1,)](kept, y, x)
        _kept_addresses_kernel[(1,)](y, kept, N=n)

    traffic, at = count(passed, (4,), trace=True), (x.data_ptr(), y.data_ptr())
    assert kept.tolist() == [at[0], at[0] + 12 - at[1], at[0] % 4096, at[1] + 4]
    assert y.tolist() == [0, 0, 1, 2, 3, 0, 0, 0] and totals(traffic) == (2 + 4, 4 + 4)
    assert traffic.accesses[-1] == Access((0, 0, 0), "written", "y_ptr", (1, 2, 3, 4))
    assert "x_ptr" not in {access.argument for access in traffic.accesses}


@pytest.mark.parametrize("copied", [False, True])
def test_count_of_an_argument_with_an_address(copied, monkeypatch):
    """What is no tensor but has an address is read where it lies."""
    x, results = matrix(2, 4), []
    if copied:  # to the CPU, as what lies on a GPU
        cpu = torch.UntypedStorage.cpu
        monkeypatch.setattr(torch.UntypedStorage, "cpu", lambda storage: cpu(storage).clone())
    traffic = count(lambda x: results.append(kernels.backwards(x)), x, trace=True)
    assert torch.equal(results[0], x.flip(0, 1))
    assert traffic.accesses[0].offsets == (0, -1, -2, -3)


def test_count_keeps_what_the_first_configuration_wrote():
    results = []
    count(lambda x: results.append(kernels.tuned_in_place(x)), matrix())
    assert torch.equal(results[0], torch.full((3, 12), -2.0, device=device.default()))


def test_count_shows_its_progress(monkeypatch):
    steps = []

    @contextmanager
    def progress_bar(label):
        assert label == "_unmasked_kernel, program"
        yield lambda done, total: steps.append((done, total))

    monkeypatch.setattr(module, "progress_bar", progress_bar)
    count(lambda x: kernels._unmasked_kernel[2, 3, 4](x, x, 48, BLOCK=4), matrix(2, 48))
    assert sorted(set(steps)) == [(i, 24) for i in range(24)]


# ---- in a process that compiles its kernels

COMPILING = """
import json, sys, warnings
from importlib.util import module_from_spec, spec_from_file_location
import torch
from memtraffic import device, sectors
import triton.language as tl
import triton.runtime.interpreter
from memtraffic.compile import resources
from memtraffic.errors import AccessError
from memtraffic.meters.count import count

spec = spec_from_file_location("found_by_no_import", sys.argv[1])
spec.loader.exec_module(kernels := module_from_spec(spec))
assert not device.INTERPRETED
warnings.filterwarnings("ignore", "tl.make_block_ptr is deprecated")
x = torch.arange(60, dtype=torch.float32).reshape(5, 12).to(device.default())
language = [tl, tl.core, tl.math, tl.tensor, tl.dtype]
before = [dict(vars(part)) for part in language]
counts = {name: count(fn, x) for name, (fn, _) in kernels.KNOWN.items()}
assert [op.name for op in count(kernels.doubled, x).ops] == ["_masked_kernel", "mul"]
try:
    raise SystemExit(count(kernels.dropped_mask, x))
except AccessError:
    assert [dict(vars(part)) for part in language] == before
[kernel] = resources(kernels.strided, "1,4096", target="sm_90")
assert [*kernel.load_bits] == [128]
assert sectors(kernels.strided, "1,4096").load_sectors == 4096 * 4 // 32
print(json.dumps({k: [it.read_elements, it.written_elements] for k, it in counts.items()}))
"""


@pytest.mark.slow
def test_count_in_a_process_that_compiles():
    """It counts the same there, and afterwards the process can still compile.

    Also what a package wrote and loaded, as here a module that cannot be imported.
    """
    done = run_python("-c", COMPILING, kernels.__file__, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    known = {name: [*expected(5, 12)] for name, (_, expected) in kernels.KNOWN.items()}
    assert json.loads(done.stdout) == known


# ---- where autograd does not take operations apart first

COPIES = {  # of a matrix of 3 x 12 numbers of float32: what is read, and what is written
    "contiguous": (lambda x: x.t().contiguous(), 36, 36),
    "contiguous, packed": (lambda x: x.contiguous(), 0, 0),
    "contiguous, expanded": (lambda x: x.expand(2, 3, 12).contiguous(), 36, 72),
    "contiguous, of a format": (
        lambda x: x.view(1, 3, 3, 4).contiguous(memory_format=torch.channels_last), 36, 36
    ),
    "clone": (lambda x: x.clone(), 36, 36),
    "to": (lambda x: x.to(torch.float16), 36, 36),
    "to, the same": (lambda x: x.to(torch.float32), 0, 0),
    "type_as": (lambda x: x.type_as(torch.ones((), dtype=torch.int32)), 36, 37),
    "reshape": (lambda x: x.t().reshape(36), 36, 36),
    "reshape, a view": (lambda x: x.reshape(36), 0, 0),
    "tile": (lambda x: x.tile(2, 1), 36, 72),
    "matmul": (lambda x: x @ x.t(), 72, 9),
    "softmax": (lambda x: torch.softmax(x, -1), 36, 36),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), 0, 0),
}  # fmt: skip


class Wrapper(torch.Tensor):
    """A tensor that holds another one, and computes with that."""

    @staticmethod
    def __new__(cls, x):
        like = {"strides": x.stride(), "dtype": x.dtype, "device": x.device}
        wrapper = torch.Tensor._make_wrapper_subclass(cls, x.shape, **like)
        wrapper.held = x
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapper, lambda x: x.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, func(*args, **kwargs))


def as_operation(define, fn):
    def operation(x: torch.Tensor) -> torch.Tensor:
        fn(x)
        return torch.empty_like(x)  # which may not be a view

    return define(f"memtraffic_tests::{define.__name__}_{id(fn)}", operation, mutates_args=())


CONTEXTS = {
    "plain": lambda fn: fn,
    "inference": lambda fn: torch.inference_mode()(fn),
    "custom-op": lambda fn: as_operation(torch.library.custom_op, fn),
    "triton-op": lambda fn: as_operation(torch.library.triton_op, fn),
    "subclass": lambda fn: lambda x: fn(Wrapper(x)),
    "vmap": lambda fn: lambda x: torch.vmap(fn)(x[None]),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("caller", [nullcontext, torch.inference_mode])
def test_copies_are_counted_wherever_they_are_made(context, caller):
    without = {"contiguous, of a format"} if context == "vmap" else set()
    cases = {name: it for name, it in COPIES.items() if name not in without}  # as PyTorch is
    with caller():
        x = matrix()
        found = {name: moved(CONTEXTS[context](fn), x) for name, (fn, *_) in cases.items()}
    assert found == {name: tuple(expected) for name, (_, *expected) in cases.items()}


# ---- what a function may be, and its backward pass


def test_count_of_a_function_that_runs_its_own_backward_pass():
    def step(x):
        y = kernels.Copy.apply(x.requires_grad_())
        torch.autograd.grad(y, x, torch.ones_like(y))

    traffic = count(step, ones(3, 8))
    assert [op.name for op in traffic.ops] == ["_masked_kernel", "ones_like", "_twice_kernel"]


def test_count_backward():
    """By hand: dx = dy * w, dw = sum(dy * x), and the sum of both results' gradients."""
    x, w = ones(3, 8), ones(8)
    traffic = count(lambda x, w: x * w, (x, w), backward=True)
    assert totals(traffic) == (24 + 8, 24)
    each = [(op.name, *totals(op)) for op in traffic.backward.ops]
    assert each == [("mul", 48, 24), ("mul", 32, 24), ("sum", 24, 8)]
    assert not x.requires_grad and x.grad is None


def test_count_of_a_module_counts_its_parameters_and_makes_their_gradients():
    layer = torch.nn.Linear(8, 4, bias=False, device=device.default())
    traffic = count(layer, ones(3, 8), backward=True)
    assert totals(traffic) == (24 + 32, 12)
    # dW = dy^T x, dx = dy W
    assert sorted(map(totals, traffic.backward.ops)) == [(12 + 24, 32), (12 + 32, 24)]
    assert layer.weight.grad is None


@pytest.mark.parametrize(
    ("fn", "inputs", "expected"),
    [
        (torch.neg, (torch.complex(ones(3, 8), ones(3, 8)),), (24, 24)),
        (F.logsigmoid, (ones(3, 8),), (48, 24)),
        (torch.mul, (AT, ones(4)), (8, 4)),  # whole numbers have no gradient
        (lambda xs: xs[0] * xs[1]["w"], ([ones(3, 8), {"w": ones(3, 8)}],), (4 * 24, 2 * 24)),
    ],
)
def test_count_backward_of_inputs_of_each_kind(fn, inputs, expected):
    """In lists, the same as of the tensors alone: dx = dy * w, dw = dy * x."""
    assert totals(count(fn, inputs, backward=True).backward) == expected


@pytest.mark.parametrize("fn", [lambda x: x.argmax(), lambda x: None, lambda x: x.detach()])
def test_count_backward_that_does_not_exist(fn):
    with pytest.raises(CountError, match="no backward pass"):
        count(fn, ones(3, 8), backward=True)


def test_count_beside_a_table(monkeypatch):
    """As in a notebook: a name of the kernel's module compares with others element by element."""
    monkeypatch.setattr(kernels, "TABLE", pd.DataFrame({"n": [1, 2]}), raising=False)
    assert moved(kernels.masked, matrix(3, 5)) == (15, 15)
