"""Reads hardware counters: what a GPU's caches and memory moved while a function ran.

A second process runs the function under Nsight Compute (`ncu`), which flushes the caches before
each kernel. So each kernel is counted alone, starting cold. Processes with the same TMPDIR take
turns: `ncu` locks a file there, and fails beside another that profiles the same GPU.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import torch

from memtraffic import device
from memtraffic.errors import CountersError, CountersUnavailable
from memtraffic.functions import as_function
from memtraffic.names import import_function, import_path
from memtraffic.op import AnyInputs, find_op

# L2 may have two halves: `lts__t_sectors_op_write` would also count the sectors that they exchange.
METRICS = {
    "load_instructions": "smsp__sass_inst_executed_op_global_ld.sum",
    "instruction_read_bytes": "smsp__sass_data_bytes_mem_global_op_ld.sum",
    "l1_l2_read_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_write_sectors": "lts__t_sectors_srcunit_tex_op_write.sum",
    "ns": "gpu__time_duration.sum",
}
# Clocks as they are, nothing before cudaProfilerStart, and a table of all metrics in base units.
NCU_OPTIONS = "--clock-control none --profile-from-start off --csv --page raw --print-units base"
WARMUP = 3  # calls before the one that counts
DENIED = "counters: the driver lets only an administrator read them (ERR_NVGPUCTRPERM)"
_denied: set[str] = set()  # the commands to which it has said so, and will again
# A kernel, which is what the driver has to allow.
ONE_KERNEL = (
    "import torch; torch.cuda.cudart().cudaProfilerStart(); torch.zeros(1, device='cuda'); "
    "torch.cuda.synchronize()"
)


def counters(
    fn: Callable[..., object] | str,
    inputs: AnyInputs = None,
    shape: Sequence[int] | None = None,
    *,
    dtype: str = "float32",
    layout: str = "packed",
) -> pd.DataFrame:
    """What the hardware moved in one call of `fn`: a DataFrame with a row for each kernel that ran.

    Each column is a sum over the whole GPU:

    - `kernel`: the kernel's name
    - `load_instructions`: loads from global memory, one for each warp that executed it
    - `instruction_read_bytes`: bytes that these loads requested; a word that several lanes of a
      warp share counts once
    - `l1_l2_read_bytes`: bytes that L2 sent to L1
    - `dram_read_bytes`, `dram_write_bytes`: bytes between L2 and DRAM
    - `l2_write_sectors`: sectors of 32 bytes that L1 wrote to L2
    - `ns`: the duration, in nanoseconds

    fn: a rung's name, `module:function`, or a function that another process can import. inputs:
    what that process makes for it: a specification, see `inputs.parse`; an `Op` or a function of
    sizes, or the name of one, `module:attribute`; by default one matrix M,N. shape: a number for
    each of its sizes. dtype, layout: as of `tensors.matrix`.

    Raises CountersUnavailable without a GPU, without `ncu` or without permission to read counters;
    CountersError if `fn` fails; LookupError for a function or inputs that another process cannot
    import; TypeError for tensors; ValueError for a specification or a shape that cannot be read.
    """
    if not isinstance(fn, str):
        as_function(fn)
    function = import_path(fn)
    as_function(import_function(function))
    op = find_op(inputs)
    job = {"fn": function, "inputs": _inputs_path(inputs), "shape": op.check(shape)}
    job |= {"dtype": dtype, "layout": layout}
    worker = "from memtraffic.meters.counters import _worker; _worker()"
    return parse(profile(worker, job))


def profile(worker: str, job: object, metrics: Mapping[str, str] = METRICS) -> str:
    """What `ncu` reports of a second process, for `parse`.

    worker: the code that it runs, between whose `cudaProfilerStart` and `cudaProfilerStop` kernels
    are counted. job: what it finds, as JSON, in `sys.argv[1]`. metrics: the names of counters, by
    ours; with commas between several that are added up.

    Raises CountersUnavailable without a GPU, without `ncu` or without permission to read counters;
    CountersError if the process fails.
    """
    if not device.HAS_GPU:
        raise CountersUnavailable("counters: there is no GPU on this machine")
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountersUnavailable("counters: Nsight Compute's command `ncu` is not on the PATH")
    if ncu in _denied:
        raise CountersUnavailable(DENIED)
    paths = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    with tempfile.NamedTemporaryFile(suffix=".csv") as log:
        done = subprocess.run(
            [
                *(ncu, *shlex.split(NCU_OPTIONS)),
                *("--metrics", ",".join(metrics.values())),
                *("--log-file", log.name),
                *(sys.executable, "-c", worker, json.dumps(job)),
            ],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        report = log.read().decode()
    if "ERR_NVGPUCTRPERM" in report + done.stdout:
        _denied.add(ncu)
        raise CountersUnavailable(DENIED)
    if done.returncode:
        raise CountersError(f"counters: {_cause(done.stderr, report, done.returncode)}")
    return report


def _cause(stderr: str, report: str, code: int) -> str:
    """The line that says best why `ncu` failed: of Python, else of `ncu`, which then ended it."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    of_ncu = [line for line in report.splitlines() if line.startswith("==ERROR==")]
    reasons = [line for line in of_ncu if "The application returned" not in line]
    found = errors[-1:] or reasons[:1] or lines[-1:] or of_ncu[:1]
    return found[0] if found else f"ncu exited {code}"


@functools.cache
def require_counters() -> None:
    """Asks for the counters of one small kernel. Raises what `profile` raises."""
    profile(ONE_KERNEL, None)


def parse(report: str, metrics: Mapping[str, str] = METRICS) -> pd.DataFrame:
    """The DataFrame of `counters` from what `ncu --csv --page raw` printed.

    metrics: as of `profile`.

    Raises CountersError if there is no kernel or a counter is missing.
    """
    table = "\n".join(line for line in report.splitlines() if line.startswith('"'))
    rows = list(csv.DictReader(io.StringIO(table)))[1:]  # the first row holds the units
    if not rows:
        raise CountersError("counters: ncu saw no kernel")
    each = ",".join(metrics.values()).split(",")
    if missing := [metric for metric in each if metric not in rows[0]]:
        raise CountersError(f"counters: ncu does not give {', '.join(missing)} on this GPU")
    kernels = [
        {"kernel": short_name(row["Kernel Name"])}
        | {
            name: sum(int(float(row[metric].replace(",", ""))) for metric in several.split(","))
            for name, several in metrics.items()
        }
        for row in rows
    ]
    return pd.DataFrame(kernels, columns=["kernel", *metrics])


def short_name(kernel: str) -> str:
    """A kernel's name without its namespaces, template arguments and parameters.

    >>> short_name("void at::native::(anonymous namespace)::softmax_kernel<float>(float *, int)")
    'softmax_kernel'
    """
    name = re.sub(r"\(anonymous namespace\)|<unnamed>", "_", kernel.removeprefix("void "))
    return re.split(r"[<(]", name)[0].split("::")[-1]


def _inputs_path(inputs: AnyInputs) -> str:
    """What another process makes the same inputs of: a specification or a name."""
    made = inputs if isinstance(inputs, str) else find_op(inputs).inputs
    if isinstance(made, str):
        return made
    if not callable(made):
        raise TypeError(
            "counters: another process makes the inputs, so give a specification such as '3,5', or "
            f"the name of a function of sizes, 'module:function', not {type(inputs).__name__}"
        )
    return import_path(made)


def _worker() -> None:
    """What runs under ncu: calls to warm up, then one call between start and stop."""
    job = json.loads(sys.argv[1])
    fn = as_function(import_function(job["fn"]))
    arguments = find_op(job["inputs"]).arguments(job["shape"], job["dtype"], job["layout"])
    for _ in range(WARMUP):
        arguments.call(fn)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    arguments.call(fn)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
