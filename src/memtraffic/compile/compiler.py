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
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

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
from memtraffic.triton_adapter.launch import CompiledKernel, naming_version, shared_bytes

_READERS = {"nvidia": (sass, "ptx"), "amd": (amdgcn, "amdgcn")}


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
    that is defined in a cell or a script, or calls such a function: another process compiles it,
    which imports its module.
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
    return [Occupancy.of(it, gpu) for it in resources(fn, inputs, shape, target=gpu, **options)]


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
    found = compiled_code(_jobs(fn, inputs, shape, _gpu(target), **options))
    texts = [code.machine_code.splitlines() for code in found]
    return ["\n".join(line for line in text if re.search(keep, line)) for text in texts]


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
    given = ("num_warps", num_warps), ("num_stages", num_stages), ("waves_per_eu", waves_per_eu)
    chosen = {name: value for name, value in given if value is not None}
    rules_of(gpu).check_options(chosen, gpu)
    return [(replace(launch, options=launch.options | chosen), gpu) for launch in launches]


def _gpu(target: str | Gpu | None) -> Gpu:
    if target is None:
        device.require_gpu("without target=, such as target='sm_90', this")
    return this_gpu() if target is None else find_gpu(target)


def compile_launches(jobs: Iterable[tuple[Launch, str | Gpu]]) -> list[Resources]:
    """The `Resources` of each of `jobs`, which are pairs of a `Launch` and a target.

    Raises as `resources` does.
    """
    known = [(launch, find_gpu(target)) for launch, target in jobs]
    return [code.resources for code in compiled_code(known)]


def compiled_code(jobs: Sequence[tuple[Launch, Gpu]]) -> list[Code]:
    """What the compiler writes of each of `jobs`. Raises as `resources` does."""
    if not device.INTERPRETED or not jobs:
        return _compile_all(jobs)
    folders = dict.fromkeys(_folder(launch.module) for launch, _ in jobs)
    found: list[Code] = worker.WORKER.call(filter(None, folders), _compile_all, jobs)
    return found


def _folder(module: str) -> str:
    """The folder in which the import system finds a module of this process; "" if there is none."""
    if not (file := getattr(sys.modules.get(module), "__file__", None)):
        return ""
    depth = module.count(".") + (Path(file).name == "__init__.py")
    return str(Path(file).resolve().parents[depth])


def _compile_all(jobs: Sequence[tuple[Launch, Gpu]]) -> list[Code]:
    return [_read(_compile(*job), *job) for job in jobs]


def _compile(launch: Launch, gpu: Gpu) -> CompiledKernel:
    what = f"{launch.qualname} does not compile for {gpu.target}"
    try:
        check_options(launch.options, gpu)
    except AssertionError as error:  # Triton's, of the number of warps
        raise CompileError(f"{what}: {error}") from error
    facts = (launch.signature, launch.constants, launch.attributes, launch.options)
    try:
        kernel = launch.function or attrgetter(launch.qualname)(import_module(launch.module))
        with naming_version(CompileError):
            return compile_source(kernel, *facts, gpu)
    except Exception as error:  # compilers raise whatever they like
        raise CompileError(f"{what}: {error}") from error


def _read(compiled: CompiledKernel, launch: Launch, gpu: Gpu) -> Code:
    """The forms of a compiled kernel, and what it uses."""
    reader, text = _READERS[gpu.vendor]
    ir = compiled.asm["ttgir"]
    usage, lines = reader.read(compiled.asm, compiled.name, gpu)
    warps, shared = launch.options["num_warps"], shared_bytes(compiled)
    loads, stores = (
        Counter(reader.bits(end) for line in lines for end in re.findall(pattern, line))
        for pattern in (reader.LOAD, reader.STORE)
    )
    used = Resources(
        kernel=compiled.name,
        target=gpu.target,
        num_warps=warps,
        shared_bytes=shared,
        num_ctas=launch.options.get("num_ctas", 1),
        unlaunchable=_unlaunchable(warps * gpu.warp_size, shared, gpu),
        load_bits=dict(sorted(loads.items())),
        store_bits=dict(sorted(stores.items())),
        instructions=dict(sorted(Counter(map(_name, lines)).items())),
        layout=ttgir.first_load_layout(ir),
        schedule=ttgir.schedule(ir),
        **usage,
    )
    return Code(used, ir, compiled.asm[text], "\n".join(lines))


def _name(instruction: str) -> str:
    """The name of an instruction, without the predicate before it.

    >>> _name("@!UP1 UMOV UR4, 0x1"), _name("@P0 LDG.E R1, [R2]"), _name("v_exp_f32_e32 v4, v4")
    ('UMOV', 'LDG.E', 'v_exp_f32_e32')
    """
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def _unlaunchable(threads: int, shared_bytes: int, gpu: Gpu) -> str:
    """Why `gpu` launches no program of so many threads and so much shared memory; "" if it does."""
    reasons = []
    if threads > (most := gpu.max_threads_per_program):
        reasons.append(f"{threads} threads per program, and {gpu.target} takes {most}")
    if shared_bytes > (most := gpu.shared_per_program):
        reasons.append(f"{shared_bytes} bytes shared per program, and {gpu.target} has {most}")
    return "; ".join(reasons)
