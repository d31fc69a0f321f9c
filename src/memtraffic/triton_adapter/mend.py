"""Lets Triton's interpreter run what compiled kernels may do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from memtraffic.triton_adapter.launch import triton_version
from memtraffic.triton_adapter.memory import Memory
from memtraffic.triton_adapter.patching import RUNNING, replaced
from memtraffic.triton_adapter.reach import keep_numbers
from memtraffic.triton_adapter.turns import ACCESSES, cooperative_executor, polling, taking_turns


def mend_interpreter() -> None:
    """Lets the interpreter run what compiled kernels may do.

    Programs of a cooperative launch, which may wait for one another, take turns (`Turns`). Odd
    values become what they do on a GPU, and arithmetic may be in bfloat16. In Triton 3.6, a scalar
    may be the bound of a loop. In Triton 3.9, a mask may be made of a scalar and a vector. Pointers
    keep the number of their argument.
    """
    from triton.runtime import interpreter

    from memtraffic.triton_adapter.values import compute_as_compiled

    if not hasattr(interpreter, "mended"):
        interpreter.GridExecutor = cooperative_executor(interpreter.GridExecutor)
        builder, memory = interpreter.InterpreterBuilder, Memory(interpreter)
        for name in ACCESSES:
            setattr(builder, name, taking_turns(name, getattr(builder, name), memory))
        if hasattr(builder, "create_atomic_poll"):  # since Triton 3.9
            builder.create_atomic_poll = polling(builder.create_atomic_poll)
        for name in ("wait", "launch_dependents"):  # since Triton 3.8; they move nothing
            setattr(builder, f"create_grid_dependency_{name}", lambda builder: None)
        kernel = interpreter.InterpretedFunction
        kernel.run = _one_at_a_time(kernel.run)
        rewriter = interpreter.FunctionRewriter
        rewriter._compile_and_exec = _closed(rewriter._compile_and_exec)
        interpreter._interpreter = memory
        compute_as_compiled()
        keep_numbers(interpreter)
        interpreter._get_np_dtype = _known_by_name(interpreter._get_np_dtype)
        # It would check each integer for an overflow, and say so only where `debug` is asked for.
        own = interpreter.interpreter_builder
        own.options = replace(own.options, sanitize_overflow=own.options.debug)
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


def _closed(execute: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's functions, for which, as where they are compiled, a closure is global."""

    def compile_and_exec(rewriter: Any, tree: Any) -> Any:
        fn = rewriter.fn
        known = fn.__globals__ | inspect.getclosurevars(fn).nonlocals
        closed = SimpleNamespace(__name__=fn.__name__, __globals__=known)
        with replaced((rewriter, "fn", closed if fn.__closure__ else fn)):
            return execute(rewriter, tree)

    return compile_and_exec


def _known_by_name(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's types of the language's, which the interpreter asks for with each operation."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        if kind.scalar.name not in known:
            known[kind.scalar.name] = numpy_type(kind.scalar)
        return known[kind.scalar.name]

    return find


def _take_scalar_bounds(interpreter: Any) -> None:
    """Lets the interpreter of Triton 3.6 take a scalar as the bound of a loop, as 3.7 does.

    With NumPy 2.4 or later it cannot: https://github.com/triton-lang/triton/issues/9171.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.squeeze()))

    interpreter._patch_lang_tensor = mended
