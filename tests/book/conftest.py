"""A made-up book: one experiment, an empty folder of recordings, and a GPU called an H200."""

import dataclasses

import pandas as pd
import pytest
from browser import Browser

from memtraffic import device
from memtraffic_book import catalog, recording
from memtraffic_book.catalog import Column, Experiment

MACHINE = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
}


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """The one browser of all tests; there is no test where there is none."""
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


def measure_speed(shapes, scale):
    rows = [['a, "b"', m, n, scale * m * n / 3, m * n * 10**7] for m, n in shapes]
    return pd.DataFrame(rows, columns=["impl", "m", "n", "us", "dram_read_bytes"])


SPEED = Experiment(
    "speed",
    measure_speed,
    {"shapes": [[4, 8], [2, 16]], "scale": 0.5},
    (
        Column("impl"),
        Column("m", "rows"),
        Column("n", "columns"),
        Column("us", "µs", 0.1),
        Column("dram_read_bytes", "bytes", 0.1),
    ),
)


@pytest.fixture
def in_mode(monkeypatch):
    """A function that sets the mode, as for a process that has not said anything yet."""

    def change(mode):
        monkeypatch.setenv("MEMTRAFFIC_MODE", mode)
        recording.said.clear()
        recording.measured.clear()
        recording.elsewhere.clear()

    return change


class Book:
    """The made-up book's folder, and what a test changes in it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.recordings = folder / "recordings"
        self.h200 = self.recordings / "nvidia-h200"
        self.recordings.mkdir()
        self.machine, self.date = dict(MACHINE), "2026-01-31"
        monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", str(self.recordings))
        monkeypatch.setenv("MEMTRAFFIC_COMMIT", 40 * "0")
        monkeypatch.setattr(device, "require_gpu", lambda what: None)
        monkeypatch.setattr(device, "gpu_name", lambda: self.machine["gpu"])
        monkeypatch.setattr(recording, "today", lambda: self.date)
        monkeypatch.setattr(recording, "describe_machine", lambda: dict(self.machine))
        self.lists(SPEED)

    def lists(self, *experiments):
        """Makes these the experiments of the book."""
        table = {experiment.id: experiment for experiment in experiments}
        self.monkeypatch.setattr(catalog, "EXPERIMENTS", table)

    def changes(self, **fields):
        """Replaces fields of the experiment `speed`; returns it."""
        experiment = dataclasses.replace(catalog.EXPERIMENTS["speed"], **fields)
        self.lists(experiment)
        return experiment

    def slows(self, factor):
        """Makes `speed` take so many times as long as was recorded; returns it."""
        return self.changes(measure=lambda shapes, scale: measure_speed(shapes, factor * scale))

    def record(self, *experiments, folder=None):
        for experiment in experiments or (SPEED,):
            recording.write(folder or self.h200, experiment, experiment.run())

    def edit(self, change):
        """Replaces the text of the recording `speed` by a function of it."""
        path = self.h200 / "speed.csv"
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


@pytest.fixture
def book(tmp_path, monkeypatch, in_mode):
    """A made-up book without recordings, on its GPU; mode is `replay`."""
    in_mode("replay")
    return Book(tmp_path, monkeypatch)


@pytest.fixture
def recorded(book):
    """The made-up book with the recording `speed`."""
    book.record()
    return book
