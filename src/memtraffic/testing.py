"""Assertions for tests, ours and yours: is a result right to within the rounding of its dtype?

They raise AssertionError themselves, so they also work under `python -O`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memtraffic import runtime
from memtraffic.ops import SOFTMAX, Op, find_op
from memtraffic.ops.op import row_tolerance
from memtraffic.tensors import span
from memtraffic.triton_internals import interpreting

if TYPE_CHECKING:
    from memtraffic.traffic.count import Traffic


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


def assert_close(got: Tensor, reference: Tensor, dtype: torch.dtype, roundings: float = 4) -> None:
    """Assert that `got` has this dtype and the shape and, nearly, the values of `reference`.

    reference: finite float64 tensor. roundings: how many units in the last place of the largest
    element of its row each element may be off.
    """
    _require(reference.dtype == torch.float64, f"the reference is {reference.dtype}, not float64")
    _require(bool(reference.isfinite().all()), "the reference is not finite")
    _require(got.dtype == dtype, f"dtype {got.dtype}, not {dtype}")
    shapes = f"shape {tuple(got.shape)}, not {tuple(reference.shape)}"
    _require(got.shape == reference.shape, shapes)
    if got.numel():
        error = (got.double() - reference).abs()
        wrong = ~(error <= row_tolerance(reference, dtype, roundings))  # a NaN is not <= anything
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


class _Bounds:
    """Refuses accesses outside a kernel's arguments, before they are made."""

    def __init__(self) -> None:
        self.kernel = ""
        self.spans: list[tuple[int, int]] = []  # first byte, one past the last byte

    @contextmanager
    def launch(self, kernel: str, tensors: list[Tensor]) -> Iterator[None]:
        outer = self.kernel, self.spans
        self.kernel, self.spans = kernel, []
        yield
        self.kernel, self.spans = outer

    def bind(self, argument: str, tensor: Tensor) -> None:
        start = tensor.data_ptr()
        self.spans.append((start, start + span(tensor) * tensor.element_size()))

    def access(
        self, kind: str, addresses: Any, itemsize: int, program: tuple[int, ...], grid: object
    ) -> None:
        inside = sum(((start <= addresses) & (addresses < end)) for start, end in self.spans)
        outside = int(addresses.size - (inside > 0).sum()) if self.spans else addresses.size
        if outside:
            verb = "reads" if kind == "read" else "writes"
            raise AssertionError(
                f"program {program} of {self.kernel} {verb} {outside} elements outside the "
                "tensors it was given"
            )

    def autotuned(self, kernel: str, launches: list[Callable[[], None]]) -> None:
        for launch in launches:
            launch()


@contextmanager
def bounds_checked() -> Iterator[None]:
    """Context manager: an interpreted kernel may not touch memory outside its arguments.

    It raises AssertionError instead, before the access is made, which might end the process.
    Nothing is checked where kernels run on a GPU.
    """
    if not runtime.INTERPRETED:
        yield
        return
    with interpreting(_Bounds()):
        yield


def assert_correct(op: str | Op, fn: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Assert that `fn(*inputs)` is the result of `op`, judged against float64 on the same inputs.

    The result must have the dtype and the device of the first input and be NaN exactly where the
    reference is. An element that `fn` allocates and does not write is wrong, and so is a changed
    input. Raises AssertionError, which says where the result is wrong.

    >>> assert_correct("softmax", lambda x: torch.softmax(x, dim=1), torch.zeros(3, 5))
    """
    op, before = find_op(op), [x.clone() for x in inputs]
    with poisoned_memory():
        got = fn(*inputs)
    _require(isinstance(got, Tensor), f"the result is a {type(got).__name__}, not a tensor")
    device = inputs[0].device
    _require(got.device == device, f"the result is on {got.device}, not on {device}")
    exact = [x.double() if x.is_floating_point() else x for x in before]
    reference = op.reference(*exact)
    nan = reference.isnan()
    shapes = f"shape {tuple(got.shape)}, not {tuple(reference.shape)}"
    _require(got.shape == reference.shape, shapes)
    misplaced = got.isnan() != nan
    if misplaced.any():
        first = tuple(misplaced.nonzero()[0].tolist())
        raise AssertionError(
            f"NaN in {int(misplaced.sum())} wrong places, the first at {first} "
            "(a place that the function never writes holds NaN, too)"
        )
    got, reference = got.masked_fill(nan, 0), reference.masked_fill(nan, 0)
    assert_close(got, reference, inputs[0].dtype, op.roundings)
    if op.checks_row_sums:
        assert_row_sums(got, reference)
    for i, (x, original) in enumerate(zip(inputs, before, strict=True)):
        same = torch.equal(x.nan_to_num(), original.nan_to_num())
        _require(same, f"input {i} was changed")


def is_correct(op: str | Op, fn: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Whether `assert_correct` accepts `fn` on these inputs. What `fn` raises is passed on."""
    try:
        assert_correct(op, fn, *inputs)
    except AssertionError:
        return False
    return True


def assert_softmax(fn: Callable[..., Tensor], x: Tensor) -> None:
    """Assert that `fn(x)` is the softmax of each row of `x`, as `assert_correct` judges it."""
    assert_correct(SOFTMAX, fn, x)


def is_softmax(fn: Callable[..., Tensor], x: Tensor) -> bool:
    """Whether `assert_softmax` accepts `fn` on `x`.

    >>> is_softmax(lambda x: torch.softmax(x, dim=1), torch.zeros(3, 5))
    True
    >>> is_softmax(torch.zeros_like, torch.zeros(3, 5))
    False
    """
    return is_correct(SOFTMAX, fn, x)


def assert_touches_once(traffic: "Traffic", argument: str, elements: int | Tensor) -> None:
    """Assert that Triton kernels touched each element of `argument` exactly once, and no others.

    traffic: what `count(..., trace=True)` returned. argument: the name of the kernel's pointer,
    such as `x_ptr`. elements: how many there are, one beside the other, or the tensor that they lie
    in.
    """
    touched = Counter(
        offset
        for access in traffic.accesses
        if access.argument == argument
        for offset in access.offsets
    )
    if isinstance(elements, Tensor):
        offsets = torch.arange(span(elements)).as_strided(elements.shape, elements.stride())
        expected = Counter(offsets.flatten().tolist())
    else:
        expected = Counter(range(elements))
    missing, extra = expected - touched, touched - expected
    _require(
        not missing and not extra,
        f"{argument}: {missing.total()} elements missed, {extra.total()} touched too often or "
        f"outside, the first at {min(missing or extra, default=None)}",
    )
