"""Hardware counters of many calls in one process, with reports as `ncu` writes them."""

import json
import sys
from contextlib import contextmanager

import pytest

from memtraffic.errors import CountersError
from memtraffic.meters import counters
from memtraffic_book import marked_counters
from memtraffic_book.catalog import EXPERIMENTS

pytest.importorskip("triton", reason="Triton is not installed")

MARK = marked_counters.MARKER
CASES = ("memtraffic.softmax", [[4, 8], [2, 16]], ["float32", "bfloat16"])


def report(*kernels):
    """What ncu prints for these kernels; each metric of the i-th is i, from 0."""
    header = ["ID", "Kernel Name", *counters.METRICS.values()]
    rows = [header, [""] * len(header)]
    rows += [[str(i), name, *[str(i)] * len(counters.METRICS)] for i, name in enumerate(kernels)]
    return "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)


def test_count_calls_has_a_row_for_each_dtype_and_shape(monkeypatch):
    names = [MARK, "a", MARK, "a", "b", MARK, "a", MARK, "a"]
    monkeypatch.setattr(counters, "profile", lambda worker, job: report(*names))
    frame = marked_counters.count_calls(*CASES)
    assert list(frame["dtype"]) == ["float32", "float32", "bfloat16", "bfloat16"]
    assert list(zip(frame["m"], frame["n"], strict=True)) == [(4, 8), (2, 16)] * 2
    assert list(frame["launches"]) == [1, 2, 1, 1]
    assert list(frame["dram_read_bytes"]) == [1, 3 + 4, 6, 8]
    assert list(frame.columns) == list(EXPERIMENTS["scoreboard_counters"].schema)


def test_count_calls_refuses_a_report_with_other_calls(monkeypatch):
    monkeypatch.setattr(counters, "profile", lambda worker, job: report(MARK, "a"))
    with pytest.raises(CountersError, match="4 calls, ncu saw 1"):
        marked_counters.count_calls(*CASES)


def test_count_calls_tells_the_worker_its_job(monkeypatch):
    told = []

    def profile(worker, job):
        told.append(json.loads(json.dumps(job)))
        exec(worker, {})
        return report(MARK, "a")

    monkeypatch.setattr(marked_counters, "_worker", lambda: told.append("ran"))
    monkeypatch.setattr(counters, "profile", profile)
    marked_counters.count_calls("copy", [[4, 8]], ["float32"], op="softmax_backward")
    job = {"impl": "copy", "op": "softmax_backward", "cases": [["float32", [4, 8]]]}
    assert told == [job, "ran"]


def test_count_calls_refuses_an_unknown_label():
    with pytest.raises(LookupError):
        marked_counters.count_calls("nobody", [[4, 8]], ["float32"])


def test_worker_counts_one_call_of_each_case(monkeypatch):
    """After three that warm up, in the order of the cases."""
    calls, counted = [], []

    @contextmanager
    def double():
        before = len(calls)
        yield
        counted.append(calls[before:])

    monkeypatch.setattr(
        "memtraffic_book.measurements.implementation",
        lambda label: lambda x: calls.append((tuple(x.shape), str(x.dtype))),
    )
    monkeypatch.setattr(marked_counters, "counted", double)
    cases = [("float32", [4, 8]), ("bfloat16", [2, 16])]
    job = {"impl": "any", "op": "softmax", "cases": cases}
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(job)])
    marked_counters._worker()
    assert counted == [[((4, 8), "torch.float32")], [((2, 16), "torch.bfloat16")]]
    assert len(calls) == 2 * (marked_counters.WARMUP + 1)
