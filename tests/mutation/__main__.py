"""Plants one-line faults in the package, by Cosmic Ray, and lists those that no test sees.

    python -m tests.mutation                  a sample from all modules
    python -m tests.mutation memtraffic/meters    a sample from these
    python -m tests.mutation --all            every mutant, which takes hours

Each worker mutates a copy of its own of the working tree, so nothing here changes. `survivors.csv`
lists mutants that no test can tell from the original, or that only a GPU shows, with the reason:
they are skipped. A line after the change of `*` stands for each mutant of the line before. The exit
status is 1 if an entry of the list fits no mutant any more, or if less than 90 % of the other
mutants are killed. Results stay in _build/mutants.sqlite: `cr-html` shows them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import difflib
import functools
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pytest
import torch
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import OPERATOR_PROVIDERS, get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

from tests.mutation.operators import OPERATORS

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src")
SESSION = ROOT / "_build" / "mutants.sqlite"
MODULES = (
    "memtraffic/**/*.py",
    *(
        f"memtraffic_book/{name}.py"
        for name in ("attention", "build", "catalog", "drift", "exhibits")
    ),
    *(f"memtraffic_book/{name}.py" for name in ("marked_counters", "measurements", "prove")),
    *(f"memtraffic_book/{name}.py" for name in ("recording", "survey", "units", "yours")),
)
LEAST = 0.9  # of the mutants that are not explained must be killed
PYTEST = ("-x", "-q", "-p", "no:cacheprovider")
QUICK, SLOW = ("not slow and not browser and not gpu", "slow and not browser and not gpu")
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
    OPERATOR_PROVIDERS.clear()
    OPERATOR_PROVIDERS["people"] = OPERATORS
    with use_db(":memory:") as every:
        init(sorted(path for glob in MODULES for path in PACKAGE.glob(glob)), every, {})
        mutants = [item for item in every.work_items if _is_realistic(item.mutations[0])]
    explained = _explained(mutants)
    chosen = _choose(mutants, args.modules)
    if not args.all:
        chosen = _sample(chosen, args.sample, args.seed)
    chosen = [item for item in chosen if _is_python(item.mutations[0])]
    if args.list:
        print(*(" | ".join(change(item.mutations[0])) for item in chosen), sep="\n")
        return 0
    SESSION.parent.mkdir(exist_ok=True)
    with use_db(str(SESSION)) as session:
        session.clear()
        session.add_work_items(chosen)
        for item in chosen:
            if item.job_id in explained:
                reason = WorkResult(WorkerOutcome.SKIPPED, explained[item.job_id])
                session.set_result(item.job_id, reason)
        _run(session, args.workers)
        return _report(session)


# ---- which mutants


def _is_realistic(mutation: MutationSpec) -> bool:
    """Whether somebody might make this fault."""
    (row, first), (_, last) = mutation.start_pos, mutation.end_pos
    line = _lines(mutation.module_path)[row - 1]
    if line[first:].startswith("*,"):  # before keyword-only parameters
        return False
    # A bandwidth of 4.8e12 + 1 bytes per second is no mistake.
    return mutation.operator_name != "people/NumberReplacer" or "e" not in line[first:last]


@functools.cache
def _lines(module: Path) -> list[str]:
    return module.read_text(encoding="utf-8").split("\n")


def _choose(mutants: list[WorkItem], names: list[str]) -> list[WorkItem]:
    wanted = [PACKAGE / name for name in names] or [PACKAGE]
    paths = {item.mutations[0].module_path for item in mutants}
    for place in wanted:
        if not any(path.is_relative_to(place) for path in paths):
            raise SystemExit(f"no mutants of {place}")
    return [
        item
        for item in mutants
        if any(item.mutations[0].module_path.is_relative_to(place) for place in wanted)
    ]


def _sample(mutants: list[WorkItem], size: int, seed: int) -> list[WorkItem]:
    """The same mutants for the same seed, from each module in proportion."""
    by_module = defaultdict(list)
    for item in mutants:
        by_module[item.mutations[0].module_path].append(item)
    ranked = []
    for path, items in sorted(by_module.items()):
        items.sort(key=lambda item: (item.mutations[0].operator_name, item.mutations[0].occurrence))
        random.Random(f"{seed} {path}").shuffle(items)
        ranked += [((rank + 0.5) / len(items), path, item) for rank, item in enumerate(items)]
    return [item for _, _, item in sorted(ranked, key=lambda entry: entry[:2])[:size]]


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


def _explained(mutants: list[WorkItem]) -> dict[str, str]:
    """The reasons why mutants may survive, by the id of the job."""
    with (Path(__file__).parent / "survivors.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    reasons = {
        (row["module"], row["function"], row["before"], row["after"]): row["reason"] for row in rows
    }
    places = {(PACKAGE / module, before.split()[0]) for module, _, before, _ in reasons}
    found: dict[str, str] = {}
    unused = set(reasons)
    for item in mutants:
        mutation = item.mutations[0]
        words = _lines(mutation.module_path)[mutation.start_pos[0] - 1].split()
        if not words or (mutation.module_path, words[0]) not in places:
            continue
        key = change(mutation)
        for entry in (key, (*key[:3], "*")):
            if entry in reasons:
                found[item.job_id] = reasons[entry]
                unused.discard(entry)
    if unused:
        entries = "\n".join(" | ".join(key) for key in sorted(unused))
        raise SystemExit(f"entries of survivors.csv that fit no mutant:\n{entries}")
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


def _run(session: WorkDB, workers: int) -> None:
    """Runs the tests on each mutant that has no result yet."""
    items = session.pending_work_items
    tests = {path: _tests(path) for path in {item.mutations[0].module_path for item in items}}
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ProcessPoolExecutor(workers, initializer=_enter_copy, initargs=(folder,)) as pool,
    ):
        files = sorted({path for paths in tests.values() for path in paths})
        seconds = dict(zip(files, pool.map(_unmutated, files), strict=True))
        results = {}
        for item in items:
            [mutation] = item.mutations
            quick_first = sorted(tests[mutation.module_path], key=lambda path: seconds[path])
            limit = 30 + 2 * sum(seconds[path] for path in quick_first)
            results[pool.submit(_test, mutation, quick_first, limit)] = item
        for number, result in enumerate(as_completed(results), 1):
            session.set_result(results[result].job_id, result.result())
            print(f"\r{number} of {len(items)} mutants", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)


def _enter_copy(parent: str) -> None:
    """Makes a copy of the working tree for this process alone, and enters it."""
    copy = Path(parent) / str(os.getpid())
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    for name in filter(os.path.isfile, files.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(name, copy / name)
    os.chdir(copy)
    sys.path[:0] = ["", str(copy / "src")]
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as `memtraffic.runtime` does, before:
    for name in ("triton", "pandas"):  # each test process is a fork that has them
        importlib.import_module(name)


def _unmutated(path: str) -> float:
    """The seconds that a file of tests takes without a fault."""
    start = time.monotonic()
    passed, output = _run_tests([path], 1800)
    if not passed:
        raise RuntimeError(f"tests fail without a fault: {path}\n{output}")
    return time.monotonic() - start


def _test(mutation: MutationSpec, tests: list[str], limit: float) -> WorkResult:
    operator = get_operator(mutation.operator_name)()
    with use_mutation(mutation.module_path, operator, mutation.occurrence) as (before, after):
        passed, output = _run_tests(tests, limit)
        if passed:  # then what takes long, and the examples in the docstrings
            passed, output = _run_tests(tests, 600, SLOW)
        if passed:
            passed, output = _run_tests([str(mutation.module_path)], limit)
    lines = (text.splitlines() for text in (before, after))
    diff = "\n".join(difflib.unified_diff(*lines, str(mutation.module_path), lineterm=""))
    outcome = TestOutcome.SURVIVED if passed else TestOutcome.KILLED
    return WorkResult(WorkerOutcome.NORMAL, output, outcome, diff)


def _run_tests(tests: list[str], limit: float, marks: str = QUICK) -> tuple[bool, str]:
    """Whether tests pass in a fork of this process, and what pytest printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.setsid()
                for output in (1, 2):
                    os.dup2(log.fileno(), output)
                status = pytest.main([*PYTEST, "-m", marks, *tests])
                sys.stdout.flush()
            finally:
                os._exit(status)
        end = time.monotonic() + limit
        while not (found := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests started and left
        log.seek(0)
        status = os.waitstatus_to_exitcode(found[1])
        return status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), log.read()


def _report(session: WorkDB) -> int:
    table: dict[Path, Counter[str]] = defaultdict(Counter)
    for item, result in session.completed_work_items:
        kind = "survived"
        if result.worker_outcome == WorkerOutcome.SKIPPED:
            kind = "explained"
        elif result.is_killed:
            kind = "killed"
        table[item.mutations[0].module_path][kind] += 1
        if kind == "survived":
            print(*change(item.mutations[0]), sep=" | ")
            print("\n".join(_hunk(result.diff)), end="\n\n")
    kinds = ("killed", "survived", "explained")
    print(f"{'':42}{''.join(f'{kind:>11}' for kind in kinds)}")
    for path, counts in sorted(table.items()):
        print(f"{path!s:42}{''.join(f'{counts[kind]:11}' for kind in kinds)}")
    total = sum(table.values(), Counter())
    print(f"{'':42}{''.join(f'{total[kind]:11}' for kind in kinds)}")
    share = total["killed"] / max(1, total["killed"] + total["survived"])
    print(f"killed {share:.1%} of those that are not explained, at least {LEAST:.0%} are wanted")
    return int(share < LEAST)


def _hunk(diff: str) -> Iterator[str]:
    return (line for line in diff.splitlines() if not line.startswith(("---", "+++")))


if __name__ == "__main__":
    sys.exit(main())
