"""Measures experiments again, and compares the results with what this GPU's recordings say.

How far they lie apart is kept beside the recordings, in `drift.csv`: of each column that is
compared, the row that differs most. Measured on a second machine with such a GPU, it says what a
recorded number is worth there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from memtraffic import runtime
from memtraffic_book import catalog, recording
from memtraffic_book.catalog import Column, Experiment, find_experiments, measurable
from memtraffic_book.recording import DRIFT, RecordingError, is_absent

SHORT_US = 20.0  # rows that take less have twice the tolerance
VALUES = ["experiment", "column", "unit", "row", "recorded", "measured", "difference", "tolerance"]
ORIGIN = ["date", "commit", "driver", "torch", "triton"]  # of what was measured again


def measure_again(ids: Sequence[str] = ()) -> list[str]:
    """Runs experiments again: returns a sentence for each value that drifted from its recording.

    What re-executing the notebooks in mode `verify` has measured already is taken from there. The
    largest differences are written to `drift.csv` in the folder of this GPU's recordings.

    ids: which experiments; all of them by default. What this machine cannot measure is skipped by
    name. Raises RuntimeError without a GPU, LookupError for an unknown id, RecordingError if a
    recording of this GPU is missing or damaged.
    """
    runtime.require_gpu("drift")
    folder, subjects = recording.folder_of_this_gpu(), list(measurable(find_experiments(ids)))
    recorded = [recording.read(folder, subject) for subject in subjects]
    sentences, rows = [], []
    for subject, was in zip(subjects, recorded, strict=True):
        kept = recording.kept_path(subject.id)
        text = kept.read_text("utf-8") if kept.is_file() else recording.to_csv(subject.run())
        now = recording.from_csv(text)
        sentences += (found := compare(subject, was, now))
        rows += largest_differences(subject, was, now)
        outcome = "drifted" if found else "as recorded"
        if gone := sum(map(is_absent, now.to_dict("records"))):
            outcome += f", but for {gone} of {len(now)} rows, whose packages are absent here"
        print(f"{subject.id}: {outcome}", flush=True)
    _write(folder / DRIFT, [subject.id for subject in subjects], rows)
    return sentences


def read_drift() -> pd.DataFrame:
    """How far a second measurement lay from the published recordings; prints where it was made.

    Columns: `experiment`, `column` and its `unit`; of the row that
    differs most, its number `row`, what was `recorded` and what was `measured`, the relative
    `difference` and the `tolerance` for it; `date`, `commit`, `driver`, `torch` and `triton` of the
    second measurement.

    Raises RecordingError if there is none, or if an experiment was recorded anew since.
    """
    folder = recording.root() / recording.PUBLISHED
    path = folder / DRIFT
    if not path.is_file():
        raise RecordingError(
            f"{path}: missing; `python -m memtraffic_book drift` on a GPU makes it"
        )
    frame = _read(path)
    for id, rows in frame.groupby("experiment", sort=False):
        [subject] = find_experiments([id])
        recorded = recording.read(folder, subject)
        for row in rows.to_dict("records"):
            now = dict(enumerate(recorded[row["column"]])).get(row["row"])
            if not isinstance(now, int | float) or float(f"{now:.6g}") != row["recorded"]:
                again = f"`python -m memtraffic_book drift {id}` on a GPU compares it again"
                raise RecordingError(f"{path}: {id} was recorded anew since; {again}")
    name = recording.load_machine(folder)["gpu"]
    shown = [column for column in ORIGIN if column != "commit"]
    for origin in frame[shown].drop_duplicates().to_dict("records"):
        versions = (
            f"driver {origin['driver']}, PyTorch {origin['torch']}, Triton {origin['triton']}"
        )
        print(f"Measured again on {name}, {origin['date']} ({versions}).")
    return frame


def _read(path: Path) -> pd.DataFrame:
    text = dict.fromkeys(ORIGIN, str)  # a commit or a version may look like a number
    return pd.read_csv(path, keep_default_na=False, dtype=text, encoding="utf-8")


def _write(path: Path, ids: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows of experiments `ids`; those of others stay, if they are in the catalog."""
    machine = recording.describe_machine()
    origin = {
        "date": recording.today(),
        "commit": recording.current_commit(),
        **{key: machine[key] for key in ("driver", "torch", "triton")},
    }
    frames = [pd.DataFrame([row | origin for row in rows], columns=[*VALUES, *ORIGIN])]
    if path.is_file():
        kept = _read(path)
        frames.append(kept[~kept["experiment"].isin(ids)])
    order = {id: place for place, id in enumerate(catalog.EXPERIMENTS)}
    frame = pd.concat([it for it in frames if len(it)] or frames[:1], ignore_index=True)
    frame = frame[frame["experiment"].isin(order)]
    frame = frame.sort_values("experiment", key=lambda ids: ids.map(order), kind="stable")
    path.write_text(recording.to_csv(frame), encoding="utf-8")


def _compared(
    subject: Experiment, recorded: pd.DataFrame, measured: pd.DataFrame
) -> Iterator[tuple[int, dict[str, Any], Column, Any, Any]]:
    """What is compared: row, what was recorded there, column, its recorded and measured values.

    Rows of a package that is absent here, or was so then, are left out.
    """
    pairs = zip(recorded.to_dict("records"), measured.to_dict("records"), strict=True)
    for row, (was, now) in enumerate(pairs):
        if (is_absent(was) or is_absent(now)) and _text(was) == _text(now):
            continue
        for column in subject.columns:
            if column.tolerance is not None:
                yield row, was, column, was[column.name], now[column.name]


def largest_differences(
    subject: Experiment, recorded: pd.DataFrame, measured: pd.DataFrame
) -> list[dict[str, Any]]:
    """Of each column that is compared with a tolerance, the row whose relative difference is most.

    Rows that were recorded as 0 are left out, those so small that noise may exceed the tolerance,
    and those of a package that is absent here or was so then.
    Returns a dict for each column, with the keys `VALUES`.
    """
    if len(recorded) != len(measured):
        return []
    most: dict[Column, list[Any]] = {}
    for row, was, column, old, new in _compared(subject, recorded, measured):
        if not column.tolerance or isinstance(old, str) or isinstance(new, str) or not old:
            continue
        tolerance, difference = _tolerance(column, was), new / old - 1
        if column.noise > tolerance * abs(old):
            continue
        if column not in most or abs(difference) > abs(most[column][6]):
            known = [subject.id, column.name, column.unit, row, old, new]
            most[column] = [*known, difference, tolerance]
    order = [most[column] for column in subject.columns if column in most]
    return [dict(zip(VALUES, values, strict=True)) for values in order]


def _text(row: dict[str, Any]) -> list[str]:
    """What a row is of: its text, but for what an absent package changes."""
    of_package = ("version", "note", "missing")
    return [it for name, it in row.items() if isinstance(it, str) and name not in of_package]


def _tolerance(column: Column, was: dict[str, Any]) -> float:
    """The relative tolerance of a column in the recorded row `was`."""
    assert column.tolerance is not None
    return column.tolerance * (2 if was.get("us", SHORT_US) < SHORT_US else 1)


def compare(subject: Experiment, recorded: pd.DataFrame, measured: pd.DataFrame) -> list[str]:
    """The values of `measured` that drifted from `recorded`, as sentences.

    Text must be equal. A number may differ by its column's tolerance times the recorded number,
    twice that in rows whose `us` is under 20, or by its column's noise. Rows of a package that is
    absent here, or was so then, are not compared.
    """
    if len(recorded) != len(measured):
        return [f"{subject.id}: {len(measured)} rows measured, {len(recorded)} recorded"]
    sentences = []
    for row, was, column, old, new in _compared(subject, recorded, measured):
        if old == new:
            continue
        change = ""
        if not isinstance(old, str) and not isinstance(new, str):
            if abs(new - old) <= max(_tolerance(column, was) * abs(old), column.noise):
                continue
            change = f" ({new / old - 1:+.1%})" if old else ""
        key = ", ".join(value for value in was.values() if isinstance(value, str))
        place = f"{subject.id} row {row} ({key})"
        sentences.append(f"{place}: {column.name} was {old}, is {new}{change}")
    return sentences
