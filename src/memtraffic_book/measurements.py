"""The functions that measure the book's experiments, and what the arguments of those name.

All but `compile_for_targets` need a GPU: `catalog.Experiment.run` asks for it.
"""

from __future__ import annotations

import functools
import itertools
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from memtraffic import benchmark, device, gpus, residency
from memtraffic.benchmark.baselines import copy
from memtraffic.compile import resources
from memtraffic.kernels.softmax import persistent
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.meters import counters as hardware
from memtraffic.names import OPS
from memtraffic.op import Op, find_op
from memtraffic.progress import progress
from memtraffic.tensors import MEMORY_LAYOUTS, matrix
from memtraffic_book import attention, exhibits

Impls = Mapping[str, Callable[..., Any]]
SLEEP_CYCLES = 10_000_000  # 5 ms, beside which a launch is nothing
DECIDE = Path(__file__).parents[2] / "examples" / "decide" / "decide.py"
# Programs per SM, warps and elements of a lane, with which a read has nearly all of the bandwidth.
FULL_SM = 8, 8, 4


def implementation(what: str | Mapping[str, Any]) -> Callable[..., Any]:
    """The function that an experiment's arguments name, with its options.

    >>> implementation("naive").__module__
    'memtraffic.kernels.softmax.naive'
    >>> implementation({"fn": "persistent", "num_stages": 1}).keywords
    {'num_stages': 1}

    what: a baseline, a rung or `module:function`; or a dict of that, under "fn", and
    options. Raises LookupError for a name that leads nowhere.
    """
    if isinstance(what, str):
        return benchmark.find_implementation(what)
    options = {name: value for name, value in what.items() if name != "fn"}
    return functools.partial(benchmark.find_implementation(what["fn"]), **options)


def implementations(impls: Sequence[str] | Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions of several labels; the labels of a list are names themselves."""
    named = impls if isinstance(impls, Mapping) else {name: name for name in impls}
    return {label: implementation(what) for label, what in named.items()}


def resolve(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an experiment as its function takes them: with functions for their names.

    >>> resolve({"fn": "naive", "shape": [4, 8]})["fn"] is implementation("naive")
    True
    """
    ways = {"fn": implementation, "impls": implementations}
    if arguments.get("inputs") in OPS:
        ways["inputs"] = find_op
    return {name: ways.get(name, lambda it: it)(value) for name, value in arguments.items()}


def _stacked(frames: Iterable[tuple[Mapping[str, Any], pd.DataFrame]]) -> pd.DataFrame:
    """Frames one below the other, each behind the columns that say of what it is."""
    whole = [pd.DataFrame({**key, **frame}) for key, frame in frames]
    return pd.concat(whole, ignore_index=True)


def bench_dtypes(dtypes: Sequence[str], **options: Any) -> pd.DataFrame:
    """`benchmark.bench` in several types, one after the other. Columns: its own."""
    return _stacked(({}, benchmark.bench(dtype=dtype, **options)) for dtype in dtypes)


def bench_repeats(impls: Impls, shapes: Sequence[Sequence[int]], repeats: int) -> pd.DataFrame:
    """`benchmark.bench`, all of it several times in a row: the spread within one run.

    Columns: `repeat`, counted from 1, and those of `bench`.
    """
    return _stacked(
        ({"repeat": repeat}, benchmark.bench(impls, None, shapes))
        for repeat in range(1, repeats + 1)
    )


def bench_layouts(
    fn: Callable[..., Any], shape: Sequence[int], *, dtype: str = "float32"
) -> pd.DataFrame:
    """`benchmark.bench` in each of the memory layouts in `tensors.MEMORY_LAYOUTS`.

    Columns: `layout`, and those of `bench` after `impl`.
    """
    return _stacked(
        ({"layout": layout}, benchmark.bench({"": fn}, None, [shape], dtype=dtype, layout=layout))
        for layout in MEMORY_LAYOUTS
    ).drop(columns="impl")


def bench_option(
    fn: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    option: str,
    values: Sequence[Any],
    *,
    dtype: str = "float32",
) -> pd.DataFrame:
    """`benchmark.bench` of several values of a keyword option, beside the fastest copy.

    Columns: one named after `option`; those of `bench` after `impl`; `copy_us`, the median time of
    the copy in microseconds. A value that `fn` refuses at some shape has no row there. Raises
    ValueError if `fn` takes none of them at any shape.
    """
    named = {str(value): value for value in values}
    fns = {name: functools.partial(fn, **{option: value}) for name, value in named.items()}
    frame = benchmark.bench(
        {"copy": copy, **fns}, SOFTMAX, shapes, dtype=dtype, budget=0.1, judge=True
    )
    frame = frame[frame["us"].notna()].drop(columns=["us_reversed", "note"])
    copied = frame[frame["impl"] == "copy"].set_index(["m", "n"])["us"].rename("copy_us")
    timed = frame[frame["impl"] != "copy"].rename(columns={"impl": option})
    if timed.empty:
        raise ValueError(f"bench_option: nothing takes {option} in {list(values)}")
    timed[option] = timed[option].map(named)
    return timed.join(copied, on=["m", "n"]).reset_index(drop=True)


def bench_programs(
    fn: Callable[..., Any], shape: Sequence[int], programs_per_sm: Sequence[float]
) -> pd.DataFrame:
    """`bench_option` over the number of programs, given per SM of this GPU."""
    num_sms = device.this_gpu().num_sms
    programs = [int(num_sms * value) for value in programs_per_sm]
    return bench_option(fn, [shape], "programs", programs)


def compare(
    impls: Impls,
    shapes: Sequence[Sequence[int]],
    inputs: Op | None = None,
    dtype: str = "float32",
    budget: float = 0.1,
) -> pd.DataFrame:
    """`benchmark.bench`, judged; where nothing was timed, times are 0, as CSV has no NaN."""
    frame = benchmark.bench(impls, inputs, shapes, dtype=dtype, judge=True, budget=budget)
    return frame.fillna(dict.fromkeys(frame.columns.difference(["note"]), 0.0))


def decide(shapes: Sequence[Sequence[int]], **options: Any) -> pd.DataFrame:
    """What `decide` of the example measures at several shapes."""
    measured: pd.DataFrame = runpy.run_path(str(DECIDE))["decide"](shapes, **options)
    return measured


def counters(impls: Impls, shape: Sequence[int], **options: Any) -> pd.DataFrame:
    """The hardware counters of one implementation; pages show it under its label."""
    [fn] = impls.values()
    return hardware.counters(fn, shape=tuple(shape), **options)


def count_cases(impls: Impls, cases: Sequence[tuple[str, Sequence[int]]]) -> pd.DataFrame:
    """The hardware counters of several implementations, each on a shape.

    cases: labels of `impls` and shapes. Columns: `impl`, `m`, `n`, and those of `counters`; a row
    for each kernel that ran.
    """
    return _stacked(
        ({"impl": label, "m": m, "n": n}, hardware.counters(impls[label], shape=(m, n)))
        for label, (m, n) in cases
    )


def count_layouts(fn: Callable[..., Any], shape: Sequence[int]) -> pd.DataFrame:
    """The hardware counters of one function for each memory layout of its input.

    Columns: `layout`, a key of `tensors.MEMORY_LAYOUTS`, and those of `counters`.
    """
    return _stacked(
        ({"layout": layout}, hardware.counters(fn, shape=tuple(shape), layout=layout))
        for layout in MEMORY_LAYOUTS
    )


def _timed(
    calls: Iterable[tuple[Mapping[str, Any], Callable[[], object]]], n_bytes: int, **options: Any
) -> list[dict[str, Any]]:
    """A row for each of several calls, timed beside one another: its key, its `summary`.

    n_bytes: that each call moves. options: of `benchmark.time_interleaved`.
    """
    keys, timed = zip(*calls, strict=True)
    samples = benchmark.time_interleaved(list(timed), **options)
    found = [benchmark.summary(times, n_bytes) for times in samples]
    return [{**key, **times} for key, times in zip(keys, found, strict=True)]


def arithmetic(trips: int) -> pd.DataFrame:
    """How fast this GPU computes in registers: exponentials, and multiply-adds of float32.

    trips: of the kernel's loop, each of 32 results that depend on one another. Every SM is full of
    warps, and each lane has 4 such chains. Columns: `what`; `sms`; `clock_ghz`, the clock of the
    SMs, from a kernel that waits for a number of cycles and is timed in the same rounds; `us`,
    `us_p20` and `us_p80`; `t_per_s`, 10**12 results per second; `per_clock`, results per SM and
    clock.
    """
    num_sms, steps, block = device.this_gpu().num_sms, 32, 1024
    programs = 24 * num_sms  # 8 or 6 are resident: whole rounds of either
    y = torch.empty(programs * block, device=device.default())

    def compute(what: str) -> None:
        exhibits._arithmetic_kernel[(programs,)](
            y, trips, WHAT=what, STEPS=steps, BLOCK=block, num_warps=8
        )

    wait = functools.partial(torch.cuda._sleep, SLEEP_CYCLES)
    kinds = ("exp2", "exp", "multiply-add")
    calls = [({"what": kind, "sms": num_sms}, functools.partial(compute, kind)) for kind in kinds]
    waited, *rows = _timed([({}, wait), *calls], y.numel() * steps * trips)
    clock = SLEEP_CYCLES / waited["us"] * 1e6
    frame = pd.DataFrame(rows)
    rate = frame.pop("gb_per_s") * 1e9  # of results, in place of bytes
    frame.insert(2, "clock_ghz", clock * 1e-9)
    return frame.assign(t_per_s=rate * 1e-12, per_clock=rate / num_sms / clock)


def bytes_in_flight(kib_per_sm: Sequence[int], gib: float) -> pd.DataFrame:
    """Bandwidth over the bytes that each SM has in flight, of a read and of a copy.

    A lane loads 16 bytes at a time; beyond 32 KiB, where an SM has no more lanes, twice 16. gib:
    the size of what is read, in GiB. Columns: `access`, `read` or `copy`; `kib_per_sm`, KiB that
    are being loaded at a time per SM; `sms`; `us`, `us_p20` and `us_p80`; `gb_per_s`, reads plus
    writes; `latency_ns`, how long a tile takes under this load, by Little's law: bytes in flight
    over bytes loaded per second.
    """
    ways = []
    for kib in kib_per_sm:
        warps, elements = min(8, 2 * kib), 4 if kib <= 32 else 8
        ways.append((256 * kib // (32 * warps * elements), warps, elements))
    frame = slots_in_flight(ways, gib)
    loaded = frame["gb_per_s"] / frame["access"].map({"read": 1, "copy": 2})
    frame["latency_ns"] = frame["flight_bytes"] * frame["sms"] / loaded
    frame.insert(1, "kib_per_sm", frame["flight_bytes"] // 1024)
    slots = ["programs", "warps", "slots", "load_bytes", "loads", "flight_bytes", "copy_gb_per_s"]
    return frame.drop(columns=slots)


def slots_in_flight(configurations: Iterable[Sequence[int]], gib: float) -> pd.DataFrame:
    """Bandwidth over the warp slots in use, and over what each lane loads before it waits.

    Persistent programs that all are resident, each of which loads its next tile when it has used
    the last one: the bytes in flight are those of their tiles. configurations: programs per SM,
    warps per program, and float32 elements that a lane loads before it uses one, with loads of at
    most 4 elements. gib: the size of what is read, in GiB. Columns: `access`,
    `read` or `copy`; `programs`, per SM; `warps`, per program; `slots`, of an SM, that are in use;
    `load_bytes`, of one load of a lane; `loads`, of a lane before it waits; `flight_bytes`, in
    flight per SM; `sms`; `us`, `us_p20` and `us_p80`; `gb_per_s`, reads plus writes;
    `copy_gb_per_s`, the fastest copy of the same memory.
    """
    x = torch.randn(int(gib * 2**28), device=device.default())
    y = torch.empty_like(x)
    calls: list[tuple[dict[str, Any], Callable[[], object]]] = [({}, benchmark.fastest_copy(x))]
    for access, (programs, warps, elements) in itertools.product(("read", "copy"), configurations):
        key = {
            "access": access,
            "programs": programs,
            "warps": warps,
            "slots": programs * warps,
            "load_bytes": 4 * min(elements, 4),
            "loads": max(1, elements // 4),
            "flight_bytes": 4 * 32 * programs * warps * elements,
            "sms": device.this_gpu().num_sms,
        }
        way = programs, warps, elements
        calls.append((key, functools.partial(_stream, y, x, *way, copy=access == "copy")))
    copied, *rows = _timed(calls, x.nbytes)
    frame = pd.DataFrame(rows)
    frame.loc[frame["access"] == "copy", "gb_per_s"] *= 2
    return frame.assign(copy_gb_per_s=2 * copied["gb_per_s"])


def _stream(y: Tensor, x: Tensor, programs: int, warps: int, elements: int, copy: bool) -> None:
    """Reads `x`, or copies it to `y`; each lane loads so many elements before it waits."""
    block = 32 * warps * elements
    n_tiles, rest = divmod(x.numel(), block)
    assert not rest
    exhibits._stream_kernel[(programs * device.this_gpu().num_sms,)](
        y, x, n_tiles, n_tiles if copy else 0, BLOCK=block, num_warps=warps
    )


def l2_read(mib: Sequence[float]) -> pd.DataFrame:
    """Bandwidth of a kernel that only reads, over the size of what it reads, with L2 cold and warm.

    mib: sizes in MiB. Columns: `cache`, `cold` or `warm`; `mib`; `us`, `us_p20` and `us_p80`;
    `gb_per_s`.
    """
    rows = []
    for cache, size in itertools.product(("cold", "warm"), mib):
        x = torch.randn(int(size * 2**18), device=device.default())
        call = functools.partial(_stream, x, x, *FULL_SM, copy=False)
        rows += _timed(
            [({"cache": cache, "mib": size}, call)], x.nbytes, cold=cache == "cold", budget=0.1
        )
    return pd.DataFrame(rows)


def idle_programs(programs: Sequence[int], warps: Sequence[int]) -> pd.DataFrame:
    """The time of programs that do nothing: what it costs to start them. Of 0 none is launched.

    Columns: `programs`; `warps`, of a program; `us`, `us_p20` and `us_p80`.
    """
    x = torch.zeros(1, device=device.default())

    def launch(programs: int, num_warps: int) -> None:
        if programs:
            exhibits._idle_kernel[(programs,)](x, num_warps=num_warps)

    keys = itertools.product(programs, warps)
    calls = [({"programs": n, "warps": w}, functools.partial(launch, n, w)) for n, w in keys]
    return pd.DataFrame(_timed(calls, 0)).drop(columns="gb_per_s")


def pointer_latency(hops: int, distance: int) -> pd.DataFrame:
    """The latency of a load: the time of a chain of loads, each of which needs the one before it.

    hops: loads in the chain. distance: between their addresses, in elements of 8 bytes. Columns:
    `hops`; `us`, the median time of the kernel in microseconds; `latency_ns`, nanoseconds per load.
    """
    here = device.default()
    x = torch.zeros(hops + 2, distance, dtype=torch.int64, device=here)
    x[:, 0] = torch.arange(1, hops + 3, device=here) * distance
    y = torch.empty(1, dtype=torch.int64, device=here)
    [row] = _timed([({}, lambda: exhibits._pointer_chase_kernel[(1,)](y, x, hops))], 0)
    us = row["us"]
    return pd.DataFrame({"hops": [hops], "us": [us], "latency_ns": [us * 1e3 / hops]})


def compile_for_targets(
    targets: Iterable[str], ns: Iterable[int], num_warps: Iterable[int]
) -> dict[tuple[str, int, int], residency.Resources]:
    """The persistent kernel compiled for several targets, float32 rows of widths, and warps.

    Returns the resources of each kernel by target, width and number of warps of a program.
    """
    return {
        (target, n, warps): resources(
            persistent.softmax, SOFTMAX, (8, n), target=target, num_warps=warps
        )[0]
        for target, n, warps in itertools.product(targets, ns, num_warps)
    }


def compare_with_driver(m: int) -> pd.DataFrame:
    """Compares `residency.nvidia` with the CUDA driver's own calculator on this GPU: two rows.

    Both are asked about the persistent kernel for m rows of many widths in two types, with 1 to 32
    warps and 1 to 3 stages: as it is compiled, and with 32 other sizes of program and shared
    memory. Columns: `kernels`, which of the two; `asked`, the configurations compared; `equal`,
    those where both agree.
    """
    from triton import OutOfResources

    gpu = device.this_gpu()
    assert isinstance(gpu, gpus.NvidiaGpu)  # the experiment needs one
    equal: dict[str, list[bool]] = {"as compiled": [], "other sizes": []}
    widths, warps = [2**k for k in range(6, 16)], (1, 2, 4, 8, 16, 32)
    options = itertools.product(("float32", "bfloat16"), widths, warps, (1, 2, 3))
    for dtype, n, num_warps, num_stages in progress(options, "comparing"):
        x = matrix(m, n, dtype)
        try:
            plan = persistent.plan(x, x, num_warps=num_warps, num_stages=num_stages)
        except (ValueError, RuntimeError, OutOfResources):
            continue  # more than a lane, or an SM, can hold
        used = residency.loaded_resources(plan.compiled, gpu)
        sizes = [(num_warps, used.shared_bytes)]
        sizes += [(other, 1237 * other * num_stages) for other in range(1, 33)]
        for i, (size, shared_bytes) in enumerate(sizes):
            limits = residency.nvidia.programs_by_limit(used.registers, shared_bytes, size, gpu)
            theirs = residency.nvidia.driver_resident_programs(plan.compiled, size, shared_bytes)
            equal["other sizes" if i else "as compiled"].append(min(limits.values()) == theirs)
    rows = [(name, len(answers), sum(answers)) for name, answers in equal.items()]
    return pd.DataFrame(rows, columns=["kernels", "asked", "equal"])


# ---- training, with one softmax and with another


def step_counters(softmaxes: Sequence[str], shape: Sequence[int]) -> pd.DataFrame:
    """The hardware counters of one step of training, added up over its kernels.

    softmaxes: keys of `attention.STEPS`. shape: batch, length and width. Columns: `softmax`;
    `kernels`, how many ran; the sums of the counters of `traffic.counters.counters`.
    """
    rows = []
    for name in softmaxes:
        frame = hardware.counters(attention.STEPS[name], "B,L,W", tuple(shape))
        sums = frame.drop(columns="kernel").sum().to_dict()
        rows.append({"softmax": name, "kernels": len(frame)} | sums)
    return pd.DataFrame(rows)
