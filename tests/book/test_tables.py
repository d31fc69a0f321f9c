import html

import pandas as pd
import pytest

from memtraffic_book import tables, units


@pytest.fixture
def shown(monkeypatch):
    """The bundle of each table that is displayed, by MIME type."""
    bundles = []
    monkeypatch.setattr(tables, "display", lambda data, raw: bundles.append(data))
    return bundles


LONG = "<naive>" + 80 * "x"
ROWS = [{"impl": "copy", "us": 5.0}, {"impl": LONG, "us": 20.0}]


def test_show_rows(shown):
    """Without padding: its width would depend on the numbers, which nbval leaves out."""
    for rows in (ROWS, pd.DataFrame(ROWS), iter(ROWS)):
        tables.show(
            rows,
            implementation=lambda row: row["impl"],
            time_each_=lambda row: units.format_us(row["us"]),
            whole=lambda row: 3,
        )
    assert shown[1] == shown[2] == shown[0]
    assert shown[0]["text/plain"] == (
        f"implementation | time each | whole\ncopy | 5.0 µs | 3\n{LONG} | 20 µs | 3"
    )
    cells = ["implementation", "time each", "whole", "copy", "5.0 µs", "3", html.escape(LONG)]
    positions = [shown[0]["text/html"].index(f">{cell}</t") for cell in cells]
    assert positions == sorted(positions)
    assert shown[0]["text/html"].count("<tr") == 3
