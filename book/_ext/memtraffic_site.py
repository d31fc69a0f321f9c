"""What this book adds to its pages as a site: where they lead, and how they are found.

Under each chapter's title stands how long it takes and where to run it; the first page has buttons
and a card for each chapter; each page has a description, and a card for those who share its link. A
term of the glossary shows its definition where a page first uses it, and a number stays on one line
with its unit. A picture and the paragraph in italics after it become a numbered figure.
Nothing is asked from another origin when a page is read.
"""

from __future__ import annotations

import functools
import html
import json
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode, depart_HideCellInput, visit_HideCellInput
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
RUNGS = ROOT / "src" / "memtraffic" / "kernels" / "softmax"
SUBTITLE = "where every byte goes"
CARD = "map.png"  # what a shared link shows, in book/_static
COLAB = "https://colab.research.google.com"
FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}  # tags of cells
BOOK, VERSION = ROOT / "book", ROOT / "src" / "memtraffic" / "__init__.py"
MAIN = (ROOT / "_toc.yml").read_text("utf-8").partition("caption: Reference")[0]
PATH = re.findall(r"file: book/(\S+)", MAIN)  # the chapters
MOVED = {"warps": "tiled", "cdna": "occupancy"}  # a page that was, the one that has its text
NO_BREAK = "\N{NO-BREAK SPACE}"
NOT_TEXT = nodes.literal, nodes.literal_block, nodes.reference, nodes.math, nodes.raw
# Terms of the glossary that sentences use in their everyday sense, too.
AMBIGUOUS = {"round", "level", "stage", "cold", "warm", "element", "host", "specification"}
SHORT = 16  # characters of code that stay on one line
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
    holds; without, the reader downloads the same notebook.
    """
    parts = [f"About {minutes} minute{'s' * (minutes > 1)}"]
    if name in PATH:
        parts.append(f"{PATH.index(name) + 1} of {len(PATH)}")
    if (RUNGS / f"{name}.py").exists():
        parts.append(f'<a href="{name}.py" download>the kernel\'s file</a>')
    parts.append(notebook_link(name, repository, "Open in Colab", "Download notebook"))
    return f'<p class="chapter-line">{" · ".join(parts)}</p>'


def notebook_link(name: str, repository: str, there: str, here: str) -> str:
    """A link to the notebook of a chapter: on Colab, or where the site has no repository, here."""
    address = colab_address(name, repository)
    here = f'<a href="../_sources/book/{name}.ipynb" download>{here}</a>'
    return f'<a href="{address}">{there}</a>' if address else here


def colab_address(name: str, repository: str) -> str:
    """Where Colab opens the chapter `name`, escaped for HTML; "" without a repository."""
    path = html.escape(repository.removeprefix("https://github.com"))
    return f"{COLAB}/github{path}/blob/gh-pages/_sources/book/{name}.ipynb" if path else ""


def notebook(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def repository(app: Sphinx) -> str:
    return str(app.config.html_theme_options.get("repository_url", "")).rstrip("/")


class Start(SphinxDirective):
    """Buttons that lead into the chapter that is its argument, and how to get the package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name, pages = self.arguments[0], (notebook(BOOK / f"{it}.ipynb") for it in PATH)
        hours = sum(map(reading_minutes, pages)) / 60
        version = re.search(r'__version__ = "(.*)"', VERSION.read_text("utf-8"))[1]
        wheel = f"../memtraffic-{version}-py3-none-any.whl"
        link = notebook_link(name, repository(self.env.app), "Open in Colab", "Download notebook")
        text = (
            f'<p class="start"><a href="{name}.html">Start</a>{link}</p>'
            f'<p class="hint">{len(PATH)} chapters, about {hours:.1f} hours of reading. '
            '<a href="../notebooks.zip" download>All notebooks</a> run on Colab as they are; '
            '<a href="../memtraffic.tar.gz" download>the sources</a> build this site.</p>'
            f'<p class="install">The meters: <code>pip install <a href="{wheel}">'
            f"{wheel[3:]}</a></code>, then <code>memtraffic formula naive</code></p>"
        )
        return [nodes.raw("", text, format="html")]


class Cards(SphinxDirective):
    """A card for each chapter of the content, whose lines are `name: its question`."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        cards = []
        for line in self.content:
            name, _, question = line.partition(": ")
            path = BOOK / f"{name}.ipynb"
            self.env.note_dependency(str(path))
            chapter = notebook(path)
            title = re.match(r"# ([^:\n]+)", "".join(chapter["cells"][0]["source"]))[1]
            cards.append(
                f'<li><a href="{name}.html" data-number="{PATH.index(name) + 1}">'
                f"{html.escape(title)}</a><span>{html.escape(question)}</span>"
                f"<small>{reading_minutes(chapter)} minutes</small></li>"
            )
        return [nodes.raw("", f'<ol class="cards">{"".join(cards)}</ol>', format="html")]


def add_chapter_line(app: Sphinx, doctree: nodes.document, page: str) -> None:
    path = Path(app.env.doc2path(page))
    if path.suffix == ".ipynb":
        line = chapter_line(path.stem, reading_minutes(notebook(path)), repository(app))
        section = next(iter(doctree.findall(nodes.section)))
        section.insert(1, nodes.raw("", line, format="html"))


# ---- the text


@functools.cache
def units() -> re.Pattern[str]:
    """A space in 129 µs or in 4096 × 781: the unit is one of the book's or a common noun."""
    known = runpy.run_path(str(ROOT / "src/memtraffic_book/units.py"))["UNITS"]
    known += ("KiB", "MiB", "GiB", "bytes", "bits", "rows", "columns", "elements", "numbers")
    known += ("warps", "threads", "programs", "percent")
    unit = rf"(?:{'|'.join(map(re.escape, known))})(?![\w/])"
    return re.compile(rf"(?<=\d) (?={unit}|[x×] \d)|(?<=\d [x×]) (?=\d)")


def keep_units(text: str) -> str:
    """`text` with no-break spaces before units and around the × of a shape.

    >>> keep_units("129 µs for 4096 x 781 columns").count(NO_BREAK)
    4
    """
    return units().sub(NO_BREAK, text)


def definitions(glossary: nodes.document) -> dict[str, tuple[str, str]]:
    """The definition of each term and the id of its entry; no ambiguous term."""
    found = {}
    for item in glossary.findall(nodes.definition_list_item):
        *terms, definition = item.children
        text = " ".join(definition.astext().split())
        text = re.sub(r" See [^.]*\.$", "", text)
        named = ((term.astext(), term["ids"][0]) for term in terms)
        found |= {name: (text, anchor) for name, anchor in named if name not in AMBIGUOUS}
    return found


def term_pattern(name: str) -> str:
    """Where a term stands: also in the plural and, but for an acronym, at the start of a sentence.

    >>> [bool(re.search(term_pattern("warp"), it)) for it in ("Warps do", "a warp-wide", "warped")]
    [True, True, False]
    """
    plain = re.escape(name)
    if name[:2].islower():
        plain = f"[{name[0]}{name[0].upper()}]{re.escape(name[1:])}"
    return rf"(?<![\w.-]){plain}(?:e?s)?(?!\w)"


def link_terms(doctree: nodes.document, known: dict[str, tuple[str, str]]) -> None:
    """Makes the first use of each term a link to the glossary, with its definition."""
    names = sorted(known, key=len, reverse=True)  # a longer term before one that it contains
    for element in list(doctree.findall(is_text)):
        if not any(isinstance(it, nodes.paragraph) for it in around(element)):
            continue
        for node in [it for it in element.children if isinstance(it, nodes.Text)]:
            text, parts = node.astext(), []
            pattern = "|".join(f"({term_pattern(name)})" for name in names)
            while names and (match := re.search(pattern, text)):
                name = names.pop(match.lastindex - 1)
                definition, anchor = known[name]
                link = (
                    f'<a class="term" href="glossary.html#{anchor}" '
                    f'aria-description="{html.escape(definition)}">{html.escape(match[0])}</a>'
                )
                parts += [nodes.Text(text[: match.start()]), nodes.raw("", link, format="html")]
                text = text[match.end() :]
                pattern = "|".join(f"({term_pattern(name)})" for name in names)
            if parts:
                parts.append(nodes.Text(text))
                place = element.children.index(node)
                element[place : place + 1] = [it for it in parts if it.astext()]


def is_text(node: nodes.Node) -> bool:
    """Whether a node holds running text: no code, no mathematics, no heading, no link."""
    return isinstance(node, nodes.Element) and not any(
        isinstance(it, NOT_TEXT) for it in (node, *around(node))
    )


def around(node: nodes.Node | None) -> Iterator[nodes.Node]:
    """A node and the elements that hold it."""
    while node is not None:
        yield node
        node = node.parent


def keep_units_in(part: nodes.Element) -> None:
    """Puts no-break spaces before the units in a part of a page; in its claims and tables, too.

    Code of a few characters, which stays in one piece, gets the class `short`.
    """
    for element in list(part.findall(is_text)):
        for i, node in enumerate(element.children):
            if isinstance(node, nodes.Text) and units().search(node):
                element[i] = nodes.Text(keep_units(node))
    for raw in part.findall(nodes.raw):
        if re.search('class="(claim|dataframe)', raw.astext()):
            raw.children = [nodes.Text(keep_units(raw.astext()))]
    for code in part.findall(nodes.literal):
        if len(code.astext()) <= SHORT:
            code["classes"].append("short")


def mend_titles(app: Sphinx, env: BuildEnvironment) -> None:
    """Does so in the titles that the lists of pages and sections show, which are links."""
    for part in (*env.titles.values(), *env.tocs.values()):
        for text in list(part.findall(nodes.Text)):
            text.parent.replace(text, nodes.Text(keep_units(text)))


def mend_text(app: Sphinx, doctree: nodes.document, page: str) -> None:
    keep_units_in(doctree)
    if page.startswith("book/") and page not in ("book/glossary", "book/api"):
        link_terms(doctree, definitions(app.env.get_doctree("book/glossary")))


# What a paragraph or a box is for, by its first words in bold.
KINDS = {"Takeaway.": "takeaway", "Open questions.": "open-questions", "Next:": "next"}


MINUTES = r"\s*\bAbout [\w-]+ minutes\.\s*"


class Boxes(SphinxPostTransform):
    """Gives a takeaway, open questions and the link to the next chapter a class each.

    The reading time that a notebook says stands under the title already, and goes from the text.
    """

    default_priority = 4.2  # before italics are taken for captions

    def run(self, **options: Any) -> None:
        for paragraph in list(self.document.findall(nodes.paragraph)):
            # MyST begins a paragraph in bold with an empty text.
            first = next((it for it in paragraph if it.astext()), paragraph)
            if isinstance(first, nodes.strong) and first.astext() in KINDS:
                quoted = isinstance(paragraph.parent, nodes.block_quote)
                box = paragraph.parent if quoted else paragraph
                box["classes"].append(KINDS[first.astext()])
            for part in [it for it in paragraph.findall(nodes.Text) if re.search(MINUTES, it)]:
                part.parent.replace(part, nodes.Text(re.sub(MINUTES, "", part)))
                if not paragraph.astext().strip() and not paragraph.next_node(nodes.image):
                    paragraph.parent.remove(paragraph)


class Captions(SphinxPostTransform):
    """Makes a picture and the paragraph in italics after it a figure, numbered through the page.

    The picture is a paragraph's, or the last that the cell before it drew.
    """

    default_priority = 4.5  # outputs are chosen at 4, figures that move are put in at 5

    def run(self, **options: Any) -> None:
        number = 0
        for paragraph in list(self.document.findall(in_italics)):
            picture = picture_before(paragraph)
            if picture is not None:
                number += 1
                caption = nodes.caption("", "", nodes.strong("", f"Figure {number}. "))
                for part in paragraph:
                    caption += part.children if isinstance(part, nodes.emphasis) else part
                figure = nodes.figure("", ids=[f"figure-{number}"])
                place = picture.parent
                if isinstance(place, nodes.paragraph):
                    picture, place = place, place.parent
                place.replace(picture, figure)
                figure += [
                    *(picture if isinstance(picture, nodes.paragraph) else [picture]),
                    caption,
                ]
                paragraph.parent.remove(paragraph)


def in_italics(node: nodes.Node) -> bool:
    """Whether a node is a paragraph of nothing but italics."""
    return (
        isinstance(node, nodes.paragraph)
        and any(isinstance(it, nodes.emphasis) for it in node)
        and all(isinstance(it, nodes.emphasis) or not it.astext().strip() for it in node)
    )


def picture_before(paragraph: nodes.paragraph) -> nodes.image | None:
    """The image that stands directly before a paragraph, alone or as an output of a cell."""
    before = paragraph.previous_sibling()
    if not isinstance(before, nodes.paragraph | nodes.container):
        return None
    if isinstance(before, nodes.paragraph) and any(
        not isinstance(it, nodes.image) and it.astext().strip() for it in before
    ):
        return None
    images = list(before.findall(nodes.image))
    return images[-1] if images else None


def visit_fold(writer: Any, node: HideCodeCellNode) -> None:
    """The fold of MyST-NB, without a label that hides its title from a screen reader."""
    start = len(writer.body)
    visit_HideCellInput(writer, node)
    made = "".join(writer.body[start:])
    writer.body[start:] = [made.replace(' aria-label="Toggle hidden content"', "")]


# ---- how a page is found


def description(doctree: nodes.document) -> str:
    """The first sentences of a page, as many as a search engine shows."""
    paragraphs = (it for it in doctree.findall(nodes.paragraph) if len(it.astext()) > 40)
    parts = (
        html.unescape(re.sub("<.*?>", "", it)) if isinstance(it.parent, nodes.raw) else it
        for it in next(paragraphs, nodes.paragraph()).findall(nodes.Text)
    )
    text = " ".join("".join(parts).split())
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
    for rung in RUNGS.glob("*.py"):  # which the page of the same name offers
        if (folder / "book" / f"{rung.stem}.html").exists():
            shutil.copy(rung, folder / "book")
    title = html.escape(app.config.html_title)
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    moved = {"index": f"{app.config.root_doc}.html"}
    moved |= {f"book/{old}": f"{new}.html" for old, new in MOVED.items()}
    for old, new in moved.items():
        refresh = f'<meta http-equiv="refresh" content="0; url={new}">'
        text = f'{page}{refresh}<p><a href="{new}">{title}</a></p></html>\n'
        (folder / f"{old}.html").write_text(text, "utf-8")
    terms = app.env.get_doctree("book/glossary").findall(nodes.definition_list_item)
    names = [[it.astext().lower() for it in term.findall(nodes.term)] for term in terms]
    search = folder / "_static" / "language_data.js"  # search-order.js is part of it
    text = search.read_text("utf-8").replace("NAMES = [];", f"NAMES = {json.dumps(names)};")
    search.write_text(text, "utf-8")
    whole = f"# {title}: {SUBTITLE}\n\n- [The whole book as Markdown](memtraffic.md)\n"
    (folder / "llms.txt").write_text(whole, "utf-8")  # `make book` writes that file
    base = html.escape(app.config.html_baseurl.rstrip("/"))
    if base:  # a missing page may be in any folder, so its link must be absolute
        text = f'{page}<h1>There is no such page</h1><p><a href="{base}/">{title}</a></p></html>\n'
        (folder / "404.html").write_text(text, "utf-8")
        pages = "".join(f"{base}/{it}.html\n" for it in sorted(app.env.found_docs))
        (folder / "sitemap.txt").write_text(pages, "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("start", Start)
    app.add_directive("chapters", Cards)
    app.connect("html-page-context", add_metadata)
    app.add_post_transform(Boxes)
    app.add_post_transform(Captions)
    app.add_node(HideCodeCellNode, override=True, html=(visit_fold, depart_HideCellInput))
    app.connect("env-updated", mend_titles)
    app.connect("doctree-resolved", mend_text)
    app.connect("doctree-resolved", add_chapter_line)
    app.connect("build-finished", write_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
