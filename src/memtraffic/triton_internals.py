"""Every private part of Triton that this package touches, for Triton 3.6 and 3.7.

Triton has no public way to watch its interpreter, to see which kernels a function launches, to
compile a kernel for a GPU that is absent, or to start a compiled kernel. All of that is here and
nowhere else, so that a new version of Triton needs changes in one file. The functions below import
Triton when they are called, not before.

While launches are captured or interpreted, methods of Triton's classes are replaced for the whole
process: a lock makes further threads that want the same wait for their turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import torch

from memtraffic import runtime

if TYPE_CHECKING:
    from memtraffic.gpus import Gpu

Kernel: TypeAlias = Any  # what @triton.jit, @triton.autotune or @triton.heuristics returns
CompiledKernel: TypeAlias = Any
Attributes: TypeAlias = dict[tuple[int, ...], list[list[Any]]]
Grid: TypeAlias = tuple[int, int, int]

_patching = threading.RLock()


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

    def autotuned(self, kernel: str, launches: list[Callable[[], None]]) -> None:
        """An autotuned kernel is launched: `launches` are those of its configurations."""


@contextmanager
def interpreting(meter: Meter) -> Iterator[None]:
    """Context manager: kernels launched inside are interpreted, and report to `meter`.

    So they are in a process that compiles its kernels, too.
    """
    if not runtime.HAS_TRITON:
        yield
        return
    import triton.language as tl
    from triton.runtime import autotuner, interpreter, jit

    _mend_interpreter()

    # In a process that compiles, kernels and the functions they call are jitted ones.
    def run(kernel: Kernel, *args: Any, **options: Any) -> None:
        interpreter.InterpretedFunction(kernel.fn).run(*args, **options)

    def call(function: Kernel, *args: Any, **options: Any) -> Any:
        return interpreter.InterpretedFunction(function.fn)(*args, **options)

    def run_autotuned(tuner: Kernel, *args: Any, **options: Any) -> None:
        meter.autotuned(tuner.base_fn.__name__, _configurations(tuner, args, options))

    with (
        _patching,
        _replaced(
            (interpreter, "_interpreter", _Memory(interpreter, meter)),
            (interpreter, "GridExecutor", _metered_executor(interpreter.GridExecutor, meter)),
            (autotuner.Autotuner, "run", run_autotuned),
            (jit.JITFunction, "run", run),
            (jit.JITFunction, "__call__", call),
        ),
        # The interpreter leaves parts of triton.language patched behind.
        _restored(tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base),
    ):
        yield


def _metered_executor(executor: Any, meter: Meter) -> type:
    """The class that runs the programs of one launch, reporting the launch to `meter`."""

    class MeteredExecutor(executor):
        def __call__(self, *args: Any, **options: Any) -> None:
            with meter.launch(self.fn.__name__, list(_tensors([*args, *options.values()]))):
                super().__call__(*args, **options)

        def _init_args_hst(self, args: Any, options: Any) -> Any:
            host_args, host_options = super()._init_args_hst(args, options)
            named = dict(zip(self.arg_names, host_args, strict=False)) | host_options
            for name, value in named.items():
                for tensor in _tensors([value]):
                    meter.bind(name, tensor)
            return host_args, host_options

    return MeteredExecutor


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


def _configurations(
    tuner: Kernel, args: tuple[Any, ...], options: dict[str, Any]
) -> list[Callable[[], None]]:
    """The launches that an autotuned kernel would time, one for each configuration."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    configs = tuner.prune_configs(options) if len(tuner.configs) > 1 else tuner.configs
    named = tuner.nargs | options

    def launch(config: Any) -> None:
        chosen = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook(named | chosen)
        tuner.fn.run(*args, **options | chosen)

    return [lambda config=config: launch(config) for config in configs]  # type: ignore[misc]


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
    """Lets the interpreter of Triton 3.6 take a scalar as the bound of a loop, as 3.7 does.

    With NumPy 2.4 or later it cannot: https://github.com/triton-lang/triton/issues/9171.
    """
    if _triton_version() >= (3, 7):
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    if hasattr(patch_tensor, "mended"):
        return

    def mended(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.squeeze()))

    mended.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = mended


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


def launch_compiled(compiled: CompiledKernel, programs: int, *args: Any) -> None:
    """Starts `programs` programs of a compiled kernel on the current stream.

    args: every argument in the kernel's order, constants included. Triton 3.6 and 3.7 count them
    differently but both want them all, and read beyond the end of fewer.
    """
    if len(args) != len(compiled.src.signature):
        expected = len(compiled.src.signature)
        raise TypeError(f"{compiled.name} takes {expected} arguments, not {len(args)}")
    compiled[programs, 1, 1](*args)
