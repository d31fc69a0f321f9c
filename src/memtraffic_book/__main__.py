"""The commands of the book: `python -m memtraffic_book COMMAND`, in the root of the repository."""

from __future__ import annotations

from pathlib import Path

import click

from memtraffic import progress
from memtraffic_book import build, drift


class Commands(click.Group):
    """Commands that say in one line what goes wrong."""

    def invoke(self, ctx: click.Context) -> None:
        progress.enable()
        try:
            super().invoke(ctx)
        except (RuntimeError, LookupError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
def record(ids: tuple[str, ...]) -> None:
    """On a GPU: run experiments, all by default, and write recordings."""
    click.echo(f"recorded in {build.record_experiments(ids)}")


@main.command(name="drift")
@click.argument("ids", nargs=-1, metavar="[ID]...")
def measure_again(ids: tuple[str, ...]) -> None:
    """On a GPU: run experiments, all by default, and compare them with their recordings."""
    if sentences := drift.measure_again(ids):
        raise click.ClickException("measured again, these drifted:\n" + "\n".join(sentences))


@main.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=Path)
def notebooks(paths: tuple[Path, ...]) -> None:
    """On the published GPU: execute notebooks, all by default, in place, from its recordings."""
    build.execute_notebooks(paths)


@main.command()
def draw() -> None:
    """Draw the map, the poster, the figure that moves and the chart's data anew."""
    click.echo("\n".join(map(str, build.draw())))


if __name__ == "__main__":
    main()
