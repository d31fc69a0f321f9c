"""The rules that every chapter keeps, read off the notebooks; and the exercises' solutions, run."""

import ast
import hashlib
import importlib.util
import itertools
import json
import re
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
import yaml
from nbval.plugin import find_comment_markers, find_metadata_tags, get_sanitize_patterns
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"
CHAPTERS = sorted(BOOK.glob("*.ipynb"))
PAGES = [*CHAPTERS, *sorted(BOOK.glob("*.md")), ROOT / "README.md"]
RECORDINGS = sorted(path for path in (BOOK / "recordings").glob("*") if path.is_dir())
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))
[(MEASURED, _)] = get_sanitize_patterns((ROOT / "tests/units.cfg").read_text("utf-8"))

# Numbers with a unit that prose may hold all the same: (file, text) and why.
GIVEN = {("fused.ipynb", "at 300 GB/s"): "an exercise gives it to calculate with"}

# ```{name} is a directive, and its text is prose.
FENCE = re.compile(r"^(```+|~~~+)(?!\{)[^\n]*\n.*?^\1[ \t]*$", re.M | re.S)
DETAILS = re.compile(r"<details>.*?</details>", re.S)
SOLUTION = re.compile(r"<details><summary>Solution</summary>(.*?)</details>", re.S)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
GLUE = re.compile(r"\{glue:\w+\}`(?:(?P<page>[^`:]+)::)?(?P<name>[^`:]+)(?::[^`:]*)?`")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)[^)]*\)")
PATH = re.compile(
    r"(?<![\w.~/-])/(?:home|root|tmp|usr|opt|var|mnt|work\w*|content|Users)\b|file:///|\b[A-Z]:\\{1,2}\w"
)
ANSI = "\x1b"
RAISES = "raises-exception"


def per(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


def load(path):
    return nbformat.read(path, as_version=4)


def cells(path, kind):
    """(name for messages, cell) of each cell of a kind."""
    return [
        (f"{path.name} cell {i}", cell)
        for i, cell in enumerate(load(path).cells)
        if cell.cell_type == kind
    ]


def texts(path):
    """(name for messages, markdown) of a page: its markdown cells, or the file."""
    if path.suffix == ".ipynb":
        return [(where, cell.source) for where, cell in cells(path, "markdown")]
    return [(path.name, path.read_text("utf-8"))]


def outputs(path):
    return [
        (where, output)
        for where, cell in cells(path, "code")
        for output in cell.outputs
    ]


def printed(output):
    """All text of an output, whatever it is kept as."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join([output.ename, output.evalue, *output.traceback])
    return "\n".join(
        str(value)
        for mime, value in output.data.items()
        if not mime.startswith("image/")
    )


def calls(code, name):
    """The calls of `name` or `module.name` in code."""
    found = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return [
        call
        for call in found
        if getattr(call.func, "attr", getattr(call.func, "id", None)) == name
    ]


def headings(markdown):
    return re.findall(r"^#{1,6} .*$", FENCE.sub("", markdown), re.M)


def prose(markdown):
    """What is left of markdown without code blocks, solutions, and text that comes out of cells."""
    return GLUE.sub("", FENCE.sub("", DETAILS.sub("", markdown)))


def glued(path):
    """The names a notebook keeps for the text."""
    return {
        call.args[0].value
        for _, cell in cells(path, "code")
        for call in calls(cell.source, "glue")
    }


def quotes():
    """(page that quotes, notebook it quotes from, name) of each glue role in the book."""
    for page in PAGES[:-1]:  # README.md is no page of the book
        for where, markdown in texts(page):
            for match in GLUE.finditer(FENCE.sub("", markdown)):
                yield where, page.parent / (match["page"] or page.name), match["name"]


def exercises(path):
    """(number, markdown) of each question, from the section `## Exercises`."""
    everything = "\n".join(text for _, text in texts(path))
    section = everything.partition("\n## Exercises\n")[2].partition("\n## ")[0]
    _, *parts = re.split(r"^\*\*(\d+)\.\*\* ", section, flags=re.M)
    return list(zip(map(int, parts[::2]), parts[1::2], strict=True))


def tags(cell):
    return cell.metadata.get("tags", [])


def proves(cell):
    """Whether a code cell claims something, or raises an error, which is compared."""
    claimed = calls(cell.source, "claim") or calls(cell.source, "check")
    return bool(claimed) or RAISES in tags(cell)


def exercise_cell(notebook):
    """The code cell that takes the answers."""
    [cell] = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and calls(cell.source, "check")
    ]
    return cell


# ---- the files


def test_the_toc_names_every_page_and_no_other():
    toc = (ROOT / "_toc.yml").read_text("utf-8")
    listed = set(re.findall(r"(?:root|file): (\S+)", toc))
    there = {f"book/{path.stem}" for path in PAGES[:-1]}
    assert listed == there, (
        f"only in _toc.yml: {listed - there}; only in book/: {there - listed}"
    )


@per(CHAPTERS)
def test_a_notebook_is_valid(path):
    nbformat.validate(load(path))


@per(CHAPTERS)
def test_a_notebook_asks_for_a_gpu_on_colab_and_for_the_usual_kernel(path):
    metadata = load(path).metadata
    assert metadata.get("accelerator") == "GPU", (
        f"{path.name}: metadata has no accelerator: GPU"
    )
    assert metadata.get("colab") == {"gpuType": "T4"}, (
        f"{path.name}: metadata colab is {metadata.get('colab')}"
    )
    assert metadata.kernelspec.name == "python3", (
        f"{path.name}: kernel is {metadata.kernelspec.name}"
    )


@per(PAGES)
def test_links_to_files_lead_somewhere(path):
    for where, markdown in texts(path):
        for target in LINK.findall(FENCE.sub("", markdown)):
            assert (path.parent / unquote(target)).exists(), (
                f"{where}: no file {target}"
            )


@per(RECORDINGS)
def test_recordings_are_whole(path):
    about = json.loads((path / "machine.json").read_text("utf-8"))
    listed = about["experiments"]
    wanted = {"machine.json", *(f"{name}.csv" for name in listed)}
    there = {file.name for file in path.iterdir()}
    assert there == wanted, (
        f"{path.name}: missing {wanted - there}, stray {there - wanted}"
    )
    for name, entry in listed.items():
        data = (path / f"{name}.csv").read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], (
            f"{path.name}/{name}.csv: another checksum"
        )
        assert data.count(b"\n") == entry["rows"] + 1, (
            f"{path.name}/{name}.csv: not {entry['rows']} rows"
        )


def test_there_is_a_recording():
    assert RECORDINGS, "book/recordings holds none: `make record` on a GPU makes one"


# ---- code cells


@per(CHAPTERS)
def test_cells_were_run_once_from_top_to_bottom(path):
    counts = [cell.execution_count for _, cell in cells(path, "code")]
    assert counts == list(range(1, len(counts) + 1)), (
        f"{path.name}: executed as {counts}"
    )


@per(CHAPTERS)
def test_the_first_code_cell_is_the_same_set_up_everywhere(path):
    where, first = cells(path, "code")[0]
    assert first.source == cells(CHAPTERS[0], "code")[0][1].source, (
        f"{where}: differs from that of {CHAPTERS[0].name}"
    )
    assert "remove-cell" in tags(first), f"{where}: set-up is not tagged remove-cell"
    urls = re.findall(r'"(https?:[^"]*)"', first.source)
    assert urls == [CONFIG["repository"]["url"]], f"{where}: clones from {urls}"


@per(CHAPTERS)
def test_code_is_plain_python(path):
    for where, cell in cells(path, "code"):
        try:
            ast.parse(cell.source)  # refuses magics, ! and ?
        except SyntaxError as error:
            pytest.fail(f"{where}: not Python: {error}")
        for line in cell.source.splitlines():
            assert not line.rstrip().endswith(";"), (
                f"{where}: ends in a semicolon: {line}"
            )


@per(CHAPTERS)
def test_a_chapter_and_its_cells_are_short(path):
    assert len(load(path).cells) <= 25, f"{path.name}: {len(load(path).cells)} cells"
    for where, cell in cells(path, "code"):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= 20, f"{where}: {len(lines)} lines of code"


@per(CHAPTERS)
def test_a_sentence_stands_before_each_code_cell(path):
    kinds = [cell.cell_type for cell in load(path).cells]
    pairs = enumerate(itertools.pairwise(kinds), 1)
    bare = [i for i, pair in pairs if pair == ("code", "code")]
    imports = kinds.index("code") + 1  # right after the set-up
    assert bare == [imports], f"{path.name}: code after code in cells {bare}"


@per(CHAPTERS)
def test_nbval_compares_nearly_every_cell(path):
    code = [cell for _, cell in cells(path, "code")]
    options = [
        dict(find_metadata_tags(cell.metadata))
        | dict(find_comment_markers(cell.source))
        for cell in code
    ]
    ignored = sum(
        found.get("skip", False) or not found.get("check", True) for found in options
    )
    assert ignored < 0.15 * len(code), (
        f"{path.name}: {ignored} of {len(code)} code cells are not compared"
    )


@per(CHAPTERS)
def test_each_section_with_code_proves_something(path):
    sections, now = {}, None
    for cell in load(path).cells:
        if cell.cell_type == "code":
            sections.setdefault(now, []).append(cell)
        for title in headings(cell.source) if cell.cell_type == "markdown" else ():
            now = title if title.startswith("## ") else now
    del sections[None]  # set-up and imports
    bare = [title for title, code in sections.items() if not any(map(proves, code))]
    assert sections and not bare, f"{path.name}: no claim in {bare}"


# ---- outputs


@per(CHAPTERS)
def test_nothing_names_a_path_of_the_machine(path):
    found = [
        *texts(path),
        *((where, cell.source) for where, cell in cells(path, "code")),
    ]
    found += [(where, printed(output)) for where, output in outputs(path)]
    for where, text in found:
        match = PATH.search(text)
        assert not match, f"{where}: {text[match.start() : match.start() + 60]!r}"


@per(CHAPTERS)
def test_outputs_are_tidy(path):
    for where, output in outputs(path):
        assert ANSI not in printed(output), f"{where}: colour codes"
        assert output.get("name") != "stderr", (
            f"{where}: prints to stderr: {printed(output)[:80]}"
        )
        if output.output_type == "error":
            assert len(output.traceback) == 1, (
                f"{where}: a traceback of {len(output.traceback)} parts"
            )
            assert "\n" not in output.traceback[0], (
                f"{where}: a traceback of several lines"
            )


@per(CHAPTERS)
def test_errors_are_meant(path):
    for where, cell in cells(path, "code"):
        raised = any(output.output_type == "error" for output in cell.outputs)
        assert raised == (RAISES in tags(cell)), f"{where}: {raised=}, {tags(cell)=}"


@per(CHAPTERS)
def test_figures_have_alt_text_that_holds_on_any_machine(path):
    for where, cell in cells(path, "code"):
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "").strip()
        drawn = sum("image/png" in output.get("data", {}) for output in cell.outputs)
        assert drawn <= 1, f"{where}: {drawn} figures share one alt text"
        assert bool(drawn) == bool(alt), (
            f"{where}: {drawn} figures, alt text {alt!r} (metadata mystnb.image.alt)"
        )
        assert not re.search(MEASURED, alt), (
            f"{where}: a measured number in alt text: {alt}"
        )


# ---- text


def measured_in_prose(path):
    """(name for messages, words up to the unit) of each measured number in a page."""
    found = []
    for where, markdown in texts(path):
        text = " ".join(prose(markdown).split())  # a line may end before the unit
        for name, given in GIVEN:
            text = text.replace(given, "") if name == path.name else text
        for match in re.finditer(MEASURED, text):
            found.append((where, text[max(0, match.start() - 20) : match.end() + 8]))
    return found


@per(PAGES)
def test_no_measurement_is_typed(path):
    found = measured_in_prose(path)
    assert not found, (
        f"glue it from a cell, or list it in GIVEN with its reason: {found}"
    )


def test_only_a_typed_measurement_is_found(tmp_path):
    page = tmp_path / "page.md"
    come_from_cells = "{glue:text}`a.ipynb::b:s`\n```python\nt = '1 GB/s'\n```\n"
    solution = "<details>\n\n2 µs\n\n</details>\n"
    typed = "```{figure} a.png\n3.1 %\n```\nruns at 3957\nGB/s\n"
    page.write_text(come_from_cells + solution + typed, "utf-8")
    found = [text for _, text in measured_in_prose(page)]
    assert ["3.1 %" in found[0], "3957 GB/s" in found[1], len(found)] == [True, True, 2]


@pytest.mark.parametrize("name, given", GIVEN)
def test_an_exception_is_still_needed(name, given):
    [path] = [path for path in PAGES if path.name == name]
    text = " ".join(prose("\n".join(text for _, text in texts(path))).split())
    assert given in text, f"{name}: no longer says {given!r}"


def test_text_quotes_what_is_glued():
    for where, source, name in quotes():
        assert source in CHAPTERS, (
            f"{where}: quotes {name} from {source.name}, which is no chapter"
        )
        assert name in glued(source), f"{where}: {source.name} glues no {name}"


@per(CHAPTERS)
def test_what_is_glued_is_quoted(path):
    unused = glued(path) - {name for _, source, name in quotes() if source == path}
    assert not unused, f"{path.name}: glued, but quoted nowhere: {unused}"


@per(CHAPTERS)
def test_a_chapter_has_one_title_one_takeaway_and_ends_with_sources(path):
    found = [title for _, markdown in texts(path) for title in headings(markdown)]
    assert [title for title in found if title.startswith("# ")] == found[:1], (
        f"{path.name}: headings {found}"
    )
    assert found.count("## Exercises") == 1, f"{path.name}: headings {found}"
    assert found[-1] == "## Sources", f"{path.name}: ends with {found[-1]}"
    takeaways = sum(
        len(re.findall(r"^> \*\*Takeaway\.\*\* ", markdown, re.M))
        for _, markdown in texts(path)
    )
    assert takeaways == 1, f"{path.name}: {takeaways} takeaways"


# ---- exercises


@per(CHAPTERS)
def test_each_exercise_has_a_solution_and_a_check(path):
    questions = exercises(path)
    numbers = [number for number, _ in questions]
    assert 3 <= len(questions) <= 5, f"{path.name}: {len(questions)} exercises"
    assert numbers == list(range(1, len(questions) + 1)), (
        f"{path.name}: exercises {numbers}"
    )
    for number, question in questions:
        blocks = [len(PYTHON.findall(text)) for text in SOLUTION.findall(question)]
        assert blocks == [1], f"{path.name} exercise {number}: code blocks {blocks}"
    code = exercise_cell(load(path)).source
    answers = re.findall(r"^answer_(\d+) = None$", code, re.M)
    assert list(map(int, answers)) == numbers, f"{path.name}: answers {answers}"
    checks = [call.args[0].value.split(":")[0] for call in calls(code, "check")]
    assert list(map(int, checks)) == numbers, f"{path.name}: checks {checks}"


@per(CHAPTERS)
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the chapters run Triton kernels: no triton here",
)
def test_solutions_pass_their_checks(path, monkeypatch):
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    monkeypatch.setenv("MEMTRAFFIC_MODE", "replay")
    # Other tests set it by importing memtraffic; a reader's kernel starts without.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    notebook = load(path)
    cell = exercise_cell(notebook)
    for number, question in exercises(path):
        [solution] = PYTHON.findall(question)
        cell.source = cell.source.replace(f"answer_{number} = None\n", solution)
    resources = {"metadata": {"path": str(BOOK)}}
    try:
        NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources=resources
        ).execute()
    except CellExecutionError as error:
        pytest.fail(f"{path.name}: {error.ename}: {error.evalue}", pytrace=False)
    said = "".join(printed(output) for output in cell.outputs).splitlines()
    passed = [line.split(":")[0] for line in said]
    assert passed == [f"✓ {number}" for number, _ in exercises(path)], (
        f"{path.name}: {said}"
    )


def test_the_ladder_is_drawn_from_its_recording():
    with Image.open(BOOK / "_static" / "ladder.png") as picture:
        drawn_from = picture.text["Source"]
    folder = max(RECORDINGS, key=lambda path: json.loads(about(path))["date"])
    recorded = json.loads(about(folder))["experiments"]["ladder"]
    assert drawn_from == recorded["sha256"], "run `make record`"


def about(folder):
    return (folder / "machine.json").read_text("utf-8")
