"""The six claims of speed: where their numbers come from, and what happens if one is another."""

import pandas as pd
import pytest

from memtraffic_book import recording


@pytest.fixture
def said(chapter):
    return pd.read_csv(chapter.CLAIMS).set_index("number")


def test_time_that_we_took_is_the_recorded_one_and_the_others_have_a_source(said):
    times = recording.experiment("masked_narrow", gpu=recording.PUBLISHED).set_index("impl")
    recorded = times.loc["block of 512"]
    assert (recorded["m"], recorded["n"], recorded["us"]) == tuple(said.loc[5, ["m", "n", "us"]])
    assert said["source"].str.startswith("https://").sum() == 4


@pytest.mark.parametrize("number", [1, 2, 5, 6])
def test_show_claims_refuses_a_time_that_changes_a_verdict(
    chapter, said, number, tmp_path, monkeypatch
):
    by = 100 if number in (1, 5) else 0.1
    said.loc[number, "us"] *= by
    said.to_csv(path := tmp_path / "claims.csv")
    monkeypatch.setattr(chapter, "CLAIMS", path)
    with pytest.raises(AssertionError, match="of 6 claims need more"):
        chapter.show_claims()
