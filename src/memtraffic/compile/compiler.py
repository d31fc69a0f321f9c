"""What a kernel uses on any target: registers, spills, shared memory, the widths of its accesses.

It is read from what the compiler wrote.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from memtraffic import device
from memtraffic.compile import amdgcn, sass, ttgir, worker
from memtraffic.compile.accesses import Code
from memtraffic.compile.launches import Launch, capture_launches
from memtraffic.device import this_gpu
from memtraffic.errors import CompileError, NoKernelError
from memtraffic.functions import as_function, function_name
from memtraffic.gpus import Gpu, find_gpu
from memtraffic.op import AnyInputs, find_op
from memtraffic.residency import Occupancy, Resources, rules_of
from memtraffic.triton_adapter.compile import check_options, compile_source
from memtraffic.triton_adapter.launch import CompiledKernel, shared_bytes

T = TypeVar("T")
N = TypeVar("N", int, str)
_READERS = {"nvidia": sass, "amd": amdgcn}


def resources(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    shape: Sequence[int] | None = None,
    *,
    target: str | Gpu | None = None,
    **options: Any,
) -> list[Resources]:
    """The `Resources` of each Triton kernel that `fn` launches, compiled for `target`.

    No kernel runs, and the GPU need not be here.

    >>> from memtraffic.kernels.softmax import fused
    >>> [kernel] = resources(fused.softmax, "M,N", (16, 4096), target="sm_90")
    >>> kernel.load_bits, kernel.spill_bytes
    ({128: 4}, 0)

    inputs, shape: what `fn` is called with, as for `memtraffic.count`. target: a GPU, or the name
    of one, such as "sm_90", "gfx942" or "H200"; by default the one that is here. `fn` plans its
    launches for it. options: `dtype` and `layout` of the inputs; and instead of what `fn` asks for,
    `num_warps`, `num_stages` and `waves_per_eu` (waves per SIMD that AMD's compiler shall aim at).
    An `fn` with an argument `num_stages` is given that, too. A kernel that no such GPU can launch
    is compiled, and its `unlaunchable` says why.

    Raises UnknownGpuError or NoGpuError without such a target, NoKernelError if `fn` launches no
    kernel, ValueError for a launch option that this target does not have or cannot fulfil, and
    CompileError for a kernel that does not compile. Where kernels are interpreted, that is also one
    that is not defined in a file: another process compiles it.
    """
    return compile_launches(_jobs(fn, inputs, shape, _gpu(target), **options))


def occupancy(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    shape: Sequence[int] | None = None,
    *,
    target: str | Gpu | None = None,
    **options: Any,
) -> list[Occupancy]:
    """The `Occupancy` of each Triton kernel that `fn` launches, compiled for `target`.

    >>> from memtraffic.kernels.softmax import fused
    >>> [kernel] = occupancy(fused.softmax, "M,N", (8, 1024), target="h200", num_warps=32)
    >>> kernel.resident, kernel.binding, kernel.programs
    (2, 'warps', 264)

    The arguments and errors are those of `resources`.
    """
    gpu = _gpu(target)
    kernels = resources(fn, inputs, shape, target=gpu, **options)
    return [Occupancy.of(kernel, gpu) for kernel in kernels]


def assembly(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    shape: Sequence[int] | None = None,
    *,
    target: str | Gpu | None = None,
    keep: str = ".",
    **options: Any,
) -> list[str]:
    """The machine code of each Triton kernel that `fn` launches, compiled for `target`.

    One instruction a line, without comments and addresses.

    >>> from memtraffic.kernels.softmax import fused
    >>> [text] = assembly(fused.softmax, "1,4096", target="gfx942", keep="load_dwordx4")
    >>> print(text)
    buffer_load_dwordx4 ...
    buffer_load_dwordx4 ...

    keep: a regular expression; only lines in which it is found are kept. Other arguments and errors
    are those of `resources`.
    """
    texts = read_launches(_jobs(fn, inputs, shape, _gpu(target), **options), _instructions)
    return [
        "\n".join(line for line in text.splitlines() if re.search(keep, line)) for text in texts
    ]


def _jobs(
    fn: Callable[..., object],
    inputs: AnyInputs,
    shape: Sequence[int] | None,
    gpu: Gpu,
    *,
    dtype: str = "float32",
    layout: str = "packed",
    num_warps: int | None = None,
    num_stages: int | None = None,
    waves_per_eu: int | None = None,
) -> list[tuple[Launch, Gpu]]:
    """The launches of `fn` on `gpu`, with options in place of those that it asks for."""
    arguments = find_op(inputs).arguments(shape, dtype, layout)
    call = as_function(fn)
    if num_stages is not None and "num_stages" in inspect.signature(call).parameters:
        call = functools.partial(call, num_stages=num_stages)
    launches = capture_launches(lambda: arguments.call(call), gpu=gpu)
    if not launches:
        raise NoKernelError(
            f"{function_name(fn)} launched no Triton kernel{device.stand_in_hint()}"
        )
    options = {"num_warps": num_warps, "num_stages": num_stages, "waves_per_eu": waves_per_eu}
    chosen = {name: value for name, value in options.items() if value is not None}
    rules_of(gpu).check_options(chosen, gpu)
    return [(replace(launch, options=launch.options | chosen), gpu) for launch in launches]


def _gpu(target: str | Gpu | None) -> Gpu:
    if target is None:
        device.require_gpu("without target=, such as target='sm_90', this")
    return this_gpu() if target is None else find_gpu(target)


Jobs = Sequence[tuple[Launch, str | Gpu]]


def compile_launches(jobs: Jobs) -> list[Resources]:
    """The `Resources` of each of `jobs`, which are pairs of a `Launch` and a target.

    Raises as `resources` does.
    """
    return read_launches(jobs, read_resources)


def read_launches(jobs: Jobs, read: Callable[[CompiledKernel, Launch, Gpu], T]) -> list[T]:
    """What `read` makes of each of `jobs`, compiled. Raises as `resources` does.

    read: a function of a module, as another process may have to call it.
    """
    known = [(launch, _gpu(target)) for launch, target in jobs]
    if not device.INTERPRETED or not known:
        return _compile_all(known, read)
    for launch, _ in known:
        if launch.module == "__main__" or "<" in launch.qualname:
            raise CompileError(
                f"{launch.qualname} is defined in a cell or a script. Where kernels are "
                "interpreted, another process compiles them: put the kernel into a file that it "
                "can import"
            )
    folders = dict.fromkeys(_folder(launch.module) for launch, _ in known)
    return worker.WORKER.call(filter(None, folders), _compile_all, known, read)


def _folder(module: str) -> str:
    """The folder in which the import system finds a module of this process; "" if there is none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file:
        return ""
    depth = module.count(".") + (Path(file).name == "__init__.py")
    folder = str(Path(file).resolve().parents[depth])
    return "" if folder in sys.path else folder


def _compile_all(
    jobs: Sequence[tuple[Launch, Gpu]], read: Callable[[CompiledKernel, Launch, Gpu], T]
) -> list[T]:
    with ThreadPoolExecutor() as pool:  # disassembles one kernel while the next one is compiled
        answers = [pool.submit(read, *_compile(*job)) for job in jobs]
    return [answer.result() for answer in answers]


def _compile(launch: Launch, gpu: Gpu) -> tuple[CompiledKernel, Launch, Gpu]:
    what = f"{launch.qualname} does not compile for {gpu.target}"
    try:
        check_options(launch.options, gpu)
    except AssertionError as error:  # Triton's, of the number of warps
        raise CompileError(f"{what}: {error}") from error
    facts = (launch.signature, launch.constants, launch.attributes, launch.options)
    try:
        kernel = launch.function or attrgetter(launch.qualname)(import_module(launch.module))
        return compile_source(kernel, *facts, gpu), launch, gpu
    except Exception as error:  # compilers raise whatever they like
        raise CompileError(f"{what}: {error}") from error


def _instructions(compiled: CompiledKernel, launch: Launch, gpu: Gpu) -> str:
    """The machine code, an instruction a line."""
    return "\n".join(_READERS[gpu.vendor].read(compiled.asm, compiled.name, gpu)[1])


def read_code(compiled: CompiledKernel, launch: Launch, gpu: Gpu) -> Code:
    """The forms of a kernel that say how it reaches memory."""
    reader, machine_code = _READERS[gpu.vendor], _instructions(compiled, launch, gpu)
    lines = machine_code.splitlines()
    assembly = {"nvidia": "ptx", "amd": "amdgcn"}[gpu.vendor]
    loads, stores = (frozenset(_widths(lines, it, reader)) for it in (reader.LOAD, reader.STORE))
    texts = compiled.asm["ttgir"], compiled.asm[assembly]
    return Code(compiled.name, *texts, loads, stores, machine_code)


def read_resources(compiled: CompiledKernel, launch: Launch, gpu: Gpu) -> Resources:
    """What a compiled kernel uses."""
    reader, ir = _READERS[gpu.vendor], compiled.asm["ttgir"]
    usage, lines = reader.read(compiled.asm, compiled.name, gpu)
    warps, shared = launch.options["num_warps"], shared_bytes(compiled)
    return Resources(
        kernel=compiled.name,
        target=gpu.target,
        num_warps=warps,
        shared_bytes=shared,
        unlaunchable=_unlaunchable(warps * gpu.warp_size, shared, gpu),
        load_bits=_widths(lines, reader.LOAD, reader),
        store_bits=_widths(lines, reader.STORE, reader),
        instructions=_count(map(reader.name, lines)),
        layout=ttgir.first_load_layout(ir),
        schedule=ttgir.schedule(ir),
        **usage,
    )


def _widths(lines: Iterable[str], pattern: str, reader: Any) -> dict[int, int]:
    """How many instructions of machine code match a pattern, by the bits that each moves a lane."""
    return _count(reader.bits(end) for line in lines for end in re.findall(pattern, line))


def _unlaunchable(threads: int, shared_bytes: int, gpu: Gpu) -> str:
    """Why `gpu` launches no program of so many threads and so much shared memory; "" if it does."""
    reasons = []
    if threads > gpu.max_threads_per_program:
        most = gpu.max_threads_per_program
        reasons.append(f"{threads} threads per program, and {gpu.target} takes {most}")
    if shared_bytes > gpu.shared_per_program:
        most = gpu.shared_per_program
        reasons.append(f"{shared_bytes} bytes shared per program, and {gpu.target} has {most}")
    return "; ".join(reasons)


def _count(values: Iterable[N]) -> dict[N, int]:
    """How often each of `values` occurs, sorted by value."""
    return dict(sorted(Counter(values).items()))
