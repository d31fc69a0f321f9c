"""What the folded cells of `book/timing.ipynb` say of the recordings, and where they refuse to."""

import pytest

from memtraffic_book.chapters import timing


def test_compare_again_keeps_the_larger_of_both_gpus(glued, monkeypatch, capsys):
    found = {
        folder: timing.Apart(*values)
        for folder, values in zip(
            timing.FOLDERS, ((0.02, 0.03, 0.1, 0.5), (0.01, 0.04, 0.0, 0.0)), strict=True
        )
    }
    monkeypatch.setattr(timing, "_apart", found.__getitem__)
    timing.compare_again()
    assert glued.pop("between_days") == "0.5 µs"
    assert glued == {"between_wide": "2.0 %", "between_long": "4.0 %", "between_short": "10.0 %"}
    for worse in ((0.05, 0.0, 0.0, 0.0), (0.0, 0.0, 0.2, 0.0), (0.0, 0.0, 0.0, 1.0)):
        found[timing.FOLDERS[1]] = timing.Apart(*worse)
        with pytest.raises(AssertionError, match="H100"):
            timing.compare_again()


def test_claim_level_refuses_verdicts_that_differ():
    repeats = timing.recording.read(
        timing.recording.root() / timing.recording.PUBLISHED, timing.EXPERIMENTS["timing_repeats"]
    )
    tiled, copied = (repeats[repeats["impl"] == name] for name in ("tiled", "copy"))
    slower = copied[timing.TIMES].mul(1 + (copied["repeat"] < 8), axis=0)  # in half of the rounds
    repeats.loc[tiled.index, timing.TIMES] = slower.to_numpy()
    with pytest.raises(AssertionError, match="13 must agree"):
        timing.claim_level(repeats)
