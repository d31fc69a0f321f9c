import dataclasses
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import triton
from cases import cases

from memtraffic import device
from memtraffic.errors import CountersUnavailable
from memtraffic.kernels.softmax.split import TooManyPrograms
from memtraffic_book import catalog, drift, recording
from memtraffic_book.catalog import Column, Needs
from memtraffic_book.recording import (
    RecordingError,
    experiment,
    experiments,
    experiments_for_verdicts,
    kept_path,
    read,
    root,
)
from memtraffic_book.text import claim

LABEL = "Recorded on NVIDIA H200 (PyTorch 2.11.0, Triton 3.6.0).\n"
BOOK = Path(__file__).resolve().parents[2] / "book"


def never(**arguments):
    raise AssertionError("measured in a replay")


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- modes


def test_mode_follows_from_the_machine_unless_it_is_chosen(monkeypatch, recorded, in_mode):
    for gpu, expected in ((True, "live"), (False, "replay")):
        monkeypatch.setattr(device, "HAS_GPU", gpu)
        in_mode("")
        assert recording.mode() == expected
        monkeypatch.delenv("MEMTRAFFIC_MODE")
        assert recording.mode() == expected
        for mode in ("live", "verify", "replay"):
            in_mode(mode)
            assert recording.mode() == mode
    in_mode("record")
    with pytest.raises(RecordingError, match=r"MEMTRAFFIC_MODE.*record.*live, verify, replay"):
        experiment("speed")


def test_experiment_replays_what_was_recorded(recorded, capsys):
    recorded.changes(measure=never)
    frame = experiment("speed")
    assert capsys.readouterr().out == LABEL
    assert frame["us"].tolist() == [5.33333, 5.33333]
    assert frame["dram_read_bytes"].tolist() == [320000000, 320000000]
    assert frame["impl"].tolist() == ['a, "b"'] * 2


@pytest.mark.parametrize(
    ("mode", "origin"), [("live", "Measured now on NVIDIA H200.\n"), ("verify", LABEL)]
)
def test_experiment_measured_equals_its_replay(recorded, in_mode, mode, origin, capfd):
    """To the last digit. In mode `verify` a page shows the label of a recording, and nothing

    that this process or one that it starts prints meanwhile.
    """
    before, replayed = bytes_of(recorded.h200), experiment("speed")
    capfd.readouterr()
    measured, advice = catalog.EXPERIMENTS["speed"].measure, "a compiler's advice\n"

    def measure(**arguments):
        for stream in ("stdout", "stderr"):
            subprocess.run([sys.executable, "-c", f"import sys; sys.{stream}.write({advice!r})"])
            getattr(sys, stream).write(advice)
        return measured(**arguments)

    recorded.changes(measure=measure)
    in_mode(mode)
    pd.testing.assert_frame_equal(experiment("speed"), replayed, check_exact=True)
    said, log = capfd.readouterr(), kept_path("speed").with_suffix(".log")
    if mode == "verify":
        assert (said.out, said.err, log.read_text()) == (origin, "", 4 * advice)
    else:
        assert (said.out, said.err) == (2 * advice + origin, 2 * advice)
    assert log.is_file() == kept_path("speed").is_file() == (mode == "verify")
    assert bytes_of(recorded.h200) == before


def test_drift_leaves_out_packages_that_are_absent(recorded, in_mode, capsys):
    names = (Column("impl"), Column("us", "µs", 0.1), Column("missing"))
    gone = set()

    def measure():
        rows = [("a", 1.5, ""), ("b", 2.0, ""), ("c", 3.0, "")]
        rows = [(i, 0.0, f"absent: no {i}") if i in gone else (i, us, no) for i, us, no in rows]
        return pd.DataFrame(rows, columns=[column.name for column in names])

    subject = recorded.changes(measure=measure, arguments={}, columns=names)
    recorded.record(subject)
    gone |= {"a", "b"}
    in_mode("verify")
    assert experiment("speed")["us"].tolist() == [0, 0, 3]
    assert drift.measure_again() == []
    assert "2 of 3 rows, whose packages are absent here" in capsys.readouterr().out


def test_experiment_live_needs_no_recording_but_verify_does(book, in_mode):
    in_mode("live")
    assert len(experiment("speed")) == 2
    assert list(book.recordings.iterdir()) == []
    in_mode("verify")
    with pytest.raises(RecordingError, match=r"machine\.json"):
        experiment("speed")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (CountersUnavailable("counters: no ncu"), "counters: no ncu, so this is a recording."),
        (TooManyPrograms("128 programs, and 40 fit"), "refused here (128 programs, and 40 fit)"),
        (torch.OutOfMemoryError("2 GiB"), "torch.OutOfMemoryError: 2 GiB"),
        (triton.OutOfResources(98304, 65536, "shared memory"), "98304, Hardware limit: 65536"),
        (AssertionError("a fault"), None),
    ],
    ids=lambda it: type(it).__name__,
)
def test_experiment_that_the_gpu_refuses(error, why, recorded, in_mode, capfd):
    """Live, its page goes on; it fails where it is verified, and anywhere if it has a fault.

    What is written to stderr later is seen.
    """

    def refuse(**arguments):
        raise error

    recorded.changes(measure=refuse)
    in_mode("live")
    if why:
        assert len(experiment("speed")) == 2
        said, label = capfd.readouterr().out.splitlines()
        assert why in said and "recording" in said and f"{label}\n" == LABEL
        in_mode("verify")
    with pytest.raises(type(error)):
        experiment("speed")
    os.write(recording.STDERR, b"later")
    assert capfd.readouterr().err == "later"


def test_a_page_measures_an_experiment_once(recorded, in_mode):
    found = iter((1.0, 2.0))
    measure = catalog.EXPERIMENTS["speed"].measure
    recorded.changes(measure=lambda shapes, scale: measure(shapes, next(found)))
    in_mode("live")
    first = experiment("speed")
    first["us"] = 0.0  # which is the caller's own
    assert experiment("speed")["us"].tolist() == [10.6667] * 2


def test_experiments_asked_for_together_are_of_one_gpu(recorded, in_mode, capsys):
    measured, lacks = catalog.EXPERIMENTS["speed"], Needs(commands=("no-such-command",))
    counted = dataclasses.replace(measured, id="counted", needs=lacks)
    recorded.lists(measured, counted)
    recorded.record(counted)
    recorded.lists(dataclasses.replace(measured, measure=never), counted)
    in_mode("live")
    assert [len(frame) for frame in experiments("speed", "counted")] == [2, 2]
    why = "counted needs the command `no-such-command`, so this is a recording.\n"
    assert capsys.readouterr().out == why + LABEL


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "Tesla T4"])
def test_claim_measured_on_another_gpu_is_told(gpu, recorded, in_mode, capsys):
    recorded.machine["gpu"] = gpu
    in_mode("live")
    experiment("speed")
    capsys.readouterr()
    if gpu == "NVIDIA H200":
        with pytest.raises(AssertionError, match="2x"):
            claim("It is 2x as fast.", False)
    else:
        claim("It is 2x as fast.", False)
        said = "– Does not hold on a page measured on Tesla T4: It is 2x as fast.\n"
        assert capsys.readouterr().out == said


def test_experiment_that_the_machine_cannot_measure(recorded, in_mode, capsys):
    """Live, the page says what is lacking; verified, it shows what it showed without a GPU."""
    recorded.changes(measure=never, needs=Needs(commands=("no-such-command",)))
    why = "speed needs the command `no-such-command`, so this is a recording.\n"
    for mode, said in (("live", why + LABEL), ("verify", LABEL), ("replay", LABEL)):
        in_mode(mode)
        assert len(experiment("speed")) == 2
        assert capsys.readouterr().out == said
    assert not kept_path("speed").exists()
    assert drift.measure_again() == []
    assert capsys.readouterr().out == "speed: skipped, needs the command `no-such-command`\n"


def test_a_page_says_each_origin_once(recorded, capsys):
    again = dataclasses.replace(catalog.EXPERIMENTS["speed"], id="again")
    recorded.lists(catalog.EXPERIMENTS["speed"], again)
    recorded.record(again)
    recorded.machine["gpu"] = "NVIDIA L4"
    recorded.record(folder=recorded.recordings / "nvidia-l4")
    frames = experiments("speed", "again", "speed")
    assert [len(frame) for frame in frames] == [2] * 3
    assert capsys.readouterr().out == LABEL
    for gpu in ("nvidia-l4", None, "nvidia-l4"):
        experiment("speed", gpu=gpu)
    assert capsys.readouterr().out == LABEL.replace("H200", "L4")


def test_experiments_of_a_named_gpu_are_not_measured(recorded, in_mode, capsys):
    recorded.record(folder=recorded.recordings / "nvidia-l4")
    measure = catalog.EXPERIMENTS["speed"].measure
    recorded.record(recorded.changes(measure=lambda shapes, scale: measure(shapes, scale / 2)))
    recorded.changes(measure=never)
    for mode in recording.MODES:
        in_mode(mode)
        [found, _] = experiments("speed", "speed", gpu="nvidia-l4")
        assert found["us"][0] == 5.33333 and capsys.readouterr().out == LABEL
    in_mode("replay")
    assert experiment("speed")["us"][0] == 2.66667


def test_experiments_for_verdicts_are_those_recorded_while_a_page_is_verified(recorded, in_mode):
    """The second measurement, which is three times as slow, is left to drift."""
    was = experiment("speed")["us"].tolist()
    measure = catalog.EXPERIMENTS["speed"].measure
    recorded.changes(measure=lambda shapes, scale: measure(shapes, 3 * scale))
    for mode, factor in (("replay", 1), ("verify", 1), ("live", 3)):
        in_mode(mode)
        [found] = experiments_for_verdicts("speed")
        assert found["us"].tolist() == pytest.approx([factor * us for us in was], rel=1e-5)
    assert not kept_path("speed").exists()


def test_what_is_verified_is_measured_once_for_all_pages(recorded, in_mode):
    """And shown, three times as slow as it was recorded on another GPU."""
    calls, speed = [], catalog.EXPERIMENTS["speed"]

    def measure(shapes, scale):
        calls.append(shapes)
        return speed.measure(shapes, 3 * scale)

    again = dataclasses.replace(speed, id="again")
    recorded.lists(speed, again)
    recorded.record(again)
    recorded.lists(*(dataclasses.replace(it, measure=measure) for it in (speed, again)))
    recorded.machine["gpu"] = "Tesla T4"
    in_mode("verify")
    for frame in (*experiments("speed", "again"), *experiments("again", "speed")):
        assert frame["us"].tolist() == [16, 16]
    assert len(calls) == 2


# ---- what can be wrong with a recording

SPEED = "speed.csv"


def with_other_header(book):
    book.edit(lambda text: text.replace("impl", "name"))
    book.edit_entry(sha256=recording.checksum((book.h200 / SPEED).read_text(encoding="utf-8")))


def columns(*last):
    return lambda it: it.changes(columns=(*catalog.EXPERIMENTS["speed"].columns[:-1], *last))


@cases(
    ("what", "spoil"),
    {
        "missing": ("missing", lambda it: (it.h200 / SPEED).unlink()),
        "row": ("truncated, 1 of 2 rows", lambda it: it.edit(lambda text: text[:46])),
        "end": ("truncated, 2 of 2 rows", lambda it: it.edit(lambda text: text[:-3])),
        "empty": ("truncated, 0 of 2 rows", lambda it: it.edit(lambda text: "")),
        "number": ("edited", lambda it: it.edit(lambda text: text.replace("5.3", "4.3", 1))),
        "row-added": ("edited", lambda it: it.edit(lambda text: text + "a,2,16,5.33333,1\n")),
        "arguments": ("arguments", lambda it: it.changes(arguments={"scale": 0.5})),
        "column-less": ("columns", columns()),
        "other-unit": ("columns", columns(Column("dram_read_bytes", "kB"))),
        "other-header": ("columns", with_other_header),
        "other-schema": ("arguments", lambda it: it.edit_entry(arguments=None, columns={})),
        "no-machine": ("machine.json", lambda it: (it.h200 / "machine.json").unlink()),
        "no-json": ("machine.json", lambda it: (it.h200 / "machine.json").write_text("{")),
    },
)
def test_read_names_the_file_and_what_mends_it(recorded, what, spoil):
    spoil(recorded)
    with pytest.raises(RecordingError, match=what) as error:
        experiment("speed")
    message = str(error.value)
    assert str(recorded.h200) in message and "\n" not in message
    assert "`python -m memtraffic_book record" in message
    if what != "machine.json":
        assert f"{recorded.h200 / SPEED}: " in message
        assert "`python -m memtraffic_book record speed`" in message


# ---- writing


def test_write_is_keyed_by_arguments_and_schema(recorded):
    machine = json.loads((recorded.h200 / "machine.json").read_text(encoding="utf-8"))
    text = (recorded.h200 / SPEED).read_text(encoding="utf-8")
    units = {"impl": "", "m": "rows", "n": "columns", "us": "µs", "dram_read_bytes": "bytes"}
    entry = {
        "arguments": {"shapes": [[4, 8], [2, 16]], "scale": 0.5},
        "columns": units,
        "commit": 40 * "0",
        "date": recorded.date,
        "rows": 2,
        "sha256": recording.checksum(text),
    }
    assert machine == recorded.machine | {"experiments": {"speed": entry}}
    assert text.splitlines()[0] == "impl,m,n,us,dram_read_bytes"


def test_write_again_gives_the_same_bytes_and_keeps_other_recordings(recorded):
    before = bytes_of(recorded.h200)
    frame = read(recorded.h200, catalog.EXPERIMENTS["speed"])
    assert recording.to_csv(frame).encode() == before[SPEED]
    recorded.record()
    assert bytes_of(recorded.h200) == before
    again = dataclasses.replace(catalog.EXPERIMENTS["speed"], id="again")
    recorded.record(again)
    assert sorted(recording.load_machine(recorded.h200)["experiments"]) == ["again", "speed"]
    assert len(read(recorded.h200, again)) == len(frame)
    folder = recorded.folder / "not" / "there"
    recorded.record(folder=folder)
    assert bytes_of(folder) == before


@pytest.mark.parametrize("fact", ["driver", "torch", "triton", "cuda"])
def test_write_refuses_to_mix_versions(recorded, fact):
    """Otherwise `machine.json` would name versions that the older recordings do not come from."""
    before = bytes_of(recorded.h200)
    recorded.machine[fact] = "99"
    with pytest.raises(RecordingError, match=r"99.*`python -m memtraffic_book record`"):
        recorded.record()
    assert bytes_of(recorded.h200) == before


def test_from_csv_reads_text_that_looks_missing():
    frame = recording.from_csv("impl,us\nNA,1\nNone,2\n")
    assert frame["impl"].tolist() == ["NA", "None"]


# ---- the machine


def test_describe_machine_on_rocm(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(device, "gpu_name", lambda: "AMD Instinct MI300X")
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = recording.describe_machine()
    assert (machine["gpu"], machine["rocm"]) == ("AMD Instinct MI300X", "6.4.1")
    assert set(machine) == {"gpu", "driver", "rocm", "torch", "triton"}
    assert all(isinstance(value, str) for value in machine.values())


def test_describe_machine_on_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "gpu_name", lambda: "NVIDIA L4")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recording.describe_machine()["driver"] == "unknown"
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 580.1\necho of the second GPU\n")
    command.chmod(0o755)
    machine = recording.describe_machine()
    assert (machine["driver"], machine["cuda"]) == ("580.1", "13.0")
    assert set(machine) == {"gpu", "driver", "cuda", "torch", "triton"}
    command.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(subprocess.CalledProcessError):
        recording.describe_machine()


def test_today_and_current_commit(monkeypatch, tmp_path):
    before = datetime.date.today()
    assert before <= datetime.date.fromisoformat(recording.today()) <= datetime.date.today()
    monkeypatch.setenv("MEMTRAFFIC_COMMIT", "abc")
    assert recording.current_commit() == "abc"
    monkeypatch.delenv("MEMTRAFFIC_COMMIT")
    monkeypatch.chdir(tmp_path)
    assert recording.current_commit() == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recording.current_commit() == "unknown"
    (tmp_path / "git").write_text("#!/bin/sh\necho 0123abc\n")
    (tmp_path / "git").chmod(0o755)
    assert recording.current_commit() == "0123abc"


@pytest.mark.gpu
def test_describe_machine_on_a_gpu():
    machine = recording.describe_machine()
    assert machine["gpu"] == device.gpu_name()
    assert not any("/" in value for value in machine.values())


# ---- where recordings are


def test_root_is_found_from_anywhere(tmp_path, monkeypatch):
    """From the notebooks and the repository of a reader; else it is that of the checkout."""
    monkeypatch.delenv("MEMTRAFFIC_RECORDINGS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert root() == BOOK / "recordings"
    (tmp_path / "book" / "recordings").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "book"):
        monkeypatch.chdir(folder)
        assert root().resolve() == tmp_path / "book" / "recordings"
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", "elsewhere")
    assert str(root()) == "elsewhere"


def test_folder_name():
    assert recording.folder_name("AMD Instinct MI300X (gfx942)") == "amd-instinct-mi300x-gfx942"
