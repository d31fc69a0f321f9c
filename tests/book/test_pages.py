"""The rules that every page of the book keeps, read off its sources."""

import ast
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbval.plugin import find_comment_markers, find_metadata_tags
from notebooks import (
    MACHINE_PATH,
    PYTHON,
    calls,
    exercise_cell,
    exercises,
    folded,
    lines_with_several_sentences,
    load,
    markdown,
    pictures_without_caption,
    tags,
    visible,
    words,
)

from memtraffic_book import colab, recording, units
from memtraffic_book.catalog import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
CHAPTERS = sorted(BOOK.glob("*.ipynb"))
LOOKED_UP = {"lab-notes", "scoreboard", "survey", "timing"}  # pages without exercises
TEACHING = [path for path in CHAPTERS if path.stem not in LOOKED_UP]
BOOK_PAGES = [*CHAPTERS, *sorted(BOOK.glob("*.md"))]
PAGES = [*BOOK_PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

TOC = (ROOT / "_toc.yml").read_text("utf-8")
ON_PATH = re.findall(r"file: book/(\S+)", TOC.partition("caption: Reference")[0])
MAIN = [path for path in TEACHING if path.stem in ON_PATH]

# A chapter about operations of PyTorch.
BEFORE_KERNELS = ("naive",)

FENCE = re.compile(r"^(```+|~~~+)(\{)?[^\n]*\n(.*?)^\1[ \t]*$", re.M | re.S)
DETAILS = re.compile(r"<details>.*?</details>", re.S)
SOLUTION = re.compile(r"<details><summary>Solution</summary>(.*?)</details>", re.S)
GLUE = re.compile(r"\{glue:\w+\}`(?:(?P<page>[^`:]+)::)?(?P<name>[^`:]+)(?::[^`:]*)?`")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)[^)]*\)")
RAISES = "raises-exception"
PROOFS = ("claim", "check_exercise", "traffic", "correct", "resources", "counters")


def per(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


def cells(path):
    """(name for messages, cell) of each code cell."""
    found = enumerate(load(path).cells)
    return [(f"{path.name} cell {i}", cell) for i, cell in found if cell.cell_type == "code"]


def text_of(path):
    """The Markdown of a page."""
    return markdown(load(path)) if path.suffix == ".ipynb" else path.read_text("utf-8")


def outputs(path):
    return [(where, output) for where, cell in cells(path) for output in cell.outputs]


def printed(output):
    """All text of an output, whatever it is kept as."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join([output.ename, output.evalue, *output.traceback])
    texts = (str(value) for mime, value in output.data.items() if not mime.startswith("image/"))
    return "\n".join(texts)


def without_code(text):
    """Markdown without its blocks of code. ```{name} is a directive, and its text stays."""
    return FENCE.sub(lambda block: block[3] if block[2] else "", text)


def headings(text):
    return re.findall(r"^#{1,6} .*$", without_code(text), re.M)


@per(CHAPTERS)
def test_every_picture_has_a_caption(path):
    assert not pictures_without_caption(load(path))


def prose(text):
    """What is left of Markdown without code blocks, solutions, and text that comes out of cells."""
    return GLUE.sub("", without_code(DETAILS.sub("", text)))


def glued(path):
    """The names a notebook keeps for the text, in its stored outputs."""
    return set(colab.glued(load(path)))


def quotes() -> Iterator[tuple[Path, Path, str]]:
    """(page that quotes, notebook it quotes from, name) of each glue role in the book."""
    for page in BOOK_PAGES:
        for match in GLUE.finditer(without_code(text_of(page))):
            yield page, page.parent / (match["page"] or page.name), match["name"]


def proves(cell, pages):
    """Whether a code cell claims something, or raises an error, which is compared.

    pages: the modules of its functions, by the names that the notebook gives them.
    """
    called = re.findall(r"\b(\w+)\.(\w+)\(", cell.source)
    found = [getattr(pages[module], name) for module, name in called if module in pages]
    code = [cell.source, *map(inspect.getsource, found)]
    return RAISES in tags(cell) or any(calls(part, name) for part in code for name in PROOFS)


def modules(path):
    """The modules of `memtraffic_book.chapters` that a notebook imports, by their names there."""
    line = re.compile(r"^from memtraffic_book\.chapters import (\w+)(?: as (\w+))?$", re.M)
    pairs = [pair for _, cell in cells(path) for pair in line.findall(cell.source)]
    return {
        name or module: import_module(f"memtraffic_book.chapters.{module}")
        for module, name in pairs
    }


# ---- the files


def test_toc_names_every_page_and_no_other():
    listed = set(re.findall(r"(?:root|file): (\S+)", TOC))
    assert listed == {f"book/{path.stem}" for path in BOOK_PAGES}


@per(CHAPTERS)
def test_notebook_is_valid_and_asks_for_a_gpu_on_colab_and_for_the_usual_kernel(path):
    nbformat.validate(load(path))
    metadata = load(path).metadata
    assert metadata.get("accelerator") == "GPU"
    assert metadata.get("colab") == {"gpuType": "T4"}
    assert metadata.kernelspec.name == "python3"


@per(PAGES)
def test_links_to_files_lead_somewhere(path):
    targets = LINK.findall(without_code(text_of(path)))
    broken = [target for target in targets if not (path.parent / unquote(target)).exists()]
    assert not broken


# ---- code cells


@per(CHAPTERS)
def test_cells_were_run_once_from_top_to_bottom(path):
    counts = [cell.execution_count for _, cell in cells(path)]
    assert counts == list(range(1, len(counts) + 1))


@per(CHAPTERS)
def test_first_code_cell_is_the_same_set_up_everywhere(path):
    """One line, which works from a checkout; `memtraffic_book.colab` writes another for Colab."""
    where, first = cells(path)[0]
    assert first.source == cells(CHAPTERS[0])[0][1].source, where
    assert first.source.split("  #")[0] == "import memtraffic"
    assert "remove-cell" in tags(first), f"{where}: set-up is not tagged remove-cell"


@per(CHAPTERS)
def test_code_is_plain_python(path):
    for where, cell in cells(path):
        try:
            ast.parse(cell.source)  # refuses magics, ! and ?
        except SyntaxError as error:
            pytest.fail(f"{where}: not Python: {error}")
        ends = [line for line in cell.source.splitlines() if line.rstrip().endswith(";")]
        assert not ends, f"{where}: a semicolon hides no output from nbval: {ends}"


@per(CHAPTERS)
def test_sentence_stands_before_each_code_cell(path):
    """A folded cell may follow the visible one that it checks."""
    kinds = ["folded" if folded(cell) else cell.cell_type for cell in load(path).cells]
    pairs = enumerate(itertools.pairwise(kinds), 1)
    bare = [i for i, (before, kind) in pairs if kind == "code" and before != "markdown"]
    imports = kinds.index("code") + 1  # right after the set-up
    assert set(bare) <= {imports}


@per(CHAPTERS)
def test_nbval_compares_nearly_every_cell(path):
    code = [cell for _, cell in cells(path)]
    options = [
        dict(find_metadata_tags(cell.metadata)) | dict(find_comment_markers(cell.source))
        for cell in code
    ]
    ignored = sum(found.get("skip", False) or not found.get("check", True) for found in options)
    assert ignored < 0.15 * len(code), f"{ignored} of {len(code)} code cells are not compared"


@per(TEACHING)
def test_each_section_with_code_is_compared_and_three_prove_something(path):
    sections, now = {}, None
    for cell in load(path).cells:
        if cell.cell_type == "code":
            sections.setdefault(now, []).append(cell)
        for title in headings(cell.source) if cell.cell_type == "markdown" else ():
            now = title if title.startswith("## ") else now
    del sections[None]  # set-up and imports
    pages = modules(path)
    bare = [title for title, code in sections.items() if not any(it.outputs for it in code)]
    assert sections and not bare, f"nothing that is compared in {bare}"
    proven = [title for title, code in sections.items() if any(proves(it, pages) for it in code)]
    assert len(proven) >= min(3, len(sections)), f"claims in {proven} alone"


RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for source, raises in json.load(sys.stdin):
    result = shell.run_cell(source)
    error = result.error_before_exec or result.error_in_exec
    if bool(error) != raises:
        sys.exit(f"{error!r} in:\\n{source}")
"""


@pytest.mark.slow
@per(CHAPTERS)
def test_visible_cells_run_without_those_that_are_folded(path):
    """In a new process, after the set-up: what a reader who copies them gets."""
    set_up, *rest = (cell for _, cell in cells(path))
    shown = [set_up, *filter(visible, rest)]
    sent = json.dumps([(cell.source, RAISES in tags(cell)) for cell in shown])
    environment = {**os.environ, "MEMTRAFFIC_MODE": "replay", "MPLBACKEND": "agg"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, input=sent, capture_output=True, text=True, cwd=path.parent, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ---- outputs


@per(CHAPTERS)
def test_nothing_names_a_path_of_the_machine(path):
    found = [text_of(path), *(cell.source for _, cell in cells(path))]
    found += [printed(output) for _, output in outputs(path)]
    matches = [match.group() for text in found for match in MACHINE_PATH.finditer(text)]
    assert not matches


@per(CHAPTERS)
def test_outputs_are_tidy(path):
    for where, output in outputs(path):
        assert "\x1b" not in printed(output), f"{where}: colour codes"
        assert output.get("name") != "stderr", f"{where}: prints to stderr: {printed(output)[:80]}"
        if output.output_type == "error":
            [line] = output.traceback
            assert "\n" not in line, f"{where}: a traceback of several lines"


@per(CHAPTERS)
def test_errors_are_meant(path):
    for where, cell in cells(path):
        raised = any(output.output_type == "error" for output in cell.outputs)
        assert raised == (RAISES in tags(cell)), f"{where}: {raised=}, {tags(cell)=}"


@per(CHAPTERS)
def test_figures_have_alt_text_that_holds_on_any_machine(path):
    for where, cell in cells(path):
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "").strip()
        drawn = sum("image/png" in output.get("data", {}) for output in cell.outputs)
        assert drawn <= 1, f"{where}: {drawn} figures share one alt text"
        assert bool(drawn) == bool(alt), f"{where}: {drawn} figures, mystnb.image.alt is {alt!r}"
        typed = re.search(units.MEASURED, ROUND.sub("", alt))
        assert not typed, f"{where}: a measured number in alt text: {alt}"


# ---- text


# What the book says again and again, rounded: a copy of its example, what memory needs in flight
# on each SM, what a program should load.
ROUND = re.compile(r"\b(25 kB|2 kB)")


def measured_in_prose(path):
    """The words up to the unit of each measured number in a page, but for the book's round ones."""
    text = " ".join(prose(text_of(path)).split())  # a line may end before the unit
    text = ROUND.sub("", text)
    return [text[max(0, m.start() - 20) : m.end() + 8] for m in re.finditer(units.MEASURED, text)]


@per(PAGES)
def test_no_measurement_is_typed(path):
    """Glue it from a cell."""
    assert not measured_in_prose(path)


@per(CHAPTERS)
def test_what_is_glued_is_quoted(path):
    assert not glued(path) - {name for _, source, name in quotes() if source == path}


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
def test_chapter_ends_with_what_one_can_do_and_leads_to_the_next(path):
    _, _, end = text_of(path).partition("\n## You can now\n")
    assert 2 <= len(re.findall(r"^- ", end, re.M)) <= 4
    following = ON_PATH[ON_PATH.index(path.stem) + 1 :]
    last = end.strip().splitlines()[-1]
    [leads] = re.findall(r"\*\*Next:\*\* \[.+\]\((\S+)\)", last)
    assert leads == f"{following[0]}.ipynb" if following else (BOOK / leads).exists()


@per(MAIN)
def test_chapter_has_the_picture_of_its_head_and_a_guess(path):
    head = load(path).cells[0].source
    assert f"](_static/map-{path.stem}.png)" in head
    guesses = re.findall(GUESS, text_of(path), re.S)
    assert guesses and all(re.search(r"\*\*[^*]*(\d|\{glue:)", it) for it in guesses)


GUESS = r'<details class="guess"><summary>The answer</summary>(.*?)</details>'
MOST = {"a chapter": 3400, "the main path": 36_000, "reference": 10_000, "folded lines": 600}


@per(MAIN)
def test_chapter_is_short(path):
    assert words(load(path))[0] <= MOST["a chapter"]


def test_book_is_short():
    """Of the reference its prose is counted, as it is written."""
    counted = {path: words(load(path)) for path in CHAPTERS}
    assert sum(counted[path][0] for path in MAIN) <= MOST["the main path"]
    assert sum(folded for _, folded in counted.values()) <= MOST["folded lines"]
    others = [path for path in BOOK_PAGES if path not in MAIN and path.stem not in ("intro", "api")]
    assert sum(len(prose(text_of(path)).split()) for path in others) <= MOST["reference"]


# ---- how a page is written


def faults(notebook):
    """How a notebook breaks the rules of code: pairs of what is wrong and where."""
    first = True  # of the visible cells, which has their imports
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        source, shown = cell.source, visible(cell)
        lines = [line for line in source.splitlines() if line.strip()]
        if shown:
            imports = any(isinstance(it, IMPORTS) for it in ast.walk(ast.parse(source)))
            if imports and not first:
                yield "imports", source
            first = False
        long = len(lines) > 40 or (shown and len(source.splitlines()) > 12)
        if long or max(map(len, source.splitlines())) > (88 if shown else 100):
            yield "too long", source
        form = cell.metadata.get("cellView") == "form"
        if len({folded(cell), form, source.startswith("# @title ")}) > 1:
            yield "folded on the page, on Colab, or titled, but not all three", source
        for output in cell.outputs:
            for claim in re.findall(r"^✓ (.*)$", printed(output), re.M):
                if not re.fullmatch(r"[A-Z\d](?=.*\d).*\.", claim):
                    yield "no sentence with a number", claim
    if len(notebook.cells) > 60:
        yield "cells", len(notebook.cells)
    for source in PYTHON.findall("\n".join(it.source for it in notebook.cells)):
        if max(map(len, source.splitlines())) > 88:
            yield "too wide", source


IMPORTS = (ast.Import, ast.ImportFrom)


@per(CHAPTERS)
def test_code_is_short_and_folded_everywhere_and_claims_are_sentences(path):
    assert not list(faults(load(path)))


def kernels_to_write(text):
    """How many exercises are solved by a Triton kernel."""
    solutions = ("".join(PYTHON.findall(question)) for _, question in exercises(text))
    return sum("@triton.jit" in solution for solution in solutions)


@per([path for path in TEACHING if path.stem not in BEFORE_KERNELS])
def test_two_exercises_want_a_kernel(path):
    assert kernels_to_write(text_of(path)) >= 2


@per(PAGES)
def test_each_sentence_has_a_line_of_its_own(path):
    lists = r"^```\{api\}.*?^```$"  # names, not sentences
    text = re.sub(lists, "", text_of(path), flags=re.M | re.S)
    assert not lines_with_several_sentences(without_code(text))


# ---- exercises; conftest.py runs the solutions


@per(TEACHING)
def test_each_exercise_has_a_solution_and_a_check(path):
    questions = list(exercises(text_of(path)))
    numbers = [number for number, _ in questions]
    assert 3 <= len(questions) <= 5
    assert numbers == list(range(1, len(questions) + 1))
    for number, question in questions:
        blocks = [len(PYTHON.findall(text)) for text in SOLUTION.findall(question)]
        assert blocks == [1], f"exercise {number}: code blocks {blocks}"
    code = exercise_cell(load(path)).source
    answers = re.findall(r"^answer_(\d+) = None$", code, re.M)
    assert list(map(int, answers)) == numbers
    checks = [call.args[0].value.split(":")[0] for call in calls(code, "check_exercise")]
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
