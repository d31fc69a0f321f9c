"""What the folded cells of `book/ship.ipynb` say of the recordings, and where they refuse to."""

import pandas as pd
import pytest
import torch

from memtraffic import device, gpus
from memtraffic_book import recording, tables
from memtraffic_book.chapters import ship

OURS = "memtraffic.softmax"


@pytest.fixture
def shown(monkeypatch):
    """The lines of each table that is shown."""
    found = []
    monkeypatch.setattr(
        tables, "display", lambda data, raw: found.append(data["text/plain"].splitlines())
    )
    return found


def frame(cases, dtype="float32"):
    """As `decide` gives it: for each (n, m) the times of torch, of QuACK and of ours, in µs."""
    rows = []
    for (n, m), times in cases.items():
        for impl, us in zip((ship.TORCH, "QuACK", OURS), times, strict=True):
            row = {"impl": impl, "n": n, "m": m, "dtype": dtype, "version": "1", "note": ""}
            for column in (ship.ON_GPU, ship.CALLED, ship.IN_GRAPH):
                row |= {column: us, f"{column}_p20": 0.99 * us, f"{column}_p80": 1.01 * us}
            rows.append(row)
    return pd.DataFrame(rows)


def test_answers_go_to_what_others_maintain(shown):
    times = {(49, 8): (5, 0, 5.01), (49, 64): (9, 0, 5), (128, 8): (9, 5, 5), (128, 64): (9, 6, 5)}
    found = ship.answers(frame(times))
    assert list(found) == [ship.TORCH, OURS, "QuACK", OURS]
    assert ship.answers(frame({(49, 8): (0, 0, 0)})).item() == "not measured"
    ship.show_decision({"float32": frame(times)})
    [lines] = shown
    assert lines[1:] == ["49 | torch ≤8, ours", "128 | QuACK ≤8, ours"]


def test_threshold_lies_where_the_answers_change():
    """At 8 x 1000 float32 numbers, 32 kB, torch is the answer; at 4096 x 1000, 16 MB, ours is."""
    times = {(1000, 8): (5, 6, 6), (1000, 64): (5, 6, 6), (1000, 4096): (20, 0, 10)}
    found = ship.threshold([frame(times)])
    assert (found.below, found.small, found.above, found.large) == (2, 2, 1, 1)
    assert 64 * 1000 * 4 / 1e6 < found.megabytes < 4096 * 1000 * 4 / 1e6
    assert found.share == pytest.approx(0.5)


def test_show_thresholds_refuses_a_size_that_tells_nothing():
    sizes = [(1000, 2**k) for k in range(3, 15)]
    mixed = {key: (5, 9, 9) if i % 2 else (9, 9, 5) for i, key in enumerate(sizes)}
    with pytest.raises(AssertionError, match="Called one by one"):
        ship.show_thresholds({"float32": frame(mixed), "float32, with gradient": frame(mixed)})


def test_show_wrong_names_the_error_and_refuses_ours(capsys):
    times = frame({(128, 8): (5, 0, 6)})
    times.loc[times["impl"] == "QuACK", "note"] = "wrong: NaN in 3 places, the first at (0, 0)"
    ship.show_wrong({"float32": times})
    said = capsys.readouterr().out
    assert "QuACK 1, 8 x 128, float32: wrong: NaN in 3 places\n" in said and "1 are wrong" in said
    times.loc[times["impl"] == OURS, "note"] = "wrong: 1 element"
    with pytest.raises(AssertionError, match="2 are wrong"):
        ship.show_wrong({"float32": times})


def test_claim_rivals_leaves_out_a_case_in_which_one_was_wrong(glued):
    times = frame({(1024, 4096): (20, 10, 10), (2048, 4096): (20, 0, 2), (1001, 4096): (20, 0, 10)})
    of_wrong = (times["impl"] == "QuACK") & (times["n"] == 2048)
    with pytest.raises(AssertionError, match="in 2 cases"):
        ship.claim_rivals({"float32": times})
    times.loc[of_wrong, "note"] = "wrong: NaN"
    ship.claim_rivals({"float32": times})
    assert glued["whole"] == "1.00x" and glued["odd"] == "0.50x"


@pytest.mark.parametrize("mode", ["live", "verify"])
def test_what_takes_minutes_on_an_h200_is_replayed_there(mode, in_mode, monkeypatch):
    in_mode(mode)
    monkeypatch.setattr(device, "this_gpu", lambda *index: gpus.find_gpu("H200"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, 140 * 2**30))
    monkeypatch.setattr(recording, "_run", lambda subject: pytest.fail(subject.id))
    assert ship.load()
    ship.draw_map()


def test_judges_of_the_exercises():
    def whole_parts(x):
        n = x.shape[1] // 128 * 128
        y = torch.zeros_like(x)
        y[:, :n] = torch.softmax(x[:, :n], dim=1)
        return y

    assert ship.right_by_the_table_alone(whole_parts)
    with pytest.raises(AssertionError, match="right at 781"):
        ship.right_by_the_table_alone(lambda x: torch.softmax(x, dim=1))
    with pytest.raises(AssertionError, match="a width of the table"):
        ship.right_by_the_table_alone(torch.zeros_like)
