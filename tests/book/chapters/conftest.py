"""What the tests of all chapters share."""

import importlib

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def glued(request, monkeypatch):
    """What the functions of a chapter keep for the prose."""
    slug = request.path.stem.removeprefix("test_")
    page, kept = importlib.import_module(f"memtraffic_book.chapters.{slug}"), {}
    if hasattr(page, "glue"):
        monkeypatch.setattr(page, "glue", kept.__setitem__)
    yield kept
    plt.close("all")
