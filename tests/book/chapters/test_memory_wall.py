"""The six claims of speed: where their numbers come from, and what happens if one is another."""

import pandas as pd
import pytest

from memtraffic_book import recording


def test_show_claims_has_our_recorded_time_and_refuses_other_times(chapter, tmp_path, monkeypatch):
    said = pd.read_csv(chapter.CLAIMS)
    times = recording.experiment("masked_narrow", gpu=recording.PUBLISHED).set_index("impl")
    ours = said.set_index("number").loc[5, ["m", "n", "us"]]
    assert tuple(times.loc["block of 512", ["m", "n", "us"]]) == tuple(ours)
    said.assign(us=100 * said["us"]).to_csv(path := tmp_path / "claims.csv")
    monkeypatch.setattr(chapter, "CLAIMS", path)
    with pytest.raises(AssertionError, match="1 of 6 claims need more"):
        chapter.show_claims()
