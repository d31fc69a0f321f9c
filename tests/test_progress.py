import pytest

from memtraffic import progress as module
from memtraffic.progress import Progress, progress


@pytest.fixture
def clock(monkeypatch):
    """The time, which goes on only where a test says so."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Progress, "enabled", True)
    return now


def run(clock, steps, seconds):
    for _ in progress(range(steps), "timing"):
        clock[0] += seconds


def test_a_long_run_says_how_far_it_is(clock, capsys):
    run(clock, 4, 1.5)
    assert capsys.readouterr() == ("", "\rtiming: 2 of 4 \rtiming: 3 of 4 \n")


def test_it_speaks_five_times_a_second_at_most(clock, capsys):
    run(clock, 500, 0.01)
    assert 10 <= capsys.readouterr().err.count("\r") <= 15


def test_a_short_run_says_nothing(clock, capsys):
    run(clock, 4, 0.4)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_hears_nothing(clock, capsys, monkeypatch):
    monkeypatch.setattr(Progress, "enabled", False)
    run(clock, 4, 10)
    assert capsys.readouterr() == ("", "")


def test_every_item_comes_through():
    assert list(progress(iter("abc"), "timing")) == ["a", "b", "c"]
