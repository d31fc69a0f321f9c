import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, H200, INF, NAN, assert_softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import device
from memtraffic.compile import assembly
from memtraffic.device import planning_gpu
from memtraffic.gpus import DEFAULT_GPU, find_gpu
from memtraffic.kernels.exchange import high_of, look, low_of, publish
from memtraffic.kernels.launch import Launch
from memtraffic.kernels.operands import shifted_vector
from memtraffic.kernels.softmax import split
from memtraffic.kernels.softmax.gradient import split_backward_kernel
from memtraffic.kernels.softmax.op import backward
from memtraffic.kernels.softmax.rule import tuned
from memtraffic.kernels.softmax.split import best_split, split_row
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.triton_adapter.turns import Turns

LOOKS = tuned("looks")
in_parts = partial(split.softmax, block=8, chunks=2)  # parts of 16 columns
pytestmark = pytest.mark.usefixtures("no_plans")
INTERPRETED_ONLY = pytest.mark.skipif(
    not device.INTERPRETED, reason="only the interpreter runs programs in an order that we choose"
)


@pytest.fixture
def few_sms(monkeypatch):
    """A GPU of 2 SMs, so at most 8 parts."""
    monkeypatch.setattr(split, "planning_gpu", lambda x: replace(DEFAULT_GPU, num_sms=2))


def one_after_the_other(monkeypatch):
    """A program of the interpreter starts when the one before has ended."""

    class Plain(Launch):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.options.pop("launch_cooperative_grid", None)

    monkeypatch.setattr(split, "Launch", Plain)


def in_any_order(monkeypatch):
    """Each time that a program of the interpreter hands over, one that is drawn goes on."""
    draw = random.Random(0)
    resume = Turns._resume

    def drawn(turns, place=0):
        resume(turns, draw.randrange(len(turns._waiting)))

    monkeypatch.setattr(Turns, "_resume", drawn)


# ---- split_row


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 2**24),
    block=st.sampled_from([1, 8, 512, 1024, 2048]),
    chunks=st.integers(1, 16),
)
def test_split_row_covers_the_row(n, block, chunks):
    found = split_row(n, block, chunks, num_warps=4)
    assert (found.block, found.num_warps) == (block, 4)
    assert 1 <= found.chunks <= chunks
    width = found.chunks * block
    assert (found.parts - 1) * width < n <= found.parts * width  # the last part is not empty
    assert found.parts == -(-n // (block * chunks))  # not more than needed
    assert found.parts * (width - block) < n  # nor more of each than needed


@pytest.mark.parametrize("gpu", [H200, find_gpu("MI300X")], ids=lambda gpu: gpu.product)
@pytest.mark.parametrize("aligned", [True, False])
def test_best_split_is_of_whole_vectors(aligned, gpu):
    lanes = 128
    for n, itemsize, inputs in product((32769, 50257, 2**20), (2, 4), (1, 2)):
        found = best_split(n, itemsize, inputs, 16 // itemsize if aligned else 1, 1, gpu)
        assert found.num_warps * gpu.warp_size == lanes
        assert found.block * itemsize == 16 * lanes  # a vector of each lane
        width = found.chunks * found.block
        assert found.parts > 1
        most = tuned("part_lane_bytes") // (1 if aligned else 2)
        assert width * itemsize * inputs <= most * lanes
        assert (found.registers is not None) is (aligned and itemsize == 2)


def test_best_split_of_fewer_rows_takes_more_programs():
    """More than so many for each SM, or the smallest ones."""
    n, enough = 2**20, tuned("parts_per_sm") * H200.num_sms
    parts = [best_split(n, 2, 1, 8, 1, H200, m).parts for m in (1, 2, 3, 5, 9, 17, 33, 100)]
    assert parts == sorted(parts, reverse=True) and parts[0] > parts[-1]
    assert parts[0] == 512 and parts[-1] == best_split(n, 2, 1, 8, 1, H200).parts
    for m, each in zip((3, 5, 9, 17, 33, 100), parts[2:], strict=True):
        assert m * each > enough


# ---- softmax


@pytest.mark.parametrize(("x_dtype", "y_dtype"), [("float32", "bfloat16"), ("bfloat16", "float16")])
def test_split_launch_of_two_dtypes(few_sms, x_dtype, y_dtype):
    x, found = matrix(2, 40, x_dtype), []
    for looks in (LOOKS, 0):
        y = torch.full((2, 40), NAN, dtype=getattr(torch, y_dtype), device=DEVICE)
        arguments = (y, *y.stride(), x, *x.stride())
        parts = split_row(40, 8, 2, 1)
        split.split_launch(split.split_kernel, arguments, 2, 40, parts, align=4, looks=looks)(y, x)
        found.append(y)
    assert_softmax(lambda _: y, x.to(y.dtype))
    assert torch.equal(*found)


# ---- programs that do not wait


def into_itself(kernel, tensors, looks, chunks=2):
    """Runs a split kernel that writes into the last of `tensors`, which it reads as well."""
    m, n = tensors[0].shape
    tensors = (tensors[-1], *tensors)
    arguments = tuple(it for tensor in tensors for it in (tensor, *tensor.stride()))
    parts, vector = split_row(n, 8, chunks, 1), shifted_vector(tensors, [(n, 1)] * len(tensors))
    launch = split.split_launch(kernel, arguments, m, n, parts, align=1, vector=vector, looks=looks)
    launch(*tensors)
    return tensors[0]


def softmax_inputs(n, dtype):
    x = matrix(4, n, dtype)
    x[3, n - 1] = 9  # the maximum, behind the whole vectors
    x[0, 3], x[1, n - 1], x[2, :16], x[3, 8:16] = NAN, INF, -INF, -INF
    return (x,)


def backward_inputs(n, dtype):
    y = torch.softmax(matrix(4, n), 1).to(dtype)
    dy = matrix(4, n, dtype, seed=1)
    dy[1, 3], dy[2, n - 1], y[3, 9] = NAN, INF, -INF
    return y, dy


DIRECTIONS = pytest.mark.parametrize(
    ("kernel", "inputs"),
    [
        pytest.param(split.split_kernel, softmax_inputs, id="forward"),
        pytest.param(split_backward_kernel, backward_inputs, id="backward"),
    ],
)
ORDERS = {"in-order": one_after_the_other, "drawn": in_any_order}


def assert_equal_bits(y, expected):
    """No result is 781, which stands for NaN, of which there are several."""
    assert y.dtype == expected.dtype and not (y == 781).any()
    assert torch.equal(*(it.nan_to_num(781).view(torch.uint8) for it in (y, expected)))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@INTERPRETED_ONLY
@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (41, torch.bfloat16),
        pytest.param(48, torch.float16, marks=pytest.mark.slow),
        pytest.param(73, torch.float32, marks=pytest.mark.slow),
    ],
)
@DIRECTIONS
def test_impatient_programs_find_the_same_bits(few_sms, monkeypatch, kernel, inputs, n, dtype):
    """Their results take the place of what they are computed from.

    One may help with a part whose program has already written its result over it.
    """
    expected = into_itself(kernel, inputs(n, dtype), LOOKS)
    for order, looks in (("by-turns", 0), ("by-turns", 2), ("in-order", 2), ("drawn", 2)):
        with monkeypatch.context() as patch:
            if order in ORDERS:
                ORDERS[order](patch)
            assert_equal_bits(into_itself(kernel, inputs(n, dtype), looks), expected)


@INTERPRETED_ONLY
def test_a_program_whose_part_was_published_by_a_helper(few_sms, monkeypatch):
    """The first program of each row finds no other word, so it computes those of all."""
    one_after_the_other(monkeypatch)
    x, parts = matrix(3, 40), 3
    traffic = count(lambda x: in_parts(x, looks=1), x, trace=True)
    published = [
        it for it in traffic.accesses if (it.argument, it.kind) == ("slots_ptr", "written")
    ]
    assert sorted(offset for it in published for offset in it.offsets) == list(range(3 * parts))
    assert {it.program[0] for it in published} == {0, 3, 6}
    kernel = traffic.ops[-1]
    assert kernel.written_elements == 3 * (40 + parts)
    first = 2 * 16 + 2 * (40 - 16)  # columns it reads: its own ones and the others' twice
    # It publishes its own word and looks; again for each missing one; and looks at all once more.
    words = (1 + parts) + 2 * (1 + parts) + parts
    others = 2 * (1 + parts) + (40 - 16)
    assert kernel.read_elements == 3 * (first + words + others)


# ---- what it moves


@pytest.mark.parametrize(("m", "n", "parts"), [(1, 16, 1), (1, 17, 2), (7, 40, 3), (3, 128, 8)])
def test_softmax_moves_the_least_and_the_words(few_sms, m, n, parts):
    traffic = count(in_parts, matrix(m, n), trace=True)
    zeros, kernel = traffic.ops
    assert (zeros.read_elements, zeros.written_bytes) == (0, 8 * m * parts)
    assert kernel.written_elements == m * n + m * parts
    # A compare-and-swap reads its word. All programs have published before the first one looks.
    assert kernel.read_elements == m * n + m * parts + m * parts * parts
    looked = [it for it in traffic.accesses if it.argument == "slots_ptr"]
    assert {offset for it in looked for offset in it.offsets} == set(range(m * parts))
    for it in looked:  # at the words of its row alone
        assert {offset // parts for offset in it.offsets} == {it.program[0] // parts}


# ---- words of 0


@pytest.fixture
def words(fake_gpu, monkeypatch):
    """The words that launches are given on a GPU: their address, and what holds them."""
    monkeypatch.setattr(split, "_supplies", {})
    monkeypatch.setattr(split, "SUPPLY", 1024)

    def take(n, times=1, stream=0):
        give = split.words_of(n, torch.device(DEVICE))
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(give, [stream] * times))

    return take


def test_launches_on_the_default_stream_share_no_sector_of_words(words):
    words(1)  # threads that begin at once might each zero some
    for n, size in ((1, 4), (2, 4), (4, 4), (5, 8), (9, 16), (400, 512), (1000, 1024)):
        taken = words(n, times=300)
        offsets = {(id(held), at - held.data_ptr()) for at, held in taken}
        assert len(offsets) == 300 and {it % (8 * size) for _, it in offsets} == {0}
        assert all(at + 8 * n <= held.data_ptr() + held.nbytes for at, held in taken)
        assert not any(held.any() for _, held in taken)
        assert len({id(held) for _, held in taken}) < 300 or size == 1024  # zeroed for many


@pytest.mark.parametrize(("n", "stream"), [(5, 7), (1025, 0)])
def test_other_launches_zero_their_own_words(words, n, stream):
    """A supply is not known to be zeroed where another stream is, or a captured graph is replayed.

    Words for many programs would soon use it up.
    """
    for at, held in words(n, times=2, stream=stream):
        assert at == held.data_ptr() and held.nbytes == 8 * n and not held.any()


def test_launch_limits_the_registers_of_a_whole_vector(fake_gpu):
    """On NVIDIA's GPUs; and what fits one decides whether a row is split."""
    x, options = matrix(2, 65536), []
    for each in (x.half(), x.half()[:, 1:], x):
        split.plan(each, torch.empty_like(each))
        options.append(fake_gpu.compiled[-1][2])
    registers = tuned("part_registers")
    assert [it.get("maxnreg") for it in options] == [registers, None, None]
    assert {it["num_warps"] for it in options} == {4}
    assert all("launch_cooperative_grid" not in it for it in options)  # it starts beside others
    fake_gpu.used = {"registers": 255}
    with pytest.raises(ValueError, match=r"needs 8192 programs of 8, and 1056 fit the GPU"):
        split.plan(x, x, block=8, chunks=1)


# ---- publish, look, first_missing


@triton.jit
def _exchange_kernel(
    y_ptr, x_ptr, slots_ptr, n_parts,
    SILENT: tl.constexpr,
    SLOTS: tl.constexpr,
    LOOKS: tl.constexpr,
):  # fmt: skip
    """A program publishes its pair of numbers, the later ones later, and writes down all pairs."""
    part = tl.program_id(0)
    lanes = tl.arange(0, SLOTS)
    for _ in range(3 * part):
        tl.load(slots_ptr, volatile=True)
    if part != SILENT:
        publish(slots_ptr + part, tl.load(x_ptr + 2 * part), tl.load(x_ptr + 2 * part + 1))
    words = look(slots_ptr + lanes, lanes < n_parts, LOOKS, False)
    tl.store(y_ptr + part * 2 * SLOTS + lanes, high_of(words))
    tl.store(y_ptr + part * 2 * SLOTS + SLOTS + lanes, low_of(words))


def exchanged(x, silent, looks):
    """For each program, the numbers of all of them, (parts, 2, parts), as it found them."""
    parts = x.shape[0]
    y = torch.full((parts, 2, 64), NAN, device=DEVICE)
    example = (y, x, x.to(torch.int64), parts)
    constants = {"SILENT": silent, "SLOTS": 64, "LOOKS": looks}
    side_by_side = {"launch_cooperative_grid": True} if device.INTERPRETED else {}
    words = split.words_of(parts, y.device)
    Launch(_exchange_kernel, (parts,), example, constants, words, num_warps=2, **side_by_side)(y, x)
    assert (y[..., parts:] == 0).all()  # where there is no slot
    return y[..., :parts]


@pytest.mark.parametrize("silent", [-1, 0, 4])
def test_look_finds_every_bit_of_all_that_come_and_gives_up(silent):
    pairs = [[0.0, 1.0], [-0.0, INF], [-1.0, -3e38], [NAN, 1e-45], [-3.4e38, NAN]]
    x = torch.tensor(pairs, device=DEVICE)
    assert (exchanged(x, silent, looks=0) == 0).all()
    found = exchanged(x, silent, looks=50).contiguous().view(torch.int32)
    if silent >= 0:
        x[silent] = 0
    assert torch.equal(found, x.t().contiguous().view(torch.int32).expand(5, 2, 5))


# ---- compiled


@pytest.mark.slow
def test_backward_adds_products_in_one_way():
    """Of a sum of two products, either may be rounded; a helper must find the same bits."""
    y = torch.empty(64, 2**18, device=DEVICE)  # a lane has several products
    [text] = assembly(
        lambda y, dy: backward(dy, y, 1, y.dtype),
        (y, y.clone()),
        target="sm_90",
        keep="FMUL|FFMA|ATOM",
    )
    before, *_ = text.partition("ATOM")
    assert "FFMA" in before and "FMUL" not in before


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("n", [32768, 65536, 100000, 100001, 2**20])
@DIRECTIONS
def test_impatient_programs_find_the_same_bits_on_the_gpu(kernel, inputs, n, dtype):
    m = 2**24 // n
    y, dy = torch.softmax(matrix(m, n), 1).to(dtype), matrix(m, n, dtype, seed=1)
    tensors = (y, dy) if kernel is split_backward_kernel else (dy,)
    widest = 16 // y.element_size()
    shift = {"align": 1, "vector": widest} if n % 2 else {"align": widest, "vector": 1}
    parts = best_split(n, y.element_size(), len(tensors), **shift, gpu=planning_gpu(y))

    def run(to, looks):
        arguments = tuple(it for tensor in (to, *tensors) for it in (tensor, *tensor.stride()))
        call = split.split_launch(kernel, arguments, m, n, parts, looks=looks, **shift)
        call(to, *tensors)
        return to

    expected = run(torch.empty_like(y), LOOKS)
    of_op = backward(dy, y, 1, y.dtype) if len(tensors) == 2 else split.softmax(dy)
    assert_equal_bits(of_op, expected)
    for looks in (0, 1):
        assert_equal_bits(run(torch.full_like(y, NAN), looks), expected)
    assert_equal_bits(run(dy, 0), expected)  # its result takes the place of an input
