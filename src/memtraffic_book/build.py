"""Makes what is stored in the book: recordings, outputs of the notebooks, the map.

Every path is found from the folder of recordings, `recording.root()`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtraffic import device, gpus
from memtraffic_book import recording
from memtraffic_book.catalog import EXPERIMENTS, find_experiments
from memtraffic_book.recording import PUBLISHED, RecordingError

if TYPE_CHECKING:
    import pandas as pd
    from nbformat import NotebookNode

COLORS = 32  # of the map
MAP = "map_float32"  # the experiment that the map is drawn from
ENDS = "memtraffic.softmax", "naive"  # of the book
NAMES = "the last kernel", "five lines of PyTorch"
MOVING = ("bytes_in_flight", "occupancy_latency")  # what letters.svg is drawn from
POSTER = ("first_copy", "bytes_in_flight", "tiled_rows_float32")  # and the poster


def book_folder() -> Path:
    """The folder of the notebooks, beside the recordings."""
    return recording.root().parent


def record_experiments(ids: Sequence[str] = (), folder: Path | None = None) -> Path:
    """Measures experiments on this GPU, and writes each recording as soon as it is measured.

    ids: which experiments; all of them by default, and then what the folder holds of another
    machine, or of other versions, is removed before. folder: that of this GPU by default. What this
    machine cannot measure is skipped by name, and an experiment that fails does not stop the
    others. Returns the folder.

    Raises RuntimeError without a GPU, LookupError for an unknown id, RecordingError that names the
    experiments that failed and why.
    """
    device.require_gpu("record")
    subjects, folder = find_experiments(ids), folder or recording.folder_of_this_gpu()
    if not ids and not recording.is_of_this_machine(folder):
        shutil.rmtree(folder)
    failed: dict[str, Exception] = {}
    for subject in subjects:
        if lacking := subject.needs.lacking():
            print(f"{subject.id}: skipped, needs {lacking}", flush=True)
            continue
        start, outcome = time.monotonic(), "recorded"
        try:
            recording.write(folder, subject, subject.run())
        except Exception as error:
            failed[subject.id], outcome = error, f"failed: {error}"
        print(f"{subject.id}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
    if failed:
        reasons = "\n".join(f"{id}: {error}" for id, error in failed.items())
        again = f"`python -m memtraffic_book record {' '.join(failed)}`"
        raise RecordingError(f"not recorded (try again with {again}):\n{reasons}")
    return folder


def draw() -> list[Path]:
    """Draws what the pages show of the published recordings, and of the table of GPUs.

    Returns the paths.
    """
    return [draw_map(), draw_moving(), draw_poster(), write_chart_data()]


def _published(*ids: str) -> list[pd.DataFrame]:
    folder = recording.root() / PUBLISHED
    return [recording.read(folder, EXPERIMENTS[id]) for id in ids]


def _checksums(*ids: str) -> str:
    """Those of published recordings: a picture of them carries them, and is seen to be stale."""
    listed = recording.load_machine(recording.root() / PUBLISHED)["experiments"]
    return " ".join(listed[id]["sha256"] for id in ids)


def draw_map() -> Path:
    """Draws the map of the book from the published recording. Returns its path."""
    import matplotlib.pyplot as plt
    from PIL import Image
    from PIL.Image import Quantize
    from PIL.PngImagePlugin import PngInfo

    from memtraffic_book import figures

    [recorded] = _published(MAP)
    speeds = 100 * recording.speeds(recorded)
    named = speeds.rename(columns=dict(zip(ENDS, NAMES, strict=True)))
    figures.width_map(named, NAMES, title="One line to flatten, from 16 columns to a million")
    path, source = book_folder() / "_static" / "map.png", PngInfo()
    plt.savefig(drawn := io.BytesIO(), dpi=192)
    plt.close()
    source.add_text("Source", _checksums(MAP))
    few = Image.open(drawn).convert("RGB").quantize(COLORS, Quantize.FASTOCTREE)  # a fifth
    few.save(path, optimize=True, pnginfo=source)
    return path


def draw_moving() -> Path:
    """Fills the figure that moves by what was measured, from its recordings. Returns its path."""
    from memtraffic_book.figures import moving

    flight, chain = _published(*MOVING)
    read, path = flight[flight["access"] == "read"], book_folder() / "_static" / "letters.svg"
    path.write_text(moving.letters(path.read_text("utf-8"), read, chain["latency_ns"][0]), "utf-8")
    return path


def draw_poster() -> Path:
    """Draws the poster from its recordings, as SVG and as PDF. Returns the path of the SVG."""
    import matplotlib.pyplot as plt

    from memtraffic_book.figures import poster

    path, source = book_folder() / "_static" / "poster.svg", _checksums(*POSTER)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "poster"}):
        figure = poster.poster(**poster.numbers(*_published(*POSTER)))
        about = {"Date": None, "Source": source}
        figure.savefig(drawn := io.StringIO(), format="svg", metadata=about)
        about = {"CreationDate": None, "Keywords": source}
        figure.savefig(path.with_suffix(".pdf"), metadata=about)
    plt.close(figure)
    fonts = "'DejaVu Sans', Verdana, Geneva, sans-serif"  # as in the other pictures
    path.write_text(drawn.getvalue().replace("'DejaVu Sans'", fonts), "utf-8")
    return path


def execute_notebooks(paths: Sequence[Path] = ()) -> None:
    """Executes notebooks in place on the published GPU, with experiments from its recordings.

    paths: which notebooks; all of the book's by default. Nothing is written unless every one of
    them runs to its end. Raises RuntimeError on any other machine, and nbclient's errors.
    """
    import nbformat
    from nbclient import NotebookClient

    device.require_gpu("notebooks")
    if (folder := recording.folder_of_this_gpu()).name != PUBLISHED:
        raise RuntimeError(f"the pages show {PUBLISHED}, and this GPU is {folder.name}")
    environment = {
        **os.environ,
        "MEMTRAFFIC_MODE": "replay",
        "MEMTRAFFIC_RECORDINGS": str(recording.root().resolve()),
    }
    done: dict[Path, NotebookNode] = {}
    for path in paths or sorted(book_folder().glob("*.ipynb")):
        print(f"executing {path}", flush=True)
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(path.parent)}}
        options: dict[str, Any] = {"coalesce_streams": True, "record_timing": False}
        client = NotebookClient(notebook, timeout=600, resources=resources, **options)
        client.execute(env=environment)
        done[path] = _tidied(notebook)
    for path, notebook in done.items():
        nbformat.write(notebook, path)


def _tidied(notebook: NotebookNode) -> NotebookNode:
    """An executed notebook without what differs from run to run or names paths of the machine.

    These are versions and tracebacks. JupyterLab and Colab fold the code that the page folds.
    """
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        if "hide-input" in cell.metadata.get("tags", []):
            cell.metadata.update(cellView="form", jupyter={"source_hidden": True})
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output["traceback"] = [f"{output['ename']}: {output['evalue']}"]
    return notebook


def write_chart_data() -> Path:
    """Writes the GPUs of the table as JavaScript, which the chart of occupancy reads."""
    tables = {target: dataclasses.asdict(gpu) for target, gpu in gpus.TARGETS.items()}
    path = book_folder() / "_static" / "occupancy-data.js"
    path.write_text(f"window.occupancyData = {json.dumps(tables, indent=1)};\n", "utf-8")
    return path
