import json
import os
import subprocess
import sys

import pytest
import torch

from memtraffic import compile as compiling
from memtraffic import progress, residency, runtime
from memtraffic.__main__ import main
from memtraffic.compile import Resources
from memtraffic.gpus import find_gpu
from memtraffic.ladder import RUNGS
from memtraffic.names import import_function
from memtraffic.traffic import counters as hardware

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command, given as one text: its exit status, stdout and stderr."""
    monkeypatch.setattr(progress, "_enabled", False)

    def run(text):
        try:
            status = main(text.split())
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Writes a module of the user's own, `mine`, into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text):
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")

    yield write
    sys.modules.pop("mine", None)


# ---- formula


def test_formula_of_naive(command):
    text = "reads 5MN + 2M, writes 3MN + 2M\nsolved at 9 shapes, checked at 8 others\n"
    assert command("formula naive") == (0, text, "")


def test_formula_of_fused_says_what_it_refused(command):
    with pytest.raises(ValueError, match="5 columns") as refusal:
        import_function("fused")(torch.ones(3, 5, device=runtime.device()))
    solved = "solved at 6 shapes, checked at 5 others, 6 refused"
    text = f"reads MN, writes MN\n{solved}: {refusal.value}\n"
    assert command("formula fused") == (0, text, "")


@pytest.mark.parametrize(
    ("name", "reads", "writes"),
    [("naive", (5, 2, 0, 0), (3, 2, 0, 0)), ("fused", (1, 0, 0, 0), (1, 0, 0, 0))],
)
def test_formula_as_json(name, reads, writes, command):
    status, out, err = command(f"formula {name} --json")
    sides = {"reads": reads, "writes": writes}
    expected = {side: dict(zip(("MN", "M", "N", "1"), c, strict=True)) for side, c in sides.items()}
    assert (status, json.loads(out), err) == (0, expected, "")
    assert out.count("\n") == 1


def test_formula_in_fractions_as_json(command, module):
    module("def half(x):\n    if x.shape[1] % 4: raise ValueError\n    return x[:, ::2].exp()\n")
    _, out, _ = command("formula mine:half --json")
    assert json.loads(out)["reads"] == {"MN": "1/2", "M": 0, "N": 0, "1": 0}


@pytest.mark.parametrize("name", ["masked", "tiled", "persistent"])
def test_formula_of_a_rung_of_any_width(name, command):
    status, out, _ = command(f"formula {name}")
    assert (status, out.splitlines()[0]) == (0, "reads MN, writes MN")
    assert "refused" not in out


def test_formula_of_a_function_by_its_module(command):
    text = "reads 3MN, writes 2MN + M\nsolved at 9 shapes, checked at 8 others\n"
    assert command("formula kernels:mixed") == (0, text, "")


def test_formula_of_another_operation(command, module):
    module("def product(y, dy):\n    return y * dy\n")
    status, out, _ = command("formula mine:product --op softmax_backward")
    assert (status, out.splitlines()[0]) == (0, "reads 2MN, writes MN")


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


def test_count_separates_thousands(command):
    _, out, _ = command("count fused 64 1024")
    assert out.splitlines()[-1].split() == ["total", "65,536", "65,536", "262,144", "262,144"]


def test_count_of_nothing(command, module):
    module("def view(x):\n    return x.T\n")
    _, out, _ = command("count mine:view 3 5")
    assert out.splitlines()[-1].split() == ["total", "0", "0", "0", "0"]


def test_count_as_json(command):
    status, out, err = command("count naive 3 5 --json")
    found = json.loads(out)
    ops = found.pop("ops")
    names = ("read_elements", "written_elements", "read_bytes", "written_bytes")
    assert (status, err) == (0, "")
    assert found == dict(zip(names, (81, 51, 324, 204), strict=True))
    assert [op["name"] for op in ops] == ["amax", "sub", "exp", "sum", "div"]
    assert ops[1] == {"name": "sub"} | dict(zip(names, (18, 15, 72, 60), strict=True))


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_count_of_a_dtype(dtype, itemsize, command):
    _, out, _ = command(f"count fused 4 8 --dtype {dtype} --json")
    assert json.loads(out)["read_bytes"] == 4 * 8 * itemsize


def test_count_of_another_operation(command, module):
    module("def product(y, dy):\n    return y * dy\n")
    _, out, _ = command("count mine:product 4 8 --op softmax_backward --json")
    assert json.loads(out)["read_elements"] == 2 * 4 * 8


def test_count_without_arithmetic(command):
    """So many elements would take minutes, and more memory than there is."""
    m = 2**42
    _, out, _ = command(f"count naive {m} 1 --json")
    assert json.loads(out)["read_elements"] == 5 * m + 2 * m


@pytest.mark.parametrize("option", ["", "--json"])
def test_count_of_a_function_that_prints(option, command, module):
    """What the user's code prints does not mix with the result."""
    module("print('imported')\ndef talking(x):\n    print('called')\n    return x.exp()\n")
    status, out, err = command(f"count mine:talking 4 8 {option}")
    silent = command(f"count mine:talking 4 8 {option}")
    assert (status, err) == (0, "imported\ncalled\n")
    assert out == silent[1]
    assert "called" not in out


# ---- counters, roof


def test_counters_as_json(command, monkeypatch):
    calls = []

    def counters(*args, **options):
        import pandas as pd

        calls.append((args, options))
        return pd.DataFrame([{"kernel": "k", "ns": 781}])

    monkeypatch.setattr(hardware, "counters", counters)
    status, out, err = command("counters naive 8 6 --dtype bfloat16 --json")
    assert (status, json.loads(out), err) == (0, [{"kernel": "k", "ns": 781}], "")
    assert calls == [(("naive", (8, 6)), {"dtype": "bfloat16", "op": "softmax"})]
    assert command("counters naive 8 6")[1].split() == ["kernel", "ns", "k", "781"]


@pytest.mark.parametrize("text", ["counters naive 8 8", "roof"])
def test_commands_that_need_a_gpu(text, command, monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    status, out, err = command(text)
    assert (status, out) == (2, "")
    assert "GPU" in err
    assert err.count("\n") == 1


# ---- resources, occupancy


def test_resources(command):
    status, out, err = command("resources fused --target sm_90 --n 4096")
    assert (status, err) == (0, "")
    assert out.startswith("_softmax_fused_kernel for sm_90, 8 warps: ")
    assert out.endswith("loads: 4 of 128 bits; stores: 4 of 128 bits\n")
    assert out.count("\n") == 1


def test_resources_as_json(command):
    status, out, err = command("resources fused --target gfx942 --n 4096 --warps 4 --json")
    [kernel] = json.loads(out)
    assert (status, err) == (0, "")
    names = ("kernel", "target", "num_warps")
    assert [kernel[name] for name in names] == ["_softmax_fused_kernel", "gfx942", 4]
    assert kernel["spill_bytes"] == 0
    assert kernel["load_bits"] == kernel["store_bits"] == {"128": 4}


def test_occupancy_of_a_kernel_that_is_compiled(command):
    options = "fused --target gfx942 --n 4096 --json"
    status, out, err = command(f"occupancy {options}")
    [kernel] = json.loads(command(f"resources {options}")[1])
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == [residency.report(Resources(**kernel))]


@pytest.fixture
def compiler(monkeypatch):
    """What a compiler was asked for, which answers with two kernels."""
    calls = []

    def resources(fn, gpu, x, **options):
        calls.append((fn, gpu, tuple(x.shape), x.dtype, options))
        scalar = {"sgprs": 20, "allocated_sgprs": 20}
        wide = {"vgprs": 69, "allocated_vgprs": 69} | scalar
        small = {"vgprs": 8, "allocated_vgprs": 8} | scalar
        one = Resources("one", gpu.target, 4, 69, 0, 32784, **wide)
        return [one, Resources("two", gpu.target, 1, 8, 0, 0, **small)]

    monkeypatch.setattr(compiling, "resources", resources)
    return calls


@pytest.mark.parametrize(
    ("target", "lines"),
    [
        (
            "sm_90",
            [
                "one for sm_90 (H200), 4 warps: 6 programs fit, by shared (limits: registers 7, "
                "shared 6, warps 16, blocks 32); 792 programs on 132 processors",
                "two for sm_90 (H200), 1 warps: 32 programs fit, by blocks (limits: registers 256, "
                "shared 228, warps 64, blocks 32); 4224 programs on 132 processors",
            ],
        ),
        (
            "gfx942",
            [
                "one for gfx942 (MI300X), 4 warps: 1 programs fit, by lds (limits: vgprs 7, "
                "waves 8, sgprs 10, lds 1, groups 16); 304 programs on 304 processors",
                "two for gfx942 (MI300X), 1 warps: 32 programs fit, by waves (limits: vgprs 256, "
                "waves 32, sgprs 40); 9728 programs on 304 processors",
            ],
        ),
    ],
)
def test_occupancy_is_a_line_for_each_kernel(command, compiler, target, lines):
    status, out, err = command(f"occupancy fused --target {target} --n 64")
    assert (status, out.splitlines(), err) == (0, lines, "")
    reports = json.loads(command(f"occupancy fused --target {target} --n 64 --json")[1])
    assert [report["kernel"] for report in reports] == ["one", "two"]
    assert reports[0]["programs"] == reports[0]["resident"] * reports[0]["processors"]


@pytest.mark.parametrize("name", ["occupancy", "resources"])
@pytest.mark.parametrize(
    ("option", "n", "dtype", "given"),
    [
        pytest.param("", 64, torch.float32, {}, id="none"),
        pytest.param("--warps 2", 64, torch.float32, {"num_warps": 2}, id="warps"),
        pytest.param("--stages 3", 64, torch.float32, {"num_stages": 3}, id="stages"),
        pytest.param("--waves-per-eu 1", 64, torch.float32, {"waves_per_eu": 1}, id="waves-per-eu"),
        pytest.param("--dtype bfloat16", 64, torch.bfloat16, {}, id="dtype"),
        pytest.param("", 4096, torch.float32, {}, id="columns"),
    ],
)
def test_compiler_is_given_each_option(command, compiler, name, option, n, dtype, given):
    status, *_ = command(f"{name} fused --target gfx942 --n {n} {option}")
    options = dict.fromkeys(("num_warps", "num_stages", "waves_per_eu")) | given
    assert status == 0
    assert compiler == [(import_function("fused"), find_gpu("gfx942"), (16, n), dtype, options)]


# ---- help


def test_help_names_each_command(command):
    status, out, _ = command("--help")
    assert status == 0
    for name in ("formula", "count", "counters", "resources", "occupancy", "roof"):
        assert name in out


def test_help_names_each_rung(command):
    _, out, _ = command("count --help")
    assert f"a rung ({', '.join(RUNGS)})" in " ".join(out.split())


# ---- bad input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("formula fusd", "'fusd'", id="unknown-name"),
        pytest.param("formula warps", "'tiled'", id="old-name"),
        pytest.param("formula naive --op sofmax", "'sofmax'", id="unknown-operation"),
        pytest.param("formula no_such_module:f", "'no_such_module'", id="no-module"),
        pytest.param("formula kernels:softmux", "'softmux'", id="no-function"),
        pytest.param("formula kernels:not_callable", "int", id="not-a-function"),
        pytest.param("formula kernels:raises", "cannot take (2, 8)", id="function-raises"),
        pytest.param("count kernels:raises 3 5", "cannot take (3, 5)", id="count-raises"),
        pytest.param("count kernels:dropped_mask 5 12", "outside the tensors", id="outside"),
        pytest.param("count fused 4 781", "781 columns", id="width-refused"),
        pytest.param("count naive 0 8", "'0' is not a positive", id="zero"),
        pytest.param("count naive -3 8", "-3", id="negative"),
        pytest.param("count naive 4 eight", "'eight' is not a positive", id="not-a-number"),
        pytest.param("count naive 4 1.5", "'1.5' is not a positive", id="not-whole"),
        pytest.param("count naive 4", "N", id="size-missing"),
        pytest.param("count naive 4 8 --dtype int8", "int8", id="unknown-dtype"),
        pytest.param(f"count naive {10**27} 8", "verflow", id="huge"),
        pytest.param("resources fused --target sm_91 --n 64", "sm_91", id="unknown-target"),
        pytest.param("resources fused --target sm_90 --n 781", "781 columns", id="bad-width"),
        pytest.param("resources fused --target sm_90 --n 0", "'0' is not", id="resources-zero"),
        pytest.param("resources fused --n 64", "--target", id="no-target"),
        pytest.param("resources naive --target sm_90 --n 64", "no Triton kernel", id="no-kernel"),
        pytest.param("occupancy fused --target sm_91 --n 64", "sm_91", id="occupancy-target"),
        pytest.param("occupancy naive --target sm_90 --n 64", "no Triton kernel", id="no-kernels"),
        pytest.param("occupancy fused --n 64", "--target", id="occupancy-without-target"),
        pytest.param("occupancy fused --target sm_90", "--n", id="occupancy-without-columns"),
        pytest.param(
            "occupancy fused --target gfx942 --n 64 --waves-per-eu 0", "'0' is not", id="no-waves"
        ),
        pytest.param(
            "resources fused --target sm_90 --n 64 --waves-per-eu 1", "waves_per_eu", id="amd-only"
        ),
        pytest.param(
            "occupancy fused --target sm_90 --n 64 --waves-per-eu 1", "waves_per_eu", id="amd-alone"
        ),
        pytest.param("record book", "python -m memtraffic.book record", id="record-has-moved"),
        pytest.param("drift book", "python -m memtraffic.book drift", id="drift-has-moved"),
        pytest.param("frobnicate", "frobnicate", id="unknown-command"),
        pytest.param("", "COMMAND", id="no-command"),
    ],
)
def test_bad_input_is_one_line_and_status_2(text, message, command):
    status, out, err = command(text)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param("raise RuntimeError('two\\nlines')", "two lines", id="two-lines"),
        pytest.param("raise RuntimeError", "RuntimeError", id="no-words"),
        pytest.param("return {}['k']", "KeyError: 'k'", id="key"),
        pytest.param("import sys; sys.exit(0)", "the function calls sys.exit(0)", id="exits"),
        pytest.param("import sys; sys.exit('bye')", "the function calls sys.exit(bye)", id="bye"),
    ],
)
def test_bad_function_is_one_line(body, message, command, module):
    module(f"def fn(x):\n    {body}\n")
    assert command("count mine:fn 3 5") == (2, "", f"memtraffic: {message}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("def fn(x)\n    return x\n", "mine.py, line 1", id="syntax"),
        pytest.param("raise OSError('boom')", "'mine:fn' cannot be imported", id="raises"),
        pytest.param("raise SystemExit(4)", "'mine:fn' cannot be imported", id="exits"),
    ],
)
def test_bad_module_is_one_line(text, message, command, module):
    module(text)
    status, out, err = command("count mine:fn 3 5")
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_interrupted(command, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(hardware, "counters", interrupt)
    assert command("counters naive 8 8") == (130, "", "")


def test_closed_pipe(capsys, monkeypatch):
    """As in `| head -1`: no traceback, neither now nor when Python ends."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["formula", "naive"]) == 1
        stdout.write("more")
    assert capsys.readouterr().err == ""


# ---- in a process of its own


@pytest.mark.slow
def test_python_m_memtraffic(tmp_path):
    """The command finds a module in the current folder, and decides by itself what runs kernels."""
    (tmp_path / "mine.py").write_text("def double(x):\n    return 2 * x\n", encoding="utf-8")
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "memtraffic", "formula", "mine:double", "--json"],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reads"] == {"MN": 1, "M": 0, "N": 0, "1": 0}
    assert done.stderr == ""
