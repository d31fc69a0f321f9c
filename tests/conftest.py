"""Fixtures and markers that test files share."""

from contextlib import contextmanager

import memtraffic.runtime as runtime  # first: it decides, before Triton is imported

import pytest  # isort: skip
import torch  # isort: skip


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (not runtime.HAS_GPU or runtime.INTERPRETED):
        pytest.skip("needs a GPU that runs kernels")


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    """Each dtype that the rungs take."""
    return getattr(torch, request.param)


class _Bounds:
    """A meter that refuses accesses outside a kernel's arguments, before they are made."""

    def __init__(self):
        self.spans = []

    @contextmanager
    def launch(self, kernel, tensors):
        outer, self.spans = self.spans, []
        yield
        self.spans = outer

    def bind(self, argument, tensor):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((n - 1) * stride for n, stride in steps)
        start = tensor.data_ptr()
        self.spans.append((start, start + (last + 1) * tensor.element_size()))

    def access(self, kind, addresses, itemsize, program, grid):
        inside = sum(((start <= addresses) & (addresses < end)) for start, end in self.spans)
        if addresses.size and not inside.all():
            raise AssertionError(f"program {program}: {kind} outside the kernel's arguments")

    def autotuned(self, kernel, launches):
        for launch in launches:
            launch()


@pytest.fixture(scope="module")
def bounds_checked():
    """Interpreted kernels are stopped before they touch foreign memory and end the process."""
    if not runtime.INTERPRETED:
        yield
        return
    from memtraffic.triton_internals import interpreting

    with interpreting(_Bounds()):
        yield
