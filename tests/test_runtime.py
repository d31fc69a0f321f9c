"""Who runs the kernels; and that what a meter captures is captured in its own thread."""

import importlib.util
import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from another_process import run_python

from memtraffic import benchmark, runtime
from memtraffic.benchmark import timing
from memtraffic.benchmark.copying import fastest_copy
from memtraffic.benchmark.roof import copy_bandwidth, matmul_rate, roof
from memtraffic.gpus import find_gpu


def import_again(monkeypatch, *, asked=None, has_gpu=False, triton_imported=False):
    """The module as it would be imported in a new process."""
    monkeypatch.setenv("TRITON_INTERPRET", str(asked))
    if asked is None:
        monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__spec__=object()))
    if not triton_imported:
        monkeypatch.delitem(sys.modules, "triton")
    spec = importlib.util.spec_from_file_location("runtime_again", runtime.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("state", "interpreted", "environment"),
    [
        pytest.param({}, True, "1", id="no-gpu"),
        pytest.param({"has_gpu": True}, False, None, id="gpu"),
        pytest.param(
            {"has_gpu": True, "triton_imported": True}, False, None, id="gpu-triton-first"
        ),
        pytest.param({"has_gpu": True, "asked": "On"}, True, "On", id="asked-for"),
        pytest.param({"asked": "0"}, False, "0", id="asked-not-to"),
        pytest.param({"asked": "1", "triton_imported": True}, True, "1", id="triton-first"),
    ],
)
def test_interpreted_is_decided_at_import(monkeypatch, state, interpreted, environment):
    pytest.importorskip("triton")
    assert import_again(monkeypatch, **state).INTERPRETED == interpreted
    assert os.environ.get("TRITON_INTERPRET") == environment


def test_interpreted_too_late_after_triton(monkeypatch):
    pytest.importorskip("triton")
    with pytest.raises(ImportError, match="TRITON_INTERPRET=1"):
        import_again(monkeypatch, triton_imported=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "status", "said"),
    [
        ("import memtraffic, torch, triton.language", 0, "1"),
        ("import triton, memtraffic", 1, "Triton was imported before memtraffic, too late"),
    ],
)
def test_interpreted_is_decided_before_triton_is_imported(imports, status, said):
    pytest.importorskip("triton")
    code = f"import os\n{imports}\nprint(os.environ.get('TRITON_INTERPRET'))"
    done = run_python("-c", code, CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    assert done.returncode == status and said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("bench", lambda: benchmark.bench(["copy"], shapes=[(8, 8)])),
        ("time_interleaved", lambda: timing.time_interleaved([lambda: None])),
        ("time_interleaved", lambda: fastest_copy(torch.ones(4, 6))),
        ("roof", roof),
        ("copy_bandwidth", copy_bandwidth),
        ("matmul_rate", matmul_rate),
        ("gpu_name", runtime.gpu_name),
    ],
)
def test_require_gpu_names_what_needs_it(name, call, monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match=f"^{name} needs a GPU"):
        call()
    assert runtime.device() == torch.device("cpu")


def test_runs_on_gpu_inside_meters(monkeypatch):
    """A meter stands in for the GPU, also in a process that compiles kernels."""
    pytest.importorskip("triton")
    from memtraffic import count
    from memtraffic.compile import capture_launches

    monkeypatch.setattr(runtime, "INTERPRETED", False)
    seen, gpu, x = [], find_gpu("gfx942"), torch.ones(2, 4, device=runtime.device())

    def look(x):
        seen.append((runtime.runs_on_gpu(), runtime.captured_gpu()))

    count(look, x)
    capture_launches(look, x, gpu=gpu)
    assert seen == [(False, None), (False, gpu)]
    assert runtime.runs_on_gpu()


def test_capturing_launches_keeps_backward_passes_in_its_thread():
    """Of the threads that PyTorch has for GPUs, none would find its launches captured."""
    assert torch._C._is_multithreading_enabled()
    with runtime.capturing_launches():
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


def test_capturing_launches_in_two_threads(monkeypatch):
    """One thread captures for one GPU, another for a second GPU, and this thread for none."""
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    meeting = threading.Barrier(3, timeout=30)
    seen = {}

    def capture(name):
        with runtime.capturing_launches(find_gpu(name)):
            meeting.wait()  # all are inside
            seen[name] = runtime.captured_gpu().target
            meeting.wait()  # nobody leaves before all have looked

    threads = [threading.Thread(target=capture, args=(name,)) for name in ("sm_75", "gfx942")]
    for thread in threads:
        thread.start()
    meeting.wait()
    here = (runtime.captured_gpu(), runtime.runs_on_gpu())
    meeting.wait()
    for thread in threads:
        thread.join()
    assert seen == {"sm_75": "sm_75", "gfx942": "gfx942"}
    assert here == (None, True)


def test_device_guard_of_a_cpu_tensor_silences_numpy():
    with runtime.device_guard(torch.ones(2)):
        assert np.isnan(np.float32("inf") - np.float32("inf"))
        assert np.isinf(np.float32(3e38) * np.float32(3e38))


def test_device_guard_of_a_gpu_tensor(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert isinstance(runtime.device_guard(x), torch.cuda.device)
    with runtime.capturing_launches():  # the interpreter stands in for the GPU
        assert isinstance(runtime.device_guard(x), np.errstate)


def test_folder_name():
    assert runtime.folder_name("AMD Instinct MI300X (gfx942)") == "amd-instinct-mi300x-gfx942"
