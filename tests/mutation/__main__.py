"""Plants one-line faults in the package, by Cosmic Ray, and lists those that no test sees.

    python -m tests.mutation                      a sample from all modules
    python -m tests.mutation memtraffic/meters    a sample from these
    python -m tests.mutation --all                every mutant, which takes hours

`cosmic-ray.toml` says which faults, of which modules, how large a sample of which seed, and how
many must be killed. A copy of the working tree is mutated, so nothing here changes. `survivors.csv`
lists mutants that no test can tell from the original, or that only a GPU shows, with the reason:
they are skipped. A line after the change of `*` stands for each mutant of the line before. The exit
status is 1 if a line of the list is gone, if tests fail without a fault, or if too few of the other
mutants are killed.
"""

import ast
import csv
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from cosmic_ray.commands import execute, init
from cosmic_ray.config import ConfigDict, load_config
from cosmic_ray.modules import find_modules
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import OPERATOR_PROVIDERS, get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkItem

from tests.mutation.operators import Names

ROOT, SRC = Path(__file__).parents[2], Path("src")
CONFIG = load_config(ROOT / "cosmic-ray.toml")
PEOPLE = CONFIG.sub("filters", "people")


def main():
    with tempfile.TemporaryDirectory(prefix="mutants-") as copy:
        unwanted = shutil.ignore_patterns(".*", "_build", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=unwanted, dirs_exist_ok=True)
        os.chdir(copy)
        tried = mutants([SRC / name for name in sys.argv[1:] if name != "--all"])
        modules = sorted({it.module_path for it in tried})
        survived = sum(len(survivors(it, tried)) for it in modules)
    killed = 1 - survived / max(1, len(tried))
    print(f"killed {killed:.1%} of {len(tried)}, at least {PEOPLE['killed']:.0%} are wanted")
    return killed < PEOPLE["killed"]


def mutants(places):
    """A sample of those in some places, or in all, without those that are explained."""
    core, own = OPERATOR_PROVIDERS.pop("core"), {"Names": Names}
    OPERATOR_PROVIDERS["people"] = own | {name: core[name] for name in PEOPLE["operators"]}
    modules = sorted(find_modules(places or map(Path, CONFIG["module-path"])))
    with use_db(":memory:") as session:
        init(modules, session, {})
        found = [it.mutations[0] for it in session.work_items]
    count = len(found) if "--all" in sys.argv else min(PEOPLE["sample"], len(found))
    found = random.Random(PEOPLE["seed"]).sample(sorted(found, key=str), count)
    with Path("tests/mutation/survivors.csv").open(encoding="utf-8", newline="") as file:
        explained = {tuple(row.values())[:4] for row in csv.DictReader(file)}
    for module, _, before, _ in explained:
        if before not in (SRC / module).read_text("utf-8"):
            raise SystemExit(f"survivors.csv explains what is gone: {module} | {before}")
    changes = [(it, changed) for it in found if (changed := change(it))]
    return [it for it, changed in changes if not explained & {changed, (*changed[:3], "*")}]


def change(mutant):
    """Module, function, line before and after, as in `survivors.csv`; () if nobody errs so."""
    before = mutant.module_path.read_text("utf-8")
    after = mutate_code(before, get_operator(mutant.operator_name)(), mutant.occurrence)
    (row, first), (end, last) = mutant.start_pos, mutant.end_pos
    if "Number" in mutant.operator_name and "e" in before.split("\n")[row - 1][first:last]:
        return ()  # a bandwidth of 4.8e12 + 1 bytes per second is no mistake
    try:
        ast.parse(after)
    except SyntaxError:  # such as `if not found := ...`
        return ()
    lines = (" ".join(text.split("\n")[row - 1 : end]).split() for text in (before, after))
    texts = (" ".join(words).split(" # ")[0] for words in lines)
    return (str(mutant.module_path.relative_to(SRC)), mutant.definition_name or "", *texts)


def survivors(module, tried):
    """The mutants of a module with which its tests pass, and the examples in it."""
    folder, own = module.parent.name, sorted(Path("tests").glob(f"**/test_{module.stem}.py"))
    paths = [module, *own, *PEOPLE["tests"].get(folder, [f"tests/{folder}"])]
    tests = " ".join(map(str, paths))
    command = CONFIG.test_command.format(copy=os.getcwd(), python=sys.executable, tests=tests)
    items = [WorkItem(str(i), [it]) for i, it in enumerate(tried) if it.module_path == module]
    with use_db(":memory:") as session:
        session.add_work_items([WorkItem("none", ()), *items])
        execute(session, ConfigDict(CONFIG, **{"test-command": command}))
        outcomes = {id: result.test_outcome for id, result in session.results}
    if outcomes.pop("none") != TestOutcome.SURVIVED:
        raise SystemExit(f"tests fail without a fault: {command}")
    found = [tried[int(id)] for id in outcomes if outcomes[id] != TestOutcome.KILLED]
    print(f"{module}: {len(items) - len(found)} of {len(items)} killed", flush=True)
    print("".join(" | ".join(change(it)) + "\n" for it in found), end="", flush=True)
    return found


sys.exit(main())
