import json
import os
import subprocess
import sys

import pytest
import torch

from memtraffic import machine, occupancy, targets
from memtraffic.__main__ import main
from memtraffic.ladder import RUNGS, resolve
from memtraffic.progress import Progress
from memtraffic.targets import Resources

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """A command changes the process it runs in."""
    monkeypatch.setattr(Progress, "enabled", False)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def command(capsys):
    """Runs a command, given as one text: its exit status, stdout and stderr."""

    def run(text):
        try:
            status = main(text.split())
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return run


# ---- what they print


def test_formula_of_naive(command):
    text = "reads 5MN + 2M, writes 3MN + 2M\nsolved at 9 shapes, checked at 8 others\n"
    assert command("formula naive") == (0, text, "")


def test_formula_of_fused_says_what_it_refused(command):
    with pytest.raises(ValueError, match="5 columns") as refusal:
        resolve("fused")(torch.ones(3, 5, device=machine.device()))
    text = f"reads MN, writes MN\nsolved at 6 shapes, checked at 5 others, 6 refused: {refusal.value}\n"
    assert command("formula fused") == (0, text, "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "naive",
            {
                "reads": {"MN": 5, "M": 2, "N": 0, "1": 0},
                "writes": {"MN": 3, "M": 2, "N": 0, "1": 0},
            },
        ),
        (
            "fused",
            {
                "reads": {"MN": 1, "M": 0, "N": 0, "1": 0},
                "writes": {"MN": 1, "M": 0, "N": 0, "1": 0},
            },
        ),
    ],
)
def test_formula_as_json(name, expected, command):
    status, out, err = command(f"formula {name} --json")
    assert (status, json.loads(out), err) == (0, expected, "")
    assert out.count("\n") == 1


@pytest.mark.parametrize("name", ["masked", "warps", "persistent"])
def test_formula_of_a_rung_of_any_width(name, command):
    status, out, _ = command(f"formula {name}")
    assert (status, out.splitlines()[0]) == (0, "reads MN, writes MN")
    assert "refused" not in out


def test_help_names_each_rung(command):
    _, out, _ = command("count --help")
    assert f"a rung ({', '.join(RUNGS)})" in " ".join(out.split())


def test_formula_of_a_function_by_its_module(command):
    text = "reads 3MN, writes 2MN + M\nsolved at 9 shapes, checked at 8 others\n"
    assert command("formula kernels:mixed") == (0, text, "")


def test_count(command):
    status, out, err = command("count naive 3 5")
    lines = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert lines[0] == "read elements written elements read bytes written bytes".split()
    assert lines[1:] == [
        ["amax", "15", "3", "60", "12"],
        ["sub", "18", "15", "72", "60"],
        ["exp", "15", "15", "60", "60"],
        ["sum", "15", "3", "60", "12"],
        ["div", "18", "15", "72", "60"],
        ["total", "81", "51", "324", "204"],
    ]


def test_count_separates_thousands(command):
    _, out, _ = command("count fused 64 1024")
    assert out.splitlines()[-1].split() == [
        "total",
        "65,536",
        "65,536",
        "262,144",
        "262,144",
    ]


def test_count_as_json(command):
    status, out, err = command("count naive 3 5 --json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert {key: value for key, value in found.items() if key != "ops"} == {
        "read_elements": 81,
        "written_elements": 51,
        "read_bytes": 324,
        "written_bytes": 204,
    }
    assert [op["name"] for op in found["ops"]] == ["amax", "sub", "exp", "sum", "div"]
    assert found["ops"][1] == {
        "name": "sub",
        "read_elements": 18,
        "written_elements": 15,
        "read_bytes": 72,
        "written_bytes": 60,
    }


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("float32", 4), ("float16", 2), ("bfloat16", 2)]
)
def test_count_of_a_dtype(dtype, itemsize, command):
    _, out, _ = command(f"count fused 4 8 --dtype {dtype} --json")
    assert json.loads(out)["read_bytes"] == 4 * 8 * itemsize


def test_resources(command):
    status, out, err = command("resources fused --target sm_90 --n 4096")
    assert (status, err) == (0, "")
    assert out.startswith("_fused_kernel for sm_90, 8 warps: ")
    assert out.endswith("loads: 4 of 128 bits; stores: 4 of 128 bits\n")
    assert out.count("\n") == 1


def test_resources_as_json(command):
    status, out, err = command(
        "resources fused --target gfx942 --n 4096 --warps 4 --json"
    )
    [kernel] = json.loads(out)
    assert (status, err) == (0, "")
    assert (kernel["kernel"], kernel["target"], kernel["num_warps"]) == (
        "_fused_kernel",
        "gfx942",
        4,
    )
    assert kernel["spill_bytes"] == 0
    assert kernel["load_bits"] == kernel["store_bits"] == {"128": 4}


def test_occupancy_of_a_kernel_that_is_compiled(command):
    text = "fused --target gfx942 --n 4096 --json"
    status, out, err = command(f"occupancy {text}")
    [kernel] = json.loads(command(f"resources {text}")[1])
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == [occupancy.report(Resources(**kernel))]


@pytest.fixture
def compiler(monkeypatch):
    """What a compiler was asked for, which answers with two kernels."""
    asked = []

    def resources(fn, target, x, **options):
        asked.append((fn, target, tuple(x.shape), x.dtype, options))
        scalar = {"sgprs": 20, "allocated_sgprs": 20}
        wide = {"vgprs": 69, "allocated_vgprs": 69} | scalar
        small = {"vgprs": 8, "allocated_vgprs": 8} | scalar
        one = Resources("one", target, 4, 69, 0, 32784, **wide)
        return [one, Resources("two", target, 1, 8, 0, 0, **small)]

    monkeypatch.setattr(targets, "resources", resources)
    return asked


@pytest.mark.parametrize(
    ("target", "lines"),
    [
        (
            "sm_90",
            [
                "one for sm_90 (H200), 4 warps: 6 programs fit, by shared (limits: registers 7, shared 6, warps 16, "
                "blocks 32); 792 programs on 132 processors",
                "two for sm_90 (H200), 1 warps: 32 programs fit, by blocks (limits: registers 256, shared 228, "
                "warps 64, blocks 32); 4224 programs on 132 processors",
            ],
        ),
        (
            "gfx942",
            [
                "one for gfx942 (MI300X), 4 warps: 1 programs fit, by lds (limits: vgprs 7, waves 8, sgprs 10, "
                "lds 1, groups 16); 304 programs on 304 processors",
                "two for gfx942 (MI300X), 1 warps: 32 programs fit, by waves (limits: vgprs 256, waves 32, sgprs 40); "
                "9728 programs on 304 processors",
            ],
        ),
    ],
)
def test_occupancy_is_a_line_a_kernel(command, compiler, target, lines):
    status, out, err = command(f"occupancy fused --target {target} --n 64")
    assert (status, out.splitlines(), err) == (0, lines, "")
    told = json.loads(command(f"occupancy fused --target {target} --n 64 --json")[1])
    assert [it["kernel"] for it in told] == ["one", "two"]
    assert told[0]["programs"] == told[0]["resident"] * told[0]["processors"]


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
)  # fmt: skip
def test_the_compiler_is_given_each_option(
    command, compiler, name, option, n, dtype, given
):
    status, *_ = command(f"{name} fused --target gfx942 --n {n} {option}")
    unset = dict.fromkeys(("num_warps", "num_stages", "waves_per_eu"))
    assert status == 0
    assert compiler == [(resolve("fused"), "gfx942", (16, n), dtype, unset | given)]


def test_help_names_each_command(command):
    status, out, _ = command("--help")
    assert status == 0
    for name in (
        "formula",
        "count",
        "counters",
        "resources",
        "occupancy",
        "roof",
        "record",
        "drift",
    ):
        assert name in out


# ---- bad input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("formula fusd", "no rung is named 'fusd'", id="unknown-name"),
        pytest.param(
            "formula no_such_module:f",
            "No module named 'no_such_module'",
            id="no-module",
        ),
        pytest.param("formula kernels:softmux", "'softmux'", id="no-function"),
        pytest.param(
            "formula kernels:not_callable",
            "is int, not a function",
            id="not-a-function",
        ),
        pytest.param(
            "formula kernels:raises",
            "kernels: cannot take (2, 8)",
            id="function-raises",
        ),
        pytest.param(
            "count kernels:raises 3 5",
            "kernels: cannot take (3, 5)",
            id="count-of-one-that-raises",
        ),
        pytest.param(
            "count kernels:dropped_mask 5 12",
            "outside the tensors",
            id="cannot-be-counted",
        ),
        pytest.param("count fused 4 781", "fused: 781 columns", id="width-refused"),
        pytest.param(
            "count naive 0 8", "'0' is not a positive whole number", id="zero"
        ),
        pytest.param("count naive -3 8", "-3", id="negative"),
        pytest.param(
            "count naive 4 eight",
            "'eight' is not a positive whole number",
            id="not-a-number",
        ),
        pytest.param(
            "count naive 4 1.5", "'1.5' is not a positive whole number", id="not-whole"
        ),
        pytest.param("count naive 4", "N", id="size-missing"),
        pytest.param("count naive 4 8 --dtype int8", "int8", id="unknown-dtype"),
        pytest.param(
            "resources fused --target sm_91 --n 64",
            "no target is named 'sm_91'",
            id="unknown-target",
        ),
        pytest.param(
            "resources fused --target sm_90 --n 781",
            "fused: 781 columns",
            id="resources-width-refused",
        ),
        pytest.param(
            "resources fused --target sm_90 --n 0", "'0' is not", id="resources-zero"
        ),
        pytest.param("resources fused --n 64", "--target", id="no-target"),
        pytest.param(
            "resources naive --target sm_90 --n 64",
            "launches no Triton kernel",
            id="no-kernel",
        ),
        pytest.param(
            "occupancy fused --target sm_91 --n 64",
            "no target is named 'sm_91'",
            id="occupancy-of-an-unknown-target",
        ),
        pytest.param(
            "occupancy naive --target sm_90 --n 64",
            "launches no Triton kernel",
            id="occupancy-of-no-kernel",
        ),
        pytest.param(
            "occupancy fused --n 64", "--target", id="occupancy-without-target"
        ),
        pytest.param(
            "occupancy fused --target sm_90", "--n", id="occupancy-without-columns"
        ),
        pytest.param(
            "occupancy fused --target gfx942 --n 64 --waves-per-eu 0",
            "'0' is not a positive",
            id="no-waves",
        ),
        pytest.param("drift no_such_book", "no recording", id="no-book"),
        pytest.param("frobnicate", "frobnicate", id="unknown-command"),
        pytest.param("", "COMMAND", id="no-command"),
    ],
)
def test_bad_input_is_one_line_and_status_2(text, message, command):
    status, out, err = command(text)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize("text", ["counters naive 8 8", "roof", "record {book}"])
def test_what_needs_a_gpu_says_so_in_one_line(text, command, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "HAS_GPU", False)
    status, out, err = command(text.format(book=tmp_path))
    assert (status, out) == (2, "")
    assert "no GPU" in err or "needs a GPU" in err
    assert err.count("\n") == 1


def test_a_module_that_is_no_python_is_one_line(command, monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text(
        "def double(x)\n    return x\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    status, out, err = command("count broken:double 3 5")
    assert (status, out) == (2, "")
    assert "broken.py, line 1" in err
    assert err.count("\n") == 1


# ---- in a process of their own

USERS_MODULE = """
def double(x):
    return 2 * x

def raises(x):
    raise RuntimeError("two\\nlines")
"""


def python_m(folder, *arguments):
    (folder / "mine.py").write_text(USERS_MODULE, encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "memtraffic", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )


def test_a_function_of_the_users_own(tmp_path):
    done = python_m(tmp_path, "formula", "mine:double", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reads"] == {"MN": 1, "M": 0, "N": 0, "1": 0}


def test_a_function_of_the_users_own_that_raises(tmp_path):
    done = python_m(tmp_path, "count", "mine:raises", "3", "5")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "memtraffic: two lines\n",
    )


def test_drift_is_a_failure(monkeypatch, capsys):
    from memtraffic import recording

    monkeypatch.setattr(recording, "drift", lambda book: ["x was 1, is 2"])
    assert main(["drift", "."]) == 2
    assert "x was 1, is 2" in capsys.readouterr().err
