"""Which softmax to call at a shape: `python examples/decide/decide.py 4096x50257 --dtype bfloat16`.

On a GPU, it races PyTorch's softmax, the same through `torch.compile`, ours, and those of Liger,
FlagGems and QuACK, as far as they are installed: `pip install liger-kernel flag-gems
quack-kernels`. The answer is the first of `CANDIDATES` that is level with the fastest, because the
first are the least to maintain.

`--gradient` races forward and backward together, `--drawn 12 --seed TEXT` adds shapes drawn by
chance, at which nobody tuned anything. `book/ship.ipynb` shows what `decide` measured on an H200.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import random
import time
from collections.abc import Callable, Sequence

import memtraffic  # before Triton, which the packages import
import pandas as pd
import torch
from memtraffic.benchmark import find_implementation, summary
from memtraffic.benchmark.timing import choose
from memtraffic.kernels.softmax.definitions import SOFTMAX, backward_reference
from memtraffic.op import Op
from torch import Tensor

# ---- what is raced


def liger(x: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_softmax

    return liger_softmax(x)


class FlagGems(torch.autograd.Function):
    """The two kernels of FlagGems, which it calls in place of PyTorch's once it is enabled."""

    @staticmethod
    def forward(ctx, x):
        # Otherwise it runs commands of many vendors to find out.
        os.environ.setdefault("GEMS_VENDOR", "amd" if torch.version.hip else "nvidia")
        from flag_gems.ops import softmax

        y = softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        from flag_gems.ops import softmax_backward

        [y] = ctx.saved_tensors
        return softmax_backward(dy, y, -1, y.dtype)


def quack(x: Tensor) -> Tensor:
    from quack import softmax

    if x.shape[1] * x.element_size() % 16:  # which it asserts, as if a result were wrong
        raise ValueError(f"QuACK takes rows of whole 16 bytes, not {x.shape[1]} of {x.dtype}")
    return softmax(x)


CANDIDATES = {
    "torch.softmax": find_implementation("torch.softmax"),
    "compile(torch.softmax)": find_implementation("compile(torch.softmax)"),
    "Liger": liger,
    "FlagGems": FlagGems.apply,
    "QuACK": quack,
    "memtraffic.softmax": memtraffic.softmax,
}
PACKAGES = {"Liger": "liger-kernel", "FlagGems": "flag-gems", "QuACK": "quack-kernels"}


def with_gradient(softmax: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A softmax, forward and backward through autograd: what a caller does who trains."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(softmax(leaf), leaf, x)[0]


WITH_GRADIENT = Op(
    "softmax with gradient", "M,N", lambda x: backward_reference(torch.softmax(x, dim=1), x)
)

# ---- the race

ROUNDS, ROUND_US = 20, 5000  # on the GPU, of the slowest
MOST_CALLS = {"eager_us": 50, "graph_us": 500}  # a round


def decide(
    shapes: Sequence[Sequence[int]], dtype: str, gradient: bool = False, budget: float = 0.1
) -> pd.DataFrame:
    """Times what computes a softmax of a matrix, judged, beside the fastest copy of the matrix.

    Columns: those of `memtraffic.bench` with `judge`; the `version` of a package; `eager_us` and
    `graph_us`, a call among many in a row, one by one and in a CUDA graph, on the host's clock,
    each with `_p20` and `_p80`. These calls have the same matrix, so a small one stays in L2.
    0 where there is no time: `note` says why.
    """
    op, fns, frames = SOFTMAX, CANDIDATES, []
    if gradient:
        op = WITH_GRADIENT
        fns = {name: functools.partial(with_gradient, fn) for name, fn in CANDIDATES.items()}
    for shape in shapes:
        raced = {"copy": "copy", **fns}
        frame = memtraffic.bench(raced, op, [shape], dtype=dtype, judge=True, budget=budget)
        frame.insert(frame.columns.get_loc("note"), "version", frame["impl"].map(version))
        [x] = op.arguments(shape, dtype).positional
        timed = frame.loc[frame["us"].notna() & (frame["impl"] != "copy"), "impl"]
        for column, most in MOST_CALLS.items():
            calls = max(1, round(min(most, ROUND_US / frame["us"].max())))
            runs = {name: functools.partial(repeat, fns[name], x, calls) for name in timed}
            samples = in_a_row(graphs(runs) if column == "graph_us" else runs, calls)
            for suffix in ("", "_p20", "_p80"):
                us = {name: summary(times, 0)["us" + suffix] for name, times in samples.items()}
                frame[column + suffix] = frame["impl"].map(us)
        frames.append(frame)
    whole = pd.concat(frames, ignore_index=True)
    return whole.fillna(dict.fromkeys(whole.columns.difference(["note"]), 0.0))


def version(name: str) -> str:
    """The version of the package that a candidate is of; "" if it is of none, or not here."""
    try:
        return importlib.metadata.version(PACKAGES[name])
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return ""


def repeat(fn: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> None:
    for _ in range(calls):
        fn(x)


def graphs(runs: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    """What replays each run as a CUDA graph, without those that cannot be captured."""
    found = {}
    for name, run in runs.items():
        try:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                run()
            found[name] = graph.replay
        except RuntimeError:
            torch.cuda.synchronize()
    return found


def in_a_row(runs: dict[str, Callable[[], None]], calls: int) -> dict[str, list[float]]:
    """The seconds of each call of a run, in interleaved rounds."""
    samples = {name: [] for name in runs}
    for name, run in [*runs.items()] * ROUNDS:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        samples[name].append((time.perf_counter() - start) / calls)
    return samples


# ---- the command


def draw(count: int, seed: str) -> list[tuple[int, int]]:
    """Rows and columns of `count` matrices: each size log-uniform, at most 2**30 elements."""
    chance, shapes = random.Random(seed), []
    while len(shapes) < count:
        m, n = (int(2 ** chance.uniform(0, 20)) for _ in range(2))
        if m * n <= 2**30:
            shapes.append((m, n))
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="*", type=lambda text: [*map(int, text.split("x"))])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--gradient", action="store_true")
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seed", default="")
    parser.add_argument("--csv", help="a file to write all times to")
    args = parser.parse_args()
    frame = decide([*args.shapes, *draw(args.drawn, args.seed)], args.dtype, args.gradient)
    if args.csv:
        frame.to_csv(args.csv, index=False)
    print(frame.to_string(index=False))
    for (m, n), raced in frame[frame["impl"] != "copy"].groupby(["m", "n"], sort=False):
        for column in ("us", *MOST_CALLS):
            print(f"{m} x {n}, by {column}: {choose(raced, column)}")


if __name__ == "__main__":
    main()
