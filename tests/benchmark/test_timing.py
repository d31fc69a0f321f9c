import dataclasses

import pytest
import torch

from memtraffic import device, gpus
from memtraffic.benchmark import timing
from memtraffic.benchmark.timing import time_interleaved

SLEEP, FLUSH, START, END, SYNC = "sleep", "flush", "start", "end", "synchronize"
ROUNDS = timing.MIN_ROUNDS


class FakeGpu:
    """Logs what the timer asks of a GPU, which works through what the host queues.

    Their clocks, in ms, are advanced by what is queued and by a host that is slow to launch.
    """

    def __init__(self):
        self.log, self.launched, self.host, self.now = [], 0, 0.0, 0.0
        self.gpu = gpus.find_gpu("H200")

    def queue(self, name, milliseconds):
        self.log.append(name)
        self.launched += 1
        self.now = max(self.now, self.host) + milliseconds

    def empty(self, size, dtype, device):
        self.flushed = size * dtype.itemsize
        return self

    def zero_(self):
        self.queue(FLUSH, 0.5)  # not part of any measurement

    def sleep(self, cycles):
        self.host = max(self.host, self.now)
        self.queue(SLEEP, cycles / timing.SLEEP_CYCLES)

    def function(self, name, milliseconds, slow=None):
        """A function to time. slow: numbers of its calls, with the ms that the host takes for them.

        A sleep is 1 ms, and then 4 and 16.
        """

        def fn():
            self.host += (slow or {}).get(self.log.count(name) + 1, 0.0)
            self.queue(name, milliseconds)

        return fn


@pytest.fixture
def fake(monkeypatch):
    fake = FakeGpu()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            fake.log.append(START if fake.log[-1] in (SLEEP, FLUSH) else END)
            fake.now = max(fake.now, fake.host)
            self.time, self.synchronized = fake.now, fake.log.count(SYNC)

        def query(self):
            """Whether the GPU came to a call before the host had launched it."""
            return self.time <= fake.host

        def elapsed_time(self, end):
            assert fake.log.count(SYNC) > end.synchronized, "read before it was waited for"
            return end.time - self.time

    monkeypatch.setattr(device, "require_gpu", lambda what: None)
    monkeypatch.setattr(device, "this_gpu", lambda: fake.gpu)
    monkeypatch.setattr(torch, "empty", fake.empty)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.log.append(SYNC))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return fake


def one_call(name, cold=True):
    return [SLEEP, *([FLUSH] if cold else []), START, name, END]


@pytest.mark.parametrize(
    ("cold", "reverse"),
    [(True, False), (False, False), (True, True)],
    ids=["cold", "warm", "reverse"],
)
def test_time_interleaved_order_of_calls(fake, cold, reverse):
    """Warm up each function, one trial round, then rounds of every function; L2 flushed if cold.

    Every second round may be in reverse order, and each time stays with its function.
    """
    fns = [fake.function("a", 2.0), fake.function("b", 3.0)]
    samples = time_interleaved(fns, cold=cold, budget=0, reverse=reverse)
    a, b = one_call("a", cold), one_call("b", cold)
    before = [*3 * a, *3 * b, SYNC, *a, *b, SYNC, SYNC]
    two_rounds = [*a, *b, *b, *a] if reverse else 2 * [*a, *b]
    four_rounds = [*2 * two_rounds, SLEEP]  # and one more launch
    assert fake.log == [*before, *ROUNDS // 4 * four_rounds, SYNC, SYNC]
    assert samples == [[pytest.approx(2e-3)] * ROUNDS, [pytest.approx(3e-3)] * ROUNDS]


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("reverse", [False, True], ids=["in-order", "reverse"])
@pytest.mark.parametrize("kernels", [(1,), (2,), (1, 5), (3, 1, 1), (1,) * 13])
def test_time_interleaved_at_each_place_of_four_launches(fake, kernels, reverse, cold):
    """Whether all rounds are asked or every second one, and whatever else a round launches."""
    places = [[] for _ in kernels]

    def function(i, count):
        def fn():
            places[i].append(fake.launched % 4)
            for _ in range(count):
                fake.queue(i, 1.0)

        return fn

    fns = [function(i, count) for i, count in enumerate(kernels)]
    time_interleaved(fns, budget=0, reverse=reverse, cold=cold)
    for met in places:
        timed = met[-ROUNDS:]
        for some in (timed, timed[::2], timed[1::2]):
            assert [some.count(place) for place in range(4)] == [len(some) // 4] * 4


@pytest.mark.parametrize(
    ("slowest_ms", "budget", "rounds"),
    [
        pytest.param(1.0, 0.0, 32, id="32-at-least"),
        pytest.param(1.0, 0.31, 272, id="as-the-budget-allows"),  # 1 ms and 0.1 ms of sleep
        pytest.param(0.001, 0.3, 512, id="512-at-most"),
    ],
)
def test_time_interleaved_rounds(fake, slowest_ms, budget, rounds):
    fns = [fake.function("fast", slowest_ms / 2), fake.function("slow", slowest_ms)]
    samples = time_interleaved(fns, budget=budget)
    assert [len(it) for it in samples] == [rounds, rounds]
    assert fake.log.count("fast") == fake.log.count("slow") == 3 + 1 + rounds


@pytest.mark.parametrize(
    ("slow", "repeats", "in_time"),
    [
        pytest.param({6: 5.0}, 1, ROUNDS, id="held-up-once"),
        pytest.param({6: 5.0, 7: 5.0}, 2, ROUNDS, id="held-up-twice"),
        pytest.param({6: 20.0, 7: 20.0, 8: 20.0}, 2, ROUNDS - 1, id="longer-than-any-sleep"),
        pytest.param(dict.fromkeys(range(999), 3.0), 4 + ROUNDS, ROUNDS, id="slow-each-time"),
        pytest.param(dict.fromkeys(range(999), 20.0), 2 * (4 + ROUNDS), 0, id="too-slow-each-time"),
    ],
)
def test_time_interleaved_asks_whether_the_host_was_late(fake, slow, repeats, in_time):
    """A call for which it was late is repeated as a whole, twice at most."""
    [samples] = time_interleaved([fake.function("a", 10.0, slow)], budget=0)
    assert [round(1e3 * it, 1) for it in samples].count(10.0) == in_time
    assert fake.log.count("a") == fake.log.count(FLUSH) == 3 + 1 + ROUNDS + repeats


@pytest.mark.parametrize(
    ("product", "l2_mib", "flushed_mib"),
    [
        *(("H200", 0, 256), ("H200", 60, 256), ("H200", 128, 512)),
        ("MI300X", 4, 1024),  # 4 MiB in each die, and 256 MiB of Infinity Cache behind them
    ],
)
def test_time_interleaved_flushes_every_cache(fake, product, l2_mib, flushed_mib):
    fake.gpu = dataclasses.replace(gpus.find_gpu(product), l2_bytes=l2_mib * 2**20)
    time_interleaved([fake.function("a", 1.0)], budget=0)
    assert fake.flushed == flushed_mib * 2**20
