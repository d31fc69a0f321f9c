"""The survey as a page shows it: ratios, the table, and counts beside counters."""

import pandas as pd
import pytest

from memtraffic_book import survey
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.recording import RecordingError, to_csv

FIELDS = survey.COLUMNS


def row(kernel="our:sum", direction="forward", amounts="", at="", reason="", **more):
    """A row of the survey; amounts: reads, writes, and the least of both, with `;` between."""
    found = dict.fromkeys(FIELDS, "") | {"package": "torch", "version": "2.0+cpu"}
    named = zip(survey.AMOUNTS, amounts.split(";") if amounts else [], strict=False)
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


def test_load_reads_what_was_written(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", str(tmp_path))
    with pytest.raises(RecordingError, match=r"missing; .*examples/survey/survey.py"):
        survey.load()
    (tmp_path / "survey.csv").write_text(to_csv(FRAME))
    assert survey.load().to_dict("records") == FRAME.to_dict("records")
    (tmp_path / "survey.csv").write_text(to_csv(FRAME.drop(columns="reason")))
    with pytest.raises(RecordingError, match="has columns"):
        survey.load()


def test_load_of_what_was_recorded():
    """Most kernels that were tried are counted, and nothing writes less than it must."""
    frame = survey.load()
    tried = frame.groupby(["package", "kernel", "inputs"])
    assert len(tried) >= 40 and frame["package"].nunique() >= 4
    assert sum((group["reason"] == "").any() for _, group in tried) >= 0.9 * len(tried)
    for row in frame[(frame["at"] != "") & (frame["direction"] == "forward")].to_dict("records"):
        assert int(row["writes"]) >= int(row["least_writes"]) or row["note"], row["kernel"]


def test_load_has_the_fused_attention_of_the_tutorials():
    """Its forward pass reads a block of queries once, and the keys and values up to it."""
    frame = survey.load()
    rows = frame[frame["kernel"] == "06-fused-attention:attention"]
    assert list(rows["direction"]) == ["forward", "backward"] and not rows["reason"].any()
    size, block, heads, features = 640, 64, 2, 64
    before = sum(range(block, size + 1, block))  # of each block, the keys up to its end
    assert rows["reads"].iloc[0] == str(heads * features * (size + 2 * before))
    assert rows["writes"].iloc[0] == str(heads * size * (features + 1))


def test_load_has_a_formula_of_each_kernel_that_is_measured():
    frame = survey.load().set_index(["kernel", "direction"])
    for kernel in EXPERIMENTS["survey_counters"].arguments["kernels"]:
        path, direction, *_ = kernel.split()
        row = frame.loc[path, direction].squeeze()
        assert row["reads"] and not row["at"] and "BLOCK" not in row["note"], kernel


def test_ratios_are_of_what_is_moved_to_the_least():
    passes = survey.ratios(FRAME)
    large = survey.LARGE
    assert list(passes["kernel"]) == ["our:sum", "our:norm", "our:norm"]
    assert passes["ratio"].iloc[0] == 1 and passes["ratio"].iloc[2] == 0.5
    assert passes["ratio"].iloc[1] == (4 * large**2 + large) / (2 * large**2 + large)
    assert passes["moved"].iloc[0] == large**2 + large


def test_evaluate():
    assert survey.evaluate("5MN + 2M", N=5, M=3) == 81
    assert survey.evaluate("(5/2)MM + (29/2)M - 1", M=4) == 97
    assert survey.evaluate("1234") == 1234
    with pytest.raises(ValueError, match="K"):
        survey.evaluate("MK", M=3)


def shown(monkeypatch, frame):
    found = {}
    monkeypatch.setattr(survey, "display", lambda data, raw: found.update(data))
    survey.show(frame)
    return found["text/plain"].splitlines(), found["text/html"]


def test_show_has_a_line_for_each_pass(monkeypatch):
    """The kernel with the highest ratio stands on top; the least is there where it is less."""
    lines, page = shown(monkeypatch, FRAME)
    assert "a &lt;reason&gt;" in page and "<reason>" not in page
    assert page.count("<details>") == page.count("</details>") == 1
    assert page.count("<tr>") == page.count("</tr>") == 1 + 7
    assert "3MN + N<br>(MN + N)" in page
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


def test_beside_gives_ratios_of_what_ran():
    columns = list(EXPERIMENTS["survey_counters"].schema)
    ran = dict.fromkeys(columns, 0) | {
        **{"package": "torch", "kernel": "our:norm", "direction": "forward", "missing": ""},
        **{"at": "M=2, N=8", "instruction_read_bytes": 7, "dram_read_bytes": 5},
    }
    absent = ran | {"missing": "PackageNotFoundError: none"}
    assert survey.beside(FRAME, pd.DataFrame([absent], columns=columns)).empty
    frame = survey.beside(FRAME, pd.DataFrame([absent, ran], columns=columns))
    [found] = frame.to_dict("records")
    assert found["least_reads"] == (least := (16 + 8) * 4)
    assert found["asked"] == (3 * 16 + 8) * 4 / least
    assert (found["requested"], found["beyond"]) == (7 / least, 5 / least)
