"""The rules that every page of the book keeps, read off its sources."""

import ast
import itertools
import re
import symtable
from urllib.parse import unquote

import nbformat
import notebooks
import pytest
from notebooks import BOOK, MACHINE_PATH, PYTHON, ROOT, TOC, code_cells, folded, load, printed, tags

from memtraffic_book import colab, recording, units
from memtraffic_book.catalog import EXPERIMENTS

CHAPTERS = sorted(BOOK.glob("*.ipynb"))
LOOKED_UP = {"lab-notes", "scoreboard", "survey", "timing"}  # pages without exercises
TEACHING = [path for path in CHAPTERS if path.stem not in LOOKED_UP]
BOOK_PAGES = [*CHAPTERS, *sorted(BOOK.glob("*.md"))]
PAGES = [*BOOK_PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
ON_PATH = re.findall(r"file: book/(\S+)", TOC.partition("caption: Reference")[0])
MAIN = [path for path in TEACHING if path.stem in ON_PATH]
MOST = {"a chapter": 2400, "the main path": 30_000, "reference": 6_000, "folded lines": 600}
MOST |= {"new terms": 5, "code cells": 16}

FENCE = re.compile(r"^(```+|~~~+)(\{)?[^\n]*\n(.*?)^\1[ \t]*$", re.M | re.S)
DETAILS = re.compile(r"<details>.*?</details>", re.S)
SOLUTION = re.compile(r"<details><summary>Solution</summary>(.*?)</details>", re.S)
GUESS = r'<details class="guess"><summary>The answer</summary>(.*?)</details>'
GLUE = re.compile(r"\{glue:\w+\}`(?:(?P<page>[^`:]+)::)?(?P<name>[^`:]+)(?::[^`:]*)?`")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)[^)]*\)")
RAISES = "raises-exception"
# What the book says again and again, rounded: a copy of its example, what memory needs in flight
# on each SM, what a program should load.
ROUND = re.compile(r"\b(25 kB|2 kB)")


def per(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


def text_of(path):
    """The Markdown of a page."""
    return notebooks.markdown(load(path)) if path.suffix == ".ipynb" else path.read_text("utf-8")


def without_code(text):
    """Markdown without its blocks of code and comments. ```{name} is a directive: its text is."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    return FENCE.sub(lambda block: block[3] if block[2] else "", text)


def headings(text):
    return re.findall(r"^#{1,6} .*$", without_code(text), re.M)


def prose(text):
    """What is left of Markdown without code blocks, solutions, and text that comes out of cells."""
    return GLUE.sub("", without_code(DETAILS.sub("", text)))


def measured(text):
    """The measured numbers that are typed, but for the book's round ones."""
    text = ROUND.sub("", " ".join(text.split()))  # a line may end before the unit
    return [text[max(0, m.start() - 20) : m.end() + 8] for m in re.finditer(units.MEASURED, text)]


# ---- the files


@per(CHAPTERS)
def test_notebook_is_valid_was_run_once_and_asks_for_a_gpu_on_colab(path):
    """It starts with one line, which works from a checkout; Colab gets another.

    No mark in it, a comment or a tag, keeps nbval from comparing a cell.
    """
    nbformat.validate(load(path))
    assert not re.search(r"nbval[-_]|pytest_validate", path.read_text("utf-8"), re.I)
    metadata, code = load(path).metadata, code_cells(load(path))
    assert metadata.get("accelerator") == "GPU"
    assert metadata.get("colab") == {"gpuType": "T4"}
    assert metadata.kernelspec.name == "python3"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert code[0].source == code_cells(load(CHAPTERS[0]))[0].source
    assert code[0].source.split("  #")[0] == "import memtraffic"
    assert "remove-cell" in tags(code[0])


@per(PAGES)
def test_text_of_a_page(path):
    """Its links lead to files, its sentences have lines of their own, no measurement is typed."""
    text = text_of(path)
    targets = LINK.findall(without_code(text))
    assert not [target for target in targets if not (path.parent / unquote(target)).exists()]
    lists = r"^```\{api\}.*?^```$"  # names, not sentences
    lines = without_code(re.sub(lists, "", text, flags=re.M | re.S))
    assert not notebooks.lines_with_several_sentences(lines)
    assert not measured(prose(text)), "glue it from a cell"


# ---- code cells


@per(CHAPTERS)
def test_code_is_short_and_folded_everywhere_and_claims_are_sentences(path):
    """A page has its imports in its first visible cell."""
    notebook, imported = load(path), (ast.Import, ast.ImportFrom)
    assert len(notebook.cells) <= 60
    for source in PYTHON.findall(notebooks.markdown(notebook)):
        assert max(map(len, source.splitlines())) <= 88, source
    _, *shown = [cell.source for cell in code_cells(notebook) if notebooks.visible(cell)]
    for source in shown:
        assert not any(isinstance(it, imported) for it in ast.walk(ast.parse(source))), source
    for cell in code_cells(notebook):
        source, lines, shown = cell.source, cell.source.splitlines(), notebooks.visible(cell)
        ast.parse(source)  # refuses magics, ! and ?
        assert len([it for it in lines if it.strip()]) <= 40 and not (shown and len(lines) > 12)
        assert max(map(len, lines)) <= (88 if shown else 100), source
        assert not any(it.rstrip().endswith(";") for it in lines), "it hides no output from nbval"
        form = cell.metadata.get("cellView") == "form"
        assert len({folded(cell), form, source.startswith("# @title ")}) == 1, source
        for claim in re.findall(r"^✓ (.*)$", printed(cell), re.M):
            assert re.fullmatch(r"[A-Z\d](?=.*\d).*\.", claim), "no sentence with a number"


@per(CHAPTERS)
def test_sentence_stands_before_each_code_cell(path):
    """A folded cell may follow the visible one that it checks."""
    kinds = ["folded" if folded(cell) else cell.cell_type for cell in load(path).cells]
    pairs = enumerate(itertools.pairwise(kinds), 1)
    bare = [i for i, (before, kind) in pairs if kind == "code" and before != "markdown"]
    imports = kinds.index("code") + 1  # right after the set-up
    assert set(bare) <= {imports}


@per(CHAPTERS)
def test_visible_cells_need_no_name_of_those_that_are_folded(path):
    """After the set-up and the imports, they are what a reader copies."""
    known, hidden = set(), set()
    for i, cell in enumerate(code_cells(load(path))):
        names = symtable.symtable(cell.source, path.name, "exec").get_symbols()
        bound = {it.get_name() for it in names if it.is_assigned() or it.is_imported()}
        tree = [*ast.walk(ast.parse(cell.source))]
        if i > 1 and not notebooks.visible(cell):
            hidden |= bound
            continue
        known |= bound
        read = {it.id for it in tree if isinstance(it, ast.Name)}
        read -= {it.arg for it in tree if isinstance(it, ast.arg)}
        assert not read & hidden - known, cell.source


@per(TEACHING)
def test_each_section_with_code_is_compared_and_three_prove_something(path):
    """By a claim that holds or an error that is compared."""
    sections, now = {}, None
    for cell in load(path).cells:
        if cell.cell_type == "code":
            sections.setdefault(now, []).append(cell)
        for title in headings(cell.source) if cell.cell_type == "markdown" else ():
            now = title if title.startswith("## ") else now
    del sections[None]  # set-up and imports
    assert sections and all(any(it.outputs for it in code) for code in sections.values())
    proven = [
        title
        for title, code in sections.items()
        if any(RAISES in tags(it) or re.search(r"^[✓○] ", printed(it), re.M) for it in code)
    ]
    assert len(proven) >= min(3, len(sections)), f"claims in {proven} alone"


# ---- outputs


@per(CHAPTERS)
def test_outputs_are_tidy_meant_and_name_no_path_of_the_machine(path):
    assert not MACHINE_PATH.search(text_of(path))
    for cell in code_cells(load(path)):
        assert not MACHINE_PATH.search(cell.source + printed(cell)), cell.source
        assert "\x1b" not in printed(cell), "colour codes"
        assert not [it for it in cell.outputs if it.get("name") == "stderr"], printed(cell)
        errors = [it.traceback for it in cell.outputs if it.output_type == "error"]
        assert bool(errors) == (RAISES in tags(cell)), cell.source
        assert all(len(it) == 1 and "\n" not in it[0] for it in errors), "a long traceback"


@per(CHAPTERS)
def test_figures_have_alt_text_that_holds_on_any_machine(path):
    for cell in code_cells(load(path)):
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "").strip()
        drawn = sum("image/png" in output.get("data", {}) for output in cell.outputs)
        assert drawn <= 1, f"{drawn} figures share one alt text"
        assert bool(drawn) == bool(alt), f"{drawn} figures, mystnb.image.alt is {alt!r}"
        assert not measured(alt)


# ---- chapters


@per(CHAPTERS)
def test_what_is_glued_is_quoted(path):
    """On a page of the book."""
    quotes = [
        match["name"]
        for page in BOOK_PAGES
        for match in GLUE.finditer(without_code(text_of(page)))
        if page.parent / (match["page"] or page.name) == path
    ]
    assert not set(colab.glued(load(path))) - set(quotes)


@per(TEACHING)
def test_chapter_has_one_title_one_takeaway_and_its_sources_after_its_exercises(path):
    text, found = text_of(path), headings(text_of(path))
    assert [title for title in found if title.startswith("# ")] == found[:1]
    sections = [title for title in found if title.startswith("## ")]
    end = ["## Exercises", "## Sources", *["## You can now"] * (path in MAIN)]
    assert sections[-len(end) :] == end and all(sections.count(title) == 1 for title in end)
    [takeaway] = re.findall(r"^> \*\*Takeaway\.\*\* .*(?:\n>.*)*", text, re.M)
    assert re.search(r"\d|\{glue:", takeaway)
    assert text.count("> **Open questions.**") <= 1


@per(MAIN)
def test_chapter_is_short_has_a_guess_and_leads_to_the_next(path):
    assert notebooks.words(load(path)) <= MOST["a chapter"]
    assert len(code_cells(load(path))) <= MOST["code cells"]
    guesses = re.findall(GUESS, text_of(path), re.S)
    assert guesses and all(re.search(r"\*\*[^*]*(\d|\{glue:)", it) for it in guesses)
    _, _, end = text_of(path).partition("\n## You can now\n")
    assert 2 <= len(re.findall(r"^- ", end, re.M)) <= 4
    following = ON_PATH[ON_PATH.index(path.stem) + 1 :]
    [leads] = re.findall(r"\*\*Next:\*\* \[.+\]\((\S+)\)", end.strip().splitlines()[-1])
    assert leads == f"{following[0]}.ipynb" if following else (BOOK / leads).exists()


def test_book_is_short():
    """Of the reference its prose is counted, as it is written."""
    first_page = len((BOOK / "intro.md").read_text("utf-8").split())
    assert first_page + sum(notebooks.words(load(path)) for path in MAIN) <= MOST["the main path"]
    cells = [cell for path in CHAPTERS for cell in code_cells(load(path)) if folded(cell)]
    assert sum(len(cell.source.splitlines()) for cell in cells) <= MOST["folded lines"]
    others = [path for path in BOOK_PAGES if path not in MAIN and path.stem not in ("intro", "api")]
    assert sum(len(prose(text_of(path)).split()) for path in others) <= MOST["reference"]


def test_chapter_brings_few_new_terms():
    """Entries of the glossary that running text names here first, as the site links them."""
    site = pytest.importorskip("memtraffic_site", reason="Sphinx is not installed")
    entries = re.findall(r"^((?:\w.*\n)+)  ", (BOOK / "glossary.md").read_text("utf-8"), re.M)
    known = {entry: {*entry.split("\n")[:-1]} - site.AMBIGUOUS for entry in entries}
    for name in ["intro", *ON_PATH]:
        page = BOOK / (f"{name}.ipynb" if name in ON_PATH else f"{name}.md")
        text = prose(FENCE.sub("", text_of(page)))  # nor are lists of chapters running text
        text = re.sub(r"^[#|].*$|`[^`\n]*`|!?\[[^]]*\]\([^)]*\)|<!--.*?-->", "", text, flags=re.M)
        found = [
            it
            for it, names in known.items()
            if any(re.search(site.term_pattern(name), text) for name in names)
        ]
        assert len(found) <= MOST["new terms"], (name, found)
        known = {it: names for it, names in known.items() if it not in found}


@per(TEACHING)
def test_each_exercise_has_a_solution_and_a_check(path):
    """The root's conftest.py runs the solutions; two are kernels, once the reader writes any."""
    questions = list(notebooks.exercises(text_of(path)))
    numbers = [number for number, _ in questions]
    assert 3 <= len(questions) <= 5
    assert numbers == list(range(1, len(questions) + 1))
    for _, question in questions:
        assert [len(PYTHON.findall(text)) for text in SOLUTION.findall(question)] == [1]
    solutions = ["".join(PYTHON.findall(question)) for _, question in questions]
    assert path.stem == "naive" or sum("@triton.jit" in it for it in solutions) >= 2
    code = notebooks.exercise_cell(load(path)).source
    answers = re.findall(r"^answer_(\d+) = None$", code, re.M)
    assert list(map(int, answers)) == numbers
    checks = [call.args[0].value.split(":")[0] for call in notebooks.calls(code, "check_exercise")]
    assert list(map(int, checks)) == numbers


# ---- the recordings


@per([path.parent for path in BOOK.glob("recordings/*/machine.json")])
def test_recording_is_whole(path):
    listed = recording.load_machine(path)["experiments"]
    assert {file.name for file in path.iterdir()} - {recording.DRIFT} == {
        "machine.json",
        *(f"{name}.csv" for name in listed),
    }
    for name in listed:
        recording.read(path, EXPERIMENTS[name])
