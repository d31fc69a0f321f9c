"""The Sphinx extension that makes the pages a site, without and with its public addresses."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sphinx.application", reason="Sphinx is not installed")

import memtraffic_site as site
from docutils import nodes
from docutils.utils import new_document

ADDRESS = "https://github.com/someone/book"
COLAB = "https://colab.research.google.com/github/someone/book/blob/gh-pages/_sources/book"
BASE = "https://example.org/book/"


def app(repository="", baseurl=""):
    theme, names = (
        {"repository_url": repository},
        {"html_title": "Traffic", "root_doc": "book/intro"},
    )
    config = SimpleNamespace(html_theme_options=theme, html_baseurl=baseurl, **names)
    return SimpleNamespace(config=config, env=SimpleNamespace(found_docs={"book/intro"}))


def italics(text):
    return nodes.emphasis("", text)


def paragraph(*parts):
    """A paragraph of nodes and texts."""
    return nodes.paragraph("", "", *(nodes.Text(it) if isinstance(it, str) else it for it in parts))


@pytest.mark.parametrize("tag", ['table class="dataframe words"', 'details class="claim"'])
def test_outputs_keep_units_with_their_numbers(tag):
    part = nodes.container("", nodes.raw("", f"<{tag}>8.4 µs, 4 of 64</{tag.split()[0]}>"))
    codes = [nodes.literal("", text) for text in ("5MN + 2M", "x - max - log(sum(exp(x - max)))")]
    part += paragraph(*codes)
    site.keep_units_in(part)
    assert "8.4\N{NO-BREAK SPACE}µs, 4 of 64" in part.astext()
    assert [code["classes"] for code in codes] == [["short"], []], "short code is in one piece"


@pytest.mark.parametrize(
    "address, link",
    [("", "../_sources/book/naive.ipynb"), (f"{ADDRESS}/", f"{COLAB}/naive.ipynb")],
    ids=["no-address", "address"],
)
def test_chapter_is_one_click_away_where_there_is_an_address(address, link):
    env = SimpleNamespace(app=app(address))
    state = SimpleNamespace(document=SimpleNamespace(settings=SimpleNamespace(env=env)))
    start = site.Start("start", ["naive"], {}, [], 1, 0, "", state, SimpleNamespace(reporter=None))
    [buttons] = start.run()
    line = site.chapter_line("naive", 1, site.repository(app(address)))
    assert 'href="naive.html"' in buttons.astext() and "About 1 minute · " in line
    other = site.chapter_line("occupancy", 2, address)
    assert 'href="naive.py"' in line and ".py" not in other and "About 2 minutes · " in other
    for made in (buttons.astext(), line):
        assert f'href="{link}"' in made and ("Download notebook" in made) == (not address)


def test_minutes_leave_folds_and_solutions_out():
    text = ["word\n" * 180, "<details>\n", "word\n" * 900, "</details>"]
    cells = [
        {"metadata": {}, "source": text},
        {"metadata": {"tags": ["hide-input"]}, "source": ["word " * 900]},
        {"metadata": {}, "source": ["word " * 180]},
    ]
    assert site.reading_minutes({"cells": cells}) == 2


def page(*paragraphs):
    return nodes.section("", *map(paragraph, paragraphs))


def test_description_is_whole_sentences():
    long = " ".join(["A sentence of some words ends here."] * 9)
    assert site.description(page("Short.", long)) == long[: 4 * 36 - 1]
    assert site.description(page("x" * 300)) == "x" * 300
    assert site.description(page()) == ""
    link = nodes.raw("", '<a title="x">a &lt; b</a>', format="html")
    linked = paragraph("It starts with a link: ", link, " is what it says here.")
    assert site.description(linked) == "It starts with a link: a < b is what it says here."


@pytest.mark.parametrize("base", ["", BASE], ids=["no-address", "address"])
def test_what_a_site_with_an_address_has_more(base, tmp_path):
    """A shared link shows a card, a missing page leads home; a rung is offered in any case."""
    text = 'It says "this" and <that> about the traffic of a kernel.'
    context = {"title": "1. <em>Title</em>", "docstitle": "Memory traffic", "metatags": ""}
    made = app(baseurl=base)
    site.add_metadata(made, "book/a", "", context, page(text))
    tags = context["metatags"]
    escaped = "It says &quot;this&quot; and &lt;that&gt; about the traffic of a kernel."
    assert f'<meta name="description" content="{escaped}">' in tags
    card = f'<meta property="og:url" content="{BASE}book/a.html">'
    assert (card in tags) == ('"og:title" content="1. Title"' in tags) == ("og:" in tags)
    assert ("og:" in tags) == bool(base) and (site.ROOT / "book/_static" / site.CARD).is_file()

    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "naive.html").touch()
    (tmp_path / "_static").mkdir()
    script = tmp_path / "_static" / "language_data.js"
    script.write_text("const NAMES = [];")
    entry = nodes.definition_list_item("", nodes.term("", "SM"), nodes.term("", "CU"))
    made.env.get_doctree = {"book/glossary": nodes.definition_list("", entry)}.get
    made.builder, made.outdir = SimpleNamespace(format="html"), tmp_path
    site.write_files(made, None)
    assert [it.relative_to(tmp_path).as_posix() for it in tmp_path.rglob("*.py")] == [
        "book/naive.py"
    ]
    assert script.read_text() == 'const NAMES = [["sm", "cu"]];'
    missing, pages = tmp_path / "404.html", tmp_path / "sitemap.txt"
    assert missing.exists() == pages.exists() == bool(base)
    assert not base or f'href="{base}"' in missing.read_text("utf-8")
    assert not base or f"{BASE}book/intro.html\n" in pages.read_text("utf-8")


# ---- boxes and captions


def transformed(transform, *parts):
    document = new_document("page")
    document += parts
    transform(document).run()
    return document


def test_boxes_and_the_next_chapter_have_their_classes():
    def bold(word, rest):
        return paragraph("", nodes.strong("", word), rest)

    quotes = [nodes.block_quote("", bold(word, " 3.")) for word in ("Takeaway.", "Open questions.")]
    parts = [bold("Next:", " why?"), bold("Why care?", " It is."), paragraph("Text.")]
    times = paragraph(italics("About ten minutes."), "\nYou."), paragraph("About 12 minutes.")
    last = paragraph(italics("It is. About six minutes."))
    quoted = paragraph(nodes.pending(site.Boxes))  # a value of another page, as yet
    document = transformed(site.Boxes, *quotes, *parts, *times, last, quoted)
    classes = [it["classes"] for it in document.children]
    assert classes == [["takeaway"], ["open-questions"], ["next"], *[[]] * 5]
    assert [it.astext().strip() for it in document.children[5:]] == ["You.", "It is.", ""]


def test_pictures_and_italics_after_them_are_numbered_figures():
    """Other italics are no captions: before a picture, after a sentence, among other words."""
    images = [nodes.image(uri=uri) for uri in ("b.png", "c.png")]
    output = nodes.container("", *images, nodes.literal_block("", "✓ 3"))
    cell = nodes.container("", nodes.container("", output))
    two = paragraph(italics("C"), "\n", italics("D"))
    first, sentence = (paragraph(*it, nodes.image(uri="a.svg")) for it in ([], ["See "]))
    others = [paragraph(nodes.image(uri="e.svg")), paragraph(italics("Not"), " only italics.")]
    others += [sentence, paragraph(italics("E")), paragraph("Text."), paragraph(italics("F"))]
    parts = [paragraph(italics("Before.")), first, paragraph(italics("A.")), cell, two, *others]
    found = transformed(site.Captions, *parts)
    figures = list(found.findall(nodes.figure))
    assert [it.next_node(nodes.image)["uri"] for it in figures] == ["a.svg", "c.png"]
    captions = [it.next_node(nodes.caption).astext() for it in figures]
    assert captions == ["Figure 1. A.", "Figure 2. C\nD"]
    assert [it["ids"] for it in figures] == [["figure-1"], ["figure-2"]]
    assert found.children == [parts[0], figures[0], cell, *others]
    assert figures[1].parent is output and output.children[2].astext() == "✓ 3"
