"""The two roofs of a GPU, timed as kernels are: a copy and a matrix product."""

from __future__ import annotations

import functools
import statistics

import pandas as pd
import torch

from memtraffic import device
from memtraffic.benchmark.copying import fastest_copy
from memtraffic.benchmark.timing import time_interleaved


def copy_bandwidth(n_bytes: int = 2**30) -> float:
    """Bytes per second that a copy within the GPU's memory moves, reads plus writes.

    This is the roof of every kernel here. n_bytes: the size of what is copied, a multiple of 4. The
    copy is the fastest of several, `fastest_copy`, and its time the median of repeated
    calls.
    """
    source = torch.randn(n_bytes // 4, device=device.default())
    [samples] = time_interleaved([fastest_copy(source)])
    return 2 * source.nbytes / statistics.median(samples)


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations per second of a float32 matrix product of `size` cubed.

    A multiply-add counts as two operations; TF32 is off.
    """
    a, b = (torch.randn(size, size, device=device.default()) for _ in range(2))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        [samples] = time_interleaved([functools.partial(torch.matmul, a, b)])
    finally:
        torch.set_float32_matmul_precision(precision)
    return 2 * size**3 / statistics.median(samples)


def roof() -> pd.DataFrame:
    """The two roofs of this GPU, measured: one row.

    Columns: `gpu`; `copy_gb_per_s`, the fastest copy of 2 GiB, reads plus writes;
    `datasheet_gb_per_s`, 0 where it is unknown; `fp32_tflop_per_s`, a float32 matrix product;
    `l2_mib`, the size of L2. Raises RuntimeError without a GPU.
    """
    device.require_gpu("roof")
    gpu = device.this_gpu()
    row = {
        "gpu": device.gpu_name(),
        "copy_gb_per_s": copy_bandwidth(2**31) * 1e-9,
        "datasheet_gb_per_s": gpu.datasheet_bytes_per_s * 1e-9,
        "fp32_tflop_per_s": matmul_rate() * 1e-12,
        "l2_mib": gpu.l2_bytes / 2**20,
    }
    return pd.DataFrame([row])
