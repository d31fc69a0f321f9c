"""What it costs a reader's GPU to measure an experiment, estimated from its arguments alone.

An estimate errs upwards: each call is taken to move as much as the five lines of PyTorch do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memtraffic.benchmark import decision
from memtraffic.benchmark.roof import roof
from memtraffic.benchmark.timing import (
    BALANCED,
    MAX_ROUNDS,
    MIN_FLUSH_BYTES,
    MIN_ROUNDS,
    SLEEP_SECONDS,
    WARMUP_CALLS,
)
from memtraffic.op import find_op
from memtraffic_book import measurements as m

BYTES_PER_S = 4.8e12 / 15  # a fifteenth of an H200's bandwidth, which a T4 has
GIB = 2.0**30
PASSES = 8  # over a matrix, of a call: those of the five lines
COPIES = 6  # that are timed to find the fastest
KEPT, JUDGED = 5, 6  # matrices of inputs, results and copies; of float64, while one is judged
SMALL_CALLS = 16  # of an experiment that moves next to nothing
# Seconds to compile a kernel with two cores. Inductor times several configurations of its own.
TRITON, INDUCTOR = 0.5, 10.0
DRIVER_KERNELS = 2 * 10 * 6 * 3  # that the driver is asked about


@dataclass(frozen=True)
class Cost:
    """GiB of memory at a time; GiB moved, sleep between calls included; seconds of compiling."""

    gib: float
    moves: float
    compiling: float

    @property
    def seconds(self) -> float:
        """All of it, at BYTES_PER_S."""
        return self.moves * GIB / BYTES_PER_S + self.compiling


def estimate(measure: Callable[..., Any], arguments: Mapping[str, Any]) -> Cost:
    """What an experiment costs, whose function and arguments are as the catalog has them."""
    budget, repeats = arguments.get("budget", 0.3), arguments.get("repeats", 1)
    judged = measure in (m.compare, m.decide, m.bench_option, m.bench_programs)
    fns, most, moves, times = _functions(measure, arguments), 0.0, 0.0, 0
    for calls, n_bytes, elements in _timed(measure, arguments, len(fns)):
        most = max(most, KEPT * n_bytes + judged * JUDGED * 8 * elements + MIN_FLUSH_BYTES)
        moves += calls * _moved(PASSES * n_bytes, budget)
        times += 1
    compiling = times * sum(INDUCTOR if "compile(" in name else TRITON for name in fns)
    if measure is m.compare_with_driver:
        compiling = DRIVER_KERNELS * TRITON
    return Cost(most / GIB, repeats * moves / GIB, compiling)


def _functions(measure: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """The names of what is timed beside one another."""
    if measure is m.decide:
        return ["copy", *decision.CANDIDATES]
    for name in ("impls", "values", "programs_per_sm"):
        if name in arguments:
            return [str(it) for it in arguments[name]]
    return ["one"]


def _timed(
    measure: Callable[..., Any], arguments: Mapping[str, Any], fns: int
) -> Iterator[tuple[int, float, float]]:
    """Of all that is timed in the same rounds: calls, the bytes and elements of their inputs."""
    if measure is roof:
        yield COPIES + 1, 2.0**31, 2.0**29
    elif "gib" in arguments:
        ways = arguments.get("kib_per_sm") or arguments["configurations"]
        yield 2 * len(ways) + COPIES, arguments["gib"] * GIB, arguments["gib"] * GIB / 4
    elif "mib" in arguments:
        for mib in (*arguments["mib"], *arguments["mib"]):  # cold and warm
            yield 1, mib * 2.0**20, mib * 2.0**18
    elif shapes := shapes_of(arguments):
        op = find_op(arguments.get("inputs"))
        tensors = len(op.made.shapes) or 2  # a function makes a softmax and its gradient
        dtypes = arguments.get("dtypes") or [arguments.get("dtype", "float32")]
        layouts = 4 if measure is m.bench_layouts else 1
        for shape, dtype in itertools.product(layouts * shapes, dtypes):
            elements = op.elements(shape)
            n_bytes = tensors * elements * getattr(torch, dtype).itemsize
            yield fns + COPIES, n_bytes, tensors * elements
    else:
        yield SMALL_CALLS, 0, 0


def shapes_of(arguments: Mapping[str, Any]) -> list[list[int]]:
    """The shapes that an experiment has, none where its arguments say no shape."""
    return arguments.get("shapes") or [arguments[it] for it in ("shape",) if it in arguments]


def _moved(n_bytes: float, budget: float) -> float:
    """The bytes of a call that moves so many, in all rounds of the timer."""
    rounds = budget / (n_bytes / BYTES_PER_S + SLEEP_SECONDS) // BALANCED * BALANCED
    rounds = 1 + WARMUP_CALLS + max(MIN_ROUNDS, min(MAX_ROUNDS, rounds))
    return rounds * (n_bytes + MIN_FLUSH_BYTES + SLEEP_SECONDS * BYTES_PER_S)
