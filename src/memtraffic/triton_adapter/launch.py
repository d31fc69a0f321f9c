"""A launch: what every GPU refuses, and compiled kernels on the GPU that is here."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeAlias

import torch

from memtraffic.errors import LaunchError, MemtrafficError
from memtraffic.torch_adapter import raw_stream

Kernel: TypeAlias = Any  # what @triton.jit, @triton.autotune or @triton.heuristics returns
CompiledKernel: TypeAlias = Any
Grid: TypeAlias = tuple[int, int, int]

# The most threads of a program on any GPU, whose warps have 32 or more, and the most programs along
# each axis of a grid: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability".
MAX_THREADS, SMALLEST_WARP = 1024, 32
MAX_GRID = 2**31 - 1, 65535, 65535


def check_launch(kernel: str, grid: Any, num_warps: object = None) -> Any:
    """Returns the grid of a launch, a list as a tuple; raises LaunchError if no GPU can make it.

    grid: as it is launched; of a function, what it returns is checked when it is called.
    """
    if isinstance(num_warps, int) and num_warps * SMALLEST_WARP > MAX_THREADS:
        raise LaunchError(
            f"{kernel}: {num_warps} warps per program are {num_warps * SMALLEST_WARP} threads or "
            f"more, and no GPU launches more than {MAX_THREADS}"
        )
    if isinstance(num_warps, int) and num_warps.bit_count() != 1:
        raise LaunchError(f"{kernel}: Triton takes a power of 2 as num_warps, not {num_warps}")
    if callable(grid):
        return lambda constants: check_launch(kernel, grid(constants))
    if not isinstance(grid, (tuple, list)):
        raise LaunchError(f"{kernel}: a grid is a tuple, such as ({grid},), not {grid!r}")
    for axis, (programs, most) in enumerate(zip(grid, MAX_GRID, strict=False)):
        if not hasattr(programs, "__index__"):
            raise LaunchError(f"{kernel}: a grid of {programs} programs, which is no whole number")
        if isinstance(programs, int) and not 0 <= programs <= most:
            raise LaunchError(
                f"{kernel}: a grid of {' x '.join(map(str, grid))} programs: along axis {axis}, "
                f"CUDA launches up to {most}"
            )
    return tuple(grid)


def check_arguments(
    kernel: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Raises LaunchError if arguments of `kernel` are left out, or of a dtype unknown to Triton.

    kernel: a Python function.
    """
    from triton._utils import type_canonicalisation_dict as known

    parameters = inspect.signature(kernel).parameters
    given = {*list(parameters)[: len(args)], *options}
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in given and parameter.default is parameter.empty
    ]
    if missing:
        raise LaunchError(
            f"{kernel.__name__} is launched without {', '.join(missing)}. Some packages leave out "
            "what autotunes a kernel where TRITON_INTERPRET is 1: set TRITON_INTERPRET=0"
        )
    for name, value in [*zip(parameters, args, strict=False), *options.items()]:
        # A pointer of another dtype than its tensor's has one of its own.
        for tensor in [value] if hasattr(value, "data_ptr") else tensors_of([value]):
            if str(tensor.dtype).removeprefix("torch.") not in known:
                raise LaunchError(
                    f"{kernel.__name__}: {name} is of {tensor.dtype}, which Triton does not know: "
                    "give a view, such as torch.view_as_real(x) or x.view(torch.uint8)"
                )


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among a launch's arguments: those of tuples, and the bases of descriptors."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from tensors_of(value)
        elif isinstance(tensor := getattr(value, "base", value), torch.Tensor):
            yield tensor


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


def starter(
    compiled: CompiledKernel,
    grid: tuple[int, ...],
    arguments: list[Any],
    places: list[int],
    gpu: int,
) -> Callable[..., None]:
    """A function of tensors that starts a compiled kernel on the current stream of a GPU.

    It does not do what Triton does for each launch: no hook is called, and nothing is checked.
    arguments: all of them, in the kernel's order, constants included; Triton reads beyond the end
    of fewer. A function gives a launch, by its stream, an address and what holds its memory.
    places: which arguments are the addresses of the tensors. gpu: its index.
    """
    compiled._init_handles()
    expected = len(compiled.src.signature)
    if len(arguments) != expected:
        raise TypeError(f"{compiled.name} takes {expected} arguments, not {len(arguments)}")
    launch, fixed, as_list = _launch_function(compiled)
    values: dict[str, Any] = {"launch": launch, "stream_of": raw_stream}

    def written(value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"value{len(values)}"
        values[name] = value
        return f"(held := {name}(stream))[0]" if callable(value) else name

    # Written out as a line of Python, which costs the host less than to fill a list.
    given = {place: f"given{i}" for i, place in enumerate(places)}
    passed = ", ".join(
        f"{given[i]}.data_ptr()" if i in given else written(it) for i, it in enumerate(arguments)
    )
    sizes = (*grid, 1, 1)[:3]
    before = ", ".join([*map(written, sizes), f"stream := stream_of({gpu})", *map(written, fixed)])
    line = f"lambda {', '.join(given.values())}: launch({before}, "
    line += f"[{passed}])" if as_list else f"{passed})"
    start: Callable[..., None] = eval(line, values)
    return start


def _launch_function(compiled: CompiledKernel) -> tuple[Callable[..., None], tuple[Any, ...], bool]:
    """What launches a compiled kernel, with as little Python as this version of Triton allows.

    It takes a grid of three numbers and a stream, the second result, and the kernel's arguments:
    as one list if the third result is true.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if type(run).__name__ == "CudaLauncher" and not (
        run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False)
    ):
        # All that its __call__ does is to pass what `fixed` has here.
        no_scratch, no_hooks = (None, None), (None, None, None)
        fixed = function, run.launch_cooperative_grid, run.launch_pdl
        if triton_version() == (3, 6):
            return run.launch, (*fixed, *no_scratch, metadata, *no_hooks), False
        if (3, 7) <= triton_version() <= (3, 9):  # a newer one may take others
            signature = run.arg_annotations, run.kernel_signature
            return run.launch, (*fixed, metadata, *no_hooks, *no_scratch, *signature), True
    return run, (function, metadata, None, None, None), False


@contextmanager
def naming_version(kind: type[MemtrafficError]) -> Iterator[None]:
    """Context manager: what Triton lacks, though this package asks it for it, is said by `kind`.

    That is an error in a line of this package, of an attribute or an import.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [it.filename for it in frames if not it.filename.startswith("<frozen")]
        if os.path.dirname(lines[-1]) != os.path.dirname(__file__):
            raise
        raise kind(
            f"Triton {version('triton')} lacks what memtraffic asks it for ({error}): it is tested "
            "with Triton 3.6 to 3.9, as pip install 'triton<3.10' brings"
        ) from error


def triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("triton").split(".")[:2])
