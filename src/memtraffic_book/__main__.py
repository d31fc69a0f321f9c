"""The commands of the book: `python -m memtraffic_book COMMAND`, in the root of the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from memtraffic import progress
from memtraffic_book import build, drift


def parser() -> argparse.ArgumentParser:
    """The commands and their arguments."""
    top = argparse.ArgumentParser(prog="python -m memtraffic_book", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    record = commands.add_parser("record", help="on a GPU: run experiments and write recordings")
    record.add_argument("ids", nargs="*", metavar="ID", help="an experiment; all by default")

    drifts = commands.add_parser("drift", help="on a GPU: run experiments, compare with recordings")
    drifts.add_argument("ids", nargs="*", metavar="ID", help="an experiment; all by default")

    notebooks = commands.add_parser(
        "notebooks", help="on the published GPU: execute notebooks in place, from its recordings"
    )
    notebooks.add_argument("paths", nargs="*", metavar="PATH", type=Path, help="all by default")

    commands.add_parser("map", help="draw the maps of the speed at each width, from the recording")
    commands.add_parser(
        "moving", help="draw by what was measured: the figure that moves, the poster"
    )
    commands.add_parser("chart-data", help="print the GPUs that the chart of occupancy knows")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, 1 where something drifted or failed."""
    args = parser().parse_args(argv)
    progress.enable()
    try:
        if args.command == "record":
            print(f"recorded in {build.record_experiments(args.ids)}")
        elif args.command == "drift":
            if sentences := drift.measure_again(args.ids):
                raise RuntimeError("measured again, these drifted:\n" + "\n".join(sentences))
        elif args.command == "notebooks":
            build.execute_notebooks(args.paths)
        elif args.command == "map":
            print(build.draw_map())
        elif args.command == "moving":
            print(build.draw_moving(), build.draw_poster(), sep="\n")
        else:
            print(build.chart_data(), end="")
    except (RuntimeError, LookupError, OSError) as error:
        print(f"memtraffic_book: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
