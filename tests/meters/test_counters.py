import json
import os
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import put_command

from memtraffic import device
from memtraffic.errors import CountersError, CountersUnavailable
from memtraffic.kernels.softmax.definitions import SOFTMAX, SOFTMAX_BACKWARD
from memtraffic.meters import counters as module
from memtraffic.meters.counters import counters, parse
from memtraffic.tensors import SECTOR_BYTES

# Typed from Nsight Compute's documentation, "Metrics Structure" and "Metrics Decoder", and checked
# on an H200 with kernels whose traffic is known (the tests at the end of this file).
# Column: the metric; its unit; a value
METRICS = {
    # smsp: the SM's sub-partitions. sass_inst_executed: instructions executed, one for each warp.
    # op_global_ld: loads from global memory. sum: over all sub-partitions.
    "load_instructions": ("smsp__sass_inst_executed_op_global_ld.sum", "32", 32),
    # sass_data_bytes: the bytes that these instructions asked for
    "instruction_read_bytes": ("smsp__sass_data_bytes_mem_global_op_ld.sum", "4,096", 4096),
    # l1tex: the L1 cache. m_xbar2l1tex: what arrives there from the crossbar, which is from L2.
    "l1_l2_read_bytes": ("l1tex__m_xbar2l1tex_read_bytes.sum", "8,192.0", 8192),
    # dram: device memory, both directions
    "dram_read_bytes": ("dram__bytes_read.sum", "5,120", 5120),
    "dram_write_bytes": ("dram__bytes_write.sum", "0", 0),
    # lts: the slices of L2. t_sectors: sectors looked up. srcunit_tex: for L1. op_write: writes.
    "l2_write_sectors": ("lts__t_sectors_srcunit_tex_op_write.sum", "128", 128),
    # gpu__time_duration: from the start of a kernel to its end
    "ns": ("gpu__time_duration.sum", "2,304", 2304),
}
NAMES, TEXTS, VALUES = zip(*METRICS.values(), strict=True)
HEADER = ("ID", "Kernel Name", "Context", *NAMES)
COPY = ("0", "_softmax_fused_kernel", "1", *TEXTS)
MAP = "void ns::<unnamed>::(anonymous namespace)::map<4, at::Op<float>>(int)"
SUM = ("1", MAP, "1", *("8" for _ in METRICS))


def report(*rows, header=HEADER):
    """What `ncu` prints: notes, then CSV, whose second row holds the units."""
    units = ["byte" for _ in header]
    lines = [",".join(f'"{cell}"' for cell in row) for row in (header, units, *rows)]
    notes = "==PROF== Connected to process 781", '==PROF== Profiling "_softmax_fused_kernel": 0%'
    return "\n".join([*notes, *lines, "==PROF== Done", ""])


def test_parse_gives_a_row_for_each_kernel_in_any_order_of_columns():
    frame = parse(report(COPY, SUM))
    assert list(frame.columns) == ["kernel", *METRICS]
    assert frame.to_dict("records") == [
        {"kernel": "_softmax_fused_kernel"} | dict(zip(METRICS, VALUES, strict=True)),
        {"kernel": "map"} | dict.fromkeys(METRICS, 8),
    ]
    assert parse(report(COPY[::-1], SUM[::-1], header=HEADER[::-1])).equals(frame)


def test_parse_adds_up_counters_between_commas():
    frame = parse(report(COPY, SUM), {"dram": ",".join(NAMES[3:5]), "all": ",".join(NAMES)})
    assert frame["dram"].tolist() == [sum(VALUES[3:5]), 16]
    assert frame["all"].tolist() == [sum(VALUES), 8 * len(NAMES)]
    with pytest.raises(CountersError, match="not give absent on"):
        parse(report(COPY), {"dram": f"{NAMES[3]},absent"})


def test_parse_names_what_is_missing():
    with pytest.raises(CountersError, match=NAMES[3]):
        parse(report(COPY, header=[name.replace(NAMES[3], "other") for name in HEADER]))
    for text in ("", "==WARNING== No kernels were profiled.\n", report()):
        with pytest.raises(CountersError, match="no kernel"):
            parse(text)


# ---- the command


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts a script in the place of `ncu`, in whose body $log is the file that it reports to."""

    def put(body):
        arguments = f'printf "%s\\n" "$@" > {tmp_path}/arguments; env > {tmp_path}/environment\n'
        find_log = 'while [ "$1" != --log-file ]; do shift; done; log=$2\n'
        put_command(tmp_path, "ncu", f"{arguments}{find_log}{body}")
        (tmp_path / "report").write_text(report(COPY), encoding="utf-8")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(device, "HAS_GPU", True)
        return tmp_path

    return put


PATH = "memtraffic.kernels.softmax.definitions:_softmax_and_gradient"


def test_counters_runs_ncu(ncu, monkeypatch):
    """Every flag changes what is measured, so the whole command is typed here once more."""
    monkeypatch.setattr(sys, "path", ["", "/somewhere", *sys.path])
    folder = ncu('cp "$(dirname "$0")/report" "$log"')
    options = {"dtype": "bfloat16", "layout": "every other"}
    assert counters("masked", SOFTMAX_BACKWARD, (8, 6), **options).equals(parse(report(COPY)))
    *command, log, python, c, code, job = (folder / "arguments").read_text("utf-8").splitlines()
    assert command == [
        *("--clock-control", "none"),  # the clocks that a caller sees, not the base clock
        *("--profile-from-start", "off"),  # not the calls that warm up
        *("--csv", "--page", "raw", "--print-units", "base"),  # bytes, not the nearest unit
        *("--metrics", ",".join(NAMES)),
        "--log-file",
    ]
    assert log.endswith(".csv")
    assert (python, c) == (sys.executable, "-c")
    assert code == "from memtraffic.meters.counters import _worker; _worker()"
    assert json.loads(job) == {
        "fn": "masked", "inputs": PATH, "shape": [8, 6], "dtype": "bfloat16",
        "layout": "every other",
    }  # fmt: skip
    environment = (folder / "environment").read_text("utf-8").splitlines()
    [paths] = [line for line in environment if line.startswith("PYTHONPATH=")]
    paths = paths.removeprefix("PYTHONPATH=").split(os.pathsep)
    assert paths[:2] == [os.getcwd(), "/somewhere"]
    assert "" not in paths


def test_worker_warms_up_and_calls_once_more(monkeypatch):
    """The call that counts comes between start and stop, and the GPU is idle at both."""
    events = []
    events_of = {f"cudaProfiler{it}": partial(events.append, it) for it in ("Start", "Stop")}
    monkeypatch.setattr(torch.cuda, "synchronize", partial(events.append, "synchronize"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(**events_of))

    def fn(*inputs):
        events.append([(x.dtype, tuple(x.shape), x.stride()) for x in inputs])

    monkeypatch.setattr(module, "import_function", lambda name: {"mine:fn": fn}[name])
    job = {"fn": "mine:fn", "inputs": "softmax_backward", "shape": [8, 6]}
    job |= {"dtype": "bfloat16", "layout": "every other"}
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(job)])
    module._worker()
    call = [(torch.bfloat16, (8, 6), (12, 2))] * 2
    assert events == [call, call, call, "synchronize", "Start", call, "synchronize", "Stop"]


@pytest.mark.parametrize(("has_gpu", "message"), [(False, "no GPU"), (True, "PATH")])
def test_counters_without_a_gpu_or_ncu(has_gpu, message, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "HAS_GPU", has_gpu)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CountersUnavailable, match=message):
        counters("naive", shape=(8, 8))


@pytest.mark.parametrize("to", ['> "$log"', ""])
def test_counters_without_permission(ncu, to):
    ncu(f'echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission" {to}; exit 1')
    for _ in range(2):
        with pytest.raises(CountersUnavailable, match="administrator"):
            counters("naive", shape=(8, 8))


RETURNED = "==ERROR== The application returned an error code (9)."
BUSY = f'(echo "==ERROR== busy"; echo "{RETURNED}"; echo "\\"46\\"") > "$log"'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo Traceback; echo ValueError: 8; echo end", "ValueError: 8"),
        ("echo a.b.CompileError: no", "a.b.CompileError: no"),
        (f"echo beep; {BUSY}", "==ERROR== busy"),
        (f"{BUSY}; echo ValueError: 8", "ValueError: 8"),
        (f'echo first; echo killed; echo "{RETURNED}" > "$log"', "killed"),
        (f'echo "{RETURNED}" > "$log"', RETURNED),
        ('echo "\\"46\\"" > "$log"', "ncu exited 9"),  # kernels alone
    ],
)
def test_counters_of_a_function_that_fails(ncu, body, message):
    ncu(f"exec >&2; {body}; exit 9")
    with pytest.raises(CountersError) as caught:
        counters("naive", shape=(8, 8))
    assert str(caught.value) == f"counters: {message}"
    assert not isinstance(caught.value, CountersUnavailable)


# ---- on a GPU


def measured(*args, **options):
    if not shutil.which("ncu"):
        pytest.skip("needs ncu")
    try:
        return counters(*args, **options)
    except CountersUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counters_of_fused(dtype):
    """It reads each byte once, and writes each byte once."""
    m, n = 4096, 2048
    [row] = measured("fused", SOFTMAX, (m, n), dtype=dtype).to_dict("records")
    n_bytes = m * n * getattr(torch, dtype).itemsize
    assert row["kernel"] == "_softmax_fused_kernel"
    assert row["load_instructions"] == n_bytes // (32 * 16)
    assert row["instruction_read_bytes"] == n_bytes
    assert row["l1_l2_read_bytes"] == n_bytes
    assert row["l2_write_sectors"] * SECTOR_BYTES == n_bytes
    assert row["ns"] > 0


@pytest.mark.gpu
def test_counters_of_dram_traffic():
    """Of 1 GiB, all comes from DRAM, and at most what L2 holds is not yet written back."""
    m, n = 2**14, 2**14
    [row] = measured("fused", shape=(m, n)).to_dict("records")
    n_bytes = m * n * 4
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    assert n_bytes <= row["dram_read_bytes"] < 1.05 * n_bytes
    assert n_bytes - 2 * l2_bytes <= row["dram_write_bytes"] < 1.05 * n_bytes
