"""Every private part of Triton that this package touches, for Triton 3.6 and 3.7.

Triton has no public way to watch its interpreter, to see which kernels a function launches, to
compile a kernel for a GPU that is absent, or to start a compiled kernel. All of that is here and
nowhere else, so that a new version of Triton needs changes in one file. The functions below import
Triton when they are called, not before.

While launches are captured or interpreted, methods of Triton's classes are replaced for the whole
process: a lock makes further threads that want the same wait for their turn.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from memtraffic import runtime

if TYPE_CHECKING:
    from memtraffic.gpus import Gpu

Kernel: TypeAlias = Any  # what @triton.jit, @triton.autotune or @triton.heuristics returns
CompiledKernel: TypeAlias = Any
Attributes: TypeAlias = dict[tuple[int, ...], list[list[Any]]]
Grid: TypeAlias = tuple[int, int, int]

MAX_IDLE_TURNS = 100  # a program may also look at memory several times without waiting

# The most threads of a program on any GPU, whose warps have 32 or more, and the most programs along
# each axis of a grid: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability".
MAX_THREADS, SMALLEST_WARP = 1024, 32
MAX_GRID = 2**31 - 1, 65535, 65535

_patching = threading.RLock()


class LaunchError(RuntimeError):
    """No GPU can make this launch; the message says why."""


def check_launch(kernel: str, grid: Any, num_warps: object = None) -> Any:
    """Returns the grid of a launch; raises LaunchError if no GPU can make it.

    grid: as it is launched; one that is a function is not looked at.
    """
    if isinstance(num_warps, int) and num_warps * SMALLEST_WARP > MAX_THREADS:
        raise LaunchError(
            f"{kernel}: {num_warps} warps per program are {num_warps * SMALLEST_WARP} threads or "
            f"more, and no GPU launches more than {MAX_THREADS}"
        )
    sizes: Any = grid if isinstance(grid, (tuple, list)) else ()
    for axis, (programs, most) in enumerate(zip(sizes, MAX_GRID, strict=False)):
        if isinstance(programs, int) and not 0 <= programs <= most:
            raise LaunchError(
                f"{kernel}: a grid of {' x '.join(map(str, grid))} programs: along axis {axis}, "
                f"CUDA launches up to {most}"
            )
    return grid


# ---- watching launches


@contextmanager
def capturing(record: Callable[[Kernel, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Context manager: `record(kernel, args, options)` is called in place of each kernel launch.

    An autotuned kernel is recorded once for each of its configurations. `warmup` does nothing.
    """
    if not runtime.HAS_TRITON:
        yield
        return
    from triton.runtime import autotuner, interpreter, jit

    def run(kernel: Kernel, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        if not warmup:
            check_launch(kernel.fn.__name__, grid)
            record(kernel, args, options)

    def run_autotuned(tuner: Kernel, *args: Any, **options: Any) -> None:
        for launch in _configurations(tuner, args, options):
            launch()

    with (
        _patching,
        _replaced(
            (jit.JITFunction, "run", run),
            (interpreter.InterpretedFunction, "run", run),
            (autotuner.Autotuner, "run", run_autotuned),
        ),
    ):
        yield


class Meter(Protocol):
    """What `interpreting` reports to."""

    def launch(self, kernel: str, tensors: list[torch.Tensor]) -> AbstractContextManager[object]:
        """Entered for the time of one launch. tensors: its arguments as the caller gave them."""

    def bind(self, argument: str, tensor: torch.Tensor) -> None:
        """An argument as the interpreter sees it: on the CPU, where `access` has its addresses.

        Called for each tensor of a tuple; a tensor descriptor stands for its base.
        """

    def access(
        self,
        kind: Literal["read", "written"],
        addresses: np.ndarray[Any, Any],
        itemsize: int,
        program: Grid,
        grid: Grid,
    ) -> None:
        """One load or store of one program: the addresses, in bytes, of the unmasked elements."""

    def autotuned(self, kernel: str, launches: Iterable[Configuration]) -> None:
        """An autotuned kernel is launched: `launches` are those of its configurations.

        They must be made one after the other, as they are got.
        """


@contextmanager
def interpreting(meter: Meter) -> Iterator[None]:
    """Context manager: kernels launched inside are interpreted, and report to `meter`.

    So they are in a process that compiles its kernels, too.
    """
    if not runtime.HAS_TRITON:
        yield
        return
    from triton.compiler import CompiledKernel
    from triton.runtime import autotuner, interpreter, jit

    _mend_interpreter()
    compile_only = jit.JITFunction.run

    # In a process that compiles, kernels and the functions they call are jitted ones. A launch
    # returns the compiled kernel, which may then be launched itself.
    def run(kernel: Kernel, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        if warmup:
            unprepare()
            return compile_only(kernel, *args, grid=grid, warmup=True, **options)
        function = interpreter.InterpretedFunction(kernel.fn)
        function.run(*args, grid=grid, warmup=False, **options)
        return _Relaunched(kernel, args, options)

    def relaunch(compiled: CompiledKernel, grid: Any) -> Callable[..., None]:
        kernel, constants = compiled.src.fn, compiled.src.constants
        named = {kernel.arg_names[path[0]]: constants[path] for path in constants if len(path) == 1}
        return _Relaunched(kernel, (), named)[grid]

    def call(function: Kernel, *args: Any, **options: Any) -> Any:
        return interpreter.InterpretedFunction(function.fn)(*args, **options)

    def run_autotuned(tuner: Kernel, *args: Any, **options: Any) -> Any:
        launches = _configurations(tuner, args, options)
        # The interpreter sees no option of a launch that is not an argument of the kernel.
        different: dict[Any, Configuration] = {}
        for launch in launches:
            different.setdefault((str(launch), launch.config.pre_hook), launch)
        tensors = list(_tensors([*args, *options.values()]))
        meter.autotuned(tuner.base_fn.__name__, _from_equal_values(different.values(), tensors))
        tuner.best_config = launches[0].config
        return launches[0].compiled

    tuners = [tuner for tuner in _with_subclasses(autotuner.Autotuner) if "run" in vars(tuner)]
    with (
        _patching,
        _replaced(
            (interpreter, "_interpreter", _Memory(interpreter, meter)),
            (interpreter, "GridExecutor", _metered_executor(interpreter.GridExecutor, meter)),
            (interpreter, "_implicit_cvt", _typed(interpreter._implicit_cvt)),
            (interpreter.FunctionRewriter, "ast_transformer", _transformer(interpreter)),
            (interpreter.InterpretedFunction, "rewritten_fn", _rewritten),
            (interpreter.InterpreterBuilder, "create_extern_elementwise", _call_library),
            *((tuner, "run", run_autotuned) for tuner in tuners),
            (jit.JITFunction, "run", run),
            (jit.JITFunction, "__call__", call),
            (CompiledKernel, "__getitem__", relaunch),
        ),
        _prepared_once(interpreter) as unprepare,
    ):
        yield


class _Relaunched:
    """Stands for the compiled kernel that a launch returns: launching it is interpreted.

    It is given the arguments in the kernel's order, with or without the constants among them.
    kernel: a jitted function. args, options: of the launch.
    """

    def __init__(self, kernel: Kernel, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self.launched = dict(zip(kernel.arg_names, args, strict=False)) | dict(options)
        for option in ("grid", "warmup"):
            self.launched.pop(option, None)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        parameters = self.kernel.params
        variable = [parameter.name for parameter in parameters if not parameter.is_constexpr]

        def launch(*args: Any, stream: object = None) -> None:
            names = variable if len(args) == len(variable) else self.kernel.arg_names
            named = dict(zip(names, args, strict=True))
            self.kernel.run(grid=grid, warmup=False, **self.launched | named)

        return launch


def _with_subclasses(owner: type[Any]) -> Iterator[type[Any]]:
    """`owner`, the classes derived from it, and those derived from them."""
    yield owner
    for subclass in owner.__subclasses__():
        yield from _with_subclasses(subclass)


@contextmanager
def driver_of(gpu: Gpu, registers: Callable[[bytes], int]) -> Iterator[None]:
    """Context manager: Triton's driver, which needs a GPU, answers as if `gpu` were here.

    It compiles and loads kernels, but runs none. registers: those per thread of a binary.
    """
    if not runtime.HAS_TRITON:
        yield
        return
    from triton.runtime import driver

    properties = {
        "multiprocessor_count": gpu.num_sms,
        "warpSize": gpu.warp_size,
        "max_num_regs": getattr(gpu, "registers_per_sm", 0),
        "max_shared_mem": gpu.shared_per_program,
    }

    def refuse(*args: object, **options: object) -> NoReturn:
        raise RuntimeError(f"{gpu.product} only stands in for a GPU: it runs no kernel")

    def load(name: str, binary: bytes, shared: int, index: int) -> tuple[object, ...]:
        return None, None, registers(binary), 0, gpu.max_threads_per_program

    answers = SimpleNamespace(
        launcher_cls=lambda source, metadata: refuse,
        get_benchmarker=lambda: refuse,
        get_current_device=lambda: 0,
        set_current_device=lambda index: None,
        get_current_stream=lambda index: 0,
        get_current_target=lambda: _target(gpu),
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_capability=lambda index=0: divmod(int(gpu.architecture), 10),
        utils=SimpleNamespace(get_device_properties=lambda index: properties, load_binary=load),
    )
    with _replaced((driver, "_active", answers)):
        yield


def _metered_executor(executor: Any, meter: Meter) -> type:
    """The class that runs the programs of one launch, reporting the launch to `meter`."""

    class MeteredExecutor(executor):
        grid: Any

        def __call__(self, *args: Any, **options: Any) -> None:
            name, grid = self.fn.__name__, self.grid
            check_launch(name, grid, options.get("num_warps"))
            if callable(grid):
                self.grid = lambda constants: check_launch(name, grid(constants))
            tensors = list(_tensors([*args, *options.values()]))
            # A GPU gives no warning where an exponential overflows.
            with meter.launch(self.fn.__name__, tensors), np.errstate(all="ignore"):
                named = {name: _pointer(value) for name, value in options.items()}
                super().__call__(*map(_pointer, args), **named)

        def _init_args_hst(self, args: Any, options: Any) -> Any:
            host_args, host_options = super()._init_args_hst(args, options)
            named = dict(zip(self.arg_names, host_args, strict=False)) | host_options
            for name, value in named.items():
                for tensor in _tensors([value]):
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
            call = ast.parse(f"interpreter_semantic._combine({method!r})", mode="eval").body
            assert isinstance(call, ast.Call)
            for value in node.values:
                made = ast.parse("lambda: 0", mode="eval").body
                assert isinstance(made, ast.Lambda)
                made.body = value
                call.args.append(made)
            return ast.copy_location(call, node)

        def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
            self.generic_visit(node)
            if not isinstance(node.op, ast.Not):
                return node
            call = ast.parse("interpreter_semantic._negate()", mode="eval").body
            assert isinstance(call, ast.Call)
            call.args = [node.operand]
            return ast.copy_location(call, node)

    return Transformer()


@dataclass
class _Pointer:
    """An argument that is no tensor but has an address, such as a view of a package's own kind.

    The compiler takes whatever has `data_ptr` and `dtype`; the interpreter needs the memory, too.
    base: the tensor that the argument holds, in which the address lies.
    """

    address: int
    type: Any
    base: torch.Tensor


def _pointer(value: Any) -> Any:
    """A `_Pointer` for an argument of another kind than the interpreter knows.

    Raises NotImplementedError if the argument holds no tensor on the CPU with its address.
    """
    from triton.runtime.jit import TensorWrapper, mangle_type

    if not hasattr(value, "data_ptr") or isinstance(value, (torch.Tensor, TensorWrapper)):
        return value
    address = value.data_ptr()
    for base in vars(value).values():
        if isinstance(base, torch.Tensor) and base.untyped_storage().device.type == "cpu":
            start = base.untyped_storage().data_ptr()
            if start <= address <= start + base.untyped_storage().nbytes():
                return _Pointer(address, mangle_type(value), base)
    raise NotImplementedError(f"an argument is a {type(value).__name__}, of unknown memory")


def _typed(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's conversion of a launch's arguments, with that of floats and bools.

    A compiled kernel sees a Python float as a float32 and a bool as an int1, each of them a
    `tl.tensor`, which has methods such as `to`. The interpreter gives the float as it is, and fails
    on the bool.
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def converted(value: Any) -> Any:
        if isinstance(value, _Pointer):
            dtype = tl.str_to_ty(value.type, None)
            return tl.tensor(TensorHandle(np.array([value.address], np.uint64), dtype), dtype)
        for python, numpy, dtype in ((bool, np.bool_, tl.int1), (float, np.float32, tl.float32)):
            if isinstance(value, python):
                return tl.tensor(TensorHandle(np.array([value], numpy), dtype), dtype)
        return convert(value)

    return converted


@contextmanager
def _prepared_once(interpreter: Any) -> Iterator[Callable[[], None]]:
    """Context manager in which functions are prepared for the interpreter, with libdevice, once.

    Gives a function that undoes what was prepared until then.

    The compiler replaces the functions of libdevice, which do nothing, by those of the GPU's
    library, wherever a kernel's globals hold one or a module of them. The interpreter does not.
    Here they become CUDA's, whose values `_call_library` computes. The interpreter itself prepares
    the language anew for each call of a function: that takes milliseconds, and it leaves parts of
    the language prepared.
    """
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice
    from triton.language.extra.hip import libdevice as hip_libdevice

    libraries = {module.__name__: module for module in (libdevice, cuda_libdevice, hip_libdevice)}
    language = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    new_scope = interpreter._LangPatchScope
    patch_language = getattr(interpreter._patch_lang, "original", interpreter._patch_lang)
    prepared: dict[int, dict[str, Any]] = {}

    def prepare_library() -> None:
        undo.callback(prepared.clear)
        undo.enter_context(_restored(*language, *libraries.values()))
        for library in (cuda_libdevice, hip_libdevice):
            interpreter._patch_builtin(library, interpreter.interpreter_builder, new_scope())
        for name in set(vars(libdevice)) & set(vars(cuda_libdevice)):
            if not name.startswith("__"):
                setattr(libdevice, name, getattr(cuda_libdevice, name))

    def prepare(function: Any) -> Any:
        names = function.__globals__
        if not prepared:
            prepare_library()
            tl.dtype.value = property(lambda dtype: dtype)  # a constant is compiled as a constexpr
        if id(names) not in prepared:
            prepared[id(names)] = names
            if any(value is tl or value is tl.core for value in names.values()):
                patch_language(function)
            for name, value in list(names.items()):
                library = libraries.get(getattr(value, "__module__", None) or "")
                if library is not None and hasattr(library, value.__name__):
                    undo.callback(names.__setitem__, name, value)
                    names[name] = getattr(library, value.__name__)
        return new_scope()

    prepare.original = patch_language  # type: ignore[attr-defined]  # one meter inside another
    with _replaced((interpreter, "_patch_lang", prepare)), ExitStack() as undo:
        yield undo.close


# What CUDA's libdevice and AMD's ocml compute, by PyTorch's function of the same name, or another.
_LIBRARY: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "acos acosh add asin asinh atan atan2 atanh ceil copysign cos cosh div erf erfc erfinv exp "
        "exp2 expm1 floor fmod hypot isfinite isinf isnan ldexp lgamma log log10 log1p log2 mul "
        "nextafter pow rsqrt signbit sin sinh sqrt sub tan tanh trunc"
    ).split()
} | {
    "fabs": torch.abs,
    "fdivide": torch.div,
    "finite": torch.isfinite,
    "fma": lambda x, y, z: x * y + z,
    "nearbyint": torch.round,
    "powi": torch.pow,
    "pown": torch.pow,
    "rcp": torch.reciprocal,
    "rint": torch.round,
    "round": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)),
}


def _call_library(
    builder: Any, library: str, path: str, symbol: str, args: list[Any], dtype: Any, pure: bool
) -> Any:
    """The values of a function that the compiler would link in, such as `__nv_tanhf`.

    Raises NotImplementedError for a function that is not known here.
    """
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    found = re.fullmatch(r"__(?:nv|ocml)_(?:fast_)?(\w+?)(?:_r[nzdu])?(?:_f(?:32|64))?", symbol)
    name = found[1] if found else ""
    spellings = (name, re.sub("[fd]$", "", name), re.sub("^[fd]", "", name))  # tanhf, isnand, fsqrt
    compute = next((_LIBRARY[name] for name in spellings if name in _LIBRARY), None)
    if compute is None:
        raise NotImplementedError(f"there is no value for the library function {symbol}")
    values = compute(*(torch.from_numpy(np.ascontiguousarray(arg.data)) for arg in args))
    return TensorHandle(values.numpy().astype(_get_np_dtype(dtype)), dtype.scalar)


def interpreter_cause(error: BaseException) -> BaseException:
    """What a kernel really raised: `error` without the interpreter's wrapping."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


class _Memory:
    """Stands for the interpreter's memory: reports each access to a meter, then makes it."""

    def __init__(self, interpreter: Any, meter: Meter) -> None:
        self._real = interpreter._interpreter
        self._builder = interpreter.interpreter_builder
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _report(
        self, kind: Literal["read", "written"], pointers: Any, mask: Any, itemsize: int
    ) -> None:
        touched = np.asarray(pointers)[np.asarray(mask, dtype=bool)].astype(np.int64)
        program, grid = tuple(self._builder.grid_idx), tuple(self._builder.grid_dim)
        self._meter.access(kind, touched, itemsize, program, grid)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._report("read", pointers, mask, np.dtype(dtype).itemsize)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._report("written", pointers, mask, value.dtype.itemsize)
        return self._real.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._report("read", pointers, mask, value.dtype.itemsize)
        self._report("written", pointers, mask, value.dtype.itemsize)
        return self._real.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        every = np.ones(pointers.shape, dtype=bool)
        self._report("read", pointers, every, value.dtype.itemsize)
        found = self._real.atomic_cas(pointers, expected, value, order)
        self._report("written", pointers, found == expected, value.dtype.itemsize)
        return found


class Configuration:
    """The launch of an autotuned kernel in one of its configurations."""

    def __init__(
        self, tuner: Kernel, config: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.tuner, self.config, self.args = tuner, config, args
        self.options = options | config.all_kwargs()
        self.compiled: Any = None  # what the launch returned

    def __call__(self) -> None:
        if self.config.pre_hook is not None:
            self.config.pre_hook(
                dict(zip(self.tuner.arg_names, self.args, strict=False)) | self.options
            )
        self.compiled = self.tuner.fn.run(*self.args, **self.options)

    def __str__(self) -> str:
        names = set(self.tuner.arg_names)
        chosen = {k: v for k, v in self.config.all_kwargs().items() if k in names}
        return ", ".join(f"{name}={value}" for name, value in chosen.items())


def _configurations(
    tuner: Kernel, args: tuple[Any, ...], options: dict[str, Any]
) -> list[Configuration]:
    """The launches that an autotuned kernel would time."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    configs = tuner.prune_configs(options) if len(tuner.configs) > 1 else tuner.configs
    return [Configuration(tuner, config, args, options) for config in configs]


def _from_equal_values(
    launches: Iterable[Configuration], tensors: list[torch.Tensor]
) -> Iterator[Configuration]:
    """Yields `launches`, and restores `tensors` before each: a kernel may change its input."""
    with _disable_current_modes():  # no meter counts these copies
        saved = [(x.untyped_storage(), x.untyped_storage().clone()) for x in tensors]
    for launch in launches:
        with _disable_current_modes():
            for storage, values in saved:
                storage.copy_(values)
        yield launch


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among a launch's arguments: those of tuples, and the bases of descriptors."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(tensor := getattr(value, "base", value), torch.Tensor):
            yield tensor


@contextmanager
def _replaced(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Context manager: attributes, given as (owner, name, value), have other values meanwhile."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


@contextmanager
def _restored(*owners: Any) -> Iterator[None]:
    """Context manager: afterwards, the attributes of `owners` are again what they were."""
    saved = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in saved:
            for name in set(vars(owner)) - set(attributes):
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


def _mend_interpreter() -> None:
    """Lets the interpreter run what compiled kernels may do.

    Programs of a cooperative launch, which may wait for one another, take turns (`_Turns`).
    Arithmetic may be in bfloat16. In Triton 3.6, a scalar may be the bound of a loop. In Triton
    3.9, a mask may be made of a scalar and a vector.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter.GridExecutor, "takes_turns"):
        interpreter.GridExecutor = _cooperative_executor(interpreter.GridExecutor)
        builder = interpreter.InterpreterBuilder
        for name in _ACCESSES:
            access = _taking_turns(name, getattr(builder, name), interpreter._interpreter)
            setattr(builder, name, access)
        _take_bfloat16(interpreter)
    if _triton_version() < (3, 7):
        _take_scalar_bounds(interpreter)


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
            if dst_type.scalar == tl.bfloat16 and not is_bfloat16(src):
                return rounded(src.data)
            return method(self, src, dst_type)

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
    if hasattr(patch_tensor, "mended"):
        return

    def mended(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.squeeze()))

    mended.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = mended


class _Abandoned(BaseException):
    """Ends the program of a launch in which another program failed."""


class _Turns:
    """Runs the programs of one cooperative launch by turns, each in a thread, one at a time.

    A program hands over before it reads what others may write: at a volatile load, and at an atomic
    operation. So programs that wait for one another get what they wait for, in the same order each
    time. Raises RuntimeError if none of them writes in MAX_IDLE_TURNS turns of each.
    """

    current: _Turns | None = None

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._waiting: list[tuple[Grid, threading.Semaphore]] = []
        self._main = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._writes = 0

    def start(self, run: Callable[[], None]) -> None:
        """Runs a program until it hands over or ends. Raises what the program raised."""
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run, run), daemon=True).start()
        self._main.acquire()
        self._check()

    def finish(self) -> None:
        """Runs all programs to their end."""
        idle = 0  # turns since a program wrote or ended
        while self._waiting:
            before = self._writes, len(self._waiting)
            self._resume()
            self._check()
            idle = idle + 1 if before == (self._writes, len(self._waiting)) else 0
            if idle > MAX_IDLE_TURNS * len(self._waiting):
                count = len(self._waiting)
                self._failure = RuntimeError(f"{count} programs wait for what none of them writes")
                self._check()

    def hand_over(self) -> None:
        """Called by a program: lets the others take their turns first."""
        turn = threading.Semaphore(0)
        self._waiting.append((tuple(self._builder.grid_idx), turn))
        self._main.release()
        turn.acquire()
        if self._failure is not None:
            raise _Abandoned

    def wrote(self) -> None:
        """Called by a program that wrote to memory."""
        self._writes += 1

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except _Abandoned:
            pass
        except BaseException as error:
            self._failure = error
        self._main.release()

    def _resume(self) -> None:
        index, turn = self._waiting.pop(0)
        self._builder.set_grid_idx(*index)
        turn.release()
        self._main.acquire()

    def _check(self) -> None:
        if self._failure is None:
            return
        while self._waiting:
            self._resume()
        raise self._failure


class _Program:
    """A kernel's function for the interpreter, which calls it once for each program of the grid."""

    def __init__(self, fn: Any, turns: _Turns, builder: Any) -> None:
        self._fn, self._turns, self._builder = fn, turns, builder
        self.__signature__ = inspect.signature(fn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fn, name)

    def __call__(self, **arguments: Any) -> None:
        index = tuple(self._builder.grid_idx)
        self._turns.start(functools.partial(self._fn, **arguments))
        if index == tuple(size - 1 for size in self._builder.grid_dim):
            self._turns.finish()


def _cooperative_executor(executor: Any) -> type:
    """The class that runs the programs of one launch, those of a cooperative one by turns."""

    class CooperativeExecutor(executor):
        takes_turns = True

        def __call__(self, *args: Any, **options: Any) -> None:
            if not options.get("launch_cooperative_grid"):
                super().__call__(*args, **options)
                return
            from triton.runtime.interpreter import interpreter_builder

            outer, turns = _Turns.current, _Turns(interpreter_builder)
            self.fn: Any = _Program(self.fn, turns, interpreter_builder)
            _Turns.current = turns
            try:
                super().__call__(*args, **options)
            finally:
                _Turns.current = outer

    return CooperativeExecutor


# Of each access of the interpreter, which argument is the mask; 0 for none.
_ACCESSES = {
    "create_masked_load": 1,
    "create_masked_store": 2,
    "create_atomic_rmw": 3,
    "create_atomic_cas": 0,
}


def _taking_turns(name: str, method: Callable[..., Any], memory: Any) -> Callable[..., Any]:
    """An access of the interpreter, where the programs of a cooperative launch take turns.

    `&` of a scalar and a vector makes a mask of integers, which Triton 3.9 refuses: they become
    boolean.

    An atomic operation has written if it left something else than it found: programs may wait with
    atomic operations, too.
    """
    is_load, is_atomic = name == "create_masked_load", name.startswith("create_atomic")
    mask_at = _ACCESSES[name]

    def leaves_as_found(found: Any, *args: Any) -> bool:
        is_rmw = name == "create_atomic_rmw"  # operation, pointers, values, mask; else pointers
        pointers = args[is_rmw].data
        mask = args[mask_at].data if mask_at else np.ones(pointers.shape, dtype=bool)
        return bool(memory.load(pointers, mask, found, found.dtype).tobytes() == found.tobytes())

    @functools.wraps(method)
    def access(builder: Any, *args: Any, **options: Any) -> Any:
        mask = args[mask_at]  # that of a descriptor is the boolean array itself
        if mask_at and isinstance(mask.data, np.ndarray) and mask.data.dtype != bool:
            mask.data = mask.data.astype(bool)
        turns = _Turns.current
        if turns is None:
            return method(builder, *args, **options)
        if is_atomic or (is_load and options.get("is_volatile", args[-1])):
            turns.hand_over()
        result = method(builder, *args, **options)
        if not is_load and not (is_atomic and leaves_as_found(result.data, *args)):
            turns.wrote()
        return result

    return access


def binds_with_nanobind() -> bool:
    """Whether Triton binds its C++ with nanobind, which reports at exit what nobody has freed."""
    library = sys.modules.get("triton._C.libtriton")
    names = [type(it).__name__ for it in vars(library.ir).values()] if library else []
    return any(name.startswith("nb_") for name in names)


def _triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("triton").split(".")[:2])


if runtime.HAS_TRITON and runtime.INTERPRETED:
    _mend_interpreter()


# ---- compiling for any GPU


def preload() -> None:
    """Imports Triton, and computes what it computes once before it compiles anything."""
    from triton.runtime.cache import triton_key

    triton_key()


def jit_function(kernel: Kernel) -> Any:
    """The `triton.JITFunction` of a kernel, also where kernels are interpreted or autotuned."""
    from triton.runtime import interpreter, jit

    while not isinstance(kernel, (jit.JITFunction, interpreter.InterpretedFunction)):
        kernel = kernel.fn
    if isinstance(kernel, interpreter.InterpretedFunction):
        return jit.JITFunction(kernel.fn, **kernel.kwargs)
    return kernel


def specialize(
    kernel: Kernel, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[Any, Any], Attributes, dict[str, Any]]:
    """How Triton specialises a kernel for the arguments of one launch.

    Returns the signature (type by argument), the constants (an int of 1 and None are among them),
    the attributes (such as "divisible by 16", by the argument's position) and the launch options.
    The attributes are AMD's; `compile_source` drops the one that NVIDIA does not have.
    Raises TypeError for an argument that Triton does not take.
    """
    from triton._utils import find_paths_if, get_iterable_path
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.language import constexpr
    from triton.runtime.jit import create_function_from_signature

    function = jit_function(kernel)
    backend = make_backend(GPUTarget("hip", "gfx942", 64))
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, others = bind(*args, **options)
    names, values = list(bound), list(bound.values())
    types = [kind for kind, _ in specialization]
    keys = ["" if kind == "constexpr" else key for kind, key in specialization]
    constants = {}
    for path in find_paths_if(types, lambda _, kind: kind == "constexpr"):
        value = get_iterable_path(values, path)
        name = names[path[0]] if len(path) == 1 else path
        constants[name] = value.value if isinstance(value, constexpr) else value
    attributes = {}
    for path in find_paths_if(keys, lambda _, key: isinstance(key, str)):
        if found := backend.parse_attr(get_iterable_path(keys, path)):
            attributes[path] = found
    signature = dict(zip(names, types, strict=True))
    return signature, constants, attributes, {"num_warps": 4} | others


def check_options(options: Mapping[str, Any], gpu: Gpu) -> None:
    """Raises ValueError for a launch option that Triton does not have for `gpu`."""
    from triton.compiler.compiler import make_backend

    known = vars(make_backend(_target(gpu)).parse_options(dict(options)))
    if unknown := set(options) - set(known):
        names = ", ".join(sorted(unknown))
        raise ValueError(f"{gpu.target} ({gpu.vendor}) has no launch option {names}")


def compile_source(
    kernel: Kernel,
    signature: dict[str, Any],
    constants: dict[Any, Any],
    attributes: Attributes,
    options: dict[str, Any],
    gpu: Gpu,
) -> CompiledKernel:
    """Compiles a kernel, specialised as by `specialize`, for `gpu`, which need not be here.

    Raises whatever the compiler raises.
    """
    import triton
    from triton.compiler import ASTSource

    if gpu.vendor != "amd":
        attributes = _without_pointer_range(attributes)
    source = ASTSource(jit_function(kernel), signature, constants, attributes)
    return triton.compile(source, target=_target(gpu), options=options)


def _without_pointer_range(attributes: Attributes) -> Attributes:
    """`attributes` without "32 bits reach all of the tensor", which AMD's compiler alone knows."""
    kept = {
        path: [fact for fact in facts if fact[0] != "tt.pointer_range"]
        for path, facts in attributes.items()
    }
    return {path: facts for path, facts in kept.items() if facts}


def _target(gpu: Gpu) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(gpu.backend, gpu.architecture, gpu.warp_size)


def cuobjdump() -> str:
    """The path of NVIDIA's disassembler, which Triton brings along."""
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)


# ---- compiled kernels on the GPU that is here


def compile_kernel(kernel: Kernel, *args: Any, **options: Any) -> CompiledKernel:
    """Compiles a kernel for the current GPU, as a launch with these arguments would; runs nothing.

    options: constants and launch options, such as `num_warps`.
    """
    return kernel.warmup(*args, grid=(1,), **options)


def shared_bytes(compiled: CompiledKernel) -> int:
    """Shared memory (on AMD, LDS) that one program of a compiled kernel uses, in bytes."""
    return int(compiled.metadata.shared)


def loaded_usage(compiled: CompiledKernel) -> dict[str, int]:
    """Registers and spilled bytes per thread of a compiled kernel, as fields of `Resources`.

    The kernel is loaded on the current GPU to learn them. Raises Triton's OutOfResources where the
    GPU cannot run it.
    """
    compiled._init_handles()
    return {"registers": int(compiled.n_regs), "spill_bytes": 4 * int(compiled.n_spills)}


def function_handle(compiled: CompiledKernel) -> int:
    """The driver's handle (CUfunction) of a compiled kernel, loaded on the current GPU."""
    compiled._init_handles()
    return int(compiled.function)


def set_tuning_time(kernel: Kernel, warmup: float, rep: float) -> None:
    """Sets how long an autotuner takes for each configuration; nothing where there is none.

    kernel: it may have heuristics around its autotuner. warmup, rep: milliseconds, as of
    `triton.testing.do_bench`.
    """
    from triton.runtime import Autotuner
    from triton.testing import do_bench

    while kernel is not None and not isinstance(kernel, Autotuner):
        kernel = getattr(kernel, "fn", None)
    if kernel is not None:
        kernel.do_bench = functools.partial(do_bench, warmup=warmup, rep=rep)


def launch_compiled(compiled: CompiledKernel, programs: int, *args: Any) -> None:
    """Starts `programs` programs of a compiled kernel on the current stream.

    args: every argument in the kernel's order, constants included. Triton 3.6 and 3.7 count them
    differently but both want them all, and read beyond the end of fewer.
    """
    if len(args) != len(compiled.src.signature):
        expected = len(compiled.src.signature)
        raise TypeError(f"{compiled.name} takes {expected} arguments, not {len(args)}")
    compiled[programs, 1, 1](*args)


def starter(
    compiled: CompiledKernel, grid: tuple[int, int], arguments: list[Any], places: list[int]
) -> Callable[[int, list[int]], None]:
    """A function of a stream (cudaStream_t) and addresses that starts a compiled kernel.

    It is `launch_compiled` without what Triton does for each launch: no hook is called. arguments:
    all of them, in the kernel's order, constants included. places: which of these are the addresses
    of tensors, which are not checked.
    """
    compiled._init_handles()
    expected = len(compiled.src.signature)
    if len(arguments) != expected:
        raise TypeError(f"{compiled.name} takes {expected} arguments, not {len(arguments)}")
    launch, fixed, as_list = _launch_function(compiled)
    before = [*grid, 1, 0, *fixed]  # the 0 is where the stream goes
    stream_place = 3
    everything = [*before, *arguments]
    shifted = [len(before) + place for place in places]

    wrong = f"{compiled.name} takes the addresses of {len(places)} tensors"

    # A check of the lengths takes less time than zip's `strict`.
    def start(stream: int, addresses: list[int]) -> None:
        if len(addresses) != len(places):
            raise ValueError(wrong)
        given = everything.copy()
        given[stream_place] = stream
        for place, address in zip(shifted, addresses):  # noqa: B905
            given[place] = address
        launch(*given)

    def start_with_list(stream: int, addresses: list[int]) -> None:
        if len(addresses) != len(places):
            raise ValueError(wrong)
        given = arguments.copy()
        for place, address in zip(places, addresses):  # noqa: B905
            given[place] = address
        launch(*grid, 1, stream, *fixed, given)

    return start_with_list if as_list else start


def _launch_function(compiled: CompiledKernel) -> tuple[Callable[..., None], tuple[Any, ...], bool]:
    """What launches a compiled kernel, with as little Python as this version of Triton allows.

    It takes a grid of three numbers and a stream, the second result, and the kernel's arguments:
    as one list if the third result is true.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if type(run).__name__ == "CudaLauncher" and not (
        run.global_scratch_size or run.profile_scratch_size
    ):
        # All that its __call__ does is to pass what `fixed` has here.
        no_scratch, no_hooks = (None, None), (None, None, None)
        fixed = function, run.launch_cooperative_grid, run.launch_pdl
        if _triton_version() == (3, 6):
            return run.launch, (*fixed, *no_scratch, metadata, *no_hooks), False
        if _triton_version() == (3, 7):
            signature = run.arg_annotations, run.kernel_signature
            return run.launch, (*fixed, metadata, *no_hooks, *no_scratch, *signature), True
    return run, (function, metadata, None, None, None), False
