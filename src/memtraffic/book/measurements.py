"""The functions that measure the book's experiments; their arguments are numbers and labels.

A label names an implementation: a baseline, a rung, or one of `EXHIBITS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from memtraffic import benchmark, gpus, runtime
from memtraffic.names import import_function
from memtraffic.progress import progress
from memtraffic.tensors import matrix
from memtraffic.traffic import counters as hardware

if TYPE_CHECKING:
    from memtraffic.compile import Resources

# Named and not imported: the first chapters also work where Triton is not installed.
EXHIBITS = {
    "two blocks": "memtraffic.ladder.masked:softmax_two_blocks",
    "few warps": "memtraffic.book.exhibits:softmax_few_warps",
    "block of 512": "memtraffic.book.exhibits:softmax_block_of_512",
    "autotuned": "memtraffic.book.exhibits:softmax_autotuned",
    "uncached": "memtraffic.book.exhibits:softmax_uncached",
    "1 stage": "memtraffic.book.exhibits:softmax_1_stage",
    "2 stages": "memtraffic.book.exhibits:softmax_2_stages",
    "3 stages": "memtraffic.book.exhibits:softmax_3_stages",
}


def implementation(label: str) -> Callable[..., Any]:
    """The function that a label stands for, such as one in the column `impl` of an experiment.

    >>> implementation("naive").__module__
    'memtraffic.ladder.naive'

    Raises LookupError for a label that names nothing.
    """
    if label in EXHIBITS:
        return import_function(EXHIBITS[label])
    return benchmark.find_implementation(label)


def bench(impls: Sequence[str], shapes: Sequence[Sequence[int]], **options: Any) -> pd.DataFrame:
    """`benchmark.bench` of labels."""
    return benchmark.bench({label: implementation(label) for label in impls}, shapes, **options)


def bench_programs(
    impl: str, shape: Sequence[int], programs_per_sm: Sequence[float]
) -> pd.DataFrame:
    """`benchmark.bench_option` over the number of programs, given per SM of this GPU."""
    num_sms = gpus.this_gpu().num_sms
    programs = [int(num_sms * value) for value in programs_per_sm]
    return benchmark.bench_option(implementation(impl), [shape], "programs", programs)


def launch_overhead(impls: Sequence[str], shape: Sequence[int]) -> pd.DataFrame:
    """`benchmark.launch_overhead` of labels."""
    return benchmark.launch_overhead({label: implementation(label) for label in impls}, shape)


def autotune_cost(impl: str, tuned: str, shapes: Sequence[Sequence[int]]) -> pd.DataFrame:
    """`benchmark.autotune_cost` of labels."""
    return benchmark.autotune_cost(implementation(impl), implementation(tuned), shapes)


def counters(impl: str, shape: Sequence[int]) -> pd.DataFrame:
    """The hardware counters of the implementation with a label, `traffic.counters.counters`."""
    return hardware.counters(implementation(impl), tuple(shape))


def count_layouts(impl: str, shape: Sequence[int]) -> pd.DataFrame:
    """The hardware counters in each memory layout, `traffic.counters.count_layouts`."""
    return hardware.count_layouts(implementation(impl), tuple(shape))


def reach_far_row(row: int, row_stride: int) -> pd.DataFrame:
    """Whether kernels read the first element of a row whose offset does not fit 32 bits.

    Columns: `who`, a kernel with offsets of 64 or of 32 bits, and the masked softmax; `found`, 1 if
    it found what is there, otherwise 0. Needs 10 GB of GPU memory.
    """
    runtime.require_gpu("reach_far_row")
    from memtraffic.book.exhibits import _first_of_row_kernel
    from memtraffic.ladder import masked

    device = runtime.device()
    memory = torch.full((2 * 2**31 + 2**28,), -1, dtype=torch.int8, device=device)
    x, y = memory[2**31 :], torch.zeros(2, dtype=torch.int8, device=device)
    x[row * row_stride] = 7
    for i, long in enumerate((True, False)):
        _first_of_row_kernel[(1,)](y[i:], x, row, row_stride, LONG=long)
    z = torch.zeros(row + 1, row_stride, dtype=torch.float16, device=device)
    z[row, 0] = 100
    reached = masked.softmax(z, z)[row, 0].item() == 1
    found = [*(int(value == 7) for value in y.tolist()), int(reached)]
    return pd.DataFrame({"who": ["64 bits", "32 bits", "masked"], "found": found})


def pointer_latency(hops: int, distance: int) -> pd.DataFrame:
    """The latency of a load: the time of a chain of loads, each of which needs the one before it.

    hops: loads in the chain. distance: between their addresses, in elements of 8 bytes. Columns:
    `hops`; `us`, the median time of the kernel in microseconds; `latency_ns`, nanoseconds per load.
    """
    runtime.require_gpu("pointer_latency")
    from memtraffic.book.exhibits import _pointer_chase_kernel

    device = runtime.device()
    x = torch.zeros(hops + 2, distance, dtype=torch.int64, device=device)
    x[:, 0] = torch.arange(1, hops + 3, device=device) * distance
    y = torch.empty(1, dtype=torch.int64, device=device)
    [samples] = benchmark.time_interleaved([lambda: _pointer_chase_kernel[(1,)](y, x, hops)])
    us = statistics.median(samples) * 1e6
    return pd.DataFrame({"hops": [hops], "us": [us], "latency_ns": [us * 1e3 / hops]})


def launch_plans(m: int, ns: Sequence[int], dtype: str = "float32") -> pd.DataFrame:
    """What the launcher of `persistent` plans on this GPU, for m rows of several widths.

    Columns: `n`; `warps` and `stages` of a program; `registers` per thread and `shared_bytes` per
    program, of the compiled kernel; `resident`, programs per SM; `programs` launched.
    """
    runtime.require_gpu("launch_plans")
    from memtraffic.ladder import persistent

    rows = []
    for n in ns:
        x = matrix(m, n, dtype)
        plan = persistent.plan(x, x)
        shape = {"n": n, "warps": plan.tiling.num_warps, "stages": plan.tiling.stages}
        used = {"registers": plan.registers, "shared_bytes": plan.shared_bytes}
        grid = {"resident": plan.programs_per_sm, "programs": plan.programs}
        rows.append({**shape, **used, **grid})
    return pd.DataFrame(rows)


def compile_for_targets(
    targets: Iterable[str], ns: Iterable[int], num_warps: Iterable[int | None] = (None,)
) -> dict[tuple[str, int, int | None], Resources]:
    """The persistent kernel compiled for several targets, for float32 rows of several widths.

    num_warps: of a program; None is what the launcher chooses for that GPU. Returns the resources
    of each kernel by target, width and number of warps.
    """
    from memtraffic.compile import capture_launches, compile_launches
    from memtraffic.ladder import persistent

    keys, jobs = list(itertools.product(targets, ns, num_warps)), []
    for target, n, warps in keys:
        x = torch.empty(8, n, device=runtime.device())
        [launch] = capture_launches(persistent.softmax, x, gpu=gpus.find_gpu(target))
        options = launch.options | ({"num_warps": warps} if warps else {})
        jobs.append((dataclasses.replace(launch, options=options), target))
    return dict(zip(keys, compile_launches(jobs), strict=True))


def grid_sizes(ns: Sequence[int], num_warps: int) -> pd.DataFrame:
    """How many programs `persistent` launches on a GPU of each target, whichever GPU this is.

    Compiled by the Triton that is here, for rows of several widths. Columns: `target`, `gpu`, `n`;
    `resident`, programs per SM or compute unit; `processors`, how many of those; `programs` in all.
    """
    from memtraffic import residency

    kernels = compile_for_targets(gpus.TARGETS, ns, (num_warps,))
    rows = [{**residency.report(kernel), "n": n} for (_, n, _), kernel in kernels.items()]
    columns = ["target", "gpu", "n", "resident", "processors", "programs"]
    return pd.DataFrame(rows)[columns]


def compare_with_driver(m: int) -> pd.DataFrame:
    """Compares `residency.nvidia` with the CUDA driver's own calculator on this GPU: two rows.

    Both are asked about the persistent kernel for m rows of many widths in two types, with 1 to 32
    warps and 1 to 3 stages: as it is compiled, and with 32 other sizes of program and shared
    memory. Columns: `kernels`, which of the two; `asked`, the configurations compared; `equal`,
    those where both agree.
    """
    runtime.require_gpu("compare_with_driver")
    from memtraffic.ladder import persistent
    from memtraffic.residency import nvidia

    gpu = gpus.this_gpu()
    if not isinstance(gpu, gpus.NvidiaGpu):
        raise RuntimeError(f"compare_with_driver: {gpu.product} has no CUDA driver")
    equal: dict[str, list[bool]] = {"as compiled": [], "other sizes": []}
    widths, warps = [2**k for k in range(6, 16)], (1, 2, 4, 8, 16, 32)
    options = itertools.product(("float32", "bfloat16"), widths, warps, (1, 2, 3))
    for dtype, n, num_warps, num_stages in progress(options, "comparing"):
        x = matrix(m, n, dtype)
        try:
            plan = persistent.plan(x, x, num_warps=num_warps, num_stages=num_stages)
        except (ValueError, RuntimeError):
            continue  # more than a lane, or an SM, can hold
        assert plan.registers is not None and plan.shared_bytes is not None  # it is compiled
        sizes = [(num_warps, plan.shared_bytes)]
        sizes += [(other, 1237 * other * num_stages) for other in range(1, 33)]
        for i, (size, shared_bytes) in enumerate(sizes):
            ours = nvidia.resident_programs(plan.registers, shared_bytes, size, gpu)
            theirs = nvidia.driver_resident_programs(plan.kernel, size, shared_bytes)
            equal["other sizes" if i else "as compiled"].append(ours == theirs)
    rows = [(name, len(answers), sum(answers)) for name, answers in equal.items()]
    return pd.DataFrame(rows, columns=["kernels", "asked", "equal"])
