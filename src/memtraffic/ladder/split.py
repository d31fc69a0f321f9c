"""Row softmax of long rows: several programs share a row and tell each other its sum.

Traffic: reads MN, writes MN, and for each program two words per program of its row.
Ends where not all programs of a row fit the GPU at once.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtraffic import residency, runtime
from memtraffic.compile import loaded_resources
from memtraffic.gpus import planning_gpu
from memtraffic.ladder.call import Call
from memtraffic.ladder.launch import check_operands
from memtraffic.ladder.naive import reference
from memtraffic.ladder.tiling import MAX_ROW, VECTOR_BYTES, common_divisor
from memtraffic.triton_internals import compile_kernel

__all__ = ["collect", "publish", "reference", "softmax", "split_call", "split_kernel"]

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32


# ---- how programs tell each other a number
#
# The number and a tag share a word of 64 bits, which is written and read whole, so a
# reader that finds the tag has the number as well: no fence, no counter. A tag is the
# row's place in its group's order, from 1, and the slots are 0 before the launch.
#
# A group has two sets of slots, for rows in turn. A program writes into a set again two
# rows later. Before, it has seen the row between published by all programs, and each of
# them had read this set by then: so no number is overwritten that somebody still needs.
#
# A program that waits needs the others of its group to run. The launch is cooperative:
# the driver starts it only if all of its programs are resident at once.


@triton.jit
def publish(slot_ptr, value, tag):
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    word = (bits << 32) | tag.to(tl.int64)
    tl.atomic_xchg(slot_ptr, word, sem="relaxed")


@triton.jit
def collect(slots_ptr, n_parts, tag, SLOTS: tl.constexpr):
    slots = tl.arange(0, SLOTS)
    used = slots < n_parts
    words = tl.load(slots_ptr + slots, mask=used, other=tag, volatile=True)
    while tl.min(words.to(tl.int32), axis=0) < tag:
        words = tl.load(slots_ptr + slots, mask=used, other=tag, volatile=True)
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)  # 0 where not used


@triton.jit
def split_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    slots_ptr,
    n_rows, n_cols,
    n_parts, part_cols,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    n_cols = n_cols // ALIGN * ALIGN
    part_cols = part_cols // ALIGN * ALIGN
    x_row_stride = x_row_stride // ALIGN * ALIGN
    y_row_stride = y_row_stride // ALIGN * ALIGN
    group, part = tl.program_id(0) // n_parts, tl.program_id(0) % n_parts
    groups = tl.num_programs(0) // n_parts
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = (cols < part_cols) & (cols < n_cols - part * part_cols)
    cols = (part * part_cols + cols).to(tl.int64)
    x_ptr += cols * x_col_stride  # (BLOCK,)
    y_ptr += cols * y_col_stride
    row = group.to(tl.int64)
    tag = tl.program_id(0) * 0
    x = tl.load(x_ptr + row * x_row_stride, mask=mask, other=-float("inf"))
    while row < n_rows:
        x = x.to(tl.float32).to(STORED).to(tl.float32)  # as PyTorch does it first
        part_max = tl.max(x, axis=0)
        base = tl.maximum(part_max, LOWEST)  # or -inf - -inf in a part of -inf
        numerator = tl.exp(x - base)
        part_sum = tl.sum(numerator, axis=0)
        tag += 1
        slots = slots_ptr + (group * 2 + tag % 2) * 2 * n_parts
        publish(slots + part, part_max, tag)
        publish(slots + n_parts + part, part_sum, tag)
        # The next row is in flight while this program waits for the others.
        next_row = row + groups
        live = mask & (next_row < n_rows)
        x = tl.load(x_ptr + next_row * x_row_stride, mask=live, other=-float("inf"))
        maxima = collect(slots, n_parts, tag, SLOTS)
        sums = collect(slots + n_parts, n_parts, tag, SLOTS)
        maxima = tl.where(tl.arange(0, SLOTS) < n_parts, maxima, -float("inf"))
        row_max = tl.max(maxima, axis=0)
        row_sum = tl.sum(sums * tl.exp(maxima - row_max), axis=0)
        scale = tl.exp(part_max - row_max) / row_sum
        y = (numerator * scale).to(STORED)
        tl.store(y_ptr + row * y_row_stride, y, mask=mask)
        row = next_row


@dataclass(frozen=True)
class Split:
    """How rows are split: columns per program, programs of a row, and rows at once.

    part_cols: how many columns a program takes; the last one of a row may take fewer.
    """

    part_cols: int
    parts: int
    groups: int


def split_rows(
    n_rows: int, n_cols: int, itemsize: int, block: int, resident: int
) -> Split:
    """The `Split` of M x N over `resident` programs of at most `block` columns each.

    Raises ValueError where a row needs more programs than are resident.
    """
    parts = triton.cdiv(n_cols, block)
    if parts > resident:
        raise ValueError(
            f"a row of {n_cols} columns needs {parts} programs of {block}, and "
            f"{resident} fit the GPU at once"
        )
    vector = VECTOR_BYTES // itemsize
    part_cols = triton.cdiv(triton.cdiv(n_cols, parts), vector) * vector
    return Split(part_cols, parts, max(1, min(n_rows, resident // parts)))


def split_call(
    kernel: Any,
    arguments: tuple[Any, ...],
    n_rows: int,
    n_cols: int,
    *,
    block: int,
    align: int,
    num_warps: int,
) -> Call:
    """The launch of `kernel` that splits rows of `n_cols` columns over programs.

    kernel: its parameters are `arguments`, the slots, M, N, the parts of a row, their
    columns, SLOTS, BLOCK and ALIGN. Raises ValueError as `split_rows` does.
    """
    tensors = [it for it in arguments if isinstance(it, Tensor)]
    itemsize = min(tensor.element_size() for tensor in tensors)  # ALIGN is of this one
    parts, gpu = triton.cdiv(n_cols, block), planning_gpu(tensors[0])
    slots = torch.empty(2, dtype=torch.int64, device=tensors[0].device)
    # So many lanes look at the slots that no two warps read the same ones.
    lanes = max(triton.next_power_of_2(parts), gpu.warp_size * num_warps)
    constants = {"SLOTS": lanes, "BLOCK": block, "ALIGN": align}
    resident = gpu.num_sms
    if runtime.runs_on_gpu():
        options = {"num_warps": num_warps, "launch_cooperative_grid": True}
        example = (*arguments, slots, n_rows, n_cols, parts, block)
        compiled = compile_kernel(kernel, *example, **constants, **options)
        per_sm = residency.resident_programs(loaded_resources(compiled, gpu), gpu)
        resident = per_sm * gpu.num_sms
    split = split_rows(n_rows, n_cols, itemsize, block, resident)
    programs = split.groups * split.parts
    return Call(
        kernel,
        (programs, 1),
        (*arguments, slots, n_rows, n_cols, split.parts, split.part_cols),
        constants,
        num_warps=num_warps,
        slots=4 * programs,
    )


def softmax(
    x: Tensor,
    out: Tensor | None = None,
    *,
    block: int = 8192,
    num_warps: int = 8,
) -> Tensor:
    """Softmax of each row of `x`, a row by several programs. See book/long-rows.ipynb.

    x: tensor of shape (M, N), N to MAX_ROW, float32, float16 or bfloat16, of any
    strides, on a GPU or, interpreted, on the CPU. block: columns per program, a power
    of two. Returns `out`, or a new tensor of x's shape and dtype. Raises TypeError for
    another dtype or device, ValueError for another shape and for rows that need more
    programs than fit the GPU, RuntimeError for a tensor that requires a gradient.
    """
    y = check_operands("split", x, out, MAX_ROW)
    if x.numel():
        n_rows, n_cols = x.shape
        call = split_call(
            split_kernel, (y, *y.stride(), x, *x.stride()), n_rows, n_cols,
            block=block, align=common_divisor(x, y), num_warps=num_warps,
        )  # fmt: skip
        call(y, x)
    return y
