"""Caches, where the home folder cannot be written."""

import subprocess
import sys
from pathlib import Path

import pytest
from another_process import run_python

PRINTED = "import memtraffic.device, os; print(os.environ.get('MPLCONFIGDIR'))"


@pytest.mark.slow
def test_keep_writable_where_home_is_a_file(tmp_path):
    """A kernel compiles, and the folder goes with the process; else nothing is said."""
    (home := tmp_path / "file").touch()
    empty = {"HOME": str(home), "TRITON_CACHE_DIR": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    assert run_python("-c", PRINTED, **empty).stderr == ""
    bare = ("env", "-u", "TRITON_CACHE_DIR", "-u", "MPLCONFIGDIR", f"HOME={home}", sys.executable)
    command = "-m memtraffic resources masked N=1024 --target sm_90".split()
    done = subprocess.run([*bare, *command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("_softmax_masked_kernel for sm_90")
    assert done.stderr.count("cannot be written, so caches are kept in") == 1
    folder = Path(subprocess.run([*bare, "-c", PRINTED], capture_output=True, text=True).stdout)
    assert "memtraffic-" in str(folder) and not folder.parent.exists()
