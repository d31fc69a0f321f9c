"""Counts what kernels that others published move: `python examples/survey/survey.py TUTORIALS`.

Each package of `kernels.csv` that is installed is counted in a process of its own, where a GPU of
the table answers for one that is absent. A row is a pass of a kernel: its formula where there is
one, else the elements that it moves at the sizes of `AT`, else the reason why it cannot be counted.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
from generated import generated
from memtraffic.functions import as_function
from memtraffic.gpus import DEFAULT_GPU
from memtraffic.inputs import tensors_in
from memtraffic.meters.counts import Counts
from memtraffic.meters.polynomials import Shape, polynomial
from memtraffic.op import find_op
from memtraffic.stand_in import stand_in
from torch import Tensor

OUT = Path(__file__).parents[2] / "book" / "recordings" / "survey.csv"
TUTORIALS = "triton-tutorials"  # no package, but a folder of Triton's repository
# What stands for each letter where a kernel's traffic has no formula, or more than two letters.
# A formula must hold here, too: there are more rows than SMs, and than a program's tile has.
AT = {"K": 64, "M": 160, "N": 128, "S": 640, "T": 320}
# Shapes to solve at, and to check at, by the letters. T, time, is cut into chunks of up to 64.
SHAPES: dict[tuple[str, ...], tuple[tuple[Shape, ...], tuple[Shape, ...]]] = {
    ("T",): (((64,), (128,), (192,)), ((256,),)),
    ("S",): (((128,), (256,), (384,)), ((512,),)),  # time, in chunks of 128
    ("M",): (((2,), (3,), (5,), (8,)), ((12,), (7,))),
    ("N",): (((2,), (3,), (5,), (8,)), ((12,), (7,))),
    ("M", "N"): (
        ((2, 8), (3, 16), (5, 32), (7, 4), (4, 64), (3, 5), (8, 21)),
        ((4, 2), (6, 100), (5, 48)),
    ),
}
NO_BACKWARD = "no result has a gradient"  # as `count` says it


@dataclass(frozen=True)
class Published:
    """A kernel that others published, a row of `kernels.csv`.

    path: `module:function`; of a tutorial, `file:function`. inputs: as of `memtraffic.inputs`; of
    `torch`, whose kernels `torch.compile` generates, without letters. fixed: JSON of the arguments
    that such a specification cannot say, by name or by position. keep: `module:kernel` of autotuned
    kernels whose configurations differ in traffic, with spaces between them: the first
    configuration is kept. note: what a number depends on.
    """

    package: str
    path: str
    inputs: str
    fixed: str = ""
    keep: str = ""
    note: str = ""

    @property
    def release(self) -> str:
        """The version of its package that is installed; raises PackageNotFoundError."""
        return version("triton" if self.package == TUTORIALS else self.package)

    def prepare(self, tutorials: Path) -> tuple[Callable[..., Any], str]:
        """The function with its fixed arguments set, and a note of the configurations kept."""
        fn = with_fixed(as_function(find_kernel(self.path, tutorials)), self.fixed)
        kept = [keep_first(find_kernel(path, tutorials)) for path in self.keep.split()]
        return fn, "; ".join(filter(None, [*kept, self.note]))


def read_kernels() -> list[Published]:
    """The kernels of `kernels.csv`."""
    with Path(__file__).with_name("kernels.csv").open(encoding="utf-8", newline="") as file:
        return [Published(**row) for row in csv.DictReader(file)]


@dataclass
class Row:
    """One pass of a kernel. reads, writes, least_reads, least_writes: formulas, or elements.

    The least reads each input once, and writes each output once; those of a backward pass are the
    inputs with the gradients of the outputs, and the gradients of the inputs. at: the sizes, where
    there is no formula. gpu: what answered for the GPU. reason: why it cannot be counted.
    """

    package: str
    version: str
    kernel: str
    direction: str
    inputs: str
    reads: str = ""
    writes: str = ""
    least_reads: str = ""
    least_writes: str = ""
    at: str = ""
    gpu: str = DEFAULT_GPU.product
    note: str = ""
    reason: str = ""


def flag_gems_settings(cache: str) -> dict[str, str]:
    """Environment variables: FlagGems would look for its GPU by running a vendor's command.

    And what its autotuners choose would go into a file, for which processes wait on one another.
    """
    settings = {"GEMS_VENDOR": "nvidia", "FLAGGEMS_CACHE_DIR": cache}
    return settings | {"FLAGGEMS_DB_URL": "sqlite://"}


# ---- counting one package


def find_kernel(path: str, tutorials: Path) -> Any:
    """What `module:function` names; where the module is a file in `tutorials`, that of the file.

    Raises LookupError if there is none.
    """
    module, _, name = path.partition(":")
    file = tutorials / f"{module}.py"
    found = _load_tutorial(file) if file.is_file() else importlib.import_module(module)
    return functools.reduce(getattr, name.split("."), found)


@functools.cache
def _load_tutorial(file: Path) -> types.ModuleType:
    """A tutorial as a module, without the statements that need a GPU, such as its benchmarks."""
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    body = ast.parse(file.read_text(encoding="utf-8")).body
    # A benchmark that fails leaves its report in the current folder.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for statement in body:
            code = compile(ast.Module([statement], []), str(file), "exec")
            with contextlib.suppress(Exception):
                exec(code, vars(module))
    return module


def count_package(package: str, tutorials: Path) -> Iterator[Row]:
    """The rows of the kernels of one package, counted in this process."""
    with stand_in():
        for kernel in read_kernels():
            if kernel.package == package:
                yield from count_kernel(kernel, tutorials)


def count_kernel(kernel: Published, tutorials: Path) -> Iterator[Row]:
    """The row of each pass of a kernel; of one without a backward pass, that of the forward."""
    forward, backward = (
        Row(kernel.package, kernel.release, kernel.path, way, kernel.inputs, note=kernel.note)
        for way in ("forward", "backward")
    )
    columns: list[dict[str, str]] = []
    reason = ""
    try:
        fn, forward.note = kernel.prepare(tutorials)
        backward.note = forward.note
        if kernel.package == "torch":
            fn = _compiled(fn, kernel.inputs)
        try:
            columns = _solved(fn, kernel.inputs, backward=True)
        except Exception as error:
            reason = reason_of(error)
            columns = _solved(fn, kernel.inputs, backward=False)
    except Exception as error:
        forward.reason = reason_of(error)
    else:
        forward = replace(forward, **columns[0])
    yield forward
    if columns[1:]:
        # What moves nothing only passes on a gradient: the kernel itself has no backward pass.
        if (columns[1]["reads"], columns[1]["writes"]) != ("0", "0"):
            yield replace(backward, **columns[1])
    elif columns and NO_BACKWARD not in reason:
        yield replace(backward, reason=reason)


def _compiled(fn: Callable[..., Any], inputs: str) -> Callable[..., Any]:
    """What inductor makes of `fn` for inputs without letters, called as `fn` is."""
    values = find_op(inputs).arguments().positional
    places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        return fn(*(given.get(place, value) for place, value in enumerate(values)))

    made = generated(of_tensors, *(values[place] for place in places))
    return lambda *args: made(*(args[place] for place in places))


def reason_of(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def with_fixed(fn: Callable[..., Any], fixed: str) -> Callable[..., Any]:
    """`fn` with some arguments set, by name or by position."""
    if not fixed:
        return fn

    def call(*args: Any, **options: Any) -> Any:
        given = list(args)
        for place, value in json.loads(fixed).items():
            if place.isdigit():
                given.insert(int(place), value)
            else:
                options[place] = value
        return fn(*given, **options)

    return call


def keep_first(kernel: Any) -> str:
    """Leaves an autotuned kernel its first configuration; returns its name and that."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    del kernel.configs[1:]
    chosen = ", ".join(f"{name}={value}" for name, value in kernel.configs[0].kwargs.items())
    return f"{kernel.base_fn.__name__}: {chosen}"


def _solved(fn: Callable[..., Any], inputs: str, backward: bool) -> list[dict[str, str]]:
    """For each pass the columns from `reads` to `at`: formulas, or elements at the sizes `AT`."""
    sizes = find_op(inputs).sizes
    fit, held_out = SHAPES.get(sizes, ((), ()))
    seen: dict[Shape, tuple[list[Tensor], list[Tensor]]] = {}

    def watched(*args: Any, **options: Any) -> Any:
        result = fn(*args, **options)
        seen[counts.shape] = [*tensors_in([*args, *options.values()])], [*tensors_in([result])]
        return result

    counts = Counts(watched, inputs, backward=backward)
    at = tuple(AT[size] for size in sizes)
    counts.add(fit, [*held_out, at])
    if at not in counts.traffic:
        raise ValueError(counts.refused[-1][-1])

    def quantities(which: int) -> dict[str, dict[Shape, int]]:
        return {
            "reads": counts.moved(which, "reads"),
            "writes": counts.moved(which, "writes"),
        } | _least({shape: seen[shape] for shape in counts.traffic}, which)

    passes = range(2 if backward else 1)
    columns = []
    for which in passes if len(counts.fitted) > 2 ** len(sizes) else ():
        solutions = {name: counts.solve(found) for name, found in quantities(which).items()}
        columns.append({name: polynomial(found) for name, found in solutions.items() if found})
    if columns and all(len(each) == 4 for each in columns):
        return columns
    sides = ", ".join(f"{size}={n}" for size, n in zip(sizes, at, strict=True))
    return [
        {name: str(found[at]) for name, found in quantities(which).items()} | {"at": sides}
        for which in passes
    ]


def _least(
    seen: Mapping[Shape, tuple[list[Tensor], list[Tensor]]], which: int
) -> dict[str, dict[Shape, int]]:
    """By shape the least that the forward pass (0) or the backward pass (1) reads and writes."""
    reads, writes = {}, {}
    for shape, (inputs, outputs) in seen.items():
        given = sum(x.numel() for x in inputs)
        if which == 0:
            reads[shape], writes[shape] = given, sum(x.numel() for x in outputs)
        else:
            reads[shape] = given + sum(x.numel() for x in outputs if x.is_floating_point())
            writes[shape] = sum(x.numel() for x in inputs if x.is_floating_point())
    return {"least_reads": reads, "least_writes": writes}


# ---- all packages


def main(tutorials: Path, out: Path = OUT) -> None:
    """Counts the packages that are installed, and writes the fields of `Row` as columns.

    What `out` holds of the others stays. tutorials: the folder `python/tutorials` of Triton's
    repository. Raises CalledProcessError if the process that counts a package fails; what it said
    is on stderr.
    """
    names, rows = [each.name for each in fields(Row)], []
    before = pd.DataFrame(columns=names)
    if out.is_file():
        before = pd.read_csv(out, dtype=str, keep_default_na=False)
    with tempfile.TemporaryDirectory() as cache:
        settings = flag_gems_settings(cache) | {"TRITON_INTERPRET": "0"}
        for package in dict.fromkeys(kernel.package for kernel in read_kernels()):
            if not _is_here(package, tutorials):
                kept = before[before["package"] == package].to_dict("records")
                rows += kept
                print(f"survey: {package} is not installed: {len(kept)} rows stay", file=sys.stderr)
                continue
            done = subprocess.run(
                [sys.executable, __file__, str(tutorials), package],
                env={**os.environ, **settings},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            rows += json.loads(done.stdout.splitlines()[-1])
    frame = pd.DataFrame(rows, columns=names)
    frame.to_csv(out, index=False, lineterminator="\n")
    print(f"counted in {out}")


def _is_here(package: str, tutorials: Path) -> bool:
    if package == TUTORIALS:
        return any(tutorials.glob("*.py"))
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _worker(tutorials: Path, package: str) -> None:
    """Prints the rows of one package as JSON, last, and nothing that the package prints."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's code
        rows = [asdict(row) for row in count_package(package, tutorials)]
    print(json.dumps(rows))


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), sys.argv[2]) if sys.argv[2:] else main(Path(sys.argv[1]))
