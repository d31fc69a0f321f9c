"""Times functions on a GPU, one beside the other, and turns times into bandwidth.

Bandwidth is always the *least* traffic over the time: a softmax must read and write each element once, 2 M N elements, and a
function that moves more is slower for it, not faster.
"""

import functools
import statistics

import pandas as pd
import torch

from memtraffic import machine
from memtraffic.ladder import naive, resolve
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
        if cold:
            flush.zero_()
        else:
            torch.cuda._sleep(200_000)  # cycles, about 100 µs
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

    names: keys of `PEERS`, rungs, or `module:function`. shapes: pairs (M, N). cold: overwrite L2 before each call.

    Columns: `impl`, `m`, `n`, `dtype`; `us`, `us_p20`, `us_p80`, the median and the 20th and 80th percentile in microseconds;
    `gb_per_s`, 2 M N elements over the median. Raises RuntimeError without a GPU; LookupError for an unknown name.
    """
    machine.require_gpu("bench")
    fns = {name: PEERS.get(name) or resolve(name) for name in names}
    rows = []
    for m, n in progress(shapes, "timing"):
        x = torch.randn(m, n, device=machine.device()).to(getattr(torch, dtype))
        times = seconds([functools.partial(fn, x) for fn in fns.values()], cold=cold)
        for name, samples in zip(fns, times, strict=True):
            rows.append(
                {"impl": name, "m": m, "n": n, "dtype": dtype}
                | summary(samples, 2 * x.numel() * x.element_size())
            )
    return pd.DataFrame(rows, columns=list(bench.columns))


bench.columns = ("impl", "m", "n", "dtype", "us", "us_p20", "us_p80", "gb_per_s")


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
