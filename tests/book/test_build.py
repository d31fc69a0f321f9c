import dataclasses
import re
from xml.etree import ElementTree

import nbformat
import pandas as pd
import pytest
from another_process import run_python
from drawings import PHONE, SMALLEST
from notebooks import BOOK

from memtraffic import device, gpus
from memtraffic.errors import CountersUnavailable
from memtraffic_book import __main__ as commands
from memtraffic_book import build, catalog, recording
from memtraffic_book.build import execute_notebooks, record_experiments
from memtraffic_book.recording import PUBLISHED, RecordingError


def main(*line):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as end:
        commands.main(line)
    return end.value.code


def other(book, id, **fields):
    """Adds an experiment like `speed` to the book."""
    speed = catalog.EXPERIMENTS["speed"]
    added = dataclasses.replace(speed, id=id, **fields)
    book.lists(*catalog.EXPERIMENTS.values(), added)
    return added


# ---- recordings


def stems(folder):
    return {path.stem for path in folder.glob("*.csv")}


def test_record_experiments_of_some_or_of_all(recorded):
    """Some leave the others as they were; all remove what other versions measured."""
    again = other(recorded, "again")
    before = (recorded.h200 / "speed.csv").stat().st_mtime_ns
    record_experiments(["again"])
    assert (recorded.h200 / "speed.csv").stat().st_mtime_ns == before
    assert len(recording.read(recorded.h200, again)) == 2
    (recorded.h200 / "stale.csv").write_text("n\n1\n")
    recorded.lists(catalog.EXPERIMENTS["speed"])
    other(recorded, "last")
    recorded.machine["torch"] = "99"  # another version: the whole folder is made anew
    assert record_experiments() == recorded.h200
    assert stems(recorded.h200) == {"speed", "last"}
    assert recording.load_machine(recorded.h200)["torch"] == "99"


def test_record_experiments_keeps_what_this_machine_cannot_measure(recorded, monkeypatch, capsys):
    """It is skipped by name; nothing has failed."""
    pair = other(recorded, "pair")
    record_experiments(["pair"])
    monkeypatch.setattr(device, "this_gpu", lambda *index: gpus.find_gpu("MI300X"))
    other(recorded, "pair", needs=catalog.Needs(vendor="nvidia"))
    assert main("record") == 0
    assert "pair: skipped, needs a GPU of nvidia, not an MI300X\n" in capsys.readouterr().out
    assert stems(recorded.h200) == {"speed", "pair"}
    assert len(recording.read(recorded.h200, pair)) == 2
    assert main("drift") == 0
    recorded.machine["torch"] = "99"  # what is kept would be of another version
    record_experiments()
    assert stems(recorded.h200) == {"speed"}


def test_record_experiments_of_another_gpu_has_its_own_folder(recorded):
    before = {path: path.read_bytes() for path in recorded.h200.iterdir()}
    recorded.machine["gpu"] = "NVIDIA H100 80GB HBM3"
    assert record_experiments().name == "nvidia-h100-80gb-hbm3"
    assert {path: path.read_bytes() for path in recorded.h200.iterdir()} == before


def fails(**arguments):
    raise CountersUnavailable("no ncu")


def test_record_experiments_skips_nothing_in_silence(book, capsys):
    """What fails is named, with the command that tries it again; what does not is written."""
    other(book, "counted", measure=fails)
    other(book, "torn", measure=lambda **arguments: pd.DataFrame())
    last = other(book, "last")
    with pytest.raises(RecordingError) as error:
        record_experiments()
    for said in ("record counted torn`", "counted: no ncu", "torn: measured columns"):
        assert said in str(error.value)
    assert len(recording.read(book.h200, last)) == 2
    printed = [line.split(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed[0] == "speed: recorded" and printed[1] == "counted: failed: no ncu"
    assert [line.split(":")[0] for line in printed] == list(catalog.EXPERIMENTS)


# ---- the map


@pytest.mark.slow
def test_map_is_of_its_recording(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.delenv("MEMTRAFFIC_RECORDINGS", raising=False)
    root = recording.root()
    (tmp_path / "_static").mkdir()
    (tmp_path / "recordings").symlink_to(root.resolve())
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", str(tmp_path / "recordings"))
    entry = recording.load_machine(root / PUBLISHED)["experiments"][build.MAP]
    path = build.draw_map()
    with image.open(path) as new, image.open(root.parent / "_static" / path.name) as old:
        assert new.text["Source"] == old.text["Source"] == entry["sha256"]
        assert new.size == old.size


# ---- notebooks


def notebook(path, source):
    cell = nbformat.v4.new_code_cell(source)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)


def output(path):
    [cell] = nbformat.read(path, as_version=4).cells
    return ["".join(it["text"]) for it in cell["outputs"]]


@pytest.mark.slow
def test_execute_notebooks_all_or_none(book, in_mode):
    """In place, replaying the fresh recordings; nothing is written if one of them fails."""
    in_mode("live")
    path = book.folder / "a.ipynb"
    pieces = "print(os.environ['MEMTRAFFIC_MODE'], flush=True)\nprint(os.getcwd())"
    notebook(path, f"import os\n{pieces}")
    execute_notebooks()
    assert output(path) == [f"replay\n{book.folder}\n"]
    notebook(path, "print(2)")
    notebook(book.folder / "b.ipynb", "1 / 0")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute_notebooks()
    assert output(path) == []
    execute_notebooks([path])
    assert output(path) == ["2\n"]


def test_execute_notebooks_only_on_the_published_gpu(book):
    notebook(book.folder / "a.ipynb", "print(1)")
    book.machine["gpu"] = "NVIDIA L4"
    with pytest.raises(RuntimeError, match=r"nvidia-h200.*nvidia-l4"):
        execute_notebooks()
    assert output(book.folder / "a.ipynb") == []


# ---- commands


def test_main_records_and_compares(book, capsys):
    assert main("drift") == 1
    assert "machine.json" in capsys.readouterr().err
    assert main("record") == 0
    assert main("record", "speed") == 0
    assert main("drift", "speed") == 0
    frame = recording.read(book.h200, catalog.EXPERIMENTS["speed"])
    book.changes(measure=lambda **arguments: frame.assign(us=99.0))
    capsys.readouterr()
    assert main("drift") == 1
    assert "us was 5.33333, is 99 " in capsys.readouterr().err
    assert main("record", "speed", "sped") == 1
    assert "sped" in capsys.readouterr().err
    assert recording.read(book.h200, catalog.EXPERIMENTS["speed"]).equals(frame)


@pytest.mark.slow
def test_main_starts_in_a_process_of_its_own():
    assert "record" in run_python("-m", "memtraffic_book", "--help").stdout


def test_main_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(device, "HAS_GPU", False)
    for command in ("record", "drift", "notebooks"):
        assert main(command) == 1
        assert "needs a GPU" in capsys.readouterr().err


def test_poster_is_of_its_recordings(tmp_path, monkeypatch):
    """Its words and the checksums in both files are those of any version of Matplotlib."""
    (tmp_path / "_static").mkdir()
    monkeypatch.setattr(build, "book_folder", lambda: tmp_path)
    listed = recording.load_machine(recording.root() / PUBLISHED)["experiments"]
    sums = " ".join(listed[id]["sha256"] for id in build.POSTER)
    stored, words = BOOK / "_static/poster.svg", []
    for path in (build.draw_poster(), stored):
        root = ElementTree.parse(path).getroot()
        words.append([it.text for it in root.iter("{http://www.w3.org/2000/svg}text")])
        assert sums in path.read_text("utf-8")
        assert sums.encode() in path.with_suffix(".pdf").read_bytes()
    assert words[0] == words[1], "python -m memtraffic_book draw"
    assert {"130 µs", "25 kB", "2 kB"} <= {*words[0]}
    sizes = map(float, re.findall(r"font-size: ([\d.]+)px", stored.read_text("utf-8")))
    wide = float(root.get("viewBox").split()[2])
    assert min(sizes) * PHONE / wide >= SMALLEST, "too small on a phone"
