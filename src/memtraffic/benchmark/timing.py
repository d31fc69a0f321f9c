"""The timer: GPU events around each call, a cold L2, and all functions in the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from memtraffic import gpus, runtime

WARMUP_CALLS = 3
TRIES = 3
MIN_ROUNDS, MAX_ROUNDS = 20, 500
MIN_FLUSH_BYTES = 256 * 2**20
SLEEP_CYCLES, SLEEP_SECONDS = 200_000, 1e-4  # the GPU sleeps while the host gets ahead of it


def time_interleaved(
    fns: Sequence[Callable[[], object]],
    *,
    cold: bool = True,
    budget: float = 0.3,
    reverse: bool = False,
) -> list[list[float]]:
    """The durations of several functions in seconds, one list for each function.

    Each round calls every function once, so that a change of the GPU's clock affects all of them
    alike. A call is timed by GPU events. The GPU is kept busy before each call, so the time that
    the host takes to launch it is hidden, unless that is longer than about 100 µs. Such a call is
    made again, twice at most, because the host may have been held up.

    fns: functions without arguments. cold: overwrite L2 before each call; otherwise it still holds
    the data of earlier calls. budget: about how many seconds of GPU time to spend on each function.
    There are 20 rounds at least and 500 at most. reverse: call them in reverse order in every
    second round; if the times of these rounds differ from those of the others, a function suffers
    from what runs before it.

    On an H200 the time of a small kernel repeats with every fourth flush before it. So a round has
    an odd number of flushes, with one for no function if need be: each function meets each state.

    Raises RuntimeError without a GPU.
    """
    runtime.require_gpu("time_interleaved")
    flush_bytes = max(MIN_FLUSH_BYTES, 4 * gpus.this_gpu().l2_bytes)
    flush = torch.empty(flush_bytes, dtype=torch.int8, device=runtime.device())
    turns = [*fns, _nothing] if cold and len(fns) % 2 == 0 else list(fns)

    def call(fn: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        for _ in range(TRIES):
            torch.cuda._sleep(SLEEP_CYCLES)
            if cold:
                flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            end.record()
            if not start.query():  # the GPU has not come to the call yet
                break
        return start, end

    def measure(rounds: int) -> list[list[float]]:
        events = []
        for i in range(rounds):
            back = reverse and i % 2 == 1
            made = [call(fn) for fn in (turns[::-1] if back else turns)]
            events.append(made[::-1] if back else made)
        torch.cuda.synchronize()
        seconds = [[start.elapsed_time(end) * 1e-3 for start, end in calls] for calls in events]
        return [list(samples) for samples in zip(*seconds, strict=True)]

    for fn in fns:
        for _ in range(WARMUP_CALLS):
            call(fn)
    torch.cuda.synchronize()
    slowest = max(samples[0] for samples in measure(1)) + SLEEP_SECONDS
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget / slowest)))
    return measure(rounds)[: len(fns)]


def _nothing() -> None:
    """Takes a turn, and is not timed for anybody."""


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
