import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memtraffic import machine

needs_gpu = pytest.mark.skipif(not machine.HAS_GPU, reason="needs a GPU")
needs_triton = pytest.mark.skipif(
    not machine.HAS_TRITON, reason="Triton is not installed"
)


def python(code, **environment):
    """Runs `code` in a new process that sees no GPU; `environment` is added."""
    inherited = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    hidden = {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | hidden | environment,
        capture_output=True,
        text=True,
    )


def test_tensors_live_where_kernels_run():
    assert machine.device().type == ("cuda" if machine.HAS_GPU else "cpu")
    assert torch.ones(2, device=machine.device()).is_cuda == machine.HAS_GPU


def test_kernels_are_interpreted_where_there_is_no_gpu():
    asked = os.environ.get("TRITON_INTERPRET")
    assert machine.INTERPRETED == (asked == "1")
    assert machine.HAS_GPU or not machine.HAS_TRITON or asked is not None


@needs_triton
def test_triton_before_memtraffic_is_too_late_to_interpret():
    done = python("import triton\nimport memtraffic")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: machine: there is no GPU and Triton was imported before"
    )
    assert "import memtraffic first, or set TRITON_INTERPRET=1" in done.stderr


@needs_triton
def test_triton_before_memtraffic_is_no_error_for_who_has_chosen():
    code = "import triton\nfrom memtraffic import machine\nprint(machine.INTERPRETED)"
    assert python(code, TRITON_INTERPRET="1").stdout == "True\n"


def test_what_needs_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(machine, "HAS_GPU", False)
    with pytest.raises(
        RuntimeError,
        match=r"^warp needs a GPU, and PyTorch finds none on this machine$",
    ):
        machine.require_gpu("warp")
    with pytest.raises(RuntimeError, match=r"gpu_name needs a GPU"):
        machine.gpu_name()
    with pytest.raises(RuntimeError, match=r"copy_bandwidth needs a GPU"):
        machine.copy_bandwidth()
    with pytest.raises(RuntimeError, match=r"limits needs a GPU"):
        machine.limits.__wrapped__()
    assert machine.device() == torch.device("cpu")


def test_a_meter_stands_in_for_the_gpu(monkeypatch):
    monkeypatch.setattr(machine, "INTERPRETED", False)
    assert machine.compiles()
    with machine.metered():
        with machine.metered():
            assert not machine.compiles()
        assert not machine.compiles()
    assert machine.compiles()
    with pytest.raises(ValueError), machine.metered():
        raise ValueError
    assert machine.compiles()
    monkeypatch.setattr(machine, "INTERPRETED", True)
    assert not machine.compiles()


def test_a_meter_may_stand_for_another_gpu():
    here = machine.warp_size()
    assert machine.target() is None
    with machine.metered("gfx942", 64):
        assert (machine.target(), machine.warp_size()) == ("gfx942", 64)
        with machine.metered():
            assert (machine.target(), machine.warp_size()) == (None, here)
        assert (machine.target(), machine.warp_size()) == ("gfx942", 64)
    assert (machine.target(), machine.warp_size()) == (None, here)


@needs_triton
def test_meters_see_launches(monkeypatch):
    from memtraffic.targets import launches
    from memtraffic.traffic.count import count

    monkeypatch.setattr(machine, "INTERPRETED", False)
    seen = []
    x = torch.ones(2, 4, device=machine.device())
    count(lambda x: seen.append(machine.compiles()), x)
    launches(lambda x: seen.append(machine.compiles()), x)
    assert seen == [False, False]
    assert machine.compiles()


@needs_gpu
def test_limits_are_those_of_a_gpu():
    machine.require_gpu("this")
    limits = machine.limits()
    assert limits.name == machine.gpu_name()
    assert limits == machine.limits(torch.cuda.current_device())
    assert limits.warp_size == machine.warp_size() in (32, 64)
    assert limits.registers_per_sm >= 32768
    assert 48 * 1024 <= limits.shared_per_block <= limits.shared_per_sm
    assert limits.threads_per_sm % limits.warp_size == 0
    assert limits.l2_bytes > 2**20
    if torch.version.cuda:
        assert 8 <= limits.blocks_per_sm <= 64
    with pytest.raises(FrozenInstanceError):
        limits.sms = 1


@needs_gpu
def test_copy_bandwidth_is_below_the_datasheet():
    from memtraffic.measure import DATASHEET

    top = DATASHEET.get(machine.gpu_name())
    if top is None:
        pytest.skip(f"no datasheet of {machine.gpu_name()}")
    assert 0.6 * top < machine.copy_bandwidth() < top


def test_on_a_cpu_tensor_is_no_context():
    with machine.on(torch.ones(2)) as nothing:
        assert nothing is None


def test_a_meter_needs_the_silence_of_a_gpu_also_for_its_tensors(monkeypatch):
    monkeypatch.setattr(machine, "INTERPRETED", False)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert isinstance(machine.on(x), torch.cuda.device)
    with machine.metered():
        assert isinstance(machine.on(x), np.errstate)


@needs_gpu
def test_on_selects_the_gpu_of_the_tensor():
    x = torch.ones(2, device=torch.device("cuda", torch.cuda.device_count() - 1))
    with machine.on(x):
        assert torch.cuda.current_device() == x.device.index


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("AMD Instinct MI300X (gfx942)", "amd-instinct-mi300x-gfx942"),
    ],
)
def test_slug_is_a_folder(name, folder):
    assert machine.slug(name) == folder


def properties(**of_the_kind):
    """What PyTorch tells of a GPU, whatever its maker."""
    return SimpleNamespace(
        name="a GPU",
        multi_processor_count=304,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=65536,
        L2_cache_size=2**22,
        warp_size=64,
        max_threads_per_multi_processor=2048,
        **of_the_kind,
    )


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("gfx942:sramecc+:xnack-", "gfx942", id="with-features"),
        pytest.param("gfx90a", "gfx90a", id="without"),
        pytest.param("gfx1100", "gfx1100", id="rdna"),
    ],
)
def test_the_target_of_an_amd_gpu(monkeypatch, name, target):
    monkeypatch.setattr(machine, "HAS_GPU", True)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    told = properties(gcnArchName=name, major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    found = machine.limits.__wrapped__(0)
    assert (found.target, found.blocks_per_sm) == (target, None)
    assert (found.sms, found.shared_per_block) == (304, 65536)
    assert found.shared_per_sm == 65536  # no version of PyTorch fails to tell this


@pytest.mark.parametrize(
    ("major", "minor", "target"), [(7, 5, "sm_75"), (9, 0, "sm_90"), (12, 0, "sm_120")]
)
def test_the_target_of_an_nvidia_gpu(monkeypatch, major, minor, target):
    def attribute(answer, which, index):
        answer._obj.value = 32 if which == 106 else -1
        return 0

    driver = SimpleNamespace(cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(machine, "HAS_GPU", True)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    told = properties(
        major=major,
        minor=minor,
        shared_memory_per_block_optin=64000,
        shared_memory_per_multiprocessor=65000,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    found = machine.limits.__wrapped__(0)
    assert (found.target, found.blocks_per_sm) == (target, 32)
    assert (found.shared_per_block, found.shared_per_sm) == (64000, 65000)


@needs_gpu
def test_the_target_of_this_gpu_is_one_that_is_known():
    from memtraffic import occupancy

    assert (
        occupancy.processor(machine.limits().target).target == machine.limits().target
    )
