"""Softmax of a matrix whose columns lie on several ranks: two kernels and one collective.

`linked` has the other rung, one kernel, which `sharded_softmax` takes where all ranks can.
Here, each rank reduces its columns to a maximum and a sum per row, the ranks gather those of
all, and each normalises its own columns. N columns on G ranks:

Traffic of a rank: reads 2MN/G + 2MG, writes MN/G + 2M. The collective reads 2M numbers
of it and writes 2MG. Over the link, a rank sends and receives 2M(G - 1) numbers.
Backward: reads 4MN/G + M, writes MN/G + M, and all-reduces M numbers.
"""

import math
import platform
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from memtraffic import device as runtime
from memtraffic.device import planning_gpu
from memtraffic.errors import RanksError
from memtraffic.kernels.chunking import exponential
from memtraffic.kernels.operands import FLOATS, MAX_ROWS, accumulated
from memtraffic.kernels.softmax.linked import (
    Link,
    has_failed,
    link_of,
    linked_softmax,
    linked_tile,
    may_link,
)
from memtraffic.kernels.softmax.online import online_tile
from memtraffic.kernels.softmax.op import softmax
from memtraffic.kernels.softmax.rows import to_gradient
from memtraffic.kernels.tiling import MAX_ROW, common_divisor
from memtraffic.torch_adapter import all_gather

RUNGS = ("collective", "one kernel")


# ---- the kernels, a program a row


@triton.jit
def row_of(ptr, row_stride, ALIGN: tl.constexpr):
    # No value changes, but the compiler can now prove that ALIGN divides the stride.
    return ptr + tl.program_id(0).to(tl.int64) * (row_stride // ALIGN * ALIGN)


@triton.jit
def load_tile(ptr, col_stride, cols, n_cols, other, ACC: tl.constexpr):
    return tl.load(ptr + cols * col_stride, mask=cols < n_cols, other=other).to(ACC)


@triton.jit
def sums_kernel(
    sums_ptr,  # (M, 2), packed
    x_ptr, x_row_stride, x_col_stride,
    n_cols,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = x_ptr.dtype.element_ty
    ACC: tl.constexpr = sums_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    x_ptr = row_of(x_ptr, x_row_stride, ALIGN)
    block = tl.arange(0, BLOCK)  # (BLOCK,)
    part_max = tl.full((), -float("inf"), ACC)
    sums = tl.zeros((BLOCK,), ACC)  # added up once, after the loop
    for start in tl.range(0, n_cols, BLOCK):
        cols = (start + block).to(tl.int64)
        x = load_tile(x_ptr, x_col_stride, cols, n_cols, -float("inf"), ACC)
        new_max = tl.maximum(part_max, tl.max(x, axis=0))
        base = tl.where(new_max == -float("inf"), 0, new_max)  # or -inf - -inf
        sums = sums * tl.exp(part_max - base) + exponential(x, base, STORED)
        part_max = new_max
    sums_ptr += 2 * tl.program_id(0).to(tl.int64)
    tl.store(sums_ptr, part_max)
    tl.store(sums_ptr + 1, tl.sum(sums, axis=0))


@triton.jit
def normalise_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    all_sums_ptr,  # (G, M, 2), packed
    n_rows, n_cols,
    n_ranks,
    targets_ptr, slopes_ptr,  # (M,) each, packed, or None
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = all_sums_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    row = tl.program_id(0).to(tl.int64)
    x_ptr = row_of(x_ptr, x_row_stride, ALIGN)
    y_ptr = row_of(y_ptr, y_row_stride, ALIGN)
    ranks = tl.arange(0, RANKS)  # (RANKS,)
    at = all_sums_ptr + 2 * (ranks.to(tl.int64) * n_rows + row)
    maxima = tl.load(at, mask=ranks < n_ranks, other=-float("inf"))
    sums = tl.load(at + 1, mask=ranks < n_ranks, other=0)
    row_max = tl.max(maxima, axis=0)
    # Each sum as if it had been summed from the row's maximum.
    scale = 1 / tl.sum(sums * tl.exp(maxima - row_max), axis=0)
    if targets_ptr is not None:  # the gradient of the cross-entropy instead
        target = tl.load(targets_ptr + row)
        slope = tl.load(slopes_ptr + row)
    block = tl.arange(0, BLOCK)
    for start in tl.range(0, n_cols, BLOCK):
        cols = (start + block).to(tl.int64)
        x = load_tile(x_ptr, x_col_stride, cols, n_cols, 0, ACC)
        y = exponential(x, row_max, STORED) * scale
        if targets_ptr is not None:
            y = (y - (cols == target).to(ACC)) * slope
        tl.store(y_ptr + cols * y_col_stride, y.to(STORED), mask=cols < n_cols)


@triton.jit
def dots_kernel(
    dots_ptr,  # (M,), packed
    y_ptr, y_row_stride, y_col_stride,
    dy_ptr, dy_row_stride, dy_col_stride,
    n_cols,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = dots_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    y_ptr = row_of(y_ptr, y_row_stride, ALIGN)
    dy_ptr = row_of(dy_ptr, dy_row_stride, ALIGN)
    block = tl.arange(0, BLOCK)
    dots = tl.zeros((BLOCK,), ACC)
    for start in tl.range(0, n_cols, BLOCK):
        cols = (start + block).to(tl.int64)
        y = load_tile(y_ptr, y_col_stride, cols, n_cols, 0, ACC)
        dy = load_tile(dy_ptr, dy_col_stride, cols, n_cols, 0, ACC)
        dots += y * dy
    tl.store(dots_ptr + tl.program_id(0), tl.sum(dots, axis=0))


@triton.jit
def gradient_kernel(
    dx_ptr, dx_row_stride, dx_col_stride,
    y_ptr, y_row_stride, y_col_stride,
    dy_ptr, dy_row_stride, dy_col_stride,
    dots_ptr,  # (M,), packed: of whole rows
    n_cols,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    ACC: tl.constexpr = dots_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    dx_ptr = row_of(dx_ptr, dx_row_stride, ALIGN)
    y_ptr = row_of(y_ptr, y_row_stride, ALIGN)
    dy_ptr = row_of(dy_ptr, dy_row_stride, ALIGN)
    dot = tl.load(dots_ptr + tl.program_id(0))
    block = tl.arange(0, BLOCK)
    for start in tl.range(0, n_cols, BLOCK):
        cols = (start + block).to(tl.int64)
        y = load_tile(y_ptr, y_col_stride, cols, n_cols, 0, ACC)
        dy = load_tile(dy_ptr, dy_col_stride, cols, n_cols, 0, ACC)
        dx = to_gradient(y * (dy - dot), STORED, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + cols * dx_col_stride, dx, mask=cols < n_cols)


def _tile(x: Tensor, *others: Tensor) -> dict[str, int]:
    """The constants and options of a launch that goes through rows of `x` by tiles."""
    tile = online_tile(max(1, x.shape[1]), x.element_size(), planning_gpu(x))
    align = min(common_divisor(x, other) for other in (x, *others))
    return {"BLOCK": tile.block, "ALIGN": align, "num_warps": tile.num_warps}


def partial_sums(x: Tensor) -> Tensor:
    """The maximum of each row of `x` and the sum of its numerators, of shape (M, 2).

    A row without columns, or of -inf alone, has the maximum -inf and the sum 0.
    """
    sums = torch.empty(x.shape[0], 2, dtype=accumulated(x), device=x.device)
    if x.shape[0]:
        with runtime.device_guard(x):
            sums_kernel[(x.shape[0],)](sums, x, *x.stride(), x.shape[1], **_tile(x))
    return sums


def normalised(
    x: Tensor,
    all_sums: Tensor,
    targets: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """This rank's columns of the softmax, or of the gradient of the cross-entropy.

    all_sums: of each rank, of shape (G, M, 2). targets, slopes: the column of each row,
    among those of this rank, from which 1 is taken, and what the row is multiplied by.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        ranks = all_sums.shape[0]
        with runtime.device_guard(x):
            normalise_kernel[(x.shape[0],)](
                y, *y.stride(), x, *x.stride(), all_sums, *x.shape, ranks, targets, slopes,
                RANKS=triton.next_power_of_2(ranks), **_tile(x, y),
            )  # fmt: skip
    return y


# ---- what the ranks tell one another


@contextmanager
def _collective(name: str, group: Any) -> Iterator[None]:
    """Raises RanksError where a collective fails, with what another rank may have done."""
    try:
        yield
    except RuntimeError as error:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        raise RanksError(
            f"sharded softmax: the {name} of rank {rank} of {size} failed; has another "
            f"rank failed, stopped, or called something else? {error}"
        ) from error


def gathered(mine: Tensor, group: Any) -> Tensor:
    """`mine` of each rank, in the order of the ranks: one all-gather."""
    every = mine.new_empty(dist.get_world_size(group), *mine.shape)
    with _collective("all-gather", group):
        all_gather(every.view(-1), mine.view(-1), group)
    return every


def agree(
    x: Any, dim: int, group: Any, problem: Exception | None
) -> tuple[list[int], bool]:
    """How many columns each rank has, and whether all can run the one kernel.

    It is one all-gather of five numbers, which is waited for. problem: what is wrong with
    `x` here, which is raised after the others know of it. Raises RanksError on each rank
    where one refuses its part, or where the ranks have different dtypes or numbers of rows.
    """
    mine = [0, 0, 0, 0, 0]
    if problem is None:
        rows = math.prod(x.shape[: dim % x.dim()]) * math.prod(
            x.shape[dim % x.dim() + 1 :]
        )
        host = 1 + zlib.crc32(
            platform.node().encode()
        )  # GPUs of another are not linked
        host *= may_link(x, x.shape[dim], group)
        mine = [1, rows, x.shape[dim], FLOATS.index(x.dtype), host]
    device = x.device if isinstance(x, Tensor) else runtime.default()
    ranks = gathered(torch.tensor(mine, device=device), group).tolist()
    if problem is not None:
        raise problem
    here = dist.get_rank(group)
    for rank, (fine, rows, _, dtype, _) in enumerate(ranks):
        if not fine:
            raise RanksError(f"sharded softmax: rank {rank} refuses its part of x")
        if rows != mine[1] or dtype != mine[3]:
            raise RanksError(
                f"sharded softmax: rank {rank} has {rows} rows of {FLOATS[dtype]}, and "
                f"rank {here} has {mine[1]} of {x.dtype}"
            )
    _, _, widths, _, hosts = zip(*ranks, strict=True)
    return list(widths), hosts[0] > 0 and len(set(hosts)) == 1


class _Softmax(torch.autograd.Function):
    """Softmax of the rows of which each rank of a group has some columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, link: Link | None) -> Tensor:
        if link is None:
            y = normalised(x, gathered(partial_sums(x), group))
        else:
            y = linked_softmax(x, link, dist.get_rank(group))
        ctx.save_for_backward(y)
        ctx.group = group
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        [y] = ctx.saved_tensors
        dots = torch.empty(y.shape[0], dtype=accumulated(y), device=y.device)
        dx = torch.empty_like(y)
        tile = _tile(y, dy)
        with runtime.device_guard(y):
            if y.shape[0]:
                dots_kernel[(y.shape[0],)](
                    dots, y, *y.stride(), dy, *dy.stride(), y.shape[1], **tile
                )
            with _collective("all-reduce", ctx.group):
                dist.all_reduce(dots, group=ctx.group)
            if y.numel():
                gradient_kernel[(y.shape[0],)](
                    dx, *dx.stride(), y, *y.stride(), dy, *dy.stride(), dots,
                    y.shape[1], **tile,
                )  # fmt: skip
        return dx, None, None


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row; its gradient needs no collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, first: int, group: Any) -> Tensor:
        mine, sums = target - first, partial_sums(x)
        own = (mine >= 0) & (mine < x.shape[1])
        picked = sums.new_full(target.shape, -math.inf)
        if x.numel():
            at = mine.clamp(0, x.shape[1] - 1)[:, None]
            picked = torch.where(own, x.gather(1, at)[:, 0].to(sums.dtype), picked)
        every = gathered(torch.cat([sums, picked[:, None]], 1), group)  # (G, M, 3)
        maxima, totals, logits = every.unbind(2)
        row_max = maxima.amax(0)
        log_sum = row_max + (totals * (maxima - row_max).exp()).sum(0).log()
        ctx.save_for_backward(x, every[..., :2].contiguous(), mine, target < 0)
        return (log_sum - logits.amax(0)).masked_fill(target < 0, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None, None]:
        x, all_sums, mine, ignored = ctx.saved_tensors
        slopes = slopes.masked_fill(ignored, 0)
        return normalised(x, all_sums, mine, slopes), None, None, None


# ---- the operations


def _group_of(x: Any, dim: int) -> Any:
    """The group over whose ranks a DTensor is sharded along `dim`; None if it is not."""
    dim += x.dim() * (dim < 0)
    shards = [i for i, it in enumerate(x.placements) if it.is_shard(dim)]
    if len(shards) > 1 or any(it.is_partial() for it in x.placements):
        raise ValueError(
            f"sharded softmax: placements {x.placements}: at most one mesh dimension "
            f"shards dim {dim}, and none holds partial sums; redistribute x first"
        )
    return x.device_mesh.get_group(shards[0]) if shards else None


def _problem(
    x: Any, dim: int, shard_dim: int, rung: str | None = None
) -> Exception | None:
    """What is wrong with a shard, whatever the other ranks have."""
    what = "sharded softmax"
    if not isinstance(x, Tensor):
        return TypeError(f"{what}: x is a {type(x).__name__}, not a tensor")
    for it in (dim, shard_dim):
        if not -x.dim() <= it < x.dim():
            shape = f"a tensor of {x.dim()} dimensions {tuple(x.shape)}"
            return IndexError(f"{what}: dim {it} is out of range for {shape}")
    if x.dtype not in FLOATS:
        names = ", ".join(str(known).removeprefix("torch.") for known in FLOATS)
        return TypeError(f"{what}: {names}, not {x.dtype}")
    if not x.is_cuda and not runtime.INTERPRETED and not runtime.is_capturing():
        return TypeError(f"{what}: the tensor is on the {x.device.type}, not on a GPU")
    if x.shape[dim] > MAX_ROW:
        return ValueError(f"{what}: {x.shape[dim]} columns, more than {MAX_ROW}")
    rows = math.prod(x.shape) // max(1, x.shape[dim])
    if rows > MAX_ROWS:
        return ValueError(f"{what}: {rows} rows, more than {MAX_ROWS}")
    if rung not in (None, *RUNGS):
        return ValueError(f"{what}: rung {rung!r} is none of {RUNGS}")
    if rung == "one kernel" and (
        x.dtype == torch.float64
        or not linked_tile(x.shape[dim], x.element_size(), planning_gpu(x))
    ):
        return ValueError(
            f"{what}: one program cannot hold {x.shape[dim]} columns of {x.dtype}, so "
            "ask for rung='collective'"
        )
    return None


def _of_dtensor(x: Any, dim: int, **options: Any) -> Tensor:
    mine, group = x.to_local(), _group_of(x, dim)
    if group is None:
        y = softmax(mine, dim)
    else:
        y = sharded_softmax(mine, dim, group=group, **options)
    stride = torch.empty(x.shape, device="meta").stride()  # the result is contiguous
    every: Tensor = type(x).from_local(
        y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=stride
    )
    return every


def sharded_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    shard_dim: int | None = None,
    group: Any = None,
    run_check: bool = True,
    rung: str | None = None,
) -> Tensor:
    """Softmax along `dim` of a tensor of which each rank of a process group has a part.

    x: this rank's part, of float32, float16, bfloat16 or float64, on a GPU or, where
    kernels are interpreted, on the CPU; or a DTensor, which says how it is sharded, and
    then the result is one with the same placements. shard_dim: the dimension along which
    the parts lie one after the other in the order of the ranks, by default `dim`; they
    may differ in length, and may be empty. group: of `torch.distributed`, by default that of all.
    run_check: whether the ranks first tell one another their shapes and dtypes, which
    is one more collective, and wait for them. Without it, shapes that disagree may hang
    or give wrong numbers, as in `DTensor.from_local`. rung: "collective", or "one kernel",
    the same on each rank; by default the one kernel where all ranks say in that check that
    they can, and the collective elsewhere. Where the one kernel finds a rank gone, it gives
    NaN, and the next call raises.

    Returns this rank's part of the softmax, contiguous. Sharded along another dimension
    than `dim`, it is `memtraffic.softmax`, and nothing is sent. Autograd goes through it
    once. Each rank of the group has to call it, and to go backward through it.

    Raises TypeError, IndexError and ValueError for a part that no kernel takes, and
    RanksError where the ranks do not fit together, one refuses its part, or the
    collective fails because a rank has stopped or the group's time is out.
    """
    if hasattr(x, "device_mesh"):
        return _of_dtensor(x, dim, run_check=run_check, rung=rung)
    shard_dim = dim if shard_dim is None else shard_dim
    if not dist.is_initialized():
        raise RanksError(
            "sharded softmax: there is no process group: call it in `run_ranks`, or "
            "after `torch.distributed.init_process_group`"
        )
    if dist.get_rank(group) < 0:
        raise RanksError("sharded softmax: this rank is not in the group")
    problem = _problem(x, dim, shard_dim, rung)
    if problem is None and dim % x.dim() != shard_dim % x.dim():
        return softmax(x, dim)
    if problem is None and rung != "collective":
        problem = has_failed(group, x.device)
    linked = False
    if run_check:
        linked = agree(x, dim, group, problem)[1]
    elif problem is not None:
        raise problem
    last = x.movedim(dim, -1)
    rows = last.reshape(math.prod(last.shape[:-1]), last.shape[-1])
    link = None
    if rung == "one kernel" or (rung is None and linked):
        try:
            link = link_of(group, x.device, rows.shape[0])
        except RanksError:  # on all ranks
            if rung is not None:
                raise
    return (
        _Softmax.apply(rows, group, link).view(last.shape).movedim(-1, dim).contiguous()
    )


def sharded_cross_entropy(
    x: Tensor, target: Tensor, *, group: Any = None, first: int | None = None
) -> Tensor:
    """The cross-entropy of each row of logits of which each rank has some columns.

    x: this rank's columns, of shape (M, N), as `sharded_softmax` takes them, or a
    DTensor. target: columns of the whole matrix, int64, of shape (M,), the same on each
    rank; a row whose target is negative has the loss 0, and one whose target no rank
    has, inf. first: the number of this rank's first column; by default the ranks tell
    one another, as with `run_check` in `sharded_softmax`.

    Returns the M losses on each rank, in float32, or float64 if x is. Autograd goes
    through it once, without a collective. Traffic of a rank: reads MN/G, writes M;
    backward reads MN/G, writes MN/G. Over the link, 3M(G - 1) numbers. Raises what
    `sharded_softmax` raises.
    """
    if hasattr(x, "device_mesh"):
        whole: Any = x
        x, group = whole.to_local(), _group_of(whole, 1)
        if group is None:
            raise ValueError("sharded cross-entropy: the columns are not sharded")
    problem = _problem(x, -1, -1)
    if problem is None and (x.dim() != 2 or target.shape != x.shape[:1]):
        shapes = f"{tuple(x.shape)} and {tuple(target.shape)}"
        problem = ValueError(f"sharded cross-entropy: (M, N) and (M,), not {shapes}")
    if first is None:
        widths, _ = agree(x, -1, group, problem)
        first = sum(widths[: dist.get_rank(group)])
    elif problem is not None:
        raise problem
    return _CrossEntropy.apply(x, target, first, group)
