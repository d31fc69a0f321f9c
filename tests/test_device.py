"""Who runs the kernels, what a meter captures, and the GPU that is here: of either vendor."""

import ctypes
import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from another_process import run_python

from memtraffic import device
from memtraffic.benchmark.copying import fastest_copy
from memtraffic.device import planning_gpu, this_gpu
from memtraffic.gpus import GPUS, find_gpu


def import_again(monkeypatch, *, asked=None, has_gpu=False, triton_imported=False):
    """The module as it would be imported in a new process."""
    monkeypatch.setenv("TRITON_INTERPRET", str(asked))
    if asked is None:
        monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__spec__=object()))
    if not triton_imported:
        monkeypatch.delitem(sys.modules, "triton")
    spec = importlib.util.spec_from_file_location("runtime_again", device.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("state", "interpreted", "environment"),
    [
        pytest.param({}, True, "1", id="no-gpu"),
        pytest.param({"has_gpu": True, "triton_imported": True}, False, None, id="gpu"),
        pytest.param({"has_gpu": True, "asked": "On"}, True, "On", id="asked-for"),
        pytest.param({"asked": "0"}, False, "0", id="asked-not-to"),
        pytest.param({"asked": "1", "triton_imported": True}, True, "1", id="triton-first"),
    ],
)
def test_interpreted_is_decided_at_import(monkeypatch, state, interpreted, environment):
    assert import_again(monkeypatch, **state).INTERPRETED == interpreted
    assert os.environ.get("TRITON_INTERPRET") == environment


@pytest.mark.slow
def test_interpreted_is_decided_before_triton_is_imported():
    gpus = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    done = run_python("-c", "import triton, memtraffic", **gpus)
    assert "Triton was imported before memtraffic, too late" in done.stderr


def test_require_gpu_names_what_needs_it(monkeypatch):
    """So do the commands; tests/test_cli.py has them."""
    monkeypatch.setattr(device, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match=r"^time_interleaved needs a GPU"):
        fastest_copy(torch.ones(4, 6))
    with pytest.raises(RuntimeError, match=r"^gpu_name needs a GPU"):
        device.gpu_name()
    assert device.default() == torch.device("cpu")


def test_runs_on_gpu_inside_meters(monkeypatch):
    """A meter stands in for the GPU, also in a process that compiles kernels."""
    from memtraffic import count
    from memtraffic.compile import capture_launches

    monkeypatch.setattr(device, "INTERPRETED", False)
    seen, gpu, x = [], find_gpu("gfx942"), torch.ones(2, 4, device=device.default())

    def look(x):
        seen.append((device.runs_on_gpu(), device.captured_gpu()))

    count(look, x)
    capture_launches(look, x, gpu=gpu)
    assert seen == [(False, None), (False, gpu)]
    assert device.runs_on_gpu()


def test_capturing_launches_is_of_a_thread(monkeypatch):
    """Another thread captures for none, or for another GPU.

    Of the threads that PyTorch has for the backward passes of GPUs, none would find its launches
    captured.
    """
    monkeypatch.setattr(device, "INTERPRETED", False)

    def elsewhere():
        before = device.captured_gpu(), device.runs_on_gpu()
        with device.capturing_launches(find_gpu("gfx942")):
            return before, device.captured_gpu().target

    with device.capturing_launches(find_gpu("sm_75")), ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == ((None, True), "gfx942")
        assert device.captured_gpu().target == "sm_75"
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


def test_device_guard(monkeypatch):
    """Of a tensor that no GPU works on, it silences NumPy."""
    with device.device_guard(torch.ones(2)):
        assert np.isnan(np.float32("inf") - np.float32("inf"))
        assert np.isinf(np.float32(3e38) * np.float32(3e38))
    monkeypatch.setattr(device, "INTERPRETED", False)
    assert isinstance(device.device_guard(cuda_tensor(0)), torch.cuda.device)
    with device.capturing_launches():  # the interpreter stands in for the GPU
        assert isinstance(device.device_guard(cuda_tensor(0)), np.errstate)


def cuda_tensor(index):
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))


# ---- the GPU that is here


def fake_gpus(monkeypatch, *devices, max_blocks=32, status=0, hip=False):
    """Has PyTorch and the CUDA driver tell of `devices`; returns the calls of the driver."""
    calls = []

    def attribute(answer, which, index):
        calls.append((which.value, index.value))
        answer._obj.value = max_blocks
        return status

    def load(name):
        if hip:
            raise OSError(f"{name}: cannot open shared object file")
        assert name == "libcuda.so.1"
        return SimpleNamespace(cuDeviceGetAttribute=attribute)

    monkeypatch.setattr(device, "_read_gpu", cache(device._read_gpu.__wrapped__))
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.version, "hip", "6.4" if hip else None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    return calls


SIZES = {  # those of no product, as PyTorch calls them and as the table does
    "multi_processor_count": ("num_sms", 131),
    "regs_per_multiprocessor": ("registers_per_sm", 32768),
    "shared_memory_per_multiprocessor": ("shared_per_sm", 65000),
    "shared_memory_per_block_optin": ("shared_per_program", 64000),
    "L2_cache_size": ("l2_bytes", 50 * 2**20),
    "warp_size": ("warp_size", 32),
    "max_threads_per_multi_processor": ("max_threads_per_sm", 1536),
}


def nvidia_properties(name="NVIDIA H100 80GB HBM3", major=9, minor=0):
    """What PyTorch tells of a GPU made by NVIDIA."""
    sizes = {known: value for known, (_, value) in SIZES.items()} | {"shared_memory_per_block": 1}
    return SimpleNamespace(name=name, major=major, minor=minor, **sizes)


def amd_properties(name, arch):
    """What PyTorch tells of a GPU made by AMD: not all versions tell the LDS of a compute unit."""
    sizes = {"multi_processor_count": 303, "L2_cache_size": 4 * 2**20}
    return SimpleNamespace(name=name, gcnArchName=arch, major=9, minor=4, **sizes)


OF_TURING = {"shared_granularity": 256, "prefetches_to_shared_memory": False}


@pytest.mark.parametrize(
    ("major", "minor", "others"),
    [
        pytest.param(9, 0, None, id="in-the-table"),
        pytest.param(7, 5, {"target": "sm_75"} | OF_TURING, id="turing"),
        pytest.param(12, 1, {"target": "sm_121"}, id="newer-than-the-table"),
    ],
)
def test_this_gpu_nvidia(monkeypatch, major, minor, others):
    """Of any target: the table adds what only a datasheet tells."""
    name = "NVIDIA Orin" if others else "NVIDIA H100 80GB HBM3"
    unlisted = {"product": name, "driver_name": name, "datasheet_bytes_per_s": 0.0}
    calls = fake_gpus(monkeypatch, nvidia_properties(name, major, minor), max_blocks=33)
    expected = {"max_blocks_per_sm": 33} | dict(SIZES.values())
    expected |= unlisted | others if others else {}
    assert this_gpu() == replace(find_gpu("h100"), **expected)
    assert calls == [(106, 0)]  # CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR of cuda.h
    fake_gpus(monkeypatch, nvidia_properties(), status=101)
    with pytest.raises(RuntimeError, match=r"cuDeviceGetAttribute .* 101"):
        this_gpu()


def test_this_gpu_amd(monkeypatch):
    """Nothing of CUDA is loaded, and the sizes that PyTorch does not tell are the table's."""
    sizes = {"num_sms": 303, "l2_bytes": 4 * 2**20}
    listed = amd_properties("AMD Instinct MI300X", "gfx942:sramecc+:xnack-")
    fake_gpus(monkeypatch, listed, amd_properties("AMD MI300A", "gfx942"),
              amd_properties("AMD Radeon", "gfx1030"), hip=True)  # fmt: skip
    assert this_gpu() == replace(find_gpu("gfx942"), **sizes)
    names = {"product": "AMD MI300A", "driver_name": "AMD MI300A", "datasheet_bytes_per_s": 0.0}
    assert this_gpu(1) == replace(find_gpu("gfx942"), **sizes, **names)
    with pytest.raises(LookupError, match=r"gfx1030(.|\n)*gfx1100"):
        this_gpu(2)


def test_this_gpu_follows_the_current_device(monkeypatch):
    names = ("NVIDIA H200", "NVIDIA L4")
    calls = fake_gpus(monkeypatch, *(nvidia_properties(name) for name in names))
    assert this_gpu().driver_name == "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert this_gpu().driver_name == "NVIDIA L4"
    assert [this_gpu(index).driver_name for index in (0, 1)] == list(names)
    assert calls == [(106, 0), (106, 1)], "each GPU is asked once"


def test_planning_gpu(monkeypatch):
    fake_gpus(monkeypatch, nvidia_properties(), nvidia_properties("NVIDIA L4"))
    x = cuda_tensor(1)
    assert (planning_gpu(x).product, planning_gpu(torch.empty(2)).product) == ("L4", "H200")
    for gpu, product in ((find_gpu("gfx942"), "MI300X"), (None, "H200")):
        with device.capturing_launches(gpu):
            assert planning_gpu(x).product == product
    monkeypatch.setattr(device, "INTERPRETED", True)
    assert planning_gpu(x).product == "H200"


@pytest.mark.gpu
def test_this_gpu_is_a_gpu():
    gpu = this_gpu()
    assert gpu.driver_name == device.gpu_name()
    assert gpu == this_gpu(torch.cuda.current_device()) == planning_gpu(torch.ones(1).cuda())
    assert gpu.warp_size in (32, 64) and gpu.l2_bytes > 2**20 and gpu.num_sms > 1
    assert 48 * 1024 <= gpu.shared_per_program <= gpu.shared_per_sm
    # Where the table lists the product, all that PyTorch and the driver tell is in the table.
    for row in GPUS:
        assert row.driver_name != gpu.driver_name or replace(gpu, l2_bytes=0) == row
