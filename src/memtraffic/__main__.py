"""Meters for the memory traffic of GPU kernels, such as `python -m memtraffic formula naive`.

PyTorch takes seconds to import, so a command looks for mistakes in its arguments before.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import memtraffic
from memtraffic import names, progress
from memtraffic.errors import MemtrafficError
from memtraffic.gpus import AmdGpu, NvidiaGpu, find_gpu
from memtraffic.inputs import (
    DEFAULT,
    GRAMMAR,
    Arguments,
    Inputs,
    find_inputs,
    read_size,
    read_sizes,
)
from memtraffic.names import RUNGS

if TYPE_CHECKING:
    import pandas as pd

    from memtraffic.gpus import Gpu
    from memtraffic.meters.count import Traffic
    from memtraffic.residency import Resources

MOVED = {"record": "memtraffic_book record", "drift": "memtraffic_book drift"}
TOTALS = ("read_elements", "written_elements", "read_bytes", "written_bytes")
PASSES = ("forward", "backward")
COMPILED_ROWS = 16  # a kernel compiled for a single row is simpler than for several
MANY_ELEMENTS = 2**24  # from here on, PyTorch's start without arithmetic, two seconds, is worth it
MOST_CHARACTERS = 1000  # of a line that says what is wrong
FLOATS = ("float32", "float16", "bfloat16")
BENCHED = ("4096x256", "4096x1024", "4096x4096", "4096x12672", "4096x32768")


class UsageError(MemtrafficError):
    """A command cannot be understood; the message says why."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '(.*?)'", message)
        if unknown:
            raise UsageError(f"{self.prog}: {message}{_hint(unknown[1].lower(), WORDS)}")
        options = [*self._option_string_actions]
        for text in self.given if "are required" in message else ():  # a misspelt option may be why
            name = text.partition("=")[0]
            if re.match("--?[A-Za-z]", name) and not any(it.startswith(name) for it in options):
                message = f"unrecognized argument {text}{_hint(name, options)}"
        raise UsageError(f"{self.prog}: {message}")


def _hint(text: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(text, known, 1)
    return f": did you mean {close[0]}?" if close else ""


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = Parser(prog="python -m memtraffic", description=(__doc__ or "").partition("\n")[0])
    top.add_argument("--version", action="version", version=memtraffic.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    added = {}
    for name, (run, text) in COMMANDS.items():
        sub = added[name] = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=None if name == "roof" else f"INPUTS\n\n{GRAMMAR}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, parser=sub)
        if name != "report":
            sub.add_argument("--json", action="store_true", help="print JSON")
        if name == "roof":
            continue
        if name == "bench":
            _add_bench(sub)
            continue
        rungs = ", ".join(RUNGS)
        sub.add_argument("name", metavar="NAME", help=f"a rung ({rungs}) or module:function")
        if name != "formula":
            text = "the sizes of the inputs: 4096 1024 in their order, or M=4096 N=1024"
            sub.add_argument("sizes", metavar="SIZE", nargs="*", default=[], help=text)
        text = f"what the function is called with, see below (default: {DEFAULT})"
        sub.add_argument("--inputs", help=text)
        text = f"an operation that makes the inputs instead: {', '.join(names.OPS)}"
        sub.add_argument("--op", help=text)
        text = "of the inputs that name no dtype (default: %(default)s)"
        sub.add_argument("--dtype", choices=FLOATS, default="float32", help=text)
    for name in ("formula", "count", "report"):
        text = "the traffic of the forward pass and that of the backward pass"
        added[name].add_argument("--backward", action="store_true", help=text)
    for name in ("formula", "count", "resources", "occupancy", "report"):
        text = "where there is no GPU, answer as one does, for a function that insists on it"
        added[name].add_argument("--stand-in", action="store_true", help=text)
    for name in ("resources", "occupancy"):
        sub = added[name]
        sub.add_argument("--target", help="a GPU, here or not, such as sm_90 or gfx942 (required)")
        sub.add_argument("--n", type=size, help=f"N; where no SIZE says more, M is {COMPILED_ROWS}")
        sub.add_argument("--warps", type=size, help="warps per program, not the function's choice")
        sub.add_argument("--stages", type=size, help="stages of a loop, not the function's choice")
        sub.add_argument("--waves-per-eu", type=size, help="on AMD, waves per SIMD to compile for")
    text = "targets to compile for, such as sm_90,gfx942 (default: all)"
    added["report"].add_argument("--target", help=text)
    text = "the page: .md with pictures beside it, or .html (default: Markdown on stdout)"
    added["report"].add_argument("-o", "--output", metavar="FILE", help=text)
    return top


def _add_bench(sub: argparse.ArgumentParser) -> None:
    text = "a rung, a baseline or module:function (default: all rungs and baselines)"
    sub.add_argument("names", metavar="NAME", nargs="*", help=text)
    text = f"packages to compare with, where they are here: {', '.join(names.PEERS)}, or all"
    sub.add_argument("--peers", metavar="PEER", nargs="+", default=[], help=text)
    text = f"rows and columns (default: {' '.join(BENCHED)})"
    sub.add_argument("--shapes", metavar="SHAPE", nargs="+", default=BENCHED, help=text)
    text = "of the inputs (default: %(default)s)"
    sub.add_argument("--dtype", choices=FLOATS, default="float32", help=text)
    text = f"the operation: {', '.join(names.OPS)} (default: softmax)"
    sub.add_argument("--op", help=text)
    text = "in place of an operation, what module:function is called with, see below; not judged"
    sub.add_argument("--inputs", help=text)
    sub.add_argument("--csv", metavar="FILE", help="write the table there, too")


def size(text: str) -> int:
    """A size given on the command line: a positive whole number."""
    try:
        return read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command, checked as far as this needs no PyTorch.

    Raises UsageError, LookupError or ValueError.
    """
    if argv and argv[0] in MOVED:
        raise UsageError(f"memtraffic: {argv[0]} is now `python -m {MOVED[argv[0]]}`")
    args, rest = parser().parse_known_args(argv)
    options = re.findall(r"--[a-z-]+", args.parser.format_usage())
    for text in rest:
        if not hasattr(args, "sizes") or re.match("--|-[^0-9]", text):
            name = text.partition("=")[0]
            if name in options:
                raise UsageError(f"{args.parser.prog}: give {text} after the name of the command")
            raise UsageError(
                f"{args.parser.prog}: unrecognized argument {text}{_hint(name, options)}"
            )
    if args.command == "roof":
        return args
    if args.command == "bench":
        _check_bench(args)
        return args
    names.check_name(args.name, RUNGS)
    if args.op is not None and args.inputs is not None:
        raise UsageError(f"{args.parser.prog}: --op makes its own inputs: leave out one of the two")
    if args.op is not None:
        names.check_name(args.op, names.OPS, "operation")
    args.sizes = [*getattr(args, "sizes", []), *rest]
    args.gpu = None
    if args.command in ("resources", "occupancy"):
        if args.target is None:
            raise UsageError(f"{args.parser.prog}: --target is missing, such as --target sm_90")
        args.gpu = find_gpu(args.target)
        _check_waves(args.gpu, args.waves_per_eu)
        if args.warps is not None and args.warps.bit_count() > 1:
            raise ValueError(f"--warps {args.warps}: Triton takes a power of two")
    if args.command == "report":
        targets = [] if args.target is None else args.target.split(",")
        args.gpus = [find_gpu(name.strip()) for name in targets]
        _check_output(args.output)
    if args.op is None:
        args.made_by = find_inputs(args.inputs)
        args.shape = _shape(args)
    return args


def _check_bench(args: argparse.Namespace) -> None:
    prog = args.parser.prog
    args.shapes = [_bench_shape(text, prog) for text in args.shapes]
    if args.inputs is not None:
        if args.op is not None or args.peers:
            raise UsageError(f"{prog}: --inputs has its own functions: leave out --op and --peers")
        if not args.names:
            raise UsageError(f"{prog}: --inputs needs the NAME of a function, as module:function")
        args.made_by = find_inputs(args.inputs)
        for shape in args.shapes:
            if len(shape) != len(args.made_by.sizes):
                raise UsageError(
                    f"{prog}: {'x'.join(map(str, shape))} is no shape of {args.inputs!r}, whose "
                    f"sizes are {', '.join(args.made_by.sizes) or 'all given'}"
                )
        return
    args.op = args.op or "softmax"
    names.check_name(args.op, names.OPS, "operation")
    args.names = args.names or list(names.COMPARED.get(args.op, ["copy"]))
    known = dict.fromkeys(name for compared in names.COMPARED.values() for name in compared)
    for peer in names.PEERS:
        known |= dict.fromkeys((peer, f"{peer} backward"))
    for name in args.names:
        names.check_name(name, dict.fromkeys(known, ""), "kernel")
    peers = {name.lower(): [name] for name in names.PEERS} | {"all": list(names.PEERS)}
    asked = []
    for name in args.peers:
        if name.lower() not in peers:
            every = ", ".join((*names.PEERS, "all"))
            raise UsageError(f"{prog}: no peer is named {name!r}: give one of {every}")
        asked += peers[name.lower()]
    if args.op == "softmax_backward":
        asked = [f"{name} backward" for name in asked if name != "tutorial"]
    args.names = list(dict.fromkeys([*args.names, *asked]))


def _bench_shape(text: str, prog: str) -> tuple[int, ...]:
    try:
        return tuple(map(read_size, text.split("x")))
    except ValueError as error:
        raise UsageError(f"{prog}: {text!r} is no shape such as 4096x1024: {error}") from None


def _check_waves(gpu: Gpu, waves: int | None) -> None:
    if waves is None:
        return
    if not isinstance(gpu, AmdGpu):
        raise ValueError(
            f"--waves-per-eu is AMD's: {gpu.target} ({gpu.vendor}) has no waves_per_eu"
        )
    if waves > gpu.max_waves_per_simd:
        most = gpu.max_waves_per_simd
        raise ValueError(f"--waves-per-eu {waves}: a SIMD of {gpu.target} holds {most} waves")


def _check_output(path: str | None) -> None:
    """Raises ValueError for a file that cannot be written, as far as this shows before."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise ValueError(f"-o {path}: is a folder: name a file in it, such as report.md")
    if os.path.splitext(path)[1].lower() not in (".md", ".html"):
        raise ValueError(f"-o {path}: the name of a page ends in .md or .html")
    if not os.path.isdir(folder):
        raise ValueError(f"-o {path}: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"-o {path}: this file must not be written")


def _shape(args: argparse.Namespace) -> tuple[int, ...]:
    """The numbers that a command gives for the sizes of its inputs."""
    if args.command == "formula" or (args.command == "report" and not args.sizes):
        return ()
    defaults = {"M": COMPILED_ROWS, "N": args.n} if args.gpu else {}
    try:
        return read_sizes(args.made_by, args.sizes, **defaults)
    except ValueError as error:
        hint = " or --n 1024" if args.gpu and args.n is None and "N=" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None


# ---- the commands: each returns what it prints


def run_formula(args: argparse.Namespace) -> str:
    """The formula of a function's traffic."""
    from memtraffic.meters.formula import formula

    fn = names.import_function(args.name)
    options: dict[str, Any] = {"backward": args.backward, "dtype": args.dtype}
    found = formula(fn, made_by(args), **options)
    passes = [found, found.backward] if found.backward else [found]
    if args.json:
        sides = [
            {
                side: {t: int(c) if c.denominator == 1 else str(c) for t, c in terms.items()}
                for side, terms in (("reads", each.reads), ("writes", each.writes))
            }
            for each in passes
        ]
        return json.dumps(dict(zip(PASSES, sides, strict=True)) if args.backward else sides[0])
    text = f"{found}\nsolved at {len(found.fitted)} shapes, checked at {len(found.checked)} others"
    if found.refused:
        text += f", {len(found.refused)} refused: {found.refused[0][-1]}"
    return text


def run_count(args: argparse.Namespace) -> str:
    """The traffic of a function, operation by operation."""
    from memtraffic.functions import as_function
    from memtraffic.meters.count import count, count_shapes

    fn = as_function(names.import_function(args.name))
    if args.backward:
        passes = count(fn, inputs=arguments(args), backward=True)
        tables = [_count_table(traffic, args.json) for traffic in passes]
        if args.json:
            return f'{{"forward": {tables[0]}, "backward": {tables[1]}}}'
        return "\n\n".join(f"{n}\n{text}" for n, text in zip(PASSES, tables, strict=True))
    made = made_by(args)  # which reads the sizes
    if made.elements(args.shape) < MANY_ELEMENTS:
        traffic = count(fn, inputs=arguments(args))
    else:
        traffic = count_shapes(fn, lambda: arguments(args))
    return _count_table(traffic, args.json)


def _count_table(traffic: Traffic, as_json: bool) -> str:
    import pandas as pd

    ops = [asdict(op) for op in traffic.ops]
    totals = {name: getattr(traffic, name) for name in TOTALS}
    if as_json:
        return json.dumps(totals | {"ops": ops})
    frame = pd.DataFrame([*ops, {"name": "total"} | totals]).set_index("name").rename_axis(None)
    header = [name.replace("_", " ") for name in TOTALS]
    return frame.to_string(header=header, formatters=["{:,}".format] * len(TOTALS))


def run_counters(args: argparse.Namespace) -> str:
    """What the hardware counts, kernel by kernel."""
    from memtraffic.meters.counters import counters

    made = made_by(args)
    given = {"op": args.op} if args.op else {"inputs": made.name}
    return table(counters(args.name, args.shape, dtype=args.dtype, **given), args.json)


def run_resources(args: argparse.Namespace) -> str:
    """What a function's compiled kernels use."""
    kernels = compiled(args)
    if args.json:
        return json.dumps([asdict(kernel) for kernel in kernels])
    return "\n".join(map(str, kernels))


def run_occupancy(args: argparse.Namespace) -> str:
    """How many programs of a function's compiled kernels fit."""
    from memtraffic.residency import Occupancy

    found = [Occupancy.of(kernel, args.gpu) for kernel in compiled(args)]
    if args.json:
        return json.dumps([asdict(one) for one in found])
    return "\n".join(map(str, found))


def run_roof(args: argparse.Namespace) -> str:
    """The copy bandwidth and the arithmetic rate of this GPU."""
    from memtraffic.benchmark.roof import roof

    return table(roof(), args.json)


def run_bench(args: argparse.Namespace) -> str:
    """Who is fastest: every implementation judged and timed, or functions of any inputs timed."""
    from memtraffic.benchmark import bench_beside_copy, compare

    if args.inputs is not None:
        frame = bench_beside_copy(args.names, args.shapes, inputs=args.inputs, dtype=args.dtype)
    else:
        frame = compare(args.names, args.shapes, dtype=args.dtype, op=args.op)
        absent = frame["note"].str.startswith("absent: ")
        for name, note in frame[absent].groupby("impl", sort=False)["note"].first().items():
            print(f"{name} is left out: {note.removeprefix('absent: ')}", file=sys.stderr)
        frame = frame[~absent]
    if args.csv:
        frame.to_csv(args.csv, index=False, float_format="%.6g", lineterminator="\n")
    return frame.to_json(orient="records") if args.json else _bench_table(frame)


def _bench_table(frame: pd.DataFrame) -> str:
    """What was timed, with each time as a share of the copy's beside it."""
    keys = list(frame.columns[1 : frame.columns.get_loc("us")])
    copied = frame[frame["impl"] == "copy"].set_index(keys)["us"]
    frame = frame.drop(columns="version", errors="ignore")
    if len(copied):
        share = 100 * frame[keys].apply(tuple, axis=1).map(copied) / frame["us"]
        frame.insert(frame.columns.get_loc("gb_per_s") + 1, "%_of_copy", share)
    return frame.to_string(index=False, na_rep="-", float_format="{:.1f}".format)


def run_report(args: argparse.Namespace) -> str:
    """A page about a function, or the files that it was written to."""
    from memtraffic.op import find_op
    from memtraffic.reporting import make_page, to_markdown, write_page

    fn, made = names.import_function(args.name), made_by(args)
    inputs = made if args.op is None else find_op(args.op)
    options: dict[str, Any] = {"backward": args.backward, "dtype": args.dtype, "name": args.name}
    page = make_page(fn, inputs, args.shape or None, targets=args.gpus, **options)
    if args.output is None:
        return to_markdown(page)
    try:
        return "\n".join(f"wrote {path}" for path in write_page(page, Path(args.output)))
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise UsageError(f"-o {args.output}: cannot be written: {why}") from error


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], str], str]] = {
    "formula": (run_formula, "Solve for the formula of a function's traffic, in elements."),
    "count": (run_count, "Count what a function reads and writes, by operation."),
    "counters": (run_counters, "Read hardware counters while a function runs."),
    "resources": (run_resources, "Compile kernels and print what they use."),
    "occupancy": (run_occupancy, "Compile kernels and print how many fit."),
    "bench": (run_bench, "Judge and time kernels beside a copy, ours and others'."),
    "report": (
        run_report,
        "Write a page of what a function moves and what its kernels use.",
    ),
    "roof": (run_roof, "Measure this GPU's copy bandwidth and arithmetic rate."),
}
WORDS = [*COMMANDS, *FLOATS, "--help", "--version"]


def made_by(args: argparse.Namespace) -> Inputs:
    """What makes the function's inputs; where it is an operation, the sizes are read only now."""
    if args.op is not None:
        from memtraffic.op import find_op

        args.made_by = find_inputs(find_op(args.op))
        args.shape = _shape(args)
    made: Inputs = args.made_by
    return made


def arguments(args: argparse.Namespace) -> Arguments:
    """What the function is called with."""
    return made_by(args).arguments(args.shape, args.dtype)


def compiled(args: argparse.Namespace) -> list[Resources]:
    """The function's kernels, compiled as the options say."""
    from memtraffic.compile import resources

    options = {
        "num_warps": args.warps,
        "num_stages": args.stages,
        "waves_per_eu": args.waves_per_eu,
    }
    fn = names.import_function(args.name)
    kernels = resources(fn, args.gpu, inputs=arguments(args), **options)
    if not kernels:
        raise LookupError(f"{args.name} launches no Triton kernel")
    return kernels


def table(frame: pd.DataFrame, as_json: bool) -> str:
    """A DataFrame as text, or as a JSON list of its rows."""
    return frame.to_json(orient="records") if as_json else frame.to_string(index=False)


# ---- what is printed


def one_line(error: BaseException, name: str = "") -> str:
    """The message of an error, with its class where the function `name` raised it, not a meter."""
    text = " ".join(str(error).split("\nException raised from")[0].split())
    if isinstance(error, SystemExit):
        return f"{name}: the function calls sys.exit({text})"
    kind = type(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    last = frames[-1][0] if frames else None
    # PyTorch's functions in C++ have no frame: theirs is the call of the function.
    ours = last and last.f_code is not Arguments.call.__code__ and last.f_globals["__name__"]
    of_package = str(ours).startswith("memtraffic.") and text and kind is not KeyError
    if isinstance(error, UsageError) or kind.__module__.startswith("memtraffic.") or of_package:
        return text
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{name}: {module}{kind.__qualname__}: {text}".removesuffix(": ").removeprefix(": ")


def complain(message: str) -> int:
    """Prints a line on stderr, where there is one, and returns the status of a failure."""
    if len(message) > MOST_CHARACTERS:
        message = f"{message[:MOST_CHARACTERS]}…"
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)
    return 2


@contextmanager
def no_silent_end(name: str) -> Iterator[None]:
    """Context manager: `os._exit`, which ends a process without a word, is an error."""
    end, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a child, which ends like that
            end(status)
        raise UsageError(f"{name}: the function calls os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end


def standing_in(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Context manager: with --stand-in, PyTorch and Triton answer as if there were a GPU.

    It is the target if NVIDIA makes that, or the GPU of the book. Raises RuntimeError where there
    is one.
    """
    if not getattr(args, "stand_in", False):
        return nullcontext()
    from memtraffic.stand_in import stand_in

    return stand_in(args.gpu) if isinstance(args.gpu, NvidiaGpu) else stand_in()


def insists_on_gpu(error: BaseException, args: argparse.Namespace) -> bool:
    """Whether a function may have raised `error` because there is no GPU, and --stand-in may help.

    It says so itself, or the line does that raised it.
    """
    from memtraffic import runtime

    if runtime.HAS_GPU or getattr(args, "stand_in", True):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return "cuda" in f"{error} {frames[-1].line if frames else ''}".lower()


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Context manager: what is written to stdout goes to stderr; stdout has the result alone.

    That holds for libraries and other processes, too. Whoever closes stdout meanwhile does no harm.
    """
    try:
        stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # in place of them is something without a descriptor
        with redirect_stdout(sys.stderr):
            yield
        return
    sys.stdout.flush()
    kept = os.dup(stdout)
    os.dup2(stderr, stdout)
    encoding = sys.stderr.encoding
    try:
        with (
            open(os.dup(stderr), "w", 1, encoding, "backslashreplace") as file,
            redirect_stdout(file),
        ):
            yield
    finally:
        os.dup2(kept, stdout)
        os.close(kept)


def write(text: str) -> int:
    """Prints the result and returns the status: 1 where nobody reads it, 2 where it is lost."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        print(text, flush=True)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):  # Python flushes stdout once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # of `| head`
            return 1
        return complain(f"memtraffic: the result cannot be written to stdout: {error}")
    return 0


def import_runtime() -> None:
    """Imports PyTorch, first of all, and tells the garbage collector to leave what it made alone.

    It would look through a quarter of a million objects that stay until the end, again and again
    while they are imported and once more when the process ends. A short command takes a third less
    time without that.
    """
    if "torch" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        from memtraffic import runtime  # first: it decides, before Triton is imported

        if runtime.HAS_TRITON:
            from memtraffic import triton_adapter  # noqa: F401
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0; 2 for bad input; 130 if interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # closed, as by `2>&-`
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        return complain("memtraffic: stdout is closed, so the result cannot be written")
    said = io.StringIO()  # --help and --version
    try:
        with redirect_stdout(said):
            args = read(argv)
    except SystemExit:
        return write(said.getvalue().rstrip())
    except UsageError as error:
        return complain(one_line(error))
    except (LookupError, ValueError) as error:
        return complain(f"memtraffic: {one_line(error)}")
    progress.enable()
    try:
        import_runtime()
        with stdout_to_stderr(), no_silent_end(getattr(args, "name", "")), standing_in(args):
            text = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # a function may raise what it likes
        name = getattr(args, "name", "")
        line = one_line(error, name)
        if line.startswith(f"{name}: ") and insists_on_gpu(error, args):
            line += " (does it insist on a GPU? then give --stand-in)"
        return complain(f"memtraffic: {line}")
    return write(text)


def _leave_little_to_collect() -> None:
    """Freezes all objects, so that Python exits sooner; not where that would be reported."""
    launching = sys.modules.get("memtraffic.triton_adapter.launch")
    if launching and launching.binds_with_nanobind():
        gc.unfreeze()
    else:
        gc.freeze()


if __name__ == "__main__":
    status = main()
    _leave_little_to_collect()
    sys.exit(status)
