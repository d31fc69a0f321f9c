"""Runs kernels in Triton's interpreter, and reports what each program reads and writes."""

from __future__ import annotations

import ast
import functools
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from memtraffic import device
from memtraffic.errors import CountError, LaunchError, MemtrafficError
from memtraffic.triton_adapter import capture
from memtraffic.triton_adapter.launch import (
    Kernel,
    check_arguments,
    check_launch,
    naming_version,
    tensors_of,
)
from memtraffic.triton_adapter.libdevice import call_assembly, call_library, prepared_once
from memtraffic.triton_adapter.memory import Meter, rewritten
from memtraffic.triton_adapter.mend import mend_interpreter
from memtraffic.triton_adapter.patching import (
    RUNNING,
    replaced,
    replaced_here,
    unwatched,
    watching,
)
from memtraffic.triton_adapter.reach import NUMBER
from memtraffic.triton_adapter.relaunch import Relaunched, as_tensor, relaunch


@contextmanager
def interpreting(meter: Meter) -> Iterator[None]:
    """Context manager: kernels launched inside are interpreted, and report to `meter`.

    So they are in a process that compiles its kernels, too. What other threads launch meanwhile
    runs as it would without.
    """
    with watching(), ExitStack() as stack:
        if device.HAS_TRITON:
            with RUNNING, naming_version(CountError):
                stack.enter_context(_replaced_for(meter))
        try:
            yield
        finally:
            with RUNNING:  # once a launch of another thread has ended
                stack.close()


@contextmanager
def _replaced_for(meter: Meter) -> Iterator[None]:
    """Context manager, entered with the lock, as it calls what it finds in the interpreter."""
    from triton.compiler import CompiledKernel
    from triton.language import core
    from triton.runtime import interpreter, jit

    mend_interpreter()
    # Of meters inside each other, the innermost sees a launch.
    compile_only = unwatched(jit.JITFunction.run)
    run_interpreted = unwatched(interpreter.InterpretedFunction.run)
    call_interpreted = unwatched(interpreter.InterpretedFunction.__call__)

    # In a process that compiles, kernels and the functions they call are jitted ones. A launch
    # returns the compiled kernel, which may then be launched itself.
    def run(kernel: Kernel, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        jitted = isinstance(kernel, jit.JITFunction)
        if warmup and jitted:
            with as_before():
                return compile_only(kernel, *args, grid=grid, warmup=True, **options)
        function = interpreter.InterpretedFunction(kernel.fn) if jitted else kernel
        with RUNNING, replaced(*inside):
            running.append(kernel)
            try:
                run_interpreted(function, *args, grid=grid, warmup=warmup, **options)
            finally:
                running.pop()
        return Relaunched(kernel, args, options) if jitted else None

    def launched(args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if blocks is not None:
            unprepare()  # it may compile
            blocks.launched(running[-1], args, options)

    def call(function: Kernel, *args: Any, **options: Any) -> Any:
        if not running and next(tensors_of(args), None) is not None:
            name = function.fn.__name__
            raise LaunchError(f"{name} is called without a grid: launch it as {name}[grid](...)")
        if isinstance(function, jit.JITFunction):
            function = interpreter.InterpretedFunction(function.fn)
        return call_interpreted(function, *args, **options)

    def run_autotuned(tuner: Kernel, *args: Any, **options: Any) -> Any:
        only = getattr(meter, "config", None)
        launches = capture.configurations_of(tuner, args, options, blocks is not None, only)
        # The interpreter sees no option of a launch that is not an argument of the kernel.
        # Whoever sees blocks sees those, too.
        different: dict[Any, capture.Configuration] = {}
        for launch in launches:
            seen = str(launch if blocks is None else launch.config)
            different.setdefault((seen, launch.config.pre_hook), launch)
        tensors = list(tensors_of([*args, *options.values()]))
        repeated = capture.from_equal_values(different.values(), tensors)
        meter.autotuned(tuner.base_fn.__name__, repeated)
        tuner.best_config = launches[0].config
        return launches[0].compiled

    numbers: dict[int, int] = {}  # of the arguments of a launch, by the id of the tensor
    running: list[Kernel] = []  # the kernels that are being launched
    blocks: Any = meter if hasattr(meter, "block") else None

    @contextmanager
    def as_before() -> Iterator[None]:
        with RUNNING:
            unprepare()
            yield

    executor = _metered_executor(interpreter.GridExecutor, meter, numbers, launched)
    inside = [  # what a launch finds that is watched
        (interpreter._interpreter, "meter", meter),
        (interpreter, "GridExecutor", executor),  # nobody else's
        (interpreter, "_implicit_cvt", _typed(interpreter._implicit_cvt, numbers)),
        (interpreter.FunctionRewriter, "ast_transformer", _transformer(interpreter)),
        (interpreter.InterpretedFunction, "rewritten_fn", rewritten),
        (interpreter.InterpreterBuilder, "create_extern_elementwise", call_library),
        (interpreter.InterpreterBuilder, "create_inline_asm", call_assembly),
    ]
    with (
        replaced((core, "warn", _warn_once)),  # before the language is prepared, and so restored
        prepared_once(interpreter) as unprepare,
        replaced_here(
            *((kind, "run", run) for kind in (jit.JITFunction, interpreter.InterpretedFunction)),
            beside=as_before,
        ),
        replaced_here(
            *((tuner, "run", run_autotuned) for tuner in capture.autotuners()),
            (jit.JITFunction, "__call__", call),
            (interpreter.InterpretedFunction, "__call__", call),
            (CompiledKernel, "__getitem__", relaunch),
        ),
    ):
        yield


@functools.cache
def _warn_once(message: str, category: type[Warning] = UserWarning, **_: Any) -> None:
    """Warns of what the language no longer likes once, not in each program of each launch."""
    warnings.warn(message, category, stacklevel=3)


def _metered_executor(
    executor: Any, meter: Meter, numbers: dict[int, int], launched: Callable[..., None]
) -> type:
    """The class that runs the programs of one launch, reporting the launch to `meter`.

    It gives each argument the next of `numbers`. launched: called before the first program.
    """

    class MeteredExecutor(executor):
        grid: Any

        def __call__(self, *args: Any, **options: Any) -> None:
            self.grid = check_launch(self.fn.__name__, self.grid, options.get("num_warps"))
            check_arguments(self.fn, args, options)
            tensors = list(tensors_of([*args, *options.values()]))
            # A GPU gives no warning where an exponential overflows.
            with meter.launch(self.fn.__name__, tensors), np.errstate(all="ignore"):
                launched(args, options)
                named = {name: as_tensor(value) for name, value in options.items()}
                super().__call__(*map(as_tensor, args), **named)

        def _init_args_hst(self, args: Any, options: Any) -> Any:
            host_args, host_options = super()._init_args_hst(args, options)
            named = dict(zip(self.arg_names, host_args, strict=False)) | host_options
            numbers.clear()
            for name, value in named.items():
                for tensor in tensors_of([value]):
                    numbers[id(tensor)] = len(numbers) + 1
                    meter.bind(name, tensor)
            return host_args, host_options

    return MeteredExecutor


def _transformer(interpreter: Any) -> Any:
    """What rewrites a kernel's source for the interpreter: Triton's rewriter, and two things more.

    The compiler makes elementwise operations of `and`, `or` and `not`, and evaluates all operands
    that are tensors. Python, for which a block is true, returns the last operand of `a and b`.
    The compiler makes a tensor, which has methods such as `to`, of the variable of a loop over
    `range`. In Python it is an int.
    """
    from triton.language import tensor

    semantic = interpreter.interpreter_semantic

    def combine(method: str, *operands: Callable[[], Any]) -> Any:
        found = []
        for operand in operands:
            value = operand()
            if isinstance(value, tensor):
                found.append(value)
            elif bool(value) == (method == "logical_or"):
                return value
        return functools.reduce(getattr(semantic, method), found) if found else value

    def negate(value: Any) -> Any:
        is_block = isinstance(value, tensor) and value.type.is_block()
        return semantic.not_(value) if is_block else not value

    semantic._combine, semantic._negate = combine, negate  # a kernel reaches the semantic by name

    class Transformer(interpreter.ASTTransformer):
        def visit_Assign(self, node: ast.Assign) -> ast.stmt:
            node.value = self.visit(node.value)  # which Triton's visit_Assign does not
            return super().visit_Assign(node)

        def visit_For(self, node: ast.For) -> ast.stmt:
            self.generic_visit(node)
            if ast.unparse(node.iter).startswith(("range(", "tl.range(")):
                name = ast.unparse(node.target)
                node.body[:0] = ast.parse(f"{name} = interpreter_semantic.to_tensor({name})").body
            return node

        def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
            self.generic_visit(node)
            method = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
            nothing: Any = ast.arguments([], [], None, [], [], None, [])
            operands = (ast.Lambda(nothing, value) for value in node.values)
            return self._call(node, "_combine", ast.Constant(method), *operands)

        def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
            self.generic_visit(node)
            return self._call(node, "_negate", node.operand) if type(node.op) is ast.Not else node

        @staticmethod
        def _call(node: ast.expr, method: str, *args: ast.expr) -> ast.expr:
            owner = ast.Name("interpreter_semantic", ast.Load())
            call = ast.Call(ast.Attribute(owner, method, ast.Load()), [*args], [])
            return ast.copy_location(call, node)

    return Transformer()


def _typed(convert: Callable[[Any], Any], numbers: dict[int, int]) -> Callable[[Any], Any]:
    """The interpreter's conversion of a launch's arguments, with that of floats and bools.

    A pointer keeps which of `numbers` its tensor has.

    A compiled kernel sees a Python float as a float32 and a bool as an int1, each of them a
    `tl.tensor`, which has methods such as `to`. The interpreter gives the float as it is, and fails
    on the bool.
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def converted(value: Any) -> Any:
        for python, numpy, dtype in ((bool, np.bool_, tl.int1), (float, np.float32, tl.float32)):
            if isinstance(value, python):
                return tl.tensor(TensorHandle(np.array([value], numpy), dtype), dtype)
        found = convert(value)
        if hasattr(value, "data_ptr"):
            found.handle.attr[NUMBER] = numbers.get(id(getattr(value, "base", value)), 0)
        return found

    return converted


def operations() -> int:
    """How many operations on blocks the interpreter has made so far: what takes it time."""
    from triton.runtime.interpreter import interpreter_builder

    return int(interpreter_builder.operations)


def interpreter_cause(error: BaseException) -> BaseException:
    """What a kernel really raised: `error` without the interpreter's wrapping."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


# In the message of an error: the interpreter has no such operation, function of a GPU, or type.
# The last is what a constant has where it is compiled.
_LACKING = "'InterpreterBuilder' .* no attr|`_semantic` argument|to ir type|no attribute 'value'"


def name_kernel(kernel: str, error: BaseException) -> None:
    """Puts a kernel's name, and the line of it that failed, into the message of what it raised.

    Raises CountError if the interpreter lacks what the kernel does.
    """
    cause = interpreter_cause(error)
    if isinstance(cause, NotImplementedError) or re.search(_LACKING, str(cause)):
        raise CountError(f"{kernel} cannot be interpreted: {cause}") from error
    said = str(cause)
    if isinstance(cause, MemtrafficError) or len(cause.args) > 1 or said.startswith(f"{kernel}: "):
        return
    if not said:  # an assertion without a reason; that of a kernel is Triton's function
        *_, caller, last = [None, *traceback.extract_tb(cause.__traceback__)]
        failed = caller if caller and last and last.name == "_new_static_assert" else last
        said = f"{failed.line if failed else type(cause).__name__} fails"
    if "Unsupported ptr type" in said:
        said += ", where it takes a tensor (inputs '16' are a number, '16,' are 16 elements)"
    cause.args = (f"{kernel}: {said}{_line_of(kernel, error)}",)


def _line_of(kernel: str, error: BaseException) -> str:
    """The line of a kernel in which something failed, for a message."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.name == kernel and frame.line:
            return f", at {os.path.basename(frame.filename)}:{frame.lineno}: {frame.line}"
    inner = error.__cause__ if type(error).__name__ == "InterpreterError" else None
    return _line_of(kernel, inner) if inner else ""
