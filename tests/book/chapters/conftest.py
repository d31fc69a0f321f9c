"""What the tests of all chapters share."""

import importlib
from unittest import mock

import pytest

from memtraffic import device
from memtraffic_book import figures


@pytest.fixture
def chapter(request):
    """The module that a file of tests, or one of its cases, is about."""
    slug = getattr(request, "param", request.path.stem.removeprefix("test_"))
    return importlib.import_module(f"memtraffic_book.chapters.{slug}")


@pytest.fixture(autouse=True)
def glued(chapter, monkeypatch):
    """What the functions of a chapter keep for the prose; what they draw, its page shows."""
    if device.HAS_GPU:
        pytest.skip("a GPU measures itself")
    kept = {}
    drawn = mock.MagicMock(width_map=figures.width_map)
    for name, fake in (("glue", kept.__setitem__), ("figures", drawn)):
        if hasattr(chapter, name):
            monkeypatch.setattr(chapter, name, fake)
    return kept
