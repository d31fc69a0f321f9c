import subprocess
import sys
import textwrap
import timeit
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from another_process import run_python
from cases import DEVICE, H200, INF, NAN, assert_softmax, assert_touches_once, cases, far, laid_out
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import device
from memtraffic.compile import resources
from memtraffic.gpus import DEFAULT_GPU, find_gpu
from memtraffic.kernels.softmax import op, rule, split
from memtraffic.kernels.softmax.definitions import SOFTMAX, SOFTMAX_BACKWARD
from memtraffic.kernels.softmax.op import backward, softmax
from memtraffic.kernels.softmax.rule import MAX_ROW, Tile, tuned
from memtraffic.kernels.softmax.split import split_row
from memtraffic.meters.count import count
from memtraffic.op import Op
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct

FLOATS = {str(it).removeprefix("torch."): it for it in op.FLOATS}
pytestmark = pytest.mark.usefixtures("no_plans")


@pytest.fixture
def small(monkeypatch):
    """A GPU so small that a matrix of a few columns takes the kernels of the widest ones.

    Rows of more than 8 columns are in chunks of 4. Rows of more than 16 are split into parts of 16,
    in chunks of 8, over 2 SMs, so rows of more than 128 columns, and those of float64, are read
    twice. In other memory orders 16 columns fit as well.
    """
    gpu = replace(DEFAULT_GPU, num_sms=2)
    by_rule = rule.op_tile
    for module in (op, split):
        monkeypatch.setattr(module, "planning_gpu", lambda x: gpu)

    def tile(m, n, itemsize, inputs, gpu, vector):
        if n <= 8:
            return by_rule(m, n, itemsize, inputs, gpu, vector)
        return Tile(1, 4, 1, -(-n // 4), vector) if n <= 16 else None

    monkeypatch.setattr(rule, "op_tile", tile)
    monkeypatch.setattr(rule, "column_tile", lambda n, m: Tile(2, 16, 1) if n <= 16 else None)
    monkeypatch.setattr(split, "best_split", lambda n, *args: split_row(n, 8, 2, 1))
    monkeypatch.setattr(rule, "pass_tile", lambda *args: Tile(1, 16, 1))


@pytest.fixture(params=["as-planned", "small"])
def either(request):
    """The kernels that matrices of a few columns take, and those that the widest take."""
    if request.param == "small":
        request.getfixturevalue("small")


def assert_softmax_along(dim, x, dtype=None):
    """The judge looks for rows along the last dimension, so they are moved there.

    dtype: that `x` is converted to where it is computed, which is what is judged.
    """
    given, x = x, x.to(dtype or x.dtype)

    def reference(x):
        return torch.softmax(x, dim).movedim(dim, -1)

    def rows_of_softmax(x):
        y = softmax(given, dim, dtype=dtype)
        assert y.is_contiguous()
        return y.movedim(dim, -1)

    # The reference to a result in float64 is itself rounded to float64.
    roundings = 16 if x.dtype == torch.float64 else SOFTMAX.roundings
    judged = Op("softmax", "M,N", reference, roundings, checks_row_sums=True)
    assert_correct(judged, rows_of_softmax, x)


# ---- any shape, dimension, strides, dtype


def draw_tensor(data, sizes, dtype):
    """One whose dimensions lie in memory in any order, with gaps between its elements."""
    rank = len(sizes)
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=rank, max_size=rank))
    repeats = data.draw(st.integers(0, 2 * rank))  # the dimension that repeats its elements
    offset = data.draw(st.integers(0, 3))
    strides, step = [0] * rank, 1
    for at, gap in zip(data.draw(st.permutations(range(rank))), gaps, strict=True):
        strides[at] = 0 if at == repeats else step + gap
        step = max(step, strides[at] * max(1, sizes[at]))
    return matrix(1, offset + step + 1, dtype).view(-1).as_strided(sizes, strides, offset)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    "examples", [20, pytest.param(50, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_softmax_and_backward_of_any_tensors(either, examples):
    @settings(max_examples=examples, deadline=None)
    @given(data=st.data())
    def check(data):
        sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        dim = data.draw(st.integers(-len(sizes), len(sizes) - 1), "dim")
        sizes[dim] = data.draw(st.integers(0, 40), "columns")
        dtype, other = (data.draw(st.sampled_from(op.FLOATS), "dtype") for _ in range(2))
        x, y, dy = (draw_tensor(data, sizes, dtype) for _ in range(3))
        special = data.draw(st.sampled_from([0.0, 0.0, NAN, INF, -INF]), "one element")
        if x.numel() and special:
            x[tuple(data.draw(st.integers(0, n - 1)) for n in sizes)] = special
        assert_softmax_along(dim, x, data.draw(st.sampled_from([None, other])))
        assert_backward_along(dim, dy, y.sigmoid() if data.draw(st.booleans()) else y, other)

    check()


def assert_backward_along(dim, dy, y, dtype):
    """Of an x of `dtype`: it is rounded to the dtype of `y` before, as PyTorch does."""
    found = backward(dy, y, dim, dtype)
    assert found.is_contiguous() and found.dtype == dtype
    assert torch.equal(found.nan_to_num(), found.to(y.dtype).to(dtype).nan_to_num())
    eps = torch.finfo(y.dtype).eps + torch.finfo(dtype).eps
    smallest = torch.finfo(y.dtype).smallest_normal + torch.finfo(dtype).smallest_normal
    y, dy = y.double(), dy.double()
    size = (y * dy).abs().sum(dim, keepdim=True).amax() if y.numel() else 0
    expected = y * (dy - (y * dy).sum(dim, keepdim=True))
    room = eps * (8 * y.abs() * (dy.abs() + size) + smallest)
    assert found.shape == expected.shape
    assert ((found - expected).abs() <= room).all()


@pytest.mark.parametrize("n", [13, 2176, 9217], ids=["rows", "chunks", "split"])
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
    for dtype, dim in product(op.FLOATS, (-1, 0)):
        y = softmax(torch.tensor(3.0, dtype=dtype, device=DEVICE), dim)
        assert (y.item(), y.shape, y.dtype) == (1.0, (), dtype)


@pytest.mark.parametrize(
    "strides", [(2**30, 40, 1), (3, 1, 2**30), (1, 2**30, 3)], ids=["matrices", "columns", "rows"]
)
def test_offsets_of_a_batch_outgrow_int32(strides):
    """Each dimension that is far apart is once the batch, the rows, and the columns."""
    x, dy = (matrix(9, 3, "float16", seed=seed).view(3, 3, 3) for seed in (0, 1))
    for dim in range(3):
        assert_softmax_along(dim, far(x, strides))
    y = softmax(x)
    expected = backward(dy, y, -1, y.dtype)
    for tensors in ((far(dy, strides), y), (dy, far(y, strides))):
        found = backward(*tensors, -1, y.dtype)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_softmax_of_more_batches_than_a_grid_has(small, monkeypatch, dim):
    monkeypatch.setattr(op, "MAX_BATCHES", 3)
    x = matrix(8, 24)[:, :20].view(4, 2, 20)
    for view in (x, x[:, :, ::3]):
        assert_softmax_along(dim, view)
        traffic = count(lambda x: softmax(x, dim), view, trace=True)
        assert all(it.program[1] < 3 for it in traffic.accesses)


# ---- dtype


def test_softmax_converts_what_does_not_fit(either):
    x = torch.tensor([[1e5, 1.0, -1e5], [6e4, 1.0, -1e5]], device=DEVICE)
    y = softmax(x, dtype=torch.float16)
    assert y[0].isnan().all()
    assert torch.equal(y[1], torch.softmax(x[1], 0, dtype=torch.float16))


@pytest.mark.parametrize("name", ["int64", "bool", "float8_e5m2"])
def test_softmax_of_another_dtype_needs_one(name):
    x = torch.tensor([[1, 2, 0], [5, 0, 0]], device=DEVICE).to(getattr(torch, name))
    assert_softmax(lambda _: softmax(x, dtype=torch.float32), x.float())
    with pytest.raises(NotImplementedError, match=f"^softmax: torch.{name}"):
        softmax(x)


# ---- errors


ERRORS = {
    "dim-too-large": ((2, 0), {"dim": 2}, IndexError, r"dim 2 .* 2 .*\(2, 0\)"),
    "dim-too-small": ((2, 3), {"dim": -3}, IndexError, r"dim -3 .*\(2, 3\)"),
    "dim-of-a-scalar": ((), {"dim": 1}, IndexError, r"dim 1 .* 0 dimensions \(\)"),
    "to-integers": ((2, 3), {"dim": 1, "dtype": torch.int64}, NotImplementedError, "torch.int64"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, at an import
@cases(("shape", "options", "error", "message"), ERRORS)
def test_softmax_refuses(shape, options, error, message):
    """As PyTorch does; meta tensors, too."""
    for place in (DEVICE, DEVICE, "meta"):  # nothing wrong is remembered
        with pytest.raises(error, match=f"^softmax: .*{message}"):
            softmax(torch.zeros((), device=place).expand(shape), **options)
    with pytest.raises(error):
        torch.softmax(torch.zeros(shape), **options)


def test_softmax_refuses_what_is_no_dim_and_no_dtype():
    x = matrix(2, 3)
    softmax(x, 1)
    for dim in (1.0, "1", None):  # also where 1 is planned, which equals 1.0
        for fn in (softmax, torch.vmap(softmax, in_dims=(0, None))):
            with pytest.raises(TypeError):
                fn(x, dim)
    with pytest.raises(TypeError):
        softmax(x, dtype=0)
    assert torch.equal(softmax(x, torch.tensor(1)), softmax(x, 1))  # as torch.softmax


def test_softmax_refuses_a_tensor_whose_memory_was_freed():
    x, freed, of = matrix(3, 4), matrix(3, 4), (1, torch.float32)
    freed.untyped_storage().resize_(0)
    for call in (softmax, lambda it: backward(it, x, *of), lambda it: backward(x, it, *of)):
        call(x)  # planned
        with pytest.raises(RuntimeError, match=r"^softmax: the memory of a tensor was freed"):
            call(freed)


# ---- what the judge sees


@pytest.mark.parametrize("value", [0, NAN])
def test_the_judge_sees_rows_that_a_launch_leaves_out(monkeypatch, value):
    def plan(tensors, dim):
        run = every_row([it[:-1] for it in tensors], dim)
        return lambda *tensors: run(*(it[:-1] for it in tensors))

    every_row, told = op._plan, "never written" if value else "8 of 24 elements are NaN.*"
    monkeypatch.setattr(op, "_plan", plan)
    x = matrix(3, 8)
    x[2] = value
    y_first = ("softmax_backward", lambda y, dy: backward(dy, y, 1, y.dtype), x, x)
    for case in (("softmax", softmax, x), y_first):
        with pytest.raises(AssertionError, match=rf"{told}, the first at \(2, 0\)"):
            assert_correct(*case)


# ---- what it moves


BATCHES = {  # whose dimensions, all but one, are joined to two at most; and the dimension
    "in-the-middle": (lambda x: x[:, :3, 0], 1),
    "rows-that-start-anywhere": (lambda x: x[:, :3, 0], 2),  # y starts as far from 16 bytes
    "first-dimension": (lambda x: x, 0),
    "padded-matrices": (lambda x: x[:, :2], 3),
}


@cases(("view", "dim"), BATCHES)
def test_softmax_touches_each_element_of_a_batch_once(view, dim):
    x, written = view(matrix(14, 82).view(2, 7, 2, 41)), []
    traffic = count(lambda x: written.append(softmax(x, dim)), x, trace=True)
    assert [it.name for it in traffic.ops] == ["softmax_kernel"]  # nothing is copied
    assert_touches_once(traffic, "x_ptr", x)
    assert_touches_once(traffic, "y_ptr", written[0])


def test_traffic_of_softmax_and_its_gradient():
    """Another dtype is converted where it is computed, by no operation of its own."""
    x = matrix(3, 40, "float16")
    traffic = count(lambda x: softmax(x, dtype=torch.float32), x, backward=True)
    both = [(each.ops[0].name, each.read_elements) for each in (traffic, traffic.backward)]
    assert both == [("softmax_kernel", 120), ("softmax_backward_kernel", 240)]
    assert len(traffic.ops) == len(traffic.backward.ops) == 1


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


# ---- which kernel, and what is kept


def test_plan_reads_rows_twice_for_no_other_reason(monkeypatch):
    def wrong(*arguments, **options):
        raise ValueError("not the number of programs")

    monkeypatch.setattr(split, "split_launch", wrong)
    with pytest.raises(ValueError, match="not the number"):
        softmax(torch.empty(2, 100000, device=DEVICE))


def test_a_plan_is_made_once_per_kind_of_call(monkeypatch, other_matrices):
    monkeypatch.setattr(op, "_plan", plan := MagicMock())
    x = matrix(3, 8)
    calls = {
        "x": lambda: softmax(x), "y-and-dy": lambda: backward(x, x, 1, x.dtype),
        "dim": lambda: softmax(x, 0), "dim-of-backward": lambda: backward(x, x, 0, x.dtype),
        "result": lambda: softmax(x, dtype=torch.float64),
        "dtype-of-dx": lambda: backward(x, x, 1, torch.float16),
    }  # fmt: skip
    for name, it in other_matrices(x).items():
        calls[f"{name}-of-x"] = lambda it=it: softmax(it)
        calls[f"{name}-of-y"] = lambda it=it: backward(x[: len(it), : it.shape[1]], it, 1, x.dtype)
        if it.shape == x.shape:  # that of y
            calls[f"{name}-of-dy"] = lambda it=it: backward(it, x, 1, x.dtype)
    for gpu in (None, H200, find_gpu("L4")):
        calls[f"captured-for-{gpu}"] = lambda gpu=gpu: captured(gpu)

    def captured(gpu):
        with device.capturing_launches(gpu):
            softmax(x)

    for name, call in calls.items():
        call()
        call()
        assert plan.call_count == 1, name
        plan.reset_mock()


@pytest.mark.parametrize(("index", "started_on"), [(1, 1), (0, 0), (-1, 0)])
def test_kernels_start_on_the_gpu_of_the_tensors(monkeypatch, index, started_on):
    """A tensor on the CPU asks for none."""
    used, planning_on = [0], []

    @contextmanager
    def device(index):
        used.append(index)
        yield
        used.pop()

    monkeypatch.setattr(op, "current_gpu", lambda: used[-1])
    monkeypatch.setattr(op, "capture", lambda: planning_on.append(used[-1]))
    monkeypatch.setattr(torch.cuda, "device", device)
    far = SimpleNamespace(get_device=lambda: index)  # all that is asked before
    for call in (lambda: op._forward(far, -1, None), lambda: backward(far, far, -1, None)):
        with pytest.raises(AttributeError, match="dtype"):
            call()
    assert planning_on == [started_on] * 2


# ---- compiled


def compiled(target, widths, name, inputs):
    """The kernels of the softmax of rows of these widths, or of its backward."""
    fn = {1: softmax, 2: lambda y: backward(y, y.clone(), 1, y.dtype)}[inputs]
    shapes = [(H200.num_sms, n) for n in widths]
    xs = tuple(torch.empty(it, dtype=FLOATS[name], device=DEVICE) for it in shapes)
    found = resources(lambda *xs: [*map(fn, xs)], xs, target=target)
    assert len(found) == len(widths)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [1, 2])  # that a program holds
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_rows_compile_without_spills_to_wide_loads(name, inputs):
    """The widest of one warp and of the most; long ones, split or read twice; and odd ones."""
    itemsize, odd = FLOATS[name].itemsize, []
    widths = [32 * warps * tuned("lane_bytes") // itemsize // inputs for warps in (1, 8)]
    if itemsize < 8:
        widths += [131072, 2**19]
        odd = [65, 321, 519, 4095]
    for n, kernel in zip(widths + odd, compiled("sm_90", widths + odd, name, inputs), strict=True):
        assert kernel.spill_bytes == 0, n
        if n in odd:  # each number is loaded once: as many bits as are stored
            assert kernel.load_bits[128] == inputs * kernel.store_bits[128] > 0, n
        else:
            words = {64} if kernel.kernel.startswith("split") else set()
            assert set(kernel.load_bits) == {128} | words and set(kernel.store_bits) == {128}, n


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_75", "gfx942", "gfx1100"])
def test_softmax_compiles_for_other_gpus(target):
    """For sm_75, NVIDIA's compiler may spill a little, so that a program more fits an SM."""
    for kernel in compiled(target, (64, 781, 131072), "float32", 1):
        assert kernel.spill_bytes <= (40 if target == "sm_75" else 0)


# ---- on a GPU


def in_another_process(source, seconds=300):
    """Runs Python source that may hang, in a process that can be ended."""
    script = "import torch, memtraffic\nfrom memtraffic import softmax\n" + textwrap.dedent(source)
    done = run_python("-c", script, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]


LONG = [((64, 2**17), torch.float32), ((300, 100000), torch.bfloat16)]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), [((512, 1000), torch.float32), *LONG], ids=str)
def test_softmax_with_its_gradient_in_a_cuda_graph(shape, dtype):
    x = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)

    def step():
        y = softmax(x)
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # planned and compiled before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(5):
        with torch.no_grad():
            x.normal_()
        dy.normal_()
        graph.replay()
        assert all(map(torch.equal, found, step()))
        assert_softmax(lambda _: found[0][:3], x.detach()[:3])


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


PRODUCTS = """
import torch
a = torch.randn(4096, 4096, device="cuda")
print("ready", flush=True)
while True:
    for _ in range(20):
        a = (a @ a).clamp(-1, 1)
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("times", [100_000, 1000], ids=["alone", "beside-another-process"])
def test_softmax_of_split_rows_does_not_hang(times):
    other = None
    if times == 1000:
        other = subprocess.Popen(
            [sys.executable, "-c", PRODUCTS], stdout=subprocess.PIPE, text=True
        )
    try:
        assert other is None or other.stdout.readline() == "ready\n"
        in_another_process(
            f"""
            shapes = (1, 70000), (3, 100000), (500, 100000)
            xs = [torch.randn(m, n, device="cuda") for m, n in shapes]
            expected = [softmax(x) for x in xs]
            ys = list(expected)
            for i in range({times}):
                j = i % 3 if {times} == 1000 or i % 100 == 0 else i % 2
                ys[j] = softmax(xs[j])
            for x, y, first in zip(xs, ys, expected):
                torch.testing.assert_close(y, torch.softmax(x, 1))
                assert torch.equal(y, first)
            """,
            seconds=540,
        )
        assert other is None or other.poll() is None, "the other process ended early"
    finally:
        if other:
            other.kill()
            other.communicate()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "n", [1, 781, 1000, 2176, 8320, 49152, 65536, 100000, 131072, 2**20, 2**20 + 1, MAX_ROW]
)
def test_softmax_and_backward_on_the_gpu(n, name):
    """Right, and equal bit for bit, wherever rows start."""
    m = max(2, 2**22 // n)
    for start in (0, 1, 4, 8, 0):
        tensors = SOFTMAX_BACKWARD.arguments((m, n), name).tensors
        y, dy = (laid_out(x, offset=start) for x in tensors)
        assert_softmax(softmax, dy)
        assert_correct("softmax_backward", lambda y, dy: backward(dy, y, 1, y.dtype), y, dy)
        found, dx = softmax(dy), backward(dy, y, 1, y.dtype)
        for _ in range(5):
            assert torch.equal(softmax(dy), found) and torch.equal(backward(dy, y, 1, y.dtype), dx)


@pytest.mark.gpu
@pytest.mark.parametrize(("requires_grad", "most"), [(False, 1.5), (True, 2.5)])
@pytest.mark.parametrize("shape", [(16, 64), (1, 70000)], ids=["rows", "split-rows"])
def test_softmax_costs_the_host_little(shape, requires_grad, most):
    """In times of torch.softmax's cost; launches are queued, so only the host counts."""
    x = torch.randn(shape, device=DEVICE, requires_grad=requires_grad)
    calls = [partial(fn, x, -1) for fn in (softmax, torch.softmax)]
    rounds = [  # in turns: another process may slow the host down for a while
        [timeit.timeit(it, torch.cuda.synchronize, number=200) for it in calls] for _ in range(40)
    ]
    ours, theirs = map(min, zip(*rounds, strict=True))
    assert ours <= most * theirs, f"{1e6 * ours / 200:.1f} µs, {ours / theirs:.2f} times PyTorch's"
