"""Plants one-line faults in the package, by Cosmic Ray, and lists those that no test sees.

    python -m tests.mutation                      a sample from all modules
    python -m tests.mutation memtraffic/meters    a sample from these
    python -m tests.mutation --all                every mutant, which takes hours

Each worker mutates a copy of its own of the working tree, so nothing here changes. `survivors.csv`
lists mutants that no test can tell from the original, or that only a GPU shows, with the reason:
they are skipped. A line after the change of `*` stands for each mutant of the line before. The exit
status is 1 if an entry of the list fits no mutant any more, or if less than 90 % of the other
mutants are killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import functools
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pytest
import torch
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import OPERATOR_PROVIDERS, get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec

from tests.mutation.operators import OPERATORS

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src")
OF_THE_BOOK = (
    *("attention", "build", "catalog", "drift", "exhibits", "marked_counters", "measurements"),
    *("prove", "recording", "survey", "units", "yours"),
)
LEAST = 0.9  # of the mutants that are not explained must be killed
PYTEST = ("-x", "-q", "-p", "no:cacheprovider")
QUICK, SLOW = ("not slow and not browser and not gpu", "slow and not browser and not gpu")
FORK = multiprocessing.get_context("fork")
Change = tuple[str, str, str, str]  # module, function, line before, line after


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("modules", nargs="*", help="such as memtraffic/gpus.py")
    parser.add_argument("--all", action="store_true", help="every mutant, not a sample")
    parser.add_argument("--sample", type=int, default=200, help="how many mutants (200)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (0)")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    args = parser.parse_args()

    os.chdir(ROOT)
    mutants = _mutants()
    explained = _explained(mutants)
    places = [PACKAGE / name for name in args.modules] or [PACKAGE]
    chosen = [it for it in mutants if any(map(it.module_path.is_relative_to, places))]
    if not args.all:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    chosen = [it for it in chosen if _is_python(it)]
    if not chosen:
        raise SystemExit(f"no mutants of {', '.join(args.modules)}")
    if args.list:
        print(*(" | ".join(change(it)) for it in chosen), sep="\n")
        return 0
    tried = [it for it in chosen if change(it) not in explained]
    survived = _survivors(tried, args.workers) if tried else 0
    share = 1 - survived / max(1, len(tried))
    print(f"{len(chosen) - len(tried)} of {len(chosen)} mutants are explained in survivors.csv")
    print(f"killed {share:.1%} of the others, at least {LEAST:.0%} are wanted")
    return int(share < LEAST)


# ---- which mutants


def _mutants() -> list[MutationSpec]:
    """Every fault that somebody might make."""
    OPERATOR_PROVIDERS.clear()
    OPERATOR_PROVIDERS["people"] = OPERATORS
    of_the_book = (PACKAGE / f"memtraffic_book/{name}.py" for name in OF_THE_BOOK)
    with use_db(":memory:") as every:
        init(sorted([*PACKAGE.glob("memtraffic/**/*.py"), *of_the_book]), every, {})
        return [it for item in every.work_items for it in item.mutations if _is_realistic(it)]


def _is_realistic(mutation: MutationSpec) -> bool:
    (row, first), (_, last) = mutation.start_pos, mutation.end_pos
    line = _lines(mutation.module_path)[row - 1]
    if line[first:].startswith("*,"):  # before keyword-only parameters
        return False
    # A bandwidth of 4.8e12 + 1 bytes per second is no mistake.
    return mutation.operator_name != "people/NumberReplacer" or "e" not in line[first:last]


@functools.cache
def _lines(module: Path) -> list[str]:
    return module.read_text(encoding="utf-8").split("\n")


@functools.cache
def _mutated(path: Path, operator: str, occurrence: int) -> str:
    return mutate_code("\n".join(_lines(path)), get_operator(operator)(), occurrence)


def _source(mutation: MutationSpec) -> str:
    return _mutated(mutation.module_path, mutation.operator_name, mutation.occurrence)


def _is_python(mutation: MutationSpec) -> bool:
    try:
        return bool(ast.parse(_source(mutation)))
    except SyntaxError:  # such as `if not found := ...`
        return False


def change(mutation: MutationSpec) -> Change:
    """What a mutant changes, as an entry of `survivors.csv` says it."""
    path, before = mutation.module_path, _lines(mutation.module_path)
    after = _source(mutation).split("\n")
    row = mutation.start_pos[0] - 1
    end = len(before) - mutation.end_pos[0]
    texts = (
        " ".join(" ".join(lines[row : len(lines) - end]).split()).split(" # ")[0]
        for lines in (before, after)
    )
    return (path.relative_to(PACKAGE).as_posix(), mutation.definition_name or "", *texts)


def _explained(mutants: list[MutationSpec]) -> set[Change]:
    """The changes that may survive, for a reason in `survivors.csv`."""
    with (Path(__file__).parent / "survivors.csv").open(encoding="utf-8", newline="") as file:
        entries = {tuple(row.values())[:4] for row in csv.DictReader(file)}
    starts = {(PACKAGE / module, before.split()[0]) for module, _, before, _ in entries}
    found, used = set(), set()
    for mutation in mutants:
        words = _lines(mutation.module_path)[mutation.start_pos[0] - 1].split()
        if words and (mutation.module_path, words[0]) in starts:
            key = change(mutation)
            fits = entries & {key, (*key[:3], "*")}
            found |= {key} if fits else set()
            used |= fits
    if entries - used:
        lines = "\n".join(" | ".join(entry) for entry in sorted(entries - used))
        raise SystemExit(f"entries of survivors.csv that fit no mutant:\n{lines}")
    return found


# ---- the runs


def _tests(module: Path) -> list[str]:
    """The tests of a module: those of its name, of its folder, and those that ask all kernels."""
    place = module.relative_to(PACKAGE)
    name = place.parent.name if place.stem == "__init__" else place.stem
    folders = {"kernels": "softmax", "triton_adapter": "compile", "memtraffic_book": "book"}
    folder = Path("tests") / folders.get(place.parent.name, place.parent.name)
    tests = set(Path("tests").rglob(f"test_{name}.py"))
    if folder.name == "memtraffic":
        tests |= set(Path("tests/meters").glob("test_*.py"))
    elif folder.name != "book":
        tests |= set(folder.glob("test_*.py"))
    if folder.name == "softmax":
        tests |= set(Path("tests/contract").glob("test_*.py"))
    return sorted(str(path) for path in tests)


def _survivors(mutants: list[MutationSpec], workers: int) -> int:
    """Prints the mutants with which all tests pass; returns how many they are."""
    tests = {path: _tests(path) for path in {it.module_path for it in mutants}}
    survived = 0
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ProcessPoolExecutor(workers, initializer=_enter_copy, initargs=(folder,)) as pool,
    ):
        files = sorted({path for paths in tests.values() for path in paths})
        seconds = dict(zip(files, pool.map(_unmutated, files), strict=True))
        results = {}
        for it in mutants:
            quick_first = sorted(tests[it.module_path], key=lambda path: seconds[path])
            limit = 30 + 2 * sum(seconds[path] for path in quick_first)
            results[pool.submit(_passes_with, it, quick_first, limit)] = it
        for number, result in enumerate(as_completed(results), 1):
            print(f"\r{number} of {len(mutants)} mutants", end="", file=sys.stderr, flush=True)
            if result.result():
                survived += 1
                print("\n" + " | ".join(change(results[result])), flush=True)
        print(file=sys.stderr)
    return survived


def _enter_copy(parent: str) -> None:
    """Makes a copy of the working tree for this process alone, and enters it."""
    copy = Path(parent) / str(os.getpid())
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    for name in filter(os.path.isfile, files.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, copy / name)  # with its mode
    os.chdir(copy)
    sys.path[:0] = ["", str(copy / "src")]
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as `memtraffic.device` does, before:
    for name in ("triton", "pandas"):  # each test process is a fork that has them
        importlib.import_module(name)


def _unmutated(path: str) -> float:
    """The seconds that a file of tests takes without a fault."""
    start = time.monotonic()
    if not _passes([path], 1800):
        raise RuntimeError(f"tests fail without a fault: {path}")
    return time.monotonic() - start


def _passes_with(mutation: MutationSpec, tests: list[str], limit: float) -> bool:
    """Whether the tests of a mutant pass; then what takes long, and the examples of its module."""
    operator, module = get_operator(mutation.operator_name)(), mutation.module_path
    with use_mutation(module, operator, mutation.occurrence):
        runs = (tests, limit, QUICK), (tests, 600, SLOW), ([str(module)], limit, QUICK)
        return all(_passes(*run) for run in runs)


def _passes(tests: list[str], limit: float, marks: str = QUICK) -> bool:
    """Whether tests pass, within so many seconds, in a fork of this process."""
    child = FORK.Process(target=_pytest, args=([*PYTEST, "-m", marks, *tests],))
    child.start()
    child.join(limit)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # and what the tests started and left
    child.join()
    return child.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def _pytest(arguments: list[str]) -> None:
    os.setsid()
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    sys.exit(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
