"""Kernels and functions whose traffic is known beforehand, for tests of the meters."""

import torch
import triton
import triton.language as tl

HAS_BLOCK_POINTERS = hasattr(tl, "make_block_ptr")
HAS_DESCRIPTORS = hasattr(tl, "make_tensor_descriptor")


@triton.jit
def _masked_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, STORED: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols)
    tl.store(y_ptr + row * n_cols + cols, x, mask=cols < STORED)


@triton.jit
def _unmasked_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr):
    block = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
    offsets = tl.program_id(0) * n_cols + block * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def _strided_kernel(y_ptr, x_ptr, x_col_stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols * x_col_stride))


@triton.jit
def _twice_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    row_max = tl.max(tl.load(x_ptr + row * n_cols + cols, mask=mask, other=-float("inf")), axis=0)
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask)
    tl.store(y_ptr + row * n_cols + cols, x - row_max, mask=mask)


@triton.jit
def _numerator(x, row_max):
    return tl.exp(x - row_max)


@triton.jit
def _three_passes_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * n_cols
    y_ptr += row * n_cols
    row_max = tl.full((), -float("inf"), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        row_max = tl.maximum(
            row_max,
            tl.max(tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf")), axis=0),
        )
    denominator = tl.zeros((), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        denominator += tl.sum(_numerator(x, row_max), axis=0)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        tl.store(y_ptr + cols, _numerator(x, row_max) / denominator, mask=cols < n_cols)


@triton.jit
def _block_pointer_kernel(y_ptr, x_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_block = tl.make_block_ptr(x_ptr, (n_rows, n_cols), (n_cols, 1), (row, 0), (1, BLOCK), (1, 0))
    y_block = tl.make_block_ptr(y_ptr, (n_rows, n_cols), (n_cols, 1), (row, 0), (1, BLOCK), (1, 0))
    tl.store(y_block, tl.load(x_block, boundary_check=(1,)), boundary_check=(1,))


@triton.jit
def _descriptor_kernel(y_ptr, x_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x = tl.make_tensor_descriptor(x_ptr, [n_rows, n_cols], [n_cols, 1], [1, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [n_rows, n_cols], [n_cols, 1], [1, BLOCK])
    y.store([row, 0], x.load([row, 0]))


@triton.jit
def _atomic_add_kernel(sum_ptr, x_ptr, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + tl.program_id(0) * n_cols + cols, mask=mask)
    tl.atomic_add(sum_ptr + cols, x, mask=mask)


@triton.jit
def _atomic_cas_kernel(lock_ptr):
    tl.atomic_cas(lock_ptr, 0, 1)


@triton.jit
def _never_compiles_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0, "a block is never negative")


_tuned_kernel = triton.autotune(
    [triton.Config({}, num_warps=warps) for warps in (4, 8)], key=["n_cols"]
)(_twice_kernel)
_differing_kernel = triton.autotune(
    [triton.Config({"STORED": stored}) for stored in (1, 2)], key=["n_cols"]
)(_masked_kernel)
_heuristic_kernel = triton.heuristics(
    {"BLOCK": lambda args: triton.next_power_of_2(args["n_cols"])}
)(_twice_kernel)


def width(x):
    """The block of a program that holds a row of `x`."""
    return triton.next_power_of_2(x.shape[1])


def masked(x):
    y = torch.empty_like(x)
    _masked_kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=width(x), STORED=x.shape[1])
    return y


def unmasked(x):
    y = torch.empty_like(x)
    _unmasked_kernel[(x.shape[0], x.shape[1] // 4)](y, x, x.shape[1], BLOCK=4)
    return y


def strided(x):
    y = torch.empty(x.shape[1], dtype=x.dtype, device=x.device)
    _strided_kernel[(1,)](y, x, x.stride(1), BLOCK=width(x))
    return y


def twice(x):
    y = torch.empty_like(x)
    _twice_kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=width(x))
    return y


def three_passes(x):
    y = torch.empty_like(x)
    _three_passes_kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=4)
    return y


def block_pointer(x):
    y = torch.empty_like(x)
    _block_pointer_kernel[(x.shape[0],)](y, x, *x.shape, BLOCK=width(x))
    return y


def descriptor(x):
    y = torch.empty_like(x)
    _descriptor_kernel[(x.shape[0],)](y, x, *x.shape, BLOCK=width(x))
    return y


def atomic_add(x):
    y = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    _atomic_add_kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=width(x))
    return y


def atomic_cas(x):
    lock = torch.zeros(1, dtype=torch.int32, device=x.device)
    _atomic_cas_kernel[(x.shape[0],)](lock)
    return lock


def tuned(x):
    y = torch.empty_like(x)
    _tuned_kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=width(x))
    return y


def heuristic(x):
    y = torch.empty_like(x)
    _heuristic_kernel[(x.shape[0],)](y, x, x.shape[1])
    return y


def mixed(x):
    return masked(x.exp()).sum(dim=1)


# Of an M x N matrix, N a multiple of 4: elements read, elements written.
KNOWN = {
    "masked": (masked, lambda m, n: (m * n, m * n)),
    "unmasked-2d-grid": (unmasked, lambda m, n: (m * n, m * n)),
    "reads-twice": (twice, lambda m, n: (2 * m * n, m * n)),
    "three-passes-run-time-bound": (three_passes, lambda m, n: (3 * m * n, m * n)),
    "atomic-add": (atomic_add, lambda m, n: (2 * m * n, m * n + n)),
    "atomic-cas-one-wins": (atomic_cas, lambda m, n: (m, 1 + 1)),
    "autotuned": (tuned, lambda m, n: (2 * m * n, m * n)),
    "heuristics": (heuristic, lambda m, n: (2 * m * n, m * n)),
    "mixed-with-torch": (mixed, lambda m, n: (3 * m * n, 2 * m * n + m)),
}
if HAS_BLOCK_POINTERS:
    KNOWN["block-pointer"] = (block_pointer, lambda m, n: (m * n, m * n))
if HAS_DESCRIPTORS:
    KNOWN["descriptor"] = (descriptor, lambda m, n: (m * n, m * n))


# Each is wrong in one way.


def dropped_mask(x):
    y = torch.empty_like(x)
    _unmasked_kernel[(x.shape[0], 1)](y, x, x.shape[1], BLOCK=width(x))
    return y


def shortened_store(x):
    y = torch.empty_like(x)
    _masked_kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=width(x), STORED=x.shape[1] - 1)
    return y


def skipped_row(x):
    y = torch.empty_like(x)
    _masked_kernel[(x.shape[0] - 1,)](y, x, x.shape[1], BLOCK=width(x), STORED=x.shape[1])
    return y


def over_reads(x):
    y = torch.empty_like(x)
    _unmasked_kernel[(1, 1)](y, x[-1:], x.shape[1], BLOCK=2 * width(x))
    return y


def differing(x):
    y = torch.empty_like(x)
    _differing_kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=width(x))
    return y


def never_compiles(x):
    _never_compiles_kernel[(1,)](x, BLOCK=4)
    return x


def raises(x):
    raise TypeError(f"kernels: cannot take\n  {tuple(x.shape)}")


not_callable = 781


@triton.jit
def _products_kernel(y_ptr, x_ptr, steps):
    rows, cols = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    found = tl.zeros((64, 64), tl.float32)
    for step in range(steps):
        x = tl.load(x_ptr + step * 4096 + rows * 64 + cols)
        found = tl.dot(x, x, found)
    tl.store(y_ptr + rows * 64 + cols, found)


def products(x):
    """The sum of the squares of the matrices, 64 x 64, that `x` holds one after the other."""
    y = torch.empty(64, 64, device=x.device)
    _products_kernel[(1,)](y, x, x.numel() // 4096)
    return y


@triton.jit
def _gather_kernel(y_ptr, x_ptr, index_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + lanes)
    tl.store(y_ptr + lanes, tl.load(x_ptr + index))


def gathered(x, index):
    """The elements of `x` at `index`, of which there must be a power of two."""
    y = torch.empty(index.numel(), dtype=x.dtype, device=x.device)
    _gather_kernel[(1,)](y, x, index, BLOCK=index.numel())
    return y


@triton.jit
def _stack_rows_kernel(y_ptr, addresses_ptr, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    row_ptr = tl.load(addresses_ptr + row).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + row * BLOCK + cols, tl.load(row_ptr + cols))


def stacked_rows(y, addresses):
    """Fills the rows of `y` from the float32 rows that lie at `addresses`, an int64 tensor."""
    _stack_rows_kernel[(y.shape[0],)](y, addresses, BLOCK=y.shape[1])


@triton.jit
def _scaled_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)  # all of it stays in registers until the sum is known
    tl.store(y_ptr + cols, x / tl.sum(x, axis=0))


def scaled(x, **options):
    """The one row of `x` divided by its sum, by one program. options: of the launch."""
    y = torch.empty_like(x)
    _scaled_kernel[(1,)](y, x, BLOCK=x.shape[1], **options)
    return y
