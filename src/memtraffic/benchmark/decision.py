"""Which implementation to call at a shape: the least to maintain of those that are the fastest."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic.benchmark.baselines import BACKWARD, PACKAGES, find_implementation
from memtraffic.benchmark.loop import bench
from memtraffic.benchmark.timing import level, summary
from memtraffic.kernels.softmax.definitions import SOFTMAX, backward_reference
from memtraffic.op import Op

# What can be called, the least to maintain first.
CANDIDATES = (
    *("torch.softmax", "compile(torch.softmax)", "Liger", "FlagGems", "QuACK"),
    "memtraffic.softmax",
)
WAYS = {"us": "on the GPU", "eager_us": "called", "graph_us": "in a CUDA graph"}
ROUNDS, ROUND_SECONDS = 20, 2e-3
FEWEST_ROUNDS, MOST_SECONDS = 5, 0.5  # of all calls that are slow
GRAPH_CALLS = 20

Call = Callable[[], object]


def _gradient_reference(x: Tensor) -> Tensor:
    """The gradient of the sum of `x * softmax(x)`, where the first `x` is held constant."""
    return backward_reference(torch.softmax(x, dim=1), x)


WITH_GRADIENT = Op("softmax with gradient", "M,N", _gradient_reference)


def with_gradient(name: str) -> Callable[[Tensor], Tensor]:
    """A softmax, forward and backward through autograd: what a caller does who trains.

    name: of an implementation. A package's two kernels are called by an autograd function.
    """
    forward = find_implementation(name)
    softmax = _joined(forward, PACKAGES[name + BACKWARD]) if name in PACKAGES else forward

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(softmax(leaf), leaf, x)[0]

    return gradient


def _joined(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Callable[[Tensor], Tensor]:
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = forward(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return backward(*ctx.saved_tensors, *gradients)

    return lambda x: Softmax.apply(x)


def decide(
    shape: Sequence[int], *, dtype: str = "float32", gradient: bool = False, budget: float = 0.1
) -> pd.DataFrame:
    """Times what computes a softmax of a matrix of this shape, judged, beside a copy.

    gradient: of forward and backward. budget: as of `bench`.

    Columns: those of `bench` with `judge`, and `eager_us` and `graph_us`, the microseconds of a
    call among many in a row, on the host's clock until the GPU is through, called one by one and in
    a CUDA graph, each with `_p20` and `_p80`. All calls have the same matrix, so a small one stays
    in L2. NaN where there is no time. `choose` reads the answer from it.

    Raises what `bench` raises.
    """
    find, op = (with_gradient, WITH_GRADIENT) if gradient else (find_implementation, SOFTMAX)
    fns = {name: find(name) for name in CANDIDATES}
    frame = bench({"copy": "copy", **fns}, op, [shape], dtype=dtype, judge=True, budget=budget)
    [x] = op.arguments(shape, dtype).positional
    there = frame.loc[frame["us"].notna() & (frame["impl"] != "copy"), "impl"]
    calls: dict[str, Call] = {name: functools.partial(fns[name], x) for name in there}
    for column, made in (("eager_us", calls), ("graph_us", _graphs(calls))):
        times = _in_a_row(made, GRAPH_CALLS if column == "graph_us" else 1)
        for suffix in ("", "_p20", "_p80"):
            found = {name: it["us" + suffix] for name, it in times.items()}
            frame[column + suffix] = frame["impl"].map(found)
    return frame


def _graphs(calls: dict[str, Call]) -> dict[str, Call]:
    """What replays each call many times, without those that cannot be captured."""
    found: dict[str, Call] = {}
    for name, call in calls.items():
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        try:
            with torch.cuda.graph(graph):
                for _ in range(GRAPH_CALLS):
                    call()
        except RuntimeError:
            torch.cuda.synchronize()
            continue
        found[name] = graph.replay
    return found


def _in_a_row(calls: dict[str, Call], each: int) -> dict[str, dict[str, float]]:
    """The time of a call among many in a row, in interleaved rounds. each: calls of a call."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    counts, begun = {name: 1 for name in calls}, time.perf_counter()
    for turn in range(ROUNDS + 1):
        if turn > FEWEST_ROUNDS and time.perf_counter() - begun > MOST_SECONDS:
            break
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            torch.cuda.synchronize()
            took = time.perf_counter() - start
            if turn:
                samples[name].append(took / counts[name] / each)
            else:  # which says how many make a round
                counts[name] = max(1, min(100, round(ROUND_SECONDS / took)))
    return {name: summary(times, 0) for name, times in samples.items()}


def choose(frame: pd.DataFrame, column: str = "us") -> str:
    """What to call by the times in a column: the least to maintain that is level with the fastest.

    frame: as of `decide`, a row for each implementation. Returns "not measured" where nothing was.
    Level: see `timing.level`.

    >>> row = {"impl": ["torch.softmax", "memtraffic.softmax"], "us": [9.0, 8.8]}
    >>> choose(pd.DataFrame(row | {"us_p20": [8.7, 8.6], "us_p80": [9.1, 9.0]}))
    'torch.softmax'
    >>> choose(pd.DataFrame(row | {"us_p20": [8.9, 8.7], "us_p80": [9.1, 8.9]}))
    'memtraffic.softmax'
    """
    columns = ["impl", column, f"{column}_p20", f"{column}_p80"]
    times = {name: found for name, *found in frame[columns].itertuples(index=False)}
    there = {name: times[name] for name in CANDIDATES if name in times and times[name][0] > 0}
    fastest = min(there.values(), default=())
    return next((name for name, found in there.items() if level(found, fastest)), "not measured")
