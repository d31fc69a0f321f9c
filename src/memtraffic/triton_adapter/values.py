"""Lets Triton's interpreter compute with odd values, and in bfloat16, what a compiled kernel does.

It has numbers of bfloat16, and of 8 bits, as integers, their bits; it would compute with these, and
cut off what it converts. Here they are computed with in float32, and rounded to nearest even; see
https://github.com/triton-lang/triton/pull/10945. What is compared with is an H200:
tests/compile/odd_values.json has what its kernels gave.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Numbers: TypeAlias = np.ndarray[Any, Any]


def compute_as_compiled() -> None:
    """Replaces, for good, what the interpreter computes otherwise than a GPU."""
    builder, reduce = interpreter.InterpreterBuilder, interpreter.ReduceOps
    builder.operations = 0  # made so far
    for name in ("unary_op", "binary_op", "create_fma", "create_dot"):  # a choice needs bits alone
        setattr(builder, name, _widening(getattr(builder, name)))
    interpreter._convert_float = _conversion(interpreter._convert_float)
    builder.cast_impl = _cast
    builder.get_bf16 = lambda self, value: _handle(np.array([value]), tl.bfloat16)
    builder.create_minnumf = _extreme(np.fmin, np.bitwise_or)
    builder.create_maxnumf = _extreme(np.fmax, np.bitwise_and)
    builder.create_minimumf = _extreme(np.minimum, np.bitwise_or)
    builder.create_maximumf = _extreme(np.maximum, np.bitwise_and)
    builder.create_frem = lambda self, lhs, rhs: self.binary_op(lhs, rhs, _remainder)
    builder.create_ceil = lambda self, x: self.unary_op(x, lambda it: np.ceil(_flushed(it)))
    builder.create_floor = lambda self, x: self.unary_op(x, lambda it: np.floor(_flushed(it)))
    builder.create_select = lambda self, *args: self.ternary_op(*args, _chosen)
    builder.create_clampf = _clamping(builder.create_clampf)
    builder.create_umulhi = _unsigned(builder.create_umulhi)
    builder.get_all_ones_value = lambda self, kind: interpreter.TensorHandle(
        ~np.zeros(1, interpreter._get_np_dtype(kind)), kind.scalar
    )
    for name in {"create_descriptor_load", "create_tensor_pointer_load"} & {*dir(builder)}:
        setattr(builder, name, _padding_with_nan(getattr(builder, name)))
    reduce.sum = lambda self, x: _added(self, x, np.sum, keepdims=self.keep_dims)
    interpreter.ScanOps.cumsum = lambda self, x: [_added(self, x, np.cumsum)]
    interpreter.ScanOps.cumprod = lambda self, x: [_added(self, x, np.cumprod)]
    reduce.apply_impl = _reducing(reduce.apply_impl)


# ---- conversions


def _conversion(convert: Callable[..., Numbers]) -> Callable[..., Numbers]:
    """Conversions between floating-point types, from bits to bits.

    Numbers of 8 bits are rounded to nearest even, and end at the largest one, as by PTX's
    `cvt.rn.satfinite`.
    """

    floats8 = {  # without one that PyTorch does not have
        tl.float8e5: torch.float8_e5m2,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5b16: torch.float8_e5m2fnuz,
        tl.float8e4b8: torch.float8_e4m3fnuz,
    }
    types = floats8 | {
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
    }

    def converted(data: Numbers, source: Any, target: Any, rounding: Any) -> Numbers:
        toward_zero = target in floats8 and rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if source not in types or target not in types or toward_zero:
            return convert(data, source, target, rounding)
        octets = torch.from_numpy(np.frombuffer(bytearray(data.tobytes()), np.uint8))
        numbers = octets.view(types[source]).float()
        if source == tl.float8e5 and target == tl.bfloat16:
            # The last exponent, of infinities and NaN, counts as any other.
            numbers = torch.where(octets & 124 == 124, (4 + (octets & 3)) * 2.0**14, numbers.abs())
            numbers = numbers.copysign(octets.view(torch.int8).float())
        if target in floats8:
            limit = torch.finfo(types[target]).max
            numbers = torch.where(numbers.isnan(), numbers, numbers.clamp(-limit, limit))
        made = numbers.to(types[target])
        return made.view(torch.uint8).numpy().view(f"u{made.itemsize}").reshape(data.shape)

    return converted


def _numbers(values: Any) -> Numbers:
    """The numbers of a tensor's handle; of a type that the interpreter has as bits, in float32."""
    kind, data = values.dtype.scalar, values.data
    if not kind.is_floating() or data.dtype.kind != "u":  # of a comparison, truth values
        return data
    return interpreter._convert_float(data, kind, tl.float32, None).view(np.float32)


def _handle(numbers: Numbers, kind: Any) -> Any:
    """The handle of a tensor of numbers that `_numbers` gave, or of what was made of them."""
    if kind.is_floating() and interpreter._get_np_dtype(kind).kind != "f":
        numbers = interpreter._convert_float(
            np.asarray(numbers, np.float32), tl.float32, kind, None
        )
    return interpreter.TensorHandle(numbers, kind)


def _cast(self: Any, source: Any, target: Any) -> Any:
    """A cast, of floating-point numbers to integers toward zero and no further than the type goes.

    So do PTX's conversions, which know no integers of 8 bits: of those of 16 bits, the lower half
    is stored. NaN becomes 0; where either type has 64 bits, the integer whose highest bit is set.
    """
    kind, numbers = target.scalar, _numbers(source)
    dtype = interpreter._get_np_dtype(kind)
    if kind.is_floating() and dtype.kind != "f":
        return _handle(numbers, kind)
    if numbers.dtype.kind == "f" and dtype.kind in "iu":
        numbers = _truncated(numbers, np.dtype(f"{dtype.kind}{max(2, dtype.itemsize)}"))
    return interpreter.TensorHandle(numbers.astype(dtype), kind)


def _truncated(numbers: Numbers, wide: Any) -> Numbers:
    least, most = map(float, (np.iinfo(wide).min, np.iinfo(wide).max))
    found = np.where((numbers > least) & (numbers < most), numbers, 0).astype(wide)
    found[numbers >= most], found[numbers <= least] = np.iinfo(wide).max, np.iinfo(wide).min
    if 8 in (numbers.itemsize, wide.itemsize):
        found[np.isnan(numbers)] = np.array(1 << 8 * wide.itemsize - 1, np.uint64).astype(wide)
    return found


# ---- operations element by element


def _widening(method: Callable[..., Any]) -> Callable[..., Any]:
    """An operation, counted; one of bfloat16 in float32, whose result is rounded."""
    handle = interpreter.TensorHandle

    def is_bfloat16(value: Any) -> bool:
        return isinstance(value, handle) and value.dtype.scalar == tl.bfloat16

    def widened(value: Any) -> Any:
        return handle(_numbers(value), tl.float32) if is_bfloat16(value) else value

    @functools.wraps(method)
    def compute(self: Any, *args: Any) -> Any:
        self.operations += 1
        if not is_bfloat16(args[0]):  # then no other is
            return method(self, *args)
        *_, last = (arg for arg in args if isinstance(arg, handle))
        result = method(self, *map(widened, args))
        # Its type is that of the last operand, but for comparisons.
        kept = result.data.dtype == bool or not is_bfloat16(last)
        return result if kept else _handle(result.data, tl.bfloat16)

    return compute


def _extreme(compare: Callable[..., Numbers], combine: Callable[..., Numbers]) -> Any:
    """A maximum or minimum, for which -0 is less than 0."""

    def extreme(lhs: Numbers, rhs: Numbers) -> Numbers:
        found = compare(lhs, rhs)
        bits = f"u{found.itemsize}"
        zeros = combine(lhs.view(bits), rhs.view(bits)).view(found.dtype)
        result: Numbers = np.where((lhs == 0) & (rhs == 0), zeros, found)
        return result

    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, extreme)


def _remainder(lhs: Numbers, rhs: Numbers) -> Numbers:
    """`x - trunc(x / y) * y`, rounded once, as LLVM has it; `x` where `y` is infinite."""
    wide = np.result_type(lhs, np.float32)
    x, y = (it.astype(wide) for it in np.broadcast_arrays(lhs, rhs))
    quotient = np.trunc(x / y)
    found = x - quotient * y
    for at in zip(*np.nonzero(np.isfinite(quotient) & np.isfinite(y)), strict=True):
        numerator, whole, divisor = (Fraction(it[at].item()) for it in (x, quotient, y))
        found[at] = float(numerator - whole * divisor)
    return np.where(np.isinf(y), x, found).astype(lhs.dtype)


def _flushed(numbers: Numbers) -> Numbers:
    """Numbers of which those of float32 below the normal ones are 0: so they are rounded."""
    small = np.abs(numbers) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(0, numbers), numbers) if numbers.itemsize == 4 else numbers


def _chosen(condition: Numbers, lhs: Numbers, rhs: Numbers) -> Numbers:
    """NumPy would make float64 of signed and unsigned integers."""
    return np.where(condition, lhs.astype(rhs.dtype), rhs)


def _clamping(clamp: Callable[..., Any]) -> Callable[..., Any]:
    """Without `propagate_nan`, NaN becomes the lower bound.

    Except between -b and b: there is an instruction for it, of which NaN becomes b. Whether that is
    taken only the compiler knows.
    """

    def clamped(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        found, nan = clamp(self, x, low, high, propagate_nan), np.isnan(x.data)
        if propagate_nan == interpreter._ir.PROPAGATE_NAN.ALL or not nan.any():
            return found
        if (nan & (low.data == -high.data)).any():
            raise NotImplementedError(f"tl.clamp of {x.dtype} from -b to b with NaN")
        found.data = np.where(nan, low.data, found.data)
        return found

    return clamped


def _unsigned(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """The upper half of a product of integers, which are unsigned."""

    def multiplied(self: Any, lhs: Any, rhs: Any) -> Any:
        dtype = lhs.data.dtype
        views = (type(it)(it.data.view(f"u{dtype.itemsize}"), it.dtype) for it in (lhs, rhs))
        found = multiply(self, *views)
        found.data = found.data.view(dtype)
        return found

    return multiplied


def _padding_with_nan(load: Callable[..., Any]) -> Callable[..., Any]:
    """A load that pads with NaN: of types that the interpreter has as their bits, too."""

    @functools.wraps(load)
    def padded(self: Any, *args: Any, **options: Any) -> Any:
        load_masked, with_nan = self.create_masked_load, interpreter._ir.PADDING_OPTION.PAD_NAN
        asked = with_nan in (getattr(args[0], "padding", None), *args, *options.values())

        def filled(pointers: Any, mask: Any, other: Any, *more: Any, **rest: Any) -> Any:
            kind = pointers.get_element_ty()
            if asked and kind.is_floating() and other.data.dtype.kind == "u":
                nan = np.full(1, np.nan, np.float32)
                bits = interpreter._convert_float(nan, tl.float32, kind, None)
                other.data = np.full_like(other.data, bits.item())
            return load_masked(pointers, mask, other, *more, **rest)

        self.create_masked_load = filled
        try:
            return load(self, *args, **options)
        finally:
            del self.create_masked_load

    return padded


# ---- reductions


def _added(how: Any, values: Any, compute: Any, **options: Any) -> Any:
    """A sum, or the sums or products of all elements up to each one.

    Of integers, it begins anew where it leaves its type.
    """
    kind, numbers = values.dtype.scalar, _numbers(values.handle)
    dtype = None if numbers.dtype == bool else numbers.dtype
    found = compute(numbers, axis=how.axis, dtype=dtype, **options)
    return how.to_tensor(_handle(found, kind).data, values.dtype)


def _reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction to the largest or smallest element without NaN, or to where it is.

    Where it is depends, with NaN, on the order in which elements are combined, and so it does if
    any of several equal ones will do. A compiled kernel has the order of its layout: here that is
    an error.
    """
    sides, ties = ("max", "min"), ("left", "fast")
    known = {getattr(tl.standard, f"_elementwise_{side}"): (side, "") for side in sides}
    for side, tie in itertools.product(sides, ties):
        known[getattr(tl.standard, f"_arg{side}_combine_tie_break_{tie}")] = side, tie

    def reduced(self: Any, operands: Any) -> Any:
        if self.combine_fn not in known:
            return reduce(self, operands)
        side, tie = known[self.combine_fn]
        kind, data = operands[0].dtype.scalar, _numbers(operands[0].handle)
        extreme = np.fmax if side == "max" else np.fmin
        found: Any = [extreme.reduce(data, axis=self.axis, keepdims=True)]
        equal = data == found[0]
        if tie:
            several = tie == "fast" and (equal.sum(axis=self.axis) > 1).any()
            if several or (data != data).any():
                what = "equal numbers" if several else "NaN"
                raise NotImplementedError(
                    f"tl.arg{side} of {kind} with {what}: a GPU combines them in another order"
                )
            where = operands[1].handle.data
            first = np.where(equal, where, np.iinfo(where.dtype).max)
            found.append(first.min(axis=self.axis, keepdims=True))
        elif data.dtype.kind == "f":  # of both zeros, -0 is the lesser one
            zeros = equal & (data == 0)
            zero = np.copysign(data.dtype.type(0), -1 if side == "min" else 1)
            signed = (np.signbit(data) == np.signbit(zero)) & zeros
            found[0] = np.where(signed.any(axis=self.axis, keepdims=True), zero, found[0])
        found[0] = _handle(found[0], kind).data
        if not self.keep_dims:
            found = [it.squeeze(self.axis) for it in found]
        return [self.to_tensor(it, of.dtype.scalar) for it, of in zip(found, operands, strict=True)]

    return reduced
