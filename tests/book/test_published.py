import pandas as pd

from memtraffic.kernels.softmax import naive
from memtraffic.meters.count import count
from memtraffic.meters.formula import formula
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close
from memtraffic_book import published


def test_softmax_argmax_is_right():
    x = matrix(5, 21)
    assert_close(published.softmax_argmax(x), naive.reference(x), x.dtype)


def test_softmax_argmax_also_writes_indices():
    assert str(formula(published.softmax_argmax)) == "reads 5MN + 2M, writes 3MN + 3M"
    [op, *_] = count(published.softmax_argmax, matrix(3, 5)).ops
    assert (op.name, op.written_elements, op.written_bytes) == ("max", 2 * 3, 3 * 4 + 3 * 8)


def test_load_bandwidth():
    frame = published.load_bandwidth()
    key = ["source", "series", "n_rows", "n_cols"]
    assert list(frame.columns) == [*key, "gb_per_s"]
    assert not frame.duplicated(key).any() and not frame.isna().any().any()
    assert frame["gb_per_s"].between(100, 5000).all()  # in GB/s, of one GPU


def test_verdicts_are_those_of_the_tables():
    found = {(it.source[-4:], it.claim[:10]): it for it in published.verdicts()}
    assert len(found) == 7
    holds = {year: found[year, "noticeably"].holds for year in ("2023", "2024", "2025")}
    assert holds == dict.fromkeys(holds, False)
    assert "faster at 49 of 98 widths, by a tenth at 26" in found["2024", "noticeably"].finding
    assert found["2023", "4x faster "].finding.startswith("2.62x to 3.46x")
    assert found["2023", "4x faster "].holds is False and found["2024", "4x faster "].holds is None
    assert found["2025", "about 4x f"].holds is True


def test_verdicts_depend_on_the_tables(monkeypatch):
    def table(ratio):
        rows = [
            ("a", series, 1, n, speed)
            for n in (1, 2)
            for series, speed in (
                ("triton", ratio),
                ("torch", 1.0),
                ("naive_jit", 1.0),
                ("naive", 1.0),
            )
        ]
        return pd.DataFrame(rows, columns=["source", "series", "n_rows", "n_cols", "gb_per_s"])

    for ratio, holds in ((1.05, [False] * 3), (1.2, [True, False, False]), (4.0, [True] * 3)):
        monkeypatch.setattr(published, "load_bandwidth", lambda ratio=ratio: table(ratio))
        assert [it.holds for it in published.verdicts()] == holds
