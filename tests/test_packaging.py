"""What a reader installs: the wheel holds the library alone, which needs what it names alone."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from another_process import run_python
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from run_colab import with_dependencies

pytest.importorskip("triton", reason="Triton is not installed")

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
USE = """
import importlib, pkgutil
import memtraffic

for module in pkgutil.walk_packages(memtraffic.__path__, "memtraffic."):
    importlib.import_module(module.name)
from memtraffic.kernels.softmax import fused

print(memtraffic.formula(fused.softmax))
from memtraffic.cli import main

for line in ("count fused 2 4 --json", "resources fused --target sm_90 N=64 --json",
             "report fused 8 64 --target sm_90,gfx942", "bench --help"):
    assert main(line.split()) == 0, line
"""


@pytest.mark.slow
def test_library_works_where_only_its_dependencies_can_be_imported(wheel, tmp_path):
    wheel.extractall(tmp_path)
    allowed = {canonicalize_name(it.name) for it in with_dependencies(NEEDED)} | {"memtraffic"}
    absent = [
        name
        for name, owners in packages_distributions().items()
        if not allowed & set(map(canonicalize_name, owners))
    ]
    assert {"IPython", "matplotlib", "nbformat", "pytest"} <= set(absent)
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    environment = {"ABSENT": " ".join(absent), "PYTHONPATH": str(tmp_path)}
    done = run_python("-c", USE, folder=tmp_path, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("reads MN, writes MN\n") and "sm_90 (H200)" in done.stdout


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
