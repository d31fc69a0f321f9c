import io
import json
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memtraffic.__main__ as module_of_main
from memtraffic import compile as compiling
from memtraffic import progress, residency, runtime
from memtraffic.__main__ import COMMANDS, main
from memtraffic.benchmark.baselines import BACKWARD_BASELINES, BASELINES
from memtraffic.benchmark.peers import IMPLEMENTATIONS, PEERS
from memtraffic.gpus import find_gpu
from memtraffic.meters import counters as hardware
from memtraffic.names import RUNGS, import_function
from memtraffic.residency import Resources

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command, given as one text: its exit status, stdout and stderr."""
    monkeypatch.setattr(progress, "_enabled", False)

    def run(text):
        try:
            status = main(shlex.split(text))
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


@pytest.mark.parametrize(
    ("inputs", "reads"),
    [
        pytest.param("M,N N", {"MN": 1, "M": 0, "N": 1, "1": 0}, id="vector"),
        pytest.param("M,N other=N:bf16", {"MN": 1, "M": 0, "N": 1, "1": 0}, id="keyword"),
        pytest.param("M,16 3", {"M": 16, "1": 0}, id="number"),
    ],
)
def test_formula_of_inputs(inputs, reads, command, module):
    module("def add(x, other):\n    return x + other\n")
    status, out, err = command(f"formula mine:add --json --inputs '{inputs}'")
    assert (status, json.loads(out)["reads"], err) == (0, reads, "")


def test_formula_backward(command, module):
    module("def double(x):\n    return 2 * x\n")
    status, out, _ = command("formula mine:double --backward")
    assert (status, out.splitlines()[:2]) == (
        0,
        ["forward: reads MN, writes MN", "backward: reads MN, writes MN"],
    )
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


@pytest.mark.parametrize("sizes", ["3 4 5", "M=3 K=4 N=5", "3 N=5 K=4"])
def test_count_of_inputs(sizes, command):
    status, out, _ = command(f"count torch:matmul {sizes} --inputs 'M,K K,N' --json")
    assert (status, json.loads(out)["read_elements"]) == (0, 3 * 4 + 4 * 5)


def test_count_of_a_module(command, module):
    module("import torch\nlinear = torch.nn.Linear(8, 4, bias=False)\n")
    _, out, _ = command("count mine:linear --inputs 3,8 --json")
    assert json.loads(out)["read_elements"] == 3 * 8 + 4 * 8


def test_count_of_another_operation(command, module):
    module("def product(y, dy):\n    return y * dy\n")
    _, out, _ = command("count mine:product 4 8 --op softmax_backward --json")
    assert json.loads(out)["read_elements"] == 2 * 4 * 8


def test_count_without_arithmetic_where_the_sizes_are_numbers(command):
    _, out, _ = command("count naive --inputs 4398046511104,1 --json")
    assert json.loads(out)["read_elements"] == 7 * 2**42


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
    assert calls == [(("naive", (8, 6)), {"dtype": "bfloat16", "inputs": "M,N"})]
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
    assert json.loads(out) == [residency.Occupancy.of(Resources(**kernel)).as_dict()]


@pytest.fixture
def compiler(monkeypatch):
    """What a compiler was asked for, which answers with two kernels."""
    calls = []

    def resources(fn, gpu, inputs, **options):
        [x] = inputs.positional
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


@pytest.mark.parametrize("sizes", ["N=48 M=3", "3 48", "M=3 --n 48"])
def test_compiler_is_given_sizes_after_options(sizes, command, compiler):
    status, *_ = command(f"resources fused --target gfx942 {sizes}")
    assert (status, compiler[0][2]) == (0, (3, 48))


# ---- report


def test_report_on_stdout(command):
    status, out, err = command("report fused --target sm_90,gfx942 16 64")
    assert (status, err) == (0, "")
    assert out.startswith("# Memory traffic of fused\n")
    assert "With M = 16, N = 64, the function moves 2,048 elements, 1.00 times" in out


@pytest.mark.parametrize("name", ["page.md", "page.html", "page.MD"])
def test_report_in_a_file(name, command, module, tmp_path):
    module("def double(x):\n    return 2 * x\n")
    status, out, err = command(f"report mine:double -o {name}")
    assert (status, out, err) == (0, f"wrote {name}\n", "")
    assert "Memory traffic of mine:double" in (tmp_path / name).read_text("utf-8")


def test_report_with_its_pictures(command, module, tmp_path):
    module("def double(x):\n    return (2 * x).exp()\n")
    status, out, _ = command("report mine:double -o page.md")
    assert (status, out) == (0, "wrote page.md\nwrote page.traffic.svg\n")
    assert "](page.traffic.svg)" in (tmp_path / "page.md").read_text("utf-8")
    assert (tmp_path / "page.traffic.svg").read_text("utf-8").startswith("<?xml")


def test_report_of_an_operation(command, module):
    module("def product(y, dy):\n    return y * dy\n")
    status, out, _ = command("report mine:product --op softmax_backward --backward")
    assert (status, "| forward | reads | 2MN | 2MN |" in out) == (0, True)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param("folder", "is a folder", id="folder"),
        pytest.param("folder/", "is a folder", id="folder-with-slash"),
        pytest.param("page.pdf", "ends in .md or .html", id="another-kind"),
        pytest.param("''", "ends in .md or .html", id="no-name"),
        pytest.param("none/page.md", "no folder none", id="no-folder"),
        pytest.param("full.md", "full.md: cannot be written: No space", id="full-disk"),
    ],
)
def test_report_that_cannot_be_written(output, message, command, module, tmp_path):
    module("def double(x):\n    return 2 * x\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "full.md").symlink_to("/dev/full")
    status, out, err = command(f"report mine:double -o {output}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.skipif(os.geteuid() == 0, reason="an administrator writes everywhere")
def test_report_in_a_file_that_must_not_be_written(command, module, tmp_path):
    module("def double(x):\n    return 2 * x\n")
    (tmp_path / "page.md").touch(0o400)
    assert "must not be written" in command("report mine:double -o page.md")[2]


# ---- help


# ---- bench


@pytest.fixture
def compared(monkeypatch):
    """What `bench` compares; each implementation takes as many microseconds as its name is long."""
    calls = []

    def compare(impls, shapes, **options):
        calls.append((impls, shapes, options))
        times = ("us", "us_p20", "us_p80", "us_reversed", "gb_per_s")
        rows = [
            {"impl": name, "m": m, "n": n, "dtype": options["dtype"]}
            | dict.fromkeys(times, float("nan") if name in ("Liger", "naive") else len(name))
            | {"version": ""}
            | {"note": {"Liger": "absent: nowhere", "naive": "refused: why"}.get(name, "")}
            for m, n in shapes
            for name in impls
        ]
        return pd.DataFrame(rows)

    monkeypatch.setattr("memtraffic.benchmark.compare", compare)
    return calls


def test_bench(command, compared, tmp_path):
    file = tmp_path / "found.csv"
    text = (
        f"bench copy naive tiled --peers liger --shapes 64x256 8x512 --dtype bfloat16 --csv {file}"
    )
    status, out, err = command(text)
    assert status == 0 and err == "Liger is left out: nowhere\n"
    shapes, options = [(64, 256), (8, 512)], {"dtype": "bfloat16", "op": "softmax"}
    assert compared == [(["copy", "naive", "tiled", "Liger"], shapes, options)]
    header, first, second, third, *_ = map(str.split, out.splitlines())
    assert header == "impl m n dtype us us_p20 us_p80 us_reversed gb_per_s %_of_copy note".split()
    assert first == "copy 64 256 bfloat16 4.0 4.0 4.0 4.0 4.0 100.0".split()
    assert second == "naive 64 256 bfloat16 - - - - - - refused: why".split()
    assert third[-1] == "80.0"
    kept = pd.read_csv(file, keep_default_na=False)
    assert kept["impl"].tolist() == ["copy", "naive", "tiled"] * 2
    assert kept["us"].tolist() == ["4", "", "5"] * 2


def test_bench_as_json(command, compared):
    status, out, _ = command("bench tiled --shapes 64x256 --json")
    assert (status, [row["us"] for row in json.loads(out)]) == (0, [5])


def test_bench_of_any_inputs(command, monkeypatch, tmp_path):
    calls = []

    def beside_copy(impls, shapes, **options):
        calls.append((impls, shapes, options))
        rows = [
            {"impl": name, "m": m, "n": n, "dtype": "float32", "us": us, "gb_per_s": 8.0 / us}
            for m, n in shapes
            for name, us in zip(["copy", *impls], (2.0, 4.0), strict=True)
        ]
        return pd.DataFrame(rows)

    monkeypatch.setattr("memtraffic.benchmark.bench_beside_copy", beside_copy)
    text = 'bench mine:f --inputs "M,N M:int64<N" --shapes 64x256 8x512'
    status, out, err = command(f"{text} --csv {tmp_path / 'found.csv'}")
    assert (status, err) == (0, "")
    options = {"inputs": "M,N M:int64<N", "dtype": "float32"}
    assert calls == [(["mine:f"], [(64, 256), (8, 512)], options)]
    assert out.splitlines()[2].split() == "mine:f 64 256 float32 4.0 2.0 50.0".split()
    assert len(pd.read_csv(tmp_path / "found.csv")) == 4


def test_bench_of_everything(command, compared):
    assert command("bench --peers ALL")[0] == 0
    [(impls, shapes, _)] = compared
    assert set(impls) == {*BASELINES, *RUNGS, *PEERS} - {"jit.script(naive)"}
    assert (4096, 1024) in shapes and len(impls) == len(set(impls))
    command("bench --op softmax_backward --peers all")
    assert set(compared[1][0]) == {"copy", *BACKWARD_BASELINES} | {
        name for name in IMPLEMENTATIONS if name.endswith("backward")
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bench tilde", "did you mean 'tiled'"),
        ("bench --peers quark", "no peer is named 'quark': give one of Liger, FlagGems, QuACK,"),
        ("bench --shapes 12by", "'12by' is no shape such as 4096x1024"),
        ("bench --shapes 4096x0", "'4096x0' is no shape"),
        ("bench --op softmin", "no operation is named 'softmin'"),
        ("bench --shape 64x64 --peer", "--peers"),
        ("bench --inputs M,N", "needs the NAME"),
        ("bench mine:f --inputs M,N --op softmax", "leave out --op and --peers"),
        ("bench mine:f --inputs M,N --peers all", "leave out --op and --peers"),
        ("bench mine:f --inputs M,N --shapes 8", "8 is no shape of 'M,N', whose sizes are M, N"),
        ("bench mine:f --inputs M,n", "lower case"),
    ],
)
def test_bench_of_a_mistake(text, message, command, compared):
    status, out, err = command(text)
    assert (status, out, compared) == (2, "", []) and message in err
    assert err.count("\n") == 1


def test_help_names_each_command(command):
    status, out, _ = command("--help")
    assert status == 0
    for name in ("formula", "count", "counters", "resources", "occupancy", "report", "roof"):
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
        pytest.param(f"count naive {10**27} 8", "the largest is 2**63 - 1", id="huge"),
        pytest.param(f"count naive {2**62} {2**62}", "cannot be made with M=4", id="huge-product"),
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
        pytest.param("record book", "python -m memtraffic_book record", id="record-has-moved"),
        pytest.param("drift book", "python -m memtraffic_book drift", id="drift-has-moved"),
        pytest.param("frobnicate", "frobnicate", id="unknown-command"),
        pytest.param("formul naive", "did you mean formula?", id="misspelt-command"),
        pytest.param("formula fusd", "did you mean 'fused'?", id="misspelt-rung"),
        pytest.param("formula naive --op softmx", "did you mean 'softmax'", id="misspelt-op"),
        pytest.param("count naive 4 8 --dtype bfloat61", "mean bfloat16?", id="misspelt-dtype"),
        pytest.param("count naive 4 8 --jsn", "did you mean --json?", id="misspelt-option"),
        pytest.param("roof 3", "unrecognized argument 3", id="surplus-argument"),
        pytest.param("formula naive 3", "unrecognized argument 3", id="sizes-of-formula"),
        pytest.param("count naive 4 8 2", "one size too many", id="size-too-many"),
        pytest.param("count naive 4 K=8", "no size 'K'", id="unknown-size"),
        pytest.param("formula naive --inputs M,n", "lower case", id="inputs"),
        pytest.param("formula naive --inputs M --op softmax", "leave out one", id="inputs-and-op"),
        pytest.param("formula naive --inputs A,B,C,D,E", "5 sizes", id="five-sizes"),
        pytest.param("resources fused --traget sm_90 --n 64", "--target?", id="misspelt-target"),
        pytest.param("resources fused --target sm_90a --n 64", "mean sm_90?", id="target-letter"),
        pytest.param("resources fused --target sm_90", "N=1024 or --n 1024", id="no-columns"),
        pytest.param(
            "resources fused --target gfx942 --n 64 --waves-per-eu 99", "holds 8", id="many-waves"
        ),
        pytest.param("--json formula naive", "give --json after the name", id="too-early"),
        pytest.param(
            "--verison", "unrecognized argument --verison: did you mean --version?", id="V"
        ),
        pytest.param("formula --hlep", "--hlep: did you mean --help?", id="misspelt-help"),
        pytest.param("-V", "unrecognized argument -V", id="short-version"),
        pytest.param("help", "did you mean --help?", id="help-as-a-command"),
        pytest.param("FORMULA naive", "did you mean formula?", id="upper-case-command"),
        pytest.param("count naive 4 8 -j", "unrecognized argument -j", id="short-option"),
        pytest.param(
            "resources fused --target sm_90 --n 64 --warps 3", "--warps 3: Tr", id="three-warps"
        ),
        pytest.param("formula kernels:HAS_DESCRIPTORS", "bool", id="no-function"),
        pytest.param("formula kernels:torch", "module", id="module"),
        pytest.param("formula torch:Tensor", "is a class", id="class"),
        pytest.param("count torch:rms_norm 3 5", "torch:rms_norm: TypeError: ", id="in-c++"),
        pytest.param("", "COMMAND", id="no-command"),
        pytest.param("report fusd", "did you mean 'fused'?", id="report-misspelt-rung"),
        pytest.param("report fused --target sm_91", "sm_91", id="report-unknown-target"),
        pytest.param("report fused 4", "N of 'M,N' has no number", id="report-size-missing"),
        pytest.param("report fused --target ,", "no GPU is named ''", id="report-no-target"),
        pytest.param("report", "required: NAME\n", id="report-of-nothing"),
        pytest.param("report fused --json", "unrecognized argument --json", id="report-json"),
        pytest.param("report kernels:raises", "cannot take", id="report-raises"),
        pytest.param("report torch:rms_norm", "rms_norm: TypeError: ", id="report-in-c++"),
        pytest.param("report kernels:not_callable", "int", id="report-not-a-function"),
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
        pytest.param(
            "raise RuntimeError('two\\nlines')", "RuntimeError: two lines", id="two-lines"
        ),
        pytest.param("raise RuntimeError", "RuntimeError", id="no-words"),
        pytest.param("return {}['k']", "KeyError: 'k'", id="key"),
        pytest.param("raise Own('bad')", "mine.Own: bad", id="class-of-ones-own"),
        pytest.param("raise GeneratorExit('no')", "GeneratorExit: no", id="no-exception"),
        pytest.param("import sys; sys.exit(0)", "the function calls sys.exit(0)", id="exits"),
        pytest.param("import sys; sys.exit('bye')", "the function calls sys.exit(bye)", id="bye"),
        pytest.param("import os; os._exit(0)", "the function calls os._exit(0)", id="ends"),
    ],
)
def test_bad_function_is_one_line(body, message, command, module):
    module(f"class Own(BaseException): pass\ndef fn(x):\n    {body}\n")
    assert command("count mine:fn 3 5") == (2, "", f"memtraffic: mine:fn: {message}\n")


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


def test_long_message_is_cut(command, module):
    module("def fn(x):\n    raise RuntimeError(5000 * 'x')\n")
    status, _, err = command("count mine:fn 3 5")
    assert (status, len(err), err[-3:]) == (2, 1002, "x…\n")


def test_function_that_refuses_every_shape_is_named(command, module):
    module("def fn(x):\n    raise ValueError('not today')\n")
    text = "memtraffic: mine.fn refuses every shape, 2 x 8 with ValueError: not today\n"
    assert command("formula mine:fn") == (2, "", text)


def test_processes_that_a_function_starts_may_end(command, module):
    module(
        "import os\n"
        "def fn(x):\n"
        "    child = os.fork()\n"
        "    if not child: os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    return x.exp()\n"
    )
    end = os._exit
    assert command("count mine:fn 3 5")[0] == 0
    assert os._exit is end


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        pytest.param("k[(1, 70000)](x)", "CUDA launches up to 65535", id="grid"),
        pytest.param("k[(-1,)](x)", "a grid of -1 programs", id="negative"),
        pytest.param("k[(1,)](x, num_warps=64)", "no GPU launches more than 1024", id="warps"),
    ],
)
def test_launch_that_no_gpu_makes(launch, message, command, module):
    module(
        "import triton, triton.language as tl\n"
        f"@triton.jit\ndef k(x): tl.store(x, 1.0)\ndef fn(x): {launch}\n"
    )
    status, out, err = command("count mine:fn 3 5")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("name", ["formula", "resources", "report"])
@pytest.mark.filterwarnings("error")
def test_coroutine_that_is_returned(name, command, module):
    """It is refused, and Python has nothing to say about it."""
    module("async def later(x): return x\ndef fn(x): return later(x)\n")
    options = "--target sm_90 --n 8" if name == "resources" else ""
    status, out, err = command(f"{name} mine:fn {options}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "of type coroutine, before it did its work" in err


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
WITHOUT_GPU = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU answers itself")


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("text", "sms", "expected"),
    [
        ("formula mine:fn", 132, "reads MN, writes MN"),
        ("count mine:fn 3 5 --json", 132, '"read_elements": 15'),
        ("resources mine:fn --target sm_80 --n 1024", 108, "k for sm_80, 4 warps"),
        ("resources mine:fn --target gfx942 --n 1024", 132, "k for gfx942, 4 warps"),
        ("occupancy mine:fn --target sm_90 --n 1024", 132, "k for sm_90 (H200), 4 warps"),
        ("report mine:fn --target sm_80", 132, "# Memory traffic of mine:fn"),
    ],
)
def test_stand_in_for_a_gpu(text, sms, expected, command, module):
    """Also while the module is imported; a target of NVIDIA's is the GPU that answers."""
    asked = "torch.cuda.get_device_properties(0).multi_processor_count"
    module(INSISTS.format(at_import=f"assert {asked} == {sms}", check="assert x.is_cuda"))
    status, out, err = command(f"{text} --stand-in")
    assert (status, err) == (0, "") and expected in out


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("check", "hinted"),
    [
        ("assert x.is_cuda", True),
        ("torch.cuda.current_device()", True),
        ("raise ValueError('give a tensor on a GPU: cuda')", True),
        ("assert x.shape[0] > 9", False),
    ],
)
def test_hint_at_stand_in(check, hinted, command, module):
    module(INSISTS.format(at_import="", check=check))
    status, _, err = command("count mine:fn 3 5")
    assert (status, err.count("\n")) == (2, 1)
    assert ("then give --stand-in" in err) == hinted


@WITHOUT_GPU
def test_no_hint_where_it_does_not_help(command, module, monkeypatch):
    module(INSISTS.format(at_import="", check="assert not x.is_cuda"))
    assert "--stand-in" not in command("count mine:fn 3 5 --stand-in")[2]
    module(INSISTS.format(at_import="", check="assert x.is_cuda"))
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    assert "AssertionError" in (said := command("count mine:fn 3 5")[2])
    assert "--stand-in" not in said


def test_kernel_of_three_warps(command, module):
    module(
        "import triton, triton.language as tl\n@triton.jit\ndef k(x): tl.store(x, 1.0)\n"
        "def fn(x): k[(1,)](x, num_warps=3)\n"
    )
    err = command("resources mine:fn --target sm_90 --n 8")[2]
    assert err.startswith("memtraffic: k does not compile for sm_90: num_warps must be a power")


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


# ---- what any command line says

MISTAKES = [
    "--help", "--version", "formula --help", "formul naive", "formula fusd",
    "formula no_such_module:f", "formula naive --inputs M,n", "formula naive --op softmx",
    "count naive 4", "resources fused --target sm_91 --n 64", "resources fused --n 64",
    "occupancy fused --target sm_90 --n 64 --waves-per-eu 2",
]  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_one_line(text, capsys):
    assert main(shlex.split(text)) == (0 if text.split()[-1].startswith("--") else 2)
    said = capsys.readouterr()
    assert bool(said.out) != (said.err.count("\n") == 1)


WORDS = [
    *("formula", "count", "counters", "resources", "occupancy", "report", "roof", "formul"),
    *("naive", "fusd", "kernels:masked", "kernels:nothing", "no:f", ":", "a b", "", "-", "--"),
    *("3", "0", "-3", "1e3", "M=3", "N=5", "K=", "=", "\u0663", "9" * 40, "None"),
    *("--inputs", "--inputs=M,N", "M,N", "M,K K,N", "m", "M:int64<N", "eps=1e-6", "M,,N"),
    *("--op", "softmax", "sofmax", "--dtype", "bfloat16", "int3", "--json", "--backward", "--x"),
    *("--target", "sm_90", "gfx942", "sm_1", "--n", "64", "--warps", "--waves-per-eu", "--tar"),
]


@settings(max_examples=500, deadline=None, database=None, derandomize=True)
@given(
    st.sampled_from(WORDS[:8]),
    st.lists(st.sampled_from(WORDS), max_size=8),
    st.sampled_from([[], ["naive"]]),
)
def test_any_command_line(first, words, name):
    """It runs, or one line on stderr says why not, and the status is 2."""
    ran = []
    stubs = {c: (lambda args: ran.append(args) or "ran", text) for c, (_, text) in COMMANDS.items()}
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(module_of_main, "COMMANDS", stubs),
        mock.patch.object(progress, "_enabled", False),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        status = main([first, *name, *words])
    if status:
        assert (status, out.getvalue(), err.getvalue().count("\n")) == (2, "", 1)
        assert "Traceback" not in err.getvalue() and len(err.getvalue()) < 1000
    else:
        assert out.getvalue() == "ran\n" and ran


# ---- in a process of its own


def python(*arguments, **options):
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(filter(None, sys.path))
    options = {"capture_output": True, "text": True} | options
    environment |= {"PYTHONPATH": paths}
    return subprocess.run([sys.executable, *arguments], env=environment, **options)


def shell(text, folder):
    """Runs a line of shell in which $M is `python -m memtraffic`: status, stdout, stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "M": f"{sys.executable} -m memtraffic",
    }
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text], cwd=folder, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_process_says_nothing_but_its_answer():
    done = python("-m", "memtraffic", "formula", "naive")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("reads 5MN + 2M, writes 3MN + 2M")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        pytest.param("$M --help | true", (0, 1), "", id="help-into-a-closed-pipe"),
        pytest.param("$M --help > /dev/full", (2,), "No space left", id="help-onto-a-full-disk"),
        pytest.param("$M --version >&-", (2,), "stdout is closed", id="stdout-closed"),
        pytest.param("$M formula naive >&-", (2,), "stdout is closed", id="formula-stdout-closed"),
        pytest.param("$M formula nave 2>&-", (2,), "", id="stderr-closed"),
        pytest.param("$M formula nave >&- 2>&-", (2,), "", id="both-closed"),
        pytest.param("$M count naive 3 5 > /dev/full", (2,), "No space left", id="full-disk"),
        pytest.param("$M report naive | true", (0, 1), "", id="report-into-a-closed-pipe"),
        pytest.param("$M report naive > /dev/full", (2,), "No space left", id="report-full-disk"),
        pytest.param("$M formula leaves:f", (2,), "'leaves:f' cannot be imported", id="leaves"),
    ],
)
def test_process_has_no_traceback(text, status, message, tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    found, out, err = shell(text, tmp_path)
    assert (found in status, out) == (True, "")
    assert message in err
    assert err.count("\n") <= 1 and "Traceback" not in err and "Exception ignored" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [*MISTAKES[3:], "roof --x", "count", "formula a:b:c", "count -h x:"]
)
def test_process_of_a_mistake(text, tmp_path):
    status, out, err = shell(f"$M {text.replace('M,n', 'm')}", tmp_path)
    help = "-h" in text
    assert (status, err.count("\n"), bool(out)) == ((0, 0, True) if help else (2, 1, False))


@pytest.mark.slow
def test_process_whose_function_writes_to_stdout_by_all_means(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, subprocess, sys\n"
        "def fn(x):\n"
        "    print('printed')\n"
        "    os.write(1, b'written\\n')\n"
        "    subprocess.run(['echo', 'echoed'])\n"
        "    sys.stdout.close()\n"
        "    os.close(1)\n"
        "    return x.exp()\n"
    )
    status, out, err = shell("$M count mine:fn 3 5 --json", tmp_path)
    assert (status, json.loads(out)["read_elements"]) == (0, 15)
    assert sorted(err.split()) == ["echoed", "printed", "written"]


def cpu_seconds(*arguments):
    """The least time that Python uses for these arguments in three runs; others may be busy."""

    def once():
        before = os.times()
        python(*arguments)
        after = os.times()
        user, system = (
            getattr(after, name) - getattr(before, name)
            for name in ("children_user", "children_system")
        )
        return user + system

    return min(once() for _ in range(3))


@pytest.mark.slow
def test_process_of_formula_takes_hardly_longer_than_to_import_torch():
    """On a quiet machine without a GPU, less than 3 s."""
    took = cpu_seconds("-m", "memtraffic", "formula", "memtraffic.kernels.softmax.fused:softmax")
    tensor = f"import torch; torch.ones(1, device={runtime.device().type!r})"  # starts a GPU
    assert took < 1.5 * cpu_seconds("-c", tensor)
    assert took < 3 or runtime.HAS_GPU


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
