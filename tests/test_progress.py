import io
import re
import time
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
    for name, value in (("DELAY", 0), ("_enabled", False), ("_at_once", False)):
        monkeypatch.setattr(module, name, value)
    return terminal


def test_progress_on_a_terminal(stderr):
    enable()
    assert list(progress(iter("abc"), "timing")) == ["a", "b", "c"]
    with progress_bar("counting") as show:
        for done in (3, 3, 6):
            show(done, 8)
    for shown in ("timing:", "/3", "counting:", "/8"):
        assert shown in stderr.getvalue()


def test_progress_in_a_notebook_shows_the_first_step_of_a_loop(stderr, monkeypatch):
    """Also where it is the only one, and in no terminal."""
    monkeypatch.setattr(module, "DELAY", 1e9)
    monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    enable(notebook=True)
    for _ in progress([0], "timing"):
        assert "timing:" in stderr.getvalue() and "0/1" in stderr.getvalue()
    with progress_bar("counting") as show:
        show(1, 8)
    assert "counting" not in stderr.getvalue()


def test_progress_where_there_is_no_terminal_estimates_what_is_long(stderr, monkeypatch):
    monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    monkeypatch.setattr(module, "LONG", 0.2)
    enable()
    for _ in progress(range(50), "counting"):
        time.sleep(0.01)
    lines = re.findall(r"counting: .*/50 \[00:00<00:00", stderr.getvalue())
    assert 1 <= len(lines) <= 2


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        pytest.param(module, "DELAY", 1e9, id="short"),
        pytest.param(Terminal, "isatty", lambda self: False, id="short-and-no-terminal"),
        pytest.param(module, "enable", lambda: None, id="not-enabled-by-a-command"),
    ],
)
def test_progress_says_nothing(owner, name, value, stderr, monkeypatch):
    monkeypatch.setattr(owner, name, value)
    module.enable()
    assert list(progress("abc", "timing")) == ["a", "b", "c"]
    assert "timing" not in stderr.getvalue()
