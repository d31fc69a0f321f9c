"""Measured results of the book: measured on a GPU, recorded, and replayed where there is no GPU.

`experiment` treats an experiment of `catalog.EXPERIMENTS` by mode:

- `live`, the default on a GPU: it is measured, and the page names the GPU. Where the machine lacks
  what the experiment needs, such as counters that can be read or a memory fast enough for a
  reader to wait, or refuses a kernel, the page says so and shows the recording;
- `verify`, for comparing pages on a GPU: the first page that asks measures it again, for all pages,
  and the page shows the recording's label;
- `replay`, the default without a GPU: it is read from the recording.

MEMTRAFFIC_MODE overrides the default. A page gets every result through the text of a CSV file, so a
replay equals the recorded run to the last digit. `build.record_experiments` writes recordings.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import html
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import triton

from memtraffic import device
from memtraffic.benchmark.loop import ABSENT
from memtraffic.errors import CountersUnavailable, MemtrafficError, described
from memtraffic_book.catalog import Experiment, find_experiments
from memtraffic_book.text import elsewhere, say

PUBLISHED = "nvidia-h200"  # the folder whose recordings the pages show
MACHINE = "machine.json"
DRIFT = "drift.csv"  # beside the recordings: how far a second measurement lay from them
MODES = ("live", "verify", "replay")
said: set[str] = set()  # the origins of results that this process has named, each once
measured: dict[str, pd.DataFrame] = {}  # what it measured, mode `live`: a page has one value of it


class RecordingError(MemtrafficError, RuntimeError):
    """A recording is missing, damaged, or of something else; the message says what mends it."""


def speeds(frame: pd.DataFrame) -> pd.DataFrame:
    """The speed of each implementation as a share of a copy's: a row for each number of columns.

    frame: a result with `impl`, `n` and `us`. NaN where an implementation was not timed.
    """
    us = frame[frame["us"] > 0].pivot(index="n", columns="impl", values="us")
    return us.rdiv(us["copy"], axis=0)


def how_to_fix(*ids: str) -> str:
    """The commands that mend recordings, as the end of an error's message."""
    record = " ".join(("`python -m memtraffic_book record", *ids)) + "`"
    return f"{record} on a GPU measures again, `git checkout book/recordings` restores what was"


def mode() -> str:
    """How experiments are treated in this process, one of `MODES`.

    Raises RecordingError for an unknown MEMTRAFFIC_MODE.
    """
    chosen = os.environ.get("MEMTRAFFIC_MODE") or ("live" if device.HAS_GPU else "replay")
    if chosen not in MODES:
        raise RecordingError(f"MEMTRAFFIC_MODE is {chosen!r}: give one of {', '.join(MODES)}")
    return chosen


def experiment(id: str, gpu: str | None = None) -> pd.DataFrame:
    """The result of one experiment, measured or replayed; says which, and on what GPU, once a page.

    id: a key of `catalog.EXPERIMENTS`. gpu: the folder of another GPU's recordings, which is then
    replayed in every mode.

    Raises LookupError for an unknown id; RecordingError if the recording is missing, truncated,
    edited, or of other arguments or columns.
    """
    [frame] = experiments(id, gpu=gpu)
    return frame


def experiments(*ids: str, gpu: str | None = None) -> list[pd.DataFrame]:
    """The results of several experiments; says each origin that the page has not named before.

    All of them are of one GPU: if one cannot be measured here, none is. ids, gpu: as for
    `experiment`.
    """
    subjects, folder = find_experiments(ids), root() / (gpu or PUBLISHED)
    origins = [label(folder)] if gpu or mode() != "live" else []
    if gpu or mode() == "replay":
        frames = [read(folder, subject) for subject in subjects]
    elif mode() == "verify":
        frames = [_measured_again(subject, folder) for subject in subjects]
    else:
        frames, origins = _measure_now(subjects, folder)
    for origin in origins:
        if origin not in said:
            said.add(origin)
            say(origin, f'<small class="origin">{html.escape(origin)}</small>')
    return frames


def experiments_for_verdicts(*ids: str) -> list[pd.DataFrame]:
    """The results of experiments, as `experiments` gives and announces them.

    A verdict, such as which of two kernels is faster, may change with a percent of a time. So where
    a page is compared with its stored outputs on a GPU, in mode `verify`, the verdicts are those of
    the recordings, whose numbers `drift` compares with what it measures.
    """
    return experiments(*ids, gpu=PUBLISHED if mode() == "verify" else None)


def _measured_again(subject: Experiment, folder: Path) -> pd.DataFrame:
    """What the first page that asks measures, and keeps; the recording, where a reader has that."""
    recorded, path = read(folder, subject), folder_of_verify() / f"{subject.id}.csv"
    if subject.needs.lacking(reader=True):
        return recorded
    if not path.is_file():
        with _printed_to(path.with_suffix(".log")):
            text = to_csv(subject.run())
        path.write_text(text, encoding="utf-8")
    return from_csv(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    """What is printed meanwhile, also by processes, goes to a file: a page shows a recording."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(file))
        stack.enter_context(contextlib.redirect_stderr(file))
        for number in (1, 2):
            ours = os.dup(number)
            stack.callback(os.close, ours)
            stack.callback(os.dup2, ours, number)
            os.dup2(file.fileno(), number)
        yield


def _measure_now(
    subjects: Sequence[Experiment], folder: Path
) -> tuple[list[pd.DataFrame], list[str]]:
    """What is measured; recordings, and the reason, where this GPU or its driver refuses one.

    The lines say where the results come from.
    """
    needs = {subject.id: subject.needs.lacking(reader=True) for subject in subjects}
    why = [f"{id} needs {lacking}" for id, lacking in needs.items() if lacking]
    try:
        for subject in () if why else subjects:
            if subject.id not in measured:
                measured[subject.id] = from_csv(to_csv(subject.run()))
    except CountersUnavailable as error:
        why = [str(error)]
    except (MemtrafficError, RuntimeError, triton.TritonError) as error:
        why = [f"{subject.id} is refused here ({described(error)[:200]})"]
    if why:
        replayed = [read(folder, subject) for subject in subjects]
        return replayed, [*(f"{it}, so this is a recording." for it in why), label(folder)]
    if folder_of_this_gpu().name != PUBLISHED:
        elsewhere.add(device.gpu_name())
    found = [measured[subject.id].copy() for subject in subjects]
    return found, [f"Measured now on {device.gpu_name()}."]


def is_absent(row: Mapping[str, Any]) -> bool:
    """Whether a row of a result says that a package was absent where it was measured.

    >>> is_absent({"impl": "Liger", "note": "absent: liger-kernel is not installed"})
    True
    """
    reasons = (str(row.get(column, "")) for column in ("note", "missing", "refused"))
    return any(reason.startswith(ABSENT) for reason in reasons)


def folder_of_verify() -> Path:
    """The folder of what is measured again, by mode `verify` or `drift`.

    Whoever compares pages anew removes it before.
    """
    return root().parent / "_build" / "verify"


def to_csv(frame: pd.DataFrame) -> str:
    """The text of a recording: a line for each row, six significant digits."""
    return frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def from_csv(text: str) -> pd.DataFrame:
    """The DataFrame of a recording's text."""
    return pd.read_csv(io.StringIO(text), keep_default_na=False)


def root() -> Path:
    """The folder of recordings.

    It is MEMTRAFFIC_RECORDINGS; else `recordings` here, or under `book` here, or in the checkout.
    """
    if folder := os.environ.get("MEMTRAFFIC_RECORDINGS"):
        return Path(folder)
    checkout = Path(__file__).resolve().parents[2]
    places = [Path("recordings"), Path("book/recordings"), checkout / "book" / "recordings"]
    return next((place for place in places if place.is_dir()), places[0])


def folder_name(gpu_name: str) -> str:
    """A GPU's name as the name of a folder.

    >>> folder_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def folder_of_this_gpu() -> Path:
    """The folder for recordings of the GPU that is here. Raises RuntimeError without a GPU."""
    return root() / folder_name(device.gpu_name())


def load_machine(folder: Path) -> dict[str, Any]:
    """The contents of `machine.json` in a folder: the machine's facts and an entry per experiment.

    Raises RecordingError if the file is missing or not JSON.
    """
    path = folder / MACHINE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path}: {error}; {how_to_fix()}") from error


def label(folder: Path) -> str:
    """The line that says where recorded results come from; the page on recordings has the dates."""
    machine = load_machine(folder)
    return f"Recorded on {machine['gpu']} (PyTorch {machine['torch']}, Triton {machine['triton']})."


def read(folder: Path, subject: Experiment) -> pd.DataFrame:
    """The recording of an experiment in a folder.

    It is checked against its checksum, and against the experiment's arguments and columns. Raises
    RecordingError, which names the file and the command that mends it.
    """
    path, fix = folder / f"{subject.id}.csv", how_to_fix(subject.id)
    entry = load_machine(folder)["experiments"].get(subject.id)
    if entry is None or not path.is_file():
        raise RecordingError(f"{path}: missing; {fix}")
    text = path.read_text(encoding="utf-8")
    rows = len(text.splitlines()) - 1
    if rows < entry["rows"] or not text.endswith("\n"):
        raise RecordingError(f"{path}: truncated, {max(rows, 0)} of {entry['rows']} rows; {fix}")
    if checksum(text) != entry["sha256"]:
        raise RecordingError(f"{path}: edited, its checksum is not the recorded one; {fix}")
    for what, recorded, wanted in (
        ("arguments", entry.get("arguments"), subject.arguments),
        ("columns", list(entry.get("columns", {}).items()), list(subject.schema.items())),
        ("columns", text.split("\n")[0].split(","), list(subject.schema)),
    ):
        if recorded != wanted:
            raise RecordingError(f"{path}: recorded with {what} {recorded}, not {wanted}; {fix}")
    return from_csv(text)


def is_of_this_machine(folder: Path) -> bool:
    """Whether what a folder holds, if anything, comes from this machine and these versions."""
    if not (folder / MACHINE).exists():
        return True
    return describe_machine().items() <= load_machine(folder).items()


def write(folder: Path, subject: Experiment, frame: pd.DataFrame) -> None:
    """Writes the recording of an experiment, and its entry in `machine.json`.

    Raises RecordingError if the folder's other recordings come from another machine or versions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not is_of_this_machine(folder):
        mix = f"recorded on another machine or versions than {describe_machine()}"
        raise RecordingError(f"{folder}: {mix}; {how_to_fix()}")
    text = to_csv(frame)
    machine: dict[str, Any] = {**describe_machine(), "experiments": {}}
    if (folder / MACHINE).exists():
        machine = load_machine(folder)
    machine["experiments"][subject.id] = {
        "arguments": subject.arguments,
        "columns": subject.schema,
        "commit": current_commit(),
        "date": today(),
        "rows": len(frame),
        "sha256": checksum(text),
    }
    (folder / f"{subject.id}.csv").write_text(text, encoding="utf-8")
    (folder / MACHINE).write_text(format_machine(**machine), encoding="utf-8")


def today() -> str:
    """The date a recording is given, as YYYY-MM-DD."""
    return datetime.date.today().isoformat()


def format_machine(experiments: dict[str, Any], **machine: str) -> str:
    """The text of `machine.json`: one line for each experiment, in the order of their ids."""
    lines = [
        f'  "{id}": {json.dumps(experiments[id], ensure_ascii=False)}' for id in sorted(experiments)
    ]
    facts = [f" {json.dumps(key)}: {json.dumps(machine[key])}" for key in sorted(machine)]
    entries = ' "experiments": {\n' + ",\n".join(lines) + "\n }"
    return "{\n" + ",\n".join([*facts, entries]) + "\n}\n"


def checksum(text: str) -> str:
    """The SHA-256 of a recording's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def describe_machine() -> dict[str, str]:
    """What a recording says about the machine: the GPU, its driver, and versions of software.

    The key of the toolkit is `cuda` or `rocm`. Raises RuntimeError without a GPU.
    """
    hip = torch.version.hip
    return {
        "gpu": device.gpu_name(),
        "driver": driver_version(),
        **({"rocm": hip} if hip else {"cuda": str(torch.version.cuda)}),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def driver_version() -> str:
    """The version of the GPU's kernel driver, `unknown` where the system does not tell.

    NVIDIA's comes from `nvidia-smi`, AMD's from the `amdgpu` module of Linux.
    """
    if torch.version.hip:
        module = Path("/sys/module/amdgpu/version")
        return module.read_text(encoding="utf-8").strip() if module.exists() else "unknown"
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def current_commit() -> str:
    """The commit of the sources: MEMTRAFFIC_COMMIT, else git's answer, else `unknown`."""
    if commit := os.environ.get("MEMTRAFFIC_COMMIT"):
        return commit
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    if shutil.which("git") is None:
        return "unknown"
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"
