"""The timer: GPU events around each call, a cold L2, and all functions in the same rounds."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from memtraffic import device
from memtraffic.torch_adapter import sleep_on_gpu

WARMUP_CALLS = 3
TRIES, LONGER = 3, 4  # after a call that the host was late to launch, so many times the sleep
LAUNCH_CYCLE = 4  # most H200s start kernels faster and slower in a cycle of so many launches
BALANCED = LAUNCH_CYCLE**2  # rounds in which each function is launched at each place of that cycle
MIN_ROUNDS, MAX_ROUNDS = 2 * BALANCED, 32 * BALANCED
MIN_FLUSH_BYTES = 256 * 2**20
SLEEP_CYCLES, SLEEP_SECONDS = 200_000, 1e-4  # the GPU sleeps while the host gets ahead of it

Events = tuple[torch.cuda.Event, torch.cuda.Event]


def time_interleaved(
    fns: Sequence[Callable[[], object]],
    *,
    cold: bool = True,
    budget: float = 0.3,
    reverse: bool = False,
) -> list[list[float]]:
    """The durations of several functions in seconds, one list for each function.

    Each round calls every function once, so that a change of the GPU's clock affects all of them
    alike. A call is timed by GPU events. The GPU sleeps for 100 µs before each call, so the time
    that the host takes to launch it is hidden. If the host took longer, the call is made again,
    after a sleep of 400 µs and then of 1.6 ms.

    fns: functions without arguments. cold: overwrite L2 before each call; otherwise it still holds
    the data of earlier calls. budget: about how many seconds of GPU time to spend on each function.
    There are 32 rounds at least and 512 at most. reverse: call them in reverse order in every
    second round; if the times of these rounds differ from those of the others, a function suffers
    from what runs before it.

    On most H200s a kernel takes about 1 µs more or less in a cycle of four launches, whichever
    kernels they are. So one more kernel is launched after every fourth round: in 16 rounds, each
    function comes to each place of the cycle equally often, however many kernels a round launches.

    Raises RuntimeError without a GPU.
    """
    device.require_gpu("time_interleaved")
    call = functools.partial(queue_call, flush=flush_buffer() if cold else None)

    def measure(rounds: int) -> list[list[float]]:
        events = []
        for i in range(rounds):
            back = reverse and i % 2 == 1
            made = [call(fn) for fn in (fns[::-1] if back else fns)]
            events.append(made[::-1] if back else made)
            if i % LAUNCH_CYCLE == LAUNCH_CYCLE - 1:
                sleep_on_gpu(1)
        return [elapsed(calls) for calls in zip(*events, strict=True)]

    for fn in fns:
        for _ in range(WARMUP_CALLS):
            call(fn)
    torch.cuda.synchronize()
    slowest = max(samples[0] for samples in measure(1)) + SLEEP_SECONDS
    rounds = int(budget / slowest) // BALANCED * BALANCED
    return measure(max(MIN_ROUNDS, min(MAX_ROUNDS, rounds)))


def flush_buffer() -> Tensor:
    """Memory on the GPU that is larger than its last cache."""
    n_bytes = max(MIN_FLUSH_BYTES, 4 * device.this_gpu().last_level_bytes)
    return torch.empty(n_bytes, dtype=torch.int8, device=device.default())


def queue_call(fn: Callable[[], object], flush: Tensor | None) -> Events:
    """Queues a call for the GPU, and events before and after it; again if the host was late.

    Each time, the GPU sleeps longer than before: the host may be slow, or have been held up.

    flush: what is overwritten with zeros before the call, if anything. The GPU launches two kernels
    before those of `fn`, or one without `flush`.
    """
    for i in range(TRIES):
        sleep_on_gpu(SLEEP_CYCLES * LONGER**i)
        if flush is not None:
            flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        if not start.query():  # the GPU has not come to the call yet
            break
    return start, end


def elapsed(calls: Iterable[Events]) -> list[float]:
    """The seconds between the events of each queued call; waits until the GPU is through."""
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in calls]


def summary(samples: Sequence[float], n_bytes: int) -> dict[str, float]:
    """The median and the spread of durations, and the bandwidth at the median.

    >>> summary([1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6], n_bytes=7000)
    {'us': 3.5, 'us_p20': 2.0, 'us_p80': 5.0, 'gb_per_s': 2.0}

    samples: in seconds. Returns the median and the 20th and the 80th percentile in microseconds,
    and `n_bytes` over the median in GB/s (10**9 bytes per second).
    """
    quintiles = statistics.quantiles(samples, n=5, method="inclusive")
    median = statistics.median(samples)
    return {
        "us": median * 1e6,
        "us_p20": quintiles[0] * 1e6,
        "us_p80": quintiles[-1] * 1e6,
        "gb_per_s": n_bytes / median * 1e-9,
    }


def level(one: Sequence[float], two: Sequence[float]) -> bool:
    """Whether two times are as good as equal: the median of each lies in the spread of the other.

    >>> level((9.0, 8.7, 9.2), (8.8, 8.6, 9.1)), level((9.0, 8.9, 9.2), (8.8, 8.6, 8.9))
    (True, False)

    Each is a median, with the 20th and the 80th percentile.
    """
    return two[1] <= one[0] <= two[2] and one[1] <= two[0] <= one[2]


def choose(frame: pd.DataFrame, column: str = "us") -> str:
    """The first implementation whose times in a column are level with those of the fastest.

    frame: as of `bench` at one shape, with the least to maintain first. Returns "not measured"
    where nothing was.

    >>> row = {"impl": ["torch.softmax", "memtraffic.softmax"], "us": [9.0, 8.8]}
    >>> choose(pd.DataFrame(row | {"us_p20": [8.7, 8.6], "us_p80": [9.1, 9.0]}))
    'torch.softmax'
    >>> choose(pd.DataFrame(row | {"us_p20": [8.9, 8.7], "us_p80": [9.1, 8.9]}))
    'memtraffic.softmax'
    """
    columns = ["impl", column, f"{column}_p20", f"{column}_p80"]
    there = frame.loc[frame[column] > 0, columns].itertuples(index=False)
    times = {name: found for name, *found in there}
    fastest = min(times.values(), default=())
    return next((name for name, found in times.items() if level(found, fastest)), "not measured")
