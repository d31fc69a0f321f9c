"""What the tests of all chapters share."""

import importlib

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from memtraffic_book import experiment


@pytest.fixture
def chapter(request):
    """The module that a file of tests is about."""
    slug = request.path.stem.removeprefix("test_")
    return importlib.import_module(f"memtraffic_book.chapters.{slug}")


@pytest.fixture(autouse=True)
def glued(chapter, monkeypatch):
    """What the functions of a chapter keep for the prose."""
    kept = {}
    if hasattr(chapter, "glue"):
        monkeypatch.setattr(chapter, "glue", kept.__setitem__)
    yield kept
    plt.close("all")


@pytest.fixture
def changed(chapter, monkeypatch):
    """Has `experiment` return a recording with a column changed where another has some value."""

    def change(column, by, **where):
        def lie(id):
            frame = experiment(id)
            [(name, value)] = where.items()
            frame[column] = frame[column].where(frame[name] != value, frame[column] * by)
            return frame

        monkeypatch.setattr(chapter, "experiment", lie)

    return change
