import io
import sys
from types import SimpleNamespace

import pytest

from memtraffic import progress as module
from memtraffic.progress import enable, progress, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    """A terminal on stderr, on which a bar appears at once."""
    terminal = Terminal()
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setattr(module, "DELAY", 0)
    monkeypatch.setattr(module, "_enabled", False)
    return terminal


def test_progress_on_a_terminal(stderr):
    enable()
    assert list(progress(iter("abc"), "timing")) == ["a", "b", "c"]
    assert "timing:" in stderr.getvalue()
    assert "/3" in stderr.getvalue()


def test_progress_says_nothing_until_a_command_enables_it(stderr):
    assert list(progress("abc", "timing")) == ["a", "b", "c"]
    assert stderr.getvalue() == ""


def test_progress_of_a_short_run_says_nothing(stderr, monkeypatch):
    monkeypatch.setattr(module, "DELAY", 1e9)
    enable()
    list(progress("abc", "timing"))
    assert "timing" not in stderr.getvalue()


def test_enable_without_a_terminal(stderr, monkeypatch):
    monkeypatch.setattr(stderr, "isatty", lambda: False)
    enable()
    list(progress("abc", "timing"))
    assert stderr.getvalue() == ""


def test_progress_bar_shows_the_steps_done(stderr):
    enable()
    with progress_bar("counting") as show:
        show(3, 8)
        show(3, 8)
        show(6, 8)
    shown = stderr.getvalue()
    assert "counting:" in shown
    assert "/8" in shown


def test_progress_needs_tqdm_only_when_enabled(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress("abc", "timing")) == ["a", "b", "c"]


def test_enable_without_tqdm(stderr, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    enable()
    assert list(progress("abc", "timing")) == ["a", "b", "c"]
    assert stderr.getvalue() == ""
