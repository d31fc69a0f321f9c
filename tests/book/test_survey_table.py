"""The survey as a page shows it: ratios, the table, and counts beside counters."""

import pandas as pd
import pytest

from memtraffic_book import survey, survey_table
from memtraffic_book.catalog import EXPERIMENTS

FIELDS = [field.name for field in survey.fields(survey.Row)]


def row(kernel="our:sum", direction="forward", amounts="", at="", reason="", **more):
    """A row of the survey; amounts: reads, writes, and the least of both, with `;` between."""
    found = dict.fromkeys(FIELDS, "") | {"package": "torch", "version": "2.0+cpu"}
    named = zip(survey_table.AMOUNTS, amounts.split(";") if amounts else [], strict=False)
    return found | {
        "kernel": kernel,
        "direction": direction,
        "inputs": "M,N",
        "at": at,
        "reason": reason,
        **dict(named),
        **more,
    }


ROWS = [
    row(amounts="MN;M;MN;M"),
    row("our:norm", amounts="3MN + N;MN;MN + N;MN"),
    row("our:norm", "backward", amounts="400;100;800;200", at="M=10, N=20", note="kept: B<4"),
    row("our:mystery", reason="CountError: a <reason>"),
]
FRAME = pd.DataFrame(ROWS, columns=FIELDS)


def test_ratios_are_of_what_is_moved_to_the_least():
    passes = survey_table.ratios(FRAME)
    large = survey_table.LARGE
    assert list(passes["kernel"]) == ["our:sum", "our:norm", "our:norm"]
    assert passes["ratio"].iloc[0] == 1 and passes["ratio"].iloc[2] == 0.5
    assert passes["ratio"].iloc[1] == (4 * large**2 + large) / (2 * large**2 + large)
    assert passes["moved"].iloc[0] == large**2 + large


@pytest.mark.parametrize(
    ("text", "sizes", "elements"),
    [
        ("5MN + 2M", {"M": 3, "N": 5}, 81),
        ("5MN + 2M", {"N": 5, "M": 3}, 81),
        ("(5/2)MM + (29/2)M - 1", {"M": 4}, 97),
        ("364T", {"T": 2}, 728),
        ("1234", {}, 1234),
    ],
)
def test_evaluate(text, sizes, elements):
    assert survey_table.evaluate(text, **sizes) == elements


def test_evaluate_refuses_a_letter_without_a_size():
    with pytest.raises(ValueError, match="K"):
        survey_table.evaluate("MK", M=3)


def test_share_up_to_counts_a_row_too_much_as_none():
    passes = pd.DataFrame({"ratio": [0.5, 1.0, 1.009, 2.0, 9.0]})
    assert list(survey_table.share_up_to(passes, [1.0, 2.0, 8.0])) == [60, 80, 80]


def shown(monkeypatch, frame):
    found = {}
    monkeypatch.setattr(survey_table, "display", lambda data, raw: found.update(data))
    survey_table.show(frame)
    return found["text/plain"].splitlines(), found["text/html"]


def test_show_has_a_line_for_each_pass(monkeypatch):
    """The kernel with the highest ratio stands on top; the least is there where it is less."""
    lines, _ = shown(monkeypatch, FRAME)
    assert lines == [
        "torch.compile 2.0: 3 kernels, 3 passes, 2 of them move no more than they must",
        "norm: M,N",
        "forward | 3MN + N (MN + N) | MN | 2.00x",
        "backward | 400 (800) | 100 (200) | 0.50x",
        "sum: M,N",
        "forward | MN | M | 1.00x",
        "mystery: M,N",
        "forward | CountError: a <reason>",
    ]


def test_show_writes_html_that_shows_every_sign(monkeypatch):
    _, page = shown(monkeypatch, FRAME)
    assert "a &lt;reason&gt;" in page and "<reason>" not in page
    assert page.count("<details>") == page.count("</details>") == 1
    assert page.count("<tr>") == page.count("</tr>") == 1 + 7
    assert "3MN + N<br>(MN + N)" in page


def test_show_of_the_recorded_survey_names_every_kernel(monkeypatch):
    frame = survey.load()
    lines, page = shown(monkeypatch, frame)
    assert page.count("<details>") == frame["package"].nunique() == len(survey_table.TITLES)
    passes = [line for line in lines if line.startswith(("forward |", "backward |"))]
    assert len(passes) == len(frame)


def test_label():
    backward = {"package": "liger-kernel", "kernel": "a.b:liger_norm", "direction": "backward"}
    assert survey_table.label(backward) == "Liger: norm, backward"
    assert survey_table.label(backward | {"direction": "forward"}) == "Liger: norm"


def test_beside_gives_bytes_of_what_ran():
    columns = list(EXPERIMENTS["survey_counters"].schema)
    ran = dict.fromkeys(columns, 0) | {
        **{"package": "torch", "kernel": "our:norm", "direction": "forward", "missing": ""},
        **{"at": "M=2, N=8", "instruction_read_bytes": 7, "l2_write_sectors": 2},
    }
    absent = ran | {"missing": "PackageNotFoundError: none"}
    frame = survey_table.beside(FRAME, pd.DataFrame([absent, ran], columns=columns))
    [found] = frame.to_dict("records")
    assert found["counted_reads"] == (3 * 16 + 8) * 4 and found["counted_writes"] == 16 * 4
    assert found["least_reads"] == (16 + 8) * 4
    assert (found["requested"], found["to_l2"]) == (7, 64)


def test_beside_of_nothing():
    columns = list(EXPERIMENTS["survey_counters"].schema)
    assert survey_table.beside(FRAME, pd.DataFrame(columns=columns)).empty
