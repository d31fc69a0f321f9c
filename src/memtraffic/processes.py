"""Starts the ranks of a process group, and brings back what they return, print and raise."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from memtraffic import device
from memtraffic.errors import RanksError

TOLD = 40  # lines of what a rank wrote that an error repeats


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    backend: str | None = None,
    timeout: float = 60,
) -> list[Any]:
    """Calls `fn(*args)` in `world_size` new processes, which are the ranks of one process group.

    >>> import torch, torch.distributed as dist
    >>> def total():
    ...     x = torch.tensor([dist.get_rank() + 1])
    ...     dist.all_reduce(x)
    ...     return x.item()
    >>> run_ranks(total, 2, timeout=120)
    [3, 3]

    fn: a function that the processes can import, or one of the notebook or script that runs; what
    this one uses of its module is brought along: modules, functions, classes, and values that can
    be pickled. args: values that can be pickled. backend: by default `nccl` where there is a GPU
    for each rank, which is then its current one, else `gloo`, whose ranks see no GPU. timeout:
    seconds, of each collective and of all.

    Returns what each rank returns. Prints what rank 0 prints, when all have ended.

    Raises RanksError where a rank raises, which says which and where, or ends early, or is not
    done in time; the others are ended. Raises ValueError for a number of ranks that cannot be
    started, and TypeError for a function that cannot be brought along.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: {world_size} ranks, and there is at least one")
    gpus = torch.cuda.device_count() if device.HAS_GPU and not device.INTERPRETED else 0
    backend = backend or ("nccl" if gpus >= world_size else "gloo")
    if backend == "nccl" and gpus < world_size:
        raise ValueError(f"run_ranks: {world_size} ranks of nccl need as many GPUs, not {gpus}")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        task = {
            "fn": _portable(fn, folder), "args": tuple(args), "world_size": world_size,
            "backend": backend, "timeout": timeout,
        }  # fmt: skip
        (folder / "task").write_bytes(pickle.dumps(task))
        return _run(folder, world_size, backend, timeout)


def _run(folder: Path, world_size: int, backend: str, timeout: float) -> list[Any]:
    """Starts the processes, and waits for all, or for the first that fails."""
    paths = os.pathsep.join([str(folder), *(path or os.getcwd() for path in sys.path)])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths}
    if backend == "gloo":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    ranks: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + timeout
    try:
        for rank in range(world_size):
            command = [sys.executable, "-m", "memtraffic.processes", str(folder), str(rank)]
            with (folder / f"output-{rank}").open("wb") as output:
                ranks.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=subprocess.STDOUT, env=environment,
                        stdin=subprocess.DEVNULL,
                    )
                )  # fmt: skip
        while any(each.poll() is None for each in ranks) and not any(
            each.returncode for each in ranks
        ):
            if time.monotonic() > end:
                raise RanksError(_late(folder, ranks, timeout))
            time.sleep(0.01)
        print((folder / "output-0").read_text("utf-8", errors="replace"), end="")
        if any(each.returncode for each in ranks):
            raise RanksError(_failure(folder, ranks))
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _failure(folder: Path, ranks: list[subprocess.Popen[bytes]]) -> str:
    """What became of the rank that failed first; those that wait for it fail after it."""
    told = [pickle.loads(path.read_bytes()) for path in folder.glob("error-*")]
    killed = [i for i, each in enumerate(ranks) if (each.returncode or 0) < 0]
    if told and not killed:
        _, rank, error = min(told)
        return f"rank {rank} of {len(ranks)} raised:\n{error}"
    rank = killed[0] if killed else next(i for i, each in enumerate(ranks) if each.returncode)
    ended = ranks[rank].returncode
    how = f"by {signal.Signals(-ended).name}" if ended < 0 else f"with status {ended}"
    return f"rank {rank} of {len(ranks)} ended {how}:\n{_output(folder, rank)}"


def _late(folder: Path, ranks: list[subprocess.Popen[bytes]], timeout: float) -> str:
    """Which ranks still run, and where the first of them is."""
    late = [i for i, each in enumerate(ranks) if each.poll() is None]
    for i in late:
        ranks[i].terminate()  # on which it writes where it is
        with suppress(subprocess.TimeoutExpired):
            ranks[i].wait(5)
    numbers = ", ".join(map(str, late))
    return (
        f"rank {numbers} of {len(ranks)} still ran after {timeout} s; rank {late[0]} was here:\n"
        f"{_output(folder, late[0])}"
    )


def _output(folder: Path, rank: int) -> str:
    lines = (folder / f"output-{rank}").read_text("utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TOLD:])


# ---- functions of a notebook or a script, which another process cannot import

MODULE = "ranks_main"  # holds their source, so that Triton finds the source of kernels, too
HEAD = """import pickle, pathlib
globals().update(pickle.loads(pathlib.Path(__file__).with_suffix(".values").read_bytes()))
"""


def _portable(fn: Callable[..., Any], folder: Path) -> Callable[..., Any] | str:
    """`fn` where it can be imported, else its name in MODULE, which is written into `folder`."""
    if getattr(fn, "__module__", "__main__") != "__main__":
        with suppress(pickle.PicklingError, AttributeError):  # of a function, or of a doctest
            pickle.dumps(fn)
            return fn
    sources: list[str] = []
    values: dict[str, Any] = {}
    _bring(fn.__name__, fn, getattr(fn, "__globals__", {}), sources, values, set())
    (folder / f"{MODULE}.values").write_bytes(pickle.dumps(values))
    (folder / f"{MODULE}.py").write_text("\n\n".join([HEAD, *sources]), "utf-8")
    return fn.__name__


def _bring(
    name: str,
    value: Any,
    known: dict[str, Any],
    sources: list[str],
    values: dict[str, Any],
    seen: set[str],
) -> None:
    """Adds what `name` of a module stands for, after all that it uses. known: the module's names.

    Raises TypeError for what has neither a source nor a pickle.
    """
    if name in seen:
        return
    seen.add(name)
    if isinstance(value, ModuleType):
        sources.append(f"import {value.__name__} as {name}")
        return
    inner = inspect.unwrap(value) if callable(value) else value
    inner = getattr(inner, "fn", inner)  # of a Triton kernel
    own = getattr(inner, "__module__", None) == known.get("__name__")
    if own and isinstance(inner, FunctionType | type):
        if inner.__name__ == "<lambda>" or getattr(inner, "__closure__", None):
            raise TypeError(
                f"run_ranks: {name} is a lambda or uses variables of another function: define it "
                "by `def`, outside of other functions"
            )
        source = textwrap.dedent(inspect.getsource(inner))
        for used in _names(compile(source, name, "exec", dont_inherit=True)):
            if used in known:
                _bring(used, known[used], known, sources, values, seen)
        sources.append(source)
        if name != inner.__name__:
            sources.append(f"{name} = {inner.__name__}")
        return
    try:
        pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"run_ranks: {name} cannot be brought to a rank: {error}") from None
    values[name] = value


def _names(code: CodeType) -> Iterator[str]:
    """The names that a piece of code looks up outside of its own variables."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


# ---- in a rank


def _be_rank(folder: Path, rank: int) -> None:
    """Does what `run_ranks` asks of a rank, in a process of its own."""
    faulthandler.register(signal.SIGTERM, chain=True)
    try:
        task = pickle.loads((folder / "task").read_bytes())
        if task["backend"] == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            task["backend"], init_method=f"file://{folder / 'store'}", rank=rank,
            world_size=task["world_size"], timeout=timedelta(seconds=task["timeout"]),
        )  # fmt: skip
        fn = task["fn"]
        if isinstance(fn, str):
            fn = getattr(importlib.import_module(MODULE), fn)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(fn(*task["args"])))
        dist.destroy_process_group()
    except BaseException as error:
        here = error.__traceback__
        told = "".join(traceback.format_exception(error.with_traceback(here and here.tb_next)))
        writing = folder / f"writing-{rank}"
        writing.write_bytes(pickle.dumps((time.monotonic(), rank, told)))
        writing.rename(folder / f"error-{rank}")
        sys.stdout.flush()
        os._exit(1)  # a group that has lost a rank may wait for it when it ends


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]), int(sys.argv[2]))
