"""What this book adds to Sphinx: pages made from the docstrings and from the recordings.

Both are read from their files, because the environment that builds the book has no PyTorch. It also
puts the title of a folded cell on its fold, and a figure that moves into its page, and adds the
buttons that need the address of the repository.
"""

from __future__ import annotations

import ast
import csv
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
RECORDINGS = ROOT / "book" / "recordings"
Definition = ast.FunctionDef | ast.ClassDef


def source_file(module: str) -> Path:
    path = SRC.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definitions(module: str) -> dict[str, Definition]:
    body = ast.parse(source_file(module).read_text("utf-8")).body
    return {node.name: node for node in body if isinstance(node, Definition)}


def find(module: str, name: str) -> Definition:
    """The definition of `module.name`; imports of the name are followed."""
    if name in definitions(module):
        return definitions(module)[name]
    for node in ast.walk(ast.parse(source_file(module).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return find(node.module or "", name)
    raise LookupError(f"{module} defines and imports no {name}")


def fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """The fields of a dataclass; none of another class."""
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return []
    return [field for field in node.body if isinstance(field, ast.AnnAssign)]


def signature(node: Definition) -> str:
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){returns}"
    arguments = ["*"] if "kw_only" in "".join(map(ast.unparse, node.decorator_list)) else []
    for field in fields(node):
        default = f" = {ast.unparse(field.value)}" if field.value else ""
        default = re.sub(r"field\(default_factory=(\w+)\)", r"\1()", default)
        arguments.append(f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}{default}")
    return f"({', '.join(arguments)})" if arguments else ""


def names(node: Definition) -> list[str]:
    """The parameters of a function, the fields of a dataclass."""
    if isinstance(node, ast.ClassDef):
        return [ast.unparse(field.target) for field in fields(node)]
    found = [*node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    return [argument.arg for argument in found if argument]


def markdown(docstring: str, known: list[str]) -> Iterator[str]:
    """A docstring as lines of MyST: examples become code, `name: text` a list of definitions."""
    name = rf"(?:{'|'.join(map(re.escape, known)) or '(?!)'})"
    entry = re.compile(rf"(?:^|(?<=\. ))({name}(?:, {name})*(?: \([^()]*\))?):\s", re.M)
    for paragraph in re.split(r"\n{2,}", docstring):
        if paragraph.startswith(">>>"):
            yield from ("```pycon", *paragraph.splitlines(), "```", "")
            continue
        if paragraph.startswith("- "):
            yield from (*paragraph.splitlines(), "")
            continue
        text, *entries = entry.split(paragraph)
        yield from sentences(text)
        for terms, definition in zip(entries[::2], entries[1::2], strict=True):
            first, *rest = sentences(definition)
            yield from (
                re.sub(rf"\b{name}\b", r"`\g<0>`", " ".join(terms.split())),
                f": {first}",
                "",
            )
            yield from rest[1:]


def sentences(text: str) -> list[str]:
    """The paragraphs of a text, a line each; what is returned and raised has its own."""
    text = " ".join(text.split())
    parts = re.split(r"(?:^|(?<=\. ))(?=(?:Returns|Raises) )", text)
    return [line for part in parts if part for line in (part.strip(), "")]


def describe(shown: str, node: Definition, fence: str = "``````") -> Iterator[str]:
    """The MyST of a function or class, with the public methods of a class."""
    kind = "function"
    if isinstance(node, ast.ClassDef):
        kind = "exception" if node.name.endswith(("Error", "Unavailable")) else "class"
    yield f"{fence}{{py:{kind}}} {shown}{signature(node)}"
    yield ""
    if isinstance(node, ast.ClassDef) and node.bases:
        yield f"Bases: {', '.join(f'`{ast.unparse(base)}`' for base in node.bases)}"
        yield ""
    yield from markdown(ast.get_docstring(node) or "", names(node))
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            yield from describe_method(method, fence[1:])
    yield from (fence, "")


def describe_method(node: ast.FunctionDef, fence: str) -> Iterator[str]:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any("property" in decorator for decorator in decorators):
        yield f"{fence}{{py:property}} {node.name}"
        yield from [f":type: {ast.unparse(node.returns)}"] if node.returns else []
    else:
        if node.args.args and node.args.args[0].arg in ("self", "cls"):
            del node.args.args[0]
        yield f"{fence}{{py:method}} {node.name}{signature(node)}"
        yield from (f":{name}:" for name in ("classmethod", "staticmethod") if name in decorators)
    yield ""
    yield from markdown(ast.get_docstring(node) or "", names(node))
    yield from (fence, "")


def table(heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(cells)} |"
    yield ""


def recordings() -> dict[str, dict[str, Any]]:
    """What each recording's `machine.json` holds, by folder; the published folder comes first."""
    source = (SRC / "memtraffic_book" / "recording.py").read_text("utf-8")
    [published] = re.findall(r'^PUBLISHED = "(.*?)"', source, re.M)
    files = sorted(
        RECORDINGS.glob("*/machine.json"), key=lambda it: (it.parent.name != published, it)
    )
    return {file.parent.name: json.loads(file.read_text("utf-8")) for file in files}


def describe_recordings() -> Iterator[str]:
    """For each GPU what it was recorded with, and when; then its ladder."""
    for folder, machine in recordings().items():
        toolkit = f"CUDA {machine['cuda']}" if "cuda" in machine else f"ROCm {machine['rocm']}"
        yield from (f"**{machine['gpu']}** (`book/recordings/{folder}`)", "")
        software = f"PyTorch {machine['torch']}, Triton {machine['triton']}"
        yield from (f"Driver {machine['driver']}, {toolkit}, {software}.", "")
        runs: dict[tuple[str, str], list[str]] = {}
        for name, entry in sorted(machine["experiments"].items()):
            runs.setdefault((entry["date"], entry["commit"]), []).append(name)
        rows = [[day, f"`{commit[:10]}`", ", ".join(ids)] for (day, commit), ids in runs.items()]
        yield from table(["date", "commit", "experiments"], sorted(rows))


def describe_ladder() -> Iterator[str]:
    """The bandwidth of each rung on each GPU, and its share of a copy's."""
    heads, rungs = ["rung"], {}
    for folder, machine in recordings().items():
        if "ladder" not in machine["experiments"]:
            continue
        heads.append(machine["gpu"])
        with (RECORDINGS / folder / "ladder.csv").open(encoding="utf-8", newline="") as file:
            speed = {row["impl"]: float(row["gb_per_s"]) for row in csv.DictReader(file)}
        for name, value in speed.items():
            row = rungs.setdefault(name, [name])
            row += ["–"] * (len(heads) - 1 - len(row))  # of GPUs that did not run it
            row.append(f"{value:.0f} GB/s, {100 * value / speed['copy']:.0f} %")
    yield from table(heads, [row + ["–"] * (len(heads) - len(row)) for row in rungs.values()])


class Generated(SphinxDirective):
    """A directive whose content is MyST, made by `lines`."""

    has_content = True

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # at every build
        container, text = nodes.container(), StringList(list(self.lines()), source=self.name)
        self.state.nested_parse(text, self.content_offset, container)
        return container.children


class Api(Generated):
    """Describes what a module defines or imports: the names in the content, or all it defines."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        module = self.arguments[0]
        public = [name for name in definitions(module) if not name.startswith("_")]
        for name in self.content or public:
            node = find(module, name.strip())
            yield from describe(f"{module}.{node.name}", node)


class Recordings(Generated):
    """What was recorded where and when, or, with the argument `ladder`, how fast each rung was."""

    optional_arguments = 1

    def lines(self) -> Iterator[str]:
        return describe_ladder() if self.arguments else describe_recordings()


class FoldedTitles(SphinxPostTransform):
    """Moves the line `# @title` of a folded cell, which Colab shows as a form, to its fold."""

    default_priority = 198  # MyST-NB folds at 199

    def run(self, **options: Any) -> None:
        for cell in self.document.findall(nodes.container):
            code = cell.next_node(nodes.literal_block) if cell.get("hide_mode") else None
            title = code and re.match(r"# @title (.+)\n+", code.rawsource)
            if code and title:
                code.rawsource = code.rawsource[title.end() :]
                code.children = [nodes.Text(code.rawsource)]
                cell["prompt_show"] = cell["prompt_hide"] = f"Code: {title[1]}"


class MovingFigures(SphinxPostTransform):
    """Puts the SVG of a figure that moves into the page, where `figures.js` finds it."""

    default_priority = 5  # before images are collected
    formats = ("html",)

    def run(self, **options: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            path = ROOT / image["uri"]
            text = path.read_text("utf-8") if path.suffix == ".svg" else ""
            if 'type="application/json"' in text:
                label = f'<svg role="img" aria-label="{html.escape(image["alt"])}" '
                start = f'<figure class="moving" data-name="{path.stem}">'
                figure = f"{start}{text.replace('<svg ', label, 1)}</figure>"
                image.replace_self(nodes.raw("", figure, format="html"))


def add_repository(app: Sphinx, config: Config) -> None:
    """Buttons that need the address of the repository: none before `repository.url` is set.

    Colab opens the self-contained notebooks, which are part of the site, on the branch gh-pages.
    """
    options = config.html_theme_options
    known = bool(options.get("repository_url"))
    options["use_repository_button"] = options["use_issues_button"] = known
    options["launch_buttons"] = {"colab_url": "https://colab.research.google.com"} if known else {}
    options["repository_branch"] = "gh-pages"
    options["path_to_docs"] = "_sources"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("api", Api)
    app.add_directive("recordings", Recordings)
    app.add_post_transform(FoldedTitles)
    app.add_post_transform(MovingFigures)
    app.connect("config-inited", add_repository, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
