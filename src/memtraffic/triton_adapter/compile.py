"""Compiles kernels for any GPU, which need not be here."""

from __future__ import annotations

import inspect
import marshal
import pickle
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from operator import attrgetter
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from memtraffic.errors import CompileError
from memtraffic.triton_adapter.launch import CompiledKernel, Kernel
from memtraffic.triton_adapter.patching import lock, replaced

if TYPE_CHECKING:
    from memtraffic.gpus import Gpu

Attributes: TypeAlias = dict[tuple[int, ...], list[list[Any]]]


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


class KernelPickler(pickle.Pickler):
    """Pickles kernels and the functions they call for another process, which imports them.

    One that is defined in a function is sent itself, with what it finds in that function; its
    globals are those of its module there. Raises CompileError for what no process can import.
    """

    def reducer_override(self, value: Any) -> Any:
        from triton.runtime import interpreter, jit

        if isinstance(value, ModuleType):
            return import_module, (value.__name__,)
        if not isinstance(value, (interpreter.InterpretedFunction, jit.JITCallable)):
            return NotImplemented
        fn, name = value.fn, value.fn.__qualname__
        if fn.__module__ == "__main__":
            raise CompileError(f"{name} is defined in a cell or a script: put it into another file")
        module = ModuleType(fn.__module__)  # stands for that which is imported
        if "<" not in name:
            return attrgetter(name), (module,)
        kind = partial(jit.JITFunction, **value.kwargs) if hasattr(value, "kwargs") else type(value)
        code, found = marshal.dumps(fn.__code__), inspect.getclosurevars(fn).nonlocals
        return _rebuilt, (kind, module, code, fn.__defaults__, found, fn.__annotations__)


def _rebuilt(kind: Any, module: Any, code: bytes, defaults: Any, found: Any, types: Any) -> Any:
    # Triton's cache takes a global for what is found, if there is one of the same name.
    known, cells = vars(module) | found, tuple(map(CellType, found.values()))
    fn = FunctionType(marshal.loads(code), known, None, defaults, cells)
    fn.__annotations__ = types
    return kind(fn)


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
    specialized = find_paths_if(keys, lambda _, key: isinstance(key, str))
    facts = {path: backend.parse_attr(get_iterable_path(keys, path)) for path in specialized}
    attributes = {path: found for path, found in facts.items() if found}
    signature = dict(zip(names, types, strict=True))
    return signature, constants, attributes, {"num_warps": 4} | others


def check_options(options: Mapping[str, Any], gpu: Gpu) -> None:
    """Raises ValueError for a launch option that Triton does not have for `gpu`."""
    from triton.compiler.compiler import make_backend

    known = vars(make_backend(target_of(gpu)).parse_options(dict(options)))
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

    Triton's cache finds a function that was moved to another file, or whose decorators changed, by
    its text, with the places it had before; and one that refers to another dtype. So they are a
    part of the key here.

    Raises whatever the compiler raises.
    """
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import jit

    key = jit.JITCallable.cache_key.fget

    def placed_key(function: Any) -> str:
        place = function.fn.__code__.co_filename, function.starting_line_number
        known, used = key(function), function.used_global_vals.items()
        return f"{known} {place} {function.raw_src} {[(it[0], value[0]) for it, value in used]}"

    facts = attributes if gpu.vendor == "amd" else _without_pointer_range(attributes)
    source = ASTSource(jit_function(kernel), signature, constants, facts)
    with lock, replaced((jit.JITCallable, "cache_key", property(placed_key))):
        placed = source.hash()
    source.hash = lambda: placed
    return triton.compile(source, target=target_of(gpu), options=options)


def _without_pointer_range(attributes: Attributes) -> Attributes:
    """`attributes` without "32 bits reach all of the tensor", which AMD's compiler alone knows."""
    kept = {it: [x for x in at if x[0] != "tt.pointer_range"] for it, at in attributes.items()}
    return {path: facts for path, facts in kept.items() if facts}


def target_of(gpu: Gpu) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(gpu.backend, gpu.architecture, gpu.warp_size)


def cuobjdump() -> str:
    """The path of NVIDIA's disassembler, which Triton brings along."""
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)
