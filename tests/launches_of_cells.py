"""Runs the visible cells of notebooks in the interpreter, planned for another GPU, notes launches.

    python tests/launches_of_cells.py T4 FOLDER NOTEBOOK ...

Each kernel that a cell defines is written to FOLDER, where another process can import it, and to
FOLDER/launches.pickle the launches of each notebook that differ in what a compiler sees.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from memtraffic import gpus, runtime  # isort: skip  before Triton
from IPython.core.interactiveshell import InteractiveShell
from notebooks import code_cells, load, visible

from memtraffic.compile import Launch
from memtraffic.compile.launches import launch_of


def write_kernels(path: Path, sources: list[str]) -> None:
    """Writes what cells import and the kernels that they define."""
    imports, kernels = ["import memtraffic  # noqa: F401  before Triton"], []
    for node in (it for source in sources for it in ast.parse(source).body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef) and "triton.jit" in map(
            ast.unparse, node.decorator_list
        ):
            kernels.append(ast.unparse(node))
    path.write_text("\n".join(imports + kernels) + "\n", "utf-8")


@contextlib.contextmanager
def noting(launches: list[Launch]) -> Iterator[None]:
    """Context manager: notes each launch, which the interpreter runs as it would."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launches.append(replace(launch_of(kernel, args, options), function=None))
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    with mock.patch.object(InterpretedFunction, "run", noted):
        yield


def main(gpu: str, folder: str, *notebooks: str) -> None:
    assert runtime.INTERPRETED
    shell, found = InteractiveShell.instance(), {}  # launches by notebook
    for path in map(Path, notebooks):
        first, *rest = code_cells(load(path))
        sources = [cell.source for cell in (first, *filter(visible, rest))]
        module, launches = f"cells_of_{path.stem.replace('-', '_')}", []
        write_kernels(Path(folder, f"{module}.py"), sources)
        os.chdir(path.parent)
        shell.reset(new_session=False)
        with (
            noting(launches),
            mock.patch.object(gpus, "DEFAULT_GPU", gpus.find_gpu(gpu)),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            for source in sources:
                shell.run_cell(source)
        here = [replace(it, module=module) if it.module == "__main__" else it for it in launches]
        found[path.name] = [*{repr(it): it for it in here}.values()]
    Path(folder, "launches.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
