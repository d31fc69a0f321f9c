"""The survey as a page shows it: ratios, the table, and counts beside counters."""

import pandas as pd
import pytest

from memtraffic_book import survey
from memtraffic_book.recording import RecordingError, to_csv

PASSES = pd.DataFrame(
    [
        ("our:sum", "forward", "MN", "M", "MN", "M", "", "", ""),
        ("our:norm", "forward", "3MN + N", "MN", "MN + N", "MN", "", "", ""),
        ("our:norm", "backward", "400", "100", "800", "200", "M=10, N=20", "kept: B<4", ""),
        ("our:mystery", "forward", "", "", "", "", "", "", "CountError: a <reason>"),
    ],
    columns=["kernel", "direction", *survey.AMOUNTS, "at", "note", "reason"],
)
FRAME = PASSES.assign(package="torch", version="2.0+cpu", inputs="M,N", gpu="")[[*survey.COLUMNS]]


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


def test_ratios_are_of_what_is_moved_to_the_least():
    passes, large = survey.ratios(FRAME), survey.LARGE
    assert list(passes["kernel"]) == ["our:sum", "our:norm", "our:norm"]
    assert list(passes["ratio"]) == [1, (4 * large + 1) / (2 * large + 1), 0.5]
    assert passes["moved"].iloc[0] == large**2 + large
    with pytest.raises(ValueError, match="K"):
        survey.evaluate("MK", M=3)


def test_show_has_a_line_for_each_pass(monkeypatch):
    """The kernel with the highest ratio stands on top; the least is there where it is less."""
    shown = {}
    monkeypatch.setattr(survey, "display", lambda data, raw: shown.update(data))
    survey.show(FRAME)
    page = shown["text/html"]
    assert "a &lt;reason&gt;" in page and "<reason>" not in page
    assert page.count("<details>") == page.count("</details>") == 1
    assert page.count("<tr>") == page.count("</tr>") == 1 + 7
    assert shown["text/plain"].splitlines() == [
        "torch.compile 2.0: 3 kernels, 3 passes, 2 of them move no more than they must",
        *("norm: M,N", "forward | 3MN + N (MN + N) | MN | 2.00x"),
        "backward | 400 (800) | 100 (200) | 0.50x",
        *("sum: M,N", "forward | MN | M | 1.00x"),
        *("mystery: M,N", "forward | CountError: a <reason>"),
    ]


def test_beside_gives_ratios_of_what_ran():
    ran = {"package": "torch", "kernel": "our:norm", "direction": "forward", "missing": ""}
    ran |= {"at": "M=2, N=8", "instruction_read_bytes": 7, "dram_read_bytes": 5}
    absent = ran | {"missing": "PackageNotFoundError: none"}
    [found] = survey.beside(FRAME, pd.DataFrame([absent, ran])).to_dict("records")
    assert found["least_reads"] == (least := (16 + 8) * 4)
    assert found["asked"] == (3 * 16 + 8) * 4 / least
    assert (found["requested"], found["beyond"]) == (7 / least, 5 / least)
