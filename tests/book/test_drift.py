import dataclasses
import shutil

import pandas as pd
import pytest
from cases import cases

from memtraffic_book import catalog, recording
from memtraffic_book.catalog import BENCH, COUNTERS, DECIDED, Experiment, columns
from memtraffic_book.drift import ORIGIN, VALUES, compare, measure_again, read_drift
from memtraffic_book.recording import DRIFT, RecordingError

COLUMNS = {it.name: it for it in (*BENCH, *COUNTERS, *DECIDED, *columns("refused"))}
SHORT, MANY = 19.9, 10**9  # µs, bytes
SHORT_ROW = {"us": SHORT, "gb_per_s": 100.0}


def compared(was, now):
    """What `compare` says of rows with these columns."""
    subject = Experiment("speed", pd.DataFrame, {}, tuple(COLUMNS[name] for name in was[0]))
    return compare(subject, pd.DataFrame(was), pd.DataFrame(now))


@cases(
    ("was", "now", "drifts", "kept"),
    {
        "within-10-percent": ({"us": 100.0}, {"us": 109.9}, 0, 1),
        "past-10-percent": ({"us": 100.0}, {"us": 110.1}, 1, 1),
        "faster": ({"us": 100.0}, {"us": 89.9}, 1, 1),
        "short-within-20-percent": ({"us": SHORT}, {"us": 23.8}, 0, 1),
        "short-past-20-percent": ({"us": SHORT}, {"us": 23.9}, 1, 1),
        "20-us-is-not-short": ({"us": 20.0}, {"us": 23.0}, 1, 1),
        "rate-in-a-short-row": (SHORT_ROW, SHORT_ROW | {"gb_per_s": 119.0}, 0, 2),
        "not-compared": ({"us_p20": 1.0, "kernel": "a"}, {"us_p20": 9.0, "kernel": "b"}, 0, 0),
        "text": ({"impl": "a"}, {"impl": "b"}, 1, 0),
        "number-became-text": ({"us": 1.0}, {"us": ""}, 1, 0),
        "text-became-number": ({"dram_read_bytes": ""}, {"dram_read_bytes": 1}, 1, 0),
        "within-noise": ({"dram_read_bytes": 0}, {"dram_read_bytes": 2**20}, 0, 0),
        "past-noise": ({"dram_read_bytes": 0}, {"dram_read_bytes": 2**20 + 1}, 1, 0),
        "few": ({"dram_read_bytes": 10 * 2**20 - 1}, {"dram_read_bytes": 10 * 2**20}, 0, 0),
        "many": ({"dram_read_bytes": MANY}, {"dram_read_bytes": MANY + MANY // 10}, 0, 1),
    },
)
def test_compare(was, now, drifts, kept):
    """Of noise, nothing and text no difference is kept."""
    sentences, values = compared([was], [now])
    assert (len(sentences), len(values)) == (drifts, kept)
    assert all(sentence.startswith("speed row 0 (") for sentence in sentences)


def test_compare_names_each_value():
    was = [{"impl": "copy", "us": 100.0}, {"impl": "naive", "us": 100.0}]
    now = [{"impl": "copy", "us": 100.0}, {"impl": "naive", "us": 50.0}]
    sentences, values = compared(was, now)
    assert sentences == ["speed row 1 (naive): us was 100.0, is 50.0 (-50.0%)"]
    assert values.to_dict("records") == [
        {"experiment": "speed", "column": "us", "unit": "µs", "row": row, "recorded": 100.0}
        | {"measured": 100.0 * (1 + change), "difference": change, "tolerance": 0.1}
        for row, change in enumerate((0, -0.5))
    ]
    sentences, values = compared(was, now[:1])
    assert sentences == ["speed: 1 rows measured, 2 recorded"] and values.empty


def test_compare_leaves_out_packages_that_are_absent():
    def row(us, note, impl="Liger", version=""):
        return [{"impl": impl, "us": us, "version": version, "note": note}]

    here, gone = row(50.0, "", version="1"), row(0.0, "absent: x is not installed")
    told, other = row(0.0, "refused: why"), row(0.0, "absent: x", impl="QuACK")
    assert compared(here, gone)[0] == compared(gone, here)[0] == []
    assert compared(here, gone)[1].empty
    assert compared(here, row(51.0, "", version="2"))[0] == []
    assert [len(compared(*p)[0]) for p in ((here, told), (told, here), (here, other))] == [1, 1, 2]
    assert compared([{"us": 5.0, "refused": ""}], [{"us": 0.0, "refused": "absent: no x"}])[0] == []


# ---- measured again


def test_measure_again_tells_what_drifted_and_keeps_the_worst_of_each_column(recorded, capsys):
    before = {path: path.read_bytes() for path in recorded.h200.iterdir()}
    measure = catalog.EXPERIMENTS["speed"].measure

    def again(shapes, scale):
        frame = measure(shapes, scale)
        return frame.assign(us=frame["us"] * [1.1, 0.75], dram_read_bytes=[32 * 10**7, 31 * 10**7])

    recorded.changes(measure=again)
    recorded.machine["driver"] = "581.2"  # of another machine
    assert measure_again() == ['speed row 1 (a, "b"): us was 5.33333, is 4.0 (-25.0%)']
    assert {path: path.read_bytes() for path in before} == before
    capsys.readouterr()
    frame = read_drift()
    assert list(frame.columns) == [*VALUES, *ORIGIN]
    assert frame["column"].tolist() == ["us", "dram_read_bytes"]
    assert frame["row"].tolist() == [1, 1]
    assert frame["difference"].tolist() == pytest.approx([-0.25, -1 / 32], rel=1e-4)
    assert frame["tolerance"].tolist() == [0.2, 0.2]  # of rows that take less than 20 µs
    assert frame.loc[0, ORIGIN].tolist() == [recorded.date, 40 * "0", "581.2", "2.11.0", "3.6.0"]
    assert capsys.readouterr().out == (
        f"A second measurement, on NVIDIA H200: {recorded.date} "
        "(driver 581.2, PyTorch 2.11.0, Triton 3.6.0).\n"
    )


def test_measure_again_needs_every_recording(recorded):
    speed = recorded.slows(1.3)
    recorded.lists(speed, dataclasses.replace(speed, id="slowness"))
    with pytest.raises(RecordingError, match=r"slowness\.csv: missing"):
        measure_again()


def test_measure_again_on_another_gpu(recorded):
    """Another GPU is compared with its own recordings, never with the published ones."""
    recorded.machine["gpu"] = "NVIDIA L4"
    with pytest.raises(RecordingError, match="nvidia-l4"):
        measure_again()
    recorded.record(folder=recorded.recordings / "nvidia-l4")
    assert measure_again() == []
    assert not (recorded.h200 / DRIFT).exists()


def test_measure_again_keeps_what_it_did_not_measure(recorded):
    speed = catalog.EXPERIMENTS["speed"]
    others = [dataclasses.replace(speed, id=id) for id in ("before", "after", "gone")]
    recorded.lists(others[0], speed, others[1], others[2])
    recorded.record(*others)
    measure_again()
    recorded.lists(others[0], speed, others[1])
    recorded.machine["driver"] = "581.2"
    shutil.rmtree(recording.folder_of_verify())
    measure_again(["speed"])
    frame = read_drift()
    assert frame["experiment"].tolist() == [id for id in ("before", "speed", "after") for _ in "ab"]
    drivers = frame.drop_duplicates("experiment")["driver"].tolist()
    assert drivers == ["580.1", "581.2", "580.1"]


def test_measure_again_of_absent_packages_and_of_text_has_nothing_to_keep(recorded, capsys):
    gone = pd.DataFrame({"impl": ["a", "b"], "us": 0.0, "note": ["absent: no a", ""]})
    columns = tuple(COLUMNS[name] for name in gone)
    speed = recorded.changes(measure=lambda: gone, arguments={}, columns=columns)
    recorded.record(speed)
    assert measure_again() == []
    assert capsys.readouterr().out.endswith("the packages of 1 of 2 rows are absent here\n")
    assert read_drift().empty


def test_read_drift_of_nothing_or_of_older_recordings(recorded):
    with pytest.raises(RecordingError, match=r"drift\.csv: missing.*memtraffic_book drift"):
        read_drift()
    measure_again()
    recorded.record(recorded.slows(0.5))
    with pytest.raises(RecordingError, match=r"speed was recorded anew.*drift speed"):
        read_drift()
