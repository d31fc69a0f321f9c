"""The Sphinx extension that makes the pages a site, without and with its public addresses."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sphinx.application", reason="Sphinx is not installed")

import memtraffic_site as site
from docutils import nodes
from docutils.utils import new_document

ADDRESS = "https://github.com/someone/book"
COLAB = "https://colab.research.google.com/github/someone/book/blob/gh-pages/_sources/book"


def app(repository="", baseurl=""):
    config = SimpleNamespace(
        html_theme_options={"repository_url": repository},
        html_baseurl=baseurl,
        html_title="Memory traffic",
        root_doc="book/intro",
    )
    return SimpleNamespace(config=config)


@pytest.mark.parametrize("tag", ['table class="dataframe words"', 'details class="claim"'])
def test_outputs_keep_units_with_their_numbers(tag):
    part = nodes.container("", nodes.raw("", f"<{tag}>8.4 µs, 4 of 64</{tag.split()[0]}>"))
    site.keep_units_in(part)
    assert "8.4\N{NO-BREAK SPACE}µs, 4 of 64" in part.astext()


def test_short_code_stays_in_one_piece():
    codes = [nodes.literal("", text) for text in ("5MN + 2M", "x - max - log(sum(exp(x - max)))")]
    site.keep_units_in(nodes.paragraph("", "", *codes))
    assert [code["classes"] for code in codes] == [["short"], []]


def test_line_with_an_address_is_one_click():
    line = site.chapter_line("occupancy", 12, ADDRESS)
    assert f'<a href="{COLAB}/occupancy.ipynb">Run this chapter on Colab</a>' in line
    assert "upload" not in line and ".py" not in line


@pytest.mark.parametrize(
    "address, link",
    [("", "../_sources/book/naive.ipynb"), (f"{ADDRESS}/", f"{COLAB}/naive.ipynb")],
    ids=["no-address", "address"],
)
def test_buttons_of_the_first_page(address, link):
    env = SimpleNamespace(app=app(address))
    state = SimpleNamespace(document=SimpleNamespace(settings=SimpleNamespace(env=env)))
    start = site.Start("start", ["naive"], {}, [], 1, 0, "", state, SimpleNamespace(reporter=None))
    [made] = start.run()
    assert 'href="naive.html"' in made.astext() and f'href="{link}"' in made.astext()
    assert ("upload" in made.astext()) == (not address)


def test_minutes_leave_folds_and_solutions_out():
    cells = [
        {"metadata": {}, "source": ["word " * 180, "<details>", "word " * 900, "</details>"]},
        {"metadata": {"tags": ["hide-input"]}, "source": ["word " * 900]},
        {"metadata": {}, "source": ["word " * 180]},
    ]
    assert site.reading_minutes({"cells": cells}) == 2


def page(*paragraphs):
    return nodes.section("", *(nodes.paragraph("", text) for text in paragraphs))


def test_description_is_whole_sentences():
    long = " ".join(["A sentence of some words ends here."] * 9)
    assert site.description(page("Short.", long)) == long[: 4 * 36 - 1]
    assert site.description(page("x" * 300)) == "x" * 300
    assert site.description(page()) == ""
    link = nodes.raw("", '<a title="x">a &lt; b</a>', format="html")
    linked = nodes.paragraph("", "", nodes.Text("It starts with a link: "), link)
    linked += nodes.Text(" is what it says here.")
    assert site.description(linked) == "It starts with a link: a < b is what it says here."


@pytest.mark.parametrize("base", ["", "https://example.org/book/"], ids=["no-address", "address"])
def test_shared_link_shows_a_card_where_the_site_has_an_address(base):
    text = 'It says "this" and <that> about the traffic of a kernel.'
    context = {"title": "1. <em>Title</em>", "docstitle": "Memory traffic", "metatags": ""}
    site.add_metadata(app(baseurl=base), "book/a", "", context, page(text))
    tags = context["metatags"]
    escaped = "It says &quot;this&quot; and &lt;that&gt; about the traffic of a kernel."
    assert f'<meta name="description" content="{escaped}">' in tags
    card = '<meta property="og:url" content="https://example.org/book/book/a.html">'
    assert (card in tags, "og:" in tags) == (bool(base), bool(base))
    if base:
        assert '"og:title" content="1. Title"' in tags
        assert (site.ROOT / "book/_static" / site.CARD).is_file()


@pytest.mark.parametrize("base", ["", "https://example.org/book/"], ids=["no-address", "address"])
def test_files_beside_the_pages(base, tmp_path):
    """A missing page leads home where the site has an address; a rung is offered as it is."""
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "naive.html").touch()
    made = app(baseurl=base)
    made.builder, made.outdir = SimpleNamespace(format="html"), tmp_path
    site.write_files(made, None)
    [offered] = tmp_path.rglob("*.py")
    rung = site.ROOT / "src/memtraffic/kernels/softmax/naive.py"
    assert offered.parent.name == "book" and offered.read_bytes() == rung.read_bytes()
    missing = tmp_path / "404.html"
    assert missing.exists() == bool(base)
    assert not base or f'href="{base}"' in missing.read_text("utf-8")


# ---- boxes and captions


def test_boxes_and_the_next_chapter_have_their_classes():
    def bold(word, rest):
        return nodes.paragraph("", "", nodes.Text(""), nodes.strong("", word), nodes.Text(rest))

    quotes = [nodes.block_quote("", bold(word, " 3.")) for word in ("Takeaway.", "Open questions.")]
    parts = [bold("Next:", " why?"), bold("Why care?", " It is."), nodes.paragraph("", "Text.")]
    document = new_document("page")
    time = nodes.paragraph("", "", nodes.emphasis("", "About ten minutes."), nodes.Text("\nYou."))
    last = nodes.paragraph("", "", nodes.emphasis("", "It is. About six minutes."))
    quoted = nodes.paragraph("", "", nodes.pending(site.Boxes))  # a value of another page, as yet
    parts += [time, nodes.paragraph("", "About 12 minutes."), last, quoted]
    document += [*quotes, *parts]
    site.Boxes(document).run()
    classes = [it["classes"] for it in document.children]
    assert classes == [["takeaway"], ["open-questions"], ["next"], *[[]] * 5]
    assert [it.astext().strip() for it in document.children[5:]] == ["You.", "It is.", ""]


def captioned(*parts):
    document = new_document("page")
    document += parts
    site.Captions(document).run()
    return document


def italics(text):
    return nodes.paragraph("", "", nodes.emphasis("", text))


def test_pictures_and_italics_after_them_are_numbered_figures():
    markdown = nodes.paragraph("", "", nodes.image(uri="a.svg"))
    output = nodes.container("", nodes.image(uri="b.png"), nodes.literal_block("", "✓ 3"))
    cell = nodes.container("", nodes.container("", output))
    two = nodes.paragraph(
        "", "", nodes.emphasis("", "C"), nodes.Text("\n"), nodes.emphasis("", "D")
    )
    found = captioned(markdown, italics("A."), cell, two, nodes.paragraph("", "Text."))
    figures = list(found.findall(nodes.figure))
    assert [it.next_node(nodes.image)["uri"] for it in figures] == ["a.svg", "b.png"]
    assert [it.next_node(nodes.caption).astext() for it in figures] == [
        "Figure 1. A.",
        "Figure 2. C\nD",
    ]
    assert [it["ids"] for it in figures] == [["figure-1"], ["figure-2"]]
    assert [it.astext() for it in found.findall(nodes.paragraph)] == ["Text."]
    assert figures[1].parent is output and output.children[1].astext() == "✓ 3"


def test_other_italics_are_no_captions():
    image = nodes.image(uri="a.svg")
    mixed = nodes.paragraph("", "", nodes.emphasis("", "Not"), nodes.Text(" only italics."))
    sentence = nodes.paragraph("", "", nodes.Text("See "), nodes.image(uri="b.svg"))
    text = nodes.paragraph("", "Text.")
    found = captioned(
        italics("First."),
        nodes.paragraph("", "", image),
        mixed,
        sentence,
        italics("B"),
        text,
        italics("C"),
    )
    assert not list(found.findall(nodes.figure)) and len(found.children) == 7
