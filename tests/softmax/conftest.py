from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from memtraffic import device


@pytest.fixture(scope="module", autouse=True)
def _bounds_checked(bounds_checked):
    """A kernel that leaves its tensors fails its test and does not end the process."""


@pytest.fixture
def no_plans():
    """A cache of plans that is empty, and that no other test sees."""
    from memtraffic.kernels import launch

    with mock.patch.dict(launch._plans, clear=True) as plans:
        yield plans


@pytest.fixture
def one_sm(monkeypatch):
    """The op plans for a GPU of one SM: a program has several rows, so fewer are interpreted."""
    from memtraffic.gpus import DEFAULT_GPU
    from memtraffic.kernels.softmax import op

    if device.INTERPRETED:
        monkeypatch.setattr(op, "planning_gpu", lambda x: replace(DEFAULT_GPU, num_sms=1))


class FakeGpu:
    """What launches ask Triton for on a GPU, written down.

    compiled: kernel, arguments and options of each. started: kernel, grid and arguments of each,
    tensors by their addresses. used: what a kernel is said to use.
    """

    def __init__(self, monkeypatch):
        from memtraffic.kernels import launch
        from memtraffic.kernels.softmax import persistent, split

        self.started, self.compiled, self.used = [], [], {"registers": 32}
        monkeypatch.setattr(device, "INTERPRETED", False)
        for module in (launch, persistent, split):
            monkeypatch.setattr(module, "compile_kernel", self.compile_kernel)
        for module in (persistent, split):
            monkeypatch.setattr(module, "loaded_resources", self.loaded_resources)
        monkeypatch.setattr(launch, "starter", self.starter)

    def compile_kernel(self, kernel, *arguments, **options):
        self.compiled.append((kernel, arguments, options))
        return SimpleNamespace(kernel=kernel, num_warps=options["num_warps"])

    def loaded_resources(self, compiled, gpu):
        from memtraffic.residency import Resources

        used = {"spill_bytes": 0, "shared_bytes": 0} | self.used
        return Resources("", gpu.target, compiled.num_warps, **used)

    def starter(self, compiled, grid, arguments, places, gpu):
        def start(*tensors):
            given = {i: x.data_ptr() for i, x in zip(places, tensors, strict=True)}
            arguments_then = list((dict(enumerate(arguments)) | given).values())
            self.started.append((compiled.kernel, grid, arguments_then))

        return start


@pytest.fixture
def fake_gpu(monkeypatch):
    return FakeGpu(monkeypatch)


@pytest.fixture
def other_matrices():
    """Of a matrix of float32: ones like it, each different in one thing that a plan depends on."""

    def others(x):
        m, n = x.shape
        memory = x.new_zeros(2 * m * n + 64)
        return {
            "dtype": x.half(),
            "width": x[:, : n - 2],
            "height": x[: m - 1],
            "strides": memory[: 2 * m * n].view(m, 2 * n)[:, :n],
            "transposed": memory[: m * n].view(n, m).t(),
            "alignment": memory[1 : m * n + 1].view(m, n),
            "alignment-to-8": memory[2 : m * n + 2].view(m, n),
        }

    return others
