"""Variants of the kernels that exist to be shown or measured in one chapter, some of them wrong."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtraffic.gpus import planning_gpu
from memtraffic.ladder import masked, persistent, tiled
from memtraffic.ladder.launch import check_operands
from memtraffic.ladder.tiling import (
    MAX_COLS,
    MAX_ELEMENTS_PER_LANE,
    common_divisor,
    max_warps,
    num_warps_of_row,
)
from memtraffic.runtime import device_guard

# ---- masked: what padding costs, and what a wrong mask does


def softmax_few_warps(x: Tensor) -> Tensor:
    """`masked.softmax` of a padded row with the warps that a row of 8192 columns has."""
    y, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    with device_guard(x):
        masked._softmax_masked_kernel[(x.shape[0],)](
            y, *y.stride(), x, *x.stride(), x.shape[1],
            BLOCK=block, num_warps=num_warps_of_row(8192, planning_gpu(x)),
        )  # fmt: skip
    return y


@triton.jit
def _no_other_kernel(y_ptr, x_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + tl.program_id(0) * row_stride + cols, mask=mask)  # no other
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + tl.program_id(0) * row_stride + cols, y, mask=mask)


def softmax_no_other(x: Tensor, block: int | None = None) -> Tensor:
    """A masked softmax that is wrong: it does not say what a masked element loads.

    x: of packed rows. block: the width of a program's block, by default as wide as the row needs.
    """
    y, block = torch.empty_like(x), block or triton.next_power_of_2(x.shape[1])
    with device_guard(x):
        _no_other_kernel[(x.shape[0],)](y, x, x.stride(0), x.shape[1], BLOCK=block)
    return y


def softmax_block_of_512(x: Tensor) -> Tensor:
    """A softmax that is wrong for wide rows: it computes the first 512 columns alone."""
    return softmax_no_other(x, block=512)


@triton.jit
def _first_of_row_kernel(y_ptr, x_ptr, row, stride, LONG: tl.constexpr):
    row = row.to(tl.int64) if LONG else row
    tl.store(y_ptr, tl.load(x_ptr + row * stride))


# ---- tiled: the same kernel with an autotuner


@functools.cache
def autotuned_kernel():
    """The tiled kernel, which tries its configurations at each new width and keeps the fastest."""
    warps = (1, 2, 4, 8, 16, 32)
    configs = [triton.Config({"ROWS": r}, num_warps=w) for r in (1, 2, 4, 8) for w in warps]
    tuner = triton.autotune(
        configs,
        key=["n_cols", "BLOCK", "ALIGN"],
        prune_configs_by={"early_config_prune": _prune},
    )
    return tuner(tiled._softmax_tiled_kernel)


def _prune(configs, arguments, **constants):
    """The configurations that fit the GPU and leave no lane idle."""
    gpu = planning_gpu(arguments["x_ptr"])

    def fits(config):
        elements = config.kwargs["ROWS"] * constants["BLOCK"] / (config.num_warps * gpu.warp_size)
        return config.num_warps <= max_warps(gpu) and 1 <= elements <= MAX_ELEMENTS_PER_LANE

    return list(filter(fits, configs))


def softmax_autotuned(x: Tensor) -> Tensor:
    """`tiled.softmax` with options chosen by `triton.autotune`: the first call at a width measures.

    x: as for `tiled.softmax`, with at least 32 columns, so that no lane is idle. There is no `out`:
    a kernel that is tried many times must not overwrite what it reads. Raises as `tiled.softmax`
    does.
    """
    y = check_operands("autotuned", x, None, MAX_COLS)
    if x.shape[1] < 32:
        raise ValueError(f"autotuned: {x.shape[1]} columns, too few to tune for")
    if x.numel():
        with device_guard(x):
            autotuned_kernel()[lambda options: (triton.cdiv(x.shape[0], options["ROWS"]),)](
                y, *y.stride(), x, *x.stride(), *x.shape,
                BLOCK=triton.next_power_of_2(x.shape[1]), ALIGN=common_divisor(x, y),
            )  # fmt: skip
    return y


# ---- persistent: the number of stages, and what the cache of plans saves


def softmax_1_stage(x: Tensor) -> Tensor:
    """`persistent.softmax` with one stage: no tile is loaded ahead."""
    return persistent.softmax(x, num_stages=1)


def softmax_2_stages(x: Tensor) -> Tensor:
    """`persistent.softmax` with two stages."""
    return persistent.softmax(x, num_stages=2)


def softmax_3_stages(x: Tensor) -> Tensor:
    """`persistent.softmax` with three stages."""
    return persistent.softmax(x, num_stages=3)


def softmax_uncached(x: Tensor) -> Tensor:
    """`persistent.softmax`, which makes its plan anew at each call."""
    y = check_operands("uncached", x, None, MAX_COLS)
    if x.numel():
        with device_guard(x):
            persistent.launch(persistent.plan(x, y), y, x)
    return y


# ---- occupancy: loads that wait for one another


@triton.jit
def _pointer_chase_kernel(y_ptr, x_ptr, hops):
    at = tl.load(x_ptr)
    for _ in range(hops):
        at = tl.load(x_ptr + at)
    tl.store(y_ptr, at)
