"""The README's example, run as it is printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
MODULE, SCRIPT = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
COMMANDS = re.findall(
    r"^\$ python (-m memtraffic .*?)(?: +#.*)?\n((?:(?!\$|```).*\n)*)", README, re.M
)

pytest.importorskip("triton", reason="Triton is not installed")


def run(folder, *arguments):
    (folder / "mine.py").write_text(MODULE, "utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_python_example(tmp_path):
    lines = run(tmp_path, "-c", SCRIPT).splitlines()
    wanted = re.findall(r"^print.*  # (.*?)(?:, \.\.\.)?$", SCRIPT, re.M)
    assert len(lines) == len(wanted) == 2
    assert all(line.startswith(start) for line, start in zip(lines, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("command, shown", COMMANDS, ids=[c.split()[2] for c, _ in COMMANDS])
def test_command(tmp_path, command, shown):
    if command.split()[2] in ("counters", "roof"):
        pytest.skip("needs a GPU")
    said = run(tmp_path, *shlex.split(command))
    assert said == shown if shown else said
