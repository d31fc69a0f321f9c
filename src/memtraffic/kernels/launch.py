"""What launchers share: checks of their operands, plans, and a cache of plans."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from memtraffic import runtime
from memtraffic.gpus import Gpu
from memtraffic.kernels.tiling import Tiling
from memtraffic.residency import loaded_resources, resident_programs
from memtraffic.tensors import span
from memtraffic.triton_adapter.launch import (
    compile_kernel,
    launch_compiled,
    shared_bytes,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROWS = 2**30  # the number of a row, rounded up to a tile, stays within 32 bits
INTERPRETED_PROGRAMS = 4  # where no GPU says how many fit: enough to see them stride
CACHE_SIZE = 4096  # plans


def check_operands(rung: str, x: Tensor, out: Tensor | None, max_cols: int) -> Tensor:
    """The tensor that a softmax of `x` is written to: `out`, or a new one like `x`.

    Raises TypeError for anything but a dense tensor whose memory holds its values
    (`z.conj().imag` is negated when it is read), and for a dtype or a device that
    `rung` cannot take; RuntimeError for a tensor that requires a gradient; ValueError
    for a shape that it cannot take, and for an `out` that has another shape, repeats
    its elements, or overlaps a part of `x`. The messages repeat the numbers.
    """
    _check_dense(rung, "x", x)
    if out is not None:
        _check_dense(rung, "out", out)
    if x.dtype not in DTYPES:
        raise TypeError(f"{rung}: float32, float16 or bfloat16, not {x.dtype}")
    if not x.is_cuda and runtime.HAS_GPU and not runtime.INTERPRETED:
        raise TypeError(f"{rung}: the tensor is on the {x.device.type}, not on a GPU")
    requires_grad = x.requires_grad or (out is not None and out.requires_grad)
    if requires_grad and torch.is_grad_enabled():
        name = "x" if x.requires_grad else "out"
        raise RuntimeError(
            f"{rung}: {name} requires a gradient, and there is no backward here: "
            "detach it, or call this under torch.no_grad()"
        )
    if x.dim() != 2:
        raise ValueError(f"{rung}: 2 dimensions, not {x.dim()}: {tuple(x.shape)}")
    n_rows, n_cols = x.shape
    if n_cols > max_cols:
        raise ValueError(f"{rung}: {n_cols} columns, more than {max_cols}")
    if n_rows > MAX_ROWS:
        raise ValueError(f"{rung}: {n_rows} rows, more than {MAX_ROWS}")
    if out is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.dtype != x.dtype or out.device != x.device:
        raise TypeError(
            f"{rung}: out is {out.dtype} on {out.device}, not {x.dtype} on {x.device}"
        )
    if out.shape != x.shape:
        raise ValueError(f"{rung}: out is {tuple(out.shape)}, not {tuple(x.shape)}")
    if has_internal_overlap(out):
        raise ValueError(
            f"{rung}: out repeats its elements: its strides are {out.stride()}"
        )
    if partially_overlaps(out, x):
        apart = out.data_ptr() - x.data_ptr()
        raise ValueError(
            f"{rung}: out starts {apart} bytes after x, and overlaps a part of it"
        )
    increment_version(out)  # autograd may have saved what is about to be overwritten
    return out


def _check_dense(rung: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{rung}: {name} is a {type(x).__name__}, not a tensor")
    if x.layout is not torch.strided or x.is_meta:
        kind = "meta" if x.is_meta else str(x.layout)
        raise TypeError(f"{rung}: {name} is a {kind} tensor: a dense one is needed")
    if x.is_neg():
        raise TypeError(
            f"{rung}: {name} is negated when it is read: pass {name}.resolve_neg()"
        )


def has_internal_overlap(matrix: Tensor) -> bool:
    """Whether two elements of `matrix` have the same address."""
    (m, n), (row_stride, col_stride) = matrix.shape, matrix.stride()
    if m < 2 or n < 2:
        return m * n > 1 and (row_stride if m > 1 else col_stride) == 0
    # So many rows down are as far as so many columns back.
    step = math.gcd(row_stride, col_stride)
    return step == 0 or (col_stride // step < m and row_stride // step < n)


def partially_overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b`, of equal shape, share memory without being the same view.

    Only checked for dense tensors; False where one of them has gaps.
    """
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return False
    apart = abs(a.data_ptr() - b.data_ptr())
    dense = all(span(x) == x.numel() for x in (a, b))
    return dense and apart < a.numel() * a.element_size()


@dataclass(frozen=True)
class Plan:
    """How to run a persistent kernel: its tiling, its grid, and the compiled kernel.

    programs: in all. kernel: None where kernels are interpreted or captured; then the
    fields after it are None, too. registers: per thread. shared_bytes: per program.
    programs_per_sm: how many an SM, or a compute unit, holds at once.
    """

    tiling: Tiling
    programs: int
    kernel: Any = None
    registers: int | None = None
    shared_bytes: int | None = None
    programs_per_sm: int | None = None


def plan_resident(
    kernel: Any,
    arguments: tuple[Any, ...],
    tiling: Tiling,
    n_tiles: int,
    gpu: Gpu,
    *,
    min_stages: int = 1,
    programs: int | None = None,
) -> Plan:
    """The plan that launches as many programs as `gpu` holds at once.

    kernel: a Triton kernel whose parameters are `arguments`, then ROWS, BLOCK, ALIGN
    and STAGES. If it needs more shared memory than a program may have, it is compiled
    again with one stage less, down to `min_stages`. programs: instead of what fits.

    Raises RuntimeError where a program needs too much shared memory, and where not a
    single one fits an SM.
    """
    if not runtime.runs_on_gpu():
        return Plan(tiling, min(n_tiles, programs or INTERPRETED_PROGRAMS))
    options = {"num_warps": tiling.num_warps}
    compiled = compile_kernel(kernel, *arguments, *tiling.constants, **options)
    while (shared := shared_bytes(compiled)) > gpu.shared_per_program:
        if tiling.stages <= min_stages:
            raise RuntimeError(
                f"{kernel.__name__}: a program needs {shared} bytes of shared memory, "
                f"{gpu.product} has {gpu.shared_per_program}"
            )
        tiling = replace(tiling, stages=tiling.stages - 1)
        compiled = compile_kernel(kernel, *arguments, *tiling.constants, **options)
    used = loaded_resources(compiled, gpu)
    per_sm = resident_programs(used, gpu)
    if per_sm < 1:
        raise RuntimeError(
            f"{kernel.__name__}: {tiling.num_warps} warps of {used.registers} "
            f"registers do not fit an SM of {gpu.product}"
        )
    programs = min(n_tiles, programs or gpu.num_sms * per_sm)
    return Plan(tiling, programs, compiled, used.registers, shared, per_sm)


@dataclass
class _Entry:
    plan: Plan
    last_use: int


_plans: dict[tuple[Any, ...], _Entry] = {}
_uses = itertools.count()


def cached_plan(
    make_plan: Callable[..., Plan], x: Tensor, y: Tensor, **options: int | None
) -> Plan:
    """`make_plan(x, y, **options)`, or the plan of an earlier call like this one.

    The key holds everything that a compiled kernel depends on, so that a call costs one
    look-up. The cache keeps the CACHE_SIZE plans that were used last.
    """
    key = (
        make_plan, runtime.runs_on_gpu() or runtime.captured_gpu(),
        x.device, x.dtype, x.shape, x.stride(), y.stride(),
        x.data_ptr() % 16, y.data_ptr() % 16, *options.values(),
    )  # fmt: skip
    entry = _plans.get(key)
    if entry is None:
        if len(_plans) >= CACHE_SIZE:
            oldest, _ = min(list(_plans.items()), key=lambda item: item[1].last_use)
            _plans.pop(oldest, None)
        entry = _plans[key] = _Entry(make_plan(x, y, **options), 0)
    entry.last_use = next(_uses)
    return entry.plan


def launch_plan(plan: Plan, kernel: Any, *arguments: Any) -> None:
    """Run `kernel`, which `plan` was made for, on these arguments.

    A compiled kernel is started directly: Triton would look at each argument again,
    which takes longer than a small matrix.
    """
    arguments += plan.tiling.constants
    if plan.kernel is None:
        kernel[(plan.programs,)](*arguments, num_warps=plan.tiling.num_warps)
    else:
        launch_compiled(plan.kernel, plan.programs, *arguments)
