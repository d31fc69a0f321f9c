"""Executes notebooks as on Colab: in an empty folder, with what Colab preinstalls and no more."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from packaging.requirements import Requirement

PREINSTALLED = ("torch", "triton", "numpy", "pandas", "matplotlib", "tqdm", "ipykernel")
ROOT = Path(__file__).resolve().parents[1]

LOOK = """\
import importlib.metadata, importlib.util, json, sys
print(json.dumps({
    "packages": sorted(f"{d.name} {d.version}" for d in importlib.metadata.distributions()),
    "path": sys.path,
    "memtraffic": getattr(importlib.util.find_spec("memtraffic"), "origin", None),
}))
"""


def with_dependencies(names: Iterable[str]) -> list[metadata.Distribution]:
    """The installed packages of these names, and what they need as far as it is installed."""
    found: dict[str, metadata.Distribution] = {}
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name not in found:
            try:
                found[name] = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            needs = map(Requirement, found[name].requires or ())
            left += [n.name for n in needs if not n.marker or n.marker.evaluate({"extra": ""})]
    assert set(names) <= set(found), f"not installed: {set(names) - set(found)}"
    return list(found.values())


def make_environment(folder: Path) -> Path:
    """Makes a virtual environment that can import PREINSTALLED and no more; returns its Python.

    It holds links to packages of the Python that runs this.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for package in with_dependencies(PREINSTALLED):
        files = package.files or ()
        tops = {PurePosixPath(file).parts[0] for file in files} - {"..", "__pycache__"}
        for top in tops:
            link = site / top
            if not top.endswith(".pth") and not link.exists():
                link.symlink_to(Path(str(package.locate_file(top))).absolute())
    return folder / "bin" / "python"


def clean_environment() -> dict[str, str]:
    """The environment variables less those that lead to this repository or set a mode."""
    ours = ("PYTHON", "MEMTRAFFIC_", "TRITON_", "COVERAGE_", "VIRTUAL_ENV", "MPLBACKEND")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"PYTHONNOUSERSITE": "1"}


def look(python: Path, folder: Path) -> dict[str, object]:
    """What LOOK says in a new process of `python`, started in `folder`."""
    done = subprocess.run(
        [python, "-c", LOOK], cwd=folder, env=clean_environment(), capture_output=True, check=True
    )
    return json.loads(done.stdout)


def execute(path: Path, python: Path, timeout: int = 600) -> nbformat.NotebookNode:
    """The notebook after `python` has executed it from top to bottom in an empty folder.

    timeout: seconds for a cell. Raises CellExecutionError for a cell that fails, and AssertionError
    if the package did not come out of the notebook, if this repository was on the path, or if a
    package changed.
    """

    class Kernel(AsyncKernelManager):
        def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
            return [str(python), "-m", "ipykernel_launcher", "-f", self.connection_file]

    with tempfile.TemporaryDirectory() as scratch:
        content = Path(scratch).resolve()
        before = look(python, content)
        assert before["memtraffic"] is None, f"already installed: {before['memtraffic']}"
        notebook = nbformat.read(path, as_version=4)
        probe = nbformat.v4.new_code_cell(LOOK)
        notebook.cells.append(probe)
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_manager_class=Kernel,
            resources={"metadata": {"path": str(content)}},
        )
        asyncio.run(client.async_execute(env=clean_environment()))
        notebook.cells.remove(probe)
        after = json.loads(probe.outputs[0].text)

        assert Path(after["memtraffic"]).is_relative_to(content), after["memtraffic"]
        ours = [entry for entry in after["path"] if Path(entry).is_relative_to(ROOT)]
        assert not ours, f"this repository is on the path: {ours}"
        assert after["packages"] == before["packages"], "a package changed"
    return notebook
