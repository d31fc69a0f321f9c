"""A page as a list of blocks, which are text, tables and pictures, and how it is written."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Row: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Heading:
    """The heading of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """Sentences; what stands between backquotes is code."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells of text. Every column but the first `names` is aligned to the right."""

    columns: Row
    rows: list[Row]
    names: int = 1


@dataclass(frozen=True)
class Picture:
    """An SVG image. name: of its file, beside that of the page. alt: what it shows, in words."""

    name: str
    alt: str
    svg: str


Block: TypeAlias = Heading | Text | Table | Picture


@dataclass
class Page:
    """What a report says. title: its first heading."""

    title: str
    blocks: list[Block] = field(default_factory=list)


# ---- what is written


def to_markdown(page: Page, folder: str | None = None) -> str:
    """A page as Markdown. folder: what stands before the names of its pictures; None leaves these
    out."""
    parts = [f"# {_plain(page.title)}"]
    for block in page.blocks:
        match block:
            case Heading(text):
                parts.append(f"## {text}")
            case Text(text):
                parts.append(_plain(text))
            case Table(columns, rows, names):
                rule = ["---" if i < names else "---:" for i in range(len(columns))]
                lines = [columns, rule, *rows]
                cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
            case Picture(name, alt, _) if folder is not None:
                parts.append(f"![{_plain(alt)}]({folder}{name}.svg)")
    return "\n\n".join(parts)


def _plain(text: str) -> str:
    """Text in which nothing outside of code means anything to Markdown."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_\[\]<>|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; background: white;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #d1d9e0; padding: 0.25rem 0.6rem; text-align: left; }
.number { text-align: right; }
img { max-width: 100%; height: auto; }
""".strip()


def to_html(page: Page) -> str:
    """A page as HTML that needs no other file."""
    title = html.escape(page.title)
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>",
    ]
    for block in page.blocks:
        match block:
            case Heading(text):
                parts.append(f"<h2>{html.escape(text)}</h2>")
            case Text(text):
                parts.append(f"<p>{_inline(text)}</p>")
            case Table(columns, rows, names):
                parts.append(_html_table(columns, rows, names))
            case Picture(_, alt, svg):
                data = base64.b64encode(svg.encode()).decode()
                source = f"data:image/svg+xml;base64,{data}"
                parts.append(f'<img alt="{html.escape(alt)}" src="{source}">')
    return "\n".join([*parts, "</body>\n</html>"])


def _inline(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))


def _html_table(columns: Row, rows: Iterable[Row], names: int) -> str:
    def line(cells: Row, tag: str) -> str:
        kinds = ["" if i < names else ' class="number"' for i in range(len(cells))]
        scope = ' scope="col"' if tag == "th" else ""
        each = zip(cells, kinds, strict=True)
        return "".join(f"<{tag}{scope}{kind}>{_inline(cell)}</{tag}>" for cell, kind in each)

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(columns, 'th')}</tr></thead>"
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table></div>'


def write_page(page: Page, path: Path) -> list[Path]:
    """Writes a page to a file that ends in .md or .html; returns the files that it wrote.

    Beside Markdown lie its pictures. Raises OSError for a file that cannot be written.
    """
    if path.suffix.lower() == ".html":
        path.write_text(to_html(page) + "\n", encoding="utf-8")
        return [path]
    pictures = {path.with_name(f"{path.stem}.{block.name}.svg"): block.svg
                for block in page.blocks if isinstance(block, Picture)}  # fmt: skip
    path.write_text(to_markdown(page, f"{path.stem}.") + "\n", encoding="utf-8")
    for file, svg in pictures.items():
        file.write_text(svg, encoding="utf-8")
    return [path, *pictures]
