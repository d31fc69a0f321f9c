"""The packages that the book compares with.

Their kernels are `memtraffic.benchmark.packages`; QuACK compiles one for each width, and here other
processes do so meanwhile.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from memtraffic import runtime
from memtraffic.benchmark.baselines import BACKWARD
from memtraffic.benchmark.packages import quack_kernel, quack_takes

COMPILERS = 8  # processes


# ---- QuACK


def compile_quack(dtype: str, backward: bool, widths: Sequence[int]) -> None:
    """Compiles QuACK's kernels for several widths; QuACK keeps them on disk for other processes."""
    kind = ("SoftmaxBackward", 3) if backward else ("Softmax", 2)
    for n in widths:
        quack_kernel(*kind, getattr(torch, dtype), n)


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


# ---- all of them

# The name of each package at PyPI.
PEERS = {"Liger": "liger-kernel", "FlagGems": "flag-gems", "QuACK": "quack-kernels"}


def find_peer(name: str) -> str:
    """The peer that an implementation is of, such as `Liger backward`; "" if it is of none.

    >>> find_peer("Liger backward"), find_peer("naive")
    ('Liger', '')
    """
    peer = name.removesuffix(BACKWARD)
    return peer if peer in PEERS else ""


def version(name: str) -> str:
    """The version of a peer's package that is here; "" if there is none."""
    try:
        return importlib.metadata.version(PEERS[name])
    except importlib.metadata.PackageNotFoundError:  # not here, or on the path and not installed
        return ""
