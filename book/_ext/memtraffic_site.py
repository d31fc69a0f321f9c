"""What this book adds to each page as a site: the line under a chapter's title.

Nothing is asked from another origin when a page is read.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import plain_files
from docutils import nodes
from sphinx.application import Sphinx

FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}  # tags of cells
WORDS_PER_MINUTE = 180  # of a text with code, read by someone who knows little of it


def reading_minutes(notebook: dict[str, Any]) -> int:
    """Minutes to read a notebook: its text and its visible code, without folds and solutions."""
    words = 0
    for cell in notebook["cells"]:
        if not FOLDED.intersection(cell["metadata"].get("tags", ())):
            text = re.sub(r"<details>.*?</details>", "", "".join(cell["source"]), flags=re.S)
            words += len(text.split())
    return max(1, round(words / WORDS_PER_MINUTE))


def chapter_line(name: str, minutes: int, repository: str) -> str:
    """The line under the title of the chapter `name`, a page in the folder book, as HTML.

    repository: its address, or "". With one, Colab opens the notebook that the branch gh-pages
    holds; without, the reader downloads the same notebook and uploads it.
    """
    parts = [f"{minutes} minutes"]
    if name in plain_files.KERNELS:
        file = plain_files.file_name(name)
        parts.append(f'<a href="{file}" download>the kernel in one plain file</a>')
    colab = "https://colab.research.google.com"
    if repository:
        path = html.escape(repository.removeprefix("https://github.com"))
        address = f"{colab}/github{path}/blob/gh-pages/_sources/book/{name}.ipynb"
        parts.append(f'<a href="{address}">Run this chapter on Colab</a>')
    else:
        parts.append(
            f'Run this chapter on Colab: <a href="../_sources/book/{name}.ipynb" download>'
            f'download the notebook</a> and upload it at <a href="{colab}">'
            "colab.research.google.com</a>."
        )
    return f'<p class="chapter-line">{" · ".join(parts)}</p>'


def add_chapter_line(app: Sphinx, doctree: nodes.document, page: str) -> None:
    path = Path(app.env.doc2path(page))
    if path.suffix == ".ipynb":
        minutes = reading_minutes(json.loads(path.read_text("utf-8")))
        repository = app.config.html_theme_options.get("repository_url", "")
        line = chapter_line(path.stem, minutes, repository.rstrip("/"))
        section = next(iter(doctree.findall(nodes.section)))
        section.insert(1, nodes.raw("", line, format="html"))


def write_files(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        plain_files.write_plain_files(Path(app.outdir) / "book")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", add_chapter_line)
    app.connect("build-finished", write_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
