"""Runs notebooks as if a T4 were here, with solved exercises, in the interpreter; notes launches.

    python tests/run_t4.py FOLDER NOTEBOOK ...

Launchers plan for the T4. What it would measure takes 15 times as long as was recorded; the driver
denies counters, and rows of 64 programs are refused. It fails as a cell does. Each kernel that a
cell defines is written to FOLDER, where another process can import it, and to
FOLDER/launches.pickle the launches of each notebook that differ in what a compiler sees.
"""

import ast
import contextlib
import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from memtraffic import gpus, device  # isort: skip  before Triton
import torch
from IPython.core.interactiveshell import InteractiveShell
from notebooks import code_cells, exercise_cell, load, solved, tags

from memtraffic.compile.launches import launch_of
from memtraffic.errors import CountersUnavailable
from memtraffic.kernels.softmax.split import TooManyPrograms
from memtraffic.meters.counters import DENIED
from memtraffic_book import recording
from memtraffic_book.catalog import Experiment

T4 = replace(gpus.find_gpu("T4"), l2_bytes=4 * 2**20)
SLOWER = 15  # than the published GPU
REFUSED = "long_few"


def measure(subject):
    """What a T4 might measure."""
    if subject.needs.commands:
        raise CountersUnavailable(DENIED)
    if subject.id == REFUSED:
        raise TooManyPrograms("a row of 65536 columns needs 64 programs of 1024, and 40 fit")
    frame = recording.read(recording.root() / recording.PUBLISHED, subject)
    for name, unit in subject.schema.items():
        if unit in ("µs", "ns"):
            frame[name] *= SLOWER
        elif unit in ("GB/s", "T/s", "TFLOP/s"):
            frame[name] /= SLOWER
    facts = {"l2_mib": T4.l2_bytes / 2**20, "sms": T4.num_sms}
    return frame.assign(**{name: it for name, it in facts.items() if name in frame})


@contextlib.contextmanager
def on_a_t4():
    """Context manager: pages find a T4, which can be measured."""
    which = shutil.which

    def which_finds_ncu(name, *arguments, **options):
        return which(name, *arguments, **options) or (name if name == "ncu" else None)

    with (
        mock.patch.object(gpus, "DEFAULT_GPU", T4),
        mock.patch.multiple(device, this_gpu=lambda *i: T4, gpu_name=lambda *i: T4.driver_name),
        mock.patch.object(torch.cuda, "mem_get_info", lambda *device: (0, 15_095 * 2**20)),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(shutil, "which", which_finds_ncu),
        mock.patch.object(recording, "mode", lambda: "live"),
    ):
        yield


def write_kernels(path, sources):
    """Writes what cells import and the kernels that they define."""
    nodes = [node for source in sources for node in ast.parse(source).body]
    imports = [it for it in nodes if isinstance(it, (ast.Import, ast.ImportFrom))]
    kernels = [it for it in nodes if ast.unparse(it).startswith("@triton.jit\ndef ")]
    path.write_text("\n".join(map(ast.unparse, imports + kernels)) + "\n", "utf-8")


@contextlib.contextmanager
def noting(launches):
    """Context manager: notes each launch, which the interpreter runs as it would."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def noted(kernel, *args, grid, warmup, **options):
        launches.append(replace(launch_of(kernel, args, options), function=None))
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    with mock.patch.object(InterpretedFunction, "run", noted):
        yield


def main(folder, *notebooks):
    assert device.INTERPRETED
    shell, found = InteractiveShell.instance(), {}
    for path in map(Path, notebooks):
        notebook = load(path)
        cells, exercise, solution = code_cells(notebook), exercise_cell(notebook), solved(notebook)
        sources = [solution if cell is exercise else cell.source for cell in cells]
        module, launches = f"cells_of_{path.stem.replace('-', '_')}", []
        write_kernels(Path(folder, f"{module}.py"), sources)
        os.chdir(path.parent)
        shell.reset(new_session=False)
        for said in (recording.said, recording.measured, recording.elsewhere):
            said.clear()
        with on_a_t4(), mock.patch.object(Experiment, "run", measure), noting(launches):
            for cell, source in zip(cells, sources, strict=True):
                if "time_us" in shell.user_ns:  # a page's own clock
                    shell.user_ns["time_us"] = lambda fn, x: 1000.0
                result = shell.run_cell(source)
                if "raises-exception" not in tags(cell):
                    result.raise_error()
        here = [replace(it, module=module) if it.module == "__main__" else it for it in launches]
        found[path.name] = [*{repr(it): it for it in here}.values()]
    Path(folder, "launches.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
