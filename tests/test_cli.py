"""The commands, in this process and from the shell."""

import json
import os
import re
import shlex
import subprocess
import sys

import pandas as pd
import pytest
import torch

from memtraffic import benchmark, compile, device, progress
from memtraffic.cli import commands, main
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.meters import counters as hardware
from memtraffic.names import COMPARED, import_function
from memtraffic.residency import Resources

pytest.importorskip("triton", reason="Triton is not installed")

WITHOUT_GPU = pytest.mark.skipif(device.HAS_GPU, reason="a GPU answers itself")


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command, given as one text: its exit status, stdout and stderr."""
    monkeypatch.setattr(progress, "_enabled", False)
    return lambda text: (main(shlex.split(text)), *capsys.readouterr())


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Writes a module of the user's own, `mine`, into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda text: (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    sys.modules.pop("mine", None)


# ---- formula


def test_formula(command):
    status, out, err = command("formula fused")
    assert (status, out.splitlines()[0], err) == (0, "reads MN, writes MN", "")
    with pytest.raises(ValueError) as refusal:
        import_function("fused")(torch.ones(3, 5, device=device.default()))
    assert "solved at" in out and f"refused: {refusal.value}\n" in out


def test_formula_as_json(command, module):
    """Of inputs given in text, in one line; a fraction is text."""
    module(
        "def add(x, o=None): return x + o\n"
        "def half(x):\n    if x.shape[1] % 4: raise ValueError\n    return x[:, ::2].exp()\n"
    )
    status, out, err = command("formula mine:add --json --inputs 'M,N o=N:bf16'")
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out)["reads"] == {"MN": 1, "M": 0, "N": 1, "1": 0}
    assert json.loads(command("formula mine:half --json")[1])["reads"]["MN"] == "1/2"


def test_formula_at_shapes_of_ones_own(command, module):
    """A kernel that takes few shapes is solved and checked at those."""
    module(
        "def fn(x):\n    if x.shape[0] % 7 or x.shape[1] % 9: raise ValueError(x.shape)\n"
        "    return x.exp()\n"
    )
    shapes = "--fit 7x9,14x9,7x18,21x27,14x36 --check 70x90,77x99"
    status, out, err = command(f"formula mine:fn {shapes}")
    assert (status, out.splitlines()[0], err) == (0, "reads MN, writes MN", "")
    assert "refused" not in out
    assert command("formula mine:fn")[0] == 1


def test_formula_and_count_backward(command, module):
    module("def double(x):\n    return 2 * x\n")
    _, out, _ = command("formula mine:double --backward")
    lines = ["forward: reads MN, writes MN", "backward: reads MN, writes MN"]
    assert out.splitlines()[:2] == lines
    found = json.loads(command("formula mine:double --backward --json")[1])
    assert found["backward"]["reads"] == {"MN": 1, "M": 0, "N": 0, "1": 0}
    found = json.loads(command("count mine:double 3 5 --backward --json")[1])
    assert [found[each]["read_elements"] for each in ("forward", "backward")] == [15, 15]
    _, out, _ = command("count mine:double 3 5 --backward")
    assert [line for line in out.splitlines() if line in ("forward", "backward")]


# ---- count


def test_count(command):
    status, out, err = command("count naive 3 5")
    header, *lines = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert header == "read elements written elements read bytes written bytes".split()
    assert lines == [
        ["amax", "15", "3", "60", "12"],
        ["sub", "18", "15", "72", "60"],
        ["exp", "15", "15", "60", "60"],
        ["sum", "15", "3", "60", "12"],
        ["div", "18", "15", "72", "60"],
        ["total", "81", "51", "324", "204"],
    ]
    assert command("count naive 64 1024")[1].splitlines()[1].split()[1] == "65,536"


@pytest.mark.parametrize(
    ("call", "elements", "itemsize"),
    [
        pytest.param("torch:matmul 3 4 5 --inputs 'M,K K,N'", 3 * 4 + 4 * 5, 4, id="sizes"),
        pytest.param("torch:matmul 3 N=5 K=4 --inputs 'M,K K,N'", 32, 4, id="named-sizes"),
        pytest.param("torch:mul 4 8 --inputs softmax_backward", 64, 4, id="of-an-operation"),
        pytest.param("fused 4 8 --dtype float16", 32, 2, id="dtype"),
    ],
)
def test_count_as_json(call, elements, itemsize, command):
    found = json.loads(command(f"count {call} --json")[1])
    assert (found["read_elements"], found["read_bytes"]) == (elements, itemsize * elements)


def test_count_of_a_function_that_prints(command, module):
    """What the user's code prints does not mix with the result."""
    module("print('imported')\ndef talking(x):\n    print('called')\n    return x.exp()\n")
    status, out, err = command("count mine:talking 4 8")
    assert (status, err) == (0, "imported\ncalled\n")
    assert "called" not in out and "128" in out


# ---- resources, occupancy


def test_sectors(command):
    status, out, err = command("sectors masked 8 781 --target sm_90 --dtype bf16")
    assert (status, err) == (0, "") and "for sm_90: 200 load requests, " in out
    status, out, err = command("sectors memtraffic:softmax 8 1024 --target gfx942 --json")
    found = json.loads(out)
    assert (status, err, found["load_sectors"], found["confirmed"]) == (0, "", 256, False)


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


def test_occupancy_is_a_line_for_each_kernel(command, compiler):
    assert command("occupancy fused N=64 --target sm_90")[1].splitlines() == [
        "one for sm_90 (H200), 4 warps: 6 programs fit, by shared (limits: registers 7, "
        "shared 6, warps 16, blocks 32); 792 programs on 132 processors",
        "two for sm_90 (H200), 1 warps: 32 programs fit, by blocks (limits: registers 256, "
        "shared 228, warps 64, blocks 32); 4224 programs on 132 processors",
    ]


@pytest.mark.parametrize(
    ("option", "shape", "dtype"),
    [
        pytest.param("N=64", (16, 64), "float32", id="some-rows"),
        pytest.param("N=48 M=3", (3, 48), "float32", id="rows"),
        pytest.param("3 48 --dtype bf16", (3, 48), "bfloat16", id="dtype"),
    ],
)
def test_compiler_is_given_each_option(option, shape, dtype, command, compiler):
    assert command(f"resources fused --target gfx942 {option}")[0] == 0
    assert compiler == [(import_function("fused"), "M,N", shape, find_gpu("gfx942"), dtype)]


# ---- on a GPU, which is not here


def test_counters(command, monkeypatch):
    def counters(*args, **options):
        assert (args, options) == (("naive", None, (8, 6)), {"dtype": "bfloat16"})
        return pd.DataFrame([{"kernel": "k", "ns": 781}])

    monkeypatch.setattr(hardware, "counters", counters)
    status, out, err = command("counters naive 8 6 --dtype bfloat16")
    assert (status, out.split(), err) == (0, ["kernel", "ns", "k", "781"], "")


@pytest.mark.parametrize("text", ["counters naive 8 8", "roof", "bench tiled"])
def test_commands_that_need_a_gpu_say_so(text, command, monkeypatch):
    monkeypatch.setattr(device, "HAS_GPU", False)
    status, out, err = command(text)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "GPU" in err


@pytest.fixture
def timed(monkeypatch):
    """What `bench` times; each implementation takes as many microseconds as its name is long."""
    calls = []

    def bench(impls, op, shapes, **options):
        calls.append((impls, op, shapes, options))
        rows = [
            {"impl": name, "m": m, "n": n, "dtype": options["dtype"]}
            | {"us": float("nan") if name == "naive" else len(name), "gb_per_s": 1.0}
            | {"note": "refused: why" if name == "naive" else ""}
            for m, n in shapes
            for name in impls
        ]
        return pd.DataFrame(rows)

    monkeypatch.setattr(benchmark, "bench", bench)
    return calls


def test_bench(command, timed):
    text = "bench copy naive tiled --shapes 64x256,8x512 --dtype bfloat16"
    status, out, err = command(text)
    assert (status, err) == (0, "")
    shapes, options = [(64, 256), (8, 512)], {"dtype": "bfloat16"}
    options |= {"judge": True, "beside_copy": False}
    assert timed == [(("copy", "naive", "tiled"), SOFTMAX, shapes, options)]
    header, first, second, third, *_ = map(str.split, out.splitlines())
    assert header == "impl m n dtype us gb_per_s %_of_copy note".split()
    assert first == "copy 64 256 bfloat16 4.0 1.0 100.0".split()
    assert second == "naive 64 256 bfloat16 - 1.0 - refused: why".split()
    assert third[-1] == "80.0"
    assert json.loads(command("bench tiled --shapes 64x256 --json")[1])[0]["us"] == 5
    command("bench tiled --inputs M,N --shapes 64x256")
    assert timed[-1][-1] == {"dtype": "float32", "judge": False, "beside_copy": True}


def test_bench_of_everything(command, timed):
    command("bench")
    command("bench --inputs softmax_backward")
    assert timed[0][0] == COMPARED["softmax"] and (4096, 1024) in timed[0][2]
    assert timed[1][0] == COMPARED["softmax_backward"]


# ---- report


def test_report_is_what_the_other_commands_say(command, tmp_path, monkeypatch):
    """On stdout or in a file; a refusal has its place."""
    monkeypatch.setattr(device, "HAS_GPU", False)
    status, out, err = command("report masked 4 64 --target sm_80,gfx942")
    assert (status, err) == (0, "") and out.startswith("# masked 4 64 M,N float32\n")
    said = dict(part.split("\n", 1) for part in out.split("\n## ")[1:])
    names = ["resources", "occupancy", "sectors"]
    targets = [f"{name} for {target}" for target in ("sm_80", "gfx942") for name in names]
    assert list(said) == ["formula", "count", *targets, "counters", "bench"]
    for heading, text in said.items():
        name, _, target = heading.partition(" for ")
        if name in ("counters", "bench"):
            assert "GPU" in text
            continue
        sizes = "" if name == "formula" else "4 64"
        asked = f"{name} masked {sizes} {target and f'--target {target}'}"
        assert text.strip("`\n") == command(asked)[1].rstrip("\n")
    file = tmp_path / "page.md"
    asked = f"report masked 4 64 --target sm_80,gfx942 -o {file}"
    assert command(asked) == (0, f"wrote {file}\n", "")
    assert file.read_text("utf-8") == out


def test_report_needs_no_sizes(command, module):
    module("def double(x, w):\n    return 2 * x + w\n")
    out = command("report mine:double --inputs 'M,N N'")[1]
    assert out.startswith("# mine:double M=256 N=256 M,N N float32\n")
    assert "launched no Triton kernel" in out
    status, out, err = command("report mine:double")
    assert (status, out) == (1, "") and "missing 1 required positional argument" in err


# ---- help


def test_help_names_each_command_and_version(command):
    status, out, _ = command("--help")
    assert status == 0 and all(name in out for name in commands.commands)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", command("--version")[1])
    for name in commands.commands:
        status, out, _ = command(f"{name} --help")
        assert status == 0 and ("`M,N:bf16`" in out) == (name != "roof")


# ---- mistakes: one line and status 2 for a bad call, 1 for a failure

BAD_CALLS = {
    "": "Missing command",
    "formul naive": "Did you mean 'formula'?",
    "formula fusd": "did you mean 'fused'?",
    "formula naive 3": "unexpected extra argument",
    "formula naive --inputs M,n": "upper-case letters",
    "formula naive --fit 2x8,3by16": "'3by16' is not a positive",
    "formula kernels:_masked_kernel": "_masked_kernel is a Triton kernel: give the function",
    "formula naive --inputs sofmax": "did you mean 'softmax'",
    "count naive 4": "N of 'M,N' has no number",
    "count naive 4 1.5": "'1.5' is not a positive",
    "count naive 4 8 --dtype int9": "did you mean 'int8'",
    "count naive 4 8 --jsn": "Did you mean '--json'?",
    "resources fused N=64": "--target",
    "resources fused --target sm_90a N=64": "did you mean 'sm_90'?",
    "sectors fused 4 64": "--target",
    "sectors fused 4 64 8 --target sm_90": "8",
    "report fused --target sm_91": "sm_91",
    "report naive -o none/page.md": "none/page.md",
    "report naive -o tests": "tests",
    "report fused 4": "N of 'M,N' has no number",
}
FAILURES = {
    "formula kernels:raises": "cannot take (2, 8)",
    "count kernels:raises 3 5": "kernels:raises: TypeError: kernels: cannot take (3, 5)",
    "count kernels:dropped_mask 5 12": "outside x_ptr",
    "count kernels:gathered 5 8": "missing 1 required positional argument: 'index'",
    "sectors naive 4 64 --target sm_90": "launched no Triton kernel",
}


@pytest.mark.parametrize(
    ("text", "status"), [*((it, 2) for it in BAD_CALLS), *((it, 1) for it in FAILURES)]
)
def test_mistake_is_one_line(text, status, command):
    found, out, err = command(text)
    assert (BAD_CALLS | FAILURES)[text] in err
    assert err.startswith("memtraffic: ") and err.count("\n") == 1 and err.endswith("\n")
    assert (found, out) == (status, "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param("raise RuntimeError('two\\nlines')", "RuntimeError: two lines", id="lines"),
        pytest.param("raise Own('bad')", "mine.Own: bad", id="class-of-ones-own"),
        pytest.param("import sys; sys.exit(0)", "SystemExit: 0", id="exits"),
        pytest.param("raise ValueError(5000 * 'x')", f"ValueError: {979 * 'x'}…", id="long"),
    ],
)
def test_function_that_raises_is_named(body, message, command, module):
    module(f"class Own(BaseException): pass\ndef fn(x):\n    {body}\n")
    assert command("count mine:fn 3 5") == (1, "", f"memtraffic: mine:fn: {message}\n")


def test_module_that_cannot_be_imported_is_named(command, module):
    module("raise SystemExit(4)")
    status, out, err = command("count mine:fn 3 5")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "'mine:fn' cannot be imported" in err


def test_coroutine_is_refused_and_python_says_nothing(command, module):
    module("async def later(x): return x\ndef fn(x): return later(x)\n")
    status, _, err = command("resources mine:fn --target sm_90 N=8")
    assert status and err.count("\n") == 1 and "of type coroutine, before it" in err


def test_interrupted(command, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(hardware, "counters", interrupt)
    status, out, err = command("counters naive 8 8")
    assert (status, out, err.strip()) == (130, "", "")


# ---- functions that insist on a GPU

INSISTS = """\
import torch, triton
import triton.language as tl

{at_import}

@triton.jit
def k(y, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)

def fn(x):
    {check}
    y = torch.empty_like(x)
    k[(triton.cdiv(x.numel(), 128),)](y, x, x.numel(), BLOCK=128)
    return y
"""


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("text", "sms", "expected"),
    [
        ("count mine:fn 3 5 --json", 132, '"read_elements": 15'),
        ("resources mine:fn --target sm_80 N=1024", 108, "k for sm_80, 4 warps"),
        ("resources mine:fn --target gfx942 N=1024", 132, "k for gfx942, 4 warps"),
        pytest.param(
            *("report mine:fn 4 64 --target sm_80", 132, "\nk for sm_80, 4 warps"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stand_in_for_a_gpu(text, sms, expected, command, module):
    """Also while the module is imported; a target of NVIDIA's is the GPU that answers."""
    asked = "torch.cuda.get_device_properties(0).multi_processor_count"
    module(INSISTS.format(at_import=f"assert {asked} == {sms}", check="assert x.is_cuda"))
    status, out, err = command(f"{text} --stand-in")
    assert (status, err) == (0, "") and expected in out


@WITHOUT_GPU
def test_hint_at_stand_in(command, module):
    module(INSISTS.format(at_import="", check="if not x.is_cuda: return x.exp()"))
    status, _, err = command("resources mine:fn --target sm_90 N=64")
    assert (status, err.count("\n")) == (1, 1)
    assert "give --stand-in" in err


# ---- from the shell


def test_help_imports_neither_torch_nor_pandas():
    code = f"""
import sys
from memtraffic.cli import main
for line in (["--version"], ["--help"], *([name, "--help"] for name in {[*commands.commands]})):
    assert main(line) == 0, line
assert not {{"torch", "triton", "pandas", "numpy"}} & {{*sys.modules}}
"""
    assert len(commands.commands) == 9
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def shell(text, folder):
    """Runs a line of shell in which $M is `python -m memtraffic`: status, stdout, stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "M": f"{sys.executable} -m memtraffic",
    }
    line = ["bash", "-o", "pipefail", "-c", text]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["formula nave", "resources mine:fn --target sm_90 N=64", "count mine:fn 3 5"],
)
def test_shell_says_what_this_process_says(text, command, module, tmp_path):
    """Status and lines are the same: the function is blamed for what it raises, and for no more."""
    body = "raise TypeError('no')" if text.startswith("count mine") else "return 2 * x"
    module(f"def fn(x):\n    {body}\n")
    assert shell(f"$M {text}", tmp_path) == command(text)


def test_shell_where_pytorch_cannot_be_imported(tmp_path):
    """Such as where a file in this folder hides a module that it needs."""
    (tmp_path / "torch.py").write_text("raise ImportError('is broken')")
    for text, name in (("count math:sqrt 3 5", "math:sqrt: "), ("roof", "")):
        said = f"memtraffic: {name}ImportError: is broken\n"
        assert shell(f"$M {text}", tmp_path) == (1, "", said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        pytest.param("$M count naive 3 5 | true", (0, 1), "", id="closed-pipe"),
        pytest.param("$M count naive 3 5 > /dev/full", (1,), "No space left", id="full-disk"),
    ],
)
def test_shell_has_no_traceback(text, status, message, tmp_path):
    found, out, err = shell(text, tmp_path)
    assert (found in status, out) == (True, "")
    assert message in err and err.count("\n") <= 1 and "Traceback" not in err


@pytest.mark.slow
def test_shell_formula_takes_hardly_longer_than_to_import_torch(tmp_path):
    def cpu_seconds(text):
        before = os.times()
        shell(text, tmp_path)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    own = cpu_seconds("$M formula fused")
    assert own < 2 * cpu_seconds(f"{sys.executable} -c 'import torch'")
