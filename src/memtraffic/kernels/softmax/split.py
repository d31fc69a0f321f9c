"""Row softmax of long rows: several programs share a row and tell each other its sum.

Traffic: reads MN + 2M, writes MN + 2M. That is of one program a row, which writes a
word and reads it; of P programs, each reads all words of its row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtraffic import device
from memtraffic.device import planning_gpu
from memtraffic.errors import MemtrafficError
from memtraffic.gpus import Gpu
from memtraffic.kernels.chunking import (
    at_columns,
    divisible,
    edges_of,
    exponential,
    load_chunks,
    load_columns,
    load_edges,
    max_of_chunks,
    numerators,
    round_up,
    softmax_of_chunk,
    store_chunk,
    whole_vectors,
    widen,
)
from memtraffic.kernels.exchange import first_missing, high_of, look, low_of, publish
from memtraffic.kernels.launch import Launch, cached, takes_ptx
from memtraffic.kernels.operands import (
    VECTOR_BYTES,
    check_operands,
    common_divisor,
    shifted_vector,
)
from memtraffic.kernels.softmax.rule import MAX_ROW, max_warps, tuned
from memtraffic.residency import loaded_resources, resident_programs
from memtraffic.triton_adapter.launch import compile_kernel

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
PART_LANES = 128


@triton.jit
def sums_of_part(
    x_ptr, x_col_stride, end, edge_ptrs, on_edge,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    # The maximum and the sum of a part, read twice to need few registers.
    cols = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, end, BLOCK):
        x = load_columns(x_ptr, x_col_stride, start + cols, end, -float("inf"))
        largest = tl.maximum(largest, widen(x, STORED))
    part_max = tl.max(largest, axis=0)
    if VECTOR > 1:
        edges = load_edges(edge_ptrs, on_edge, STORED)
        part_max = tl.maximum(part_max, tl.max(edges, axis=0))
    base = tl.maximum(part_max, LOWEST)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, end, BLOCK):
        x = load_columns(x_ptr, x_col_stride, start + cols, end, -float("inf"))
        total += exponential(widen(x, STORED), base, STORED)
    part_sum = tl.sum(total, axis=0)
    if VECTOR > 1:
        part_sum += tl.sum(exponential(edges, base, STORED), axis=0)
    return part_max, part_sum


@triton.jit
def scale_of_part(words, used, part_max):
    # What makes the numerators of a part the softmax of its row.
    maxima = tl.where(used, high_of(words), -float("inf"))
    row_max = tl.max(maxima, axis=0)
    row_sum = tl.sum(low_of(words) * tl.exp(maxima - row_max), axis=0)
    return tl.exp(part_max - row_max) / row_sum


@triton.jit
def split_kernel(
    y_ptr, y_row_stride, y_col_stride,
    x_ptr, x_row_stride, x_col_stride,
    slots_ptr,
    n_rows, n_cols,
    n_parts,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    LOOKS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = y_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK * CHUNKS
    n_cols = divisible(n_cols, ALIGN)
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    part = tl.program_id(0) % n_parts
    x_row = row * divisible(x_row_stride, ALIGN)
    y_row = row * divisible(y_row_stride, ALIGN)
    inner, x_edges, y_edges, on_edge = n_cols, x_ptr, y_ptr, part == 0
    if VECTOR > 1:
        _, inner = whole_vectors(x_row, n_cols, VECTOR)
        _, edge_col, on_edge = edges_of(0, x_row_stride, row, n_rows, n_cols, 1, VECTOR)
        x_edges += x_row + edge_col
        y_edges += y_row + edge_col
        x_row = round_up(x_row, VECTOR)
        y_row = round_up(y_row, VECTOR)
        own_edge = on_edge & (part == 0)  # the first part has those of the row
    x_ptr += x_row
    y_ptr += y_row
    cols = part * WIDTH + tl.arange(0, BLOCK)  # (BLOCK,), the part's first ones
    chunks = load_chunks(
        x_ptr, x_col_stride, cols, inner, -float("inf"), BLOCK, CHUNKS, 0
    )
    part_max = tl.max(max_of_chunks(chunks, CHUNKS, STORED), axis=0)
    if VECTOR > 1:
        edges = load_edges(x_edges, own_edge, STORED)
        part_max = tl.maximum(part_max, tl.max(edges, axis=0))
    base = tl.maximum(part_max, LOWEST)  # or -inf - -inf in a part of -inf
    total, kept = numerators(chunks, base, CHUNKS, STORED, PTX)
    part_sum = tl.sum(total, axis=0)
    if VECTOR > 1:
        edges = exponential(edges, base, STORED)
        part_sum += tl.sum(edges, axis=0)
    slots_ptr += row * n_parts
    publish(slots_ptr + part, part_max, part_sum)
    slots = tl.arange(0, SLOTS)
    used = slots < n_parts
    words = look(slots_ptr + slots, used, LOOKS, PTX)
    late = first_missing(words, used, SLOTS)
    if late == SLOTS:
        scale = scale_of_part(words, used, part_max)
        for i in tl.static_range(CHUNKS):
            y = softmax_of_chunk(kept[i], base, scale, CHUNKS, STORED, PTX)
            store_chunk(y_ptr, y_col_stride, y, i, cols, inner, BLOCK, 0)
    else:
        while late < SLOTS:
            end = tl.minimum(inner - late * WIDTH, WIDTH)
            late_max, late_sum = sums_of_part(
                at_columns(x_ptr, x_col_stride, late * WIDTH), x_col_stride, end,
                x_edges, on_edge & (late == 0), BLOCK, VECTOR, STORED,
            )  # fmt: skip
            publish(slots_ptr + late, late_max, late_sum)
            words = tl.load(slots_ptr + slots, mask=used, other=0, volatile=True)
            late = first_missing(words, used, SLOTS)
        # Each lane has the words here that it has above, and so adds in the same order.
        words = look(slots_ptr + slots, used, 1, PTX)
        scale = scale_of_part(words, used, part_max)
        for start in range(0, tl.minimum(inner - part * WIDTH, WIDTH), BLOCK):
            at = start + cols
            x = widen(load_columns(x_ptr, x_col_stride, at, inner, 0), STORED)
            y = (exponential(x, base, STORED) * scale).to(STORED)
            tl.store(at_columns(y_ptr, y_col_stride, at), y, mask=at < inner)
    if VECTOR > 1:
        tl.store(y_edges, (edges * scale).to(STORED), mask=own_edge)


class TooManyPrograms(MemtrafficError, ValueError):
    """A row needs more programs than fit the GPU at once."""


@dataclass(frozen=True)
class Split:
    """How a row is split: into `parts` programs of `chunks` times `block` columns.

    The lanes of a program load a block at once. The last program may have less to do.
    registers: of a lane, at most; an option of NVIDIA's GPUs.
    """

    parts: int
    chunks: int
    block: int
    num_warps: int
    registers: int | None = None


def split_row(
    n_cols: int, block: int, chunks: int, num_warps: int, registers: int | None = None
) -> Split:
    """The `Split` of a row into the fewest parts of at most `chunks` blocks each.

    >>> split_row(100_000, 1024, 8, num_warps=4)
    Split(parts=13, chunks=8, block=1024, num_warps=4, registers=None)
    """
    fewest = triton.cdiv(n_cols, block * chunks)
    chunks = triton.cdiv(n_cols, fewest * block)
    parts = triton.cdiv(n_cols, chunks * block)
    return Split(parts, chunks, block, num_warps, registers)


def best_split(
    n_cols: int, itemsize: int, inputs: int, align: int, vector: int, gpu: Gpu,
    n_rows: int = MAX_ROW,
) -> Split:  # fmt: skip
    """The `Split` that the op takes.

    itemsize: bytes of an element. inputs: tensors of which a program holds a part, 1 in
    the forward, 2 in the backward. align: elements that a lane can load at once. vector:
    see `shifted_vector`. n_rows: by default so many that any split fills the GPU.

    >>> from memtraffic.gpus import find_gpu
    >>> best_split(2**20, 4, 1, 4, 1, find_gpu("H200"))
    Split(parts=256, chunks=8, block=512, num_warps=4, registers=None)
    """
    widest, warps = VECTOR_BYTES // itemsize, PART_LANES // gpu.warp_size
    resident = tuned("parts_per_sm") * gpu.num_sms
    lane_bytes, registers = tuned("part_lane_bytes"), None
    # Whether a row fits the GPU at once, if a lane holds half of that.
    half = n_cols * itemsize <= resident * PART_LANES * lane_bytes // 2
    if itemsize == 2 and align >= widest:  # two numbers a register
        registers = tuned("part_registers")
    elif itemsize == 2 and vector > 1 and inputs == 1:
        lane_bytes = tuned("shifted_lane_bytes")
    elif max(align, vector) < widest or (inputs == 1 and half):
        # Each element needs an address in registers; or half is faster.
        lane_bytes //= 2
    while True:
        chunks = lane_bytes // VECTOR_BYTES // inputs
        split = split_row(n_cols, PART_LANES * widest, chunks, warps, registers)
        if n_rows * split.parts > resident or lane_bytes <= 32:
            return split
        lane_bytes, registers = lane_bytes // 2, None


# Words of 0 that no launch has been given yet, by GPU and number. They were zeroed on the default
# stream, for many launches at once: to zero those of each would be a launch of its own.
_supplies: dict[tuple[torch.device, int], list[tuple[int, Tensor]]] = {}
SUPPLY = 2**18  # words, 2 MiB


def words_of(n: int, gpu: torch.device) -> Callable[[int], tuple[int, Tensor]]:
    """A function that gives a launch `n` words of 0 and a few more: an address, and their memory.

    It takes the launch's stream. An address costs the host less than a tensor of its own.
    """
    size = max(4, 1 << (n - 1).bit_length())  # no two launches share a sector
    supply = _supplies.setdefault((gpu, size), [])
    own, pop = size > SUPPLY or not device.runs_on_gpu(), supply.pop

    def take(stream: int) -> tuple[int, Tensor]:
        if own or stream:
            words = torch.zeros(n, dtype=torch.int64, device=gpu)
            return words.data_ptr(), words
        # Not captured into a CUDA graph, whose second replay would find them written.
        try:
            return pop()
        except IndexError:
            words = torch.zeros(min(256 * size, SUPPLY), dtype=torch.int64, device=gpu)
            first, end = words.data_ptr(), words.data_ptr() + words.nbytes
            supply.extend((at, words) for at in range(first + 8 * size, end, 8 * size))
            return first, words

    return take


def split_launch(
    kernel: Any,
    arguments: tuple[Any, ...],
    n_rows: int,
    n_cols: int,
    split: Split,
    *,
    align: int,
    vector: int = 1,
    looks: int | None = None,
) -> Launch:
    """The launch of `kernel` that splits rows of `n_cols` columns over programs.

    kernel: its parameters are `arguments`, the slots, M, N, the parts of a row, SLOTS,
    BLOCK, CHUNKS, ALIGN, VECTOR, LOOKS and PTX. vector: see `shifted_vector`.
    looks: at words that are missing. Raises TooManyPrograms where those of a row do not
    fit the GPU at once.
    """
    [x, *_] = [it for it in arguments if isinstance(it, Tensor)]
    gpu = planning_gpu(x)
    slots = torch.empty(2, dtype=torch.int64, device=x.device)
    # So many lanes look at the slots that no two warps read the same ones.
    lanes = max(triton.next_power_of_2(split.parts), gpu.warp_size * split.num_warps)
    constants = {
        "SLOTS": lanes, "BLOCK": split.block, "CHUNKS": split.chunks,
        "ALIGN": align, "VECTOR": vector, "PTX": takes_ptx(gpu),
        "LOOKS": tuned("looks") if looks is None else looks,
    }  # fmt: skip
    arguments = (*arguments, slots, n_rows, n_cols, split.parts)
    options: dict[str, Any] = {"num_warps": split.num_warps}
    if split.registers and takes_ptx(gpu):
        options["maxnreg"] = split.registers
    resident = tuned("parts_per_sm") * gpu.num_sms
    if device.runs_on_gpu():
        compiled = compile_kernel(kernel, *arguments, **constants, **options)
        resident = gpu.num_sms * resident_programs(loaded_resources(compiled, gpu), gpu)
    else:  # to the interpreter the sign that programs run side by side, as on a GPU
        options["launch_cooperative_grid"] = True
    if split.parts > resident:
        raise TooManyPrograms(
            f"a row of {n_cols} columns needs {split.parts} programs of "
            f"{split.chunks * split.block}, and {resident} fit the GPU at once"
        )
    programs = n_rows * split.parts
    words = words_of(programs, x.device)
    return Launch(kernel, (programs,), arguments, constants, words, **options)


def softmax(
    x: Tensor,
    *,
    block: int | None = None,
    chunks: int | None = None,
    looks: int | None = None,
) -> Tensor:
    """Softmax of each row of `x`, a row by several programs. See book/long-rows.ipynb.

    x: tensor of shape (M, N), N to MAX_ROW, float32, float16 or bfloat16, of any
    strides, on a GPU or, interpreted, on the CPU. block, chunks, looks: as of `plan`.
    Returns a new tensor of x's shape and dtype. Raises TypeError for another dtype or
    device, ValueError for another shape and for rows that need more programs than fit
    the GPU, RuntimeError for a tensor that requires a gradient.
    """
    y = check_operands("split", x, MAX_ROW)
    if x.numel():
        with device.device_guard(x):
            plan(x, y, block=block, chunks=chunks, looks=looks)(y, x)
    return y


@cached
def plan(
    x: Tensor,
    y: Tensor,
    *,
    block: int | None = None,
    chunks: int | None = None,
    looks: int | None = None,
) -> Launch:
    """The launch of the softmax of `x` into `y`.

    block: columns that the lanes of a program load at once, a power of two. chunks:
    blocks per program, at most. Without either, the row is split as by `best_split`.
    looks: how often a program looks for the words of others before it computes them
    itself.
    """
    (n_rows, n_cols), gpu, align = x.shape, planning_gpu(x), common_divisor(x, y)
    # So wide that a row has a whole vector.
    vector = shifted_vector((y, x)) if n_cols > VECTOR_BYTES else 1
    if block is None and chunks is None:
        split = best_split(n_cols, x.element_size(), 1, align, vector, gpu)
    else:
        widest = VECTOR_BYTES // x.element_size()
        block = block or PART_LANES * widest
        warps = max(1, min(max_warps(gpu), block // widest // gpu.warp_size))
        split = split_row(n_cols, block, chunks or 8, warps)
    return split_launch(
        split_kernel, (y, *y.stride(), x, *x.stride()), n_rows, n_cols, split,
        align=align, vector=vector, looks=looks,
    )  # fmt: skip
