"""Executes notebooks as on Colab: in an empty folder, with what Colab preinstalls and no more."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

PREINSTALLED = ("torch", "triton", "numpy", "pandas", "matplotlib", "tqdm", "ipykernel")
RUN = """
import json, socket, sys
from IPython.core.interactiveshell import InteractiveShell

socket.getaddrinfo = None  # there is no network
shell = InteractiveShell.instance()
for path in sys.argv[1:]:
    shell.reset(new_session=False)
    shell.user_module.__spec__ = None  # as a notebook has it: other processes ask
    for cell in json.load(open(path, encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            shell.run_cell("".join(cell["source"])).raise_error()
print("The package is", sys.modules["memtraffic"].__file__)
"""


def with_dependencies(names):
    """The installed packages of these names, and what they need as far as it is installed."""
    found = {}
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


def make_environment(folder):
    """Makes a virtual environment that can import PREINSTALLED and no more; returns its Python.

    It holds links to packages of the Python that runs this.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for package in with_dependencies(PREINSTALLED):
        tops = {PurePosixPath(file).parts[0] for file in package.files or ()}
        for top in tops - {"..", "__pycache__"}:
            link = site / top
            if not top.endswith(".pth") and not link.exists():
                link.symlink_to(Path(str(package.locate_file(top))).absolute())
    return folder / "bin" / "python"


def execute(python, folder, *notebooks):
    """What notebooks print that `python` runs in `folder`, in one process without a network.

    Nothing leads it to this repository. Raises AssertionError for a cell that fails.
    """
    ours = ("PYTHON", "MEMTRAFFIC_", "TRITON_", "COVERAGE_", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    kept |= {"PYTHONNOUSERSITE": "1", "MPLBACKEND": "agg"}
    command = [python, "-c", RUN, *notebooks]
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
