"""The folded cells of `book/survey.ipynb`, and the three cases of `book/your-kernel.ipynb`."""

from __future__ import annotations

from textwrap import shorten

import pandas as pd

from memtraffic_book import claim, experiment, glue, survey, tables, units
from memtraffic_book.recording import PUBLISHED

TWICE = 2 / survey.EXACT  # a ratio from which on a pass moves twice the least
AGAIN = 1.5  # times the least, from which on a pass reads something again


def show_summary(table: pd.DataFrame) -> None:
    """Shows how many of all passes move the least, and claims that. table: of `survey.load`."""
    passes = survey.ratios(table)
    ways = {name: passes[passes["direction"] == name] for name in ("forward", "backward")}
    ways["both"] = passes
    tables.show(
        ways,
        passes=str,
        counted=lambda way: len(ways[way]),
        the_least=lambda way: (ways[way]["ratio"] <= survey.EXACT).sum(),
        twice_or_more=lambda way: (ways[way]["ratio"] >= TWICE).sum(),
    )
    refused, kernels = (
        table[table["reason"] != ""],
        len(table[["package", "kernel"]].drop_duplicates()),
    )
    least, twice = (passes["ratio"] <= survey.EXACT).sum(), (passes["ratio"] >= TWICE).sum()
    claim(
        f"Of {len(table)} passes of {kernels} kernels {len(refused)} are refused, and {least} of "
        f"the other {len(passes)} move no more than they must.",
        len(refused) + len(passes) == len(table),
    )
    glue("kernels", str(kernels))
    glue("packages", str(table["package"].nunique()))
    glue("passes", str(len(passes)))
    glue("least", f"{100 * least / len(passes):.0f} %")
    glue("twice", f"{100 * twice / len(passes):.0f} %")
    for row in refused.to_dict("records"):
        print(f"{survey.label(row)}: {shorten(row['reason'], 100, placeholder=' …')}")


def show_measured(table: pd.DataFrame) -> None:
    """Shows what passes read by count and by counter, and claims what comes from DRAM.

    That is from the recording: few readers have installed what was measured.
    """
    measured = experiment("survey_counters", gpu=PUBLISHED)
    frame = survey.beside(table, measured)
    tables.show(
        frame,
        kernel=survey.label,
        least=lambda row: units.format_bytes(row["least_reads"]),
        counted=lambda row: units.format_ratio(row["asked"]),
        requested=lambda row: units.format_ratio(row["requested"]),
        beyond_the_cache=lambda row: units.format_ratio(row["beyond"]),
    )
    for row in measured[measured["missing"] != ""].to_dict("records"):
        print(f"not measured: {survey.label(row)}: {row['missing']}")
    near = (frame["requested"] / frame["asked"] - 1).abs() <= 0.01
    claim(
        f"In {near.sum()} of {len(frame)} passes the loads request what was counted, within 1 % "
        "(at least half of them needed).",
        2 * near.sum() >= len(frame),
    )
    claim_rereads(frame)


def claim_rereads(frame: pd.DataFrame) -> None:
    """Claims how many of the passes that read something again get it from a cache.

    frame: of `survey.beside`.
    """
    again = frame[frame["asked"] > AGAIN]
    cached = again["beyond"] < 1.05
    claim(
        f"Of {len(again)} passes that read something again, {cached.sum()} fetch from DRAM at most "
        "5 % more than the least (at least half of them needed).",
        2 * cached.sum() >= len(again),
    )
    glue("again", str(len(again)))
    glue("cached", str(cached.sum()))
    glue("beyond", units.format_ratio(again["beyond"].max()))


# ---- three cases
