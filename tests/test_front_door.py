"""The names that `import memtraffic` gives, and which module may import which."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from another_process import run_python
from test_budget import chains, imported

import memtraffic
from memtraffic import errors

SRC = Path(memtraffic.__file__).parents[1]

# ---- the front door


@pytest.mark.parametrize("name", memtraffic.__all__)
def test_front_door_has_what_it_says(name):
    found = getattr(memtraffic, name)
    assert found.__name__.removeprefix("memtraffic.") == name
    assert isinstance(found, ModuleType) == (name in {"errors", "testing"})
    assert getattr(memtraffic, name) is found
    assert name in dir(memtraffic)


def test_errors_have_one_base():
    found = {
        value
        for name in modules()
        for value in vars(import_module(name)).values()
        if isinstance(value, type) and issubclass(value, Exception)
        if value.__module__.startswith("memtraffic") and not value.__name__.startswith("_")
    }
    assert found >= {errors.CountError, errors.InputsError, errors.LaunchError}
    assert not [error for error in found if not issubclass(error, errors.MemtrafficError)]


@pytest.mark.slow
def test_front_door_is_lazy_and_works_in_a_script_whose_last_argument_is_m(tmp_path):
    """And a command imports no more than its meter needs, and for help nothing."""
    script = tmp_path / "train.py"
    script.write_text("""
import sys, memtraffic
from memtraffic import cli
heavy = "pandas", "sympy", "matplotlib", "torch._dynamo"
for line in (["--version"], ["--help"], *([name, "--help"] for name in cli.commands.commands)):
    assert cli.main(line) == 0
print("loaded", *(it for it in (*heavy, "torch", "triton", "numpy") if it in sys.modules))
from memtraffic import formula
print(formula.__module__)
cli.main(["formula", "naive"])
print("loaded", *(name for name in heavy if name in sys.modules))
""")
    done = run_python(script, "-m")
    _, said, last = done.stdout.split("loaded")
    assert said.startswith("\nmemtraffic.meters.formula\nreads 5MN + 2M, writes 3MN + 2M\n")
    assert (last, done.stderr) == ("\n", "")


ADDING = """
import {}, {}
import torch, triton.language as tl

@triton.jit
def add(y, x):
    tl.store(y, tl.load(x) + tl.load(x + 1))

x = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
add[(1,)](x, x)
print(x[0].item(), "memtraffic.meters" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["memtraffic", "triton"])
def test_interpreter_computes_in_bfloat16_before_any_meter(tmp_path, first):
    [second] = {"memtraffic", "triton"} - {first}
    script = tmp_path / "adding.py"
    script.write_text(f"import sys{ADDING.format(first, second)}")
    done = run_python(script, TRITON_INTERPRET="1")
    assert done.stdout == "0.75 False\n", done.stderr


# ---- the order of imports

# A module imports only from rooms before its own, or beside it.
ORDER = [
    {"caches", "errors"},
    {"gpus"},
    {"device"},
    {"torch_adapter", "triton_adapter", "tensors", "progress", "functions", "names"},
    {"inputs"},
    {"op"},
    {"residency"},
    {"kernels"},  # which must not start what compiles for other GPUs
    {"compile"},
    {"stand_in", "meters", "testing"},
    {"benchmark"},
    {"cli"},
    {"__main__"},
]
RANKS = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


@cache
def modules():
    """What each module of the library uses; but for the front door, which imports late."""
    found = {}
    for path in SRC.rglob("memtraffic/**/*.py"):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found[name] = used(ast.parse(path.read_text("utf-8")))
    del found["memtraffic"]
    return found


def used(tree):
    """Full names of what a module imports, wherever it does, and of what it takes from that."""
    bound = [*imported(tree)]
    taken = [(dict(bound).get(first, first), *rest) for first, *rest in chains(tree) if rest]
    return {full for _, full in bound} | {".".join(names) for names in taken}


def room_of(full):
    """Of a name of the front door, that which it comes from."""
    inner = full.split(".")[1]
    return memtraffic._MODULES.get(inner, full).split(".")[1]


def test_imports_run_one_way():
    """And none leads to the book: a reader who meters a kernel needs nothing that pages use."""
    assert {room_of(name) for name in modules()} == set(RANKS)
    wrong = [
        f"{name} uses {full}"
        for name, uses in modules().items()
        for full in uses
        if full.startswith("memtraffic_book")
        or (full.startswith("memtraffic.") and RANKS.get(room_of(full), 0) > RANKS[room_of(name)])
    ]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    found = modules()
    needs = {
        name: {full if full in found else full.rpartition(".")[0] for full in uses}
        & {*found} - {name}
        for name, uses in found.items()
    }
    assert len(needs) > 60 and any(needs.values())
    TopologicalSorter(needs).prepare()  # which raises CycleError


# ---- private names of Triton and PyTorch

PUBLIC_NAMES = {
    "__version__", "autotune", "cdiv", "compile", "Config", "jit", "language", "next_power_of_2",
    "testing",
}  # fmt: skip


def is_public(full):
    """Triton's documentation lists what is public; PyTorch puts an underscore before the rest."""
    package, *names = full.split(".")
    if package == "triton" and names and names[0] not in PUBLIC_NAMES:
        return False
    return not any(name.startswith("_") and not name.endswith("__") for name in names)


@pytest.mark.parametrize("package", ["triton", "torch"])
def test_private_names_are_in_one_place(package):
    private = {
        room_of(name)
        for name, uses in modules().items()
        if not all(is_public(full) for full in uses if full.split(".")[0] == package)
    }
    assert private == {f"{package}_adapter"}
