"""Meters for the memory traffic of GPU kernels, such as `python -m memtraffic formula naive`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import memtraffic
from memtraffic import progress
from memtraffic.ladder import RUNGS
from memtraffic.names import import_function

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from memtraffic.compile import Resources
    from memtraffic.gpus import Gpu

MOVED = {"record": "memtraffic.book record", "drift": "memtraffic.book drift"}
TOTALS = ("read_elements", "written_elements", "read_bytes", "written_bytes")
COMPILED_ROWS = 16  # a kernel compiled for a single row is simpler than for several
MANY_ELEMENTS = 2**24  # from here on, PyTorch's start without arithmetic, two seconds, is worth it


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = Parser(prog="python -m memtraffic", description=__doc__)
    top.add_argument("--version", action="version", version=memtraffic.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], str], text: str) -> Parser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print JSON")
        if name != "roof":
            rungs = ", ".join(RUNGS)
            added.add_argument("name", metavar="NAME", help=f"a rung ({rungs}) or module:function")
            text = "the operation, which makes the function's inputs (default: %(default)s)"
            added.add_argument("--op", default="softmax", help=text)
        if name not in ("roof", "formula"):
            added.add_argument(
                "--dtype", choices=("float32", "float16", "bfloat16"), default="float32"
            )
        return added

    command("formula", run_formula, "Solve for the formula of a function's traffic, in elements.")
    count = command("count", run_count, "Count what a function reads and writes, by operation.")
    counters = command("counters", run_counters, "Read hardware counters while a function runs.")
    for sub in (count, counters):
        sub.add_argument("m", metavar="M", type=size, help="rows")
        sub.add_argument("n", metavar="N", type=size, help="columns")
    resources = command("resources", run_resources, "Compile kernels and print what they use.")
    occupancy = command("occupancy", run_occupancy, "Compile kernels and print how many fit.")
    for sub in (resources, occupancy):
        sub.add_argument("--target", required=True, help="such as sm_90 or gfx942; may be absent")
        sub.add_argument("--n", type=size, required=True, help="columns")
        sub.add_argument("--warps", type=size, help="warps per program, not the function's choice")
        sub.add_argument("--stages", type=size, help="stages of a loop, not the function's choice")
        sub.add_argument("--waves-per-eu", type=size, help="on AMD, waves per SIMD to compile for")
    command("roof", run_roof, "Measure this GPU's copy bandwidth and arithmetic rate.")
    return top


def size(text: str) -> int:
    """A size given on the command line: a positive whole number."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


# ---- the commands: each returns what it prints


def run_formula(args: argparse.Namespace) -> str:
    """The formula of a function's traffic."""
    from memtraffic.ops import find_op
    from memtraffic.traffic.formula import formula

    found = formula(import_function(args.name), find_op(args.op))
    if args.json:
        sides = {"reads": found.reads, "writes": found.writes}
        return json.dumps(
            {
                side: {t: int(c) if c.denominator == 1 else str(c) for t, c in terms.items()}
                for side, terms in sides.items()
            }
        )
    text = f"{found}\nsolved at {len(found.fitted)} shapes, checked at {len(found.checked)} others"
    if found.refused:
        text += f", {len(found.refused)} refused: {found.refused[0][2]}"
    return text


def run_count(args: argparse.Namespace) -> str:
    """The traffic of a function, operation by operation."""
    import pandas as pd

    from memtraffic.traffic.count import count, count_shapes

    fn = import_function(args.name)
    if args.m * args.n < MANY_ELEMENTS:
        traffic = count(fn, *inputs(args, args.m))
    else:
        traffic = count_shapes(fn, lambda: inputs(args, args.m))
    ops = [asdict(op) for op in traffic.ops]
    totals = {name: getattr(traffic, name) for name in TOTALS}
    if args.json:
        return json.dumps(totals | {"ops": ops})
    frame = pd.DataFrame([*ops, {"name": "total"} | totals]).set_index("name").rename_axis(None)
    header = [name.replace("_", " ") for name in TOTALS]
    return frame.to_string(header=header, formatters=["{:,}".format] * len(TOTALS))


def run_counters(args: argparse.Namespace) -> str:
    """What the hardware counts, kernel by kernel."""
    from memtraffic.traffic.counters import counters

    return table(counters(args.name, (args.m, args.n), dtype=args.dtype, op=args.op), args.json)


def run_resources(args: argparse.Namespace) -> str:
    """What a function's compiled kernels use."""
    kernels, _ = compiled(args)
    if args.json:
        return json.dumps([asdict(kernel) for kernel in kernels])
    return "\n".join(map(str, kernels))


def run_occupancy(args: argparse.Namespace) -> str:
    """How many programs of a function's compiled kernels fit."""
    from memtraffic.residency import report

    kernels, gpu = compiled(args)
    reports = [report(kernel, gpu) for kernel in kernels]
    if args.json:
        return json.dumps(reports)
    return "\n".join(
        "{kernel} for {target} ({gpu}), {num_warps} warps: {resident} programs fit, by {binding} "
        "(limits: {each}); {programs} programs on {processors} processors".format(
            each=", ".join(f"{name} {fit}" for name, fit in one["limits"].items()), **one
        )
        for one in reports
    )


def run_roof(args: argparse.Namespace) -> str:
    """The copy bandwidth and the arithmetic rate of this GPU."""
    from memtraffic.benchmark.roof import roof

    return table(roof(), args.json)


def inputs(args: argparse.Namespace, m: int) -> tuple[Tensor, ...]:
    """What the function is called with, for a matrix of `m` rows."""
    from memtraffic.ops import find_op

    return find_op(args.op).inputs((m, args.n), args.dtype)


def compiled(args: argparse.Namespace) -> tuple[list[Resources], Gpu]:
    """The function's kernels, compiled as the options say, and the GPU they are for."""
    from memtraffic.compile import resources
    from memtraffic.gpus import find_gpu

    options = {
        "num_warps": args.warps,
        "num_stages": args.stages,
        "waves_per_eu": args.waves_per_eu,
    }
    fn, gpu = import_function(args.name), find_gpu(args.target)
    kernels = resources(fn, gpu, *inputs(args, COMPILED_ROWS), **options)
    if not kernels:
        raise LookupError(f"{args.name} launches no Triton kernel")
    return kernels, gpu


def table(frame: pd.DataFrame, as_json: bool) -> str:
    """A DataFrame as text, or as a JSON list of its rows."""
    return frame.to_json(orient="records") if as_json else frame.to_string(index=False)


def one_line(error: BaseException) -> str:
    """The message of an error, with its type where the message alone says little."""
    text = " ".join(str(error).split("\nException raised from")[0].split())
    if isinstance(error, SystemExit):
        return f"the function calls sys.exit({text})"
    if text and not isinstance(error, KeyError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0; 2 for bad input; 130 if interrupted.

    What the user's function prints goes to stderr, so that stdout has the result alone.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in MOVED:
        print(f"memtraffic: {argv[0]} is now `python -m {MOVED[argv[0]]}`", file=sys.stderr)
        return 2
    args = parser().parse_args(argv)
    progress.enable()
    try:
        with redirect_stdout(sys.stderr):
            text = args.run(args)
        print(text, flush=True)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `| head`; Python flushes stdout once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, SystemExit) as error:
        print(f"memtraffic: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
