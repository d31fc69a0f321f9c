"""Kernels whose loads and stores the compiler spreads, copies, moves or merges in some way."""

import torch
import triton
import triton.language as tl


@triton.jit
def _few_kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    """A block smaller than a program: lanes and warps hold copies."""
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols, mask=cols < n)
    tl.store(y_ptr + tl.program_id(0) * BLOCK + cols, x, mask=cols < n)


@triton.jit
def _scalar_kernel(y_ptr, x_ptr):
    row = tl.program_id(0)
    if row % 2 == 0:
        tl.store(y_ptr + row, tl.load(x_ptr + row) + 1)


@triton.jit
def _last_kernel(y_ptr, done_ptr):
    """The program that finishes last writes, as far as programs run at once."""
    tl.atomic_add(done_ptr, 1)
    if tl.load(done_ptr) == tl.num_programs(0):
        tl.store(y_ptr, 1.0)


@triton.jit
def _nested_kernel(y_ptr, x_ptr, index_ptr, n, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.load(index_ptr + cols, mask=cols < n, other=0), mask=cols < n)
    x += tl.load(tl.load(
        index_ptr + cols, mask=cols < n, other=1) + x_ptr)  # fmt: skip
    tl.store(y_ptr + cols, x, mask=cols < n)


@triton.jit
def _of_row(x_ptr, row, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    return tl.load(
        x_ptr + row * n + cols,
        mask=cols < n,
        other=0.0,
    )


@triton.jit
def _called_kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = _of_row(x_ptr, row, n, BLOCK) + _of_row(x_ptr, row + 1, n - 1, BLOCK)
    tl.store(y_ptr + row * BLOCK + tl.arange(0, BLOCK), total)


@triton.jit
def _loop_kernel(y_ptr, x_ptr, w_ptr, n, trips, BLOCK: tl.constexpr):
    """What does not change in a loop, the compiler may load before it."""
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(trips):
        w = tl.load(w_ptr + cols)
        total += tl.load(x_ptr + i * n + cols, mask=cols < n, other=0.0) * w
    tl.store(y_ptr + cols, total)


@triton.jit
def _state_kernel(y_ptr, k_ptr, v_ptr, trips, n, K: tl.constexpr, V: tl.constexpr):
    """In a loop, the compiler loads values in the layout of a state and in that of its sums."""
    cols = tl.arange(0, V)
    mask, v_ptrs = cols < n, v_ptr + cols
    state, k = tl.zeros((V, K), tl.float32), tl.load(k_ptr + tl.arange(0, K))
    for _ in range(trips):
        v = tl.load(v_ptrs, mask=mask, other=0.0)
        v -= tl.sum(state * k[None, :], 1)
        state += v[:, None] * k[None, :]
        tl.store(y_ptr + cols, v, mask=mask)
        v_ptrs, y_ptr = v_ptrs + n, y_ptr + n
    tl.store(y_ptr + cols, tl.sum(state, 1), mask=mask)


@triton.jit
def _linear_kernel(y_ptr, x_ptr, w_ptr, bias_ptr, BLOCK: tl.constexpr):
    """Biases are loaded in a slice of the layout of the product."""
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    at = rows * BLOCK + cols
    y = tl.dot(tl.load(x_ptr + at), tl.load(w_ptr + at))
    bias = tl.load(bias_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + at, y + bias[None, :])


@triton.jit
def _transposed_kernel(y_ptr, x_ptr, m, n, BLOCK: tl.constexpr):
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + cols * m + rows, tl.load(x_ptr + rows * n + cols))


@triton.jit
def _histogram_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(y_ptr + x % 8, 1)


@triton.jit
def _waiting_kernel(y_ptr, x_ptr):
    while tl.atomic_add(x_ptr, 0) == 0:
        pass
    tl.store(y_ptr, 1.0)


@triton.jit
def _same_twice_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    """The compiler loads it once."""
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    again = tl.load(x_ptr + cols)
    tl.store(y_ptr + cols, x + again)


@triton.jit
def _half_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    """Needs half of what it loads, which the assembler sees."""
    x = tl.load(x_ptr + tl.arange(0, 2 * BLOCK))
    first, _ = tl.split(tl.trans(tl.reshape(x, (2, BLOCK))))
    tl.store(y_ptr + tl.arange(0, BLOCK), first)


@triton.jit
def _assembly_load_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.inline_asm_elementwise(
        "ld.global.b64 $0, [$1];", "=l,l", [x_ptr + cols], tl.int64, is_pure=False, pack=1
    )
    tl.store(y_ptr + cols, x)


@triton.autotune([triton.Config({}, num_warps=warps) for warps in (1, 4)], key=[])
@triton.jit
def _autotuned_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))


@triton.jit
def _delayed_kernel(y_ptr, trips_ptr, start_ptr, BLOCK: tl.constexpr):
    """Only the loop needs the start, and the assembler loads it there."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    trips, start = tl.load(trips_ptr + row), tl.load(start_ptr + row)
    for i in range(0, trips):
        tl.store(y_ptr + (start + i) * BLOCK + cols, cols)


@triton.jit
def _silent_kernel(y_ptr, trips_ptr, start_ptr):
    """Its loop, too, has what the assembler delays, and no access that says who comes there."""
    row, y = tl.program_id(0), 1
    trips, start = tl.load(trips_ptr + row), tl.load(start_ptr + row)
    for _ in range(0, trips):
        y = y * y + start
    tl.store(y_ptr + row, y)


def over(kernel, *numbers, grid=(1,), shape=None, **constants):
    """A function that launches a kernel with its result, its tensors, and these numbers.

    shape: of the result, by default that of the first tensor.
    """

    def fn(x, *others):
        y = torch.empty(shape or x.shape, dtype=x.dtype, device=x.device)
        kernel[grid](y, x, *others, *numbers, **constants)
        return y

    return fn


scalar = over(_scalar_kernel, grid=(5,))
called = over(_called_kernel, 100, grid=(3,), shape=(3, 128), BLOCK=128)
loop = over(_loop_kernel, 100, 5, shape=(256,), BLOCK=256)
state = over(_state_kernel, 5, 6, shape=(60,), K=16, V=8, num_stages=1)
linear = over(_linear_kernel, BLOCK=64)
transposed = over(_transposed_kernel, 64, 64, BLOCK=64)
same_twice = over(_same_twice_kernel, BLOCK=64)
half = over(_half_kernel, BLOCK=512, num_warps=1)
assembly_load = over(_assembly_load_kernel, BLOCK=64)
delayed = over(_delayed_kernel, grid=(4,), shape=(256,), BLOCK=64)
silent = over(_silent_kernel, grid=(4,))


def few(x, block=16, n=13, **options):
    return over(_few_kernel, n, grid=(x.numel() // block,), BLOCK=block, **options)(x)


def nested(x):
    index = torch.arange(x.numel(), device=x.device).flip(0)
    return over(_nested_kernel, x.numel(), grid=(4,), BLOCK=128)(x, index)


def histogram(x):
    y = torch.zeros(8, dtype=torch.int32, device=x.device)
    _histogram_kernel[(4,)](y, x, BLOCK=64)
    return y


def last(x):
    y, done = torch.empty(1), torch.zeros(1, dtype=torch.int32)
    _last_kernel[(4,)](y, done)
    return y


def waiting(x):
    _waiting_kernel[(1,)](torch.empty_like(x), torch.ones(1, dtype=torch.int32, device=x.device))


BLOCK = tl.constexpr(8)  # not that of `defined_inside`


def defined_inside(block, dtype=tl.float32):
    import triton.language as own

    BLOCK = tl.constexpr(block)

    @triton.jit
    def half(x):
        return _half(x).to(dtype)

    @triton.autotune([triton.Config({}, num_warps=warps) for warps in (4, 1)], key=[])
    @triton.jit
    def inside_kernel(y_ptr, x_ptr, FIRST: own.constexpr = 0):
        at = FIRST + own.arange(0, BLOCK)
        own.store(y_ptr + at, half(own.load(x_ptr + at)))

    return over(inside_kernel)


@triton.jit
def _half(x):
    return x / 2


def autotuned(x):
    return over(_autotuned_kernel, BLOCK=x.numel())(x)


def autotuned_twice(x):
    return autotuned(autotuned(x))
