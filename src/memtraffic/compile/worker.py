"""The process that compiles kernels for a process whose kernels are interpreted.

It starts with the first request, has Triton loaded from then on, and ends with its parent. For each
request it forks a child, which finds modules where the parent does now and imports them anew: an
edited kernel is compiled as it is on disk. A child that crashes takes nothing else with it.

The forkserver of `multiprocessing` would run the parent's script again, unless that has a guard.
And there is one for all, so that what the parent starts itself would not be interpreted.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from memtraffic import device
from memtraffic.errors import CompileError
from memtraffic.triton_adapter.compile import KernelPickler, preload

# To ask whether there is a GPU must not start CUDA: forks cannot use it then.
COMPILING = {"TRITON_INTERPRET": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Worker:
    """Calls functions in another process, which compiles kernels; threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, folders: Iterable[str], function: Callable[..., object], *args: Any) -> Any:
        """`function(*args)`, called in the other process.

        folders: where modules are looked for before `sys.path`. Raises CompileError where the other
        process ends before it has answered, and for anything that the function raises, except
        that a ValueError is passed on.
        """
        try:
            KernelPickler(call := io.BytesIO()).dump((function, args))
        except Exception as error:  # pickle raises errors of many kinds
            raise CompileError(f"another process cannot be given the arguments: {error}") from error
        request = dict(os.environ), [*folders, *sys.path], os.getcwd(), device.standing_in.get()
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                self._connection.send((*request, call.getvalue()))
                result, raised = self._connection.recv()
            except BaseException as error:  # an interrupt: the late answer is not that of the next
                self.stop()
                if isinstance(error, (EOFError, OSError)):
                    raise CompileError("the compile worker ended") from None
                raise
        if raised:
            raise raised
        return result

    def _start(self) -> None:
        self._connection, other = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
            stdin=other.fileno(),
            stdout=subprocess.DEVNULL,  # for what compilers print
            start_new_session=True,  # an interrupt from the keyboard is for the parent alone
            env=os.environ | COMPILING | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        other.close()

    def stop(self) -> None:
        """Ends the other process, if there is one; the next call starts a new one."""
        if self._process:
            self._process.kill()
            self._connection.close()  # which ends what it has forked
            self._process.wait()


WORKER = Worker()
atexit.register(WORKER.stop)
os.register_at_fork(after_in_child=lambda: Worker.__init__(WORKER))  # its process is the parent's


# ---- in the other process


def serve() -> None:
    """Answers requests from stdin on stdin, until that is closed."""
    preload()
    parent = Connection(0)
    with suppress(EOFError):
        while True:
            request = parent.recv()
            if not (child := os.fork()):
                threading.Thread(target=_end_with_parent, daemon=True).start()
                parent.send_bytes(_answer(*request))
                os._exit(0)  # at once, also if a thread has been left behind
            if os.waitpid(child, 0)[1]:
                parent.send((None, CompileError("the compiler crashed")))


def _end_with_parent() -> None:
    """Ends the process and its parent as soon as stdin is closed, of which it reads nothing."""
    closed = select.poll()
    closed.register(0, 0)
    closed.poll()
    os.killpg(0, signal.SIGKILL)


def _answer(environment: Any, paths: Any, folder: str, standing_in: Any, call: bytes) -> bytes:
    """The pickled result and error of one request; one of the two is None."""
    os.environ.clear()
    os.environ.update(environment | COMPILING)
    os.chdir(folder)
    sys.path[:] = paths
    sys.path_importer_cache.clear()
    try:
        with standing_in():  # a module may ask for a GPU while it is imported
            function, args = pickle.loads(call)
            return pickle.dumps((function(*args), None))
    except BaseException as error:  # SystemExit, too: a module may exit while it is imported
        passed_on = type(error) in (CompileError, ValueError)
        known = error if passed_on else CompileError(f"{type(error).__name__}: {error}")
        return pickle.dumps((None, known))
