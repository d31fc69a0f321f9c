"""The README's example, run as it is printed."""

import json
import re
import shlex
from pathlib import Path

import pytest
from another_process import run_python

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
COMMAND = r"^\$ memtraffic (.*?)(?: +#.*)?\n((?:(?!\$|```).*\n)*)"
RUN = """
import sys, json
from memtraffic.cli import main
for arguments in json.loads(sys.argv[1]):
    print("$")
    assert main(arguments) == 0
"""

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
def test_example_of_the_readme(tmp_path):
    """The Python lines and the commands that need no GPU, in one process."""
    module, script = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    commands = [
        (shlex.split(command), shown)
        for command, shown in re.findall(COMMAND, README, re.M)
        if not command.startswith(("counters", "roof", "bench"))
    ]
    (tmp_path / "mine.py").write_text(module, "utf-8")
    arguments = json.dumps([command for command, _ in commands])
    done = run_python("-c", script + RUN, arguments, folder=tmp_path, PYTHONPATH=str(ROOT / "src"))
    assert done.returncode == 0, done.stderr
    printed, *said = done.stdout.split("$\n")
    comments = re.findall(r"^print.*  # (.*?)(?:, \.\.\.)?$", script, re.M)
    assert len(comments) == len(printed.splitlines()) == 5
    assert all(map(str.startswith, printed.splitlines(), comments))
    assert len(said) == len(commands) == 6
    for text, (_, shown) in zip(said, commands, strict=True):
        assert text == shown if shown else text
