from memtraffic_book import lab_notes

NOTES = lab_notes.load()


def test_each_note_says_what_was_tried_and_what_became_of_it():
    columns = ["about", "gain", "change", "prediction", "result", "verdict", "why"]
    assert list(NOTES) == columns
    assert set(NOTES["verdict"]) == {lab_notes.KEPT, lab_notes.DROPPED}
    assert not NOTES["change"].duplicated().any()
    for column in ("change", "why"):
        assert all(text.endswith(".") for text in NOTES[column])
    for column in ("prediction", "result"):
        assert not any(text.endswith(".") for text in NOTES[column])
    assert all(NOTES["result"])
    assert (NOTES.loc[NOTES["gain"] < 0, "verdict"] == lab_notes.DROPPED).all()
