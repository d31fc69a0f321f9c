"""Runs kernels in Triton's interpreter, and reports what each program reads and writes."""

from __future__ import annotations

import ast
import dis
import functools
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from memtraffic import device
from memtraffic.errors import LaunchError, MemtrafficError
from memtraffic.triton_adapter.capture import (
    Configuration,
    autotuners,
    configurations_of,
    from_equal_values,
)
from memtraffic.triton_adapter.launch import (
    Grid,
    Kernel,
    check_arguments,
    check_launch,
    tensors_of,
)
from memtraffic.triton_adapter.libdevice import call_assembly, call_library, prepared_once
from memtraffic.triton_adapter.mend import mend_interpreter
from memtraffic.triton_adapter.patching import lock, replaced
from memtraffic.triton_adapter.reach import marked, unmarked
from memtraffic.triton_adapter.relaunch import Relaunched, as_tensor, relaunch

Access: TypeAlias = Literal["read", "written"]
Block: TypeAlias = Literal["read", "written", "atomic"]


class Meter(Protocol):
    """What `interpreting` reports to."""

    def launch(self, kernel: str, tensors: list[torch.Tensor]) -> AbstractContextManager[object]:
        """Entered for the time of one launch. tensors: its arguments as the caller gave them."""

    def bind(self, argument: str, tensor: torch.Tensor) -> None:
        """An argument as the interpreter sees it: on the CPU, where `access` has its addresses.

        Called for each tensor of a tuple; a tensor descriptor stands for its base. The first of a
        launch has number 1 in `access`.
        """

    def access(
        self,
        kind: Access,
        addresses: np.ndarray[Any, Any],
        itemsize: int,
        program: Grid,
        grid: Grid,
        numbers: np.ndarray[Any, Any],
    ) -> None:
        """One load or store of one program: the addresses, in bytes, of the unmasked elements.

        numbers: of the argument that the pointer to each was made from; 0 for none.
        """

    def autotuned(self, kernel: str, launches: Iterable[Configuration]) -> None:
        """An autotuned kernel is launched: `launches` are those of its configurations.

        They must be made one after the other, as they are got.
        """


Position: TypeAlias = tuple[int, int]  # a line and a column


class Site(NamedTuple):
    """Where in the source a call is made: from its first line and column to its last.

    bare: whether it has no arguments. inner: from where to where the calls among its arguments go.
    """

    file: str
    begin: Position
    end: Position
    bare: bool = False
    inner: tuple[tuple[Position, Position], ...] = ()

    def marks(self, file: str, line: int, column: int) -> bool:
        """Whether the compiler marks what this call does with such a place.

        That is where its last argument begins, or the call itself if it has none.
        """
        place = line, column
        after = self.begin <= place if self.bare else self.begin < place
        return (file == self.file and after and place < self.end) and not any(
            begin < place < end for begin, end in self.inner
        )


class BlockMeter(Meter, Protocol):
    """A meter that is also told of whole blocks, and of how kernels are launched."""

    def launched(self, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Called at the begin of each launch, after `launch`: what is launched, and with what."""

    def block(
        self,
        kind: Block,
        sites: tuple[Site, ...],
        addresses: np.ndarray[Any, Any],
        mask: np.ndarray[Any, Any],
        itemsize: int,
        program: Grid,
    ) -> None:
        """One load, store or atomic operation: the addresses, in bytes, of a whole block.

        sites: of the call, and of the calls of the functions that it is in, to the kernel's.
        """


@contextmanager
def interpreting(meter: Meter) -> Iterator[None]:
    """Context manager: kernels launched inside are interpreted, and report to `meter`.

    So they are in a process that compiles its kernels, too. meter: it may be a `BlockMeter`.
    """
    if not device.HAS_TRITON:
        yield
        return
    with lock, _replaced_for(meter):
        yield


@contextmanager
def _replaced_for(meter: Meter) -> Iterator[None]:
    """Context manager, entered with the lock, as it calls what it finds in the interpreter."""
    from triton.compiler import CompiledKernel
    from triton.language import core
    from triton.runtime import interpreter, jit

    mend_interpreter()
    compile_only = jit.JITFunction.run

    # In a process that compiles, kernels and the functions they call are jitted ones. A launch
    # returns the compiled kernel, which may then be launched itself.
    def run(kernel: Kernel, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        if warmup:
            unprepare()
            return compile_only(kernel, *args, grid=grid, warmup=True, **options)
        function = interpreter.InterpretedFunction(kernel.fn)
        function.jitted = kernel
        function.run(*args, grid=grid, warmup=False, **options)
        return Relaunched(kernel, args, options)

    run_interpreted = interpreter.InterpretedFunction.run

    def run_reported(function: Kernel, *args: Any, **options: Any) -> Any:
        running.append(getattr(function, "jitted", function))
        try:
            return run_interpreted(function, *args, **options)
        finally:
            running.pop()

    def launched(args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if blocks is not None:
            unprepare()  # it may compile
            blocks.launched(running[-1], args, options)

    call_interpreted = interpreter.InterpretedFunction.__call__

    def call(function: Kernel, *args: Any, **options: Any) -> Any:
        if not running and next(tensors_of(args), None) is not None:
            name = function.fn.__name__
            raise LaunchError(f"{name} is called without a grid: launch it as {name}[grid](...)")
        if isinstance(function, jit.JITFunction):
            function = interpreter.InterpretedFunction(function.fn)
        return call_interpreted(function, *args, **options)

    def run_autotuned(tuner: Kernel, *args: Any, **options: Any) -> Any:
        launches = configurations_of(tuner, args, options, as_chosen=blocks is not None)
        # The interpreter sees no option of a launch that is not an argument of the kernel.
        # Whoever sees blocks sees those, too.
        different: dict[Any, Configuration] = {}
        for launch in launches:
            seen = str(launch if blocks is None else launch.config)
            different.setdefault((seen, launch.config.pre_hook), launch)
        tensors = list(tensors_of([*args, *options.values()]))
        meter.autotuned(tuner.base_fn.__name__, from_equal_values(different.values(), tensors))
        tuner.best_config = launches[0].config
        return launches[0].compiled

    numbers: dict[int, int] = {}  # of the arguments of a launch, by the id of the tensor
    running: list[Kernel] = []  # the kernels that are being launched
    blocks: Any = meter if hasattr(meter, "block") else None
    metered = functools.partial(_metered_executor, meter=meter, numbers=numbers, launched=launched)
    with (
        replaced(
            (interpreter, "_interpreter", _Memory(interpreter, meter, blocks)),
            (interpreter, "GridExecutor", metered(interpreter.GridExecutor)),  # nobody else's
            (interpreter, "_implicit_cvt", _typed(interpreter._implicit_cvt, numbers)),
            (interpreter.FunctionRewriter, "ast_transformer", _transformer(interpreter)),
            (interpreter.InterpretedFunction, "rewritten_fn", _rewritten),
            (interpreter.InterpretedFunction, "run", run_reported),
            (interpreter.InterpreterBuilder, "create_extern_elementwise", call_library),
            (interpreter.InterpreterBuilder, "create_inline_asm", call_assembly),
            *((tuner, "run", run_autotuned) for tuner in autotuners("run")),
            (core, "warn", _warn_once),
            (jit.JITFunction, "run", run),
            (jit.JITFunction, "__call__", call),
            (interpreter.InterpretedFunction, "__call__", call),
            (CompiledKernel, "__getitem__", relaunch),
        ),
        prepared_once(interpreter) as unprepare,
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
            name, grid = self.fn.__name__, self.grid
            self.grid = check_launch(name, grid, options.get("num_warps"))
            if callable(grid):
                self.grid = lambda constants: check_launch(name, grid(constants))
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


_rewritten: dict[Any, Any] = {}  # by function, what `_transformer` made of it


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

    A pointer holds which of `numbers` its tensor has.

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
            number = numbers.get(id(getattr(value, "base", value)), 0)
            found.handle.data = marked(found.handle.data, number)
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


def cannot_interpret(error: BaseException) -> bool:
    """Whether Triton's interpreter lacks what a kernel that raised this does."""
    return isinstance(error, NotImplementedError) or bool(re.search(_LACKING, str(error)))


def name_kernel(kernel: str, error: BaseException) -> None:
    """Puts a kernel's name, and the line of it that failed, into the message of what it raised."""
    cause = interpreter_cause(error)
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


class _Memory:
    """Stands for the interpreter's memory: reports each access to a meter, then makes it."""

    def __init__(self, interpreter: Any, meter: Meter, blocks: BlockMeter | None) -> None:
        self._real = interpreter._interpreter
        self._builder = interpreter.interpreter_builder
        self._meter, self._blocks = meter, blocks
        self._sites = _Sites()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _report(
        self, kinds: tuple[Access, ...], block: Block | None, pointers: Any, mask: Any, size: int
    ) -> None:
        """Tells of accesses of the unmasked elements, and, if asked for, of the whole block."""
        addresses, numbers = unmarked(np.asarray(pointers))
        mask = np.asarray(mask, dtype=bool)
        program, grid = tuple(self._builder.grid_idx), tuple(self._builder.grid_dim)
        for kind in kinds:
            self._meter.access(kind, addresses[mask], size, program, grid, numbers[mask])
        if block and self._blocks is not None:
            self._blocks.block(block, self._sites.now(), addresses, mask, size, program)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._report(("read",), "read", pointers, mask, np.dtype(dtype).itemsize)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._report(("written",), "written", pointers, mask, value.dtype.itemsize)
        return self._real.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._report(("read", "written"), "atomic", pointers, mask, value.dtype.itemsize)
        return self._real.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        every = np.ones(pointers.shape, dtype=bool)
        self._report(("read",), "atomic", pointers, every, value.dtype.itemsize)
        found = self._real.atomic_cas(pointers, expected, value, order)
        self._report(("written",), None, pointers, found == expected, value.dtype.itemsize)
        return found


class _Sites:
    """Where in a kernel's source the interpreter is."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, bool] = {}  # whether they are of a kernel
        self._found: dict[CodeType, list[Site]] = {}  # by the number of an instruction

    def now(self) -> tuple[Site, ...]:
        """The call that is being made, and those of the functions that it is in."""
        sites: list[Site] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code not in self._codes:
                self._codes[code] = any(
                    getattr(function, "__code__", None) is code for function in _rewritten.values()
                )
            if self._codes[code]:
                sites.append(self._site(code, frame.f_lasti))
            frame = frame.f_back
        return tuple(sites)

    def _site(self, code: CodeType, instruction: int) -> Site:
        if code not in self._found:
            self._found[code] = _calls(code)
        return self._found[code][instruction // 2]


def _calls(code: CodeType) -> list[Site]:
    """What each instruction of a function belongs to, which for some of them is a call."""
    file = os.path.basename(code.co_filename)
    spans, calls = [], {}  # from where to where they go, and whether they have no arguments
    for places in code.co_positions():
        begin, end, first, last = (number or 0 for number in places)
        spans.append(((begin, first), (end, last)))
    for step in dis.get_instructions(code):
        if step.opname.startswith("CALL"):
            calls[spans[step.offset // 2]] = step.opname == "CALL" and not step.arg

    def inner(begin: Position, end: Position) -> tuple[tuple[Position, Position], ...]:
        within = (it for it in calls if begin <= it[0] and it[1] <= end and it != (begin, end))
        return tuple(sorted(within))

    sites = {span: Site(file, *span, calls.get(span, False), inner(*span)) for span in set(spans)}
    return [sites[span] for span in spans]
