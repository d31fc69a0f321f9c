"""Measured results of the book: made on a GPU, recorded, and replayed where there is none.

A measured result is an *experiment*: a name and a call that returns a DataFrame. `experiment` treats it by mode:

- `live` (a GPU): the call runs, and the page says on which GPU; where the GPU's counters may not be read, it says so and
  shows the recording;
- `record` (`make record`, a GPU): it runs, and is written to `recordings/<gpu>/<name>.csv`;
- `verify` (`make verify`, a GPU): it runs, and is kept beside the recording, to be compared with it by `drift`;
- `replay` (no GPU): it is read from the recording.

The mode follows from the machine, or from MEMTRAFFIC_MODE. What a notebook gets has always been through the same CSV text, so
a replay is equal to the recorded run to the last digit.
"""

import datetime
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch

from memtraffic import machine
from memtraffic.traffic.counters import NoCounters

MODES = ("live", "record", "verify", "replay")
MEND = "`make record` on a GPU makes it anew, `git checkout book/recordings` brings the published one back"


class RecordingError(RuntimeError):
    """A recording is missing, damaged, or of something else; the message names the file and the command that mends it."""


def mode():
    """How experiments are treated in this process, one of `MODES`. Raises RecordingError for an unknown MEMTRAFFIC_MODE."""
    asked = os.environ.get("MEMTRAFFIC_MODE") or (
        "live" if machine.HAS_GPU else "replay"
    )
    if asked not in MODES:
        raise RecordingError(
            f"MEMTRAFFIC_MODE is {asked!r}: give one of {', '.join(MODES)}"
        )
    return asked


def experiment(name, fn, *args, **kwargs):
    """The DataFrame of `fn(*args, **kwargs)`, run or replayed, and a printed line that says which and on what GPU.

    name: names the recording, unique in the book. fn: a function with an attribute `columns`, the columns it returns.

    Raises RecordingError if the recording is missing, truncated, edited, of other columns or of another call.
    """
    call = describe(fn, *args, **kwargs)
    columns = getattr(fn, "columns", None)
    if mode() == "replay":
        return _replay(name, call, columns)
    try:
        frame = fn(*args, **kwargs)
    except NoCounters as error:
        if mode() != "live":
            raise
        print(f"{error}, so this is a recording.")
        return _replay(name, call, columns)
    if columns is not None and list(frame.columns) != list(columns):
        raise RecordingError(
            f"{name}: {call} returned columns {list(frame.columns)}, not {list(columns)}"
        )
    text = to_csv(frame)
    if mode() == "record":
        _say(label(write(here(), name, call, text)))
    elif mode() == "verify":
        folder = latest()
        read(folder, name, call, columns)
        kept = verify_folder(folder.parent)
        kept.mkdir(parents=True, exist_ok=True)
        (kept / f"{name}.csv").write_text(text, encoding="utf-8")
        _say(label(load_machine(folder)))
    else:
        _say(f"Measured now on {machine.gpu_name()}.")
    return from_csv(text)


def _replay(name, call, columns):
    folder = latest()
    frame = read(folder, name, call, columns)
    _say(label(load_machine(folder)))
    return frame


_said = set()  # what this cell has said already


def _say(text):
    """Prints a line, once a cell: several experiments in one cell have one origin."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell and _forget not in shell.events.callbacks["pre_run_cell"]:
        shell.events.register("pre_run_cell", _forget)
    if not shell or text not in _said:
        print(text)
    _said.add(text)


def _forget(_info):
    _said.clear()


def describe(fn, *args, **kwargs):
    """A call as text, by which a recording knows what it is a recording of."""

    def shown(value):
        if isinstance(value, dict):
            return "{" + ", ".join(map(shown, value)) + "}"
        if isinstance(value, (list, tuple)):
            inside = ", ".join(map(shown, value)) + (
                "," if isinstance(value, tuple) and len(value) == 1 else ""
            )
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        return getattr(value, "__qualname__", None) or repr(value)

    parts = [shown(value) for value in args] + [
        f"{name}={shown(value)}" for name, value in kwargs.items()
    ]
    return f"{shown(fn)}({', '.join(parts)})"


def to_csv(frame):
    """A DataFrame as the text of a recording: six significant digits, one line a row."""
    return frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def from_csv(text):
    """The DataFrame of a recording's text."""
    return pd.read_csv(io.StringIO(text), keep_default_na=False)


def root():
    """The folder of recordings: MEMTRAFFIC_RECORDINGS, or `recordings` here, under `book/` here, or in the checkout."""
    if asked := os.environ.get("MEMTRAFFIC_RECORDINGS"):
        return Path(asked)
    checkout = Path(__file__).resolve().parents[2]
    places = [
        Path("recordings"),
        Path("book/recordings"),
        checkout / "book" / "recordings",
    ]
    return next((place for place in places if place.is_dir()), places[0])


def here():
    """The folder of recordings of this machine's GPU."""
    return root() / machine.slug(machine.gpu_name())


def latest(recordings=None):
    """The newest folder in `recordings`, the one the stored pages come from. Raises RecordingError if there is none."""
    recordings = recordings or root()
    found = [
        (load_machine(path.parent)["date"], path.parent)
        for path in sorted(recordings.glob("*/machine.json"))
    ]
    if not found:
        raise RecordingError(f"{recordings}: no recording; {MEND}")
    return max(found)[1]


def load_machine(folder):
    """What `folder/machine.json` says. Raises RecordingError if it is missing or no JSON."""
    path = folder / "machine.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path}: {error}; {MEND}") from error


def label(about):
    """One line that says where a recorded result comes from."""
    return f"Recorded on {about['gpu']}, {about['date']} (PyTorch {about['torch']}, Triton {about['triton']})."


def read(folder, name, call=None, columns=None):
    """The recording `name` in `folder` as a DataFrame, checked against its checksum, its `call` and its `columns`.

    Raises RecordingError, which names the file and the command that mends it.
    """
    path = folder / f"{name}.csv"
    entry = load_machine(folder)["experiments"].get(name)
    if entry is None or not path.is_file():
        raise RecordingError(f"{path}: missing; {MEND}")
    text = path.read_text(encoding="utf-8")
    rows = len(text.splitlines()) - 1
    if rows < entry["rows"] or not text.endswith("\n"):
        raise RecordingError(
            f"{path}: truncated, {max(rows, 0)} of {entry['rows']} rows; {MEND}"
        )
    if checksum(text) != entry["sha256"]:
        raise RecordingError(
            f"{path}: changed since it was recorded, its checksum is another; {MEND}"
        )
    frame = from_csv(text)
    if columns is not None and list(frame.columns) != list(columns):
        raise RecordingError(
            f"{path}: has columns {list(frame.columns)}, not {list(columns)}; {MEND}"
        )
    if call is not None and call != entry["call"]:
        raise RecordingError(
            f"{path}: is a recording of {entry['call']}, not of {call}; to measure that, run this on a GPU"
        )
    return frame


def write(folder, name, call, text):
    """Writes one recording and its entry in `machine.json`; returns what that file now says."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "machine.json"
    about = (
        load_machine(folder)
        if path.exists()
        else describe_machine() | {"experiments": {}}
    )
    if name in about["experiments"] and about["experiments"][name]["call"] != call:
        raise RecordingError(
            f"{folder / name}.csv: two experiments share this name, {about['experiments'][name]['call']} and {call}"
        )
    (folder / f"{name}.csv").write_text(text, encoding="utf-8")
    about["experiments"][name] = {
        "call": call,
        "rows": len(text.splitlines()) - 1,
        "sha256": checksum(text),
    }
    path.write_text(
        json.dumps(about, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    return about


def checksum(text):
    """The SHA-256 of a recording's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def describe_machine():
    """What a recording says of the machine that made it."""
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    commit = os.environ.get("MEMTRAFFIC_COMMIT")  # where the sources are not a checkout
    if not commit:
        commit = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", "HEAD"],
            capture_output=True,
            text=True,
        ).stdout
    return {
        "gpu": machine.gpu_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit.strip() or "unknown",
    }


# ---- the whole book


def record_book(book):
    """Executes the notebooks of the folder `book` in place and records every experiment into `book/recordings/<gpu>`.

    Nothing is replaced unless every notebook runs to its end. Returns the folder of the recordings. Needs nbclient and a GPU.
    """
    import nbformat
    from nbclient import NotebookClient

    machine.require_gpu("record")
    folder = book / "recordings" / machine.slug(machine.gpu_name())
    fresh = book / "_build" / "recordings"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    done = {}
    os.environ |= {
        "MEMTRAFFIC_MODE": "record",
        "MEMTRAFFIC_RECORDINGS": str(fresh.resolve()),
    }
    for path in sorted(book.glob("*.ipynb")):
        print(f"recording {path}", flush=True)
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
        ).execute()
        done[path] = tidy(notebook)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(fresh / folder.name, folder)
    for path, notebook in done.items():
        nbformat.write(notebook, path)
    return folder


def tidy(notebook):
    """Takes out of an executed notebook what differs from run to run or names paths: timestamps, versions, tracebacks.

    What a cell printed in one go stands in one output, however it arrived.
    """
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        merged = []
        for output in cell.outputs:
            if output.output_type == "error":
                output["traceback"] = [f"{output['ename']}: {output['evalue']}"]
            if output.output_type == "stream" and merged:
                if merged[-1].get("name") == output["name"]:
                    merged[-1]["text"] += output["text"]
                    continue
            merged.append(output)
        cell.outputs = merged
    return notebook


def verify_folder(recordings):
    """Where mode `verify` keeps what it measured."""
    return recordings.parent / "_build" / "verify"


def drift(book, limit=0.10, short_limit=0.20, short_us=20.0, noise_bytes=2**20):
    """Compares what mode `verify` measured with the recording: a list of sentences, one for each value that drifted.

    Text must be equal. A number must lie within `limit` of its recording, or `short_limit` in rows whose `us` is under
    `short_us`. Bytes may also differ by `noise_bytes`, which page tables and a kernel's own code and arguments come to.
    Percentiles (`us_p20`, `us_p80`) describe the spread of one run, and columns named `host_…` the host's processor and what
    else it does: these are not compared.

    Raises RecordingError if an experiment was not measured, or if the GPU is not the recorded model.
    """
    folder = latest(book / "recordings")
    about = load_machine(folder)
    if machine.gpu_name() != about["gpu"]:
        raise RecordingError(
            f"{folder}: recorded on {about['gpu']}, cannot be compared with {machine.gpu_name()}"
        )
    misses = []
    for name in about["experiments"]:
        path = verify_folder(folder.parent) / f"{name}.csv"
        if not path.is_file():
            raise RecordingError(f"{path}: not measured; run `make verify`")
        misses += compare(
            name,
            read(folder, name),
            from_csv(path.read_text(encoding="utf-8")),
            limit,
            short_limit,
            short_us,
            noise_bytes=noise_bytes,
        )
    return misses


def compare(
    name,
    recorded,
    measured,
    limit=0.10,
    short_limit=0.20,
    short_us=20.0,
    noise_bytes=2**20,
):
    """The rows of `measured` that drifted from `recorded`, as sentences; see `drift`."""
    if list(recorded.columns) != list(measured.columns):
        return [
            f"{name}: columns {list(measured.columns)} measured, {list(recorded.columns)} recorded"
        ]
    if len(recorded) != len(measured):
        return [
            f"{name}: {measured.shape[0]} rows measured, {recorded.shape[0]} recorded"
        ]
    misses = []
    for row, (was, now) in enumerate(
        zip(recorded.to_dict("records"), measured.to_dict("records"), strict=True)
    ):
        allowed = short_limit if was.get("us", short_us) < short_us else limit
        for column, old in was.items():
            new = now[column]
            if column in ("us_p20", "us_p80") or column.startswith("host_"):
                continue
            if isinstance(old, str) or isinstance(new, str):
                wrong, by = old != new, ""
            else:
                slack = noise_bytes if column.endswith("_bytes") else 0
                wrong, by = (
                    abs(new - old) > max(allowed * abs(old), slack),
                    f" ({(new / old - 1) if old else 1:+.1%})",
                )
            if wrong:
                key = ", ".join(
                    str(value) for value in was.values() if isinstance(value, str)
                )
                misses.append(
                    f"{name} row {row} ({key}): {column} was {old}, is {new}{by}"
                )
    return misses
