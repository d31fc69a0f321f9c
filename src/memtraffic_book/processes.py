"""Starts the ranks of a process group, and brings back what they return."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from memtraffic import device

_starting = threading.Lock()  # meanwhile, the environment is that of the ranks


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    backend: str | None = None,
    timeout: float = 60,
) -> list[Any]:
    """Calls `fn(*args)` in `world_size` new processes, which are the ranks of one process group.

    >>> run_ranks(dist.get_rank, 2, timeout=120)
    [0, 1]

    fn: a function of a module, not of a notebook; the processes import it. args: values that can be
    pickled. backend: by default `nccl` where there is a GPU for each rank, which is then its
    current one, else `gloo`, whose ranks see no GPU. timeout: seconds, of each collective and of
    all.

    Returns what each rank returns. Raises ProcessRaisedException of `torch.multiprocessing` where a
    rank raises, which says which and where, ProcessExitedException where one ends early, and
    TimeoutError where one is not done in time; the others are ended.
    """
    gpus = torch.cuda.device_count() if device.HAS_GPU and not device.INTERPRETED else 0
    backend = backend or ("nccl" if gpus >= world_size else "gloo")
    environment = {"OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder, end = Path(name), time.monotonic() + timeout
        options = {
            "backend": backend, "init_method": f"file://{folder / 'store'}",
            "world_size": world_size, "timeout": timedelta(seconds=timeout),
        }  # fmt: skip
        job = folder, fn, tuple(args), options
        with _starting, mock.patch.dict(os.environ, environment):
            ranks = start_processes(_be_rank, job, world_size, join=False, start_method="spawn")
        try:
            while not ranks.join(end - time.monotonic()):
                if time.monotonic() > end:
                    late = [i for i, rank in enumerate(ranks.processes) if rank.is_alive()]
                    raise TimeoutError(f"ranks {late} of {world_size} still ran after {timeout} s")
        finally:
            for rank in ranks.processes:
                rank.kill()
                rank.join()
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]


def _be_rank(
    rank: int, folder: Path, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Does what `run_ranks` asks of a rank, in a process of its own. options: of its group."""
    if options["backend"] == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(rank=rank, **options)
    (folder / str(rank)).write_bytes(pickle.dumps(fn(*args)))
    dist.destroy_process_group()
