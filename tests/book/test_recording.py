import dataclasses
import datetime
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from memtraffic import gpus, runtime
from memtraffic.errors import CountersUnavailable
from memtraffic.meters import counters
from memtraffic.names import RUNGS
from memtraffic_book import catalog, drift, recording
from memtraffic_book.catalog import EXPERIMENTS, Column, Needs
from memtraffic_book.recording import (
    MODES,
    PUBLISHED,
    RecordingError,
    experiment,
    experiments,
    kept_path,
    read,
    root,
)

LABEL = "Recorded on NVIDIA H200, 2026-01-31 (PyTorch 2.11.0, Triton 3.6.0).\n"
BOOK = Path(__file__).resolve().parents[2] / "book"


def never(**arguments):
    raise AssertionError("measured in a replay")


def no_counters(**arguments):
    raise CountersUnavailable("counters: no ncu")


# ---- modes


@pytest.mark.parametrize(("gpu", "expected"), [(True, "live"), (False, "replay")])
@pytest.mark.parametrize("asked", [None, ""], ids=["unset", "empty"])
def test_mode_follows_from_the_machine(gpu, expected, asked, monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", gpu)
    monkeypatch.delenv("MEMTRAFFIC_MODE", raising=False)
    if asked is not None:
        monkeypatch.setenv("MEMTRAFFIC_MODE", asked)
    assert recording.mode() == expected


@pytest.mark.parametrize("mode", MODES)
def test_mode_may_be_chosen(mode, in_mode):
    in_mode(mode)
    assert recording.mode() == mode


@pytest.mark.parametrize("mode", ["reply", "record"])
def test_mode_unknown(mode, in_mode, recorded):
    in_mode(mode)
    with pytest.raises(RecordingError, match=f"MEMTRAFFIC_MODE.*{mode}.*live, verify, replay"):
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
def test_experiment_measured_equals_its_replay(recorded, in_mode, mode, origin, capsys):
    """To the last digit: what was measured went through the text of a recording."""
    before = {path: path.read_bytes() for path in recorded.h200.iterdir()}
    replayed = experiment("speed")
    capsys.readouterr()
    in_mode(mode)
    pd.testing.assert_frame_equal(experiment("speed"), replayed, check_exact=True)
    assert capsys.readouterr().out == origin
    assert {path: path.read_bytes() for path in recorded.h200.iterdir()} == before


@pytest.mark.parametrize("mode", ["live", "verify"])
def test_experiment_keeps_what_others_say_meanwhile(recorded, in_mode, mode, capsys):
    """In mode `verify` a page shows a recording, and no warning of what was measured beside it."""

    def measure(**arguments):
        print("a compiler's advice", file=sys.stderr)
        return measured(**arguments)

    measured = catalog.EXPERIMENTS["speed"].measure
    recorded.changes(measure=measure)
    in_mode(mode)
    experiment("speed")
    said = "a compiler's advice\n"
    assert capsys.readouterr().err == (said if mode == "live" else "")
    log = kept_path("speed").with_suffix(".log")
    assert log.is_file() == (mode == "verify")
    if mode == "verify":
        assert log.read_text() == said


def survey_of(calls, *installed):
    """What ncu and the process it looks at say of `calls`, where these packages are installed."""
    rows, outcomes = [], []
    for i, call in enumerate(calls, 1):
        package = call.partition(".")[0].partition(":")[0]
        here = package in installed
        missing = "" if here else f"absent: PackageNotFoundError: {package}"
        facts = {"package": package, "version": "0.8.5" if here else "", "kernel": call}
        facts |= {"direction": "forward", "at": "M=4, N=8"}
        outcomes.append(facts | {"begun": here, "missing": missing})
        metrics = dict.fromkeys(counters.METRICS, 10 * i)
        rows += [{"kernel": name} | metrics for name in ("_idle_kernel", "k")] if here else []
    return pd.DataFrame(rows, columns=counters.COLUMNS), outcomes


def test_experiment_replays_rows_of_packages_that_are_absent(book, in_mode, monkeypatch, capsys):
    """A page compared on a GPU has all of its rows; what was measured there is kept as it was."""
    installed = {"liger_kernel", "flag_gems", "torch"}
    subject = dataclasses.replace(
        EXPERIMENTS["survey_counters"],
        needs=Needs(),
        arguments={
            "kernels": [
                "liger_kernel.transformers.functional:liger_softmax forward",
                "flag_gems.ops:softmax forward",
                "torch:softmax forward",
            ],
            "sizes": {"M": 4, "N": 8},
        },
    )

    def profile(worker, job):
        frame, outcomes = survey_of(job["kernels"], *installed)
        Path(job["told"]).write_text(json.dumps(outcomes))
        return frame

    monkeypatch.setattr(counters, "profile", profile)
    monkeypatch.setattr(counters, "parse", lambda frame: frame)
    book.lists(subject)
    book.record(subject)
    recorded = experiment("survey_counters")
    assert recorded["launches"].tolist() == [1, 1, 1]
    said = capsys.readouterr().out
    installed -= {"liger_kernel", "flag_gems"}
    in_mode("verify")
    pd.testing.assert_frame_equal(experiment("survey_counters"), recorded)
    assert capsys.readouterr().out == said == LABEL
    kept = recording.from_csv(kept_path("survey_counters").read_text(encoding="utf-8"))
    assert kept["launches"].tolist() == [0, 0, 1]
    assert drift.measure_again() == []
    assert "2 of 3 rows, whose packages are absent here" in capsys.readouterr().out
    in_mode("live")
    live = experiment("survey_counters")
    assert live["missing"].str.startswith("absent").tolist() == [True, True, False]


def test_experiment_live_needs_no_recording_but_verify_does(book, in_mode):
    in_mode("live")
    assert len(experiment("speed")) == 2
    assert list(book.recordings.iterdir()) == []
    in_mode("verify")
    with pytest.raises(RecordingError, match=r"machine\.json"):
        experiment("speed")


def test_experiment_without_counters(recorded, in_mode, capsys):
    """Live, the page says so and shows the recording; verify fails."""
    recorded.changes(measure=no_counters)
    in_mode("live")
    assert len(experiment("speed")) == 2
    assert capsys.readouterr().out == f"counters: no ncu, so this is a recording.\n{LABEL}"
    in_mode("verify")
    with pytest.raises(CountersUnavailable):
        experiment("speed")


def test_experiment_that_the_machine_cannot_measure(recorded, in_mode, capsys):
    """Live, the page says what is lacking; verified, it shows what it showed without a GPU."""
    recorded.changes(measure=never, needs=Needs(commands=("no-such-command",)))
    why = "speed needs the command `no-such-command`, so this is a recording.\n"
    for mode, said in (("live", why + LABEL), ("verify", LABEL), ("replay", LABEL)):
        in_mode(mode)
        assert len(experiment("speed")) == 2
        assert capsys.readouterr().out == said
    assert not kept_path("speed").exists()
    in_mode("verify")
    assert drift.measure_again() == []
    assert capsys.readouterr().out == "speed: skipped, needs the command `no-such-command`\n"


def test_experiment_does_not_hide_other_failures(recorded, in_mode):
    recorded.changes(measure=never)
    in_mode("live")
    with pytest.raises(AssertionError, match="measured in a replay"):
        experiment("speed")


@pytest.mark.parametrize("mode", ["live", "verify"])
def test_experiment_refuses_other_columns(recorded, in_mode, mode):
    in_mode(mode)
    recorded.changes(columns=(Column("impl"), Column("us", "µs")))
    with pytest.raises(ValueError, match=r"speed.*'m'.*not \['impl', 'us'\]"):
        experiment("speed")


def test_experiment_unknown(recorded):
    with pytest.raises(LookupError, match=r"'sped'.*speed"):
        experiment("sped")


def test_experiments_print_each_origin_once(recorded, capsys):
    again = dataclasses.replace(catalog.EXPERIMENTS["speed"], id="again")
    old = dataclasses.replace(again, id="old")
    recorded.lists(catalog.EXPERIMENTS["speed"], again, old)
    recorded.record(again, old)
    machine = recording.load_machine(recorded.h200)
    machine["experiments"]["old"]["date"] = "2025-01-31"
    (recorded.h200 / "machine.json").write_text(json.dumps(machine), encoding="utf-8")
    frames = experiments("speed", "again", "old", "speed")
    assert [len(frame) for frame in frames] == [2] * 4
    assert capsys.readouterr().out == LABEL + LABEL.replace(recorded.date, "2025-01-31")


def test_experiments_of_a_named_gpu_are_not_measured(recorded, in_mode, capsys):
    was = experiment("speed")
    recorded.changes(measure=never)
    for mode in recording.MODES:
        in_mode(mode)
        capsys.readouterr()
        [found, _] = experiments("speed", "speed", gpu=recorded.h200.name)
        assert found.equals(was) and capsys.readouterr().out == LABEL


def test_experiments_for_verdicts_are_those_recorded_while_a_page_is_verified(recorded, in_mode):
    """The second measurement, which is three times as slow, is kept for drift."""
    was = recording.experiment("speed")["us"].tolist()
    measure = catalog.EXPERIMENTS["speed"].measure
    recorded.changes(measure=lambda shapes, scale: measure(shapes, 3 * scale))
    for mode, factor in (("replay", 1), ("verify", 1), ("live", 3)):
        in_mode(mode)
        [found] = recording.experiments_for_verdicts("speed")
        assert found["us"].tolist() == pytest.approx([factor * us for us in was], rel=1e-5)
    assert recording.kept_path("speed").is_file()


def test_experiments_without_counters_and_with(recorded, in_mode, capsys):
    counted = dataclasses.replace(catalog.EXPERIMENTS["speed"], id="counted", measure=no_counters)
    recorded.record(dataclasses.replace(counted, measure=catalog.EXPERIMENTS["speed"].measure))
    recorded.lists(catalog.EXPERIMENTS["speed"], counted)
    in_mode("live")
    experiments("counted", "speed", "counted")
    said = capsys.readouterr().out
    assert said.count("no ncu") == said.count(LABEL) == said.count("Measured now") == 1


# ---- what can be wrong with a recording


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        pytest.param(lambda it: (it.h200 / "speed.csv").unlink(), "missing", id="missing"),
        pytest.param(
            lambda it: it.edit(lambda text: "".join(text.splitlines(True)[:-1])),
            "truncated, 1 of 2 rows",
            id="truncated-by-a-row",
        ),
        pytest.param(
            lambda it: it.edit(lambda text: text[:-3]),
            "truncated, 2 of 2 rows",
            id="truncated-in-a-row",
        ),
        pytest.param(lambda it: it.edit(lambda text: ""), "truncated, 0 of 2 rows", id="empty"),
        pytest.param(
            lambda it: it.edit(lambda text: text.replace("5.33333", "4.33333", 1)),
            "edited",
            id="edited",
        ),
        pytest.param(
            lambda it: it.edit(lambda text: text + text.splitlines(True)[-1]),
            "edited",
            id="row-added",
        ),
        pytest.param(
            lambda it: it.changes(arguments={"shapes": [[4, 8]], "scale": 0.5}),
            "arguments",
            id="other-arguments",
        ),
        pytest.param(
            lambda it: it.changes(columns=(*catalog.EXPERIMENTS["speed"].columns, Column("x"))),
            "columns",
            id="other-columns",
        ),
        pytest.param(
            lambda it: it.changes(
                columns=(
                    *catalog.EXPERIMENTS["speed"].columns[:-1],
                    Column("dram_read_bytes", "kB"),
                )
            ),
            "columns",
            id="other-unit",
        ),
        pytest.param(
            lambda it: (
                it.edit(lambda text: text.replace("impl", "name")),
                it.edit_entry(
                    sha256=recording.checksum((it.h200 / "speed.csv").read_text(encoding="utf-8"))
                ),
            ),
            "columns",
            id="file-of-other-columns",
        ),
        pytest.param(
            lambda it: it.edit_entry(arguments=None, columns={}), "arguments", id="other-schema"
        ),
        pytest.param(
            lambda it: (it.h200 / "machine.json").unlink(), "machine.json", id="no-machine-json"
        ),
        pytest.param(
            lambda it: (it.h200 / "machine.json").write_text("{", encoding="utf-8"),
            "machine.json",
            id="broken-json",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["replay", "verify"])
def test_read_names_the_file_and_what_mends_it(recorded, spoil, what, mode, in_mode):
    spoil(recorded)
    in_mode(mode)
    catalog.EXPERIMENTS["speed"] = dataclasses.replace(
        catalog.EXPERIMENTS["speed"],
        measure=lambda **arguments: pd.DataFrame(
            columns=[column.name for column in catalog.EXPERIMENTS["speed"].columns]
        ),
    )
    with pytest.raises(RecordingError, match=what) as error:
        experiment("speed")
    message = str(error.value)
    assert str(recorded.h200) in message and "\n" not in message
    assert "`python -m memtraffic_book record" in message
    if what != "machine.json":
        assert f"{recorded.h200 / 'speed.csv'}: " in message
        assert "`python -m memtraffic_book record speed`" in message


def test_read_a_folder_that_is_not_there(book):
    with pytest.raises(RecordingError, match=f"{PUBLISHED}.*machine.json"):
        experiment("speed")


# ---- writing


def test_write_is_keyed_by_arguments_and_schema(recorded):
    machine = json.loads((recorded.h200 / "machine.json").read_text(encoding="utf-8"))
    text = (recorded.h200 / "speed.csv").read_text(encoding="utf-8")
    [(id, entry)] = machine.pop("experiments").items()
    assert machine == recorded.machine
    assert (id, entry) == (
        "speed",
        {
            "arguments": {"shapes": [[4, 8], [2, 16]], "scale": 0.5},
            "columns": {
                "impl": "",
                "m": "rows",
                "n": "columns",
                "us": "µs",
                "dram_read_bytes": "bytes",
            },
            "commit": 40 * "0",
            "date": recorded.date,
            "rows": 2,
            "sha256": recording.checksum(text),
        },
    )
    assert text.splitlines()[0] == "impl,m,n,us,dram_read_bytes"
    assert text.endswith("\n")


def test_write_makes_the_folder(book):
    folder = book.folder / "not" / "there"
    book.record(folder=folder)
    book.record(folder=folder)
    assert len(read(folder, catalog.EXPERIMENTS["speed"])) == 2


def test_write_again_gives_the_same_bytes(recorded):
    before = {path.name: path.read_bytes() for path in recorded.h200.iterdir()}
    frame = read(recorded.h200, catalog.EXPERIMENTS["speed"])
    assert recording.to_csv(frame).encode() == before["speed.csv"]
    recorded.record()
    assert {path.name: path.read_bytes() for path in recorded.h200.iterdir()} == before


def test_write_keeps_the_other_recordings(recorded):
    again = dataclasses.replace(catalog.EXPERIMENTS["speed"], id="again")
    recorded.record(again)
    assert sorted(recording.load_machine(recorded.h200)["experiments"]) == ["again", "speed"]
    assert len(read(recorded.h200, again)) == 2


@pytest.mark.parametrize("fact", ["driver", "torch", "triton", "cuda"])
def test_write_refuses_to_mix_versions(recorded, fact):
    """Otherwise `machine.json` would name versions that the older recordings do not come from."""
    before = {path: path.read_bytes() for path in recorded.h200.iterdir()}
    recorded.machine[fact] = "99"
    with pytest.raises(RecordingError, match=r"99.*`python -m memtraffic_book record`"):
        recorded.record()
    assert {path: path.read_bytes() for path in recorded.h200.iterdir()} == before


def test_from_csv_reads_text_that_looks_missing():
    frame = recording.from_csv("impl,us\nNA,1\nNone,2\n")
    assert frame["impl"].tolist() == ["NA", "None"]


# ---- the machine


@pytest.fixture
def rocm(monkeypatch):
    """PyTorch for ROCm, without `nvidia-smi`."""

    def run(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(runtime, "gpu_name", lambda: "AMD Instinct MI300X")
    monkeypatch.setattr(subprocess, "run", run)


def test_describe_machine_on_rocm(rocm):
    pytest.importorskip("triton", reason="Triton is not installed")
    machine = recording.describe_machine()
    assert (machine["gpu"], machine["rocm"]) == ("AMD Instinct MI300X", "6.4.1")
    assert set(machine) == {"gpu", "driver", "rocm", "torch", "triton"}
    assert json.loads(recording.format_machine(machine, {})) == machine | {"experiments": {}}


def test_describe_machine_on_cuda(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(runtime, "gpu_name", lambda: "NVIDIA L4")
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


def test_today():
    before = datetime.date.today()
    assert before <= datetime.date.fromisoformat(recording.today()) <= datetime.date.today()


def test_current_commit(monkeypatch, tmp_path):
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
    assert machine["gpu"] == runtime.gpu_name()
    assert not any("/" in value for value in machine.values())


# ---- where recordings are


def test_root_is_found_from_the_notebooks_and_from_the_repository(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMTRAFFIC_RECORDINGS", raising=False)
    (tmp_path / "book" / "recordings").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "book"):
        monkeypatch.chdir(folder)
        assert root().resolve() == tmp_path / "book" / "recordings"
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", "elsewhere")
    assert str(root()) == "elsewhere"


def test_root_of_a_checkout_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMTRAFFIC_RECORDINGS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert root() == BOOK / "recordings"


# ---- nothing shown changes


@pytest.fixture
def replay(monkeypatch, in_mode, capsys):
    """A function that replays all experiments of the book: what they return and print."""
    monkeypatch.delenv("MEMTRAFFIC_RECORDINGS", raising=False)
    in_mode("replay")

    def shown():
        frames = {id: recording.to_csv(experiment(id)) for id in catalog.EXPERIMENTS}
        return frames, capsys.readouterr().out

    return shown


def test_replay_of_every_experiment(replay):
    frames, printed = replay()
    assert frames.keys() == EXPERIMENTS.keys()
    assert set(printed.splitlines()) == {
        recording.label(BOOK / "recordings" / PUBLISHED, id) for id in EXPERIMENTS
    }


def test_replay_with_a_second_folder(replay, tmp_path, monkeypatch):
    """A newer folder of another GPU changes nothing that is shown; a page can ask for it."""
    before = replay()
    folder = tmp_path / "recordings"
    (folder / "nvidia-l4").mkdir(parents=True)
    (folder / PUBLISHED).symlink_to(BOOK / "recordings" / PUBLISHED)
    machine = {**recording.load_machine(folder / PUBLISHED), "gpu": "NVIDIA L4"}
    for entry in machine["experiments"].values():
        entry["date"] = "2199-01-01"
    text = (folder / PUBLISHED / "ladder.csv").read_text(encoding="utf-8")
    text = text.replace(text.splitlines()[1].split(",")[4], "999.99")
    machine["experiments"]["ladder"]["sha256"] = recording.checksum(text)
    (folder / "nvidia-l4" / "ladder.csv").write_text(text, encoding="utf-8")
    (folder / "nvidia-l4" / "machine.json").write_text(json.dumps(machine), encoding="utf-8")
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", str(folder))
    assert replay() == before
    assert 999.99 in experiment("ladder", gpu="nvidia-l4")["us"].tolist()


def test_replay_with_a_renamed_function(replay, monkeypatch):
    """The name of a measuring function is not recorded."""
    before = replay()

    def another_name(**arguments):
        raise AssertionError("measured in a replay")

    for id, subject in EXPERIMENTS.items():
        renamed = dataclasses.replace(subject, measure=another_name)
        monkeypatch.setitem(catalog.EXPERIMENTS, id, renamed)
    monkeypatch.setattr(catalog, "m", None)
    assert replay() == before


def test_replay_with_another_rung(replay, monkeypatch):
    before = replay()
    monkeypatch.setitem(RUNGS, "another", "memtraffic.kernels.softmax.naive:softmax")
    imported_anew = runpy.run_path(catalog.__file__)["EXPERIMENTS"]
    monkeypatch.setattr(catalog, "EXPERIMENTS", imported_anew)
    assert replay() == before


def test_published_folder_is_of_a_known_gpu():
    names = {runtime.folder_name(gpu.driver_name) for gpu in gpus.GPUS}
    assert PUBLISHED in names
