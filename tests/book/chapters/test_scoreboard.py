"""What the folded cells of `book/scoreboard.ipynb` do."""

import pandas as pd
import pytest

from memtraffic import runtime
from memtraffic.benchmark.decision import CANDIDATES
from memtraffic_book import tables
from memtraffic_book.chapters import scoreboard, ship

pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures itself")


@pytest.fixture
def glued(monkeypatch):
    """What is kept for the first page, of kernels half as fast as a copy at 128 columns."""
    rows = [("copy", n, 10.0) for n in scoreboard.LADDER_AT]
    rows += [
        (name, n, 20.0 if n == 128 else 0.0) for name in ("naive", "masked") for n in (128, 4096)
    ]
    kept = {}
    monkeypatch.setattr(
        scoreboard, "experiment", lambda id: pd.DataFrame(rows, columns=["impl", "n", "us"])
    )
    monkeypatch.setattr(scoreboard, "glue", kept.__setitem__)
    return kept


def test_ladder_has_what_was_counted_beside_what_was_timed(glued, monkeypatch, capsys):
    monkeypatch.setattr(scoreboard, "LADDER", ("naive", "masked"))
    scoreboard.show_ladder()
    assert glued == {
        "naive_reads": "5MN + 2M", "naive_writes": "3MN + 2M", "naive_128": "50 %",
        "naive_4096": "–", "naive_65536": "–",
        "masked_reads": "MN", "masked_writes": "MN", "masked_128": "50 %",
        "masked_4096": "–", "masked_65536": "–",
    }  # fmt: skip
    assert "reads fall from 5MN + 2M to MN" in capsys.readouterr().out


def test_ladder_has_to_end_at_mn(glued, monkeypatch):
    monkeypatch.setattr(scoreboard, "LADDER", ("masked", "naive"))
    with pytest.raises(AssertionError, match="fall from MN"):
        scoreboard.show_ladder()


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
