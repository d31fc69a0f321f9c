"""The names that `import memtraffic` gives, and which module may import which."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from another_process import run_python

import memtraffic
from memtraffic import errors

SOURCE = Path(memtraffic.__file__).parent


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
        for path, tree in modules()
        for value in vars(import_module(module_name(path))).values()
        if isinstance(value, type) and issubclass(value, Exception)
        if value.__module__.startswith("memtraffic") and not value.__name__.startswith("_")
    }
    assert found >= {errors.CountError, errors.InputsError, errors.LaunchError}
    assert not [error for error in found if not issubclass(error, errors.MemtrafficError)]


@pytest.mark.slow
def test_front_door_is_lazy_and_works_in_a_script_whose_last_argument_is_m(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import sys, memtraffic
heavy = "torch", "triton", "pandas", "sympy", "matplotlib"
print(*(name for name in heavy if name in sys.modules))
from memtraffic import formula
print(formula.__module__)
""")
    done = run_python(script, "-m")
    assert (done.stdout, done.stderr) == ("\nmemtraffic.meters.formula\n", "")


# ---- the order of imports

# A module imports only from rooms before its own, or beside it.
ORDER = [
    {"errors"},
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
    """(path within the package, syntax tree) of each module but the front door."""
    paths = {path.relative_to(SOURCE): path for path in sorted(SOURCE.rglob("*.py"))}
    del paths[Path("__init__.py")]
    return [(relative, ast.parse(path.read_text("utf-8"))) for relative, path in paths.items()]


def module_name(path):
    return ".".join(["memtraffic", *path.with_suffix("").parts]).removesuffix(".__init__")


def room_of(path):
    return path.parts[0].removesuffix(".py")


def imported(tree):
    """Full names of what a module imports, wherever it does; for type hints, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not resolved here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(tree):
    for name in imported(tree):
        package, *inner = name.split(".")
        if package == "memtraffic" and inner:
            # A name of the front door stands for the module that it comes from.
            yield memtraffic._MODULES.get(inner[0], name).split(".")[1]


def test_imports_know_each_room():
    assert {room_of(path) for path, _ in modules()} == set(RANKS)


def test_imports_run_one_way():
    wrong = [
        f"{path} imports {room}"
        for path, tree in modules()
        for room in rooms_imported(tree)
        if RANKS.get(room, 0) > RANKS.get(room_of(path), 0)
    ]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    """Of both packages, wherever a file imports; but for the front door, which imports late."""
    files = {}
    for path in SOURCE.parent.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = ast.parse(path.read_text("utf-8"))
    del files["memtraffic"]

    def module_of(name):
        return name if name in files else name.rpartition(".")[0]

    needs = {
        name: {*map(module_of, imported(tree))} & files.keys() - {name}
        for name, tree in files.items()
    }
    assert len(needs) > 100 and any(needs.values())
    TopologicalSorter(needs).prepare()  # which raises CycleError


def test_imports_of_the_book_are_those_of_the_book():
    """Nothing that a reader installs to meter a kernel needs what only the pages use."""
    wrong = [path for path, tree in modules() for name in imported(tree) if "_book" in name]
    assert not wrong


# ---- private names of Triton and PyTorch

PUBLIC_MODULES = {"triton", "triton.language", "triton.testing"}
PUBLIC_NAMES = {
    "__version__", "autotune", "cdiv", "compile", "Config", "jit", "language", "next_power_of_2",
    "testing",
}  # fmt: skip


def dotted(node):
    """The names of a chain of attributes, such as ["tl", "core"]; [] for any other node."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def private_names(tree, package):
    """Names of a package, "triton" or "torch", that a module uses and that are not public."""
    bound = {}  # name in the module: full name in the package
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    if not is_public_module(alias.name):
                        yield alias.name
                    bound[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = full
                if not is_public(full):
                    yield full
    for node in ast.walk(tree):
        chain = dotted(node)
        if len(chain) > 1 and chain[0] in bound:
            full = ".".join([bound[chain[0]], *chain[1:]])
            if not is_public(full):
                yield full


def is_public_module(full):
    return full in PUBLIC_MODULES if full.startswith("triton") else is_public(full)


def is_public(full):
    """Triton's documentation lists what is public; PyTorch puts an underscore before the rest."""
    package, *names = full.split(".")
    if package == "triton" and names and names[0] not in PUBLIC_NAMES:
        return False
    return not any(name.startswith("_") and not name.endswith("__") for name in names)


@pytest.mark.parametrize("package", ["triton", "torch"])
def test_private_names_are_in_one_place(package):
    where = {room_of(path) for path, tree in modules() if set(private_names(tree, package))}
    assert where == {f"{package}_adapter"}
