import json
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from memtraffic import machine
from memtraffic.matrices import LAYOUTS
from memtraffic.traffic import counters as module
from memtraffic.traffic.counters import (
    COLUMNS,
    METRICS,
    SECTOR_BYTES,
    CountersError,
    NoCounters,
    counters,
    layouts,
    parse,
    short_name,
)

needs_ncu = pytest.mark.skipif(
    not (machine.HAS_GPU and shutil.which("ncu")), reason="needs a GPU and ncu"
)

HEADER = (
    "ID",
    "Process ID",
    "Process Name",
    "Kernel Name",
    "Context",
    "Stream",
    *METRICS.values(),
)
UNITS = ("", "", "", "", "", "", "inst", "byte", "byte", "byte", "byte", "sector", "ns")
COPY = (
    "0",
    "781",
    "python",
    "_fused_kernel",
    "1",
    "7",
    "32",
    "4096",
    "4,096",
    "5,120.0",
    "0",
    "128",
    "2,304",
)
SUM = (
    "1",
    "781",
    "python",
    "void at::native::reduce_kernel<512, 1, at::Op<float>>(T3)",
    "1",
    "7",
    *("8",) * len(METRICS),
)


def said(*rows):
    """What `ncu` prints: its own lines, then CSV."""
    lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join(
        [
            "==PROF== Connected to process 781",
            '==PROF== Profiling "_fused_kernel": 0%',
            *lines,
            "==PROF== Done",
            "",
        ]
    )


def test_a_row_for_each_kernel():
    frame = parse(said(HEADER, UNITS, COPY, SUM))
    assert list(frame.columns) == list(COLUMNS) == list(counters.columns)
    assert frame.to_dict("records") == [
        {
            "kernel": "_fused_kernel",
            "load_instructions": 32,
            "instruction_read_bytes": 4096,
            "l1_l2_read_bytes": 4096,
            "dram_read_bytes": 5120,
            "dram_write_bytes": 0,
            "l2_write_sectors": 128,
            "ns": 2304,
        },
        {"kernel": "reduce_kernel"} | {column: 8 for column in METRICS},
    ]


def test_the_order_of_columns_is_not_relied_on():
    assert parse(said(HEADER[::-1], UNITS[::-1], COPY[::-1])).equals(
        parse(said(HEADER, UNITS, COPY))
    )


def test_a_missing_counter_is_named():
    with pytest.raises(
        CountersError,
        match=r"^counters: ncu does not give dram__bytes_write\.sum on this GPU$",
    ):
        header = [name.replace("dram__bytes_write", "other") for name in HEADER]
        parse(said(header, UNITS, COPY))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param(
            "==PROF== Disconnected\n==WARNING== No kernels were profiled.\n",
            id="only-notes",
        ),
        pytest.param(said(HEADER, UNITS), id="only-a-header"),
    ],
)
def test_no_kernel(text):
    with pytest.raises(CountersError, match="ncu saw no kernel"):
        parse(text)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_fused_kernel", "_fused_kernel"),
        (
            "void at::native::reduce_kernel<512, at::Op<float>>(at::native::T)",
            "reduce_kernel",
        ),
        ("void cutlass::Kernel<a::b>(Params)", "Kernel"),
        ("ns::copy(float *, int)", "copy"),
    ],
)
def test_kernels_have_short_names(name, short):
    assert short_name(name) == short


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "HAS_GPU", False)
    with pytest.raises(NoCounters, match="there is no GPU on this machine"):
        counters("naive", 8, 8)


def test_no_ncu(monkeypatch):
    monkeypatch.setattr(machine, "HAS_GPU", True)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(NoCounters, match="`ncu` is not on the PATH"):
        counters("naive", 8, 8)


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts a script in the place of `ncu`; the text given is its body, in which $log is the file it reports to."""

    def put(body):
        path = tmp_path / "ncu"
        find_log = 'while [ "$1" != --log-file ]; do shift; done; log=$2\n'
        path.write_text(f"#!/bin/sh\n{find_log}{body}\n", encoding="utf-8")
        path.chmod(0o755)
        monkeypatch.setattr(machine, "HAS_GPU", True)
        monkeypatch.setattr(module.shutil, "which", lambda name: str(path))
        return path

    return put


def test_what_ncu_reports_is_read(ncu):
    path = ncu('cp "$(dirname "$0")/report" "$log"')
    (path.parent / "report").write_text(said(HEADER, UNITS, COPY), encoding="utf-8")
    assert list(counters("naive", 8, 8)["kernel"]) == ["_fused_kernel"]


def test_what_ncu_runs(ncu):
    path = ncu('echo "$@" > "$(dirname "$0")/ran"; cp "$(dirname "$0")/report" "$log"')
    (path.parent / "report").write_text(said(HEADER, UNITS, COPY), encoding="utf-8")
    counters("naive", 8, 6, "bfloat16", warmup=2, layout="every other")
    ran = (path.parent / "ran").read_text(encoding="utf-8")
    assert json.loads(ran[ran.index("{") :]) == {
        "name": "naive",
        "matrix": {"m": 8, "n": 6, "dtype": "bfloat16", "layout": "every other"},
        "warmup": 2,
    }


def test_the_worker_warms_up_and_calls_once_more(monkeypatch):
    events = []
    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: events.append("start"),
        cudaProfilerStop=lambda: events.append("stop"),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(
        module, "resolve", lambda name: lambda x: events.append((x.dtype, x.stride()))
    )
    job = {
        "name": "naive",
        "matrix": {"m": 8, "n": 6, "dtype": "bfloat16", "layout": "every other"},
        "warmup": 2,
    }
    monkeypatch.setattr(module.sys, "argv", ["-c", json.dumps(job)])
    module._worker()
    call = (torch.bfloat16, (12, 2))
    assert events == [call, call, "start", call, "stop"]


def test_no_permission(ncu):
    ncu(
        'echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission" > "$log"; exit 1'
    )
    with pytest.raises(NoCounters, match="only an administrator"):
        counters("naive", 8, 8)


def test_a_function_that_fails_says_why(ncu):
    ncu("echo Traceback >&2; echo 'ValueError: fused: 781 columns' >&2; exit 1")
    with pytest.raises(
        CountersError, match=r"^counters: ValueError: fused: 781 columns$"
    ) as caught:
        counters("naive", 8, 8)
    assert not isinstance(caught.value, NoCounters)


def test_a_function_another_process_cannot_find():
    with pytest.raises(LookupError, match="put it in a file"):
        counters(lambda x: x, 8, 8)
    with pytest.raises(LookupError, match="no rung is named 'fusd'"):
        counters("fusd", 8, 8)


def test_layouts_are_counted_one_by_one(monkeypatch):
    asked = []

    def one(fn, m, n, dtype, layout):
        asked.append((fn, m, n, dtype, layout))
        values = [len(asked) * 100 + i for i in range(len(METRICS))]
        return pd.DataFrame([("_masked_kernel", *values)], columns=list(COLUMNS))

    monkeypatch.setattr(module, "counters", one)
    frame = layouts("masked", 8, 6, "bfloat16")
    assert asked == [("masked", 8, 6, "bfloat16", layout) for layout in LAYOUTS]
    assert list(frame.columns) == list(layouts.columns) == ["layout", *COLUMNS]
    assert frame["layout"].tolist() == list(LAYOUTS)
    assert frame.index.tolist() == list(range(len(LAYOUTS)))
    first = frame["load_instructions"].tolist()
    assert first == [100 * (i + 1) for i in range(len(LAYOUTS))]
    layouts("masked", 8, 6)
    assert asked[-1][3] == "float32"


def measured(*args):
    try:
        return counters(*args)
    except NoCounters as error:
        pytest.skip(str(error))


@needs_ncu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_reads_each_byte_once(dtype):
    m, n = 4096, 2048
    [row] = measured("fused", m, n, dtype).to_dict("records")
    n_bytes = m * n * getattr(torch, dtype).itemsize
    assert row["kernel"] == "_fused_kernel"
    assert row["load_instructions"] == n_bytes // (32 * 16)
    assert row["instruction_read_bytes"] == n_bytes
    assert row["l1_l2_read_bytes"] == n_bytes
    assert row["l2_write_sectors"] * SECTOR_BYTES == n_bytes
    assert row["ns"] > 0


@needs_ncu
def test_a_layout_is_read_as_it_lies():
    m, n = 1024, 2048
    packed, strided = (
        measured("masked", m, n, "float32", 3, layout).to_dict("records")[0]
        for layout in ("packed", "every other")
    )
    assert packed["l1_l2_read_bytes"] == m * n * 4
    assert strided["l1_l2_read_bytes"] == 2 * packed["l1_l2_read_bytes"]


@needs_ncu
def test_naive_launches_five_kernels_and_reads_more():
    m, n = 4096, 2048
    frame = measured("naive", m, n)
    assert len(frame) == 5
    assert frame["l1_l2_read_bytes"].sum() >= 5 * m * n * 4
