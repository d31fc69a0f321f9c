"""Measures experiments again, and compares the results with what this GPU's recordings say."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from memtraffic import runtime
from memtraffic.book import recording
from memtraffic.book.catalog import Experiment, find_experiments

SHORT_US = 20.0  # rows that take less have twice the tolerance


def measure_again(ids: Sequence[str] = ()) -> list[str]:
    """Runs experiments again: returns a sentence for each value that drifted from its recording.

    What re-executing the notebooks in mode `verify` has measured already is taken from there.

    ids: which experiments; all of them by default. Raises RuntimeError without a GPU,
    LookupError for an unknown id, RecordingError if a recording of this GPU is missing or damaged.
    """
    runtime.require_gpu("drift")
    subjects, folder = find_experiments(ids), recording.folder_of_this_gpu()
    recorded = [recording.read(folder, subject) for subject in subjects]
    sentences = []
    for subject, was in zip(subjects, recorded, strict=True):
        kept = recording.kept_path(subject.id)
        text = kept.read_text("utf-8") if kept.is_file() else recording.to_csv(subject.run())
        now = recording.from_csv(text)
        sentences += (found := compare(subject, was, now))
        print(f"{subject.id}: {'drifted' if found else 'as recorded'}", flush=True)
    return sentences


def compare(subject: Experiment, recorded: pd.DataFrame, measured: pd.DataFrame) -> list[str]:
    """The values of `measured` that drifted from `recorded`, as sentences.

    Text must be equal. A number may differ by its column's tolerance times the recorded number,
    twice that in rows whose `us` is under 20, or by its column's noise.
    """
    if len(recorded) != len(measured):
        return [f"{subject.id}: {len(measured)} rows measured, {len(recorded)} recorded"]
    sentences = []
    pairs = zip(recorded.to_dict("records"), measured.to_dict("records"), strict=True)
    for row, (was, now) in enumerate(pairs):
        factor = 2 if was.get("us", SHORT_US) < SHORT_US else 1
        for column in subject.columns:
            old, new = was[column.name], now[column.name]
            if column.tolerance is None or old == new:
                continue
            change = ""
            if not isinstance(old, str) and not isinstance(new, str):
                limit = max(factor * column.tolerance * abs(old), column.noise)
                if abs(new - old) <= limit:
                    continue
                change = f" ({new / old - 1:+.1%})" if old else ""
            key = ", ".join(value for value in was.values() if isinstance(value, str))
            sentences.append(
                f"{subject.id} row {row} ({key}): {column.name} was {old}, is {new}{change}"
            )
    return sentences
