"""The survey of published kernels as a page shows it: ratios, a table, and counts beside counters.

`examples/survey` counted them: `book/recordings/survey.csv` has a row for each pass of a kernel. A
ratio is what a pass of a kernel moves, reads and writes together, over the least that it could.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
from IPython.display import display

from memtraffic.meters import polynomials
from memtraffic_book import units
from memtraffic_book.recording import RecordingError, root

LARGE = 4096  # stands for each letter of a formula in a ratio
EXACT = 1.01  # a ratio up to which a kernel moves the least, but for numbers as small as a row's
ITEMSIZE = 4  # bytes: what is measured is float32
AMOUNTS = ("reads", "writes", "least_reads", "least_writes")
COLUMNS = (
    *("package", "version", "kernel", "direction", "inputs", "reads", "writes", "least_reads"),
    *("least_writes", "at", "gpu", "note", "reason"),
)
TITLES = {
    "liger-kernel": "Liger",
    "flag-gems": "FlagGems",
    "fla-core": "flash-linear-attention",
    "conch-triton-kernels": "Conch",
    "torch": "torch.compile",
    "triton-tutorials": "Triton's tutorials",
}


def load() -> pd.DataFrame:
    """The survey as it was written, with texts in all columns, those of `examples/survey`.

    Raises RecordingError, which names the command that mends it, if it is missing or has others.
    """
    path, fix = root() / "survey.csv", "`python examples/survey/survey.py TUTORIALS` counts again"
    if not path.is_file():
        raise RecordingError(f"{path}: missing; {fix}")
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    if (found := tuple(frame.columns)) != COLUMNS:
        raise RecordingError(f"{path}: has columns {found}, not {COLUMNS}; {fix}")
    return frame


def evaluate(text: str, **sizes: int) -> float:
    """The elements of a formula at these sizes; of a number, the number.

    >>> evaluate("2MN + 11M + 5", M=10, N=100)
    2115.0
    >>> evaluate("(5/2)MM - 1", M=2)
    9.0

    Raises ValueError for text that is no formula, and for a letter without a size.
    """
    letters = tuple(sorted(sizes))
    coefficients = polynomials.parse(text, letters)
    return float(polynomials.evaluate(coefficients, letters, [sizes[name] for name in letters]))


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """The passes that were counted, with a column `ratio`, and `moved`, in elements.

    frame: the survey, as `survey.load` gives it. A formula is taken at LARGE for each letter, and
    numbers at the sizes `at` which they were counted.
    """
    counted = frame[frame["reason"] == ""].copy()
    values = [[_value(row[name]) for name in AMOUNTS] for row in counted.to_dict("records")]
    counted["moved"] = [reads + writes for reads, writes, *_ in values]
    counted["ratio"] = [(r + w) / (least_r + least_w) for r, w, least_r, least_w in values]
    return counted


def _value(text: str) -> float:
    return evaluate(text, **dict.fromkeys(re.findall("[A-Z]", text), LARGE))


# ---- the table


def show(frame: pd.DataFrame) -> None:
    """Shows the survey: a table for each package, folded, with its kernels by falling ratio.

    frame: as `survey.load` gives it. As plain text there is a line for each pass.
    """
    counted = ratios(frame)
    pages, lines = [], []
    for package, rows in frame.groupby("package", sort=False):
        known = counted[counted["package"] == package]
        kernels = rows["kernel"].nunique()
        exact = int((known["ratio"] <= EXACT).sum())
        title = (
            f"{TITLES[package]} {rows['version'].iloc[0].partition('+')[0]}: {kernels} kernels, "
            f"{len(known)} passes, {exact} of them move no more than they must"
        )
        plain, cells = zip(*_lines(rows, known["ratio"]), strict=True)
        lines += [title, *plain]
        pages.append(_folded(title, cells))
    display({"text/plain": "\n".join(lines), "text/html": "\n".join(pages)}, raw=True)


def label(row: Mapping[str, Any]) -> str:
    """What a line says of a pass: its package, its kernel, and whether it is the backward one.

    row: with `package`, `kernel` and `direction`.
    """
    name = f"{TITLES[row['package']]}: {row['kernel'].rpartition(':')[2].removeprefix('liger_')}"
    return f"{name}, backward" if row["direction"] == "backward" else name


def _lines(rows: pd.DataFrame, ratio: pd.Series) -> Iterator[tuple[str, str]]:
    """The lines of each kernel, that with the highest ratio first: its own, then its passes.

    Each as plain text and as the cells of a row of HTML.
    """
    highest = ratio.groupby(rows["kernel"].reindex(ratio.index)).max()
    kernels = sorted(rows["kernel"].unique(), key=lambda kernel: -highest.get(kernel, 0))
    for kernel in kernels:
        passes = rows[rows["kernel"] == kernel]
        first, name = passes.iloc[0], kernel.partition(":")[2]
        parts = first["inputs"], first["at"] and f"at {first['at']}", first["note"]
        notes = "; ".join(filter(None, parts))
        small = f"<small>{html.escape(notes)}</small>"
        yield f"{name}: {notes}", f'<th colspan="4">{html.escape(name)}<br>{small}</th>'
        for index, row in passes.iterrows():
            way, reason = row["direction"], row["reason"]
            if reason:
                told = f'<td colspan="3" class="reason">{html.escape(reason)}</td>'
                yield f"{way} | {reason}", f"<td>{way}</td>{told}"
                continue
            amounts = (_amount(row[it], row[f"least_{it}"]) for it in ("reads", "writes"))
            cells = way, *amounts, units.format_ratio(ratio[index])
            shown = (html.escape(cell).replace(" (", "<br>(") for cell in cells)
            yield " | ".join(cells), "".join(map("<td>{}</td>".format, shown))


def _amount(text: str, least: str) -> str:
    """What is moved, and in brackets the least, where that is something else."""
    moved, must = (f"{int(it):,}" if it.isdigit() else it for it in (text, least))
    return moved if text == least else f"{moved} ({must})"


def _folded(title: str, rows: Iterable[str]) -> str:
    """HTML: a table that opens at a click on its title. rows: the cells of each."""
    heads = "pass", "reads (least)", "writes (least)", "ratio"
    parts = [
        f"<details><summary>{html.escape(title)}</summary>",
        '<table class="dataframe survey"><thead><tr>',
        *map("<th>{}</th>".format, heads),
        "</tr></thead><tbody>",
        *map("<tr>{}</tr>".format, rows),
        "</tbody></table></details>",
    ]
    return "".join(parts)


# ---- beside the counters


def beside(frame: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """What was counted beside what was measured, for what did run: ratios of the least reads.

    frame: the survey. measured: the experiment `survey_counters`. Columns: `package`, `kernel`, its
    name alone, and `direction`; `least_reads`, in bytes of float32; `asked`, of what is counted;
    `requested`, by the loads; `beyond`, of what DRAM sent.
    """
    rows: list[list[Any]] = []
    for row in measured[measured["missing"] == ""].to_dict("records"):
        same = (frame["kernel"] == row["kernel"]) & (frame["direction"] == row["direction"])
        [counted] = frame[same].to_dict("records")
        sizes = {name: int(size) for name, size in re.findall(r"([A-Z])=(\d+)", row["at"])}
        reads, least = (
            evaluate(counted[name], **sizes) * ITEMSIZE for name in ("reads", "least_reads")
        )
        moved = reads, row["instruction_read_bytes"], row["dram_read_bytes"]
        key = row["package"], row["kernel"].partition(":")[2], row["direction"], least
        rows.append([*key, *(n_bytes / least for n_bytes in moved)])
    names = "package kernel direction least_reads asked requested beyond"
    return pd.DataFrame(rows, columns=names.split())
