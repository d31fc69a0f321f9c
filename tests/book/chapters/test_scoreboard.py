"""What the folded cells of `book/scoreboard.ipynb` do."""

import pytest

from memtraffic import runtime
from memtraffic.benchmark.decision import CANDIDATES
from memtraffic_book import tables
from memtraffic_book.chapters import scoreboard, ship

pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures itself")


def test_tables_have_every_shape_and_candidate(monkeypatch, capsys):
    found = []
    monkeypatch.setattr(tables, "display", lambda data, raw: found.append(data["text/plain"]))
    frames = ship.load()
    scoreboard.show_versions(frames)
    scoreboard.show_times(frames["bfloat16"])
    scoreboard.show_calls(frames["bfloat16"])
    scoreboard.show_map("bfloat16")
    versions, times, calls, widths = (text.splitlines() for text in found)
    assert len(versions) == 1 + len(CANDIDATES)
    shapes = frames["bfloat16"][["m", "n"]].drop_duplicates()
    assert len(times) == 1 + len(shapes)
    assert len(calls) == 1 + shapes["m"].isin(ship.CALLED_AT).sum()
    assert len(widths) == 1 + 46
    assert capsys.readouterr().out.count("✓") == 1
