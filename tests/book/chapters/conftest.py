"""What the tests of all chapters share."""

import importlib

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from memtraffic import device


@pytest.fixture
def chapter(request):
    """The module that a file of tests, or one of its cases, is about."""
    slug = getattr(request, "param", request.path.stem.removeprefix("test_"))
    return importlib.import_module(f"memtraffic_book.chapters.{slug}")


@pytest.fixture(autouse=True)
def glued(chapter, monkeypatch):
    """What the functions of a chapter keep for the prose."""
    if device.HAS_GPU:
        pytest.skip("a GPU measures itself")
    kept = {}
    if hasattr(chapter, "glue"):
        monkeypatch.setattr(chapter, "glue", kept.__setitem__)
    yield kept
    plt.close("all")
