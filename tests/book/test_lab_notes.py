from itertools import pairwise

import pytest

from memtraffic.gpus import DEFAULT_GPU
from memtraffic.kernels.softmax.planning import softmax_tile
from memtraffic_book import lab_notes

NOTES = lab_notes.load()


def test_each_note_says_what_was_tried_and_what_became_of_it():
    assert list(NOTES) == ["about", "change", "prediction", "result", "verdict", "why"]
    assert set(NOTES["verdict"]) == {lab_notes.KEPT, lab_notes.DROPPED}
    assert not NOTES["change"].duplicated().any()
    for column in ("change", "why"):
        assert all(text.endswith(".") for text in NOTES[column] if text)
    for column in ("prediction", "result"):
        assert not any(text.endswith(".") for text in NOTES[column])
    assert all(NOTES["result"])


def test_show_is_of_one_kernel(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(lab_notes, "display", lambda text: shown.append(text.data))
    for about in set(NOTES["about"]):
        lab_notes.show(about)
    text = "\n".join(shown)
    assert text.count("- Measured: ") == len(NOTES)
    assert text.count(" Dropped.\n") == (NOTES["verdict"] == lab_notes.DROPPED).sum()
    assert text.count("- Predicted: ") == (NOTES["prediction"] != "").sum()
    with pytest.raises(LookupError, match="backward, cross-entropy, host, rows, split"):
        lab_notes.show("naive")


def test_rule_says_what_each_width_gets():
    """The ranges of a kernel follow one another, from 257 columns to the widest that it takes."""
    ranges = lab_notes.rule()
    assert {it.kind for it in ranges} == set(lab_notes.KINDS)
    for kind, (itemsize, inputs) in lab_notes.KINDS.items():
        here = [it for it in ranges if it.kind == kind]
        assert here[0].first == lab_notes.NARROWEST
        assert (
            softmax_tile(lab_notes.MANY, here[-1].last + 1, itemsize, inputs, DEFAULT_GPU) is None
        )
        for before, after in pairwise(here):
            assert after.first == before.last + 1
        for it in here:
            for n in (it.first, it.last):
                tile = softmax_tile(lab_notes.MANY, n, itemsize, inputs, DEFAULT_GPU)
                assert (tile.rows, tile.num_warps) == (it.rows, it.num_warps)
