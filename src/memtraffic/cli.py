"""The command line, such as `memtraffic formula naive`.

PyTorch takes a second to import, so a command imports its meter when it runs.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import click

import memtraffic
from memtraffic import names, progress
from memtraffic.errors import FormulaError, MemtrafficError, NoKernelError, described, said
from memtraffic.gpus import Gpu, find_gpu
from memtraffic.inputs import DEFAULT, GRAMMAR, Arguments, find_dtype, read_size

if TYPE_CHECKING:
    import pandas as pd

    from memtraffic.meters.count import Traffic
    from memtraffic.meters.formula import Formula
    from memtraffic.op import Op
    from memtraffic.residency import Occupancy, Resources

Shapes: TypeAlias = "list[tuple[int, ...]]"
COMPILED_ROWS = 16  # a kernel compiled for a single row is simpler than for several
REPORTED_SIZE = 256  # of each size of the inputs, where a report is given none
# What an error says of a function, or of an import, that insists on a GPU.
ASKS_FOR_GPU = re.compile("cuda|gpu|nvidia|active drivers", re.IGNORECASE)
MOST_CHARACTERS = 1000  # of a line that says what is wrong
BENCHED = "4096x256,4096x1024,4096x4096,4096x12672,4096x32768"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    That is 0; 1 if it fails; 2 for a call that cannot be understood; 130 if it is interrupted.
    """
    try:
        return commands.main(argv, "memtraffic", standalone_mode=False) or 0
    except click.Abort:
        return 130
    except click.ClickException as error:
        message, status = error.format_message(), error.exit_code
    except OSError as error:  # the disk is full
        message, status = f"the result cannot be written: {error}", 1
    line = " ".join(message.split())
    shown = line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}…"
    click.echo(f"memtraffic: {shown}", err=True)
    return status


class Command(click.Command):
    """A command whose function returns what it prints.

    What the metered function prints goes to stderr, and what it raises is one line.
    """

    def invoke(self, ctx: click.Context) -> None:
        progress.enable()
        try:
            with redirect_stdout(sys.stderr), standing_in(ctx.params):
                text = super().invoke(ctx)
        except (click.ClickException, KeyboardInterrupt):
            raise
        except BaseException as error:  # a function may raise what it likes
            raise failure(error, ctx.params.get("name") or "") from error
        click.echo(text)


def standing_in(params: dict[str, Any]) -> AbstractContextManager[None]:
    """Context manager: with --stand-in, PyTorch and Triton answer as if there were a GPU.

    It is the target if NVIDIA makes that, or the GPU of the book.
    """
    if not params.get("stand_in"):
        return nullcontext()
    from memtraffic.stand_in import stand_in

    gpu: Any = params.get("target")  # of a report, a list
    return stand_in(gpu) if getattr(gpu, "vendor", "") == "nvidia" else stand_in()


def failure(error: BaseException, name: str) -> click.ClickException:
    """What a command says about an error: with its class where the metered function raised it."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    # A function in C++ has no frame, nor has one that takes other arguments: it raises in the call.
    ours = last.f_globals.get("__name__", "").startswith("memtraffic.")
    ours = ours and last.f_code is not Arguments.call.__code__
    if isinstance(error, MemtrafficError) or (ours and not isinstance(error, KeyError)):
        bad_call = isinstance(error, (LookupError, TypeError, ValueError))
        bad_call = bad_call and not isinstance(error, NoKernelError)
        kind, text = click.UsageError if bad_call else click.ClickException, said(error)
    else:
        kind, text = click.ClickException, f"{name}: {described(error)}".removeprefix(": ")
    theirs = isinstance(error, FormulaError) or not isinstance(error, MemtrafficError)
    if theirs and ASKS_FOR_GPU.search(text):
        from memtraffic import device

        text += device.stand_in_hint("as there is no GPU here")
    return kind(text)


# ---- what the commands take


class Read(click.ParamType[Any]):
    """What `read` makes of an argument; its LookupError or ValueError says what is wrong."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self.read(value)
        except (LookupError, ValueError) as error:
            return self.fail(str(error), param, ctx)


class List(Read):
    """Several of them, with commas between them."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        words = filter(None, value.split(",")) if isinstance(value, str) else value
        return [super(List, self).convert(word, param, ctx) for word in words]


@dataclass
class Call:
    """A function, and what it is called with."""

    name: Any  # of `bench`, several
    inputs: str | None
    dtype: str
    sizes: tuple[str, ...] = ()

    @functools.cached_property
    def made(self) -> Op:
        """What makes the inputs."""
        from memtraffic.op import find_op

        return find_op(self.inputs)

    def shape(self, **defaults: int) -> tuple[int, ...]:
        """The numbers for the sizes of the inputs."""
        from memtraffic.op import read_sizes

        return read_sizes(self.made, self.sizes, **defaults)

    @functools.cached_property
    def fn(self) -> Callable[..., Any]:
        """The function, imported."""
        return names.import_function(self.name)


SHAPES = List("shapes", lambda text: tuple(map(read_size, text.split("x"))))
NAME = click.argument("name")
SIZES = click.argument("sizes", nargs=-1, metavar="[SIZE]...")
text = f"What the function is called with, see below, or {', '.join(names.OPS)}."
INPUTS = click.option("--inputs", help=text)
text = "Of the inputs that name no dtype (default: float32)."
DTYPE = click.option("--dtype", type=Read("dtype", find_dtype), default="float32", help=text)
CALL = (NAME, SIZES, INPUTS, DTYPE)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
CONFIG = click.option("--config", type=int, help="Of an autotuned kernel: an index.")
BACKWARD = click.option("--backward", is_flag=True, help="The backward pass, too.")
text = "Where there is no GPU, answer as one does, for a function that insists on it."
STAND_IN = click.option("--stand-in", is_flag=True, help=text)
text = "A GPU, here or not, such as sm_90 or gfx942."
TARGET = click.option("--target", type=Read("gpu", find_gpu), required=True, help=text)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(memtraffic.__version__, message="%(version)s")
def commands() -> None:
    """Meters for the memory traffic of GPU kernels.

    A NAME is a rung of the book's ladder, such as naive, or module:function. A SIZE is a number for
    a size of the inputs: 4096 1024 in their order, or M=4096 N=1024.
    """


def command(*params: Callable[[Any], Any]) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Makes a command of a function, whose first parameter is the `Call` if it has INPUTS."""

    def decorate(run: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(run)
        def called(stand_in: bool = False, **given: Any) -> str:
            if INPUTS not in params:
                return run(**given)
            parts = {field.name for field in fields(Call)} & set(given)
            return run(Call(**{part: given.pop(part) for part in parts}), **given)

        made: Any = called
        for param in reversed(params):
            made = param(made)
        about = "\n\n".join(f"\b\n{part}" for part in ("INPUTS", *GRAMMAR.split("\n\n")))
        commands.command(cls=Command, epilog=about if INPUTS in params else None)(made)
        return run

    return decorate


# ---- the commands: each returns what it prints


@command(
    NAME, INPUTS, DTYPE,
    click.option("--fit", type=SHAPES, help="Shapes to solve at, such as 2x8,3x16."),
    click.option("--check", "held_out", type=SHAPES,
                 help="Shapes to check at, such as 300x8,2x4096."),
    CONFIG, BACKWARD, STAND_IN, JSON,
)  # fmt: skip
def formula(call: Call, backward: bool, as_json: bool = False, **options: Any) -> str:
    """Solve for the formula of a function's traffic, in elements."""
    from memtraffic.meters.formula import formula

    found = formula(call.fn, call.made, dtype=call.dtype, backward=backward, **options)
    if as_json:
        passes = {"forward": found, "backward": found.backward}
        sides = {name: formula_sides(each) for name, each in passes.items() if each}
        tried = {it: getattr(found, it) for it in ("tried", "ranges", "together", "steps")}
        return json.dumps((sides if backward else sides["forward"]) | tried)
    return str(found)


def formula_sides(found: Formula) -> dict[str, dict[str, int | str]]:
    """The coefficients of a formula for JSON: whole numbers, or fractions as text."""
    from memtraffic.meters.counts import SIDES

    return {
        side: {term: int(c) if c.denominator == 1 else str(c) for term, c in terms.items()}
        for side, terms in ((side, getattr(found, side)) for side in SIDES)
    }


@command(*CALL, CONFIG, BACKWARD, STAND_IN, JSON)
def count(call: Call, backward: bool, as_json: bool = False, **options: Any) -> str:
    """Count what a function reads and writes, by operation."""
    from memtraffic.meters.count import count

    found = count(call.fn, call.made, call.shape(), dtype=call.dtype, backward=backward, **options)
    if not found.backward:
        return count_table(found, as_json)
    forward, back = (count_table(each, as_json) for each in (found, found.backward))
    if as_json:
        return f'{{"forward": {forward}, "backward": {back}}}'
    return f"forward\n{forward}\n\nbackward\n{back}"


def count_table(traffic: Traffic, as_json: bool) -> str:
    import pandas as pd

    from memtraffic.meters.operations import OpTraffic

    ops = [asdict(op) for op in traffic.ops]
    totals = {it.name: getattr(traffic, it.name) for it in fields(OpTraffic) if it.name != "name"}
    if as_json:
        return json.dumps(totals | {"ops": ops})
    frame = pd.DataFrame([*ops, {"name": "total"} | totals]).set_index("name").rename_axis(None)
    frame = frame.loc[:, frame.any()].rename(columns=lambda name: name.replace("_", " "))
    return frame.to_string(formatters=["{:,}".format] * len(frame.columns))


@command(*CALL, JSON)
def counters(call: Call, as_json: bool = False) -> str:
    """Read hardware counters while a function runs."""
    from memtraffic.meters.counters import counters

    frame = counters(call.name, call.inputs, call.shape(), dtype=call.dtype)
    return table(frame, as_json)


@command(*CALL, TARGET, STAND_IN, JSON)
def resources(call: Call, target: Gpu, as_json: bool = False) -> str:
    """Compile kernels and print what they use."""
    return listed(compiled(call, target), as_json)


@command(*CALL, TARGET, STAND_IN, JSON)
def occupancy(call: Call, target: Gpu, as_json: bool = False) -> str:
    """Compile kernels and print how many fit."""
    from memtraffic.residency import Occupancy

    return listed([Occupancy.of(kernel, target) for kernel in compiled(call, target)], as_json)


def compiled(call: Call, target: Gpu) -> list[Resources]:
    """The function's kernels, compiled."""
    from memtraffic.compile import resources

    shape = call.shape(M=COMPILED_ROWS)
    return resources(call.fn, call.made, shape, target=target, dtype=call.dtype)


def listed(found: Sequence[Resources | Occupancy], as_json: bool) -> str:
    """A line for each kernel, or a JSON list."""
    return json.dumps(list(map(asdict, found))) if as_json else "\n".join(map(str, found))


@command(*CALL, TARGET, CONFIG, STAND_IN, JSON)
def sectors(call: Call, target: Gpu, as_json: bool = False, **options: Any) -> str:
    """Predict the requests and sectors of loads and stores."""
    from memtraffic.meters.sectors import sectors

    found = sectors(call.fn, call.made, call.shape(), target=target, dtype=call.dtype, **options)
    return json.dumps(found.as_dict()) if as_json else str(found)


def table(frame: pd.DataFrame, as_json: bool) -> str:
    """A DataFrame as text, or as a JSON list of its rows."""
    if as_json:
        return frame.to_json(orient="records")
    return frame.to_string(index=False, na_rep="-", float_format="{:.1f}".format)


@command(JSON)
def roof(as_json: bool) -> str:
    """Measure this GPU's copy bandwidth and arithmetic rate."""
    from memtraffic.benchmark.roof import roof

    return table(roof(), as_json)


@command(
    click.argument("name", nargs=-1, metavar="[NAME]..."),
    click.option("--shapes", type=SHAPES, default=BENCHED, help="Such as 4096x1024,8192x512."),
    INPUTS, DTYPE, JSON,
)  # fmt: skip
def bench(call: Call, shapes: Shapes, as_json: bool = False) -> str:
    """Judge and time kernels beside a copy, ours and others'.

    A NAME is a rung, a baseline or module:function; by default all rungs and baselines of a
    softmax. With --inputs that are no operation, functions are timed and not judged.
    """
    from memtraffic import benchmark
    from memtraffic.op import find_op

    op = find_op(call.inputs or "softmax")
    judge = op.reference is not None
    impls = call.name or names.COMPARED.get(op.name, ("copy",))
    options: dict[str, Any] = {"judge": judge, "beside_copy": not judge}
    frame = benchmark.bench(impls, op, shapes, dtype=call.dtype, **options)
    keys = list(frame.columns[1 : frame.columns.get_loc("us")])
    copied = frame[frame["impl"] == "copy"].set_index(keys)["us"]
    if len(copied) and not as_json:
        share = 100 * frame[keys].apply(tuple, axis=1).map(copied) / frame["us"]
        frame.insert(frame.columns.get_loc("gb_per_s") + 1, "%_of_copy", share)
    return table(frame, as_json)


@command(
    *CALL,
    click.option("--target", type=List("gpus", find_gpu), default="sm_90,gfx942",
                 help="To compile for (default: sm_90,gfx942)."),
    BACKWARD, STAND_IN,
    click.option("-o", "--output", type=click.File("w", "utf-8", lazy=False),
                 help="Write the report there (default: print it)."),
)  # fmt: skip
def report(call: Call, target: list[Gpu], backward: bool, output: IO[str] | None) -> str:
    """Write what the other commands say of a function into one document, as Markdown."""
    call.sizes = call.sizes or tuple(f"{name}={REPORTED_SIZE}" for name in call.made.sizes)
    shape = call.shape()
    timed = replace(call, name=[call.name], inputs=call.inputs or DEFAULT)
    runs: dict[str, Callable[[], str]] = {
        "formula": lambda: formula(call, backward),
        "count": lambda: count(call, backward),
    }
    for gpu, meter in itertools.product(target, (resources, occupancy, sectors)):
        runs[f"{meter.__name__} for {gpu.target}"] = functools.partial(meter, call, gpu)
    runs |= {"counters": lambda: counters(call), "bench": lambda: bench(timed, [shape])}
    parts, failures = [" ".join((f"# {call.name}", *call.sizes, call.made.name, call.dtype))], []
    for heading, run in runs.items():
        try:
            text = run()
        except Exception as error:  # a function may raise what it likes
            failures.append(error)
            text = described(error)
        parts.append(f"## {heading}\n\n```\n{text}\n```")
    if len(failures) == len(runs):
        raise failures[0]
    text = "\n\n".join(parts)
    if output is None:
        return text
    output.write(f"{text}\n")
    return f"wrote {output.name}"
