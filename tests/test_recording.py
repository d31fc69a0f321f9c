import json

import pandas as pd
import pytest

from memtraffic import machine, recording
from memtraffic.recording import (
    RecordingError,
    compare,
    drift,
    experiment,
    latest,
    read,
    tidy,
)
from memtraffic.traffic.counters import NoCounters

ABOUT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-11-21",
    "commit": "0" * 40,
}
LABEL = "Recorded on NVIDIA H200, 2026-11-21 (PyTorch 2.11.0, Triton 3.6.0).\n"
CALL = "timed([(4, 8), (2, 16)], scale=0.5)"


def timed(shapes, scale=1.0):
    rows = [['a, "b"', m, n, scale * m * n / 3, m * n * 10**7] for m, n in shapes]
    return pd.DataFrame(rows, columns=list(timed.columns))


timed.columns = ("impl", "m", "n", "us", "dram_read_bytes")


def other(shapes, scale=1.0):
    return timed(shapes, scale)


def no_counters(shapes):
    raise NoCounters("counters: no ncu")


def never(*args, **kwargs):
    raise AssertionError("ran in a replay")


def run(name="speed", fn=timed):
    return experiment(name, fn, [(4, 8), (2, 16)], scale=0.5)


@pytest.fixture
def in_mode(monkeypatch):
    """A function that sets the mode."""
    return lambda mode: monkeypatch.setenv("MEMTRAFFIC_MODE", mode)


@pytest.fixture
def book(tmp_path, monkeypatch, in_mode):
    """A folder with an empty folder of recordings; mode is `record`, and the GPU is called an H200."""
    (tmp_path / "recordings").mkdir()
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", str(tmp_path / "recordings"))
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(recording, "describe_machine", lambda: dict(ABOUT))
    in_mode("record")
    return tmp_path


@pytest.fixture
def recorded(book, in_mode):
    """The folder of one GPU with the recording `speed`; mode is `replay`."""
    run()
    in_mode("replay")
    return book / "recordings" / "nvidia-h200"


# ---- modes


@pytest.mark.parametrize(("gpu", "expected"), [(True, "live"), (False, "replay")])
@pytest.mark.parametrize("asked", [None, ""], ids=["unset", "empty"])
def test_the_mode_follows_from_the_machine(gpu, expected, asked, monkeypatch):
    monkeypatch.setattr(machine, "HAS_GPU", gpu)
    monkeypatch.delenv("MEMTRAFFIC_MODE", raising=False)
    if asked is not None:
        monkeypatch.setenv("MEMTRAFFIC_MODE", asked)
    assert recording.mode() == expected


@pytest.mark.parametrize("mode", recording.MODES)
def test_the_mode_may_be_asked_for(mode, in_mode):
    in_mode(mode)
    assert recording.mode() == mode


def test_an_unknown_mode(in_mode):
    in_mode("reply")
    with pytest.raises(
        RecordingError,
        match="MEMTRAFFIC_MODE is 'reply': give one of live, record, verify, replay",
    ):
        run()


# ---- record and replay


def test_a_recording_is_replayed(book, in_mode, capsys):
    first = run()
    in_mode("replay")
    timed_again = run(fn=timed)
    assert capsys.readouterr().out == 2 * LABEL
    pd.testing.assert_frame_equal(first, timed_again, check_exact=True)
    assert first["us"].tolist() == [5.33333, 5.33333]
    assert first["dram_read_bytes"].tolist() == [320000000, 320000000]


def test_a_replay_does_not_run(recorded, monkeypatch):
    never.columns, never.__qualname__ = timed.columns, "timed"
    assert len(run(fn=never)) == 2


def test_a_recording_is_the_same_byte_for_byte(recorded, in_mode):
    csv, about = (
        (recorded / name).read_bytes() for name in ("speed.csv", "machine.json")
    )
    assert recording.to_csv(read(recorded, "speed")).encode() == csv
    in_mode("record")
    run()
    assert (recorded / "speed.csv").read_bytes() == csv
    assert (recorded / "machine.json").read_bytes() == about


def test_what_a_recording_says_of_itself(recorded):
    about = json.loads((recorded / "machine.json").read_text(encoding="utf-8"))
    text = (recorded / "speed.csv").read_text(encoding="utf-8")
    assert about == ABOUT | {
        "experiments": {
            "speed": {"call": CALL, "rows": 2, "sha256": recording.checksum(text)}
        }
    }
    assert text.splitlines()[0] == "impl,m,n,us,dram_read_bytes"
    assert recording.load_machine(recorded) == about


def test_two_experiments_cannot_share_a_name(book):
    run()
    before = (book / "recordings/nvidia-h200/speed.csv").read_bytes()
    other.columns = timed.columns
    with pytest.raises(
        RecordingError,
        match=r"speed\.csv: two experiments share this name, timed\(.*\) and other\(",
    ):
        run(fn=other)
    assert (book / "recordings/nvidia-h200/speed.csv").read_bytes() == before


def test_a_second_experiment_keeps_the_first(book):
    run("speed")
    run("again")
    folder = book / "recordings/nvidia-h200"
    assert sorted(recording.load_machine(folder)["experiments"]) == ["again", "speed"]
    assert len(read(folder, "speed")) == len(read(folder, "again")) == 2


def test_live_measures_now_and_records_nothing(book, in_mode, capsys):
    in_mode("live")
    assert run()["us"].tolist() == [5.33333, 5.33333]
    assert capsys.readouterr().out == "Measured now on NVIDIA H200.\n"
    assert list((book / "recordings").iterdir()) == []


@pytest.mark.parametrize("mode", ["live", "record", "verify"])
def test_a_result_must_have_the_columns_it_promises(
    recorded, in_mode, mode, monkeypatch
):
    in_mode(mode)
    monkeypatch.setattr(other, "columns", ("impl", "us"), raising=False)
    with pytest.raises(
        RecordingError,
        match=r"speed: other\(.*\) returned columns \['impl', 'm', .*\], not \['impl', 'us'\]",
    ):
        run(fn=other)


def test_without_counters_live_shows_the_recording(book, in_mode, capsys, monkeypatch):
    monkeypatch.setattr(no_counters, "columns", timed.columns, raising=False)
    text = recording.to_csv(timed([(4, 8)]))
    recording.write(recording.here(), "moved", "no_counters([(4, 8)])", text)
    in_mode("live")
    assert len(experiment("moved", no_counters, [(4, 8)])) == 1
    assert (
        capsys.readouterr().out == "counters: no ncu, so this is a recording.\n" + LABEL
    )
    for mode in ("record", "verify"):
        in_mode(mode)
        with pytest.raises(NoCounters):
            experiment("moved", no_counters, [(4, 8)])


def test_other_failures_are_not_hidden_by_a_recording(recorded, in_mode):
    in_mode("live")
    with pytest.raises(AssertionError, match="ran in a replay"):
        run(fn=never)


# ---- what can be wrong with a recording


def edit(folder, change):
    path = folder / "speed.csv"
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def edit_entry(folder, **changes):
    path = folder / "machine.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    about["experiments"]["speed"] |= changes
    path.write_text(json.dumps(about), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda folder: (folder / "speed.csv").unlink(),
            r"speed\.csv: missing",
            id="missing",
        ),
        pytest.param(
            lambda folder: edit(
                folder, lambda text: "".join(text.splitlines(True)[:-1])
            ),
            r"speed\.csv: truncated, 1 of 2 rows",
            id="truncated-by-a-row",
        ),
        pytest.param(
            lambda folder: edit(folder, lambda text: text[:-3]),
            r"speed\.csv: truncated, 2 of 2 rows",
            id="truncated-in-a-row",
        ),
        pytest.param(
            lambda folder: edit(folder, lambda text: ""),
            r"speed\.csv: truncated, 0 of 2 rows",
            id="empty",
        ),
        pytest.param(
            lambda folder: edit(
                folder, lambda text: text.replace("5.33333", "4.33333", 1)
            ),
            r"speed\.csv: changed since it was recorded",
            id="edited",
        ),
        pytest.param(
            lambda folder: edit(folder, lambda text: text + text.splitlines(True)[-1]),
            r"speed\.csv: changed since it was recorded",
            id="row-added",
        ),
        pytest.param(
            lambda folder: (folder / "machine.json").unlink(),
            "no recording",
            id="no-machine-json",
        ),
        pytest.param(
            lambda folder: (folder / "machine.json").write_text("{", encoding="utf-8"),
            r"machine\.json: ",
            id="broken-json",
        ),
    ],
)
def test_a_damaged_recording_names_the_file_and_what_mends_it(recorded, spoil, message):
    spoil(recorded)
    with pytest.raises(RecordingError, match=message) as caught:
        run()
    assert "`make record`" in str(caught.value)
    assert str(recorded.parent) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recording_of_other_columns(recorded):
    text = "impl,us\na,1\nb,2\n"
    edit(recorded, lambda _: text)
    edit_entry(recorded, sha256=recording.checksum(text))
    with pytest.raises(
        RecordingError,
        match=r"speed\.csv: has columns \['impl', 'us'\], not \['impl', 'm', .*`make record`",
    ):
        run()


def test_a_recording_of_another_call(recorded):
    with pytest.raises(
        RecordingError,
        match=r"speed\.csv: is a recording of timed\(.*0\.5\), not of timed\(.*0\.25\)",
    ):
        experiment("speed", timed, [(4, 8), (2, 16)], scale=0.25)


def test_an_experiment_never_recorded(recorded):
    with pytest.raises(RecordingError, match=r"slowness\.csv: missing; `make record`"):
        run("slowness")


def test_a_missing_machine_json_is_named(recorded):
    (recorded / "machine.json").unlink()
    with pytest.raises(RecordingError, match=r"machine\.json: .*`make record`"):
        read(recorded, "speed")


# ---- where recordings are


def test_the_newest_folder_is_replayed(book):
    for folder, date in (
        ("a100", "2026-11-20"),
        ("h200", "2026-11-21"),
        ("l4", "2025-12-31"),
    ):
        path = book / "recordings" / folder
        path.mkdir()
        (path / "machine.json").write_text(
            json.dumps(ABOUT | {"date": date, "experiments": {}}), encoding="utf-8"
        )
    (book / "recordings" / "empty").mkdir()
    assert latest().name == "h200"
    assert latest(book / "recordings") == latest()


def test_no_recording_at_all(book, in_mode):
    in_mode("replay")
    with pytest.raises(
        RecordingError,
        match="recordings: no recording; `make record` on a GPU makes it anew",
    ):
        run()


def test_the_folder_is_found_from_the_notebook_and_from_the_root(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMTRAFFIC_RECORDINGS", raising=False)
    (tmp_path / "book" / "recordings").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert recording.root().resolve() == tmp_path / "book" / "recordings"
    monkeypatch.chdir(tmp_path / "book")
    assert recording.root().resolve() == tmp_path / "book" / "recordings"
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", "elsewhere")
    assert str(recording.root()) == "elsewhere"


def test_a_call_as_text():
    assert (
        recording.describe(timed, [(1, 2)], "x", scale=0.5)
        == "timed([(1, 2)], 'x', scale=0.5)"
    )
    assert recording.describe(timed, other) == "timed(other)"


def test_functions_by_name_are_told_by_their_names():
    fns = {"ours": lambda x: x, "copy": other}
    assert (
        recording.describe(timed, fns, [(1, 2)]) == "timed({'ours', 'copy'}, [(1, 2)])"
    )


# ---- verify and drift


def test_verify_keeps_the_new_and_shows_the_old_label(recorded, in_mode, capsys):
    capsys.readouterr()
    before = (recorded / "speed.csv").read_bytes()
    in_mode("verify")
    run()
    assert capsys.readouterr().out == LABEL
    book = recorded.parents[1]
    kept = book / "_build" / "verify" / "speed.csv"
    assert kept.read_bytes() == before == (recorded / "speed.csv").read_bytes()
    assert drift(book) == []
    kept.write_text(before.decode().replace("5.33333", "9.33333", 1), encoding="utf-8")
    assert drift(book) == ['speed row 0 (a, "b"): us was 5.33333, is 9.33333 (+75.0%)']


def test_verify_refuses_what_is_not_recorded(recorded, in_mode):
    in_mode("verify")
    with pytest.raises(RecordingError, match=r"slowness\.csv: missing"):
        run("slowness")


def test_drift_needs_every_experiment_measured(recorded):
    with pytest.raises(
        RecordingError, match=r"speed\.csv: not measured; run `make verify`"
    ):
        drift(recorded.parents[1])


def test_drift_needs_the_recorded_gpu(recorded, monkeypatch):
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA L4")
    with pytest.raises(
        RecordingError,
        match="recorded on NVIDIA H200, cannot be compared with NVIDIA L4",
    ):
        drift(recorded.parents[1])


@pytest.mark.parametrize(
    ("was", "now", "drifts"),
    [
        pytest.param({"us": 100.0}, {"us": 109.9}, False, id="within-10-percent"),
        pytest.param({"us": 100.0}, {"us": 110.1}, True, id="past-10-percent"),
        pytest.param(
            {"us": 100.0}, {"us": 89.9}, True, id="faster-by-more-than-10-percent"
        ),
        pytest.param({"us": 19.9}, {"us": 23.8}, False, id="short-within-20-percent"),
        pytest.param({"us": 19.9}, {"us": 23.9}, True, id="short-past-20-percent"),
        pytest.param({"us": 20.0}, {"us": 23.0}, True, id="20-us-is-not-short"),
        pytest.param(
            {"us": 10.0, "gb_per_s": 100.0},
            {"us": 10.0, "gb_per_s": 119.0},
            False,
            id="bandwidth-of-a-short-row",
        ),
        pytest.param(
            {"gb_per_s": 100.0},
            {"gb_per_s": 119.0},
            True,
            id="bandwidth-without-a-time",
        ),
        pytest.param(
            {"us_p20": 1.0, "us_p80": 2.0},
            {"us_p20": 9.0, "us_p80": 0.1},
            False,
            id="percentiles-are-not-compared",
        ),
        pytest.param(
            {"us": 50.0, "host_first_ms": 100.0, "host_us": 5.0},
            {"us": 50.0, "host_first_ms": 900.0, "host_us": 1.0},
            False,
            id="the-host-is-not-compared",
        ),
        pytest.param(
            {"us": 50.0, "tuned_us": 40.0},
            {"us": 50.0, "tuned_us": 45.0},
            True,
            id="a-second-time-is-compared",
        ),
        pytest.param({"kernel": "a"}, {"kernel": "a"}, False, id="same-text"),
        pytest.param({"kernel": "a"}, {"kernel": "b"}, True, id="other-text"),
        pytest.param({"us": 1.0}, {"us": ""}, True, id="number-became-text"),
        pytest.param({"n": 4096}, {"n": 4096}, False, id="same-whole-number"),
        pytest.param(
            {"dram_read_bytes": 0},
            {"dram_read_bytes": 2**20},
            False,
            id="bytes-within-the-noise",
        ),
        pytest.param(
            {"dram_read_bytes": 0},
            {"dram_read_bytes": 2**20 + 1},
            True,
            id="bytes-past-the-noise",
        ),
        pytest.param(
            {"dram_read_bytes": 10**9},
            {"dram_read_bytes": 10**9 + 10**8},
            False,
            id="within-10-percent-of-many-bytes",
        ),
        pytest.param(
            {"dram_read_bytes": 10**9},
            {"dram_read_bytes": 10**9 + 10**8 + 1},
            True,
            id="past-10-percent-of-many-bytes",
        ),
        pytest.param({"sectors": 0}, {"sectors": 1}, True, id="only-bytes-have-noise"),
    ],
)
def test_compare(was, now, drifts):
    misses = compare("speed", pd.DataFrame([was]), pd.DataFrame([now]))
    assert bool(misses) == drifts
    assert all(miss.startswith("speed row 0 (") for miss in misses)


def test_compare_names_each_value():
    recorded = pd.DataFrame(
        [{"impl": "copy", "us": 100.0}, {"impl": "naive", "us": 100.0}]
    )
    measured = pd.DataFrame(
        [{"impl": "copy", "us": 100.0}, {"impl": "naive", "us": 50.0}]
    )
    assert compare("speed", recorded, measured) == [
        "speed row 1 (naive): us was 100.0, is 50.0 (-50.0%)"
    ]


def test_compare_counts_the_rows():
    frame = pd.DataFrame([{"us": 1.0}, {"us": 1.0}])
    assert compare("speed", frame, frame[:1]) == ["speed: 1 rows measured, 2 recorded"]


# ---- notebooks


def test_tidy_drops_what_differs_from_run_to_run():
    nbformat = pytest.importorskip("nbformat")
    error = nbformat.v4.new_output(
        "error",
        ename="ValueError",
        evalue="781 columns",
        traceback=["\x1b[31m----", "/home/reader/src/fused.py in softmax"],
    )
    stream = nbformat.v4.new_output("stream", name="stdout", text="kept\n")
    cell = nbformat.v4.new_code_cell(
        "softmax(x)",
        outputs=[error, stream],
        metadata={"execution": {"shell.execute_reply": "2026-11-21"}, "tags": ["kept"]},
    )
    notebook = nbformat.v4.new_notebook(
        cells=[cell, nbformat.v4.new_markdown_cell("text")],
        metadata={"language_info": {"name": "python"}},
    )
    tidied = tidy(notebook)
    assert tidied is notebook
    assert cell.outputs[0]["traceback"] == ["ValueError: 781 columns"]
    assert cell.outputs[1]["text"] == "kept\n"
    assert cell.metadata == {"tags": ["kept"]}
    assert "language_info" not in notebook.metadata


MEASURE = """
import os, pathlib
folder = pathlib.Path(os.environ["MEMTRAFFIC_RECORDINGS"]) / "nvidia-h200"
folder.mkdir(exist_ok=True)
(folder / "{name}.csv").write_text(os.environ["MEMTRAFFIC_MODE"])
{last}
"""


def test_a_book_is_recorded_whole_or_not_at_all(book, monkeypatch, capsys):
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    monkeypatch.setattr(machine, "require_gpu", lambda what: None)

    def notebook(name, last):
        cell = nbformat.v4.new_code_cell(MEASURE.format(name=name, last=last))
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), book / f"{name}.ipynb")

    folder = book / "recordings" / "nvidia-h200"
    notebook("a", "1 + 1")
    recording.record_book(book)
    assert (folder / "a.csv").read_text(encoding="utf-8") == "record"
    assert (
        nbformat.read(book / "a.ipynb", 4).cells[0].outputs[0].data["text/plain"] == "2"
    )

    notebook("a", "2 + 2")
    notebook("b", "1 / 0")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        recording.record_book(book)
    assert [path.name for path in folder.iterdir()] == ["a.csv"]
    assert nbformat.read(book / "a.ipynb", 4).cells[0].outputs == []


@pytest.mark.skipif(not machine.HAS_GPU, reason="needs a GPU")
def test_a_recording_names_its_machine():
    about = recording.describe_machine()
    assert set(about) == set(ABOUT)
    assert about["gpu"] == machine.gpu_name()
    assert "/" not in about["torch"]


def test_the_limits_of_drift(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "gpu_name", lambda: "G")
    about = {"gpu": "G", "date": "2026-01-01"}
    monkeypatch.setattr(recording, "describe_machine", lambda: about)
    kept = tmp_path / "_build" / "verify"
    kept.mkdir(parents=True)
    was = "us,dram_read_bytes\n100,1000\n10,1000\n"
    now = f"us,dram_read_bytes\n111,{2**20 + 1002}\n11.5,1000\n"
    for name, text in (("a", now), ("b", was)):
        recording.write(tmp_path / "recordings" / "g", name, f"{name}()", was)
        (kept / f"{name}.csv").write_text(text, encoding="utf-8")
    found = [miss.split(":")[1].split()[0] for miss in recording.drift(tmp_path)]
    assert found == ["us", "dram_read_bytes"]


def test_text_that_looks_missing_is_text():
    read = recording.from_csv("impl,us\nNA,1\nNone,2\n")
    assert read["impl"].tolist() == ["NA", "None"]
