"""The example projects, tested as their readers test them: by pytest, in their folder."""

import os
import shutil

import pytest
from another_process import run_python
from notebooks import ROOT

EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))


def run(folder, *options):
    command = ["-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a plugin that happens to be here may warn
    return run_python(*command, *options, folder=folder, PYTHONPATH=path, **alone)


@pytest.mark.slow
@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_example(folder):
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_example_sees_a_kernel_that_reads_twice(tmp_path):
    """A fault in the kernel: the test of its traffic says which operation, and which argument."""
    shutil.copytree(ROOT / "examples/rms_norm", tmp_path, dirs_exist_ok=True)
    kernel = tmp_path / "rms_norm.py"
    line = "    weight = tl.load(weight_ptr + cols, mask=mask)\n"
    again = "    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0)\n"
    before, after = kernel.read_text("utf-8").split(line)
    kernel.write_text(before + line + again + after, "utf-8")
    done = run(tmp_path, "-k", "traffic")
    assert done.returncode == 1
    assert "rms_norm.rms_norm reads 3MN, not 2MN" in done.stdout
    assert "x_ptr 16, of 8 elements several times" in done.stdout
