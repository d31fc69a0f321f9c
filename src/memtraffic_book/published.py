"""What others published about their softmax: a kernel's reference and tables of bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd
from torch import Tensor

from memtraffic_book import units


def softmax_argmax(x: Tensor) -> Tensor:
    """The naive softmax as it is usually published."""
    row_max = x.max(dim=1)[0]
    numerator = (x - row_max[:, None]).exp()
    return numerator / numerator.sum(dim=1)[:, None]


def load_bandwidth() -> pd.DataFrame:
    """The bandwidths that others printed for their softmax kernels.

    Columns: `source`, `series`, `n_rows`, `n_cols`, `gb_per_s` (2MN elements of float32 over the
    time). The sources are those of the chapter that shows them; most do not name their GPU.
    """
    return pd.read_csv(Path(__file__).with_name("published_bandwidth.csv"))


class Verdict(NamedTuple):
    """What a source says about its kernel, and what its own table says. holds: None if nothing."""

    source: str
    claim: str
    finding: str
    holds: bool | None


CLAIMS = {  # what the text says, by the series of a table that it compares with
    "torch": "noticeably faster than torch.softmax",
    "naive_jit": "4x faster than the Torch JIT",
    "naive": "about 4x from fusing",
}
NOTICEABLE = 1.1  # times as fast, at most widths
NEAR_FOUR = 0.9  # of four times as fast, as a mean


def verdicts() -> list[Verdict]:
    """The claims of the sources, each with the verdict that the source's own table gives."""
    printed = load_bandwidth().pivot(
        index=["source", "n_cols"], columns="series", values="gb_per_s"
    )
    return [
        Verdict(source, CLAIMS[series], *_judge(series, (rows["triton"] / rows[series]).dropna()))
        for series in CLAIMS
        for source, rows in printed.groupby("source")
        if series != "naive" or rows[series].notna().any()
    ]


def _judge(series: str, ratios: pd.Series[float]) -> tuple[str, bool | None]:
    """What the ratios of speed of a table say, and whether the claim about the series holds."""
    if ratios.empty:
        return "the table does not have it", None
    mean = float(ratios.prod() ** (1 / len(ratios)))
    low, high = map(units.format_ratio, (ratios.min(), ratios.max()))
    finding = f"{low} to {high}, mean {units.format_ratio(mean)}"
    if series == "torch":
        faster, more = int((ratios > 1).sum()), int((ratios > NOTICEABLE).sum())
        finding += f"; faster at {faster} of {len(ratios)} widths, by a tenth at {more}"
        return finding, more > len(ratios) / 2
    return finding, mean > NEAR_FOUR * 4
