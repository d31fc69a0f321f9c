import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from another_process import run_python

from memtraffic.compile import worker
from memtraffic.compile.worker import Worker
from memtraffic.errors import CompileError

pytestmark = pytest.mark.slow  # together they take several seconds


@pytest.fixture(scope="module")
def shared():
    it = Worker()
    yield it
    it.stop()


def server(it):
    """The process id of a worker, which its child sees as its parent's."""
    return it.call([], os.getppid)


def test_call_is_in_another_process_that_compiles(shared, tmp_path, monkeypatch):
    """In the folder and the environment of now."""
    assert shared.call([], os.getpid) not in (os.getpid(), server(shared))
    assert server(shared) == server(shared) != os.getpid()
    assert shared.call([], os.getenv, "TRITON_INTERPRET") == "0"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MADE_UP", "781")
    assert shared.call([], os.getcwd) == str(tmp_path)
    assert shared.call([], os.getenv, "MADE_UP") == "781"
    monkeypatch.delenv("MADE_UP")
    assert shared.call([], os.getenv, "MADE_UP") is None


def test_call_imports_a_module_anew_when_its_file_has_changed(shared, tmp_path, monkeypatch):
    def function(folder, value):
        """What returns `value`, of a module `made_up` in `folder`, which is on the path."""
        folder.mkdir(exist_ok=True)
        (folder / "made_up.py").write_text(f"def value():\n    return {value!r}\n")
        sys.modules.pop("made_up", None)
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module("made_up").value

    for value in ("first", "changed on disk"):
        assert shared.call([], function(tmp_path, value)) == value
    value = function(tmp_path / "other", "in another folder")
    assert shared.call([], value) == "in another folder"
    assert shared.call([str(tmp_path)], value) == "changed on disk"  # the folder comes first


def test_call_is_not_disturbed_by_prints(shared):
    assert shared.call([], os.write, 1, b"as a C library writes") == 21
    assert shared.call([], print, "as Python prints") is None
    assert shared.call([], bytes.upper, b"a" * 2**20) == b"A" * 2**20  # a large value


@pytest.mark.parametrize(
    ("function", "argument", "expected", "said"),
    [
        pytest.param(int, "seven", ValueError, "seven", id="a-value-error"),
        pytest.param({}.__getitem__, "key", CompileError, "KeyError", id="another-error"),
        # A ValueError, but none that says what is wrong with a launch
        pytest.param(b"\xff".decode, "utf-8", CompileError, "Unicode", id="of-a-derived-type"),
        pytest.param(sys.exit, 3, CompileError, "SystemExit", id="an-exit"),
        pytest.param(len, lambda: 0, CompileError, "given", id="an-argument-that-cannot-be-sent"),
        pytest.param(open, os.devnull, CompileError, ".", id="a-result-that-cannot-be-sent"),
        pytest.param(eval, "__import__('os').abort()", CompileError, "crashed$", id="a-crash"),
    ],
)
def test_call_errors(shared, function, argument, expected, said):
    before = server(shared)
    with pytest.raises(expected, match=said) as caught:
        shared.call([], function, argument)
    assert type(caught.value) is expected
    assert server(shared) == before  # it lives on


def test_call_whose_worker_is_killed(shared):
    before = server(shared)
    with pytest.raises(CompileError, match="ended"):
        shared.call([], os.killpg, before, signal.SIGKILL)  # with what it has forked
    after = server(shared)  # a new one
    assert after != before
    os.kill(after, signal.SIGKILL)  # while it is idle
    shared._process.wait()
    assert server(shared) not in (before, after)


def test_call_after_an_interrupt_has_its_own_answer(shared, monkeypatch):
    def interrupted(connection):  # a real signal might be handled after the answer has been read
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker.Connection, "recv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared.call([], len, "the late answer")
    assert shared.call([], len, "abc") == 3


def test_call_that_leaves_a_thread_behind(shared):
    before = server(shared)
    waiting = "import threading as t; t.Thread(target=t.Event().wait).start()"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(shared.call, [], exec, waiting)
        done, _ = wait([answer], timeout=30)
        if not done:
            os.killpg(shared._process.pid, signal.SIGKILL)
    assert done and server(shared) == before


def test_call_from_many_threads(shared):
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda n: shared.call([], len, "x" * n), range(8))] == [*range(8)]


def test_worker_of_a_fork_is_its_own(monkeypatch):
    monkeypatch.setattr(worker.WORKER, "_process", "running")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads
        child = os.fork()
    if not child:
        os._exit(0 if worker.WORKER._process is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.WORKER._process == "running"


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_worker_ends_with_its_parent(tmp_path):
    """Also in the middle of its work. That it does when idle, the next test says."""
    family, program = tmp_path / "family", "from memtraffic.compile.worker import WORKER\n"
    work = "import os, time; print(os.getppid(), os.getpid(), file=open('family', 'w', 1))"
    program += f"WORKER.call([], exec, {work + '; time.sleep(600)'!r})"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    try:
        assert until(lambda: family.exists() and family.read_text().endswith("\n"), seconds=120)
    finally:
        parent.kill()
        parent.wait()
    assert until(lambda: not any(map(alive, family.read_text().split())))


def test_worker_does_not_run_the_users_program_again(tmp_path):
    """A program without `if __name__ == "__main__"` runs once, and nothing is left behind."""
    program = "import os\nfrom memtraffic.compile.worker import WORKER\n"
    program += "print('once', WORKER.call([], os.getppid))\n"
    (tmp_path / "script.py").write_text(program)
    done = run_python("-W", "error", "script.py", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    [once] = done.stdout.splitlines()
    assert not alive(once.split()[1])
