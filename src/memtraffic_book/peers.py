"""Softmax kernels that other packages publish, to compare with: none of them has to be installed.

A package is imported when one of its kernels is first called, and what is not here is an
ImportError. What a kernel refuses is refused by the package's own error, or, where that would be
obscure, by a ValueError that says why.

- Liger (`liger-kernel`): a program per row, up to 65536 columns.
- FlagGems (`flag-gems`): a program per row; longer rows are read twice. Its backward is autotuned
  for each shape; it is given a tenth of the usual time for that.
- QuACK (`quack-kernels`): several rows per thread block, or a cluster of thread blocks per row. It
  compiles a kernel for each width, and `compiling_ahead` has other processes do so meanwhile.
- tutorial: the fused softmax of Triton's tutorials, `02-fused-softmax.py` in the folder that
  MEMTRAFFIC_TUTORIALS names, `tutorials` by default. It has no backward.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtraffic import runtime
from memtraffic.benchmark.baselines import BACKWARD
from memtraffic.triton_adapter.launch import set_tuning_time

# A cluster of QuACK's is at most 16 thread blocks, each of which an SM of an H200 gives this much
# shared memory, less 1 KiB for what the blocks tell one another.
QUACK_MOST = 16 * 226 * 2**10
QUACK_BYTES = 16  # what it moves at a time, so each row has to start at a multiple of it
COMPILERS = 8  # processes
TUNING_MS = 2.5, 10  # that an autotuner warms up and measures each configuration; usually 25, 100


@dataclass(frozen=True)
class Peer:
    """A package with a softmax.

    package: its name at PyPI, "" of the tutorial. forward: of a matrix. backward: of a softmax and
    the gradient of it.
    """

    package: str
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor] | None = None


# ---- Liger


def liger(x: Tensor) -> Tensor:
    """Liger's softmax of each row."""
    y: Tensor = _module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply(x)
    return y


def liger_backward(y: Tensor, dy: Tensor) -> Tensor:
    """Liger's backward of a row softmax, as its autograd function calls it."""
    module = _module("liger_kernel.ops.softmax")
    block, num_warps = module.calculate_settings(y.shape[-1])
    dx: Tensor = module._softmax_backward(dy, y, block, num_warps, y.shape[-1] > block)
    return dx


# ---- FlagGems


def flag_gems(x: Tensor) -> Tensor:
    """FlagGems' softmax of each row."""
    y: Tensor = _module("flag_gems.ops").softmax(x, -1)
    return y


def flag_gems_backward(y: Tensor, dy: Tensor) -> Tensor:
    """FlagGems' backward of a row softmax."""
    backward = _module("flag_gems.ops").softmax_backward
    _tune_quickly(backward.__globals__.get("softmax_backward_kernel_inner"))
    dx: Tensor = backward(dy, y, -1, y.dtype)
    return dx


@functools.cache
def _tune_quickly(kernel: Any) -> None:
    """Lets the autotuner of a kernel take a tenth of its time.

    Otherwise a comparison at many shapes would mostly wait for FlagGems to tune.
    """
    if runtime.HAS_TRITON:
        set_tuning_time(kernel, *TUNING_MS)


# ---- QuACK


def quack(x: Tensor) -> Tensor:
    """QuACK's softmax of each row, started without its wrapper: the least time on the host."""
    _check_quack(x, 1)
    y = torch.empty_like(x)
    _quack_kernel("Softmax", 2, x.dtype, x.shape[1])(x, y)
    return y


def quack_backward(y: Tensor, dy: Tensor) -> Tensor:
    """QuACK's backward of a row softmax, started without its wrapper."""
    _check_quack(y, 2)
    dx = torch.empty_like(y)
    _quack_kernel("SoftmaxBackward", 3, y.dtype, y.shape[1])(dy, y, dx)
    return dx


def quack_takes(n: int, itemsize: int, inputs: int = 1) -> str:
    """Why QuACK has no kernel for rows of `n` elements of so many bytes; "" where it has one.

    >>> quack_takes(4096, 4), quack_takes(781, 4)
    ('', 'QuACK takes a multiple of 4 columns of this type, not 781')

    inputs: matrices that the kernel reads, of which it keeps a row each in shared memory.
    """
    step = QUACK_BYTES // itemsize
    if n % step:
        return f"QuACK takes a multiple of {step} columns of this type, not {n}"
    most = QUACK_MOST // (itemsize * inputs)
    return f"QuACK takes at most {most} columns of this type here, not {n}" if n > most else ""


def _check_quack(x: Tensor, inputs: int) -> None:
    if reason := quack_takes(x.shape[1], x.element_size(), inputs):
        raise ValueError(reason)
    if not x.is_contiguous():
        raise ValueError("QuACK takes packed rows")


@functools.cache
def _quack_kernel(kind: str, tensors: int, dtype: torch.dtype, n: int) -> Callable[..., object]:
    _module("quack")
    module: Any = sys.modules["quack.softmax"]  # `quack.softmax` is a function
    kernel: Callable[..., object] = getattr(module, kind).compile(
        *[module.torch2cute_dtype_map[dtype]] * tensors, n
    )
    return kernel


def compile_quack(dtype: str, backward: bool, widths: Sequence[int]) -> None:
    """Compiles QuACK's kernels for several widths; QuACK keeps them on disk for other processes."""
    kind = ("SoftmaxBackward", 3) if backward else ("Softmax", 2)
    for n in widths:
        _quack_kernel(*kind, getattr(torch, dtype), n)


@contextmanager
def compiling_ahead(
    names: Sequence[str], widths: Sequence[int], dtype: str = "float32"
) -> Iterator[None]:
    """Context manager: other processes compile QuACK's kernels while this one goes on.

    names: of implementations; nothing happens where QuACK's are not among them, or it is absent.
    widths: numbers of columns, in the order in which they will be needed. Whatever is not compiled
    when it is needed, this process compiles itself.
    """
    asked = [name for name in names if name in ("QuACK", "QuACK" + BACKWARD)]
    itemsize = getattr(torch, dtype).itemsize
    workers = []
    if asked and importlib.util.find_spec("quack") and runtime.HAS_GPU and torch.version.cuda:
        count = max(1, min(COMPILERS, (os.cpu_count() or 1) // 2))
        for name in asked:
            back = name.endswith(BACKWARD)
            taken = [n for n in dict.fromkeys(widths) if not quack_takes(n, itemsize, 1 + back)]
            for first in range(min(count, len(taken))):
                arguments = dtype, back, taken[first::count]
                workers.append(_compiler(arguments))
    try:
        yield
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def _compiler(arguments: tuple[str, bool, Sequence[int]]) -> subprocess.Popen[bytes]:
    """A process that runs `compile_quack` for the GPU that is here, and does not touch that GPU."""
    major, minor = torch.cuda.get_device_capability()
    target = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "CUTE_DSL_ARCH": target,
        "QUACK_ARCH": f"{major}{minor}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    code = f"from memtraffic_book.peers import compile_quack; compile_quack(*{arguments!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# ---- the tutorial


TUTORIAL_COLUMNS = 2**16  # 2**17 take 3 times as long to compile for 8 warps, 2**18 take 18 times


def tutorial(x: Tensor) -> Tensor:
    """The softmax of Triton's tutorial, up to TUTORIAL_COLUMNS, past which it raises ValueError."""
    if x.shape[1] > TUTORIAL_COLUMNS:
        raise ValueError(
            f"a block of more than {TUTORIAL_COLUMNS} columns takes minutes to compile: not tried"
        )
    y: Tensor = _load_tutorial(tutorial_file()).softmax(x)
    return y


def tutorial_file() -> Path:
    """Where the tutorial has to lie."""
    return Path(os.environ.get("MEMTRAFFIC_TUTORIALS", "tutorials")) / "02-fused-softmax.py"


@functools.cache
def _load_tutorial(file: Path) -> types.ModuleType:
    """The tutorial as a module, up to its function `softmax`: what follows tests and times it."""
    if not file.is_file():
        raise ImportError(f"there is no file {file}")
    module = types.ModuleType(file.stem.replace("-", "_"))
    module.__file__ = str(file)
    body = []
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        name = getattr(statement, "name", "")
        if name != "naive_softmax":  # which is compiled by what PyTorch has deprecated
            body.append(statement)
        if name == "softmax":
            break
    else:
        raise LookupError(f"{file} has no function softmax")
    exec(compile(ast.Module(body, []), str(file), "exec"), vars(module))
    return module


# ---- all of them

PEERS: dict[str, Peer] = {
    "Liger": Peer("liger-kernel", liger, liger_backward),
    "FlagGems": Peer("flag-gems", flag_gems, flag_gems_backward),
    "QuACK": Peer("quack-kernels", quack, quack_backward),
    "tutorial": Peer("", tutorial),
}
IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    **{name: peer.forward for name, peer in PEERS.items()},
    **{name + BACKWARD: peer.backward for name, peer in PEERS.items() if peer.backward},
}


def _module(name: str) -> Any:
    """Imports a module of a package, with what the package wants to know before.

    Raises ImportError, whatever the package raises meanwhile.
    """
    if name.startswith("flag_gems") and torch.version.cuda:
        os.environ.setdefault("GEMS_VENDOR", "nvidia")  # or it runs vendors' commands to find out
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise ImportError(
            f"{name} cannot be imported ({type(error).__name__}: {reason})"
        ) from error


def find_peer(name: str) -> str:
    """The peer that an implementation is of, such as `Liger backward`; "" if it is of none.

    >>> find_peer("Liger backward"), find_peer("naive")
    ('Liger', '')
    """
    peer = name.removesuffix(BACKWARD)
    return peer if peer in PEERS else ""


def version(name: str) -> str:
    """The version of a peer that is here: of its package, or the start of the tutorial's SHA-256.

    "" if there is none.
    """
    if not (package := PEERS[name].package):
        file = tutorial_file()
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # not here, or on the path and not installed
        return ""
