"""The built site, as a browser gets it: `pytest tests/test_site.py --site _build/html`."""

import functools
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = re.findall(r"(?:root|file): (\S+)", (ROOT / "_toc.yml").read_text("utf-8"))
CHAPTERS = [page for page in PAGES if (ROOT / f"{page}.ipynb").exists()]
CONFIG = (ROOT / "_config.yml").read_text("utf-8")
[REPOSITORY] = re.findall(
    r"^repository:\n  url: https://github\.com/(\S+)", CONFIG, re.M
)
UNSEEN = {"script", "style", "template", "title"}
VOID = set("area base br col embed hr img input link meta source track wbr".split())
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.I)  # https:, mailto:, data:
PATH = re.compile(
    r"(?<![\w.~/-])/(?:home|root|tmp|usr|opt|var|mnt|work\w*|content|Users)\b|file:///|\b[A-Z]:\\\w"
)
per_page = pytest.mark.parametrize("name", PAGES)


class Page(HTMLParser):
    """What the tests ask of one page."""

    def __init__(self, html):
        super().__init__()
        self.open = []  # (tag, classes) of the elements around
        self.ids, self.links, self.images, self.titles, self.tables = (
            set(),
            [],
            [],
            [],
            [],
        )
        self.headings = 0  # of level one, in the article
        self.pasted = 0  # values that came out of cells into the text
        self.wrong = []  # classes by which Sphinx marks what it could not resolve
        self.seen = self.text = ""  # all that is seen, and that without code
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = {name: value or "" for name, value in attributes}
        classes = set(found.get("class", "").split())
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.wrong += sorted(classes & {"problematic", "system-message"})
        self.headings += tag == "h1" and self.within("article")
        self.pasted += "pasted-text" in classes
        if tag == "img":
            self.images.append((found.get("src", ""), found.get("alt", "").strip()))
        if tag == "table" and any("cell_output" in around for _, around in self.open):
            self.tables.append(classes)
        if tag not in VOID:
            self.open.append((tag, classes))

    def handle_endtag(self, tag):
        while tag in (name for name, _ in self.open) and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "title":
            self.titles.append(data.strip())
        if not self.within(*UNSEEN):
            self.seen += data
            if not self.within("pre", "code"):
                self.text += data

    def within(self, *tags):
        return any(name in tags for name, _ in self.open)


@functools.cache
def load(path):
    return Page(path.read_text("utf-8"))


@pytest.fixture
def site(request):
    folder = request.config.getoption("--site")
    if not folder:
        pytest.skip(
            "no site to check: give the folder of a built one, --site _build/html"
        )
    return Path(folder).resolve()


@pytest.fixture
def page(site, name):
    return load(site / f"{name}.html")


def local_links(site):
    """(page, link, file it leads to, fragment) of each link that stays on the site."""
    for path in sorted(site.rglob("*.html")):
        if "_static" in path.relative_to(site).parts:  # the theme's own
            continue
        for link in load(path).links:
            if not ELSEWHERE.match(link):
                target, fragment = urldefrag(link)
                target = unquote(target.split("?")[0])
                base = site if target.startswith("/") else path.parent
                found = (base / target.lstrip("/")).resolve() if target else path
                found = found / "index.html" if found.is_dir() else found
                yield path.relative_to(site), link, found, unquote(fragment)


def test_every_page_of_the_toc_is_there(site):
    missing = [
        name for name in ["index", *PAGES] if not (site / f"{name}.html").is_file()
    ]
    assert not missing, f"not in {site.name}: {missing}"


def test_local_links_lead_to_files(site):
    links = list(local_links(site))
    broken = [
        f"{path}: {link}"
        for path, link, found, _ in links
        if not (found.is_file() and found.is_relative_to(site))
    ]
    assert links and not broken, broken


def test_fragments_lead_to_elements(site):
    broken = [
        f"{path}: {link}"
        for path, link, found, fragment in local_links(site)
        if fragment
        and found.suffix == ".html"
        and found.is_file()
        and fragment not in load(found).ids
    ]
    assert not broken, broken


@per_page
def test_a_page_has_one_title_and_one_main_heading(page, name):
    assert page.titles and page.titles[0], f"{name}: no <title>"
    assert page.headings == 1, f"{name}: {page.headings} headings h1"


@per_page
def test_images_have_alt_text(page, name):
    bare = [source for source, alt in page.images if not alt or alt == source]
    assert not bare, f"{name}: no alt text: {bare}"


@per_page
def test_no_markup_is_left_in_the_text(page, name):
    raw = re.findall(
        r".{0,30}(?:\{(?:glue|cite|doc|ref|term|numref|math)\b|:::|```|\[\[?\w*\]\(|<details).{0,30}",
        page.text,
    )
    assert not raw, f"{name}: {raw}"


@per_page
def test_no_reference_is_left_open(page, name):
    assert not page.wrong, f"{name}: marked {page.wrong}"
    assert "undefined" not in page.text, f"{name}: says undefined"
    assert "papermill.record" not in page.text, (
        f"{name}: shows the record of a glued value"
    )


@per_page
def test_every_glued_value_is_in_the_text(page, name):
    [path] = (ROOT / name).parent.glob(f"{Path(name).name}.[im]*")  # .ipynb or .md
    wanted = path.read_text("utf-8").count("{glue:text}`")
    assert page.pasted == wanted, f"{name}: {page.pasted} of {wanted} glued values"


@per_page
def test_no_path_of_the_building_machine_is_seen(page, name):
    match = PATH.search(page.seen)
    assert not match, f"{name}: {page.seen[match.start() : match.start() + 60]!r}"


@per_page
def test_the_books_stylesheet_is_used(site, name):
    found = [
        target
        for path, link, target, _ in local_links(site)
        if str(path) == f"{name}.html" and "memtraffic.css" in link
    ]
    assert len(found) == 1 and found[0].is_file(), (
        f"{name}: stylesheet memtraffic.css is {found}"
    )


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_opens_on_colab(page, name):
    link = (
        f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/{name}.ipynb"
    )
    assert link in page.links, f"{name}: no link {link}"


@pytest.mark.parametrize("name", CHAPTERS)
def test_tables_of_outputs_have_the_books_style(page, name):
    plain = [classes for classes in page.tables if "dataframe" not in classes]
    assert not plain, f"{name}: tables of classes {plain}"


def test_the_reader_of_pages_sees_what_is_wrong():
    page = Page(
        '<title>T</title><article><h1 id="a">A {glue}</h1><img src="x.png"><script>"{doc"</script>'
        '<div class="cell_output"><p><table class="t"></table></div><table></table><code>{cite}</code>'
        '<span class="problematic">x</span></article><h1>print</h1>'
    )
    assert (page.titles, page.headings, page.ids) == (["T"], 1, {"a"})
    assert (page.images, page.links) == ([("x.png", "")], ["x.png"])
    assert (page.tables, page.wrong) == ([{"t"}], ["problematic"])
    assert (page.text, page.seen) == ("A {glue}xprint", "A {glue}{cite}xprint")
