import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import kernels
import pytest
import torch
import triton
import triton.language as tl

from memtraffic import device
from memtraffic.gpus import find_gpu
from memtraffic.kernels import launch
from memtraffic.kernels.launch import Launch, takes_ptx, zero_words
from memtraffic.meters.count import count
from memtraffic.tensors import matrix

DEVICE = device.default()


@triton.jit
def _scale_kernel(y_ptr, x_ptr, n_cols, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    batch, row = tl.program_id(1), tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    at = (batch * tl.num_programs(0) + row) * n_cols + cols
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=mask) * FACTOR, mask=mask)


@triton.jit
def _arrivals_kernel(y_ptr, slots_ptr, n_slots, BLOCK: tl.constexpr):
    """Writes the sum of all slots, once every program has added 1 to its own."""
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    tl.atomic_add(slots_ptr + program, 1)
    arrived = tl.zeros((), tl.int64)
    while arrived < tl.num_programs(0):
        slots = tl.load(slots_ptr + lanes, mask=lanes < n_slots, other=0, volatile=True)
        arrived = tl.sum(slots, axis=0)
    tl.store(y_ptr + program, arrived)


def scale(y, x, factor=3):
    constants = {"FACTOR": factor, "BLOCK": triton.next_power_of_2(x.shape[-1])}
    grid = (x.shape[1], x.shape[0])
    return Launch(_scale_kernel, grid, (y, x, x.shape[-1]), constants, num_warps=1)


def arrivals(programs, slots):
    y = torch.zeros(programs, dtype=torch.int64, device=DEVICE)
    constants = {"BLOCK": triton.next_power_of_2(slots)}
    example = (y, y, slots)
    return Launch(_arrivals_kernel, (programs, 1), example, constants, num_warps=1, slots=slots), y


def test_launch_runs_on_the_tensors_of_each_call():
    x = matrix(6, 5).view(2, 3, 5)
    launch = scale(torch.empty_like(x), x)
    for run, other in product((launch, launch.unwrapped()), (x, x + 1)):
        y = torch.full_like(x, float("nan"))
        assert run(y, other) is None
        assert torch.equal(y, 3 * other)


def test_launch_fills_its_slots_with_zeros_each_time():
    run, y = arrivals(5, 7)
    for _ in range(3):
        assert kernels.ended(run, y, seconds=20) is None
        assert y.tolist() == [5] * 5
        y.zero_()


def test_launch_allocates_as_many_slots_as_it_is_told():
    def planned_and_run():  # what is planned before, a GPU runs at once, and no meter sees it
        run, y = arrivals(5, 7)
        run(y)

    _, zeros, kernel = count(planned_and_run, ()).ops
    assert (zeros.name, zeros.written_elements, zeros.written_bytes) == ("zeros", 7, 56)
    assert kernel.written_elements == 5 + 5


def test_launch_wants_as_many_tensors_as_it_was_planned_for():
    x = matrix(2, 5).view(1, 2, 5)
    launch, (waiting, y) = scale(torch.empty_like(x), x), arrivals(5, 7)
    wrong = [(launch, (x,)), (launch, (x, x, x)), (waiting, ()), (waiting, (y, y))]
    for run, tensors in (*wrong, *((run.unwrapped(), tensors) for run, tensors in wrong)):
        with pytest.raises(TypeError):
            run(*tensors)


def test_launch_compiles_once_and_passes_addresses(fake_gpu):
    x, other = matrix(6, 5).view(2, 3, 5), matrix(6, 5).view(2, 3, 5)
    run = scale(y := torch.empty_like(x), x, factor=2)
    [(kernel, arguments, options)] = fake_gpu.compiled
    assert kernel is _scale_kernel
    assert arguments[0] is y and arguments[1] is x and arguments[2] == 5
    assert options == {"FACTOR": 2, "BLOCK": 8, "num_warps": 1}
    run(y, x)
    run(other, y)
    assert [arguments for *_, arguments in fake_gpu.started] == [
        [y.data_ptr(), x.data_ptr(), 5, 2, 8],
        [other.data_ptr(), y.data_ptr(), 5, 2, 8],
    ]
    assert len(fake_gpu.compiled) == 1


def test_launch_that_waits_is_an_ordinary_launch(fake_gpu):
    """A cooperative one could not start beside other work."""
    run, y = arrivals(5, 7)
    [(_, _, options)] = fake_gpu.compiled
    assert options == {"BLOCK": 8, "num_warps": 1}
    run(y)
    [(*_, (first, slots, n_slots, block))] = fake_gpu.started
    assert (first, n_slots, block) == (y.data_ptr(), 7, 8)
    assert slots != first


def test_unwrapped_starts_what_a_call_starts(fake_gpu):
    y, x, z = (matrix(2, 5, seed=seed) for seed in range(3))
    for tensors in ((y, x), (y, x, z)):
        run = Launch(_scale_kernel, (1, 1), (*tensors, 5), {"BLOCK": 8}, num_warps=1)
        bare = run.unwrapped()
        for fake_gpu.stream in (7, 8):
            run(*tensors)
            bare(*tensors)
            [by_call, by_bare] = fake_gpu.started[-2:]
            assert by_call == by_bare and by_call[0] == (x.get_device(), fake_gpu.stream)
    run, y = arrivals(5, 7)
    run.unwrapped()(y)
    *_, (first, slots, *_) = fake_gpu.started[-1]
    assert first == y.data_ptr() != slots


# ---- words of 0


@pytest.fixture
def no_supplies(monkeypatch):
    monkeypatch.setattr(launch, "_supplies", {})


def words_at(address, n, owner):
    first = (address - owner.data_ptr()) // owner.element_size()
    return owner[first : first + n]


def test_launches_on_the_default_stream_share_no_word(no_supplies):
    taken, owners = [], []
    for n in (1, 5, 1000, launch.SUPPLY // 8) * 10:
        address, owner = zero_words(n, DEVICE, stream=0)
        words = words_at(address, n, owner)
        assert len(words) == n and not words.any()
        words.fill_(-1)  # as a kernel does
        taken += range(address, address + 8 * n, 8)
        owners.append(owner)
    assert len(taken) == len(set(taken))
    assert 4 < len({owner.data_ptr() for owner in owners}) < 10  # one of 32768 words serves 8


def test_threads_share_no_word(no_supplies):
    with ThreadPoolExecutor(8) as pool:
        took = pool.map(lambda _: zero_words(3, DEVICE, stream=0), range(4000))
    addresses = [address for address, _ in took]
    assert len({address // launch.SECTOR_BYTES for address in addresses}) == len(addresses)


@pytest.mark.parametrize(("n", "stream"), [(5, 7), (launch.SUPPLY // 8 + 1, 0)])
def test_other_launches_zero_their_own_words(n, stream, no_supplies):
    """A supply is not known to be zeroed where another stream is, or a captured graph is replayed.

    Words for many programs would soon use it up.
    """
    for _ in range(2):
        address, owner = zero_words(n, DEVICE, stream)
        assert (address, len(owner)) == (owner.data_ptr(), n)
        assert not owner.any()
        owner.fill_(-1)
    assert launch._supplies == {}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_launches_share_no_sector(n, no_supplies):
    taken = [zero_words(n, DEVICE, stream=0)[0] for _ in range(launch.LAUNCHES)]
    sectors = [{(at + 8 * i) // launch.SECTOR_BYTES for i in range(n)} for at in taken]
    assert len(set().union(*sectors)) == sum(map(len, sectors))


def test_words_are_on_the_gpu_that_asks(no_supplies, monkeypatch):
    asked, zeros = [], torch.zeros

    def on_the_cpu(*size, dtype, device=None):
        asked.append(device)
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    for index in (0, 1, 1, 0):
        zero_words(3, torch.device("cuda", index), stream=0)
    assert asked == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("stream", [0, 7])
def test_launch_asks_for_its_words_and_keeps_them(fake_gpu, monkeypatch, stream):
    alive, asked, started = [], [], []

    class Owner:
        pass

    def words(n, device, on):
        asked.append((n, on))
        owner = Owner()
        alive.append(weakref.ref(owner))
        return 4096, owner

    def start(on, *addresses):
        started.append((on, [*addresses[1:]], alive[-1]() is not None))

    monkeypatch.setattr(launch, "raw_stream", lambda i: stream)
    monkeypatch.setattr(launch, "zero_words", words)
    monkeypatch.setattr(launch, "starter", lambda *arguments: start)
    run, y = arrivals(5, 7)
    run(y)
    assert asked == [(7, stream)] and started == [(stream, [4096], True)]


# ---- takes_ptx


@pytest.mark.parametrize(("name", "expected"), [("H200", True), ("sm_75", True), ("MI300X", False)])
def test_takes_ptx_where_kernels_are_compiled(name, expected):
    gpu = find_gpu(name)
    with device.capturing_launches(gpu):
        assert takes_ptx(gpu) is expected
    assert takes_ptx(gpu) is (expected and device.runs_on_gpu())


# ---- on a GPU


@pytest.mark.gpu
def test_launch_on_the_current_stream():
    """A launch on another stream than the current one would not wait for what comes before."""
    x = torch.zeros(64, 1024, 1024, device="cuda")
    y = torch.empty_like(x)
    run = scale(y, x)
    run(y, x)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.add_(1)
            run(y, x)
            wrong = (y != 3 * x).sum()
        torch.cuda.current_stream().wait_stream(stream)
        assert wrong.item() == 0
    assert y[-1, -1, -1].item() == 6
