"""Softmax of a matrix whose columns lie on several GPUs of a node: one kernel on each.

A program holds its GPU's columns of a row in registers, stores their maximum and sum in
the memory of each GPU, and waits for those of the others, while other programs load.

Traffic of a GPU that has N of the columns: reads MN, writes MN. Over the link it sends
and receives 2M(G - 1) words of 64 bits. Ends where a program no longer holds its columns:
32,768 on an H200.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from memtraffic.device import device_guard, planning_gpu
from memtraffic.kernels.chunking import (
    load_chunks,
    max_of_chunks,
    numerators,
    softmax_of_chunk,
    store_chunk,
)
from memtraffic.kernels.exchange import low_of
from memtraffic.kernels.launch import takes_ptx
from memtraffic.kernels.operands import check_operands
from memtraffic.kernels.softmax.split import LOWEST
from memtraffic.torch_adapter import symmetric_words

MAX_COLS = 32768
LOOKS = 2**27  # at a word that is not there yet: about a minute
# By the bytes of an element, from a sweep of `memtraffic.softmax` on an H200: the widest
# row, in columns, of each chunk and number of warps of 32 lanes.
TILES = {
    4: {8192: (512, 4), MAX_COLS: (2048, 16)},
    2: {16384: (1024, 4), MAX_COLS: (4096, 8)},
}


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
    y_ptr,  # packed
    x_ptr, x_row_stride, x_col_stride,
    boxes,  # of each rank, in its memory: (2, G, capacity, 2) words of 64 bits, 0 at first
    box_ptr,  # that of this rank
    state_ptr,  # of this rank: rows that started and ended, launches, the last that failed
    failed_ptr,  # becomes 1 if a rank does not come
    n_rows, n_cols,
    capacity,  # rows of a box, at least n_rows
    rank, looks,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.atomic_add(state_ptr, 1, sem="relaxed").to(tl.int64)
    launch = tl.load(state_ptr + 2) + 1
    looks = tl.where(tl.load(state_ptr + 3) == launch, 1, looks)  # a rank is gone
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    x_ptr += row * x_row_stride
    y_ptr += row * n_cols
    chunks = load_chunks(
        x_ptr, x_col_stride, cols, n_cols, -float("inf"), BLOCK, CHUNKS, WHOLE
    )
    part_max = tl.max(max_of_chunks(chunks, CHUNKS, STORED), axis=0)
    base = tl.maximum(part_max, LOWEST)  # or -inf - -inf in a part of -inf
    total, kept = numerators(chunks, base, CHUNKS, STORED, PTX)

    both = tl.arange(0, 2)
    numbers = tl.where(both == 0, part_max, tl.sum(total, axis=0))
    words = numbers.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    words |= launch.to(tl.int64) << 32
    first = (launch & 1) * RANKS  # the set of this launch
    for i in tl.static_range(RANKS):
        at = boxes[i] + 2 * ((first + rank) * capacity + row)
        tl.atomic_xchg(at + both, words, sem="relaxed", scope="sys")
    slots = tl.arange(0, SLOTS)  # (SLOTS,)
    used = slots < RANKS
    at = box_ptr + 2 * ((first + slots) * capacity + row)
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
        y = softmax_of_chunk(kept[i], base, scale, CHUNKS, STORED, PTX)
        store_chunk(y_ptr, 1, y, i, cols, n_cols, BLOCK, WHOLE)
    if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel") == n_rows - 1:
        tl.store(state_ptr + tl.arange(0, 2), 0)
        tl.store(state_ptr + 2, launch)


class Link:
    """What the ranks of a group write to one another: arguments of `linked_kernel`.

    All ranks of the group make one together, and it serves calls of up to `n_rows` rows
    while the group exists. Raises RuntimeError where PyTorch has no symmetric memory for
    the device, or a GPU no access to that of another.
    """

    def __init__(self, n_rows: int, device: torch.device, group: Any = None) -> None:
        self.capacity, self.rank = n_rows, dist.get_rank(group)
        words = 4 * dist.get_world_size(group) * n_rows
        self.owner, self.boxes = symmetric_words(words, device, group)
        self.state = torch.zeros(4, dtype=torch.int32, device=device)
        # Pinned, so that the host reads it without waiting.
        self.failed = torch.zeros(
            1, dtype=torch.int32, pin_memory=torch.cuda.is_available()
        )


def linked_softmax(x: Tensor, link: Link, looks: int = LOOKS) -> Tensor:
    """Softmax of the rows of which each rank has some columns, in one launch.

    x: this rank's columns, of shape (M, N), N to MAX_COLS, float32, float16 or bfloat16, of
    any strides. All ranks have the same M and the same dtype; N may differ, and be 0.
    Calls with one `link` are made in the same order on each rank, and on one stream; a CUDA
    graph that holds one is replayed in that order, and on that stream, too.

    Returns this rank's columns of the softmax, contiguous; NaN where another rank did not
    come, and then the next call raises RuntimeError. That is also raised for a tensor that
    requires a gradient, TypeError for another dtype or device, ValueError for another shape.
    """
    y, (n_rows, n_cols) = check_operands("linked", x, MAX_COLS), x.shape
    if n_rows > link.capacity:
        raise ValueError(f"linked: {n_rows} rows, and the link is for {link.capacity}")
    if link.failed.item():
        raise RuntimeError("linked: an earlier call gave NaN: a rank waited in vain")
    gpu, tiles = planning_gpu(x), TILES[x.element_size()]
    block, num_warps = next(tiles[widest] for widest in tiles if n_cols <= widest)
    with device_guard(x):
        linked_kernel[(n_rows,)](
            y, x, *x.stride(), link.boxes, link.boxes[link.rank], link.state, link.failed,
            n_rows, n_cols, link.capacity, link.rank, looks, RANKS=len(link.boxes),
            SLOTS=max(32 * num_warps, triton.next_power_of_2(len(link.boxes))),
            BLOCK=block, CHUNKS=max(1, triton.cdiv(n_cols, block)), WHOLE=n_cols // block,
            PTX=takes_ptx(gpu),
            num_warps=32 * num_warps // gpu.warp_size,
        )  # fmt: skip
    return y
