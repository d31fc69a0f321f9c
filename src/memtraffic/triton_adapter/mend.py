"""Lets Triton's interpreter run what compiled kernels may do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from memtraffic.triton_adapter.launch import triton_version
from memtraffic.triton_adapter.memory import Memory
from memtraffic.triton_adapter.patching import RUNNING, replaced
from memtraffic.triton_adapter.reach import keep_numbers
from memtraffic.triton_adapter.turns import ACCESSES, cooperative_executor, taking_turns
from memtraffic.triton_adapter.values import compute_as_compiled


def mend_interpreter() -> None:
    """Lets the interpreter run what compiled kernels may do.

    Programs of a cooperative launch, which may wait for one another, take turns (`Turns`). Odd
    values become what they do on a GPU. Arithmetic may be in bfloat16. In Triton 3.6, a scalar may
    be the bound of a loop. In Triton 3.9, a mask may be made of a scalar and a vector. Pointers
    keep the number of their argument.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "mended"):
        interpreter.GridExecutor = cooperative_executor(interpreter.GridExecutor)
        builder, memory = interpreter.InterpreterBuilder, Memory(interpreter)
        for name in ACCESSES:
            setattr(builder, name, taking_turns(name, getattr(builder, name), memory))
        for name in ("wait", "launch_dependents"):  # since Triton 3.8; they move nothing
            setattr(builder, f"create_grid_dependency_{name}", lambda builder: None)
        kernel = interpreter.InterpretedFunction
        kernel.run = _one_at_a_time(kernel.run)
        interpreter._interpreter = memory
        compute_as_compiled(interpreter)
        keep_numbers(interpreter)
        interpreter._get_np_dtype = _known_by_name(interpreter._get_np_dtype)
        # It would check each integer for an overflow, and say so only where `debug` is asked for.
        own = interpreter.interpreter_builder
        own.options = replace(own.options, sanitize_overflow=own.options.debug)
        _take_bfloat16(interpreter)
        if triton_version() < (3, 7):
            _take_scalar_bounds(interpreter)
        interpreter.mended = True


def _one_at_a_time(run: Callable[..., Any]) -> Callable[..., Any]:
    """Launches of several threads one after the other, as the interpreter has one state for all.

    It prepares the language for each call of a function, which takes it more time than many of them
    take. Once a launch will do, for each module's functions.
    """
    from triton.runtime import interpreter

    @functools.wraps(run)
    def launch(*args: Any, **options: Any) -> Any:
        with RUNNING:
            prepare, scopes = interpreter._patch_lang, dict[int, Any]()

            def prepare_once(function: Any) -> Any:
                names = id(function.__globals__)
                scopes[names] = scopes.get(names) or prepare(function)
                return scopes[names]

            with replaced((interpreter, "_patch_lang", prepare_once)):
                return run(*args, **options)

    return launch


def _known_by_name(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's types of the language's, which the interpreter asks for with each operation."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        if kind.scalar.name not in known:
            known[kind.scalar.name] = numpy_type(kind.scalar)
        return known[kind.scalar.name]

    return find


def _take_bfloat16(interpreter: Any) -> None:
    """Lets the interpreter compute in bfloat16: in float32, and rounded to nearest even.

    It has numbers of bfloat16 as integers, their bits, and would compute with these; what it
    converts, it would cut off; and before Triton 3.9 it has no constants of this type. See
    https://github.com/triton-lang/triton/pull/10945.
    """
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def is_bfloat16(value: Any) -> bool:
        return isinstance(value, handle) and value.dtype.scalar == tl.bfloat16

    def widened(value: Any) -> Any:
        if not is_bfloat16(value):
            return value
        return handle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(data: np.ndarray[Any, Any]) -> Any:
        numbers = torch.from_numpy(np.array(data, np.float32, order="C")).bfloat16()
        return handle(numbers.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    def widening(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def compute(self: Any, *args: Any) -> Any:
            self.operations += 1
            if not is_bfloat16(args[0]):  # then no other is
                return method(self, *args)
            operands = [arg for arg in args if isinstance(arg, handle)]
            result = method(self, *map(widened, args))
            # Its type is that of the last operand, but for comparisons.
            kept = result.data.dtype == bool or not is_bfloat16(operands[-1])
            return result if kept else rounded(result.data)

        return compute

    def casting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def cast(self: Any, src: Any, dst_type: Any) -> Any:
            if dst_type.scalar == tl.bfloat16:
                return src if is_bfloat16(src) else rounded(src.data)
            return method(self, widened(src), dst_type)

        return cast

    def summing(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def total(self: Any, values: Any) -> Any:
            if not is_bfloat16(values.handle):
                return method(self, values)
            numbers = widened(values.handle).data
            found = np.sum(numbers, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(rounded(found).data, values.dtype)

        return total

    builder.operations = 0  # made so far
    for name in ("unary_op", "binary_op", "create_fma", "create_dot"):  # a choice needs bits alone
        setattr(builder, name, widening(getattr(builder, name)))
    builder.cast_impl = casting(builder.cast_impl)
    interpreter.ReduceOps.sum = summing(interpreter.ReduceOps.sum)
    builder.get_bf16 = lambda self, value: rounded(np.array([value]))


def _take_scalar_bounds(interpreter: Any) -> None:
    """Lets the interpreter of Triton 3.6 take a scalar as the bound of a loop, as 3.7 does.

    With NumPy 2.4 or later it cannot: https://github.com/triton-lang/triton/issues/9171.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.squeeze()))

    interpreter._patch_lang_tensor = mended
