"""Kernels and functions whose traffic is known beforehand, for tests of the meters."""

import threading

import scalar_functions
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda.libdevice import tanh as tanh_of_cuda
from triton.language.extra.libdevice import tanh as hyperbolic_tangent

from memtraffic.triton_adapter.launch import triton_version

HAS_BLOCK_POINTERS = triton_version() < (3, 9)


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
        cols = start.to(tl.int64) + tl.arange(0, BLOCK)  # a tensor where it is compiled
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        row_max = tl.maximum(row_max, tl.max(x, axis=0))
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
def _padded_kernel(y_ptr, x_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [n_rows, n_cols], [n_cols, 1], [2, BLOCK], "nan")
    offsets = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + offsets, x.load([0, 0]))


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


@triton.jit
def _seed_kernel(seed):
    """Has a pointer where Triton's function takes a number."""
    tl.rand4x(seed, tl.arange(0, 4))


@triton.jit
def _scalars_kernel(y_ptr, x_ptr, scale, flag, n_cols, BLOCK: tl.constexpr):
    """Uses a float and a bool as what a compiled kernel sees: tensors."""
    cols = tl.arange(0, BLOCK)
    mask = cols < tl.where(flag.to(tl.int32) == 1, n_cols, 0)
    x = tl.load(x_ptr + tl.program_id(0) * n_cols + cols, mask=mask)
    tl.store(y_ptr + tl.program_id(0) * n_cols + cols, x * scale.to(tl.float32), mask=mask)


@triton.jit
def _logic_kernel(y_ptr, x_ptr, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = rows < n_rows and cols < n_cols
    outside = rows >= n_rows or cols >= n_cols
    x = tl.load(x_ptr + rows * n_cols + cols, mask=inside)
    tl.store(y_ptr + rows * n_cols + cols, x, mask=not outside)


@triton.jit
def _both_loads_kernel(y_ptr, x_ptr, n_cols):
    """A compiled kernel loads both operands of `and`."""
    x_ptr += tl.program_id(0) * n_cols
    if tl.load(x_ptr) < -1.0 and tl.load(x_ptr + 1) < -1.0:
        tl.store(y_ptr, 1.0)


@triton.jit
def _lowest(dtype: tl.constexpr):
    wanted = dtype.value
    return tl.full((), -float("inf"), wanted)


cast, exponential = tl.cast, tl.math.exp2  # as modules that run on several Tritons do


@triton.jit
def _language_kernel(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, OF: tl.constexpr):
    """A program a row, which computes something in a way that the language has."""
    cols = tl.program_id(0) * n_cols + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < n_cols
    x = tl.load(x_ptr + cols, mask=mask, other=_lowest(tl.float32))
    if OF == "another name":
        x = exponential(cast(x, tl.float32))
    elif OF == "helper":
        x = scalar_functions.double(x)
    elif OF == "overflow":
        x = tl.exp(x * 1000.0) - float("inf")
    elif OF == "libdevice":  # what is stored depends on what the functions return
        x = hyperbolic_tangent(x) + libdevice.tanh(x) + tl.extra.cuda.libdevice.tanh(x)
        x += tanh_of_cuda(x)
        mask &= x < 2.0
    tl.store(y_ptr + cols, x, mask=mask)


@triton.jit
def _in_place_kernel(x_ptr, n_cols, BLOCK: tl.constexpr):
    """Writes the elements that are not negative: what it writes depends on who wrote before."""
    cols = tl.program_id(0) * n_cols + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < n_cols
    x = tl.load(x_ptr + cols, mask=mask)
    tl.store(x_ptr + cols, x * 0.0 - 2.0, mask=mask & (x >= 0.0))


@triton.jit
def _rare_kernel(x_ptr, OF: tl.constexpr):
    """Does what the interpreter lacks, or warns of."""
    cols = tl.arange(0, 4)
    x = tl.load(x_ptr + cols)
    if OF == "view":
        x = tl.view(x, [4])
    elif OF == "assembly":
        x = tl.inline_asm_elementwise("not.b32 $0, $1;", "=r,r", [x], tl.int32, True, 1)
    elif OF == "function":
        x = libdevice.mul24(x, x)
    elif OF == "mapping":
        x = tl.map_elementwise(_numerator, x, x)
    tl.store(x_ptr + cols, x)


@triton.jit
def _shifted_copy_kernel(y_ptr, x_ptr, shift, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols + shift))


class OwnAutotuner(type(triton.autotune([triton.Config({})], key=[])(_masked_kernel))):
    """An autotuner of a package's own, which would time kernels in a way of its own."""

    def run(self, *args, **options):
        raise AssertionError("it would time a kernel")


_in_place_tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK": block}) for block in (16, 32)], key=["n_cols"]
)(_in_place_kernel)
_own_tuned_kernel = OwnAutotuner(
    _twice_kernel, _twice_kernel.arg_names,
    [triton.Config({}), triton.Config({}, num_warps=8)], ["n_cols"], None, None,
)  # fmt: skip
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


def over_rows(
    name, kernel, constants=lambda x: {"BLOCK": width(x)}, numbers=lambda x: x.shape[1:],
    grid=lambda x: x.shape[:1],
):  # fmt: skip
    """A function called `name` that launches a kernel with one program a row and returns its y.

    numbers: what comes after the pointers.
    """

    def fn(x):
        y = torch.empty_like(x)
        kernel[grid(x)](y, x, *numbers(x), **constants(x))
        return y

    fn.__name__ = fn.__qualname__ = name
    return fn


masked = over_rows("masked", _masked_kernel, lambda x: {"BLOCK": width(x), "STORED": x.shape[1]})
twice = over_rows("twice", _twice_kernel)
tuned = over_rows("tuned", _tuned_kernel)
own_tuned = over_rows("own_tuned", _own_tuned_kernel)
heuristic = over_rows("heuristic", _heuristic_kernel, lambda x: {})
differing = over_rows("differing", _differing_kernel)
three_passes = over_rows("three_passes", _three_passes_kernel, lambda x: {"BLOCK": 4})
block_pointer = over_rows("block_pointer", _block_pointer_kernel, numbers=lambda x: x.shape)
descriptor = over_rows("descriptor", _descriptor_kernel, numbers=lambda x: x.shape)
scalars = over_rows("scalars", _scalars_kernel, numbers=lambda x: (0.5, True, x.shape[1]))
language = {
    of: over_rows(of, _language_kernel, lambda x, of=of: {"BLOCK": width(x), "OF": of})
    for of in ("constant dtype", "another name", "helper", "overflow", "libdevice")
}
both_loads = over_rows("both_loads", _both_loads_kernel, lambda x: {})
strided = over_rows("strided", _strided_kernel, numbers=lambda x: (x.stride(1),))
logic = over_rows(
    "logic", _logic_kernel,
    lambda x: {"ROWS": triton.next_power_of_2(x.shape[0]), "BLOCK": width(x)},
    numbers=lambda x: x.shape, grid=lambda x: (1,),
)  # fmt: skip


@torch.library.custom_op("memtraffic_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A custom operation with a kernel and an operation of PyTorch."""
    y = torch.empty_like(x)
    kernel = torch.library.wrap_triton(_masked_kernel)
    kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=width(x), STORED=x.shape[1])
    return y * 2


def atomic_add(x):
    y = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    _atomic_add_kernel[(x.shape[0],)](y, x, x.shape[1], BLOCK=width(x))
    return y


def atomic_cas(x):
    lock = torch.zeros(1, dtype=torch.int32, device=x.device)
    _atomic_cas_kernel[(x.shape[0],)](lock)
    return lock


def tuned_in_place(x):
    _in_place_tuned_kernel[(x.shape[0],)](x := x.abs(), x.shape[1])
    return x


class Reversed:
    """The elements of a tensor from the last to the first: no tensor can have such strides."""

    def __init__(self, x):
        self.base, self.dtype = x, x.dtype

    def data_ptr(self):
        return self.base.data_ptr() + (self.base.numel() - 1) * self.base.element_size()


@triton.jit
def _backwards_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + lanes, tl.load(x_ptr - lanes))


def backwards(x):
    y = torch.empty_like(x)
    _backwards_kernel[(x.numel() // 4,)](y, Reversed(x), BLOCK=4)
    return y


# Of an M x N matrix, N a multiple of 4: elements read, elements written.
KNOWN = {
    "masked": (masked, lambda m, n: (m * n, m * n)),
    "reads-twice": (twice, lambda m, n: (2 * m * n, m * n)),
    "three-passes-run-time-bound": (three_passes, lambda m, n: (3 * m * n, m * n)),
    "atomic-add": (atomic_add, lambda m, n: (2 * m * n, m * n + n)),
    "atomic-cas-one-wins": (atomic_cas, lambda m, n: (m, 1 + 1)),
    "autotuned": (tuned, lambda m, n: (2 * m * n, m * n)),
    "heuristics": (heuristic, lambda m, n: (2 * m * n, m * n)),
    "float-and-bool-arguments": (scalars, lambda m, n: (m * n, m * n)),
    "and-or-not-of-blocks": (logic, lambda m, n: (m * n, m * n)),
    "and-of-two-loads": (both_loads, lambda m, n: (2 * m, 0)),
    **{of: (fn, lambda m, n: (m * n, m * n)) for of, fn in language.items()},
    "libdevice": (language["libdevice"], lambda m, n: (m * n, 1)),  # 4 tanh(0) < 2 < 4 tanh(1)
    "autotuned-in-place": (tuned_in_place, lambda m, n: (2 * m * n, 2 * m * n)),
    "descriptor": (descriptor, lambda m, n: (m * n, m * n)),
    "autotuner-of-its-own": (own_tuned, lambda m, n: (2 * m * n, m * n)),
}
if HAS_BLOCK_POINTERS:
    KNOWN["block-pointer"] = (block_pointer, lambda m, n: (m * n, m * n))


class Copy(torch.autograd.Function):
    """Kernels in both passes."""

    @staticmethod
    def forward(ctx, x):
        return masked(x)

    @staticmethod
    def backward(ctx, dy):
        return twice(dy)


# Each is wrong in one way.


dropped_mask = over_rows("dropped_mask", _unmasked_kernel)


def never_compiles(x):
    _never_compiles_kernel[(1,)](x, BLOCK=4)
    return x


def raises(x):
    raise TypeError(f"kernels: cannot take\n  {tuple(x.shape)}")


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
def _scaled_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)  # all of it stays in registers until the sum is known
    tl.store(y_ptr + cols, x / tl.sum(x, axis=0))


def scaled(x, **options):
    """The one row of `x` divided by its sum, by one program. options: of the launch."""
    y = torch.empty_like(x)
    _scaled_kernel[(1,)](y, x, BLOCK=x.shape[1], **options)
    return y


def ended(fn, *args, seconds=60):
    """What `fn(*args)` raises or returns. Fails, in place of a hang, if it does not end in time."""
    told = []

    def run():
        try:
            told.append(fn(*args))
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert told, f"{fn} did not end within {seconds} s"
    thread.join()
    return told[0]
