"""The process that compiles kernels for a process whose kernels are interpreted.

It starts with the first request, has Triton loaded from then on, and ends with its parent. For each
request it forks a child, which finds modules where the parent does now and imports them anew: an
edited kernel is compiled as it is on disk. A child that crashes takes nothing else with it.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import IO, Any, TypeVar

from memtraffic import device
from memtraffic.errors import CompileError
from memtraffic.triton_adapter.compile import preload

T = TypeVar("T")


class Worker:
    """Calls functions in another process, which compiles kernels; threads take turns."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Leaves its process to whoever forked this one: the next call starts a new one."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def call(self, folders: Iterable[str], function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`, called in the other process.

        folders: where modules are looked for before `sys.path`. Raises CompileError where the other
        process ends before it has answered, and for anything that the function raises, except
        that a ValueError is passed on.
        """
        try:
            call = pickle.dumps((device.standing_in.get(), function, args))
        except Exception as error:  # pickle raises errors of many kinds
            raise CompileError(f"another process cannot be given the arguments: {error}") from error
        request = (dict(os.environ), [*folders, *sys.path], os.getcwd(), call)
        with self._lock:
            answer = self._exchange(pickle.dumps(request))
            if not answer:
                raise CompileError(f"the compiler crashed{self._last_words()}")
        result: T
        result, raised = pickle.loads(answer)
        if raised is not None:
            raise raised
        return result

    def _exchange(self, request: bytes) -> bytes:
        process = self._running()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(request)
            process.stdin.flush()
            answer: bytes = pickle.load(process.stdout)
            return answer
        except (EOFError, OSError, pickle.UnpicklingError):
            words = self._last_words()
            self.stop()
            raise CompileError(f"the compile worker ended{words}") from None
        except BaseException:  # an interrupt: the late answer must not be taken for the next one
            self.stop()
            raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            self._log = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,  # an interrupt from the keyboard is for the parent alone
                env={
                    **os.environ,
                    "TRITON_INTERPRET": "0",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    # To ask whether there is a GPU must not start CUDA: forks cannot use it then.
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                },
            )
        assert self._log
        self._log.seek(0)  # which is where the worker writes next, too
        self._log.truncate()
        return self._process

    def _last_words(self) -> str:
        assert self._log
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def stop(self) -> None:
        """Ends the other process, if there is one; the next call starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin and process.stdout and self._log
        self._log.close()
        process.stdout.close()
        with suppress(OSError):  # it has ended already
            process.stdin.close()  # which tells it to end
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


WORKER = Worker()
atexit.register(WORKER.stop)
os.register_at_fork(after_in_child=WORKER.forget)


# ---- in the other process


def serve() -> None:
    """Answers requests from stdin on stdout, until stdin is closed."""
    preload()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # at once: the parent waits
        pickle.dump(_in_child(*request), answers)
        answers.flush()


def _in_child(*request: Any) -> bytes:
    """The answer of a forked child to one request; empty where it crashed."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: writer.send_bytes(_answer(*request)))
    child.start()
    writer.close()
    if 0 in wait([reader, 0]):  # the end of stdin: the parent has gone
        child.kill()
        os._exit(1)
    try:
        return reader.recv_bytes()
    except EOFError:
        return b""
    finally:
        reader.close()
        child.kill()  # it may have started threads that do not end
        child.join()


def _answer(environment: dict[str, str], paths: list[str], folder: str, call: bytes) -> bytes:
    """The pickled result and error of one request; one of the two is None."""
    os.environ.clear()
    os.environ.update(environment, TRITON_INTERPRET="0")
    os.chdir(folder)
    sys.path[:] = paths
    importlib.invalidate_caches()
    result, error = None, None
    try:
        standing_in, function, args = pickle.loads(call)
        with standing_in():  # a module may ask for a GPU while it is imported
            result = function(*args)
    except BaseException as found:  # SystemExit, too: a module may exit while it is imported
        passed_on = type(found) in (CompileError, ValueError)
        error = found if passed_on else CompileError(f"{type(found).__name__}: {found}")
    return pickle.dumps((result, error))
