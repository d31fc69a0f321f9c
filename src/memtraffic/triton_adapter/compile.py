"""Compiles kernels for any GPU, which need not be here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

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
    its text, with the places it had before. So they are a part of the key here.

    Raises whatever the compiler raises.
    """
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import jit

    key = jit.JITCallable.cache_key.fget

    def placed_key(function: Any) -> str:
        place = function.fn.__code__.co_filename, function.starting_line_number
        return f"{key(function)} {place} {function.raw_src}"

    if gpu.vendor != "amd":
        attributes = _without_pointer_range(attributes)
    source = ASTSource(jit_function(kernel), signature, constants, attributes)
    with lock, replaced((jit.JITCallable, "cache_key", property(placed_key))):
        placed = source.hash()
    source.hash = lambda: placed
    return triton.compile(source, target=target_of(gpu), options=options)


def _without_pointer_range(attributes: Attributes) -> Attributes:
    """`attributes` without "32 bits reach all of the tensor", which AMD's compiler alone knows."""
    kept = {
        path: [fact for fact in facts if fact[0] != "tt.pointer_range"]
        for path, facts in attributes.items()
    }
    return {path: facts for path, facts in kept.items() if facts}


def target_of(gpu: Gpu) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(gpu.backend, gpu.architecture, gpu.warp_size)


def cuobjdump() -> str:
    """The path of NVIDIA's disassembler, which Triton brings along."""
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)
