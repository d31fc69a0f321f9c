"""Compiles kernels for GPUs that are not there, and reads from what the compiler wrote what they would use.

Needs no GPU and no driver: Triton brings the compilers (LLVM for AMD, `ptxas` and `cuobjdump` for NVIDIA). A process whose
kernels are interpreted cannot compile them, so there a second process does.
"""

import functools
import inspect
import os
import pickle
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from memtraffic import machine

# name: Triton's backend, its name for the architecture, threads a warp
TARGETS = {f"sm_{cc}": ("cuda", cc, 32) for cc in (75, 80, 86, 89, 90, 100, 120)}
TARGETS |= {
    arch: ("hip", arch, 64) for arch in ("gfx908", "gfx90a", "gfx942", "gfx950")
}
TARGETS |= {arch: ("hip", arch, 32) for arch in ("gfx1100", "gfx1201")}


class CompileError(Exception):
    """A kernel could not be compiled for a target; the message is the compiler's."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, as its compiler sees it: where the kernel is defined, argument types, constants, options."""

    module: str
    qualname: str
    signature: dict
    constants: dict
    attributes: dict
    options: dict


@dataclass(frozen=True)
class Layout:
    """How the block of a kernel's first load is dealt out, rows first: neighbouring elements a lane takes in one go, lanes of
    a warp, warps of a program. What is left over, every lane takes again in the same pattern.
    """

    elements: tuple
    lanes: tuple
    warps: tuple


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel uses. Registers (of 32 bits) and spills (bytes) a thread, shared memory (bytes) a program.

    On AMD, `registers` are the vector registers in all: `vgprs` and `agprs`, which share one file from gfx90a on; `sgprs` are
    the scalar ones of a wave. `allocated_vgprs`, AGPRs among them, and `allocated_sgprs` are what a wave is given, which
    `waves_per_eu` may raise; `llvm_waves` the waves a SIMD that LLVM says it allows. `shared_bytes` are static and
    dynamic ones together; `static_shared_bytes` the former. `instructions` counts those of the code by their names.

    Loads and stores are those of threads; bulk copies by descriptor (TMA) have no width and are not among them.
    `load_bits` and `store_bits` are the widths of the instructions that load from and store to global memory, each with how
    many such instructions the code holds: {128: 2} is two instructions that move 16 bytes a thread.
    """

    kernel: str
    target: str
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bits: dict = field(default_factory=dict)
    store_bits: dict = field(default_factory=dict)
    layout: Layout | None = None
    schedule: tuple = ()
    static_shared_bytes: int = 0
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    allocated_vgprs: int = 0
    allocated_sgprs: int = 0
    llvm_waves: int = 0
    instructions: dict = field(default_factory=dict)

    def __str__(self):
        def widths(bits):
            return (
                " + ".join(
                    f"{number} of {width} bits"
                    for width, number in sorted(bits.items())
                )
                or "none"
            )

        return (
            f"{self.kernel} for {self.target}, {self.num_warps} warps: {self.registers} registers, {self.spill_bytes} bytes "
            f"spilled, {self.shared_bytes} bytes shared; loads: {widths(self.load_bits)}; stores: {widths(self.store_bits)}"
        )

    as_dict = asdict


def resources(fn, target, *tensors, **options):
    """The `Resources` of each Triton kernel that `fn(*tensors)` launches, compiled for `target`. No kernel runs.

    >>> [kernel] = resources(fused.softmax, "sm_90", torch.empty(1, 4096, device=machine.device()))
    >>> kernel.spill_bytes
    0

    target: a key of `TARGETS`; `fn` chooses for it, as it would on such a GPU. options: `num_warps`, `num_stages`, and on AMD
    `waves_per_eu`, instead of what `fn` asks for; an `fn` with an argument `num_stages` is given that, too.

    Raises LookupError for an unknown target, TypeError for an unknown option, CompileError if a kernel does not compile there,
    LookupError where kernels are interpreted and a kernel is defined in no file that a second process could import.
    """
    found = _with_options(fn, target, tensors, options)
    return compile_launches([(launch, target) for launch in found])


def assembly(fn, target, *tensors, keep=".", **options):
    """The assembly of each kernel that `fn(*tensors)` launches, compiled for `target`: a list of texts.

    keep: a regular expression; only lines in which it is found are kept, without comments and addresses. The other
    arguments, and what is raised: as `resources`.
    """
    found = _with_options(fn, target, tensors, options)
    texts = compile_launches([(launch, target) for launch in found], text=True)
    return [
        "\n".join(line for line in text.splitlines() if re.search(keep, line))
        for text in texts
    ]


def _with_options(fn, target, tensors, options):
    """The launches of `fn` on `target`, `options` in place of what it asks for."""
    if unknown := set(options) - {"num_warps", "num_stages", "waves_per_eu"}:
        raise TypeError(f"resources: unknown options {', '.join(sorted(unknown))}")
    given = {name: value for name, value in options.items() if value is not None}
    if "num_stages" in given and "num_stages" in inspect.signature(fn).parameters:
        fn = functools.partial(fn, num_stages=given["num_stages"])
    found = launches(fn, *tensors, target=target)
    return [replace(launch, options=launch.options | given) for launch in found]


def launches(fn, *tensors, target=None):
    """Every `Launch` that `fn(*tensors)` makes. The kernels are noted, not run, so what they would write stays unwritten.

    target: a key of `TARGETS` that `fn` chooses for. Raises LookupError for an unknown one.
    """
    if target is not None:
        _known(target)
    from triton.runtime import autotuner, interpreter, jit

    found = []

    def note(kernel, *args, grid=None, warmup=False, **kwargs):
        found.append(_describe(kernel, args, kwargs))

    def note_tuned(tuner, *args, **kwargs):
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(kwargs):
            tuner.fn.run(*args, **kwargs | config.all_kwargs())

    with (
        machine.metered(target, TARGETS[target][2] if target else None),
        _replaced(jit.JITFunction, "run", note),
        _replaced(interpreter.InterpretedFunction, "run", note),
        _replaced(autotuner.Autotuner, "run", note_tuned),
    ):
        fn(*tensors)
    return found


@contextmanager
def _replaced(owner, name, value):
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _describe(kernel, args, kwargs):
    """A launch's arguments as Triton specialises them: an int of 1 is a constant, one divisible by 16 is marked so."""
    fn = kernel.fn
    parameters = inspect.signature(fn).parameters
    bound = inspect.signature(fn).bind(
        *args, **{name: kwargs[name] for name in kwargs if name in parameters}
    )
    bound.apply_defaults()
    signature, constants, attributes = {}, {}, {}
    for position, (name, value) in enumerate(bound.arguments.items()):
        annotation = parameters[name].annotation
        is_constexpr = str(getattr(annotation, "__name__", annotation)).endswith(
            "constexpr"
        )
        is_one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        if is_constexpr or value is None or is_one:
            signature[name], constants[name] = (
                "constexpr",
                getattr(value, "value", value),
            )
            continue
        signature[name] = _type_name(fn.__name__, name, value)
        size = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(size, int) and not isinstance(size, bool) and size % 16 == 0:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {
        name: kwargs[name]
        for name in ("num_warps", "num_stages", "waves_per_eu")
        if name in kwargs
    }
    return Launch(
        fn.__module__,
        fn.__qualname__,
        signature,
        constants,
        attributes,
        {"num_warps": 4} | options,
    )


def _type_name(kernel, name, value):
    if isinstance(value, torch.Tensor):
        from triton.runtime.jit import mangle_type

        return mangle_type(value)
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise CompileError(
        f"{kernel}: cannot compile for an argument {name} of type {type(value).__name__}"
    )


def _known(target):
    if target not in TARGETS:
        raise LookupError(
            f"no target is named {target!r}: give one of {', '.join(TARGETS)}"
        )


def compile_launches(jobs, text=False):
    """The `Resources` of each of `jobs`, pairs of a `Launch` and a target's name; raises as `resources`.

    text: the assembly in their place.
    """
    for _, target in jobs:
        _known(target)
    if not machine.INTERPRETED:
        return [_compile(launch, target, text) for launch, target in jobs]
    for launch, _ in jobs:
        if launch.module == "__main__" or "<" in launch.qualname:
            raise LookupError(
                f"{launch.qualname} is defined in a cell or a script: where kernels are interpreted a second process compiles "
                "them, so put the kernel in a file that it can import"
            )
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        paths = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
        worker = subprocess.run(
            [
                sys.executable,
                "-c",
                "from memtraffic.targets import _worker; _worker()",
                str(answer),
            ],
            input=pickle.dumps((jobs, text)),
            env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths},
            capture_output=True,
        )
        if worker.returncode:
            raise CompileError(worker.stderr.decode().strip().splitlines()[-1])
        outcome = pickle.loads(answer.read_bytes())
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _worker():
    """What the second process does: jobs in on stdin, their resources or the error out to a file."""
    jobs, text = pickle.loads(sys.stdin.buffer.read())
    try:
        outcome = [_compile(launch, target, text) for launch, target in jobs]
    except (CompileError, LookupError) as error:
        outcome = error
    Path(sys.argv[1]).write_bytes(pickle.dumps(outcome))


def _compile(launch, target, text=False):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, architecture, warp = TARGETS[target]
    kernel = sys.modules.get(launch.module) or __import__(launch.module, fromlist=["_"])
    for part in launch.qualname.split("."):
        kernel = getattr(kernel, part)
    while not isinstance(
        kernel, triton.JITFunction
    ):  # unwrap autotuning and heuristics
        kernel = kernel.fn
    options = {
        name: value
        for name, value in launch.options.items()
        if backend == "hip" or name != "waves_per_eu"
    }
    source = ASTSource(kernel, launch.signature, launch.constants, launch.attributes)
    try:
        compiled = triton.compile(
            source, target=GPUTarget(backend, architecture, warp), options=options
        )
    except Exception as error:  # compilers raise whatever they like
        raise CompileError(
            f"{kernel.__name__} does not compile for {target}: {error}"
        ) from error
    if backend == "cuda":
        usage, code = _read_cubin(compiled.asm["cubin"])
        lines = _sass_lines(code)
    else:
        usage = compiled.asm["amdgcn"]
        code = usage.split(f"\n{kernel.__name__}:")[1].split(".Lfunc_end")[0]
        lines = re.findall(r"^\t([a-z].*?)(?:\s*;.*)?$", code, re.M)
    if text:
        return "\n".join(lines)
    found = amd_usage(usage) if backend == "hip" else _cuda_usage(usage, architecture)
    widths = _SASS_WIDTHS if backend == "cuda" else _AMD_WIDTHS
    return Resources(
        kernel=kernel.__name__,
        target=target,
        num_warps=options["num_warps"],
        shared_bytes=compiled.metadata.shared,
        load_bits=_widths(widths["load"], "\n".join(lines)),
        store_bits=_widths(widths["store"], "\n".join(lines)),
        instructions=_names(lines),
        layout=_layout(compiled.asm["ttgir"]),
        schedule=_schedule(compiled.asm["ttgir"]),
        **found,
    )


def _layout(ttgir):
    """The `Layout` of the first load in Triton's GPU dialect, where it is a blocked one."""
    load = re.search(
        r"(?:tt\.load|async_copy_global_to_local|buffer_load) .*?tensor<[^#\n]*?(#\w+)>",
        ttgir,
    )
    name = re.escape(load[1]) if load else ""
    found = load and re.search(rf"^{name} = #ttg\.blocked<\{{(.*?)\}}>", ttgir, re.M)
    if not found:
        return None
    numbers = {
        key: tuple(map(int, value.split(",")))
        for key, value in re.findall(r"(\w+) = \[([\d, ]+)\]", found[1])
    }
    return Layout(
        numbers["sizePerThread"], numbers["threadsPerWarp"], numbers["warpsPerCTA"]
    )


_STEPS = {
    r"(?:tt\.|buffer_)load ": "load",
    r"ttg\.async_copy_global_to_local ": "copy",
    r"ttg\.async_wait .*?num = (\d+)": "wait",
    r'"tt\.reduce"': "reduce",
    r"math\.exp2? ": "exp",
    r"(?:tt\.|buffer_)store ": "store",
}


def _schedule(ttgir):
    """The steps of a kernel in Triton's GPU dialect, in the order of its text; those of blocks only, not of single numbers."""
    steps, loops = [], []
    for line in ttgir.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if "scf.for " in line:
            steps.append("for")
            loops.append(indent)
        elif loops and line.startswith(loops[-1] + "}"):
            steps.append("end")
            loops.pop()
        for pattern, step in _STEPS.items():
            found = re.search(pattern, line)
            if found and step == "wait":
                steps.append(f"wait {found[1]}")
            elif found and (step == "reduce" or "tensor<" in line):
                steps.append(step)
    return tuple(steps)


def _sass_lines(sass):
    """The instructions in what `cuobjdump -sass` printed, without the barriers that newer GPUs' lines name after them."""
    return re.findall(r"^\s+/\*\w{4,}\*/\s+(.*?)\s*(?:[&?][^;]*)?;", sass, re.M)


def _names(lines):
    """How many of `lines` of code start with each name; a predicate before it does not count."""
    found = {}
    for line in lines:
        name = re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def _read_cubin(cubin):
    """What `cuobjdump` says of a kernel: its usage, and its code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return [_cuobjdump(option, file.name) for option in ("-res-usage", "-sass")]


def _cuda_usage(usage, architecture):
    # From sm_90 on, the kilobyte that the system keeps of each block is counted in.
    reserved = 1024 if architecture >= 90 else 0
    counted = dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage))
    return {
        "registers": int(counted["REG"]),
        "spill_bytes": int(counted["STACK"]) + int(counted["LOCAL"]),
        "static_shared_bytes": int(counted["SHARED"]) - reserved,
    }


def _cuobjdump(option, path):
    from triton import knobs

    return subprocess.run(
        [knobs.nvidia.cuobjdump.path, option, path],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def _sass_bits(suffixes):
    for suffix in suffixes.split("."):
        if suffix in ("64", "128", "256"):
            return int(suffix)
        if suffix in ("U8", "S8", "U16", "S16"):
            return int(suffix[1:])
    return 32


def amd_usage(assembly):
    """What LLVM's comments in the assembly of a kernel say that it uses, as fields of `Resources`."""
    counted = {
        name: int(value) for name, value in re.findall(r"; (\w+): (\d+)", assembly)
    }
    vgprs = counted["NumVgprs"]
    return {
        "registers": counted.get("TotalNumVgprs", vgprs),
        "spill_bytes": counted["ScratchSize"],
        "static_shared_bytes": counted["LDSByteSize"],
        "vgprs": vgprs,
        "agprs": counted.get("NumAgprs", 0),
        "sgprs": counted["TotalNumSgprs"],
        "allocated_vgprs": counted["NumVGPRsForWavesPerEU"],
        "allocated_sgprs": counted["NumSGPRsForWavesPerEU"],
        "llvm_waves": counted["Occupancy"],
    }


def _amd_bits(suffix):
    """Bits of an access by the end of its name: `dwordx4`, `dword`, `ushort`, `short_d16_hi`, `ubyte`, `b128`, `u16`."""
    if found := re.search(r"dwordx(\d)", suffix):
        return 32 * int(found[1])
    if found := re.search(r"(?:^|_)[biu](8|16|32|64|96|128)(?:_|$)", suffix):
        return int(found[1])
    return 8 if "byte" in suffix else 16 if "short" in suffix else 32


_SASS_WIDTHS = {
    "load": (r"\b(?:LDG|LDGSTS)\.E((?:\.\w+)*)", _sass_bits),
    "store": (r"\bSTG\.E((?:\.\w+)*)", _sass_bits),
}
_AMD_WIDTHS = {
    "load": (r"\b(?:global|buffer|flat)_load_(\w+)", _amd_bits),
    "store": (r"\b(?:global|buffer|flat)_store_(\w+)", _amd_bits),
}


def _widths(how, code):
    (pattern, bits), found = how, {}
    for suffix in re.findall(pattern, code):
        found[bits(suffix)] = found.get(bits(suffix), 0) + 1
    return dict(sorted(found.items()))
