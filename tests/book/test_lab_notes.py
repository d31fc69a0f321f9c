from memtraffic_book import lab_notes, tables

NOTES = lab_notes.load()


def test_each_note_says_what_was_tried_and_what_became_of_it():
    columns = ["about", "gain", "change", "prediction", "result", "verdict", "why"]
    assert list(NOTES) == columns
    assert set(NOTES["verdict"]) == {lab_notes.KEPT, lab_notes.DROPPED}
    assert not NOTES["change"].duplicated().any()
    for column in ("change", "why"):
        assert all(text.endswith(".") for text in NOTES[column] if text)
    for column in ("prediction", "result"):
        assert not any(text.endswith(".") for text in NOTES[column])
    assert all(NOTES["result"])
    assert (NOTES.loc[NOTES["gain"] < 0, "verdict"] == lab_notes.DROPPED).all()


def test_show_has_the_largest_gain_first(monkeypatch):
    shown = []
    monkeypatch.setattr(tables, "display", lambda data, raw: shown.append(data["text/plain"]))
    monkeypatch.setattr(lab_notes, "glue", lambda *kept: None)
    lab_notes.show()
    [first, *lines] = shown[0].splitlines()
    assert first == "gain | of | note | verdict" and len(lines) == len(NOTES)
    gains = [float(line.split(" %")[0].replace("±", "")) for line in lines]
    assert gains == sorted(gains, reverse=True) and gains[0] > 100 > 0 > gains[-1]
    assert shown[0].count("Predicted: ") == (NOTES["prediction"] != "").sum()
