"""Times functions on a GPU, one beside the other, and turns times into bandwidth.

Bandwidth is always the *least* traffic over the time: a softmax must read and write each element once, 2 M N elements, and a
function that moves more is slower for it, not faster.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from pathlib import Path

import pandas as pd
import torch

from memtraffic import machine
from memtraffic.ladder import naive, resolve
from memtraffic.matrices import LAYOUTS, matrix
from memtraffic.progress import progress

# Bytes a second from the vendors' datasheets, by the name the driver gives.
DATASHEET = {
    "NVIDIA H200": 4.8e12,  # https://www.nvidia.com/en-us/data-center/h200/
    "NVIDIA H100 80GB HBM3": 3.35e12,  # https://www.nvidia.com/en-us/data-center/h100/
    "NVIDIA A100-SXM4-80GB": 2.039e12,  # https://www.nvidia.com/en-us/data-center/a100/
    "NVIDIA L4": 0.3e12,  # https://www.nvidia.com/en-us/data-center/l4/
    "Tesla T4": 0.32e12,  # https://www.nvidia.com/en-us/data-center/tesla-t4/
}


def copy(x):
    """PyTorch's copy of `x`: reads and writes each element once."""
    return x.clone()


def torch_softmax(x):
    """PyTorch's own softmax of each row."""
    return torch.softmax(x, dim=1)


@functools.cache
def _script():
    return torch.jit.script(naive.softmax)


@functools.cache
def _compile(multi_kernel):
    import torch._dynamo

    # One compilation a shape, and an error, not a silent return to eager mode, should there
    # be too many of them. No cache on disk: a multi-kernel does not survive it.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    options = {"triton.multi_kernel": multi_kernel, "fx_graph_cache": False}
    return torch.compile(naive.softmax, dynamic=False, options=options)


def scripted(x):
    """The naive softmax through `torch.jit.script`."""
    return _script()(x)


def compiled(x):
    """The naive softmax through `torch.compile`."""
    return _compile(0)(x)


def compiled_kept(x):
    """The naive softmax through `torch.compile`, each row kept in registers.

    `triton.multi_kernel` has it build two kernels, and 3 has it take the second.
    """
    return _compile(3)(x)


PEERS = {
    "copy": copy,
    "torch.softmax": torch_softmax,
    "jit.script(naive)": scripted,
    "compile(naive)": compiled,
    "compile(kept)": compiled_kept,
}


def seconds(fns, cold=True, budget=0.3):
    """Times each of `fns`, functions of nothing, in turn and in the same rounds: a list of lists of seconds.

    cold: overwrite L2 before each call. If not, the data of the call before is still there.
    budget: about how many seconds of GPU time each function may take; at least 20 rounds are made.

    A call is timed by GPU events with the GPU kept busy before it, so the time to launch it is hidden unless it takes
    longer than that. Raises RuntimeError without a GPU.
    """
    machine.require_gpu("seconds")
    flush = torch.empty(
        max(256 * 2**20, 4 * machine.limits().l2_bytes),
        dtype=torch.int8,
        device=machine.device(),
    )

    def once(fn):
        torch.cuda._sleep(200_000)  # cycles, about 100 µs: the host gets ahead
        if cold:
            flush.zero_()
        start, end = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        start.record()
        fn()
        end.record()
        return start, end

    for fn in fns:
        for _ in range(3):
            once(fn)
    torch.cuda.synchronize()
    trial = [once(fn) for fn in fns]
    torch.cuda.synchronize()
    slowest = max(start.elapsed_time(end) for start, end in trial) * 1e-3
    rounds = max(20, min(500, int(budget / (slowest + 1e-4))))
    events = [[once(fn) for fn in fns] for _ in range(rounds)]
    torch.cuda.synchronize()
    return [
        [row[i][0].elapsed_time(row[i][1]) * 1e-3 for row in events]
        for i in range(len(fns))
    ]


def bench(names, shapes, dtype="float32", cold=True):
    """Times implementations of a row softmax at each of `shapes`: a DataFrame with a row for each shape and implementation.

    names: keys of `PEERS`, rungs, or `module:function`; or a dict of functions by name. shapes: pairs (M, N). cold: overwrite
    L2 before each call.

    Columns: `impl`, `m`, `n`, `dtype`; `us`, `us_p20`, `us_p80`, the median and the 20th and 80th percentile in microseconds;
    `gb_per_s`, 2 M N elements over the median. Raises RuntimeError without a GPU; LookupError for an unknown name.
    """
    machine.require_gpu("bench")
    fns = (
        names
        if isinstance(names, dict)
        else {name: PEERS.get(name) or resolve(name) for name in names}
    )
    rows = []
    for m, n in progress(shapes, "timing"):
        x = matrix(m, n, dtype)
        times = seconds([functools.partial(fn, x) for fn in fns.values()], cold=cold)
        for name, samples in zip(fns, times, strict=True):
            rows.append(
                {"impl": name, "m": m, "n": n, "dtype": dtype}
                | summary(samples, 2 * x.numel() * x.element_size())
            )
    return pd.DataFrame(rows, columns=list(bench.columns))


bench.columns = ("impl", "m", "n", "dtype", "us", "us_p20", "us_p80", "gb_per_s")


def sweep(name, shapes, option, values, dtype="float32"):
    """Times one softmax with each of `values` for its keyword `option`: the columns of `bench` and one named `value`.

    The rows with `impl` "copy" and `value` 0 are those of a copy. A value that the softmax refuses with a ValueError at a
    shape has no row there. Raises as `bench`.
    """
    machine.require_gpu("sweep")
    fn, rows = resolve(name), []
    for m, n in progress(shapes, "timing"):
        x = matrix(m, n, dtype)
        calls = {0: functools.partial(copy, x)}
        for value in values:
            call = functools.partial(fn, x, **{option: value})
            try:
                call()
            except ValueError:
                continue
            calls[value] = call
        times = seconds(calls.values(), budget=0.1)
        for value, samples in zip(calls, times, strict=True):
            rows.append(
                {"impl": name if value else "copy", "value": value}
                | {"m": m, "n": n, "dtype": dtype}
                | summary(samples, 2 * x.numel() * x.element_size())
            )
    return pd.DataFrame(rows, columns=list(sweep.columns))


sweep.columns = ("impl", "value", *bench.columns[1:])


def layouts(name, m, n, dtype="float32"):
    """Times one softmax on an m x n matrix laid out in each way there is: the columns of `bench`, with `layout` for `impl`.

    The layouts are the keys of `matrices.LAYOUTS`. Raises as `bench`.
    """
    machine.require_gpu("layouts")
    fn = resolve(name)
    inputs = [matrix(m, n, dtype, layout) for layout in LAYOUTS]
    times = seconds([functools.partial(fn, x) for x in inputs])
    rows = [
        {"layout": layout, "m": m, "n": n, "dtype": dtype}
        | summary(samples, 2 * x.numel() * x.element_size())
        for layout, x, samples in zip(LAYOUTS, inputs, times, strict=True)
    ]
    return pd.DataFrame(rows, columns=list(layouts.columns))


layouts.columns = ("layout", *bench.columns[1:])


def tuning(name, tuner, shapes, dtype="float32"):
    """What `triton.autotune` costs and brings: its first call at each of `shapes`, and its choice beside that of `name`.

    name, tuner: the same softmax, as it is and autotuned, rungs or `module:function`. Columns:
    `m`, `n`, `dtype`; `host_first_ms`, the first call in milliseconds on the clock of the host, compilation included; `us` and
    `tuned_us`, the medians of `name` and of the tuned kernel in microseconds. Raises as `bench`.
    """
    machine.require_gpu("tuning")
    fixed, tuned, rows = resolve(name), resolve(tuner), []
    for m, n in progress(shapes, "tuning"):
        x = matrix(m, n, dtype)
        torch.cuda.synchronize()
        start = time.perf_counter()
        tuned(x)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        calls = [functools.partial(fn, x) for fn in (fixed, tuned)]
        us, tuned_us = (statistics.median(samples) * 1e6 for samples in seconds(calls))
        rows.append(
            {"m": m, "n": n, "dtype": dtype}
            | {"host_first_ms": first * 1e3, "us": us, "tuned_us": tuned_us}
        )
    return pd.DataFrame(rows, columns=list(tuning.columns))


tuning.columns = ("m", "n", "dtype", "host_first_ms", "us", "tuned_us")


def host(names, m, n, dtype="float32", calls=300):
    """What a call costs the host before the GPU does anything: a DataFrame with a row for each of `names`, as in `bench`.

    Columns: `impl`, `m`, `n`, `dtype`; `host_us`, microseconds of the host's clock a call, the median of 20 rounds of
    `calls` calls each, with a matrix so small that the GPU keeps up. Raises as `bench`.
    """
    machine.require_gpu("host")
    fns = {name: PEERS.get(name) or resolve(name) for name in names}
    x = matrix(m, n, dtype)
    found = {name: [] for name in fns}
    for _ in progress(range(20), "timing"):
        for name, fn in fns.items():
            fn(x)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                fn(x)
            found[name].append((time.perf_counter() - start) / calls)
            torch.cuda.synchronize()
    rows = [
        {"impl": name, "m": m, "n": n, "dtype": dtype}
        | {"host_us": statistics.median(samples) * 1e6}
        for name, samples in found.items()
    ]
    return pd.DataFrame(rows, columns=list(host.columns))


host.columns = ("impl", "m", "n", "dtype", "host_us")


def plans(m, ns, dtype="float32"):
    """What the launcher of `persistent` finds on this GPU for m rows of each width in `ns`: a DataFrame.

    Columns: `n`; `warps`, `stages` of a program; `registers` a thread and `shared_bytes` a program, of the compiled kernel;
    `resident` programs an SM; `programs` launched. Raises RuntimeError without a GPU.
    """
    machine.require_gpu("plans")
    from memtraffic.ladder import persistent

    rows = []
    for n in ns:
        x = matrix(m, n, dtype)
        it = persistent.plan(x, x)
        shape = {"n": n, "warps": it.num_warps, "stages": it.constants["STAGES"]}
        used = {"registers": it.registers, "shared_bytes": it.shared_bytes}
        rows.append(shape | used | {"resident": it.resident, "programs": it.programs})
    return pd.DataFrame(rows, columns=list(plans.columns))


plans.columns = (
    "n",
    "warps",
    "stages",
    "registers",
    "shared_bytes",
    "resident",
    "programs",
)


def everywhere(targets, ns, warps=(None,)):
    """The persistent kernel compiled for GPUs that are not there: `Resources` by (target, width, number of warps).

    For float32 rows of each width in `ns`, as its launcher chooses for that GPU, with each of `warps` (None is its choice).
    """
    from memtraffic.ladder import persistent
    from memtraffic.targets import compile_launches, launches

    asked, jobs = list(itertools.product(targets, ns, warps)), []
    for target, n, num_warps in asked:
        x = torch.empty(8, n, device=machine.device())
        [launch] = launches(persistent.softmax, x, target=target)
        options = launch.options | ({"num_warps": num_warps} if num_warps else {})
        jobs.append((dataclasses.replace(launch, options=options), target))
    return dict(zip(asked, compile_launches(jobs), strict=True))


def grids(ns, num_warps):
    """How many programs `persistent` launches on a GPU of each kind, whichever GPU this is: a DataFrame.

    Compiled by the Triton that is here, `everywhere`, for rows of each width in `ns`. Columns: `target`, `gpu`, `n`;
    `resident` programs on one of its `processors`, `programs` in all.
    """
    from memtraffic import occupancy
    from memtraffic.targets import TARGETS

    rows = []
    for (_, n, _), kernel in everywhere(TARGETS, ns, (num_warps,)).items():
        found = occupancy.report(kernel) | {"n": n}
        rows.append({column: found[column] for column in grids.columns})
    return pd.DataFrame(rows, columns=list(grids.columns))


grids.columns = ("target", "gpu", "n", "resident", "processors", "programs")


def against_driver(m):
    """Holds `occupancy.nvidia` against the CUDA driver's own calculator, on this GPU: a DataFrame of two rows.

    Asked about the persistent kernel for m rows of many widths, in two types, with 1 to 32 warps and 1 to 3 stages: as it is
    compiled, and at 32 other sizes of program and shared memory. Columns: `kernels`, which of the two; `asked`, the number of
    questions; `equal`, how many had equal answers. Raises RuntimeError without a GPU.
    """
    machine.require_gpu("against_driver")
    from memtraffic.ladder import persistent
    from memtraffic.occupancy import nvidia

    sm = machine.limits()
    found = {"as compiled": [], "other sizes": []}
    widths, warps = [2**k for k in range(6, 16)], (1, 2, 4, 8, 16, 32)
    options = itertools.product(("float32", "bfloat16"), widths, warps, (1, 2, 3))
    for dtype, n, num_warps, num_stages in progress(list(options), "asking"):
        x = matrix(m, n, dtype)
        try:
            it = persistent.plan(x, x, num_warps, num_stages)
        except (ValueError, RuntimeError):
            continue  # more than a lane, or an SM, can hold
        sizes = [(num_warps, it.shared_bytes)]
        sizes += [(other, 1237 * other * num_stages) for other in range(1, 33)]
        for i, (size, shared) in enumerate(sizes):
            ours = nvidia.resident(it.registers, shared, size, sm)
            theirs = nvidia.driver(it.kernel, size, shared)
            found["other sizes" if i else "as compiled"].append(ours == theirs)
    rows = [(name, len(equal), sum(equal)) for name, equal in found.items()]
    return pd.DataFrame(rows, columns=list(against_driver.columns))


against_driver.columns = ("kernels", "asked", "equal")


def published():
    """The bandwidths that others printed for their softmax kernels: a DataFrame.

    Columns: `source`, `series`, `n_rows`, `n_cols`, `gb_per_s` (2 M N elements of float32 over the time). The sources are
    those of the chapter that shows them; which GPUs they ran on, most do not say.
    """
    return pd.read_csv(Path(__file__).with_name("published_bandwidth.csv"))


def summary(samples, n_bytes):
    """Median and percentiles of `samples` (seconds) in microseconds, and `n_bytes` over the median in GB/s."""
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    median = statistics.median(samples)
    return {
        "us": median * 1e6,
        "us_p20": fifths[0] * 1e6,
        "us_p80": fifths[-1] * 1e6,
        "gb_per_s": n_bytes / median * 1e-9,
    }


def roof():
    """The GPU's two roofs, measured: a DataFrame of one row. Raises RuntimeError without a GPU.

    Columns: `gpu`; `copy_gb_per_s`, a copy of 2 GiB, reads plus writes; `datasheet_gb_per_s`, 0 where it is not known;
    `fp32_tflop_per_s`, a float32 matrix product of 8192 cubed without TF32, at 2 operations a multiply-add; `l2_mib`.
    """
    machine.require_gpu("roof")
    a, b = (torch.randn(8192, 8192, device=machine.device()) for _ in range(2))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        [samples] = seconds([lambda: a @ b])
    finally:
        torch.set_float32_matmul_precision(precision)
    name = machine.gpu_name()
    row = {
        "gpu": name,
        "copy_gb_per_s": machine.copy_bandwidth(2**31) * 1e-9,
        "datasheet_gb_per_s": DATASHEET.get(name, 0) * 1e-9,
        "fp32_tflop_per_s": 2 * 8192**3 / statistics.median(samples) * 1e-12,
        "l2_mib": machine.limits().l2_bytes / 2**20,
    }
    return pd.DataFrame([row], columns=list(roof.columns))


roof.columns = (
    "gpu",
    "copy_gb_per_s",
    "datasheet_gb_per_s",
    "fp32_tflop_per_s",
    "l2_mib",
)
