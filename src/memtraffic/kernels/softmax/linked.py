"""Softmax of a matrix whose columns lie on several GPUs of a node: one kernel on each.

A program holds its GPU's columns of a row in registers, stores their maximum and sum in
the memory of each GPU, and waits for those of the others, while other programs load.

Traffic of a GPU that has N of the columns: reads MN, writes MN. Over the link it sends
and receives 2M(G - 1) words of 64 bits. Ends where a program no longer holds its columns:
32,768 on an H200.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from memtraffic import device as runtime
from memtraffic.device import planning_gpu
from memtraffic.errors import RanksError
from memtraffic.gpus import Gpu
from memtraffic.kernels.chunking import (
    load_chunks,
    max_of_chunks,
    numerators,
    softmax_of_chunk,
    store_chunk,
)
from memtraffic.kernels.exchange import low_of
from memtraffic.kernels.launch import takes_ptx
from memtraffic.kernels.softmax.planning import Tile, row_tile
from memtraffic.kernels.softmax.split import LOWEST
from memtraffic.kernels.tiling import common_divisor
from memtraffic.torch_adapter import symmetric_words

NARROWEST = 2048  # columns; narrower parts are masked
LOOKS = 2**27  # at a word that is not there yet: about a minute


# A word holds a number, and in its upper half the launch that it belongs to, counted from
# 1. So nothing is reset, no fence orders anything, and a CUDA graph may be replayed. Two
# sets of words take turns: a rank writes a set again two launches later, when it has the
# words of the launch between, which the other ranks wrote after they had read that set.
#
# A program that waits needs that row's programs on the other GPUs to run. Each takes the
# next row when it starts, so on each GPU the rows start in their order. Take the first row
# that is not finished somewhere. A GPU where it has not started runs no program of a later
# row, so none that waits, and starts it as soon as other work leaves room. Programs publish
# before they wait: so this row ends. Only other kernels that wait for each other, and hold
# the GPU meanwhile, can prevent it; or a rank that does not come. Hence LOOKS: a program
# that has looked so often gives NaN, and those of its launch that start later look once.


@triton.jit
def await_words(at, used, launch, looks, PTX: tl.constexpr):
    # Words of this launch; others where none came in time.
    if PTX:
        # Each lane looks on its own. A loop in Triton would need a barrier per turn.
        return tl.inline_asm_elementwise(
            """{
            .reg .pred again;
            .reg .s32 looks, number, launch;
            mov.s32 looks, $2;
            mov.u64 $0, 0;
            setp.gt.s32 again, looks, 0;
            LOOK:
            @again ld.relaxed.sys.global.u64 $0, [$1];
            mov.b64 {number, launch}, $0;
            sub.s32 looks, looks, 1;
            setp.ne.and.s32 again, launch, $3, again;
            setp.gt.and.s32 again, looks, 0, again;
            @again bra LOOK;
            }""",
            "=&l,l,r,r",
            [at, tl.where(used, looks, 0), launch],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    words = tl.load(at, mask=used, other=0, volatile=True)
    left = tl.max(tl.where(used, looks, 0), axis=0)
    while (left > 1) & (tl.max(is_late(words, used, launch), axis=0) > 0):
        words = tl.load(at, mask=used, other=0, volatile=True)
        left -= 1
    return words


@triton.jit
def is_late(words, used, launch):
    return (used & ((words >> 32).to(tl.int32) != launch)).to(tl.int32)


@triton.jit
def linked_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    boxes,  # of each rank, in its memory: (2, G, capacity, 2) words of 64 bits, 0 at first
    state_ptr,  # of this rank: rows that started and ended, launches, the last that failed
    failed_ptr,  # becomes 1 if a rank does not come
    n_rows, n_cols,
    capacity,  # rows of a box, at least n_rows
    rank,
    looks,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    x_col_stride = tl.cast(x_col_stride, tl.int64)  # offsets outgrow int32
    y_col_stride = tl.cast(y_col_stride, tl.int64)
    row = tl.atomic_add(state_ptr, 1, sem="relaxed").to(tl.int64)
    launch = tl.load(state_ptr + 2) + 1
    looks = tl.where(tl.load(state_ptr + 3) == launch, 1, looks)  # a rank is gone
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    x_ptr += row * x_row_stride + cols * x_col_stride
    y_ptr += row * y_row_stride + cols * y_col_stride
    live = n_cols > 0
    chunks = load_chunks(
        x_ptr, x_col_stride, live, cols, n_cols, -float("inf"), BLOCK, CHUNKS, WHOLE
    )
    part_max = tl.max(max_of_chunks(chunks, CHUNKS, STORED, tl.float32), axis=0)
    base = tl.maximum(part_max, LOWEST)  # or -inf - -inf in a part of -inf
    total, kept = numerators(chunks, base, CHUNKS, STORED, tl.float32, PTX)

    both = tl.arange(0, 2)
    numbers = tl.where(both == 0, part_max, tl.sum(total, axis=0))
    words = numbers.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    words |= launch.to(tl.int64) << 32
    first = (launch & 1) * RANKS  # the set of this launch
    for i in tl.static_range(RANKS):
        at = boxes[i] + 2 * ((first + rank) * capacity + row)
        tl.atomic_xchg(at + both, words, sem="relaxed", scope="sys")
    mine = boxes[0]
    for i in tl.static_range(1, RANKS):
        if i == rank:
            mine = boxes[i]
    slots = tl.arange(0, SLOTS)  # (SLOTS,)
    used = slots < RANKS
    at = mine + 2 * ((first + slots) * capacity + row)
    max_words = await_words(at, used, launch, looks, PTX)
    late = is_late(max_words, used, launch)
    sum_words = await_words(at + 1, used, launch, tl.where(late > 0, 1, looks), PTX)
    late |= is_late(sum_words, used, launch)

    maxima = tl.where(used, low_of(max_words), -float("inf"))
    row_max = tl.max(maxima, axis=0)
    sums = tl.where(used, low_of(sum_words), 0)
    scale = tl.exp(part_max - row_max) / tl.sum(sums * tl.exp(maxima - row_max), axis=0)
    if tl.max(late, axis=0) > 0:
        tl.store(failed_ptr, 1)
        tl.store(state_ptr + 3, launch)
        scale = float("nan")
    for i in tl.static_range(CHUNKS):
        y = softmax_of_chunk(kept[i], base, scale, CHUNKS, STORED, tl.float32, PTX)
        store_chunk(y_ptr, y_col_stride, y, i, live, cols, n_cols, BLOCK, CHUNKS, WHOLE)
    if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel") == n_rows - 1:
        tl.store(state_ptr + tl.arange(0, 2), 0)
        tl.store(state_ptr + 2, launch)


@dataclass
class Link:
    """What the ranks of a group write to each other: arguments of `linked_kernel`.

    owner: of the memory of the boxes. stream: of the last launch.
    """

    capacity: int
    boxes: tuple[Tensor, ...]
    state: Tensor
    failed: Tensor
    owner: Any = field(repr=False, default=None)
    stream: Any = field(repr=False, default=None)


# None where the ranks found that they cannot have one.
_links: dict[tuple[Any, torch.device], Link | None] = {}


def has_failed(group: Any, device: torch.device) -> RanksError | None:
    """What is wrong with the `Link` of a group; None if nothing is, or there is no link."""
    link = _links.get((group, device))
    if link is None or not link.failed.item():
        return None
    return RanksError(
        "sharded softmax: in an earlier call, a rank waited for another in vain; the result "
        "of that call is NaN"
    )


def may_link(x: Tensor, n_cols: int, group: Any) -> bool:
    """Whether this rank, as far as it knows, can run `linked_kernel` on `n_cols` columns."""
    if (
        not x.is_cuda
        or x.dtype == torch.float64
        or _links.get((group, x.device), x) is None
    ):
        return False
    gpu = planning_gpu(x)
    tile = linked_tile(n_cols, x.element_size(), gpu)
    return takes_ptx(gpu) and n_cols >= NARROWEST and tile is not None


def link_of(group: Any, device: torch.device, n_rows: int) -> Link:
    """The `Link` of a group. It is made anew for more rows, by all of its ranks together.

    Raises RanksError where an earlier launch failed; and on each rank where one of them has
    no symmetric memory.
    """
    if problem := has_failed(group, device):
        raise problem
    link = _links.get((group, device))
    if link is None or link.capacity < n_rows:
        capacity, ranks = triton.next_power_of_2(n_rows), dist.get_world_size(group)
        try:
            owner, boxes = symmetric_words(4 * ranks * capacity, device, group)
        except (ImportError, RuntimeError) as error:
            problem = RanksError(str(error))
        fine = torch.tensor([problem is None], dtype=torch.int32, device=device)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=group)
        if not fine.item():
            _links[group, device] = None
            raise RanksError(
                f"sharded softmax: not all ranks have symmetric memory on {device.type}, so "
                f"ask for rung='collective': {problem or 'it is another rank'}"
            ) from problem
        state = torch.zeros(4, dtype=torch.int32, device=device)
        failed = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        link = _links[group, device] = Link(capacity, boxes, state, failed, owner)
    return link


def linked_tile(n_cols: int, itemsize: int, gpu: Gpu) -> Tile | None:
    """The tile of a program; None where it cannot hold so many columns.

    >>> from memtraffic.gpus import find_gpu
    >>> linked_tile(16384, 4, find_gpu("H200")), linked_tile(32769, 4, find_gpu("H200"))
    (Tile(rows=1, block=2048, chunks=8, num_warps=16), None)
    """
    return row_tile(max(n_cols, NARROWEST), itemsize, 1, gpu)


def _await_last(link: Link, x: Tensor) -> None:
    """Lets the current stream wait for the last launch, with which this one shares words."""
    if runtime.HAS_GPU and x.is_cuda and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(x.device)
        if link.stream not in (None, stream):
            stream.wait_stream(link.stream)
        link.stream = stream


def linked_softmax(x: Tensor, link: Link, rank: int, looks: int = LOOKS) -> Tensor:
    """This rank's columns of the softmax, in one launch.

    x: of shape (M, N), float32, float16 or bfloat16. Calls with one `link` are made in the
    same order on each rank; on another stream, one waits for the last. A CUDA graph that
    holds one is replayed in that order, too, and on the stream of the others. Raises
    ValueError for too many columns.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    (n_rows, n_cols), gpu = x.shape, planning_gpu(x)
    tile = linked_tile(n_cols, x.element_size(), gpu)
    if tile is None:
        raise ValueError(f"sharded softmax: one program cannot hold {n_cols} columns")
    lanes, ranks = tile.num_warps * gpu.warp_size, len(link.boxes)
    if n_rows:
        with runtime.device_guard(x):
            _await_last(link, x)
            linked_kernel[(n_rows,)](
                y, *y.stride(), x, *x.stride(), link.boxes, link.state, link.failed,
                n_rows, n_cols, link.capacity, rank, looks, RANKS=ranks,
                SLOTS=max(lanes, triton.next_power_of_2(ranks)), BLOCK=tile.block,
                CHUNKS=tile.chunks, WHOLE=n_cols // tile.block, ALIGN=common_divisor(x, y),
                PTX=takes_ptx(gpu), num_warps=tile.num_warps,
            )  # fmt: skip
    return y
