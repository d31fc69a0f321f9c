import dataclasses
import datetime
import json
import os
import shutil
import subprocess

import pytest
import torch
import triton
from cases import cases, put_command
from notebooks import BOOK

from memtraffic import device
from memtraffic.errors import CountersUnavailable
from memtraffic.kernels.softmax.split import TooManyPrograms
from memtraffic_book import catalog, recording
from memtraffic_book.catalog import Needs
from memtraffic_book.recording import RecordingError, experiment, experiments, root

LABEL = "Recorded on NVIDIA H200 (PyTorch 2.11.0, Triton 3.6.0).\n"
SPEED = "speed.csv"


def never(**arguments):
    raise AssertionError("measured in a replay")


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- modes


def test_mode_follows_from_the_machine_unless_it_is_chosen(monkeypatch, recorded, in_mode):
    for gpu, expected in ((True, "live"), (False, "replay")):
        monkeypatch.setattr(device, "HAS_GPU", gpu)
        for chosen in ("", *recording.MODES):
            in_mode(chosen)
            assert recording.mode() == (chosen or expected)
    in_mode("record")
    with pytest.raises(RecordingError, match=r"MEMTRAFFIC_MODE.*record.*live, verify, replay"):
        experiment("speed")


@pytest.mark.parametrize("mode", recording.MODES)
def test_experiment_is_the_same_to_the_last_digit_in_every_mode(mode, recorded, in_mode, capsys):
    before = bytes_of(recorded.h200)
    in_mode(mode)
    frame, said = experiment("speed"), capsys.readouterr().out
    assert recording.to_csv(frame).encode() == before[SPEED]
    assert frame["us"].tolist() == [5.33333, 5.33333]
    assert said == ("Measured now on NVIDIA H200.\n" if mode == "live" else LABEL)
    assert bytes_of(recorded.h200) == before and not recording.elsewhere


def test_verify_shows_nothing_that_a_measurement_prints(recorded, in_mode, capfd):
    def chatty(**arguments):
        print("autotuned")
        os.system("echo compiled")
        return recorded.slows(1).measure(**arguments)

    recorded.changes(measure=chatty)
    in_mode("verify")
    experiment("speed")
    log = recording.folder_of_verify() / "speed.log"
    assert capfd.readouterr().out == LABEL
    assert sorted(log.read_text().split()) == ["autotuned", "compiled"]


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
def test_experiment_that_the_gpu_refuses(error, why, recorded, in_mode, capsys):
    """Live, its page goes on, but with a fault."""

    def refuse(**arguments):
        raise error

    recorded.changes(measure=refuse)
    in_mode("live")
    if why:
        assert len(experiment("speed")) == 2
        said, label = capsys.readouterr().out.splitlines()
        assert why in said and "recording" in said and f"{label}\n" == LABEL
    else:
        with pytest.raises(type(error)):
            experiment("speed")


def test_what_is_measured_is_measured_once_for_all_pages(recorded, in_mode):
    """And shown on another GPU, where claims are told so; verify's verdicts are the recording's."""
    calls, was, slow = [], [5.33333] * 2, recorded.slows(3).measure
    recorded.changes(measure=lambda **arguments: (calls.append(1), slow(**arguments))[1])
    recorded.machine["gpu"] = "Tesla T4"
    for mode, us, verdict in (
        ("replay", was, was),
        ("verify", [16] * 2, was),
        ("live", *2 * [[16] * 2]),
    ):
        if mode == "live":  # which needs no recording
            shutil.rmtree(recorded.recordings)
        in_mode(mode)
        [judged] = recording.experiments_for_verdicts("speed")
        assert judged["us"].tolist() == verdict
        for _ in range(2):
            frame = experiment("speed")
            assert frame["us"].tolist() == us
            frame["us"] = 0.0  # which is the caller's own
        assert len(calls) == recording.MODES[::-1].index(mode)
        assert recording.elsewhere == ({"Tesla T4"} if mode == "live" else set())


def test_experiments_that_the_machine_cannot_measure(recorded, in_mode, capsys):
    """Live, a page says what is lacking, and all is of one GPU; else it is as without a GPU."""
    speed = recorded.changes(measure=never)
    counted = dataclasses.replace(speed, id="counted", needs=Needs(("no-such-command",)))
    recorded.record(dataclasses.replace(counted, measure=recorded.slows(1).measure))
    recorded.lists(speed, counted)
    why = "counted needs the command `no-such-command`, so this is a recording.\n"
    for mode, ids, said in (
        ("live", ["speed", "counted"], why + LABEL),
        ("verify", ["counted"], LABEL),
        ("replay", ["counted", "speed"], LABEL),
    ):
        in_mode(mode)
        assert [len(frame) for frame in experiments(*ids)] == [2] * len(ids)
        assert capsys.readouterr().out == said


def test_experiments_of_a_named_gpu_are_read_and_their_origin_is_said_once(
    recorded, in_mode, capsys
):
    recorded.machine["gpu"] = "NVIDIA L4"
    recorded.record(recorded.slows(2), folder=recorded.recordings / "nvidia-l4")
    recorded.changes(measure=never)
    for mode in recording.MODES:
        in_mode(mode)
        for frame in experiments("speed", "speed", gpu="nvidia-l4"):
            assert frame["us"][0] == 10.6667
        assert capsys.readouterr().out == LABEL.replace("H200", "L4")
    assert experiment("speed")["us"][0] == 5.33333
    experiment("speed", gpu="nvidia-l4")
    assert capsys.readouterr().out == LABEL


# ---- what can be wrong with a recording


def with_other_header(book):
    speed = catalog.EXPERIMENTS["speed"]
    recording.write(book.h200, speed, speed.run().rename(columns={"impl": "name"}))


def with_other_unit(book):
    *others, last = catalog.EXPERIMENTS["speed"].columns
    book.changes(columns=(*others, dataclasses.replace(last, unit="kB")))


@cases(
    ("what", "spoil"),
    {
        "missing": ("missing", lambda it: (it.h200 / SPEED).unlink()),
        "row": ("truncated, 1 of 2", lambda it: it.edit(lambda text: text[: text.rindex('"a')])),
        "end": ("truncated, 2 of 2 rows", lambda it: it.edit(lambda text: text[:-1])),
        "empty": ("truncated, 0 of 2 rows", lambda it: it.edit(lambda text: "")),
        "number": ("edited", lambda it: it.edit(lambda text: text.replace("5.3", "4.3", 1))),
        "arguments": ("arguments", lambda it: it.changes(arguments={"scale": 0.5})),
        "other-unit": ("columns", with_other_unit),
        "other-header": ("columns", with_other_header),
        "no-machine": ("machine.json", lambda it: (it.h200 / "machine.json").unlink()),
        "no-json": ("machine.json", lambda it: (it.h200 / "machine.json").write_text("{")),
    },
)
def test_read_names_the_file_and_what_mends_it(recorded, what, spoil):
    spoil(recorded)
    with pytest.raises(RecordingError, match=what) as error:
        experiment("speed")
    message, of_all = str(error.value), what == "machine.json"
    assert message.startswith(f"{recorded.h200 / ('machine.json' if of_all else SPEED)}: ")
    assert f"`python -m memtraffic_book record{' speed' * (not of_all)}`" in message
    assert "\n" not in message


# ---- writing


def test_write_is_keyed_by_arguments_and_schema_and_keeps_other_recordings(recorded):
    before = bytes_of(recorded.h200)
    entry = {
        "arguments": {"shapes": [[4, 8], [2, 16]], "scale": 0.5},
        "columns": catalog.EXPERIMENTS["speed"].schema,
        "commit": 40 * "0",
        "date": recorded.date,
        "rows": 2,
        "sha256": recording.checksum(before[SPEED].decode()),
    }
    known = recorded.machine | {"experiments": {"speed": entry}}
    assert json.loads(before["machine.json"]) == known
    recorded.record()
    recorded.record(folder=recorded.folder / "not" / "there")
    assert bytes_of(recorded.folder / "not" / "there") == bytes_of(recorded.h200) == before
    recorded.record(dataclasses.replace(catalog.EXPERIMENTS["speed"], id="again"))
    known["experiments"]["again"] = entry
    assert recording.load_machine(recorded.h200) == known


def test_write_refuses_to_mix_versions(recorded):
    """Otherwise `machine.json` would name versions that the older recordings do not come from."""
    before = bytes_of(recorded.h200)
    recorded.machine["driver"] = "99"
    with pytest.raises(RecordingError, match=r"99.*`python -m memtraffic_book record`"):
        recorded.record()
    assert bytes_of(recorded.h200) == before


def test_from_csv_reads_text_that_looks_missing():
    frame = recording.from_csv("impl,us\nNA,1\nNone,2\n")
    assert frame["impl"].tolist() == ["NA", "None"]


# ---- the machine


def test_describe_machine(monkeypatch, tmp_path):
    """By PyTorch, and of NVIDIA's GPUs by their command, whose failure is an error."""
    versions = {"gpu": "a GPU", "torch": torch.__version__, "triton": triton.__version__}
    monkeypatch.setattr(device, "gpu_name", lambda: "a GPU")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert recording.describe_machine() == versions | {"driver": "unknown", "cuda": "13.0"}
    put_command(tmp_path, "nvidia-smi", "echo 580.1; echo of the second GPU")
    assert recording.describe_machine() == versions | {"driver": "580.1", "cuda": "13.0"}
    put_command(tmp_path, "nvidia-smi", "exit 9")
    with pytest.raises(subprocess.CalledProcessError):
        recording.describe_machine()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert recording.describe_machine() == versions | {"driver": "unknown", "rocm": "6.4"}


def test_today_and_current_commit(monkeypatch, tmp_path):
    before = datetime.date.today()
    assert before <= datetime.date.fromisoformat(recording.today()) <= datetime.date.today()
    monkeypatch.delenv("MEMTRAFFIC_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert recording.current_commit() == "unknown"  # git finds no repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recording.current_commit() == "unknown"  # nor is there git
    put_command(tmp_path, "git", "echo 0123abc")
    assert recording.current_commit() == "0123abc"
    monkeypatch.setenv("MEMTRAFFIC_COMMIT", "abc")
    assert recording.current_commit() == "abc"


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
