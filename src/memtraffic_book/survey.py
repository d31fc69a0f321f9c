"""Counts what kernels that others published move: `python -m memtraffic_book survey`.

Each package of `KERNELS` that is installed is counted in a process of its own, where a GPU of the
table answers for one that is absent. A row is a pass of a kernel: its formula where there is one,
else the elements that it moves at the sizes of `AT`, else the reason why it cannot be counted.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from memtraffic.functions import as_function
from memtraffic.gpus import DEFAULT_GPU
from memtraffic.inputs import find_inputs
from memtraffic.meters.formula import Counts, Shape, polynomial, solve
from memtraffic.meters.generated import generated
from memtraffic.stand_in import stand_in
from memtraffic_book.recording import RecordingError, root, to_csv

NAME = "survey.csv"  # in the folder of recordings, beside those of the GPUs
TUTORIALS = "triton-tutorials"  # no package, but a folder of Triton's repository
# What stands for each letter where a kernel's traffic has no formula, or more than two letters.
# A formula must hold here, too: there are more rows than SMs, and than a program's tile has.
AT = {"K": 64, "M": 160, "N": 128, "S": 640, "T": 320}
# Shapes to solve at, and to check at, by the letters. T, time, is cut into chunks of up to 64.
SHAPES: dict[tuple[str, ...], tuple[tuple[Shape, ...], tuple[Shape, ...]]] = {
    ("T",): (((64,), (128,), (192,)), ((256,),)),
    ("S",): (((128,), (256,), (384,)), ((512,),)),  # time, in chunks of 128
    ("M",): (((2,), (3,), (5,), (8,)), ((12,), (7,))),
    ("N",): (((2,), (3,), (5,), (8,)), ((12,), (7,))),
    ("M", "N"): (
        ((2, 8), (3, 16), (5, 32), (7, 4), (4, 64), (3, 5), (8, 21)),
        ((4, 2), (6, 100), (5, 48)),
    ),
}
NO_BACKWARD = "no result has a gradient"  # as `count_passes` says it
SETTINGS = {"GEMS_VENDOR": "nvidia"}  # FlagGems looks for its GPU by running a vendor's command


@dataclass(frozen=True)
class Published:
    """A kernel that others published.

    path: `module:function`; of a tutorial, `file:function`. inputs: as of `memtraffic.inputs`.
    fixed: arguments that such a specification cannot say, by name or by position. keep:
    `module:kernel` of autotuned kernels whose configurations differ in traffic, with spaces between
    them: the first configuration is kept. note: what a number depends on. compiled: whether
    `torch.compile` generates the kernels, for inputs without letters.
    """

    package: str
    path: str
    inputs: str
    fixed: Mapping[str | int, Any] = field(default_factory=dict)
    keep: str = ""
    note: str = ""
    compiled: bool = False


@dataclass
class Row:
    """One pass of a kernel. reads, writes, least_reads, least_writes: formulas, or elements.

    The least reads each input once, and writes each output once; those of a backward pass are the
    inputs with the gradients of the outputs, and the gradients of the inputs. at: the sizes, where
    there is no formula. gpu: what answered for the GPU. reason: why it cannot be counted.
    """

    package: str
    version: str
    kernel: str
    direction: str
    inputs: str
    reads: str = ""
    writes: str = ""
    least_reads: str = ""
    least_writes: str = ""
    at: str = ""
    gpu: str = DEFAULT_GPU.product
    note: str = ""
    reason: str = ""


# ---- the kernels


def _of(package: str, module: str, kernels: Mapping[str, str], **options: Any) -> list[Published]:
    """Kernels of one module: their inputs, by their names."""
    return [
        Published(package, f"{module}:{name}", inputs, **options)
        for name, inputs in kernels.items()
    ]


_LIGER = "liger_kernel.transformers.functional"
_QKV = "1,T,2,16 1,T,2,16 1,T,2,16"  # batch, time, heads, features
_BF16 = "1,T,2,16:bf16 1,T,2,16:bf16 1,T,2,16:bf16"
_GATE = "1,T,2"

KERNELS: tuple[Published, ...] = (
    *_of(
        "liger-kernel",
        _LIGER,
        {
            "liger_softmax": "M,N",
            "liger_cross_entropy": "M,N M:int64<N",
            "liger_rms_norm": "M,N N, 1e-6",
            "liger_layer_norm": "M,N N, N, 1e-6",
            "liger_fused_add_rms_norm": "M,N M,N N, 1e-6",
            "liger_modulated_rms_norm": "1,M,N N, 1,N",
            "liger_group_norm": "M,12,N 12, 12, 12 4 1e-6",
            "liger_dyt": "M,N 1, N, N,",
            "liger_geglu": "M,N M,N",
            "liger_swiglu": "M,N M,N",
            "liger_relu_squared": "M,N",
            "liger_kl_div": "M,N M,N",
            "liger_jsd": "M,N M,N",
            "liger_tvd": "M,N M,N",
            "liger_rope": "1,2,M,64 1,2,M,64 1,M,64 1,M,64",
            "liger_multi_token_attention": "1,2,M,M 2,2,3,3 None 1 1",
            "liger_fused_neighborhood_attention": "1,2,16,N 1,2,16,N 1,2,16,N",
            "liger_attn_res": "3,1,M,N N, N,",
            "liger_mhc_pre": "M,4,N M,4",
            "liger_mhc_post_res": "M,4,N M,N M,4 M,4,4",
            "liger_fused_linear_cross_entropy": "M,K N,K M:int64<N",
            "liger_fused_linear_jsd": "M,K N,K M,K N,K",
            "liger_fused_linear_kl_div": "M,K N,K M,N",
        },
    ),
    *_of("liger-kernel", _LIGER, {"liger_sparsemax": "M,N"}),
    *_of("liger-kernel", "liger_kernel.transformers.poly_norm", {"LigerPolyNorm": "M,N"}),
    *_of("liger-kernel", "liger_kernel.ops", {"LigerEmbeddingFunction": "N,K M:int64<N"}),
    *_of(
        "flag-gems",
        "flag_gems.ops",
        {
            "softmax": "M,N 1",
            "log_softmax": "M,N 1",
            "gelu": "M,N",
            "gelu_backward": "M,N M,N",
            "silu": "M,N",
            "silu_backward": "M,N M,N",
            "tanh": "M,N",
            "exp": "M,N",
            "add": "M,N M,N",
            "sum": "M,N",
            "mean_dim": "M,N 1",
            "max_dim": "M,N 1",
            "argmax": "M,N 1",
            "cumsum": "M,N 1",
            "embedding": "N,K M:int64<N",
            "where_self": "M,N:bool M,N M,N",
            "gather": "M,N 1 M,8:int64<2",
            "index_select": "M,N 0 8:int64<2",
            "topk": "M,N 2",
            "triu": "M,N",
            "batch_norm": "M,N N, N, None None true",
            "mse_loss": "M,N M,N",
            "vdot": "N, N,",
            "nll_loss_forward": "M,N M:int64<N",
            "dropout": "M,N 0.5",
        },
    ),
    Published("flag-gems", "flag_gems.ops:layer_norm", "M,64 64, 64,", {1: [64]}),
    Published("flag-gems", "flag_gems.ops:rms_norm", "M,64 64,", {1: [64]}),
    Published("flag-gems", "flag_gems.ops:sum_dim", "M,N", {"dim": [1]}),
    Published("flag-gems", "flag_gems.ops:vector_norm", "M,N", {"dim": [1]}),
    Published("flag-gems", "flag_gems.ops:flip", "M,N", {"dims": [0]}),
    *(
        Published("flag-gems", f"flag_gems.ops:{name}", inputs, keep=f"flag_gems.ops.{keep}")
        for name, inputs, keep in (
            ("mm", "M,K K,N", "mm:mm_kernel_general"),
            ("mv", "M,N N,", "mv:mv_kernel"),
            ("bmm", "2,M,K 2,K,N", "bmm:bmm_kernel"),
            ("addmm", "M,N M,K K,N", "addmm:addmm_kernel"),
            ("conv2d", "1,3,12,12 4,3,3,3", "conv2d:conv2d_forward_kernel"),
        )
    ),
    *_of(
        "flag-gems",
        "flag_gems.fused",
        {
            "cross_entropy_loss": "M,N M:int64<N",
            "silu_and_mul": "M,N M,N",
            "gelu_and_mul": "M,N M,N",
        },
    ),
    *_of(
        "fla-core",
        "fla.modules.layernorm",
        {
            "layer_norm": "M,N N, N,",
            "rms_norm": "M,N N, None",
        },
        keep="fla.modules.layernorm:layer_norm_fwd_kernel "
        "fla.modules.layernorm:layer_norm_bwd_kernel",
    ),
    *_of(
        "fla-core",
        "fla.modules.fused_norm_gate",
        {"rms_norm_gated": "M,N M,N N, None", "layer_norm_gated": "M,N M,N N, N,"},
        keep="fla.modules.norm.fused_norm_gate:layer_norm_gated_fwd_kernel "
        "fla.modules.norm.fused_norm_gate:layer_norm_gated_bwd_kernel",
    ),
    *_of("fla-core", "fla.modules.l2norm", {"l2norm": "M,N"}),
    *_of(
        "fla-core",
        "fla.modules.activations",
        {
            "swiglu": "M,N M,N",
            "logsigmoid": "M,N",
            "swish": "M,N",
            "sqrelu": "M,N",
            "swiglu_linear": "M,N M,N K,N None",
        },
    ),
    *_of(
        "fla-core",
        "fla.modules.fused_cross_entropy",
        {"cross_entropy_loss": "M,N M:int64<N"},
    ),
    *_of(
        "fla-core",
        "fla.modules.fused_linear_cross_entropy",
        {"fused_linear_cross_entropy_loss": "M,K M:int64<N N,K"},
    ),
    *_of("fla-core", "fla.modules.rotary", {"rotary_embedding": "1,M,2,16 M,8 M,8"}),
    *_of("fla-core", "fla.modules.token_shift", {"token_shift": "1,M,N"}),
    *_of("fla-core", "fla.modules.convolution", {"causal_conv1d": "1,M,N N,4"}),
    *_of("fla-core", "fla.ops.utils.softmax", {"softmax_fwd": "M,N"}),
    *_of("fla-core", "fla.ops.utils.cumsum", {"chunk_local_cumsum": "1,T,2 16"}),
    *_of(
        "fla-core",
        "fla.ops.linear_attn",
        {"chunk_linear_attn": _QKV, "fused_recurrent_linear_attn": _QKV},
    ),
    *_of(
        "fla-core",
        "fla.ops.retention",
        {"chunk_retention": _QKV, "fused_recurrent_retention": _QKV, "parallel_retention": _QKV},
    ),
    *_of(
        "fla-core",
        "fla.ops.simple_gla",
        {
            "chunk_simple_gla": f"{_QKV} {_GATE}",
            "fused_recurrent_simple_gla": f"{_QKV} {_GATE}",
        },
    ),
    *_of(
        "fla-core",
        "fla.ops.gla",
        {"chunk_gla": f"{_QKV} 1,T,2,16", "fused_recurrent_gla": f"{_QKV} 1,T,2,16"},
    ),
    *_of(
        "fla-core",
        "fla.ops.delta_rule",
        {
            "chunk_delta_rule": f"{_BF16} {_GATE}:bf16",
            "fused_recurrent_delta_rule": f"{_QKV} {_GATE}",
        },
    ),
    *_of(
        "fla-core",
        "fla.ops.gated_delta_rule",
        {
            "chunk_gated_delta_rule": f"{_QKV} {_GATE} {_GATE}",
            "fused_recurrent_gated_delta_rule": f"{_QKV} {_GATE} beta={_GATE}",
        },
    ),
    *_of(
        "fla-core",
        "fla.ops.hgrn",
        {"chunk_hgrn": "1,T,16 1,T,16", "fused_recurrent_hgrn": "1,T,16 1,T,16"},
    ),
    *_of(
        "fla-core",
        "fla.ops.rwkv6",
        {"fused_recurrent_rwkv6": f"{_QKV} 1,T,2,16 2,16"},
    ),
    *_of("fla-core", "fla.ops.based", {"parallel_based": _QKV}),
    *_of("fla-core", "fla.ops.attn", {"parallel_attn": _QKV}),
    *_of("fla-core", "fla.ops.forgetting_attn", {"parallel_forgetting_attn": f"{_QKV} {_GATE}"}),
    *_of("conch-triton-kernels", "conch.ops.activation.silu_and_mul", {"silu_and_mul": "M,64"}),
    *_of(
        "conch-triton-kernels",
        "conch.ops.activation.gelu_tanh_and_mul",
        {"gelu_tanh_and_mul": "M,64"},
    ),
    *_of(
        "conch-triton-kernels",
        "conch.ops.normalization.rms_norm",
        {"rms_norm": "M,N N, 1e-6", "fused_add_rms_norm": "M,N M,N N, 1e-6"},
    ),
    *_of(
        "conch-triton-kernels",
        "conch.ops.normalization.gemma_rms_norm",
        {"gemma_rms_norm": "M,N N, 1e-6"},
    ),
    *_of(
        "conch-triton-kernels",
        "conch.ops.embedding.rotary_embedding",
        {"rotary_embedding": "M:int64<16 M,64 M,64 32 16,32"},
    ),
    *_of("conch-triton-kernels", "conch.ops.quantization.int8", {"scaled_int8_quant": "M,N 1,"}),
    *_of("conch-triton-kernels", "conch.ops.quantization.fp8", {"scaled_fp8_quant": "M,N 1,"}),
    *_of(
        "conch-triton-kernels",
        "conch.ops.quantization.bitsandbytes.functional",
        {"quantize_4bit": "M,64"},
    ),
    *_of(
        "conch-triton-kernels",
        "conch.ops.vision.nms",
        {"nms": "M,4 M, 0.5"},
        note="depends on which boxes overlap",
    ),
    *_of(
        "torch",
        "torch.nn.functional",
        {"softmax": "64,512 1", "log_softmax": "64,2048 1", "gelu": "64,512"},
        compiled=True,
        note="compiled by inductor",
    ),
    Published("torch", "torch:softmax", "64,2048 1", compiled=True, note="compiled by inductor"),
    Published(
        "torch",
        "torch.nn.functional:layer_norm",
        "64,512 512, 512,",
        {1: (512,)},
        compiled=True,
        note="compiled by inductor",
    ),
    *_of(TUTORIALS, "02-fused-softmax", {"softmax": "M,N", "naive_softmax": "M,N"}),
    Published(
        TUTORIALS,
        "03-matrix-multiplication:matmul",
        "M,K:fp16 K,N:fp16",
        keep="03-matrix-multiplication:matmul_kernel",
    ),
    *_of(TUTORIALS, "04-low-memory-dropout", {"dropout": "M, M:bool 0.5"}),
    *_of(TUTORIALS, "04-low-memory-dropout", {"seeded_dropout": "M, 0.5 123"}),
    Published(TUTORIALS, "05-layer-norm:layer_norm", "M,64 64, 64, 1e-5", {1: (64,)}),
    # The last three arguments: causal, the scale, and no specialised warps, as its benchmark says
    # of a GPU before Blackwell.
    Published(
        TUTORIALS,
        "06-fused-attention:attention",
        "1,2,S,64:fp16 1,2,S,64:fp16 1,2,S,64:fp16",
        {3: True, 4: 0.125, 5: False},
        keep="06-fused-attention:_attn_fwd",
        note="causal",
    ),
)


# ---- counting one package


def find_kernel(path: str, tutorials: Path) -> Any:
    """What `module:function` names; where the module is a file in `tutorials`, that of the file.

    Raises LookupError if there is none.
    """
    module, _, name = path.partition(":")
    file = tutorials / f"{module}.py"
    found = _load_tutorial(file) if file.is_file() else importlib.import_module(module)
    return functools.reduce(getattr, name.split("."), found)


@functools.cache
def _load_tutorial(file: Path) -> types.ModuleType:
    """A tutorial as a module, without the statements that need a GPU, such as its benchmarks."""
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    body = ast.parse(file.read_text(encoding="utf-8")).body
    # A benchmark that fails leaves its report in the current folder.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for statement in body:
            code = compile(ast.Module([statement], []), str(file), "exec")
            with contextlib.suppress(Exception):
                exec(code, vars(module))
    return module


def count_package(package: str, tutorials: Path) -> Iterator[Row]:
    """The rows of the kernels of one package, counted in this process."""
    release = version("triton" if package == TUTORIALS else package)
    with stand_in():
        for kernel in KERNELS:
            if kernel.package == package:
                yield from _count_kernel(kernel, release, tutorials)


def _count_kernel(kernel: Published, release: str, tutorials: Path) -> Iterator[Row]:
    """The row of each pass of a kernel; of one without a backward pass, that of the forward."""
    forward, backward = (
        Row(kernel.package, release, kernel.path, direction, kernel.inputs, note=kernel.note)
        for direction in ("forward", "backward")
    )
    columns: list[dict[str, str]] = []
    reason = ""
    try:
        fn = with_fixed(as_function(find_kernel(kernel.path, tutorials)), kernel.fixed)
        kept = [keep_first(find_kernel(path, tutorials)) for path in kernel.keep.split()]
        forward.note = backward.note = "; ".join(filter(None, [*kept, kernel.note]))
        if kernel.compiled:
            fn = _compiled(fn, kernel.inputs)
        try:
            columns = _solved(fn, kernel.inputs, backward=True)
        except Exception as error:
            reason = reason_of(error)
            columns = _solved(fn, kernel.inputs, backward=False)
    except Exception as error:
        forward.reason = reason_of(error)
    else:
        forward = replace(forward, **columns[0])
    yield forward
    if columns[1:]:
        # What moves nothing only passes on a gradient: the kernel itself has no backward pass.
        if (columns[1]["reads"], columns[1]["writes"]) != ("0", "0"):
            yield replace(backward, **columns[1])
    elif columns and NO_BACKWARD not in reason:
        yield replace(backward, reason=reason)


def _compiled(fn: Callable[..., Any], inputs: str) -> Callable[..., Any]:
    """What inductor makes of `fn` for inputs without letters, called as `fn` is."""
    values = find_inputs(inputs).arguments(()).positional
    places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        return fn(*(given.get(place, value) for place, value in enumerate(values)))

    made = generated(of_tensors, *(values[place] for place in places))
    return lambda *args: made(*(args[place] for place in places))


def reason_of(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def with_fixed(fn: Callable[..., Any], fixed: Mapping[str | int, Any]) -> Callable[..., Any]:
    """`fn` with some arguments set, by name or by position."""
    if not fixed:
        return fn

    def call(*args: Any, **options: Any) -> Any:
        given = list(args)
        for place, value in fixed.items():
            if isinstance(place, int):
                given.insert(place, value)
            else:
                options[place] = value
        return fn(*given, **options)

    return call


def keep_first(kernel: Any) -> str:
    """Leaves an autotuned kernel its first configuration; returns its name and that."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    del kernel.configs[1:]
    chosen = ", ".join(f"{name}={value}" for name, value in kernel.configs[0].kwargs.items())
    return f"{kernel.base_fn.__name__}: {chosen}"


def _solved(fn: Callable[..., Any], inputs: str, backward: bool) -> list[dict[str, str]]:
    """For each pass the columns from `reads` to `at`: formulas, or elements at the sizes `AT`."""
    sizes = find_inputs(inputs).sizes
    fit, held_out = SHAPES.get(sizes, ((), ()))
    seen: dict[Shape, tuple[list[Tensor], list[Tensor]]] = {}

    def watched(*args: Any, **options: Any) -> Any:
        result = fn(*args, **options)
        seen[shape] = list(_tensors([*args, *options.values()])), list(_tensors([result]))
        return result

    counts = Counts(watched, inputs, backward=backward)
    for shape in fit:
        counts.add([shape], [])
    at = tuple(AT[size] for size in sizes)
    for shape in (*held_out, at):
        counts.add([], [shape])
    if at not in counts.traffic:
        raise ValueError(counts.refused[-1][-1])

    def quantities(which: int) -> dict[str, dict[Shape, int]]:
        return {
            "reads": counts.elements(which, "reads"),
            "writes": counts.elements(which, "writes"),
        } | _least({shape: seen[shape] for shape in counts.traffic}, which)

    passes = range(2 if backward else 1)
    columns = []
    for which in passes if fit and not counts.too_few() else ():
        solutions = {name: solve(found, counts) for name, found in quantities(which).items()}
        columns.append({name: polynomial(found) for name, found in solutions.items() if found})
    if columns and all(len(each) == 4 for each in columns):
        return columns
    sides = ", ".join(f"{size}={n}" for size, n in zip(sizes, at, strict=True))
    return [
        {name: str(found[at]) for name, found in quantities(which).items()} | {"at": sides}
        for which in passes
    ]


def _least(
    seen: Mapping[Shape, tuple[list[Tensor], list[Tensor]]], which: int
) -> dict[str, dict[Shape, int]]:
    """By shape the least that the forward pass (0) or the backward pass (1) reads and writes."""
    reads, writes = {}, {}
    for shape, (inputs, outputs) in seen.items():
        given = sum(x.numel() for x in inputs)
        if which == 0:
            reads[shape], writes[shape] = given, sum(x.numel() for x in outputs)
        else:
            reads[shape] = given + sum(x.numel() for x in outputs if x.is_floating_point())
            writes[shape] = sum(x.numel() for x in inputs if x.is_floating_point())
    return {"least_reads": reads, "least_writes": writes}


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


# ---- all packages


def count_all(tutorials: Path) -> tuple[pd.DataFrame, list[str]]:
    """The survey: a DataFrame with the fields of `Row` as columns, and the packages left out.

    tutorials: the folder `python/tutorials` of Triton's repository. A package is left out that is
    not installed. Raises RuntimeError if the process that counts a package fails.
    """
    rows: list[dict[str, str]] = []
    absent = []
    with tempfile.TemporaryDirectory() as cache:
        settings = SETTINGS | {"FLAGGEMS_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
        for package in dict.fromkeys(kernel.package for kernel in KERNELS):
            if not _is_here(package, tutorials):
                absent.append(package)
                continue
            done = subprocess.run(
                [sys.executable, "-m", "memtraffic_book.survey", package, str(tutorials)],
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
                raise RuntimeError(f"survey of {package}: {last}")
            rows += json.loads(done.stdout.splitlines()[-1])
    return pd.DataFrame(rows, columns=[each.name for each in fields(Row)]), absent


def _is_here(package: str, tutorials: Path) -> bool:
    if package == TUTORIALS:
        return any(tutorials.glob("*.py"))
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def write(tutorials: Path) -> tuple[Path, list[str]]:
    """Counts everything and writes the survey; returns its path and the packages left out."""
    frame, absent = count_all(tutorials)
    path = root() / NAME
    path.write_text(to_csv(frame), encoding="utf-8")
    return path, absent


def load() -> pd.DataFrame:
    """The survey as it was written, with the fields of `Row` as columns.

    Raises RecordingError, which names the command that mends it, if it is missing or has others.
    """
    path, fix = root() / NAME, "`python -m memtraffic_book survey` counts again"
    if not path.is_file():
        raise RecordingError(f"{path}: missing; {fix}")
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    if list(frame.columns) != (wanted := [each.name for each in fields(Row)]):
        raise RecordingError(f"{path}: has columns {list(frame.columns)}, not {wanted}; {fix}")
    return frame


def _worker(package: str, tutorials: str) -> None:
    """Prints the rows of one package as JSON, last, and nothing that the package prints."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's code
        rows = [asdict(row) for row in count_package(package, Path(tutorials))]
    print(json.dumps(rows))


if __name__ == "__main__":
    _worker(*sys.argv[1:])
