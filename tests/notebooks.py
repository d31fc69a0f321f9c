"""How the tests read notebooks: what is visible, sentences, exercises and the folded solutions."""

import ast
import functools
import itertools
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"
TOC = (ROOT / "_toc.yml").read_text("utf-8")
# An absolute path of some machine, which no page may show.
MACHINE_PATH = re.compile(
    r"(?<![\w.~/-])/(?:home|root|tmp|usr|opt|var|mnt|work\w*|content|Users)\b"
    r"|file:///|\b[A-Z]:\\{1,2}\w"
)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


@functools.cache
def load(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def tags(cell):
    return cell.metadata.get("tags", [])


def folded(cell):
    """Whether the page shows a code cell's title and output, and its code on demand."""
    return "hide-input" in tags(cell)


def visible(cell):
    """Whether the page shows a code cell's code."""
    return not any(tag.startswith(("hide-", "remove-")) for tag in tags(cell))


def calls(code, name):
    """The calls of `name` or `module.name` in code."""
    found = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return [
        call for call in found if getattr(call.func, "attr", getattr(call.func, "id", None)) == name
    ]


SOLUTIONS = re.compile(r"<details><summary>.*?</details>", re.S)


def words(notebook):
    """How many words a page has: of Markdown, without folded solutions, and of what cells show."""
    text = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" or visible(cell):
            text.append(SOLUTIONS.sub("", cell.source))
        if not {"remove-cell", "remove-output"} & {*tags(cell)}:
            outputs = [
                it for it in cell.get("outputs", []) if "scrapbook" not in it.get("metadata", {})
            ]
            text += map(said, outputs)
    return sum(len(part.split()) for part in text)


def said(output):
    """What an output says as text; a picture says nothing."""
    data = output.get("data", {})
    if "image/png" in data:
        return ""
    return output.get("text") or data.get("text/markdown") or data.get("text/plain", "")


def printed(cell):
    """All text of a cell's outputs, whatever it is kept as."""
    texts = []
    for output in cell.outputs:
        texts += [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
        kinds = output.get("data", {}).items()
        texts += [str(value) for kind, value in kinds if not kind.startswith("image/")]
    return "\n".join(texts)


# The start of a heading, a table, HTML, a directive; then also of an item, a question, a formula.
NO_PROSE = re.compile(r"\s*(#|\||<|:|\{)")
NEW_LINE = re.compile(r"\s*(#|\||<|:|\$\$|[-*+]\s|\d+\.\s|\*\*\d+\.\*\*)")
LABEL = re.compile(r"\s*([-*+]\s+)?\*\*[^*]+\.\*\*\s|\s*\d+\.\s")
SENTENCE_END = re.compile(r"[.:?!;…][)\"'”’*_]*$")
SENTENCE_INSIDE = re.compile(r"(?<!\b[A-Z])[.?!][)\"'”’*_]*\s+[(\"'“‘*_]*[A-Z0-9]")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|Fig|Eq|No|al|approx|Dr)\.")


def lines_with_several_sentences(text):
    """Lines of Markdown, without blocks of code, that hold more or less than whole sentences."""
    text = re.sub(r"^(?:[A-Za-z`].*\n)+(?=  )", "", text, flags=re.M)  # the terms of a glossary
    lines = [re.sub(r"^\s*>\s?", "", line.rstrip()) for line in text.splitlines()]
    found = []
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        plain = _plain(line)
        ended = NEW_LINE.match(following) or SENTENCE_END.search(plain)
        goes_on = following and not ended
        if line and not NO_PROSE.match(line) and (goes_on or SENTENCE_INSIDE.search(plain)):
            found.append(line)
    return found


def _plain(line):
    """A line of Markdown with a word for each code span, role and link, and without a label."""
    line = re.sub(r"(\{[\w:-]+\})?`[^`]+`|!?\[[^\]]*\]\([^)]*\)", "Word", line)
    return ABBREVIATION.sub(r"\1", LABEL.sub("", line, count=1))


def exercises(text):
    """(number, Markdown) of each question, from the section `## Exercises`."""
    section = text.partition("\n## Exercises\n")[2].partition("\n## ")[0]
    _, *parts = re.split(r"^\*\*(\d+)\.\*\* ", section, flags=re.M)
    return zip(map(int, parts[::2]), parts[1::2], strict=True)


def solution(question):
    """The code of an exercise's folded solution; a stub may stand before it."""
    [folded] = re.findall(r"<details><summary>Solution</summary>(.*?)</details>", question, re.S)
    [code] = PYTHON.findall(folded)
    return code


def exercise_cell(notebook):
    """The code cell that takes the answers: the one that calls check_exercise."""
    found = [cell for cell in code_cells(notebook) if calls(cell.source, "check_exercise")]
    if len(found) > 1:
        raise ValueError(f"{len(found)} cells call check_exercise")
    return found[0] if found else None


def solved(notebook):
    """The source of the exercise cell with each `answer_N = None` replaced by its solution."""
    cell = exercise_cell(notebook)
    if cell is None:
        return None
    source = cell.source
    for number, question in exercises(markdown(notebook)):
        source = source.replace(f"answer_{number} = None\n", solution(question))
    return source
