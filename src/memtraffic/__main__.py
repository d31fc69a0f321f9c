"""The meters as commands: `python -m memtraffic formula naive`."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from memtraffic.ladder import RUNGS
from memtraffic.progress import Progress

DTYPES = ("float32", "float16", "bfloat16")


class BadInput(Exception):
    """What the user asked for cannot be done; the message says why in one line."""


def size(text):
    """A size given on the command line: a positive whole number."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message):
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def parser():
    """The commands and their options."""
    top = Parser(
        prog="python -m memtraffic", description="Meters for GPU memory traffic."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, run, text, *, named=True):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if named:
            sub.add_argument(
                "name",
                metavar="NAME",
                help=f"a rung ({', '.join(RUNGS)}) or module:function of one 2-D tensor",
            )
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    command(
        "formula",
        run_formula,
        "Solve for the formula of a function's traffic, in elements.",
    )
    for name, run, text in (
        (
            "count",
            run_count,
            "Count what a function reads and writes, operation by operation.",
        ),
        (
            "counters",
            run_counters,
            "Read a GPU's hardware counters while a function runs.",
        ),
    ):
        sub = command(name, run, text)
        sub.add_argument("m", metavar="M", type=size, help="rows")
        sub.add_argument("n", metavar="N", type=size, help="columns")
        sub.add_argument("--dtype", choices=DTYPES, default="float32")
    for name, run, text in (
        (
            "resources",
            run_resources,
            "Compile a function's kernels for a GPU and print what they use.",
        ),
        (
            "occupancy",
            run_occupancy,
            "Compile a function's kernels for a GPU and print how many programs fit.",
        ),
    ):
        sub = command(name, run, text)
        sub.add_argument(
            "--target",
            required=True,
            help="such as sm_90 or gfx942; the GPU need not be there",
        )
        sub.add_argument("--n", type=size, required=True, help="columns")
        for option, text in (
            ("warps", "warps a program"),
            ("stages", "stages of a loop"),
            ("waves-per-eu", "on AMD, the waves a SIMD to compile for"),
        ):
            text += ", instead of the function's own choice"
            sub.add_argument(f"--{option}", type=size, help=text)
        sub.add_argument("--dtype", choices=DTYPES, default="float32")
    command(
        "roof",
        run_roof,
        "Measure this GPU's copy bandwidth and arithmetic rate.",
        named=False,
    )
    for name, run, text in (
        (
            "record",
            run_record,
            "Execute a book's notebooks on a GPU and record what they measure.",
        ),
        (
            "drift",
            run_drift,
            "Compare what a verifying run measured with the book's recordings.",
        ),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("book", type=Path, help="the folder of the notebooks")
    return top


def call(work, *args, **kwargs):
    """Calls `work`; whatever it raises, the user's function included, becomes one line."""
    try:
        return work(*args, **kwargs)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(text) from error


def run_formula(args):
    from memtraffic.ladder import resolve
    from memtraffic.traffic.formula import formula

    found = call(formula, call(resolve, args.name))
    if args.json:
        sides = {"reads": found.reads, "writes": found.writes}
        whole = {
            side: {
                term: int(value) if value.denominator == 1 else str(value)
                for term, value in terms.items()
            }
            for side, terms in sides.items()
        }
        print(json.dumps(whole))
        return
    print(found)
    print(
        f"solved at {len(found.fitted)} shapes, checked at {len(found.checked)} others",
        end="",
    )
    print(
        f", {len(found.refused)} refused: {found.refused[0][2]}"
        if found.refused
        else ""
    )


def matrix(args, m):
    import torch

    from memtraffic.traffic.formula import random_matrix

    return random_matrix(m, args.n)[0].to(getattr(torch, args.dtype))


def run_count(args):
    from memtraffic.ladder import resolve
    from memtraffic.traffic.count import count

    traffic = call(count, call(resolve, args.name), call(matrix, args, args.m))
    totals = ("read_elements", "written_elements", "read_bytes", "written_bytes")
    if args.json:
        print(
            json.dumps(
                {name: getattr(traffic, name) for name in totals}
                | {"ops": [asdict(op) for op in traffic.ops]}
            )
        )
        return
    width = max(len(op.name) for op in traffic.ops) if traffic.ops else 5
    print(
        f"{'':{max(width, 5)}}  "
        + "  ".join(f"{name.replace('_', ' '):>16}" for name in totals)
    )
    for op in traffic.ops:
        print(
            f"{op.name:{max(width, 5)}}  "
            + "  ".join(f"{getattr(op, name):>16,}" for name in totals)
        )
    print(
        f"{'total':{max(width, 5)}}  "
        + "  ".join(f"{getattr(traffic, name):>16,}" for name in totals)
    )


def run_counters(args):
    from memtraffic.traffic.counters import counters

    print_frame(call(counters, args.name, args.m, args.n, args.dtype), args.json)


def run_roof(args):
    from memtraffic.measure import roof

    print_frame(call(roof), args.json)


def compiled(args):
    """The `Resources` of the kernels that the command names, with its options."""
    from memtraffic.ladder import resolve
    from memtraffic.targets import resources

    options = {
        "num_warps": args.warps,
        "num_stages": args.stages,
        "waves_per_eu": args.waves_per_eu,
    }
    fn = call(resolve, args.name)
    x = call(matrix, args, 16)  # a few rows: of one alone, a kernel is made simpler
    found = call(resources, fn, args.target, x, **options)
    if not found:
        raise BadInput(f"{args.name} launches no Triton kernel")
    return found


def run_resources(args):
    found = compiled(args)
    if args.json:
        print(json.dumps([kernel.as_dict() for kernel in found]))
    else:
        print(*found, sep="\n")


def run_occupancy(args):
    from memtraffic import occupancy

    found = [occupancy.report(kernel) for kernel in compiled(args)]
    if args.json:
        print(json.dumps(found))
        return
    for one in found:
        each = ", ".join(
            f"{name} {programs}" for name, programs in one["limits"].items()
        )
        print(
            f"{one['kernel']} for {one['target']} ({one['gpu']}), {one['num_warps']} warps: {one['resident']} programs fit, "
            f"by {one['binding']} (limits: {each}); {one['programs']} programs on {one['processors']} processors"
        )


def print_frame(frame, as_json):
    """A DataFrame, as a table or as a JSON list of rows."""
    print(frame.to_json(orient="records") if as_json else frame.to_string(index=False))


def run_record(args):
    from memtraffic import machine, show
    from memtraffic.recording import record_book

    call(machine.require_gpu, "record")
    show.save_ladder(record_book(args.book), args.book / "_static" / "ladder.png")


def run_drift(args):
    from memtraffic.recording import drift

    misses = call(drift, args.book)
    if misses:
        raise BadInput(
            "measured again, these are not what was recorded:\n" + "\n".join(misses)
        )
    print("every experiment, measured again, is what was recorded")


def main(argv=None):
    """Runs one command; returns its exit status, 2 for bad input."""
    args = parser().parse_args(argv)
    Progress.enabled = True
    try:
        args.run(args)
    except BadInput as error:
        print(f"memtraffic: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
