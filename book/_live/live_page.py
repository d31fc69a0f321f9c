"""The live kernels of the pages: editors for code that a page shows, and the script that runs them.

A comment in a page, `<!-- live softmax_rows softmax -->`, names functions; an editor takes its
place, with the text of each as the page shows it first. JSON after the names may hold the options
of `live.run`, and

- "launch": a launch of a kernel by `softmax(x)`, which is appended;
- "def": a head, such as "softmax(x)", of a function whose body is the piece of code that ends with
  an assignment to the one name;
- "exam": a constant of the page's module in `memtraffic_book.chapters`, or of another chapter's as
  in "naive.LOGS": the reference of an exercise, which its examiner reads, too; and with it "reads"
  and "writes", what the answer has to move: MN by default, as of `prove.exam`;
- "hint": a sentence beside the button that opens the editor, and then above the editor.

Pages load `_static/live.js` when a reader opens an editor: our script, and in it, as text, what a
worker runs: Brython, live.py and live_host.py.
"""

from __future__ import annotations

import ast
import html
import json
import re
import shutil
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Any

import live
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

HERE = Path(__file__).parent
CHAPTERS = HERE.parents[1] / "src" / "memtraffic_book" / "chapters"
COMMENT = re.compile(r"<!-- live ([\w ]+?)\s*(\{.*?\})?\s*-->", re.S)
HEAD = "import torch\nimport triton\nimport triton.language as tl\n"
LAUNCHER = "def softmax(x):\n    y = torch.empty_like(x)\n    {}\n    return y"
# A whole address is asked for, and a language: "C", which some browsers say, is none.
START = 'globalThis.__BRYTHON__ = {brython_path: "file:///"};\nnavigator.userLanguage = "en";\n'
ANSWER = "onmessage = ({ data: [text, options] }) => answer(text, options);\n"


def statements(code: str) -> list[ast.stmt]:
    """Those of a cell, or none where it is no Python."""
    try:
        return ast.parse(re.sub(r"^[%!].*", "", code, flags=re.M)).body
    except SyntaxError:
        return []


def function(name: str, pieces: list[str]) -> str:
    """The text of the first function of a name; its decorators belong to it."""
    for code in pieces:
        for node in statements(code):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                first = (node.decorator_list or [node])[0].lineno - 1
                return "\n".join(code.splitlines()[first : node.end_lineno])
    raise LookupError(f"no code on this page defines a function {name}")


def lines_of(name: str, pieces: list[str], head: str) -> str:
    """A function with this head, around the first code whose end is an assignment to `name`."""
    for code in pieces:
        match statements(code)[-1:]:
            case [ast.Assign(targets=[ast.Name(id=found)])] if found == name:
                body = textwrap.indent(code.strip(), "    ")
                return f"def {head}:\n{body}\n    return {name}"
    raise LookupError(f"no code on this page ends with an assignment to {name}")


def reference(name: str, page: str) -> str:
    """The text of an exercise's reference, a constant of the module of its page."""
    module = CHAPTERS / f"{Path(page).stem.replace('-', '_')}.py"
    for node in statements(module.read_text("utf-8")):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return str(ast.literal_eval(node.value))
    raise LookupError(f"{module.name} has no constant {name}")


def composed(comment: str, pieces: list[str], page: str = "") -> dict[str, Any]:
    """What an editor starts with: the code and the options of its runs, and its hint."""
    names, given = COMMENT.fullmatch(comment.strip()).groups()  # type: ignore[union-attr]
    options = {"reference": live.SOFTMAX, "name": "a softmax"} | json.loads(given or "{}")
    if exam := options.pop("exam", ""):
        chapter, _, name = exam.rpartition(".")
        text = reference(name, chapter or page)
        moves = "reads {}, writes {}".format(*(options.pop(it, "MN") for it in ("reads", "writes")))
        options |= {"reference": text, "name": "what the exercise asks for", "moves": moves}
    hint, head, launch = (options.pop(key, "") for key in ("hint", "def", "launch"))
    called = head.split("(")[0] or ("softmax" if launch else names.split()[-1])
    options.setdefault("function", called)
    parts = [lines_of(it, pieces, head) if head else function(it, pieces) for it in names.split()]
    parts += [LAUNCHER.format(launch)] if launch else []
    return {"code": HEAD + "\n\n" + "\n\n\n".join(parts), "options": options, "hint": hint}


class Editors(SphinxPostTransform):
    """Puts the place of an editor, which `pages.js` finds, where the comment stands."""

    default_priority = 6  # outputs are chosen at 4
    formats = ("html",)

    def run(self, **options: Any) -> None:
        blocks = list(self.document.findall(nodes.literal_block))
        pieces = [it.rawsource or it.astext() for it in blocks if "py" in it.get("language", "")]
        for node in list(self.document.findall(nodes.raw)):
            if COMMENT.fullmatch(node.astext().strip()):
                try:
                    start = composed(node.astext(), pieces, self.env.docname)
                    data = html.escape(json.dumps(start))
                except (LookupError, ValueError) as error:
                    logging.getLogger(__name__).warning("live: %s", error, location=node)
                else:
                    text = f'<div class="live" data-live="{data}"></div>'
                    node.replace_self(nodes.raw("", text, format="html"))


def worker() -> list[str]:
    """The parts of the text that a worker runs."""
    engine = files("brython").joinpath("data", "brython.js").read_text("utf-8")
    sources = [(it, (HERE / f"{it}.py").read_text("utf-8")) for it in ("live", "live_host")]
    runs = [f'__BRYTHON__.runPythonSource({json.dumps(text)}, "{it}");\n' for it, text in sources]
    return [START, engine, *runs, ANSWER]


def script() -> str:
    """The text of live.js as the site has it."""
    texts = json.dumps([worker(), (HERE / "live.css").read_text("utf-8")], ensure_ascii=False)
    ours = (HERE / "live.js").read_text("utf-8")
    return f"(() => {{\nconst [WORKER, STYLE] = {texts};\n{ours}}})();\n"


def write_script(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        folder = Path(app.outdir) / "_static"
        (folder / "live.js").write_text(script(), "utf-8")
        shutil.copy(HERE / "brython-LICENSE.txt", folder)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(Editors)
    app.connect("build-finished", write_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
