import dataclasses

import pandas as pd
import pytest
from cases import cases

from memtraffic_book import catalog, drift
from memtraffic_book.catalog import BENCH, COMPARED, COUNTERS, Experiment, columns
from memtraffic_book.drift import ORIGIN, VALUES, compare, measure_again
from memtraffic_book.recording import DRIFT, RecordingError, experiment

COLUMNS = {column.name: column for column in (*BENCH, *COUNTERS, *columns("copy_us"))}
SHORT, LONG = 19.9, 20.0  # µs


SHORT_ROW = {"us": SHORT, "gb_per_s": 100.0}
MANY = 10**9  # bytes


@cases(
    ("was", "now", "drifts"),
    {
        "within-10-percent": ({"us": 100.0}, {"us": 109.9}, False),
        "past-10-percent": ({"us": 100.0}, {"us": 110.1}, True),
        "faster": ({"us": 100.0}, {"us": 89.9}, True),
        "short-within-20-percent": ({"us": SHORT}, {"us": 23.8}, False),
        "short-past-20-percent": ({"us": SHORT}, {"us": 23.9}, True),
        "20-us-is-not-short": ({"us": LONG}, {"us": 23.0}, True),
        "rate-in-a-short-row": (SHORT_ROW, SHORT_ROW | {"gb_per_s": 119.0}, False),
        "rate-without-a-time": ({"gb_per_s": 100.0}, {"gb_per_s": 119.0}, True),
        "not-compared": ({"us_p20": 1.0, "kernel": "a"}, {"us_p20": 9.0, "kernel": "b"}, False),
        "second-time": ({"us": 50.0, "copy_us": 40.0}, {"us": 50.0, "copy_us": 45.0}, True),
        "text": ({"impl": "a"}, {"impl": "b"}, True),
        "number-became-text": ({"us": 1.0}, {"us": ""}, True),
        "width": ({"us": 1.0, "n": 4096}, {"us": 1.0, "n": 4097}, True),
        "within-noise": ({"dram_read_bytes": 0}, {"dram_read_bytes": 2**20}, False),
        "past-noise": ({"dram_read_bytes": 0}, {"dram_read_bytes": 2**20 + 1}, True),
        "many": ({"dram_read_bytes": MANY}, {"dram_read_bytes": MANY + MANY // 10}, False),
        "past-many": ({"dram_read_bytes": MANY}, {"dram_read_bytes": MANY + MANY // 10 + 1}, True),
        "only-bytes-have-noise": ({"l2_write_sectors": 0}, {"l2_write_sectors": 1}, True),
    },
)
def test_compare(was, now, drifts):
    subject = Experiment("speed", pd.DataFrame, {}, tuple(COLUMNS[name] for name in was))
    sentences, _ = compare(subject, pd.DataFrame([was]), pd.DataFrame([now]))
    assert bool(sentences) == drifts
    assert all(sentence.startswith("speed row 0 (") for sentence in sentences)


def test_compare_names_each_value():
    subject = Experiment("speed", pd.DataFrame, {}, (COLUMNS["impl"], COLUMNS["us"]))
    recorded = pd.DataFrame([{"impl": "copy", "us": 100.0}, {"impl": "naive", "us": 100.0}])
    measured = pd.DataFrame([{"impl": "copy", "us": 100.0}, {"impl": "naive", "us": 50.0}])
    sentences, values = compare(subject, recorded, measured)
    assert sentences == ["speed row 1 (naive): us was 100.0, is 50.0 (-50.0%)"]
    assert values.to_dict("records") == [
        {"experiment": "speed", "column": "us", "unit": "µs", "row": row, "recorded": 100.0}
        | {"measured": 100.0 * (1 + change), "difference": change, "tolerance": 0.1}
        for row, change in enumerate((0, -0.5))
    ]
    sentences, values = compare(subject, recorded, measured[:1])
    assert sentences == ["speed: 1 rows measured, 2 recorded"] and values.empty


def test_compare_leaves_out_packages_that_are_absent():
    columns = ("impl", "us", "version", "note")
    subject = Experiment(
        "speed", pd.DataFrame, {}, tuple(it for it in COMPARED if it.name in columns)
    )

    def frame(us, note, impl="Liger", version=""):
        return pd.DataFrame([[impl, us, version, note]], columns=columns)

    here, gone = frame(50.0, "", version="1"), frame(0.0, "absent: x is not installed")
    refused = frame(0.0, "refused: why")

    def drifted(was, now):
        return len(compare(subject, was, now)[0])

    assert drifted(here, gone) == drifted(gone, here) == 0
    assert compare(subject, here, gone)[1].empty
    assert drifted(here, frame(51.0, "", version="2")) == 0
    assert drifted(here, refused) == drifted(refused, here) == 1
    assert drifted(here, frame(0.0, "absent: x", impl="QuACK")) == 2


def test_measure_again(recorded, capsys):
    assert measure_again() == measure_again(["speed"]) == []
    (recorded.h200 / DRIFT).unlink()
    before = {path: path.read_bytes() for path in recorded.h200.iterdir()}
    measure = catalog.EXPERIMENTS["speed"].measure
    recorded.changes(measure=lambda shapes, scale: measure(shapes, 1.3 * scale))
    capsys.readouterr()
    [first, second] = measure_again()
    assert first == 'speed row 0 (a, "b"): us was 5.33333, is 6.93333 (+30.0%)'
    assert second.startswith("speed row 1")
    assert capsys.readouterr().out == "speed: drifted\n"
    assert (recorded.h200 / DRIFT).is_file()
    assert {path: path.read_bytes() for path in before} == before


def test_measure_again_takes_what_verify_has_measured(recorded, in_mode):
    """Re-executing the notebooks measures everything once; comparing it needs no second run."""
    in_mode("verify")
    measure = catalog.EXPERIMENTS["speed"].measure
    recorded.changes(measure=lambda shapes, scale: measure(shapes, 1.3 * scale))
    experiment("speed")
    recorded.changes(measure=lambda **arguments: pytest.fail("measured twice"))
    assert len(measure_again()) == 2


def test_measure_again_needs_every_recording_before_it_measures(recorded):
    speed = catalog.EXPERIMENTS["speed"]
    measured = []
    recorded.changes(measure=lambda **arguments: measured.append(1))
    recorded.lists(catalog.EXPERIMENTS["speed"], dataclasses.replace(speed, id="slowness"))
    with pytest.raises(RecordingError, match=r"slowness\.csv: missing"):
        measure_again()
    assert measured == []


def test_measure_again_on_another_gpu(recorded):
    """Another GPU is compared with its own recordings, never with the published ones."""
    recorded.machine["gpu"] = "NVIDIA L4"
    with pytest.raises(RecordingError, match="nvidia-l4"):
        measure_again()
    recorded.record(folder=recorded.recordings / "nvidia-l4")
    assert measure_again() == []


# ---- how far apart: drift.csv


def rows(*dicts):
    return pd.DataFrame(dicts)


def test_values_leave_out_noise_and_nothing():
    subject = Experiment("speed", pd.DataFrame, {}, (COLUMNS["dram_read_bytes"],))
    recorded = rows(*({"dram_read_bytes": value} for value in (0, 10 * 2**20 - 1, 10**9)))
    measured = rows(*({"dram_read_bytes": value} for value in (2**21, 2**20, 10**9 + 10**7)))
    [most] = compare(subject, recorded, measured)[1].to_dict("records")
    assert (most["row"], most["difference"]) == (2, pytest.approx(0.01))
    assert compare(subject, rows({"dram_read_bytes": ""}), measured[:1])[1].empty


def test_drift_has_the_value_of_each_column_that_differs_most(recorded):
    measure = catalog.EXPERIMENTS["speed"].measure

    def again(shapes, scale):
        frame = measure(shapes, scale)
        return frame.assign(us=frame["us"] * [0.98, 1.05], dram_read_bytes=[32 * 10**7, 31 * 10**7])

    recorded.changes(measure=again)
    assert measure_again() == []
    found = drift.read_drift().set_index("column")
    assert found["row"].tolist() == [1, 1] and list(found.index) == ["us", "dram_read_bytes"]
    assert found["difference"]["us"] == pytest.approx(0.05, rel=1e-3)
    assert found["tolerance"]["us"] == 0.2  # of rows that take less than 20 µs


def test_read_drift_of_what_was_measured_again(recorded, capsys):
    measure = catalog.EXPERIMENTS["speed"].measure
    recorded.changes(measure=lambda shapes, scale: measure(shapes, 1.03 * scale))
    recorded.machine["driver"] = "581.2"  # of another machine
    assert measure_again() == []
    capsys.readouterr()
    frame = drift.read_drift()
    assert list(frame.columns) == [*VALUES, *ORIGIN]
    assert frame["column"].tolist() == ["us", "dram_read_bytes"]
    assert frame["difference"].tolist() == pytest.approx([0.03, 0], rel=1e-4)
    assert frame.loc[0, ORIGIN].tolist() == [recorded.date, 40 * "0", "581.2", "2.11.0", "3.6.0"]
    assert capsys.readouterr().out == (
        f"A second measurement, on NVIDIA H200: {recorded.date} "
        "(driver 581.2, PyTorch 2.11.0, Triton 3.6.0).\n"
    )


def test_measure_again_keeps_what_it_did_not_measure(recorded):
    speed = catalog.EXPERIMENTS["speed"]
    others = [dataclasses.replace(speed, id=id) for id in ("before", "after", "gone")]
    recorded.lists(others[0], speed, others[1], others[2])
    recorded.record(*others)
    measure_again()
    recorded.lists(others[0], speed, others[1])
    recorded.machine["driver"] = "581.2"
    measure_again(["speed"])
    frame = drift.read_drift()
    assert frame["experiment"].tolist() == [id for id in ("before", "speed", "after") for _ in "ab"]
    drivers = frame.drop_duplicates("experiment")["driver"].tolist()
    assert drivers == ["580.1", "581.2", "580.1"]


def test_read_drift_of_nothing_or_of_older_recordings(recorded):
    with pytest.raises(RecordingError, match=r"drift\.csv: missing.*memtraffic_book drift"):
        drift.read_drift()
    measure_again()
    measure = catalog.EXPERIMENTS["speed"].measure
    faster = recorded.changes(measure=lambda shapes, scale: measure(shapes, 0.5 * scale))
    recorded.record(faster)
    with pytest.raises(RecordingError, match=r"speed was recorded anew.*drift speed"):
        drift.read_drift()


def test_measure_again_without_anything_to_compare(recorded):
    """An experiment whose values must all be equal has no row."""
    recorded.changes(measure=catalog.EXPERIMENTS["speed"].measure)
    only = dataclasses.replace(
        catalog.EXPERIMENTS["speed"],
        id="only",
        measure=lambda: rows({"impl": "a"}),
        arguments={},
        columns=(COLUMNS["impl"],),
    )
    recorded.lists(only)
    recorded.record(only)
    assert measure_again() == []
    assert drift.read_drift().empty
