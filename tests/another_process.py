"""Python in a process of its own."""

import os
import subprocess
import sys


def run_python(*arguments, folder=None, timeout=None, **environment):
    """What `python` did with arguments: its status and what it printed.

    It finds the modules that this process finds, and decides by itself who runs the kernels.
    folder: where it runs. timeout: seconds after which it is ended, which raises. environment:
    further variables.
    """
    inherited = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder, env=inherited | paths | environment, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip
