"""The commands, in this process and from the shell."""

import json
import re
import shlex
import sys

import pandas as pd
import pytest
from another_process import run_python

from memtraffic import benchmark, compile, device, progress
from memtraffic.cli import commands, main
from memtraffic.gpus import find_gpu
from memtraffic.meters import counters as hardware
from memtraffic.names import COMPARED, import_function
from memtraffic.residency import Resources

WITHOUT_GPU = pytest.mark.skipif(device.HAS_GPU, reason="a GPU answers itself")


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command, given as one text: its exit status, stdout and stderr."""
    monkeypatch.setattr(progress, "_enabled", False)
    return lambda text: (main(shlex.split(text)), *capsys.readouterr())


@pytest.fixture
def compiler(monkeypatch):
    """What a compiler was asked for, which answers with two kernels."""
    calls = []

    def resources(fn, inputs, shape, *, target, dtype):
        calls.append((fn, inputs.name, shape, target, dtype))
        return [
            Resources("one", target.target, 4, 69, 0, 32784),
            Resources("two", target.target, 1, 8, 0, 0),
        ]

    monkeypatch.setattr(compile, "resources", resources)
    return calls


# ---- formula, count


MINE = """\
class Own(BaseException): pass
def add(x, o): return x + o
def squares(x): return x * x
def even(x):
    if x.shape[1] % 2: raise ValueError("odd")
    return x.exp()
def third(x):
    if x.shape[0] % 7 or x.shape[1] % 9: raise ValueError(x.shape)
    return x.reshape(-1, 9)[:, ::3].exp()
def lines(x): raise RuntimeError("two\\nlines")
def own(x): raise Own("bad")
def long(x): raise ValueError(1500 * "x")
def interrupted(x): raise KeyboardInterrupt
"""


def test_formula(command, module):
    module(MINE)
    status, out, err = command("formula mine:even")
    assert (status, out.splitlines()[0], err) == (0, "reads MN, writes MN", "")
    assert "solved at" in out and "refused: odd\n" in out
    assert command("formula mine:third")[0] == 1
    lines = ["forward: reads 2MN, writes MN", "backward: reads 6MN, writes 3MN"]
    assert command("formula mine:squares --backward")[1].splitlines()[:2] == lines


FEW = "--fit 7x9,14x9,7x18,21x27,14x36 --check 70x90,77x99"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("formula mine:add --inputs 'M,N o=N:bf16'", {"reads": {"MN": 1, "M": 0, "N": 1, "1": 0}}),
        (f"formula mine:third {FEW}", {"tried": {"M": [7, 77], "N": [9, 99]}}),
        (f"formula mine:third {FEW}", {"reads": {"MN": "1/3", "M": 0, "N": 0, "1": 0}}),
        ("count torch:matmul 3 N=5 K=4 --inputs 'M,K K,N' --dtype fp16", {"read_bytes": 64}),
        ("formula kernels:differing --config 1", {"writes": {"MN": 0, "M": 2, "N": 0, "1": 0}}),
        ("count kernels:differing 3 5 --config 1", {"written_elements": 6}),
        ("sectors kernels:differing 3 5 --config 1 --target sm_90", {"assumed": []}),
        ("sectors fused 3 64 --dtype bf16 --target sm_90", {"store_sectors": 3 * 64 * 2 // 32}),
    ],
)
def test_json(text, expected, command, module):
    """In one line; a fraction is text."""
    module(MINE)
    status, out, err = command(f"{text} --json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) | expected == json.loads(out)


def test_json_of_both_passes(command, module):
    module(MINE)
    found = json.loads(command("formula mine:squares --backward --json")[1])
    assert found["backward"]["reads"] == {"MN": 6, "M": 0, "N": 0, "1": 0}
    found = json.loads(command("count mine:squares 3 5 --backward --json")[1])
    assert [len(found[each]["ops"]) for each in ("forward", "backward")] == [1, 3]
    assert [found[each]["read_elements"] for each in ("forward", "backward")] == [30, 90]
    _, out, _ = command("count mine:squares 3 5 --backward")
    assert re.findall("^forward|^backward|^total +[0-9]+", out, re.M)[::2] == [
        "forward",
        "backward",
    ]


def test_count(command):
    status, out, err = command("count naive 64 1024")
    header, first, *_, last = out.splitlines()
    assert (status, err) == (0, "")
    assert header.split() == "read elements written elements read bytes written bytes".split()
    assert first.split() == ["amax", "65,536", "64", "262,144", "256"]
    assert last.split() == ["total", "327,808", "196,736", "1,311,232", "786,944"]


def test_count_of_a_function_that_prints(command, module):
    """What the user's code prints does not mix with the result."""
    module("print('imported')\ndef talking(x):\n    print('called')\n    return x.exp()\n")
    status, out, err = command("count mine:talking 4 8")
    assert (status, err) == (0, "imported\ncalled\n")
    assert "called" not in out and "128" in out


# ---- resources, occupancy, sectors


@pytest.mark.parametrize(
    ("call", "shape", "dtype"),
    [
        ("resources fused N=64", (16, 64), "float32"),  # of some rows
        ("occupancy fused N=48 M=3", (3, 48), "float32"),
        ("resources fused 3 48 --dtype bf16", (3, 48), "bfloat16"),
    ],
)
def test_compiler_is_given_each_option(call, shape, dtype, command, compiler):
    status, out, _ = command(f"{call} --target gfx942 --json")
    assert status == 0
    assert all("'target': 'gfx942'" in str(kernel) for kernel in json.loads(out))
    assert compiler == [(import_function("fused"), "M,N", shape, find_gpu("gfx942"), dtype)]


# ---- on a GPU, which is not here


def test_counters(command, monkeypatch):
    def counters(*args, **options):
        assert (args, options) == (("naive", None, (8, 6)), {"dtype": "bfloat16"})
        return pd.DataFrame([{"kernel": "k", "ns": 781}])

    monkeypatch.setattr(hardware, "counters", counters)
    status, out, err = command("counters naive 8 6 --dtype bfloat16")
    assert (status, out.split(), err) == (0, ["kernel", "ns", "k", "781"], "")
    out = command("counters naive 8 6 --dtype bfloat16 --json")[1]
    assert json.loads(out) == [{"kernel": "k", "ns": 781}]


def test_bench(command, timed):
    """The clock gives the first 1 µs, the second 2; what is refused has none. Not all is judged."""
    status, out, err = command("bench copy naive fused --shapes 2x8,3x5, --dtype bfloat16")
    assert (status, err) == (0, "")
    header, *rows = map(str.split, out.splitlines())
    assert header == "impl m n dtype us us_p20 us_p80 us_reversed gb_per_s %_of_copy note".split()
    assert rows[1] == "naive 2 8 bfloat16 2.0 2.0 2.0 2.0 0.0 50.0".split()
    assert rows[5][:11] == "fused 3 5 bfloat16 - - - - - - refused:".split()
    assert "wrong" in command("bench kernels:masked --shapes 2x8")[1]
    out = command("bench kernels:masked --inputs M,N --shapes 2x8")[1]
    assert [line.split()[0] for line in out.splitlines()] == ["impl", "copy", "kernels:masked"]
    assert json.loads(command("bench tiled --shapes 2x8 --json")[1])[0]["us"] == 1


@pytest.mark.parametrize(
    ("text", "op"), [("bench", "softmax"), ("bench --inputs softmax_backward", "softmax_backward")]
)
def test_bench_of_everything(text, op, command, monkeypatch):
    def bench(impls, op, shapes, **options):
        raise ValueError(op.name, impls == COMPARED[op.name], (4096, 1024) in shapes)

    monkeypatch.setattr(benchmark, "bench", bench)
    assert command(text)[2].endswith(f"ValueError: {(op, True, True)}\n")


# ---- report


def test_report_is_what_the_other_commands_say(command, compiler, tmp_path, monkeypatch):
    """In a file; a refusal has its place, and each kernel a line."""
    monkeypatch.setattr(device, "HAS_GPU", False)
    file = tmp_path / "page.md"
    assert command(f"report naive 4 64 -o {file}") == (0, f"wrote {file}\n", "")
    title, *parts = file.read_text("utf-8").split("\n## ")
    assert title == "# naive 4 64 M,N float32\n"
    said = dict(part.split("\n", 1) for part in parts)
    names = ["resources", "occupancy", "sectors"]
    targets = [f"{name} for {target}" for target in ("sm_90", "gfx942") for name in names]
    assert list(said) == ["formula", "count", *targets, "counters", "bench"]
    assert all("GPU" in said[name] for name in ("counters", "bench"))
    for asked in ("formula naive", "count naive 4 64", "occupancy naive 4 64 --target sm_90"):
        heading = asked.replace(" naive", "").replace(" 4 64", "").replace("--target", "for")
        assert said[heading].strip("`\n") == command(asked)[1].rstrip("\n")
    lines = said["occupancy for sm_90"].splitlines()[2:4]
    kernels = ["one for sm_90 (H200), 4 warps: 6 programs fit", "two for sm_90 (H200), 1 warps: 32"]
    assert list(map(str.startswith, lines, kernels)) == [True, True]


def test_report_needs_no_sizes(command, module):
    module(MINE)
    out = command("report mine:add --inputs 'M,N N'")[1]
    assert out.startswith("# mine:add M=256 N=256 M,N N float32\n")
    assert "launched no Triton kernel" in out


# ---- help


def test_help_names_each_command_and_version(command):
    status, out, _ = command("--help")
    assert status == 0 and all(name in out for name in commands.commands)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", command("--version")[1])
    for name in commands.commands:
        status, out, _ = command(f"{name} --help")
        assert status == 0 and ("`M,N:bf16`" in out) == (name != "roof")


# ---- mistakes

MISTAKES = {
    2: {
        "": "Missing command",
        "formula naive --fit 2x8,3by16": "'3by16' is not a positive",
        "formula kernels:_masked_kernel": "_masked_kernel is a Triton kernel: give the function",
        "count naive 4": "N of 'M,N' has no number",
        "count naive 4 8 --dtype int9": "did you mean 'int8'",
        "report fused --target sm_91": "sm_91",
        "report naive -o none/page.md": "none/page.md",
    },
    1: {
        "formula kernels:raises": "cannot take (2, 8)",
        "count kernels:dropped_mask 5 12": "outside x_ptr",
        "count kernels:gathered 5 8": "kernels:gathered: TypeError: ",
        "count mine:lines 3 5": "mine:lines: RuntimeError: two lines\n",
        "count mine:own 3 5": "mine:own: mine.Own: bad\n",
        "count mine:long 3 5": f"mine:long: ValueError: {977 * 'x'}…\n",
        "sectors naive 4 64 --target sm_90": "launched no Triton kernel",
        "report mine:add": "missing 1 required positional argument",
        "counters naive 8 8": "no GPU",
        "roof": "memtraffic: roof needs a GPU",
    },
}


@pytest.mark.parametrize(("status", "text"), [(n, it) for n in MISTAKES for it in MISTAKES[n]])
def test_mistake_is_one_line(status, text, command, module, monkeypatch):
    """Status 2 for a bad call, 1 for a failure; a function that raises is named."""
    monkeypatch.setattr(device, "HAS_GPU", False)
    module(MINE)
    found, out, err = command(text)
    assert MISTAKES[status][text] in err
    assert err.startswith("memtraffic: ") and err.count("\n") == 1 and err.endswith("\n")
    assert (found, out) == (status, "")


def test_interrupted(command, module):
    module(MINE)
    status, out, err = command("count mine:interrupted 8 8")
    assert (status, out, err.strip()) == (130, "", "")


# ---- functions that insist on a GPU

INSISTS = """\
import kernels, torch
{at_import}
def fn(x):
    assert x.is_cuda
    return kernels.masked(x)
"""


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("text", "sms", "expected"),
    [
        ("count mine:fn 3 5 --json", 132, '"read_elements": 15'),
        ("resources mine:fn --target sm_80 N=1024", 108, "_masked_kernel for sm_80, 4 warps"),
        ("report mine:fn 4 64 --target gfx942", 132, "\n_masked_kernel for gfx942, 4 warps"),
    ],
)
def test_stand_in_for_a_gpu(text, sms, expected, command, module):
    """Also while the module is imported; a target of NVIDIA's is the GPU that answers."""
    asked = "torch.cuda.get_device_properties(0).multi_processor_count"
    module(INSISTS.format(at_import=f"assert {asked} == {sms}"))
    status, out, err = command(f"{text} --stand-in")
    assert (status, err) == (0, "") and expected in out


@WITHOUT_GPU
@pytest.mark.parametrize("text", ["count mine:fn 3 5", "formula mine:fn"])
@pytest.mark.parametrize("at_import", ["", "torch.cuda.current_stream()"])
def test_stand_in_is_named_where_a_gpu_is_missed(text, at_import, command, module):
    """By the function, which asserts it in silence, or by its module."""
    module(INSISTS.format(at_import=at_import))
    status, _, err = command(text)
    assert status and ("CUDA" in err) == bool(at_import)
    assert (": assert x.is_cuda: as there" in err) == (not at_import) and "give --stand-in" in err
    assert "stand-in" not in command("counters naive 3 5")[2]


# ---- from the shell


def test_shell_where_pytorch_cannot_be_imported(tmp_path):
    """Such as where a file in this folder hides a module that it needs."""
    (tmp_path / "torch.py").write_text("raise ImportError('is broken')")
    for text, name in (("count math:sqrt 3 5", "math:sqrt: "), ("roof", "")):
        done = run_python("-m", "memtraffic", *text.split(), folder=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"memtraffic: {name}ImportError: is broken\n"


@pytest.mark.slow
@pytest.mark.parametrize(("to", "message"), [("| true", ""), ("> /dev/full", "No space left")])
def test_shell_has_no_traceback(to, message):
    run = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    line = f"set -o pipefail; {sys.executable} -m memtraffic count naive 3 5 {to}"
    done = run_python("-c", run, "bash", "-c", line)
    assert done.returncode == 1 or (done.returncode == 0 and not message)
    assert message in done.stderr and done.stderr.count("\n") <= 1
    assert "Traceback" not in done.stderr and done.stdout == ""
