"""The built site, as a browser gets it: `pytest tests/book/test_site.py --site _build/html`."""

import functools
import json
import re
import zipfile
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pandas as pd
import pytest
from bs4 import BeautifulSoup, NavigableString
from notebooks import MACHINE_PATH, ROOT, TOC, folded, load

import memtraffic

PATH, _, _ = TOC.partition("caption: Reference")
PAGES = re.findall(r"(?:root|file): (\S+)", TOC)
ON_PATH = re.findall(r"file: (\S+)", PATH)
CHAPTERS = [page for page in PAGES if (ROOT / f"{page}.ipynb").exists()]
# `repository.url` in _config.yml is the one place of the public address.
[ADDRESS] = re.findall(r'^  url: "(.*?)"', (ROOT / "_config.yml").read_text("utf-8"), re.M)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.I)  # https:, mailto:, data:
MARKUP = r"\{(?:glue|cite|doc|ref|term|numref|math|py)\b|:::|```|\[\[?\w*\]\(|<details"
NO_TEXT = r"<(pre|code|style|script|head|svg)\b.*?</\1>"
per_page = pytest.mark.parametrize("name", PAGES)
per_chapter = pytest.mark.parametrize("name", CHAPTERS)


@functools.cache
def read(path):
    return BeautifulSoup(path.read_text("utf-8"), "html.parser")


@functools.cache
def values(path, *names):
    """The values of these attributes on a page."""
    return [element[name] for name in names for element in read(path).select(f"[{name}]")]


def title(path):
    return read(path).title.get_text().strip()


@pytest.fixture(scope="module")
def site(request):
    folder = request.config.getoption("--site")
    if not folder:
        pytest.skip("no site to check: give the folder of a built one, --site _build/html")
    return Path(folder).resolve()


@pytest.fixture
def path(site, name):
    return site / f"{name}.html"


@pytest.fixture
def page(path):
    return read(path)


def test_local_links_lead_to_files_and_elements(site):
    broken = []
    for path in sorted(site.rglob("*.html")):
        if "_static" in path.relative_to(site).parts:  # the theme's own
            continue
        for link in filter(lambda it: not ELSEWHERE.match(it), values(path, "href", "src")):
            target, fragment = urldefrag(link)
            target = unquote(target.split("?")[0])
            base = site if target.startswith("/") else path.parent
            file = (base / target.lstrip("/")).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            there = file.is_file() and file.is_relative_to(site)
            if there and fragment and file.suffix == ".html":
                there = unquote(fragment) in values(file, "id", "name")
            broken += [] if there else [f"{path}: {link}"]
    assert not broken


@per_page
def test_page_says_in_a_search_engine_what_it_is(page, path, site, name):
    """In a title and a description that no other page has."""
    others = [site / f"{other}.html" for other in PAGES if other != name]
    assert title(path) not in map(title, others) and title(path).count("Memory traffic") == 1
    description = page.select_one("meta[name=description]")["content"]
    assert not any(description in values(other, "content") for other in others)
    assert 30 < len(description) < 300 and len(page.select("article h1")) == 1
    links = values(path, "href", "src")
    assert any("favicon.svg" in link for link in links)
    assert [Path(link).name for link in links if ".css" in link] == ["site.css"]
    assert ADDRESS or not [link for link in links if "/issues/new" in link]


def test_files_beside_the_pages(site):
    index = (site / "index.html").read_text("utf-8")
    assert "<title>Memory traffic</title>" in index and f"url={PAGES[0]}.html" in index
    assert "url=tiled.html" in (site / "book" / "warps.html").read_text("utf-8")
    assert (site / "memtraffic.md").is_file()
    assert "](memtraffic.md)" in (site / "llms.txt").read_text("utf-8")
    with zipfile.ZipFile(site / "notebooks.zip") as archive:
        assert sorted(archive.namelist()) == sorted(f"{Path(it).name}.ipynb" for it in CHAPTERS)
    assert (site / "_static" / "site.css").stat().st_size < 125_000
    icons = site / "_static" / "scripts" / "fontawesome.js"  # but a few of them
    assert icons.stat().st_size < 20_000


def test_first_page_has_a_card_for_each_chapter_in_order(site):
    """With its number, its title, its question and its minutes; the parts are those of the toc."""
    text = (site / f"{PAGES[0]}.html").read_text("utf-8")
    link = r'<li><a href="(.+?).html" data-number="(\d+)">'
    card = link + r"(.+?)</a><span>(.+?)</span><small>(.+?)</small>"
    links, numbers, titles, questions, minutes = zip(*re.findall(card, text), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(ON_PATH) + 1))
    assert [f"book/{it}" for it in links] == ON_PATH
    for name, start in zip(ON_PATH, titles, strict=True):
        assert f". {start}" in title(site / f"{name}.html")
    assert all(question.endswith("?") for question in questions)
    assert all(re.fullmatch(r"[1-9]\d? minutes", it) for it in minutes)
    headings = [re.sub("<.*?>", "", it) for it in re.findall(r"<h3>(.*?)<a class", text)]
    assert headings == re.findall(r'caption: "(.*)"', PATH)


@per_page
def test_text_of_a_page_is_whole(page, path, name):
    """No markup is left in it, no reference open; each glued value is there, and no own path."""
    strings = [it for it in page.body.find_all(string=True) if type(it) is NavigableString]
    text = "".join(it for it in strings if not it.find_parent(["pre", "code"]))
    assert not re.findall(rf".{{0,30}}(?:{MARKUP}).{{0,30}}", text)
    assert not page.select(".problematic, .system-message")
    assert "undefined label" not in text and "papermill.record" not in text
    [written] = (ROOT / name).parent.glob(f"{Path(name).name}.[im]*")  # .ipynb or .md
    assert len(page.select(".pasted-text")) == written.read_text("utf-8").count("{glue:text}`")
    assert not MACHINE_PATH.findall("".join(strings))
    assert all(it.get("alt", "").strip() not in ("", it["src"]) for it in page.select("img"))
    assert not page.select(".cell_output table:not(.dataframe)")
    text = re.sub(NO_TEXT, "", path.read_text("utf-8"), flags=re.S)
    assert not re.findall(r"\d (?:µs|ms|ns|GB/s|TB/s|kB|MB|GB|%)(?!\w)", text)


@per_chapter
def test_line_under_the_title_and_card_of_the_next(site, page, name):
    """What the line says, test_memtraffic_site judges; what it offers is there.

    The notebook is the one that memtraffic_book.colab writes, with the package inside.
    """
    [line] = page.select("h1 + p.chapter-line")
    links, file = [it["href"] for it in line.select("a")], f"{Path(name).name}.py"
    rung = ROOT / "src" / "memtraffic" / "kernels" / "softmax" / file
    assert (file in links) == rung.exists()
    if rung.exists():
        assert (site / "book" / file).read_bytes() == rung.read_bytes()
    assert any(link.endswith(f"{name}.ipynb") for link in links)
    assert name not in ON_PATH or page.select("p.next")
    assert 'set_up(\\"' in (site / "_sources" / f"{name}.ipynb").read_text("utf-8")


def test_reference_describes_the_front_door(site):
    described = values(site / "book" / "api.html", "id")
    for name in memtraffic.__all__:  # a module has an entry for each of its names
        full = f"memtraffic.{name}"
        assert any(entry == full or entry.startswith(f"{full}.") for entry in described), full


def test_recordings_page_names_every_recording(site):
    seen = read(site / "book" / "recordings.html").get_text()
    for path in (ROOT / "book" / "recordings").glob("*/machine.json"):
        machine = json.loads(path.read_text("utf-8"))
        entries = machine["experiments"].values()
        facts = {machine["gpu"], path.parent.name, *(entry["date"] for entry in entries)}
        facts |= {entry["commit"][:10] for entry in entries}
        assert not [fact for fact in facts if fact not in seen]


@per_chapter
def test_each_picture_of_a_chapter_is_a_numbered_figure(page):
    """Which it is where a paragraph of only italics follows it."""
    pictures = page.select("article :is(img, figure.moving)")
    assert not [it for it in pictures if not it.find_parent("figure", id=re.compile("^figure-"))]


@per_chapter
def test_fold_shows_the_title_of_its_cell(page, path, name):
    """As Colab does, and a screen reader: no label stands in its place, nor it in the code."""
    cells = filter(folded, load(ROOT / f"{name}.ipynb").cells)
    titles = [cell.source.splitlines()[0].removeprefix("# @title ") for cell in cells]
    shown = [it.get_text() for it in page.select("p.collapsed.admonition-title")]
    shown = [it for it in shown if it != "Code"]  # of a cell without one
    assert shown == [f"Code: {it}" for it in titles] and "# @title" not in path.read_text("utf-8")
    assert page.select("summary") and not page.select("summary[aria-label]")


@per_page
def test_terms_lead_to_the_glossary_and_say_their_definition(page, name):
    """Each term once; that the fragments exist, the test of local links checks."""
    terms = page.select("a.term")
    assert all(it["href"].startswith("glossary.html#term-") for it in terms)
    assert all(it["aria-description"] for it in terms)
    words = [it.get_text().lower().removesuffix("s") for it in terms]
    assert len(words) == len(set(words)) and (len(words) >= 5 or name not in ON_PATH)


# ---- in a browser

# The width of a page in pixels, its medium, its theme: wide, on a phone, on paper.
FORMS = [(1280, "screen", "dark"), (390, "screen", "light"), (700, "print", "light")]
# What is wrong with a page as it is shown: what leaves it or is cut off, text that is too faint,
# what a screen reader cannot name.
FAULTS = (Path(__file__).parent / "page_faults.js").read_text("utf-8").partition("\n")[2]


def faults(browser, paper=False):
    return browser.run("return " + FAULTS.replace("PAPER", json.dumps(paper)))


@pytest.mark.browser
def test_every_page_in_every_form(site, browser):
    """Nothing is asked from elsewhere, no script fails, and the page shows all that it has."""
    found = []
    for name in [*PAGES, "search", "genindex"]:
        browser.show(1280)
        found += [(name, text) for text in browser.open((site / f"{name}.html").as_uri())]
        assert not browser.run(
            "return document.querySelectorAll('[class*=fa-]:not(svg)').length"
        ), name
        for width, media, theme in FORMS:
            browser.show(width, media)
            browser.run(f"document.documentElement.dataset.theme = {theme!r}")
            found += [(name, width, text) for text in faults(browser, media == "print")]
    browser.show(1280)
    assert not found


@pytest.mark.browser
def test_every_editor_in_every_form(site, browser):
    """Opened, the first runs what its page shows and finds it right; then all is as on a page."""
    script = (Path(__file__).parent / "live_editor.js").read_text("utf-8")
    found = []
    for name in [it for it in PAGES if values(site / f"{it}.html", "data-live")]:
        browser.show(1280)
        browser.open((site / f"{name}.html").as_uri())
        said = browser.run(f"{script} await open(); return said();")
        found += [(name, text) for text in browser.complaints()]
        [start, *_] = map(json.loads, values(site / f"{name}.html", "data-live"))
        right = "✓" if start["options"]["name"] == "a softmax" else "✗"  # an exercise is a stub
        found += [] if said[-1].startswith(right) else [(name, said)]
        for width, media, theme in FORMS:
            browser.show(width, media)
            browser.run(f"document.documentElement.dataset.theme = {theme!r}")
            found += [(name, width, text) for text in faults(browser, media == "print")]
    browser.show(1280)
    assert not found


@pytest.mark.browser
def test_faults_of_a_page_are_found(browser, tmp_path):
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
    browser.show(1280)
    said = "\n".join(browser.open(page.as_uri()))
    assert "https://example.org/x.js" in said and "'no'" in said and "TypeError" in said
    wanted = ["wider", "cut off", "faint", "no name: <button", "no name: <a", "no label", "no alt"]
    wanted += ["the same id", "skips", "no language"]
    found = faults(browser)
    assert [sum(it.startswith(word) for it in found) for word in wanted] == [1] * 10, found
    assert len(found) == 10


@pytest.mark.browser
def test_definition_shows_on_focus_and_at_the_first_tap(site, browser):
    script = """
        const term = document.querySelector("a.term"), found = [];
        const shown = () => getComputedStyle(term, "::after").content.includes(
            term.getAttribute("aria-description").slice(0, 20));
        const tap = () => !term.dispatchEvent(new PointerEvent("click",
            { pointerType: "touch", bubbles: true, cancelable: true }));
        found.push(shown()); term.focus(); found.push(shown());
        term.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
        found.push(shown(), tap(), shown());
        addEventListener("click", (event) => {
          found.push(event.defaultPrevented); event.preventDefault(); });
        tap();
        return found;"""
    browser.open((site / "book/fused.html").as_uri())
    # At first, with the focus, after Escape; the first tap stays and shows it, the second leaves.
    assert browser.run(script) == [False, True, False, True, True, False]


@pytest.mark.browser
def test_page_has_its_theme_before_its_scripts_and_they_wait_for_its_style(site, browser):
    """In the text of a page only what is written into it asks for a script, which then waits."""
    start = read(site / "book/fused.html").head.find("script", string=re.compile("theme")).string
    theme = f"""localStorage.clear(); {start} return document.documentElement.dataset.theme;"""
    assert browser.open((site / "book/fused.html").as_uri()) == []
    found = []
    for preferred in ("dark", "light"):
        wish = {"name": "prefers-color-scheme", "value": preferred}
        browser.ask("Emulation.setEmulatedMedia", features=[wish])
        found.append(browser.run(theme))
    browser.show(1280)
    assert found == ["dark", "light"]
    for name in PAGES:
        assert not read(site / f"{name}.html").select("script[src]"), name
    written = browser.run(
        "return [...document.querySelectorAll('script[src]')].map((it) => it.defer)"
    )
    assert len(written) > 5 and all(written)


@pytest.mark.browser
def test_dark_page_is_printed_as_a_light_one(site, browser):
    browser.open((site / "book/fused.html").as_uri())
    script = """
        const root = document.documentElement, found = [];
        root.dataset.theme = "dark";
        dispatchEvent(new Event("beforeprint")); found.push(root.dataset.theme);
        dispatchEvent(new Event("afterprint")); found.push(root.dataset.theme);
        return found;"""
    assert browser.run(script) == ["light", "dark"]
    css = (ROOT / "book" / "_static" / "memtraffic.css").read_text("utf-8")
    assert all(
        "@media screen" in part.split("}")[-1] + part for part in css.split("filter: invert")[:-1]
    )


GUESSES = {  # an answer as a page has it, a guess, what is said of it
    ("5.29x", "5.3"): "Right.", ("129 µs", "64"): "2 times too low.",
    ("67,108,864", "80000000"): "19 % too high.", ("2 kB", "25"): "13 times too high.",
    ("96\N{NO-BREAK SPACE}%", "61"): "35 points too low.", ("0", "3"): "Off by 3.",
    ("4", "3"): "Off by 1.", ("5.2x", "5,2"): "Right.", ("4 µs", "1/5"): "A number, please.",
    ("62 percent", "50 %"): "12 points too low.",
}  # fmt: skip


@pytest.mark.browser
def test_guess_opens_the_answer_and_says_how_far_off_it_was(browser):
    fold = '<details class="guess"><summary>The answer</summary><p><strong>{}</strong>: so it is'
    body = "".join(f"{fold.format(answer)}.</p></details>" for answer, _ in GUESSES)
    body += '<details class="guess"><summary>The answer</summary><p>Words.</p></details>'
    script = f"""const guesses = {json.dumps([guess for _, guess in GUESSES])};
        return [...document.querySelectorAll("form")].map((form, i) => {{
          form.querySelector("input").value = guesses[i];
          form.requestSubmit();
          return [form.querySelector("output").textContent, form.nextElementSibling.open,
            form.querySelector("span").textContent, form.querySelector("label").textContent];
        }});"""
    found = browser.run_on(body, [ROOT / "book" / "_static" / "pages.js"], script)
    said, opened, units, labels = zip(*found, strict=True)
    assert list(said) == list(GUESSES.values())
    assert [it for it, text in zip(opened, said, strict=True) if "please" in text] == [False]
    assert sum(opened) == len(said) - 1 and units[:6] == ("x", "µs", "", "kB", "%", "")
    assert {it.strip() for it in labels} == {"Your guess"}


@pytest.mark.browser
def test_filter_shows_rows_that_have_all_chosen_values(browser):
    """A column with a value for each of more than twelve rows has no field."""
    lines = [(n, kind, f"{n}{kind}") for n in range(1, 9) for kind in "ab"]
    body = pd.DataFrame(lines, columns=["n", "kind", "us"]).to_html(index=False, classes="filtered")
    script = """const [n, kind, ...others] = document.querySelectorAll("select");
        const seen = () => [...document.querySelectorAll("tbody tr:not([hidden])")].length;
        const choose = (field, value) => {
          field.value = value;
          field.dispatchEvent(new Event("change"));
          return seen();
        };
        return [others.length, seen(), choose(n, "3"), choose(kind, "b"), choose(n, "")];"""
    found = browser.run_on(body, [ROOT / "book" / "_static" / "pages.js"], script)
    assert found == [0, 16, 2, 1, 8]


SEARCHES = {  # what stands first, as a part of its title and its anchor; a page that is found, too
    "warp": ("what a warp fetches", ""),
    "persistent kernel": ("Persistent kernels", ""),
    "occupancy": ("HIP/CDNA occupancy:", ""),
    "softmax": ("Naive softmax", ""),
    "sector": ("Glossary", "#term-sector"),
    "assert_traffic": ("memtraffic.testing.assert_traffic", "#memtraffic.testing.assert_traffic"),
    "Register spills": ("Glossary", "#term-register-spill", "Chunks"),
    "cache line": ("Glossary", "#term-cache-line", "Wide loads"),
    "vectorized": ("Glossary", "#term-vectorized", "Wide loads"),
    "HBM": ("Glossary", "#term-HBM", "Naive softmax"),
    "memtraffic.occupancy": ("memtraffic.occupancy", "#memtraffic.occupancy"),
}


@pytest.mark.browser
def test_search_finds_titles_first(site, browser):
    browser.open((site / "search.html").as_uri())
    script = f"""const found = {json.dumps(list(SEARCHES))}.map((query) => {{
          history.replaceState(null, "", "?q=" + encodeURIComponent(query));
          return Search._performSearch(...Search._parseQuery(query)).map((it) => it.slice(1, 3));
        }});
        const page = "<div id=jb-print-docs-body>Contents</div>"
          + "<div role=main><p class=chapter-line>9 minutes</p>Text</div>";
        return [...found, Search.htmlToText(page)];"""
    *found, excerpt = browser.run(script)
    for (query, (title, anchor, *others)), results in zip(SEARCHES.items(), found, strict=True):
        said, where = results[-1]
        assert title in said and where == anchor, query
        assert all(any(it in said for said, _ in results) for it in others), query
        entries = [where for _, where in results if where.startswith("#term-")]
        assert len(set(map(tuple, results))) == len(results) and len(entries) <= 1, query
    assert excerpt.strip() == "Text"
