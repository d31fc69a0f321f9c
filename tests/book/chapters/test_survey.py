"""What the folded cells of `book/survey.ipynb` say, also where packages are absent."""

import pytest

from memtraffic import runtime
from memtraffic_book import recording, survey
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.chapters import survey as page

pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures itself")
TABLE = survey.load()


def test_show_summary_adds_up(glued, capsys):
    page.show_summary(TABLE)
    passes = survey.ratios(TABLE)
    least = (passes["ratio"] <= survey.EXACT).sum()
    assert glued["passes"] == str(len(passes)) and glued[
        "least"
    ] == f"{least / len(passes):.0%}".replace("%", " %")
    refused = (TABLE["reason"] != "").sum()
    said = f"{refused} are refused, and {least} of the other {len(TABLE) - refused} move"
    assert said in capsys.readouterr().out


def test_show_measured_where_packages_are_absent(monkeypatch, capsys):
    """What is not installed is named, and the claims are of what did run."""
    folder = recording.root() / recording.PUBLISHED
    measured = recording.read(folder, EXPERIMENTS["survey_counters"])
    measured.loc[measured["package"] != "torch", "missing"] = "absent: PackageNotFoundError: none"
    monkeypatch.setattr(page, "experiment", lambda id: measured)
    page.show_measured(TABLE)
    said = capsys.readouterr().out
    ran = (measured["missing"] == "").sum()
    assert said.count("not measured: ") == len(measured) - ran > 0
    assert f"✓ In {ran} of {ran} passes the loads request what was counted" in said


def test_claim_rereads_refuses_where_dram_sends_again():
    frame = survey.beside(
        TABLE,
        recording.read(recording.root() / recording.PUBLISHED, EXPERIMENTS["survey_counters"]),
    )
    page.claim_rereads(frame)
    with pytest.raises(AssertionError, match="0 fetch from DRAM"):
        page.claim_rereads(frame.assign(beyond=frame["asked"]))


def test_show_cases_holds_of_the_survey(capsys):
    page.show_cases(TABLE)
    assert capsys.readouterr().out.count("✓") == 3
