"""The built site, as a browser gets it: `pytest tests/book/test_site.py --site _build/html`."""

import functools
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from browser import Browser, dump_dom, run_script
from notebooks import MACHINE_PATH, folded, load

import memtraffic

ROOT = Path(__file__).resolve().parents[2]
PAGES = re.findall(r"(?:root|file): (\S+)", (ROOT / "_toc.yml").read_text("utf-8"))
TOC, _, _ = (ROOT / "_toc.yml").read_text("utf-8").partition("caption: Reference")
ON_PATH = re.findall(r"file: (\S+)", TOC)
CHAPTERS = [page for page in PAGES if (ROOT / f"{page}.ipynb").exists()]
KERNELS = {"naive", "fused", "masked", "tiled", "chunks", "persistent"}
UNSEEN = {"script", "style", "template", "title"}
VOID = set("area base br col embed hr img input link meta source track wbr".split())
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.I)  # https:, mailto:, data:
MARKUP = r"\{(?:glue|cite|doc|ref|term|numref|math|py)\b|:::|```|\[\[?\w*\]\(|<details"
per_page = pytest.mark.parametrize("name", PAGES)
per_chapter = pytest.mark.parametrize("name", CHAPTERS)


class Page(HTMLParser):
    """What the tests ask of one page."""

    def __init__(self, html):
        super().__init__()
        self.open = []  # (tag, classes) of the elements around
        self.ids, self.links, self.images = set(), [], []
        self.titles, self.tables = [], []
        self.headings = 0  # of level one, in the article
        self.description = ""
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
        if found.get("name") == "description":
            self.description = found["content"]
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
def read(path):
    return Page(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def site(request):
    folder = request.config.getoption("--site")
    if not folder:
        pytest.skip("no site to check: give the folder of a built one, --site _build/html")
    return Path(folder).resolve()


@pytest.fixture
def page(site, name):
    return read(site / f"{name}.html")


@pytest.fixture(scope="module")
def local_links(site):
    """(page, link, file it leads to, fragment) of each link that stays on the site."""
    found = []
    for path in sorted(site.rglob("*.html")):
        if "_static" in path.relative_to(site).parts:  # the theme's own
            continue
        for link in read(path).links:
            if not ELSEWHERE.match(link):
                target, fragment = urldefrag(link)
                target = unquote(target.split("?")[0])
                base = site if target.startswith("/") else path.parent
                file = (base / target.lstrip("/")).resolve() if target else path
                file = file / "index.html" if file.is_dir() else file
                found.append((path.relative_to(site), link, file, unquote(fragment)))
    return found


def test_every_page_of_the_toc_is_there(site):
    assert not [name for name in ["index", *PAGES] if not (site / f"{name}.html").is_file()]


def test_local_links_lead_to_files(site, local_links):
    broken = [
        f"{path}: {link}"
        for path, link, file, _ in local_links
        if not (file.is_file() and file.is_relative_to(site))
    ]
    assert local_links and not broken


def test_fragments_lead_to_elements(local_links):
    broken = [
        f"{path}: {link}"
        for path, link, file, fragment in local_links
        if fragment and file.suffix == ".html" and file.is_file() and fragment not in read(file).ids
    ]
    assert not broken


@per_page
def test_page_has_one_title_and_one_main_heading(page, name):
    assert page.titles and page.titles[0]
    assert page.headings == 1


@per_page
def test_page_says_in_a_search_engine_what_it_is(page, site, name):
    """In a title and a description that no other page has; the first page leads there."""
    others = [read(site / f"{other}.html") for other in PAGES if other != name]
    assert page.titles[0] not in [other.titles[0] for other in others]
    assert page.titles[0].count("Memory traffic") == 1
    assert 30 < len(page.description) < 300
    assert page.description not in [other.description for other in others]
    assert any("favicon.svg" in link for link in page.links)


def test_index_leads_to_the_first_page(site):
    index = (site / "index.html").read_text("utf-8")
    assert "<title>Memory traffic</title>" in index
    assert f"url={PAGES[0]}.html" in index


def test_first_page_has_a_card_for_each_chapter_in_order(site):
    """With its number, its title, its question and its minutes; the parts are those of the toc."""
    toc = (ROOT / "_toc.yml").read_text("utf-8").partition("Reference")[0]
    names = re.findall(r"file: book/(\S+)", toc)
    text = (site / f"{PAGES[0]}.html").read_text("utf-8")
    link = r'<li><a href="(.+?).html" data-number="(\d+)">'
    card = link + r"(.+?)</a><span>(.+?)</span><small>(.+?)</small>"
    links, numbers, titles, questions, minutes = zip(*re.findall(card, text), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(names) + 1))
    assert list(links) == names
    for name, title in zip(names, titles, strict=True):
        assert f". {title}" in read(site / "book" / f"{name}.html").titles[0]
    assert all(question.endswith("?") for question in questions)
    assert all(re.fullmatch(r"[1-9]\d? minutes", it) for it in minutes)
    headings = [re.sub("<.*?>", "", it) for it in re.findall(r"<h3>(.*?)<a class", text)]
    assert headings == re.findall(r'caption: "(.*)"', toc)


@per_page
def test_images_have_alt_text(page, name):
    assert not [source for source, alt in page.images if not alt or alt == source]


@per_page
def test_no_markup_is_left_in_the_text(page, name):
    assert not re.findall(rf".{{0,30}}(?:{MARKUP}).{{0,30}}", page.text)


@per_page
def test_no_reference_is_left_open(page, name):
    assert not page.wrong
    assert "undefined label" not in page.text
    assert "papermill.record" not in page.text, "shows the record of a glued value"


@per_page
def test_every_glued_value_is_in_the_text(page, name):
    [path] = (ROOT / name).parent.glob(f"{Path(name).name}.[im]*")  # .ipynb or .md
    assert page.pasted == path.read_text("utf-8").count("{glue:text}`")


@per_page
def test_no_path_of_the_building_machine_is_seen(page, name):
    assert not [match.group() for match in MACHINE_PATH.finditer(page.seen)]


@per_page
def test_stylesheet_of_the_book_is_used(page, name):
    assert len([link for link in page.links if "memtraffic.css" in link]) == 1


@per_page
def test_buttons_lead_to_the_repository_or_are_not_there(page, name):
    """`repository.url` in _config.yml is the one place of the public address."""
    config = (ROOT / "_config.yml").read_text("utf-8")
    [address] = re.findall(r'^repository:\n  url: "?([^"\s]*)"?', config, re.M)
    launch = {link for link in page.links if "colab.research.google.com/github" in link}
    if not address:
        assert not launch
        assert not [link for link in page.links if "/issues/" in link]
    elif name in CHAPTERS:
        path = f"{address.removeprefix('https://github.com')}/blob/gh-pages/_sources/{name}.ipynb"
        assert launch == {f"https://colab.research.google.com/github{path}"}


@per_chapter
def test_line_under_the_title(site, page, name):
    """How long the chapter takes, its kernel's file as the package has it, and where to run it."""
    text = (site / f"{name}.html").read_text("utf-8")
    [line] = re.findall(r'</h1>\s*<p class="chapter-line">(.*?)</p>', text, re.S)
    line = Page(line)
    assert re.match(r"About [1-9]\d? minutes? ", line.seen)
    assert "Run this chapter on Colab" in line.seen
    file = f"{Path(name).name}.py"
    assert (file in line.links) == (Path(name).name in KERNELS)
    if file in line.links:
        rung = ROOT / "src" / "memtraffic" / "kernels" / "softmax" / file
        assert (site / "book" / file).read_bytes() == rung.read_bytes()
    assert any(link.endswith(f"{name}.ipynb") for link in line.links)
    assert ("upload it" in line.seen) == (f"../_sources/{name}.ipynb" in line.links)


@per_chapter
def test_tables_of_outputs_have_the_style_of_the_book(page, name):
    assert not [classes for classes in page.tables if "dataframe" not in classes]


@pytest.mark.parametrize("name", ON_PATH[1:-1])
def test_chapter_ends_with_the_card_of_the_next(site, name):
    assert '<p class="next">' in (site / f"{name}.html").read_text("utf-8")


@per_chapter
def test_downloaded_notebook_needs_nothing_else(page, site, name):
    """Its link gives the notebook that memtraffic_book.colab writes, with the package inside."""
    assert [link for link in page.links if link.endswith(f"_sources/{name}.ipynb")]
    path = site / "_sources" / f"{name}.ipynb"
    notebook = json.loads(path.read_text("utf-8"))
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert re.search(r'^ADDRESS = "(data:|https:)', "".join(first["source"]), re.M)
    assert "{glue:" not in path.read_text("utf-8")


def test_whole_book_is_one_file_of_markdown(site):
    """With a heading for each page, in the book's order, and nothing that only a browser shows."""
    text = (site / "memtraffic.md").read_text("utf-8")
    titles = re.findall(r"^# .*$", re.sub(r"^(```+).*?^\1", "", text, flags=re.M | re.S), re.M)
    assert len(titles) == len(PAGES)
    for name, title in zip(PAGES, titles, strict=True):
        seen = read(site / f"{name}.html").titles[0]
        assert title[2:12].replace("`", "") in html.unescape(seen) or name == PAGES[0]
    assert "{glue:" not in text and "base64" not in text
    assert "](memtraffic.md)" in (site / "llms.txt").read_text("utf-8")


def test_addresses_of_before_lead_on(site):
    """What had an address once: a page of that name leads to the one that has its text now."""
    assert "url=tiled.html" in (site / "book" / "warps.html").read_text("utf-8")


def test_reference_describes_the_front_door(site):
    described = read(site / "book" / "api.html").ids
    for name in memtraffic.__all__:  # a module has an entry for each of its names
        full = f"memtraffic.{name}"
        assert any(entry == full or entry.startswith(f"{full}.") for entry in described), full


def test_recordings_page_names_every_recording(site):
    seen = read(site / "book" / "recordings.html").seen
    for path in (ROOT / "book" / "recordings").glob("*/machine.json"):
        machine = json.loads(path.read_text("utf-8"))
        entries = machine["experiments"].values()
        facts = {machine["gpu"], path.parent.name, *(entry["date"] for entry in entries)}
        facts |= {entry["commit"][:10] for entry in entries}
        assert not [fact for fact in facts if fact not in seen]


@per_chapter
def test_fold_shows_the_title_of_its_cell(site, name):
    """As Colab does; the line of the title is not in the code again."""
    titles = [
        cell.source.splitlines()[0].removeprefix("# @title ")
        for cell in load(ROOT / f"{name}.ipynb").cells
        if folded(cell)
    ]
    page = (site / f"{name}.html").read_text("utf-8")
    shown = re.findall(r'<p class="collapsed admonition-title">Code: (.*?)</p>', page)
    assert list(map(html.unescape, shown)) == titles
    assert "# @title" not in page


@per_chapter
def test_fold_has_its_title_as_its_name(site, name):
    """A screen reader says it: no label stands in its place."""
    page = (site / f"{name}.html").read_text("utf-8")
    assert "<summary" in page and not re.findall(r"<summary[^>]*aria-label", page)


@per_page
def test_terms_lead_to_the_glossary_and_say_their_definition(site, page, name):
    """Each term once; that the fragments exist, `test_fragments_lead_to_elements` checks."""
    text = (site / f"{name}.html").read_text("utf-8")
    terms = re.findall(r'<a class="term" href="(.*?)" aria-description="(.+?)">(.+?)</a>', text)
    assert all(link.startswith("glossary.html#term-") for link, _, _ in terms)
    words = [word.lower().removesuffix("s") for _, _, word in terms]
    assert len(words) == len(set(words))
    if name in ON_PATH:
        assert len(words) >= 5


@per_page
def test_units_stay_with_their_numbers(site, page, name):
    """Outside of code and of what cells print."""
    text = (site / f"{name}.html").read_text("utf-8")
    text = re.sub(r"<(pre|code|style|script|head|svg)\b.*?</\1>", "", text, flags=re.S)
    assert not re.findall(r"\d (?:µs|ms|ns|GB/s|TB/s|kB|MB|GB|%)(?!\w)", text)


FORMS = {  # the width of a page in pixels, its medium, its theme
    "wide": (1280, "screen", "light"),
    "wide, dark": (1280, "screen", "dark"),
    "phone": (390, "screen", "light"),
    "phone, dark": (390, "screen", "dark"),
    "paper": (700, "print", "light"),
}
# What is wrong with a page as it is shown: what leaves it or is cut off, text that is too faint,
# what a screen reader cannot name.
FAULTS = (Path(__file__).parent / "page_faults.js").read_text("utf-8")


@pytest.mark.browser
def test_every_page_in_every_form(site, tmp_path):
    """Nothing is asked from elsewhere, no script fails, and the page shows all that it has."""
    found = []
    with Browser(tmp_path) as browser:
        for name in [*PAGES, "search", "genindex"]:
            browser.show(1280)
            events = browser.open((site / f"{name}.html").as_uri())
            found += [(name, text) for text in complaints(events)]
            for form, (width, media, theme) in FORMS.items():
                browser.show(width, media)
                browser.run(f"document.documentElement.dataset.theme = {theme!r}")
                assert not browser.run("document.querySelectorAll('i[class*=fa-]').length"), name
                faults = browser.run(FAULTS.replace("PAPER", json.dumps(media == "print")))
                found += [(name, form, text) for text in faults]
    assert not found


def complaints(events):
    """What a browser says of a page while it loads: requests to elsewhere, errors of scripts."""
    for event in events:
        method, said = event["method"], event["params"]
        if method == "Network.requestWillBeSent":
            if not said["request"]["url"].startswith(("file:", "data:", "blob:")):
                yield said["request"]["url"]
        elif method == "Runtime.exceptionThrown":
            yield str(said["exceptionDetails"].get("exception"))[:300]
        elif method == "Runtime.consoleAPICalled" and said["type"] in (
            "error",
            "warning",
            "assert",
        ):
            yield str(said["args"])[:300]
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            yield said["entry"]["text"]


def test_icons_are_few(site):
    assert (site / "_static" / "scripts" / "fontawesome.js").stat().st_size < 20_000


@pytest.mark.browser
def test_faults_of_a_page_are_found(tmp_path):
    """Each once: a page asks elsewhere, throws, and has ten faults."""
    page = tmp_path / "page.html"
    page.write_text(
        """<!doctype html><html><body style="margin: 0; background: white"><article>
<h1>T</h1><h3>skips a level</h3><p id="a">A</p><p id="a">A</p><img src="data:,">
<p style="color: #bbb">Too faint.</p><button></button><a href="#a"></a><input>
<div style="width: 200px; overflow: hidden"><table><tr><td style="min-width: 300px">x</table></div>
<div style="width: 2000px">wide</div></article>
<script src="https://example.org/x.js"></script><script>console.error("no"); a.b.c;</script>""",
        "utf-8",
    )
    with Browser(tmp_path) as browser:
        browser.show(1280)
        said = "\n".join(complaints(browser.open(page.as_uri())))
        assert "https://example.org/x.js" in said and "'no'" in said and "TypeError" in said
        faults = browser.run(FAULTS.replace("PAPER", "false"))
    wanted = ["wider", "cut off", "faint", "no name: <button", "no name: <a", "no label", "no alt"]
    wanted += ["the same id", "skips", "no language"]
    assert [sum(it.startswith(word) for it in faults) for word in wanted] == [1] * 10, faults
    assert len(faults) == 10


def in_browser(site, tmp_path, name, script):
    """What `script` returns, run in a frame's page of the site, whose window it gets as `it`."""
    wrapper = tmp_path / "frame.html"
    wrapper.write_text(
        f"""<!doctype html><meta charset="utf-8"><pre id="done"></pre>
<iframe src="{(site / name).as_uri()}" width="1000" height="800"></iframe><script>
addEventListener("load", async () => {{
  const run = async (it) => {{ {script} }};
  const found = await run(document.querySelector("iframe").contentWindow);
  document.getElementById("done").textContent = JSON.stringify(found);
}});</script>""",
        "utf-8",
    )
    dom = dump_dom(
        wrapper, tmp_path, "--allow-file-access-from-files", "--virtual-time-budget=9000"
    )
    [text] = re.findall(r'<pre id="done">(.*?)</pre>', dom, re.S)
    assert text, "the script did not come to its end"
    return json.loads(html.unescape(text))


@pytest.mark.browser
def test_definition_shows_on_focus_and_at_the_first_tap(site, tmp_path):
    script = """
        const term = it.document.querySelector("a.term"), page = it.document;
        const shown = () => it.getComputedStyle(term, "::after").content.includes(
            term.getAttribute("aria-description").slice(0, 20));
        const tap = () => !term.dispatchEvent(new it.PointerEvent("click",
            { pointerType: "touch", bubbles: true, cancelable: true }));
        page.addEventListener("click", (event) => last.push(event.defaultPrevented));
        const last = [], found = [shown()];
        term.focus(); found.push(shown());
        term.dispatchEvent(new it.KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
        found.push(shown());
        found.push(tap(), shown());
        it.addEventListener("click", (event) => {
          found.push(event.defaultPrevented); event.preventDefault(); });
        tap();
        return found;"""
    found = in_browser(site, tmp_path, "book/fused.html", script)
    # At first, with the focus, after Escape; the first tap stays and shows it, the second leaves.
    assert found == [False, True, False, True, True, False]


@pytest.mark.browser
def test_dark_page_is_printed_as_a_light_one(site, tmp_path):
    script = """
        const root = it.document.documentElement, found = [];
        root.dataset.theme = "dark";
        it.dispatchEvent(new it.Event("beforeprint")); found.push(root.dataset.theme);
        it.dispatchEvent(new it.Event("afterprint")); found.push(root.dataset.theme);
        return found;"""
    assert in_browser(site, tmp_path, "book/fused.html", script) == ["light", "dark"]
    css = (site / "_static" / "memtraffic.css").read_text("utf-8")
    assert all(
        "@media screen" in part.split("}")[-1] + part for part in css.split("filter: invert")[:-1]
    )


GUESSES = {  # an answer as a page has it, a guess, what is said of it
    ("5.29x", "5.3"): "Right.", ("129 µs", "64"): "2 times too low.",
    ("67,108,864", "80000000"): "19 % too high.", ("2 kB", "25"): "13 times too high.",
    ("96\N{NO-BREAK SPACE}%", "-4"): "Off by 100.", ("0", "3"): "Off by 3.",
}  # fmt: skip


@pytest.mark.browser
def test_guess_opens_the_answer_and_says_how_far_off_it_was(tmp_path):
    fold = '<details class="guess"><summary>The answer</summary><p><strong>{}</strong>: so it is'
    body = "".join(f"{fold.format(answer)}.</p></details>" for answer, _ in GUESSES)
    body += '<details class="guess"><summary>The answer</summary><p>Words.</p></details>'
    script = f"""const guesses = {json.dumps([guess for _, guess in GUESSES])}, found = [];
        document.querySelectorAll("form").forEach((form, i) => {{
          form.querySelector("input").value = guesses[i];
          form.requestSubmit();
          found.push([form.querySelector("output").textContent, form.nextElementSibling.open,
            form.querySelector("span").textContent, form.querySelector("label").textContent]);
        }});
        done(found);"""
    found = run_script(tmp_path, [ROOT / "book" / "_static" / "pages.js"], script, body)
    said, opened, units, labels = zip(*found, strict=True)
    assert list(said) == list(GUESSES.values())
    assert set(opened) == {True} and units == ("x", "µs", "", "kB", "%", "")
    assert {it.strip() for it in labels} == {"Your guess"}


SEARCHES = {  # what stands first, as the start of its title and of its anchor
    "warp": ("what a warp fetches", ""),
    "persistent kernel": ("Persistent kernels", ""),
    "occupancy": ("Occupancy:", ""),
    "softmax": ("Naive softmax", ""),
    "sector": ("Glossary", "#term-sector"),
    "memtraffic.occupancy": ("memtraffic.occupancy", "#memtraffic.occupancy"),
}


@pytest.mark.browser
def test_search_finds_titles_first(site, tmp_path):
    script = f"""
        const found = [];
        for (const query of {json.dumps(list(SEARCHES))}) {{
          it.history.replaceState(null, "", "?q=" + encodeURIComponent(query));
          const [best] = it.eval(`Search._performSearch(
              ...Search._parseQuery(${{JSON.stringify(query)}}))`).slice(-1);
          found.push([best[1], best[2]]);
        }}
        const page = "<div id=jb-print-docs-body>Contents</div><div role=main>Text</div>";
        found.push(it.eval("Search").htmlToText(page));
        return found;"""
    *found, excerpt = in_browser(site, tmp_path, "search.html", script)
    for (query, (title, anchor)), (said, where) in zip(SEARCHES.items(), found, strict=True):
        assert title in said and where == anchor, query
    assert excerpt.strip() == "Text"
