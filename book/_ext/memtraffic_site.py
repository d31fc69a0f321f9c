"""What this book adds to its pages as a site: where they lead, and how they are found.

Under each chapter's title stands how long it takes and where to run it; the first page has buttons
and a card for each chapter; each page has a description, and a card for those who share its link.
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
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
SUBTITLE = "where every byte goes"
CARD = "winners.png"  # what a shared link shows, in book/_static
COLAB = "https://colab.research.google.com"
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
    address = colab_address(name, repository)
    if address:
        parts.append(f'<a href="{address}">Run this chapter on Colab</a>')
    else:
        parts.append(
            f'Run this chapter on Colab: <a href="../_sources/book/{name}.ipynb" download>'
            f'download the notebook</a> and upload it at <a href="{COLAB}">'
            "colab.research.google.com</a>."
        )
    return f'<p class="chapter-line">{" · ".join(parts)}</p>'


def colab_address(name: str, repository: str) -> str:
    """Where Colab opens the chapter `name`, escaped for HTML; "" without a repository."""
    path = html.escape(repository.removeprefix("https://github.com"))
    return f"{COLAB}/github{path}/blob/gh-pages/_sources/book/{name}.ipynb" if path else ""


def notebook(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def repository(app: Sphinx) -> str:
    address: str = app.config.html_theme_options.get("repository_url", "")
    return address.rstrip("/")


class Start(SphinxDirective):
    """Buttons that lead into the chapter that is its argument, here and on Colab."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        address = colab_address(name, repository(self.env.app))
        colab = f'href="{address}"' if address else f'href="../_sources/book/{name}.ipynb" download'
        text = (
            f'<p class="start"><a href="{name}.html">Start</a>'
            f"<a {colab}>Run on Colab</a></p>"
            + (
                ""
                if address
                else f'<p class="hint">The notebook, to upload at '
                f'<a href="{COLAB}">colab.research.google.com</a>.</p>'
            )
        )
        return [nodes.raw("", text, format="html")]


class Cards(SphinxDirective):
    """A card for each chapter of the content, whose lines are `name: its question`."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        toc = (ROOT / "_toc.yml").read_text("utf-8")
        order = re.findall(r"file: book/(\S+)", toc)
        cards = []
        for line in self.content:
            name, _, question = line.partition(": ")
            path = ROOT / "book" / f"{name}.ipynb"
            self.env.note_dependency(str(path))
            chapter = notebook(path)
            title = re.match(r"# ([^:\n]+)", "".join(chapter["cells"][0]["source"]))[1]
            cards.append(
                f'<li value="{order.index(name) + 1}"><a href="{name}.html">{html.escape(title)}'
                f"</a><span>{html.escape(question)}</span>"
                f"<small>{reading_minutes(chapter)} minutes</small></li>"
            )
        return [nodes.raw("", f'<ol class="cards">{"".join(cards)}</ol>', format="html")]


def add_chapter_line(app: Sphinx, doctree: nodes.document, page: str) -> None:
    path = Path(app.env.doc2path(page))
    if path.suffix == ".ipynb":
        line = chapter_line(path.stem, reading_minutes(notebook(path)), repository(app))
        section = next(iter(doctree.findall(nodes.section)))
        section.insert(1, nodes.raw("", line, format="html"))


def description(doctree: nodes.document) -> str:
    """The first sentences of a page, as many as a search engine shows."""
    paragraphs = (it for it in doctree.findall(nodes.paragraph) if len(it.astext()) > 40)
    text = " ".join(next(paragraphs, nodes.paragraph()).astext().split())
    taken = ""
    for sentence in re.findall(r".+?[.?!:](?= |$)|.+$", text):
        if taken and len(taken + sentence) > 160:
            break
        taken += sentence
    return taken


def add_metadata(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """The description of a page and, where the site has an address, what a shared link shows."""
    if page == app.config.root_doc:
        context["title"], context["docstitle"] = f"{context['docstitle']}: {SUBTITLE}", ""
    if doctree is None:
        return
    facts = {"description": description(doctree)}
    base = app.config.html_baseurl.rstrip("/")
    if base:
        facts |= {
            "og:title": re.sub(r"<.*?>", "", context["title"]),
            "og:description": facts["description"],
            "og:type": "article",
            "og:url": f"{base}/{page}.html",
            "og:image": f"{base}/_static/{CARD}",
        }
    for name, value in facts.items():
        kind = "property" if name.startswith("og:") else "name"
        context["metatags"] += f'\n<meta {kind}="{name}" content="{html.escape(value)}">'


def write_files(app: Sphinx, exception: Exception | None) -> None:
    """The files of the site that are no pages of it."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    plain_files.write_plain_files(folder / "book")
    first = f"{app.config.root_doc}.html"
    title = html.escape(app.config.html_title)
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    refresh = f'<meta http-equiv="refresh" content="0; url={first}">'
    text = f'{page}{refresh}<p><a href="{first}">{title}</a></p></html>\n'
    (folder / "index.html").write_text(text, "utf-8")
    base = html.escape(app.config.html_baseurl)
    if base:  # a missing page may be in any folder, so its link must be absolute
        text = f'{page}<h1>There is no such page</h1><p><a href="{base}">{title}</a></p></html>\n'
        (folder / "404.html").write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("start", Start)
    app.add_directive("chapters", Cards)
    app.connect("html-page-context", add_metadata)
    app.connect("doctree-resolved", add_chapter_line)
    app.connect("build-finished", write_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
