"""Fixtures and markers that test files share."""

import sys
from pathlib import Path

import memtraffic.device as device  # first: it decides, before Triton is imported

import pytest  # isort: skip
import torch  # isort: skip

WITHOUT_TRITON = """test_collection test_functions test_gpus test_inputs test_names test_op
test_progress test_tensors compile/test_worker residency/test_residency softmax/test_naive"""
KEPT = [Path(__file__).parent / f"{name}.py" for name in WITHOUT_TRITON.split()]


def pytest_ignore_collect(collection_path):
    """Where there is no Triton, only the tests of what needs none are collected."""
    if not device.HAS_TRITON and not any(it.is_relative_to(collection_path) for it in KEPT):
        return True


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (not device.HAS_GPU or device.INTERPRETED):
        pytest.skip("needs a GPU that runs kernels")


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    """Each dtype that the rungs take."""
    return getattr(torch, request.param)


@pytest.fixture(scope="module")
def bounds_checked():
    """Interpreted kernels are stopped before they touch foreign memory and end the process."""
    from memtraffic import testing

    with testing.bounds_checked():
        yield


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Writes a module of the user's own, `mine`, into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda text: (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    sys.modules.pop("mine", None)


@pytest.fixture
def timed(monkeypatch):
    """The calls that were timed, as (functions, options), by a timer that needs no GPU.

    It calls what it times once, and the i-th function takes i + 1 µs.
    """
    from memtraffic import benchmark, device
    from memtraffic.benchmark import copying, loop, roof, timing

    calls = []

    def time_interleaved(fns, **options):
        calls.append((list(fns), options))
        for fn in fns:
            fn()
        return [[1e-6 * (i + 1)] * 20 for i in range(len(fns))]

    monkeypatch.setattr(device, "require_gpu", lambda what: None)
    for module in (benchmark, copying, loop, roof, timing):
        monkeypatch.setattr(module, "time_interleaved", time_interleaved)
    return calls
