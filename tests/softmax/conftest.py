from types import SimpleNamespace

import pytest

from memtraffic import device

if not device.HAS_TRITON:
    collect_ignore_glob = ["test_[!n]*.py"]  # all but naive


@pytest.fixture(scope="module", autouse=True)
def _bounds_checked(bounds_checked):
    """A kernel that leaves its tensors fails its test and does not end the process."""


class FakeGpu:
    """What launches ask Triton and PyTorch for on a GPU, written down.

    compiled: kernel, arguments and options of each. started: stream, grid and arguments of each.
    used: what a kernel is said to use; shared: bytes of shared memory for a number of stages.
    """

    def __init__(self, monkeypatch):
        from memtraffic.kernels import launch

        self.stream, self.started, self.compiled = 1, [], []
        self.used, self.shared = {"registers": 32}, lambda stages: 0
        monkeypatch.setattr(device, "INTERPRETED", False)
        for name in ("compile_kernel", "starter", "loaded_resources", "shared_bytes", "raw_stream"):
            monkeypatch.setattr(launch, name, getattr(self, name))

    def compile_kernel(self, kernel, *arguments, **options):
        self.compiled.append((kernel, arguments, options))
        return SimpleNamespace(num_warps=options["num_warps"], stages=options.get("STAGES"))

    def shared_bytes(self, compiled):
        return self.shared(compiled.stages)

    def loaded_resources(self, compiled, gpu):
        from memtraffic.residency import Resources

        used = {"spill_bytes": 0, "shared_bytes": self.shared_bytes(compiled)} | self.used
        return Resources("", gpu.target, compiled.num_warps, **used)

    def raw_stream(self, index):
        return -1 if index is None else index, self.stream

    def starter(self, compiled, grid, arguments, places, gpu):
        def start(stream, *addresses):
            given = dict(enumerate(arguments)) | dict(zip(places, addresses, strict=True))
            self.started.append((stream, grid, list(given.values())))

        if gpu is None:
            return start
        return lambda *tensors: start(self.raw_stream(gpu), *[x.data_ptr() for x in tensors])


@pytest.fixture
def fake_gpu(monkeypatch):
    return FakeGpu(monkeypatch)
