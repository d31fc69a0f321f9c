"""NVIDIA's compute-sanitizer finds no access out of bounds and no race in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SCRIPT = Path(__file__).parent / "sanitized.py"
FOUND = 99  # the exit status of an error that the sanitizer found


def sanitize(tool, *arguments):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    # Each tensor is an allocation of its own, so that what lies behind it belongs to nobody.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, SCRIPT]
    return subprocess.run(
        [*map(str, command), *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean(tool):
    done = sanitize(tool)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_memcheck_finds_a_store_past_the_end():
    done = sanitize("memcheck", "past-the-end")
    assert done.returncode == FOUND and "Invalid __global__ write" in done.stdout, done.stdout
