"""The example projects, tested as their readers test them: by pytest, in their folder."""

import os
from pathlib import Path

import pytest
from another_process import run_python

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_example(folder):
    command = ["-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a plugin that happens to be here may warn
    done = run_python(*command, folder=folder, PYTHONPATH=path, **alone)
    assert done.returncode == 0, done.stdout + done.stderr
