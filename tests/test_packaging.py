"""What a reader installs: the wheel needs what it names alone, and does what the README says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import numpy
import pytest
from another_process import run_python
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from run_colab import with_dependencies

triton = pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"click", "numpy", "pandas", "torch", "tqdm", "triton"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=skipped)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "."]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_wheel_holds_the_library_and_its_command(wheel):
    version = "memtraffic-0.1.0.dist-info"
    assert {name.split("/")[0] for name in wheel.namelist()} == {"memtraffic", version}
    source = (ROOT / "src/memtraffic").rglob("*.py")
    modules = {str(path.relative_to(ROOT / "src")) for path in source}
    assert modules | {"memtraffic/py.typed"} == {
        name for name in wheel.namelist() if name.startswith("memtraffic/")
    }
    scripts = wheel.read(f"{version}/entry_points.txt").decode()
    assert "memtraffic = memtraffic.cli:main" in scripts
    lines = wheel.read(f"{version}/METADATA").decode().splitlines()
    needs = [Requirement(line.split(": ")[1]) for line in lines if line.startswith("Requires-Dist")]
    assert {need.name for need in needs} == NEEDED


# Imported by each Python process that starts, those of the compiler too.
BLOCK = """
import os, sys
sys.modules |= dict.fromkeys(os.environ["ABSENT"].split())  # which cannot be imported
"""
README = (ROOT / "README.md").read_text("utf-8")
COMMAND = r"^\$ memtraffic (.*?)(?: +#.*)?\n((?:(?!\$|```).*\n)*)"
RUN = """
import sys, json, importlib, pkgutil
from memtraffic.cli import main
for arguments in json.loads(sys.argv[1]):
    print("$")
    assert main(arguments) == 0
for module in pkgutil.walk_packages(memtraffic.__path__, "memtraffic."):
    importlib.import_module(module.name)
"""


@pytest.mark.slow
def test_example_of_the_readme_where_only_dependencies_can_be_imported(wheel, tmp_path):
    """The Python lines and the commands that need no GPU, in one process."""
    wheel.extractall(tmp_path)
    allowed = {canonicalize_name(it.name) for it in with_dependencies(NEEDED)} | {"memtraffic"}
    absent = [
        name
        for name, owners in packages_distributions().items()
        if not allowed & set(map(canonicalize_name, owners))
    ]
    assert {"IPython", "matplotlib", "nbformat", "pytest"} <= set(absent)
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    module, script = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    (tmp_path / "mine.py").write_text(module, "utf-8")
    commands = [
        (shlex.split(command), shown)
        for command, shown in re.findall(COMMAND, README, re.M)
        if not command.startswith(("counters", "roof", "bench"))
    ]
    arguments = json.dumps([command for command, _ in commands])
    paths = [tmp_path, *(Path(it.__file__).parents[1] for it in (numpy, triton))]  # of the matrix
    environment = {"ABSENT": " ".join(absent), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = run_python("-c", script + RUN, arguments, folder=tmp_path, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    printed, *said = done.stdout.split("$\n")
    comments = re.findall(r"^print.*  # (.*?)(?:, \.\.\.)?$", script, re.M)
    assert len(comments) == len(printed.splitlines()) == 5
    assert all(map(str.startswith, printed.splitlines(), comments))
    assert len(said) == len(commands) == 6
    for text, (_, shown) in zip(said, commands, strict=True):
        assert text == shown if shown else text


def test_environments_have_exact_versions_that_agree():
    """Those that `requirements.txt` names, and the same in both environments."""

    def pins(name):
        text = (ROOT / name).read_text("utf-8")
        found = [Requirement(it) for it in text.splitlines() if it and it[0] not in "#-"]
        assert all(str(it.specifier).startswith("==") for it in found)
        return {canonicalize_name(it.name): str(it.specifier) for it in found}

    wanted, of_tests, of_book = map(
        pins, ("requirements.txt", "constraints-test.txt", "constraints-book.txt")
    )
    assert wanted.items() <= of_tests.items()
    assert of_book.items() <= of_tests.items() and "sphinx" in of_book
