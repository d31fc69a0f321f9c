"""What the folded cells of `book/survey.ipynb` say, also where packages are absent."""

from memtraffic_book import recording, survey
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.chapters import survey as page

TABLE = survey.load()


def test_show_measured_where_packages_are_absent(monkeypatch, capsys):
    """What is not installed is named, and the claims are of what did run."""
    folder = recording.root() / recording.PUBLISHED
    measured = recording.read(folder, EXPERIMENTS["survey_counters"])
    measured.loc[measured["package"] != "torch", "missing"] = "absent: PackageNotFoundError: none"
    monkeypatch.setattr(page, "experiment", lambda id, gpu: measured)
    page.show_measured(TABLE)
    said = capsys.readouterr().out
    ran = (measured["missing"] == "").sum()
    assert said.count("not measured: ") == len(measured) - ran > 0
    assert f"✓ In {ran} of {ran} passes the loads request what was counted" in said
