"""The table of GPUs, and the GPU that is here: of either vendor, with faked properties too."""

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import memtraffic
from memtraffic import gpus, runtime
from memtraffic.gpus import (
    GPUS,
    TARGETS,
    NvidiaGpu,
    find_gpu,
    find_gpus,
    planning_gpu,
    this_gpu,
)

# ---- the table


def test_gpus_have_one_name_each():
    assert len({gpu.product for gpu in GPUS} | set(TARGETS)) == len(GPUS) + len(TARGETS)
    assert len({gpu.driver_name for gpu in GPUS}) == len(GPUS)
    assert list(TARGETS) == list(dict.fromkeys(gpu.target for gpu in GPUS))
    assert TARGETS["sm_90"].product == gpus.DEFAULT_GPU.product == "H200"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.product)
def test_find_gpu_by_target_and_product(gpu):
    assert find_gpu(gpu.target.upper()) is TARGETS[gpu.target]
    assert find_gpu(gpu.product) is find_gpu(gpu.product.lower()) is gpu
    if gpu.vendor == "nvidia":
        assert (gpu.backend, gpu.target) == ("cuda", f"sm_{gpu.architecture}")
    else:
        assert (gpu.vendor, gpu.backend, gpu.architecture) == ("amd", "hip", gpu.target)
    assert gpu.prefetches_to_shared_memory == (gpu.vendor == "nvidia" and gpu.target != "sm_75")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sm_91", "mean 'sm_90'"),
        ("H20", "mean 'H200'"),
        ("", "MI300X"),
        (90, "named 90:"),
        (None, "named None:"),
    ],
)
def test_find_gpu_unknown(name, said):
    with pytest.raises(LookupError, match=said) as error:
        find_gpu(name)
    assert all(gpu.target in str(error.value) and gpu.product in str(error.value) for gpu in GPUS)
    assert name or "did you mean" not in str(error.value)


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

    gpus._read_gpu.cache_clear()
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.version, "hip", "6.4" if hip else None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    return calls


@pytest.fixture(autouse=True)
def forget_faked_gpus():
    yield
    gpus._read_gpu.cache_clear()


def nvidia_properties(name="NVIDIA H100 80GB HBM3", major=9, minor=0, **others):
    """What PyTorch tells of a GPU made by NVIDIA: by default an H100, but of one SM less."""
    return SimpleNamespace(**{
        "name": name,
        "major": major,
        "minor": minor,
        "multi_processor_count": 131,
        "regs_per_multiprocessor": 65536,
        "shared_memory_per_multiprocessor": 233472,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": 232448,
        "L2_cache_size": 50 * 2**20,
        "warp_size": 32,
        "max_threads_per_multi_processor": 2048,
    } | others)  # fmt: skip


def amd_properties(name="AMD Instinct MI300X", arch="gfx942:sramecc+:xnack-", **others):
    """What PyTorch tells of a GPU made by AMD: not all versions tell the LDS of a compute unit."""
    return SimpleNamespace(**{
        "name": name,
        "gcnArchName": arch,
        "major": 9,
        "minor": 4,
        "multi_processor_count": 303,
        "L2_cache_size": 4 * 2**20,
    } | others)  # fmt: skip


def test_this_gpu_nvidia(monkeypatch):
    calls = fake_gpus(monkeypatch, nvidia_properties(), max_blocks=33)
    expected = replace(find_gpu("h100"), num_sms=131, max_blocks_per_sm=33, l2_bytes=50 * 2**20)
    assert this_gpu() == expected
    assert calls == [(106, 0)]  # CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR of cuda.h


@pytest.mark.parametrize(
    ("major", "minor", "target", "granularity", "prefetches"),
    [
        pytest.param(7, 5, "sm_75", 256, False, id="turing"),
        pytest.param(8, 7, "sm_87", 128, True, id="not-in-the-table"),
        pytest.param(12, 1, "sm_121", 128, True, id="newer-than-the-table"),
    ],
)
def test_this_gpu_nvidia_of_any_target(monkeypatch, major, minor, target, granularity, prefetches):
    sizes = {
        "regs_per_multiprocessor": 32768,
        "shared_memory_per_multiprocessor": 65000,
        "shared_memory_per_block_optin": 64000,
        "max_threads_per_multi_processor": 1536,
    }
    fake_gpus(monkeypatch, nvidia_properties("NVIDIA Orin", major, minor, **sizes), max_blocks=16)
    assert this_gpu(0) == NvidiaGpu(
        target=target,
        product="NVIDIA Orin",
        driver_name="NVIDIA Orin",
        num_sms=131,
        registers_per_sm=32768,
        max_threads_per_sm=1536,
        max_blocks_per_sm=16,
        shared_per_sm=65000,
        shared_per_program=64000,
        shared_granularity=granularity,
        prefetches_to_shared_memory=prefetches,
        l2_bytes=50 * 2**20,
    )


def test_this_gpu_where_the_driver_refuses(monkeypatch):
    fake_gpus(monkeypatch, nvidia_properties(), status=101)
    with pytest.raises(RuntimeError, match=r"cuDeviceGetAttribute .* 101"):
        this_gpu()


@pytest.mark.parametrize("arch", ["gfx942:sramecc+:xnack-", "gfx942"])
def test_this_gpu_amd(monkeypatch, arch):
    """Nothing of CUDA is loaded, and the sizes that PyTorch does not tell are the table's."""
    fake_gpus(monkeypatch, amd_properties(arch=arch), hip=True)
    assert this_gpu() == replace(find_gpu("gfx942"), num_sms=303, l2_bytes=4 * 2**20)
    fake_gpus(monkeypatch, amd_properties("AMD Instinct MI300A", arch), hip=True)
    gpu = this_gpu()
    names = gpu.target, gpu.product, gpu.driver_name
    assert names == ("gfx942", "AMD Instinct MI300A", "AMD Instinct MI300A")
    assert gpu.datasheet_bytes_per_s == 0.0


def test_this_gpu_amd_unknown(monkeypatch):
    fake_gpus(monkeypatch, amd_properties("AMD Radeon", "gfx1030"), hip=True)
    with pytest.raises(LookupError) as error:
        this_gpu()
    assert "gfx1030" in str(error.value) and "gfx1100" in str(error.value)


def test_this_gpu_follows_the_current_device(monkeypatch):
    names = ("NVIDIA H200", "NVIDIA L4")
    calls = fake_gpus(monkeypatch, *(nvidia_properties(name) for name in names))
    assert this_gpu().driver_name == "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert this_gpu().driver_name == "NVIDIA L4"
    assert [this_gpu(index).driver_name for index in (0, 1)] == list(names)
    assert calls == [(106, 0), (106, 1)], "each GPU is asked once"


def cuda_tensor(index):
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))


def test_planning_gpu(monkeypatch):
    fake_gpus(monkeypatch, nvidia_properties(), nvidia_properties("NVIDIA L4"))
    assert planning_gpu(cuda_tensor(1)).product == "L4"
    assert planning_gpu(torch.empty(2)).product == "H200"
    with runtime.capturing_launches(find_gpu("gfx942")):
        assert planning_gpu(cuda_tensor(1)).product == "MI300X"
    with runtime.capturing_launches():
        assert planning_gpu(cuda_tensor(1)).product == "H200"
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    assert planning_gpu(cuda_tensor(1)).product == "H200"


@pytest.mark.gpu
def test_this_gpu_is_a_gpu():
    gpu = this_gpu()
    assert gpu.driver_name == runtime.gpu_name()
    assert gpu == this_gpu(torch.cuda.current_device()) == planning_gpu(torch.ones(1).cuda())
    assert gpu.warp_size in (32, 64) and gpu.l2_bytes > 2**20 and gpu.num_sms > 1
    assert 48 * 1024 <= gpu.shared_per_program <= gpu.shared_per_sm


@pytest.mark.gpu
def test_this_gpu_is_that_of_the_table():
    """Where the table lists the product, all that PyTorch and the driver tell is in the table."""
    gpu = this_gpu()
    listed = [row for row in GPUS if row.driver_name == gpu.driver_name]
    if not listed:
        pytest.skip(f"{gpu.driver_name} is not in the table")
    assert replace(gpu, l2_bytes=0) == listed[0]


# ---- nothing else decides


def test_no_vendor_is_decided_by_the_beginning_of_a_name():
    sources = Path(memtraffic.__file__).parent.rglob("*.py")
    pattern = re.compile(r"""\(\s*\(?["'](gfx|sm_)["']""")  # such as startswith("gfx")
    assert not [path for path in sources if pattern.search(path.read_text("utf-8"))]


def test_find_gpus():
    h200, a100 = find_gpu("H200"), find_gpu("A100")
    assert find_gpus("h200") == find_gpus(h200) == [h200]
    assert find_gpus(it for it in ("sm_90", a100)) == [h200, a100]
    with pytest.raises(ValueError, match="no GPU is named"):
        find_gpus([])
