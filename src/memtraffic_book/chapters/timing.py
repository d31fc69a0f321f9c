"""The folded cells of `book/timing.ipynb`."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from memtraffic.benchmark.timing import level
from memtraffic_book import (
    claim,
    drift,
    experiment,
    experiments,
    figures,
    glue,
    recording,
    tables,
    units,
)
from memtraffic_book.catalog import EXPERIMENTS

FOLDERS = "nvidia-h200", "nvidia-h100-80gb-hbm3"
NARROW, WIDE = 512, 16384  # columns
SMALL, LARGE = (8, 1024), (4096, 4096)  # rows and columns of two calls
OURS = "memtraffic.softmax"
TIMES = ["us", "us_p20", "us_p80"]


def show_clocks() -> None:
    """Shows what two softmaxes take on the GPU and of their caller, and claims where these part."""
    calls = experiment("decision_float32", gpu=recording.PUBLISHED)
    us = calls.set_index(["impl", "m", "n"])[["us", "eager_us", "graph_us"]]
    tables.show(
        [(impl, *at) for at in (SMALL, LARGE) for impl in ("torch.softmax", OURS)],
        softmax=lambda key: key[0],
        matrix=lambda key: f"{key[1]} x {key[2]}",
        on_the_GPU=lambda key: units.format_us(us["us"][key]),
        called_in_a_row=lambda key: units.format_us(us["eager_us"][key]),
        in_a_CUDA_graph=lambda key: units.format_us(us["graph_us"][key]),
    )
    small, large = (us.loc[(OURS, *at)] for at in (SMALL, LARGE))
    shares = [row["eager_us"] / row["graph_us"] for row in (small, large)]
    claim(
        f"A call of {OURS} takes {units.format_ratio(shares[0])} what it takes in a CUDA graph at "
        f"{SMALL[0]} x {SMALL[1]}, and {units.format_ratio(shares[1])} at {LARGE[0]} x {LARGE[1]} "
        "(more, and less, than 2.00x needed).",
        shares[0] > 2 > shares[1],
    )
    glue("gpu_small", units.format_us(small["us"]))
    glue("called_small", units.format_us(small["eager_us"]))
    glue("torch_small", units.format_us(us["eager_us"][("torch.softmax", *SMALL)]))


def claim_floor() -> None:
    """Claims what two events take with nothing between them, and with an idle kernel."""
    launches = experiment("launch_floor").set_index("programs")["us"]
    nothing, idle = launches[0], launches[1]
    claim(
        f"Two events with nothing between them are {units.format_us(nothing)} apart, and "
        f"{units.format_us(idle)} with a kernel that does nothing.",
        0 < nothing < idle,
    )
    glue("idle", units.format_us(idle))


def show_cold() -> None:
    """Shows the time of a read with L2 cold and warm, and claims what it can be worth."""
    reads, roofs = experiments("l2_read", "roof")
    us = reads.pivot(index="mib", columns="cache", values="us")
    tables.show(
        [2, 32, 512],
        size=lambda mib: f"{mib} MiB",
        cold=lambda mib: f"{us['cold'][mib]:.1f} µs",
        warm=lambda mib: f"{us['warm'][mib]:.1f} µs",
    )
    ratio, later = (us["cold"] / us["warm"]).max(), us.loc[512, "cold"] - us.loc[512, "warm"]
    claim(
        f"A read is up to {units.format_ratio(ratio)} as fast warm as cold (more than 1.1x "
        "needed).",
        ratio > 1.1,
    )
    glue("later", units.format_us(later))
    glue("dirty", f"{later * 1e-6 * roofs['copy_gb_per_s'][0] * 1e3:.0f} MB")
    glue("l2", f"{roofs['l2_mib'][0] * 2**20 / 1e6:.0f} MB")


def draw_spread() -> pd.DataFrame:
    """Draws 15 medians of a copy, each with its percentiles. Returns the repetitions."""
    [repeats] = recording.experiments_for_verdicts("timing_repeats")
    lines, low, high, apart = {}, {}, {}, {}
    for n in (NARROW, WIDE):
        frame = repeats[(repeats["impl"] == "copy") & (repeats["n"] == n)]
        share = (frame.set_index("repeat")[TIMES] / frame["us"].median()) * 100
        name = f"{n} columns"
        lines[name], low[name], high[name] = (share[it] for it in TIMES)
        apart[n] = frame["us"].max() / frame["us"].min() - 1
    figures.plot_lines(
        lines,
        "repetition",
        "time, % of the median of the 15 medians",
        title="A median repeats well, but single calls of a small copy vary.",
        low=low,
        high=high,
    )
    narrow, wide = (units.format_percent(apart[n]) for n in (NARROW, WIDE))
    claim(
        f"The 15 medians lie within {narrow} at {NARROW} columns and {wide} at {WIDE} (less than "
        "10 % needed).",
        max(apart.values()) < 0.1,
    )
    glue("apart_narrow", narrow)
    glue("apart_wide", wide)
    return repeats


class Apart(NamedTuple):
    """How far two medians of one kernel lie apart: at the running example; at other shapes, from
    20 µs on; and below that, of one day. days: below that, of any two days, in µs."""

    wide: float
    long: float
    short: float
    days: float


def compare_again() -> None:
    """Claims how far the times of one kernel lie apart between experiments, on each GPU."""
    found = [_apart(folder) for folder in FOLDERS]
    for folder, it in zip(FOLDERS, found, strict=True):
        gpu = recording.load_machine(recording.root() / folder)["gpu"]
        claim(
            f"On the {gpu}, medians that were taken again differ by at most "
            f"{units.format_percent(it.wide)} at 4096 x {WIDE} (3 % allowed), by "
            f"{units.format_percent(it.long)} elsewhere (5 %), and under {drift.SHORT_US:g} µs by "
            f"{units.format_percent(it.short)} on one day (20 %) and by "
            f"{units.format_us(it.days)} on two (1 µs, 5 % of {drift.SHORT_US:g}).",
            it.wide < 0.03
            and it.long < 0.05
            and it.short < 0.2
            and it.days < 0.05 * drift.SHORT_US,
        )
    worst = Apart(*map(max, zip(*found, strict=True)))
    for name in ("wide", "long", "short"):
        glue(f"between_{name}", units.format_percent(getattr(worst, name)))
    glue("between_days", units.format_us(worst.days))


def _apart(name: str) -> Apart:
    folder, frames = recording.root() / name, []
    for id, entry in recording.load_machine(folder)["experiments"].items():
        options = EXPERIMENTS[id].arguments
        if options.get("inputs") or options.get("gradient"):
            continue  # where the names mean something else
        frame = recording.read(folder, EXPERIMENTS[id])
        if {"impl", "m", "n", "dtype", "us"} <= set(frame):
            if "layout" in frame:
                frame = frame[frame["layout"] == "packed"]
            timed = frame[frame["us"] > 0]
            medians = timed.groupby(["dtype", "m", "n", "impl"])["us"].median()
            frames.append(medians.reset_index().assign(day=entry["date"]))
    every, case = pd.concat(frames), ["dtype", "m", "n", "impl"]

    def apart(keys: list[str]) -> pd.DataFrame:
        times = every.groupby(keys)["us"].agg(["min", "max", "count"])
        times = times[times["count"] > 1].assign(us=times["max"] - times["min"])
        return times.assign(share=times["us"] / times["min"])

    ever, of_a_day = apart(case), apart([*case, "day"])
    short = ever["min"] < drift.SHORT_US
    return Apart(
        ever["share"].loc["float32", 4096, WIDE].max(),
        ever["share"][~short].max(),
        of_a_day["share"][of_a_day["min"] < drift.SHORT_US].max(),
        ever["us"][short].max(),
    )


def claim_level(repeats: pd.DataFrame) -> None:
    """Claims how often the repetitions call two kernels level. repeats: of `draw_spread`."""
    rounds = [frame.set_index(["n", "impl"])[TIMES] for _, frame in repeats.groupby("repeat")]
    for n in (NARROW, WIDE):
        told = [level(*(list(at.loc[n, name]) for name in ("tiled", "copy"))) for at in rounds]
        claim(
            f"At {n} columns tiled and the copy are level in {told.count(True)} of {len(told)} "
            "repetitions (13 must agree).",
            max(map(told.count, (True, False))) >= 13,
        )


def show_drift() -> None:
    """Shows which experiments differed most on other H200s, and claims how much half of them do."""
    worst = drift.read_drift()
    worst = worst[worst["column"] == "us"].set_index("experiment")
    apart = worst["difference"].abs()[worst["recorded"] >= drift.SHORT_US].sort_values()
    tables.show(
        apart.tail(3).index[::-1],
        experiment=str,
        time_differs_by=lambda id: units.format_percent(apart[id]),
    )
    claim(
        f"In {len(apart)} experiments the worst time is {drift.SHORT_US:g} µs or more; the median "
        f"of their differences is {units.format_percent(apart.median())} (less than 3 % needed).",
        apart.median() < 0.03,
    )
    glue("half_apart", units.format_percent(apart.median()))
    glue("most_apart", units.format_percent(apart.max()))
