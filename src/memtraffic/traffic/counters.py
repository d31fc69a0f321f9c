"""Reads hardware counters: what the caches and the memory of a GPU moved while a function ran.

A second process runs the function under Nsight Compute (`ncu`), which flushes the caches before each kernel. So each kernel is
counted alone, starting cold.
"""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import pandas as pd

from memtraffic import machine
from memtraffic.ladder import name_of, resolve
from memtraffic.matrices import LAYOUTS, matrix

# The sectors are those that come from L1: where L2 has two halves, `lts__t_sectors_op_write` also counts what they exchange.
METRICS = {
    "load_instructions": "smsp__sass_inst_executed_op_global_ld.sum",
    "instruction_read_bytes": "smsp__sass_data_bytes_mem_global_op_ld.sum",
    "l1_l2_read_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_write_sectors": "lts__t_sectors_srcunit_tex_op_write.sum",
    "ns": "gpu__time_duration.sum",
}
COLUMNS = ("kernel", *METRICS)
SECTOR_BYTES = 32


class CountersError(RuntimeError):
    """The counters of a function could not be read; the message says why."""


class NoCounters(CountersError):
    """This machine has no counters to read: no GPU, no `ncu`, or no permission."""


def counters(fn, m, n, dtype="float32", warmup=3, layout="packed"):
    """What the hardware moved in one call of `fn` on an M x N matrix: a DataFrame with a row for each kernel it ran.

    Columns: `kernel`, its name; `load_instructions`, loads from global memory, one for each warp that executed it;
    `instruction_read_bytes`, what its load instructions asked for, a word that several
    lanes of a warp share counted once;
    `l1_l2_read_bytes`, what L2 sent to L1; `dram_read_bytes` and `dram_write_bytes`; `l2_write_sectors`, sectors of 32 bytes
    that L1 wrote to L2; `ns`, its duration. Each is the sum over the whole GPU.

    fn: a rung's name, `module:function`, or a function that another process can import, called `warmup` times before.
    layout: how the matrix lies in memory, a key of `matrices.LAYOUTS`.

    Raises NoCounters where there is no GPU, no `ncu` or no permission to read counters; CountersError where `fn` fails;
    LookupError for a function that another process cannot import.
    """
    name = name_of(fn)
    resolve(name)
    if not machine.HAS_GPU:
        raise NoCounters("counters: there is no GPU on this machine")
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoCounters("counters: Nsight Compute's command `ncu` is not on the PATH")
    job = json.dumps(
        {
            "name": name,
            "matrix": {"m": m, "n": n, "dtype": dtype, "layout": layout},
            "warmup": warmup,
        }
    )
    paths = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    with tempfile.NamedTemporaryFile(suffix=".csv") as log:
        command = [
            ncu,
            "--clock-control",
            "none",
            "--profile-from-start",
            "off",
            "--csv",
            "--page",
            "raw",
        ]
        command += [
            "--print-units",
            "base",
            "--metrics",
            ",".join(METRICS.values()),
            "--log-file",
            log.name,
        ]
        command += [
            sys.executable,
            "-c",
            "from memtraffic.traffic.counters import _worker; _worker()",
            job,
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        said = log.read().decode()
    if "ERR_NVGPUCTRPERM" in said + done.stdout:
        raise NoCounters(
            "counters: the driver lets only an administrator read them (ERR_NVGPUCTRPERM)"
        )
    if done.returncode:
        lines = (done.stderr or said).strip().splitlines()
        errors = [
            line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)
        ]
        raise CountersError(f"counters: {(errors or lines)[-1]}")
    return parse(said)


counters.columns = COLUMNS


def layouts(fn, m, n, dtype="float32"):
    """`counters` of one function on an m x n matrix laid out in each way there is, with a first column `layout`.

    The layouts are the keys of `matrices.LAYOUTS`. Raises as `counters`.
    """
    frames = []
    for layout in LAYOUTS:
        frame = counters(fn, m, n, dtype, layout=layout)
        frame.insert(0, "layout", layout)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


layouts.columns = ("layout", *COLUMNS)


def parse(said):
    """The DataFrame of `counters` from what `ncu --csv --page raw` printed. Raises CountersError if a counter is missing."""
    table = "\n".join(line for line in said.splitlines() if line.startswith('"'))
    rows = list(csv.DictReader(io.StringIO(table)))[1:]  # the first row holds the units
    if not rows:
        raise CountersError("counters: ncu saw no kernel")
    if missing := [metric for metric in METRICS.values() if metric not in rows[0]]:
        raise CountersError(
            f"counters: ncu does not give {', '.join(missing)} on this GPU"
        )
    return pd.DataFrame(
        [
            {"kernel": short_name(row["Kernel Name"])}
            | {
                column: int(float(row[metric].replace(",", "")))
                for column, metric in METRICS.items()
            }
            for row in rows
        ],
        columns=list(COLUMNS),
    )


def short_name(kernel):
    """A kernel's name without its template arguments: `void at::native::reduce_kernel<512, …>` is `reduce_kernel`."""
    return kernel.split("(")[0].split("<")[0].removeprefix("void ").split("::")[-1]


def _worker():
    """What runs under ncu: warm up, then one call between start and stop."""
    import torch

    job = json.loads(sys.argv[1])
    fn = resolve(job["name"])
    x = matrix(**job["matrix"])
    for _ in range(job["warmup"]):
        fn(x)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    fn(x)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
