"""The folded cells of `book/scoreboard.ipynb`."""

from __future__ import annotations

import pandas as pd

from memtraffic_book import claim, tables, units
from memtraffic_book.chapters import ship

ROWS, COLUMNS = (8, 4096), (49, 128, 197, 4096, 8192, 50257, 151936)  # that the table shows
SHORT = {"compile(torch.softmax)": "compile"}


def load() -> pd.DataFrame:
    """All that was timed, with columns that say of which type it was and whether with gradient."""
    return pd.concat(
        frame.assign(gradient="yes" if gradient else "no")
        for gradient in ship.BELOW
        for frame in ship.load(gradient).values()
    )


def noted(frame: pd.DataFrame, *kinds: str) -> pd.Series[bool]:
    """Whether the note of each result begins with one of `kinds`."""
    return frame["note"].astype(str).str.startswith(kinds)


def show_versions() -> None:
    """Shows the version of each package, and in how many of all cases it was timed."""
    every = load()
    every = every[every["impl"] != "copy"]
    tables.show(
        every["impl"].unique(),
        kernel=lambda name: name,
        version=lambda name: max(every.loc[every["impl"] == name, "version"].astype(str)) or "–",
        timed=lambda name: int((every.loc[every["impl"] == name, "us"] > 0).sum()),
        **{
            kind: lambda name, kind=kind: int(noted(every[every["impl"] == name], kind).sum())
            for kind in ("refused", "wrong", "imprecise")
        },
    )
    timed = every[every["us"] > 0]
    apart = abs(timed["us_reversed"] / timed["us"] - 1).median()
    claim(
        f"In the rounds of reverse order, half of the medians are within "
        f"{units.format_percent(apart)} of those of all rounds (2 % allowed).",
        apart < 0.02,
    )


def show_wrong() -> None:
    """Names each kernel whose result was wrong, and claims how many of all results were."""
    every = load()
    bad = every[noted(every, "wrong")]
    for (name, n, dtype), part in bad.groupby(["impl", "n", "dtype"]):
        row = part.iloc[0]
        note = row["note"].partition(",")[0]
        print(f"{name} {row['version']}, {row['m']} x {n}, {dtype}: {note}")
    judged = ~noted(every, "absent", "refused")
    claim(
        f"Of {judged.sum()} results that were judged, {len(bad)} are wrong, none of them by "
        f"torch.softmax or memtraffic.softmax, and {noted(every, 'imprecise').sum()} others are "
        "imprecise.",
        not {ship.TORCH, ship.OURS} & {*bad["impl"]},
    )


def show_times() -> None:
    """Shows the time on the GPU at each shape, and the fastest of the other packages."""
    every = load()
    some = every[every["m"].isin(ROWS) & every["n"].isin(COLUMNS)]
    us = some.pivot(index=["n", "m", "dtype", "gradient"], columns="impl", values="us")
    others = us.drop(columns=["copy", ship.TORCH, ship.OURS]).where(lambda it: it > 0)
    names = others.idxmin(axis=1).replace(SHORT)
    tables.show_filtered(
        us.index,
        columns=lambda key: key[0],
        rows_=lambda key: key[1],
        type=lambda key: key[2],
        gradient=lambda key: key[3],
        torch=lambda key: units.format_us(us[ship.TORCH][key]),
        ours=lambda key: units.format_us(us[ship.OURS][key]),
        fastest_other=lambda key: f"{names[key]} {units.format_us(others.loc[key].min())}",
    )
