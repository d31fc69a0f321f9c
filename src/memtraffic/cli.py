"""The command line, such as `memtraffic formula naive`.

PyTorch takes a second to import, so a command imports its meter when it runs, and mistakes in its
arguments are found before.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

import memtraffic
from memtraffic import names, progress
from memtraffic.errors import FormulaError, MemtrafficError, NoKernelError, described, said
from memtraffic.gpus import Gpu, find_gpu
from memtraffic.inputs import (
    DEFAULT,
    GRAMMAR,
    Arguments,
    find_dtype,
    parse,
    read_size,
    read_sizes,
)

if TYPE_CHECKING:
    import pandas as pd

    from memtraffic.meters.count import Traffic
    from memtraffic.meters.formula import Formula
    from memtraffic.op import Op
    from memtraffic.residency import Resources

Shapes: TypeAlias = "list[tuple[int, ...]]"
TOTALS = ("read_elements", "written_elements", "read_bytes", "written_bytes")
LINK_TOTALS = ("sent_elements", "received_elements", "sent_bytes", "received_bytes")
PASSES = ("forward", "backward")
COMPILED_ROWS = 16  # a kernel compiled for a single row is simpler than for several
MANY_ELEMENTS = 2**24  # from here on, PyTorch's start without arithmetic, two seconds, is worth it
MOST_CHARACTERS = 1000  # of a line that says what is wrong
LAYOUTS = ("packed", "odd", "every other", "transposed")  # of `tensors`, which needs PyTorch
FLOATS = ("float32", "float16", "bfloat16", "fp32", "fp16", "bf16")
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
            raise failure(error, ctx.params) from error
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


def failure(error: BaseException, params: dict[str, Any]) -> click.ClickException:
    """What a command says about an error: with its class where the metered function raised it."""
    runtime: Any = sys.modules.get("memtraffic.runtime")  # none if PyTorch cannot be imported
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    code = traceback.extract_tb(error.__traceback__)[-1].line
    # A function in C++ has no frame, nor has one that takes other arguments: it raises in the call.
    called = last.f_code is Arguments.call.__code__
    ours = last.f_globals.get("__name__", "").startswith("memtraffic.") and not called
    hint, its_own = "", "" if ours else f"{error} {code}"
    if isinstance(error, FormulaError):  # it says why the function refuses
        its_own = str(error)
    if called and isinstance(error, TypeError) and " argument" in str(error):
        hint = " (--inputs says what it is called with)"
    elif runtime and not runtime.HAS_GPU and not params.get("stand_in", True):
        if re.search("cuda|gpu", its_own, re.IGNORECASE):
            hint = " (does it insist on a GPU? then give --stand-in)"
    if isinstance(error, MemtrafficError) or (ours and not isinstance(error, KeyError)):
        bad_call = isinstance(error, (LookupError, TypeError, ValueError))
        return (click.UsageError if bad_call else click.ClickException)(said(error) + hint)
    line = f"{params.get('name', '')}: {described(error)}".removeprefix(": ")
    return click.ClickException(line + hint)


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


def checked(check: Callable[..., Any], *known: Any) -> Callable[[str], str]:
    """Reads text that `check` does not refuse, as it is."""
    return lambda text: (check(text, *known), text)[1]


def read_output(text: str) -> Path:
    """The path of a Markdown file that can be written, as far as this shows before."""
    path = Path(text)
    if path.suffix.lower() != ".md" or path.is_dir():
        raise ValueError(f"{text!r} is no file such as report.md: a report is Markdown")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{text!r} cannot be written")
    return path


@dataclass
class Call:
    """A function, and what it is called with."""

    name: str
    inputs: str | None
    op: str | None
    dtype: str
    sizes: tuple[str, ...] = ()

    @functools.cached_property
    def made(self) -> Op:
        """What makes the inputs."""
        from memtraffic.op import find_op

        return find_op(self.op or self.inputs)

    def shape(self, **defaults: int | None) -> tuple[int, ...]:
        """The numbers for the sizes of the inputs."""
        return read_sizes(self.made, self.sizes, **defaults)

    @functools.cached_property
    def fn(self) -> Callable[..., Any]:
        """The function, imported."""
        return names.import_function(self.name)

    def arguments(self, **defaults: int | None) -> Arguments:
        """The arguments of one call."""
        return self.made.arguments(self.shape(**defaults), self.dtype)


def read_matrix(text: str) -> tuple[int, ...]:
    """The shape of a matrix, such as 4096x50257."""
    shape = tuple(map(read_size, text.split("x")))
    if len(shape) != 2:
        raise ValueError(f"{text!r} is no shape of a matrix, such as 4096x50257")
    return shape


SIZE = Read("number", read_size)
SHAPES = List("shapes", lambda text: tuple(map(read_size, text.split("x"))))
NAME = click.argument("name", type=Read("name", checked(names.check_name, names.RUNGS)))
SIZES = click.argument("sizes", nargs=-1, metavar="[SIZE]...")
text = f"What the function is called with, see below (default: {DEFAULT})."
INPUTS = click.option("--inputs", type=Read("specification", checked(parse)), help=text)
text = f"An operation that makes the inputs instead: {', '.join(names.OPS)}."
operation = checked(names.check_name, names.OPS, "operation")
OP = click.option("--op", type=Read("name", operation), help=text)
text = "Of the inputs that name no dtype (default: float32)."
DTYPE = click.option(
    "--dtype", type=click.Choice(FLOATS), default="float32", help=text,
    callback=lambda ctx, param, name: find_dtype(name),
)  # fmt: skip
CALL = (NAME, SIZES, INPUTS, OP, DTYPE)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
BACKWARD = click.option("--backward", is_flag=True, help="The backward pass, too.")
text = "Where there is no GPU, answer as one does, for a function that insists on it."
STAND_IN = click.option("--stand-in", is_flag=True, help=text)


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
            if given["inputs"] is not None and given["op"] is not None:
                raise click.UsageError("--op makes its own inputs: leave out one of the two")
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
    NAME, INPUTS, OP, DTYPE,
    click.option("--fit", type=SHAPES, help="Shapes to solve at, such as 2x8,3x16."),
    click.option("--check", type=SHAPES, help="Shapes to check at, such as 300x8,2x4096."),
    BACKWARD, STAND_IN, JSON,
)  # fmt: skip
def formula(call: Call, fit: Shapes, check: Shapes, backward: bool, as_json: bool) -> str:
    """Solve for the formula of a function's traffic, in elements."""
    from memtraffic.meters.formula import formula

    options: dict[str, Any] = {"dtype": call.dtype, "backward": backward}
    found = formula(call.fn, call.made, fit=fit, held_out=check, **options)
    if as_json:
        passes = {"forward": found, "backward": found.backward}
        sides = {name: formula_sides(each) for name, each in passes.items() if each}
        tried = {"tried": found.tried, "together": found.together, "steps": found.steps}
        return json.dumps((sides if backward else sides["forward"]) | tried)
    return f"{found}\n{found.evidence}"


def formula_sides(found: Formula) -> dict[str, dict[str, int | str]]:
    """The coefficients of a formula for JSON: whole numbers, or fractions as text."""
    from memtraffic.meters.formula import SIDES

    return {
        side: {term: int(c) if c.denominator == 1 else str(c) for term, c in terms.items()}
        for side, terms in ((side, getattr(found, side)) for side in SIDES)
    }


@command(*CALL, BACKWARD, STAND_IN, JSON)
def count(call: Call, backward: bool, as_json: bool) -> str:
    """Count what a function reads and writes, by operation."""
    shape = call.shape()
    from memtraffic.functions import as_function
    from memtraffic.meters.count import count, count_shapes

    fn = as_function(call.fn)
    if backward:
        traffic = count(fn, call.made, shape, dtype=call.dtype, backward=True)
        tables = [count_table(each, as_json) for each in (traffic, traffic.backward) if each]
        if as_json:
            return f'{{"forward": {tables[0]}, "backward": {tables[1]}}}'
        return "\n\n".join(f"{n}\n{text}" for n, text in zip(PASSES, tables, strict=True))
    meter = count if call.made.elements(shape) < MANY_ELEMENTS else count_shapes
    return count_table(meter(fn, call.made, shape, dtype=call.dtype), as_json)


def count_table(traffic: Traffic, as_json: bool) -> str:
    import pandas as pd

    ops = [asdict(op) for op in traffic.ops]
    totals = {name: getattr(traffic, name) for name in (*TOTALS, *LINK_TOTALS)}
    if as_json:
        return json.dumps(totals | {"ops": ops}, default=float)
    frame = pd.DataFrame([*ops, {"name": "total"} | totals]).set_index("name").rename_axis(None)
    shown = totals if any(totals[name] for name in LINK_TOTALS) else TOTALS
    header = [name.replace("_", " ") for name in shown]
    return frame[list(shown)].to_string(header=header, formatters=[number_text] * len(header))


def number_text(number: int | Fraction) -> str:
    """A number of elements as text; before Python 3.13, a fraction takes no commas."""
    return str(number) if isinstance(number, Fraction) else f"{number:,}"


@command(*CALL, JSON)
def counters(call: Call, as_json: bool) -> str:
    """Read hardware counters while a function runs."""
    shape = call.shape()
    from memtraffic.meters.counters import counters

    frame = counters(call.name, call.op or call.inputs, shape, dtype=call.dtype)
    return table(frame, as_json)


text = "A GPU, here or not, such as sm_90 or gfx942."
TARGET = click.option("--target", type=Read("gpu", find_gpu), required=True, help=text)
COMPILE = (
    *CALL,
    TARGET,
    click.option("--n", type=SIZE, help=f"N; where no SIZE says more, M is {COMPILED_ROWS}."),
    click.option("--warps", "num_warps", type=SIZE,
                 help="Warps per program, not the function's choice."),
    click.option("--stages", "num_stages", type=SIZE,
                 help="Stages of a loop, not the function's choice."),
    click.option("--waves-per-eu", type=SIZE, help="On AMD, waves per SIMD to compile for."),
    STAND_IN, JSON,
)  # fmt: skip


@command(*COMPILE)
def resources(call: Call, as_json: bool, **options: Any) -> str:
    """Compile kernels and print what they use."""
    kernels = compiled(call, **options)
    if as_json:
        return json.dumps([asdict(kernel) for kernel in kernels])
    return "\n".join(map(str, kernels))


@command(*COMPILE)
def occupancy(call: Call, as_json: bool, target: Gpu, **options: Any) -> str:
    """Compile kernels and print how many fit."""
    from memtraffic.residency import Occupancy

    found = [Occupancy.of(kernel, target) for kernel in compiled(call, target, **options)]
    if as_json:
        return json.dumps([asdict(one) for one in found])
    return "\n".join(map(str, found))


@command(
    *CALL,
    click.option("--layout", type=click.Choice(LAYOUTS), default=LAYOUTS[0],
                 help="Of matrices in memory (default: packed)."),
    click.option("--caches", is_flag=True, help="Also what moves between L1, L2 and DRAM."),
    TARGET, BACKWARD, STAND_IN, JSON,
)  # fmt: skip
def sectors(call: Call, target: Gpu, as_json: bool, **options: Any) -> str:
    """Predict the requests and sectors of loads and stores."""
    shape = call.shape()
    from memtraffic.meters.sectors import sectors

    with no_kernel_hinted(call):
        found = sectors(call.fn, call.made, shape, target=target, dtype=call.dtype, **options)
    return json.dumps(found.as_dict()) if as_json else str(found)


def compiled(call: Call, target: Gpu, n: int | None, **options: Any) -> list[Resources]:
    """The function's kernels, compiled as the options say."""
    call.shape(M=COMPILED_ROWS, N=n)  # mistakes are found before PyTorch is imported
    from memtraffic.compile import resources

    arguments = call.arguments(M=COMPILED_ROWS, N=n)
    with no_kernel_hinted(call):
        return resources(call.fn, arguments, target=target, **options)


@contextmanager
def no_kernel_hinted(call: Call) -> Iterator[None]:
    """Context manager: where the function launches no kernel, a hint says what may help."""
    try:
        yield
    except NoKernelError as error:
        hint = "if it launches one only for tensors on a GPU, give --stand-in"
        raise click.ClickException(f"{call.name} launched no Triton kernel: {hint}") from error


def table(frame: pd.DataFrame, as_json: bool) -> str:
    """A DataFrame as text, or as a JSON list of its rows."""
    return frame.to_json(orient="records") if as_json else frame.to_string(index=False)


@command(JSON)
def roof(as_json: bool) -> str:
    """Measure this GPU's copy bandwidth and arithmetic rate."""
    from memtraffic.benchmark.roof import roof

    return table(roof(), as_json)


@command(
    click.argument("name", nargs=-1, metavar="[NAME]..."),
    click.option("--shapes", type=SHAPES, default=BENCHED, help="Such as 4096x1024,8192x512."),
    INPUTS, OP, DTYPE,
    click.option("--decide", type=Read("shape", read_matrix),
                 help="Say which softmax to call at this shape, such as 4096x50257."),
    click.option("--csv", type=click.Path(dir_okay=False, writable=True),
                 help="Write the table there, too."),
    JSON,
)  # fmt: skip
def bench(
    call: Call, shapes: Shapes, decide: tuple[int, ...] | None, csv: str, as_json: bool
) -> str:
    """Judge and time kernels beside a copy, ours and others'.

    A NAME is a rung, a baseline, a package (Liger, FlagGems, QuACK) or module:function; by default
    all rungs and baselines. With --inputs, functions are timed and not judged.
    """
    if decide:
        if call.name or call.op or call.inputs or csv:
            raise click.UsageError("--decide compares what computes a softmax: it takes --dtype")
        return decision(decide, call.dtype, as_json)
    if call.inputs is not None:
        if not call.name:
            raise click.UsageError("--inputs needs the NAME of a function")
        for shape in shapes:
            call.made.check(shape)
    from memtraffic import benchmark
    from memtraffic.op import find_op

    if call.inputs is not None:
        options: dict[str, Any] = {"inputs": call.inputs, "beside_copy": True}
        frame = benchmark.bench(call.name, shapes=shapes, dtype=call.dtype, **options)
    else:
        op = call.op or "softmax"
        impls = list(dict.fromkeys(call.name or names.COMPARED.get(op, ("copy",))))
        options = {"inputs": find_op(op), "judge": True, "budget": 0.1}
        frame = benchmark.bench(impls, shapes=shapes, dtype=call.dtype, **options)
        absent = frame["note"].str.startswith("absent: ")
        for name, note in frame[absent].groupby("impl", sort=False)["note"].first().items():
            click.echo(f"{name} is left out: {note.removeprefix('absent: ')}", err=True)
        frame = frame[~absent]
    if csv:
        frame.to_csv(csv, index=False, float_format="%.6g", lineterminator="\n")
    return frame.to_json(orient="records") if as_json else bench_table(frame)


def decision(shape: tuple[int, ...], dtype: str, as_json: bool) -> str:
    """What to call at a shape, forward and with its gradient, and the times that say so."""
    from memtraffic.benchmark.decision import WAYS, choose
    from memtraffic.benchmark.decision import decide as times_of

    found, parts = {}, []
    for case, gradient in (("forward", False), ("with gradient", True)):
        frame = times_of(shape, dtype=dtype, gradient=gradient)
        answers = {way: choose(frame, column) for column, way in WAYS.items()}
        found[case] = {"call": answers, "times": json.loads(table(frame, True))}
        lines = [f"{case}, {way}: {name}" for way, name in answers.items()]
        parts += [bench_table(frame[[*frame.columns.drop("note"), "note"]]), "\n".join(lines)]
    return json.dumps(found) if as_json else "\n\n".join(parts)


def bench_table(frame: pd.DataFrame) -> str:
    """What was timed, with each time as a share of the copy's beside it."""
    keys = list(frame.columns[1 : frame.columns.get_loc("us")])
    copied = frame[frame["impl"] == "copy"].set_index(keys)["us"]
    if len(copied):
        share = 100 * frame[keys].apply(tuple, axis=1).map(copied) / frame["us"]
        frame.insert(frame.columns.get_loc("gb_per_s") + 1, "%_of_copy", share)
    return frame.to_string(index=False, na_rep="-", float_format="{:.1f}".format)


def refuse_json(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        raise click.UsageError("a report is Markdown: the other commands print JSON")


@command(
    *CALL,
    click.option("--target", type=List("gpus", find_gpu),
                 help="To compile for, such as sm_90,gfx942 (default: all)."),
    BACKWARD, STAND_IN,
    click.option("-o", "--output", type=Read("file", read_output),
                 help="Write the report there (default: print it)."),
    click.option("--json", is_flag=True, expose_value=False, hidden=True, callback=refuse_json),
)  # fmt: skip
def report(call: Call, target: list[Gpu] | None, backward: bool, output: Path | None) -> str:
    """Write what a function moves and what its kernels use, as Markdown."""
    shape = call.shape() if call.sizes else None
    from memtraffic.reporting import report

    options: dict[str, Any] = {"targets": target, "dtype": call.dtype, "backward": backward}
    text = report(call.fn, call.made, shape, **options)
    if output is None:
        return text
    output.write_text(text + "\n", "utf-8")
    return f"wrote {output}"
