"""Measures experiments again, and compares the results with what this GPU's recordings say.

How far they lie apart is kept beside the recordings, in `drift.csv`: of each column that is
compared, the row that differs most. Measured on a second machine with such a GPU, it says what a
recorded number is worth there.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd

from memtraffic import device
from memtraffic_book import build, catalog, recording
from memtraffic_book.catalog import Experiment, find_experiments
from memtraffic_book.recording import DRIFT, RecordingError, is_absent

# What page tables, and a kernel's own code and arguments, come to, where a tolerance is given.
NOISE = {"bytes": 2.0**20}
SHORT_US = 20.0  # rows that take less have twice the tolerance
VALUES = ["experiment", "column", "unit", "row", "recorded", "measured", "difference", "tolerance"]
ORIGIN = ["date", "commit", "driver", "torch", "triton"]  # of what was measured again


def measure_again(ids: Sequence[str] = ()) -> list[str]:
    """Runs experiments again: returns a sentence for each value that drifted from its recording.

    The largest differences are written to `drift.csv` in the folder of this GPU's recordings.

    ids: which experiments; all of them by default. What this machine cannot measure is skipped by
    name. Raises RuntimeError without a GPU, LookupError for an unknown id, RecordingError if a
    recording of this GPU is missing or damaged, or an experiment fails.
    """
    device.require_gpu("drift")
    folder = recording.folder_of_this_gpu()
    subjects = [it for it in find_experiments(ids) if not it.needs.lacking()]
    again = build.record_experiments(ids, recording.folder_of_verify())
    machine, path = recording.load_machine(again), folder / DRIFT
    before = _read(path) if path.is_file() else pd.DataFrame(columns=VALUES + ORIGIN)
    sentences, frames = [], [before[~before["experiment"].isin([it.id for it in subjects])]]
    for subject in subjects:
        was, now = recording.read(folder, subject), recording.read(again, subject)
        origin = machine | machine["experiments"][subject.id]
        found, values = compare(subject, was, now)
        sentences += found
        worst = values["difference"].abs().groupby(values["column"], sort=False).idxmax()
        frames.append(values.loc[worst].assign(**{name: origin[name] for name in ORIGIN}))
        if gone := sum(map(is_absent, now.to_dict("records"))):
            print(f"{subject.id}: the packages of {gone} of {len(now)} rows are absent here")
    every = pd.concat([it for it in frames if len(it)] or frames[:1]).set_index("experiment")
    listed = [id for id in catalog.EXPERIMENTS if id in every.index]
    path.write_text(recording.to_csv(every.loc[listed].reset_index()), encoding="utf-8")
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
    path, again = folder / DRIFT, "`python -m memtraffic_book drift"
    if not path.is_file():
        raise RecordingError(f"{path}: missing; {again}` on a GPU makes it")
    frame = _read(path)
    for id, rows in frame.groupby("experiment", sort=False):
        [subject] = find_experiments([id])
        recorded = recording.read(folder, subject)
        for column, row, was in rows[["column", "row", "recorded"]].itertuples(index=False):
            now = recorded[column].get(row)
            if not isinstance(now, Real) or float(f"{now:.6g}") != was:
                fix = f"{again} {id}` on a GPU compares it again"
                raise RecordingError(f"{path}: {id} was recorded anew since; {fix}")
    name = recording.load_machine(folder)["gpu"]
    for date, *versions in frame[[it for it in ORIGIN if it != "commit"]].drop_duplicates().values:
        driver, torch, triton = versions
        print(
            f"A second measurement, on {name}: {date} "
            f"(driver {driver}, PyTorch {torch}, Triton {triton})."
        )
    return frame


def _read(path: Path) -> pd.DataFrame:
    text = dict.fromkeys(ORIGIN, str)  # a commit or a version may look like a number
    return pd.read_csv(path, keep_default_na=False, dtype=text, encoding="utf-8")


def compare(
    subject: Experiment, recorded: pd.DataFrame, measured: pd.DataFrame
) -> tuple[list[str], pd.DataFrame]:
    """The values of `measured` that drifted from `recorded`, as sentences; and how far all lie.

    Text must be equal. A number may differ by its column's tolerance times the recorded number,
    twice that in rows whose `us` is under 20, or by the noise of its unit. Rows of a package that
    is absent here, or was so then, are not compared. The DataFrame has the columns `VALUES`, a row
    for each number that has a tolerance, but those recorded as 0, or so small that noise may exceed
    it.
    """
    if len(recorded) != len(measured):
        several = f"{len(measured)} rows measured, {len(recorded)} recorded"
        return [f"{subject.id}: {several}"], pd.DataFrame(columns=VALUES)
    sentences, values = [], []
    pairs = zip(recorded.to_dict("records"), measured.to_dict("records"), strict=True)
    for row, (was, now) in enumerate(pairs):
        if (is_absent(was) or is_absent(now)) and _text(was) == _text(now):
            continue
        for column in subject.columns:
            old, new = was[column.name], now[column.name]
            if column.tolerance is None:
                continue
            tolerance = column.tolerance * (2 if was.get("us", SHORT_US) < SHORT_US else 1)
            numbers = not isinstance(old, str) and not isinstance(new, str)
            noise = NOISE.get(column.unit, 0) if tolerance else 0
            allowed = max(tolerance * abs(old), noise) if numbers else 0
            if old != new and not (numbers and abs(new - old) <= allowed):
                key = ", ".join(value for value in was.values() if isinstance(value, str))
                change = f" ({new / old - 1:+.1%})" if numbers and old else ""
                place = f"{subject.id} row {row} ({key})"
                sentences.append(f"{place}: {column.name} was {old}, is {new}{change}")
            if numbers and tolerance and old and noise <= tolerance * abs(old):
                known = subject.id, column.name, column.unit, row, old, new
                values.append((*known, new / old - 1, tolerance))
    return sentences, pd.DataFrame(values, columns=VALUES)


def _text(row: dict[str, Any]) -> list[str]:
    """What a row is of: its text, but for what an absent package changes."""
    of_package = ("version", "note", "missing", "refused")
    return [it for name, it in row.items() if isinstance(it, str) and name not in of_package]
