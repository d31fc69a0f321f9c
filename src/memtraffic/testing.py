"""Assertions for tests, ours and yours: is a result right, and what does it cost?

`assert_correct` judges a result to within the rounding of its dtype, `assert_traffic` what is read
and written, `assert_resources` what the compiled kernels use, and `assert_sectors` how well their
loads and stores use the memory they touch. None of them needs a GPU. They raise AssertionError
themselves, so they also work under `python -O`.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memtraffic import device
from memtraffic.errors import AccessError, FormulaError
from memtraffic.functions import function_name
from memtraffic.gpus import Gpu, find_gpus
from memtraffic.meters.count import Traffic
from memtraffic.meters.counts import SIDES, Counts, shape_text
from memtraffic.meters.polynomials import odd_ones, parse, polynomial
from memtraffic.op import AnyInputs, Op, exact, find_op, tolerance
from memtraffic.triton_adapter.interpret import interpreting
from memtraffic.triton_adapter.reach import Block, Reach

MOST_TRACED = 8192  # elements of a shape at which each access is compared with the others
MIN_SHAPES = 6  # at which a function's traffic is compared, where it refuses others


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _require_none(wrong: Tensor, what: str, got: Tensor, expected: Tensor) -> None:
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} {what}, the first at {index}: "
            f"{got[index].item()}, not {expected[index].item()}"
        )


def assert_close(
    got: Tensor,
    reference: Tensor,
    dtype: torch.dtype,
    roundings: float = 4,
    magnitude: Tensor | None = None,
) -> None:
    """Assert that `got` has this dtype and the shape and, nearly, the values of `reference`.

    reference: finite float64 tensor. roundings: how many units in the last place of the largest
    element of its row each element may be off; with `magnitude`, as of `Op`, in that of its own.
    """
    _require(reference.dtype == torch.float64, f"the reference is {reference.dtype}, not float64")
    _require(bool(reference.isfinite().all()), "the reference is not finite")
    _require(got.dtype == dtype, f"dtype {got.dtype}, not {dtype}")
    shapes = f"shape {tuple(got.shape)}, not {tuple(reference.shape)}"
    _require(got.shape == reference.shape, shapes)
    if got.numel():
        error = (got.double() - reference).abs()
        most = tolerance(reference, dtype, roundings, magnitude)
        wrong = ~(error <= most)  # a NaN is not <= anything
        _require_none(wrong, "elements are wrong", got, reference)


def assert_row_sums(got: Tensor, reference: Tensor) -> None:
    """Assert that each row of `got` adds up to what that of `reference` does: to 1 in a softmax.

    `assert_close` allows an error of a few ulps of the row's largest element, so it cannot see that
    many tiny elements are zero. Their sum can. A sum may be off by two roundings to the dtype, by
    eight of float32, and by half of the dtype's smallest subnormal number per element.
    """
    finfo = torch.finfo(got.dtype)
    sums, expected = got.double().sum(dim=-1), reference.sum(dim=-1)
    relative = 2 * finfo.eps + 8 * torch.finfo(torch.float32).eps
    room = relative * expected.abs() + got.shape[-1] * finfo.smallest_normal * finfo.eps / 2
    _require_none(~((sums - expected).abs() <= room), "rows add up wrongly", sums, expected)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Context manager: memory that PyTorch allocates and nobody has written yet holds NaN.

    It uses the part of `torch.use_deterministic_algorithms` that fills new memory. Operations that
    have no deterministic implementation work as usual.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    options: Any = torch.utils.deterministic
    fill = options.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        options.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            options.fill_uninitialized_memory = fill


class _NothingEmpty(TorchFunctionMode):
    """Inside, what `torch.empty` and its like return holds 0."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in getattr(func, "__name__", "") and isinstance(made, Tensor):
            made.detach().zero_()
        return made


class _Bounds:
    """Refuses accesses outside a kernel's arguments, before they are made."""

    reach = Reach("")

    @contextmanager
    def launch(self, kernel: str, tensors: list[Tensor]) -> Iterator[None]:
        outer, self.reach = self.reach, Reach(kernel)
        yield
        self.reach = outer

    def bind(self, argument: str, tensor: Tensor) -> None:
        self.reach.bind(argument, tensor)

    def access(self, kind: str, block: Block) -> None:
        try:
            list(self.reach.split(kind, block))
        except AccessError as error:
            raise AssertionError(str(error)) from None

    def autotuned(self, kernel: str, launches: Iterable[Callable[[], None]]) -> None:
        for launch in launches:
            launch()


@contextmanager
def bounds_checked() -> Iterator[None]:
    """Context manager: an interpreted kernel may not touch memory outside its arguments.

    It raises AssertionError instead, before the access is made, which might end the process.
    Nothing is checked where kernels run on a GPU.
    """
    with interpreting(_Bounds()) if device.INTERPRETED else nullcontext():
        yield


def assert_correct(op: str | Op, fn: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Assert that `fn(*inputs)` is the result of `op`, judged against float64 on the same inputs.

    The result must have the dtype and the device of the first input and be NaN exactly where the
    reference is; to see that, `fn` is called once more where there are any. An element that `fn`
    allocates and does not write is wrong, and so is a changed input. Raises AssertionError, which
    says where the result is wrong.

    >>> assert_correct("softmax", lambda x: torch.softmax(x, dim=1), torch.zeros(3, 5))
    """
    op, before = find_op(op), [x.clone() for x in inputs]
    with poisoned_memory():
        got = fn(*inputs)
    _require(isinstance(got, Tensor), f"the result is a {type(got).__name__}, not a tensor")
    device = inputs[0].device
    _require(got.device == device, f"the result is on {got.device}, not on {device}")
    reference = op.judged(*map(exact, before))
    magnitude = op.magnitude and op.magnitude(*map(exact, before)).nan_to_num()
    nan = reference.isnan()
    shapes = f"shape {tuple(got.shape)}, not {tuple(reference.shape)}"
    _require(got.shape == reference.shape, shapes)
    wrong = "elements are NaN in one result alone (what is never written is NaN, too)"
    _require_none(got.isnan() != nan, wrong, got, reference)
    got, reference, full = got.masked_fill(nan, 0), reference.masked_fill(nan, 0), reference
    assert_close(got, reference, inputs[0].dtype, op.roundings, magnitude)
    if op.checks_row_sums:
        assert_row_sums(got, reference)
    for i, (x, original) in enumerate(zip(inputs, before, strict=True)):
        same = torch.allclose(x, original, rtol=0, atol=0, equal_nan=True)
        _require(same, f"input {i} was changed")
    if nan.any():  # there, memory that nobody wrote looked right
        with _NothingEmpty():
            again = fn(*inputs)
        _require_none(nan & ~again.isnan(), "elements are never written", again, full)


def is_correct(op: str | Op, fn: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Whether `assert_correct` accepts `fn` on these inputs. What `fn` raises is passed on.

    >>> x = torch.zeros(3, 5)
    >>> is_correct("softmax", lambda x: torch.softmax(x, dim=1), x)
    True
    >>> is_correct("softmax", torch.zeros_like, x)
    False
    """
    try:
        assert_correct(op, fn, *inputs)
    except AssertionError:
        return False
    return True


# ---- traffic


def assert_traffic(
    fn: Callable[..., object],
    reads: str,
    writes: str,
    inputs: AnyInputs = None,
    *,
    read_bytes: str | None = None,
    write_bytes: str | None = None,
    backward: Sequence[str | None] | None = None,
    fit: Sequence[tuple[int, ...]] | None = None,
    held_out: Sequence[tuple[int, ...]] | None = None,
    dtype: str = "float32",
    once: Sequence[str] = (),
) -> None:
    """Assert that `fn` reads and writes these numbers of elements, at small and at large shapes.

    >>> assert_traffic(lambda x, w: x * w, reads="MN + N", writes="MN", inputs="M,N N")
    >>> assert_traffic(lambda x: x.exp(), "MN", "MN", backward=("2MN", "MN"))
    >>> assert_traffic(lambda x: x.exp(), "MN", "MN", write_bytes="2MN", dtype="bfloat16")

    reads, writes: sums of products of the sizes, as `formula` prints them. read_bytes, write_bytes:
    the same in bytes, which pins the dtypes, too; None is not compared. backward: what the backward
    pass reads and writes and, after them, its bytes. once: arguments of kernels, such as
    `("x_ptr", "y_ptr")`, of which a pass may read no element twice, nor write one twice, at shapes
    of up to 8192 elements and at the smallest: a wrong stride may move as many elements as the
    right one, but moves some again. inputs, fit, held_out, dtype: as for `memtraffic.formula`.

    Raises AssertionError with what was found, and what each operation and each argument of a kernel
    has of it; also for a kernel that reaches outside its tensors and for counts that are not
    repeatable. Raises ValueError for text that is no formula, and what `count` raises.
    """
    if isinstance(backward, str) or (backward and len(backward) < 2):
        raise ValueError(f"backward: what it reads and what it writes, not {backward!r}")
    counts = Counts(fn, inputs, backward=backward is not None, dtype=dtype)
    passes = [(reads, writes, read_bytes, write_bytes), *([backward] if backward else [])]
    with traffic_asserted(counts, passes):
        counts.run(fit, held_out, least=None if fit is None else MIN_SHAPES)
    smallest = min(map(math.prod, counts.traffic))
    for shape in counts.traffic if once else ():
        if math.prod(shape) <= max(MOST_TRACED, smallest):
            _require_once(counts, shape, once)


@contextmanager
def traffic_asserted(counts: Counts, passes: Sequence[Sequence[str | None]]) -> Iterator[None]:
    """Context manager: what is counted inside must be these formulas, as for `assert_traffic`.

    passes: the texts of each, in the order of `meters.counts.SIDES`.
    """
    expected = [
        (which, side, parse(text, counts.symbols))
        for which, texts in enumerate(passes)
        for side, text in zip(SIDES, texts, strict=False)
        if text is not None
    ]
    name = function_name(counts.fn)
    try:
        yield
    except FormulaError as error:
        raise AssertionError(str(error)) from error
    except AccessError as error:
        at = f" at {shape_text(counts.shape)}" if counts.shape else ""
        raise AssertionError(f"{name} is wrong{at}: {error}") from error
    wrong = [
        _traffic_difference(counts, which, side, right)
        for which, side, right in expected
        if odd_ones(right, counts.symbols, counts.moved(which, side))
    ]
    _require(not wrong, "\n".join(wrong))


def _require_once(counts: Counts, shape: tuple[int, ...], once: Sequence[str]) -> None:
    """Requires that no pass reads or writes an element of these arguments twice at a shape."""
    passes = [_touched(traffic) for traffic in counts.trace(shape)]
    known = sorted({argument for touched in passes for _, argument, _ in touched})
    unknown = [argument for argument in once if argument not in known]
    moved = f"{function_name(counts.fn)} moves, in kernels, {', '.join(known) or 'nothing'}"
    _require(not unknown, f"once: {moved}, not {', '.join(unknown)}")
    for touched in passes:
        again = [at for at, times in touched.items() if times > 1 and at[1] in once]
        for kind, argument, offset in again[:1]:
            raise AssertionError(
                f"{function_name(counts.fn)} at {shape_text(shape)}: {len(again)} elements were "
                f"{kind} several times, such as {argument}[{offset}]"
            )


def _touched(traffic: Traffic) -> Counter[tuple[str, str, int]]:
    """How often each element of a kernel's argument was read, or written, by its offset."""
    each = ((access.kind, access.argument, access.offsets) for access in traffic.accesses)
    return Counter((kind, name, offset) for kind, name, offsets in each for offset in offsets)


def _traffic_difference(counts: Counts, which: int, side: str, right: dict[str, Fraction]) -> str:
    """How one side of a pass differs from a formula, and what has how much of it."""
    moved = counts.moved(which, side)
    odd = odd_ones(right, counts.symbols, moved)
    shape = min(odd, key=math.prod)
    name = function_name(counts.fn)
    name = f"the backward pass of {name}" if which else name
    at = f"at {shape_text(shape)}, " if shape else ""
    unit = "bytes" if "bytes" in side else "elements"
    lines = [
        f"{name} {counts.describe(which, side)}, not {polynomial(right)}: "
        f"{at}{moved[shape]} {unit}, not {odd[shape]}"
    ]
    traffic = counts.trace(shape)[which]
    operations = (f"{op.name} {getattr(op, SIDES[side])}" for op in traffic.ops)
    lines.append(f"  by operation: {', '.join(operations) or 'there is none'}")
    kind = SIDES[side].partition("_")[0]
    total, again = Counter[str](), Counter[str]()
    for (side_of, argument, _), times in _touched(traffic).items():
        if side_of == kind:
            total[argument] += times
            again[argument] += times > 1
    arguments = (
        f"{argument} {elements}"
        + (f", of {again[argument]} elements several times" if again[argument] else "")
        for argument, elements in total.items()
    )
    lines += [f"  by argument of the kernels, in elements: {'; '.join(arguments)}"] if total else []
    return "\n".join(lines)


# ---- resources


def assert_resources(
    fn: Callable[..., object],
    inputs: Any = None,
    shape: Sequence[int] | None = None,
    *,
    target: str | Gpu | Sequence[str | Gpu] | None = None,
    spill_bytes: int | None = 0,
    load_bits: int | None = None,
    store_bits: int | None = None,
) -> None:
    """Assert what every kernel that `fn` launches uses, compiled for `target`.

    >>> from memtraffic.kernels.softmax import fused
    >>> assert_resources(fused.softmax, "16,4096", target=["sm_90", "gfx942"], load_bits=128)

    inputs, shape: as for `memtraffic.resources`. target: a GPU or several, or their names; none of
    them need be here; by default the one that is. spill_bytes: per thread. load_bits, store_bits:
    what every load from, and every store to, global memory moves per thread. None is not compared.

    Raises AssertionError, which says what was found, also for a kernel that the target cannot
    launch; and what `memtraffic.resources` raises.
    """
    from memtraffic.compile import resources

    for gpu in [None] if target is None else find_gpus(target):
        for kernel in resources(fn, inputs, shape, target=gpu):
            loads, stores = [*kernel.load_bits], [*kernel.store_bits]
            facts = {
                f"spills {spill_bytes} bytes per thread": spill_bytes in (None, kernel.spill_bytes),
                "can be launched": not kernel.unlaunchable,
                f"moves {load_bits} bits per load": load_bits is None or loads == [load_bits],
                f"moves {store_bits} bits per store": store_bits is None or stores == [store_bits],
            }
            for fact, holds in facts.items():
                wrong = f"not for {kernel.target}: {function_name(fn)} {fact}"
                _require(holds, f"{wrong}. Found: {kernel}")


# ---- sectors


def assert_sectors(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    shape: Sequence[int] | None = None,
    *,
    moved_per_wanted: float,
    target: str | Gpu | Sequence[str | Gpu] = "sm_90",
) -> None:
    """Assert how few sectors (by AMD, cache lines) each load and store of `fn`'s kernels touches.

    >>> from memtraffic.kernels.softmax import fused
    >>> assert_sectors(fused.softmax, shape=(4, 1024), moved_per_wanted=1)

    moved_per_wanted: the bytes of the sectors over those of the elements whose mask is true; less
    than 1 where lanes share an element. Other arguments are those of `memtraffic.sectors`; target
    may be several.

    Raises AssertionError, which says which line of the source touches more; and what
    `memtraffic.sectors` raises.
    """
    from memtraffic.meters.sectors import sectors

    for gpu in find_gpus(target):
        found = sectors(fn, inputs, shape, target=gpu)
        for access in found.accesses:
            _require(
                access.fetched_bytes <= moved_per_wanted * access.wanted_bytes,
                f"{function_name(fn)} moves more than {moved_per_wanted} times what it wants for "
                f"{found.target}: {access}",
            )
