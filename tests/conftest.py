"""Fixtures and markers that test files share."""

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


@pytest.fixture(scope="module")
def bounds_checked():
    """Interpreted kernels are stopped before they touch foreign memory and end the process."""
    from memtraffic import testing

    with testing.bounds_checked():
        yield
