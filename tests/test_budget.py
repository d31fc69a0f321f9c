"""Every room has a limit of code, and what is public is used by a page or an example.

A limit falls as its room shrinks, and rises only in a commit of its own that names the page that
needs it. `python tests/test_budget.py` prints today's figures as the table has them.
"""

import ast
import json
import re
from functools import cache
from importlib import import_module

import pytest
from cases import dotted
from notebooks import ROOT

from memtraffic_book.catalog import EXPERIMENTS

API = "book/api.md"
FOLDERS = "benchmark", "compile", "kernels", "meters", "residency", "triton_adapter"
ROOMS = {  # a pattern of the paths in each
    "library": r"src/memtraffic/.*\.py",
    **{folder: rf"src/memtraffic/{folder}/.*\.py" for folder in FOLDERS},
    "rest of the library": rf"src/memtraffic/(?!({'|'.join(FOLDERS)})/).*\.py",
    "chapters": r"src/memtraffic_book/chapters/.*\.py",
    "rest of the book": r"src/memtraffic_book/(?!chapters/).*\.py",
    "cells": r"book/.*\.ipynb",
    "book/_ext": r"book/_ext/.*\.py",
    "book/_live/live.py": r"book/_live/live\.py",
    "rest of book/_live": r"book/_live/(?!live\.py).*\.py",
    "book/_live/live.js": r"book/_live/live\.js",
    "book/_static": r"book/_static/(?!occupancy-data).*\.js",  # which is numbers
    "examples": r"examples/.*\.py",
    "tests": r"(tests/.*|conftest)\.py",
    "conftest.py": r"conftest\.py",
}
# The most lines that hold code, comments and docstrings not counted, and the most statements.
LIMITS = {
    "library": (7655, 6562),
    "benchmark": (398, 356),
    "compile": (570, 515),
    "kernels": (1719, 1257),
    "meters": (1568, 1429),
    "residency": (203, 163),
    "triton_adapter": (1452, 1376),
    "rest of the library": (1745, 1466),
    "chapters": (1581, 1217),
    "rest of the book": (2759, 2405),
    "cells": (759, 732),
    "book/_ext": (645, 623),
    "book/_live/live.py": (898, 878),
    "rest of book/_live": (111, 117),
    "book/_live/live.js": (251, 0),
    "book/_static": (487, 0),
    "examples": (676, 639),
    "tests": (13171, 10421),
    "conftest.py": (101, 96),
}

CHAPTER = 95  # the most lines of code behind the folded cells of a chapter

# ---- what is in the repository


@cache
def repository():
    """The text of each file that is judged, by its path."""
    patterns = "README.md Makefile pyproject.toml conftest.py src/**/*.py tests/**/*.py "
    patterns += "examples/**/*.py book/_*/*.py book/*.ipynb book/*.md book/_*/*.js"
    paths = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(paths)}


def cells(notebook, kind="code"):
    """The text of a notebook's cells, without the lines that only IPython understands."""
    found = [cell for cell in json.loads(notebook)["cells"] if cell["cell_type"] == kind]
    return [re.sub(r"^[%!].*", "", "".join(cell["source"]), flags=re.M) for cell in found]


def shown_code(markdown):
    """The Python in Markdown that is whole, such as a solution."""
    for code in re.findall(r"^```python\n(.*?)^```", markdown, re.M | re.S):
        try:
            yield ast.parse(code)
        except SyntaxError:
            continue  # a fragment


parse = cache(ast.parse)  # of what two rules read


@cache
def tree_of(path, text):
    """The syntax tree of a module, or of all code on a page."""
    if path.endswith(".py"):
        return parse(text)
    parts = []
    if path.endswith(".ipynb"):
        parts, text = list(map(parse, cells(text))), "\n".join(cells(text, "markdown"))
    return ast.Module([node for part in (*parts, *shown_code(text)) for node in part.body], [])


# ---- limits


@cache
def walk(tree):
    return tuple(ast.walk(tree))


def size_of_python(text):
    """(lines that hold a token, statements) of a module or a cell."""
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    found = {number for number, line in lines if line and line[0] != "#"}
    nodes = walk(parse(text))
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno > node.lineno:
            found.update(range(node.lineno, node.end_lineno + 1))
    for node in nodes:
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str()) as docstring), *_]:
                found -= {*range(docstring.lineno, docstring.end_lineno + 1)}
    return len(found), sum(isinstance(node, ast.stmt) for node in nodes)


@cache
def size(path, text):
    """(lines, statements) of a file; of JavaScript, lines alone."""
    if path.endswith(".js"):
        lines = map(str.strip, re.sub(r"/\*.*?\*/", "", text, flags=re.S).splitlines())
        return sum(bool(line) and not line.startswith("//") for line in lines), 0
    return added(map(size_of_python, cells(text) if path.endswith(".ipynb") else [text]))


def added(pairs):
    return tuple(map(sum, zip((0, 0), *pairs, strict=True)))


def sizes(texts):
    """The figures of each room."""
    return {
        room: added(size(*it) for it in texts.items() if re.fullmatch(pattern, it[0]))
        for room, pattern in ROOMS.items()
    }


def wrong_sizes(texts):
    """A line for each room that is over its limit, or so far below that the limit must fall."""
    for room, found in sizes(texts).items():
        for what, limit, there in zip(("lines", "statements"), LIMITS[room], found, strict=True):
            if there > limit:
                yield f"{room}: {there} {what} are over the limit of {limit}"
            elif limit - there > max(10, 0.02 * limit):
                yield f"{room}: lower the limit of {limit} {what} to {there}"


# ---- what is used


@cache
def chains(tree):
    return [names for names in map(dotted, walk(tree)) if names]


def imported(tree):
    """(name in a module, full name) of each import."""
    for node in walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((it.asname or it.name, f"{within}{it.name}") for it in node.names)


def definitions(tree):
    """(name, node) of what a module defines at its top."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id, node


def strings(node):
    """The text in an expression; of an f-string that begins with text, a pattern."""
    for it in walk(node):
        if isinstance(it, ast.JoinedStr) and isinstance(it.values[0], ast.Constant):
            yield "".join(
                getattr(part, "value", "") if type(part) is ast.Constant else ".*"
                for part in it.values
            )
        elif isinstance(it, ast.Constant) and isinstance(it.value, str):
            yield it.value


def module_of(path):
    inner = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
    return inner.replace("/", ".")


def is_page(path):
    shown = path.startswith("book/") and path.endswith((".ipynb", ".md")) and path != API
    return shown or path.startswith("src/memtraffic_book/chapters/")


def is_user(path):
    """Whether this is a page, code behind one, or an example."""
    return is_page(path) or path.startswith(("src/memtraffic_book/", "examples/"))


class Sources:
    """The code of `src` and of who uses it, and what a name in it stands for."""

    def __init__(self, texts):
        codes = [it for it in texts if it.endswith(".py") and not it.startswith("tests/")]
        codes += [it for it in texts if is_user(it) and it not in codes]
        self.texts = texts
        self.trees = {path: tree_of(path, texts[path]) for path in codes}
        self.paths = {module_of(path): path for path in codes if path.startswith("src/")}
        self.defined = {path: dict(definitions(tree)) for path, tree in self.trees.items()}
        self.bound = {path: dict(imported(tree)) for path, tree in self.trees.items()}
        for module, path in self.paths.items():
            own = {name: f"{module}.{name}" for name in self.defined[path]}
            self.bound[path] = own | self.bound[path]

    def resolve(self, full):
        """(path of a module, what it defines or "") for a full name; None for others' names."""
        parts = full.split(".")
        for count in range(len(parts), 0, -1):
            if path := self.paths.get(".".join(parts[:count])):
                if count == len(parts) or parts[count] in self.defined[path]:
                    return path, "".join(parts[count : count + 1])
                there = self.bound[path].get(parts[count])
                return self.resolve(there) if there else None
        return None

    def uses(self, path, node):
        """What the names and the chains of attributes in a part of a file stand for."""
        bound = self.bound[path]  # where `import a.b` binds `a.b`, and a chain begins with `a`
        known = {".".join([bound.get(it[0], it[0]), *it[1:]]) for it in chains(node)}
        return set(map(self.resolve, known)) - {None}

    def results(self, path, name):
        """Classes that come along: what a function returns; the bases and fields of a class."""
        node = self.defined[path].get(name)
        for it in (node, *node.body) if isinstance(node, ast.ClassDef) else (node,):
            hints = [getattr(it, "returns", None), getattr(it, "annotation", None)]
            for part in filter(None, [*hints, *getattr(it, "bases", [])]):
                yield from self.uses(path, part)

    def used(self):
        """What pages, examples and the commands that are shown use, and what the library raises."""
        found, commands = set(), self.paths["memtraffic.cli"]
        for path, tree in self.trees.items():
            if is_user(path):
                found |= self.uses(path, tree)
            elif path.startswith("src/"):
                raised = [self.uses(path, it) for it in walk(tree) if isinstance(it, ast.Raise)]
                found |= {it for each in raised for it in each if it[0].endswith("/errors.py")}
        for path, text in self.texts.items():
            if is_user(path) or path == "README.md":
                for name in re.findall(r"(?:\$|python -m) memtraffic (\w+)", text):
                    if name in self.defined[commands]:
                        found |= self.uses(commands, self.defined[commands][name])
        new = found
        while new:
            new = {it for each in new for it in self.results(*each)} - found
            found |= new
        return found

    def public(self):
        """The full names in an `__all__` of the library, or in api.md."""
        for module, path in self.paths.items():
            if "__all__" in self.defined[path] and path.startswith("src/memtraffic/"):
                yield from (f"{module}.{name}" for name in import_module(module).__all__)
        blocks = re.compile(r"^```{api} (\S+)\n(.*?)^```", re.M | re.S)
        for module, names in blocks.findall(self.texts[API]):
            nodes = self.defined[self.paths[module]]
            own = [it for it in nodes if it[0] != "_" and not isinstance(nodes[it], ast.Assign)]
            yield from (f"{module}.{name}" for name in names.split() or own)

    def unused(self):
        used = self.used()
        whole = {path for path, _ in used}
        for full in self.public():
            found = self.resolve(full)
            if found not in used and (not found or found[1] or found[0] not in whole):
                yield full

    def unshown(self, experiments):
        """The experiments that no page asks for, as `id` or `ids` of what it calls."""
        asked = set(re.findall(r"^```{recordings} (\w+)", self.texts["book/recordings.md"], re.M))
        for path in filter(is_page, self.trees):
            for call in walk(self.trees[path]):
                if isinstance(call, ast.Call) and self.takes_ids(path, call.func):
                    for name in {it.id for it in walk(call) if isinstance(it, ast.Name)}:
                        if isinstance(table := self.defined[path].get(name), ast.Assign):
                            asked.update(strings(table.value))
                    asked.update(strings(call))
        return {id for id in experiments if not any(re.fullmatch(it, id) for it in asked)}

    def takes_ids(self, path, function):
        first, *rest = dotted(function) or [""]
        there = self.resolve(".".join([self.bound[path].get(first, ""), *rest])) or (path, "")
        node = self.defined[there[0]].get(there[1])
        given = [*node.args.args, node.args.vararg] if isinstance(node, ast.FunctionDef) else []
        return any(it and it.arg in ("id", "ids") for it in given)

    def lonely(self):
        """The modules of `src` that only tests import, and nothing starts."""
        found = set(re.findall(r"[\w./]+", self.texts["Makefile"]))
        found.update(re.findall(r"([\w.]+):", self.texts["pyproject.toml"]))
        for path, tree in self.trees.items():
            names = {it.partition(":")[0] for it in strings(tree)} | {
                *dict(imported(tree)).values()
            }
            found |= names - {module_of(path)}
        for module, path in self.paths.items():
            if not any(f"{it}.".startswith(f"{module}.") or it == path for it in found):
                if not path.endswith("__main__.py"):
                    yield module


# ---- the tests


def test_rooms_keep_to_their_limits():
    assert not list(wrong_sizes(repository()))


def test_what_is_public_is_used_and_what_is_measured_is_shown():
    sources = Sources(repository())
    assert not [*sources.unused(), *sources.unshown(EXPERIMENTS)], "no page or example uses these"
    assert not [*sources.lonely()], "only tests import these"


def test_folded_code_of_a_chapter_is_short():
    room = re.compile(ROOMS["chapters"])
    lines = {path: size(path, text)[0] for path, text in repository().items() if room.match(path)}
    long = [path for path, n in lines.items() if n > CHAPTER]
    assert [path for path in long if not path.endswith("/timing.py")] == []  # which is looked up


def test_size_counts_neither_comments_nor_docstrings():
    text = '"""Module.\n\nMore."""\nx = """a\nb"""  # why\n\ndef f(\n    a,\n):\n    """F."""\n'
    assert size("m.py", text) == (5, 4)
    assert size("m.js", "/* one\ntwo */\n// three\n\nlet x = 1; // four\n") == (1, 0)
    cell = {"cell_type": "code", "source": ["%matplotlib inline\n", "x = 1\n", "!ls"]}
    assert size("m.ipynb", json.dumps({"cells": [cell, {**cell, "cell_type": "raw"}]})) == (1, 1)


def test_limits_catch_a_module_of_300_lines_and_fall_with_one_that_goes():
    more = repository() | {"src/memtraffic/meters/planted.py": "x = 1\n" * 300}
    assert {it.split(":")[0] for it in wrong_sizes(more)} >= {"library", "meters"}
    less = {path: text for path, text in repository().items() if "/meters/" not in path}
    assert any(it.startswith("meters: lower the limit") for it in wrong_sizes(less))


MODULE, PAGE = "src/memtraffic/planted.py", "book/planted.md"
PLANTED = "class Result: ...\n\ndef function() -> Result: ...\n\ndef other() -> Result: ...\n"


def planted(page=""):
    """The code with a module that api.md names, and a page."""
    api = repository()[API] + "\n```{api} memtraffic.planted\n```\n"
    code = f"```python\n{page}\n```\n"
    return Sources(repository() | {MODULE: PLANTED, API: api, PAGE: code})


@pytest.mark.parametrize(
    ("page", "unused"),
    [
        ("", {"Result", "function", "other"}),
        (
            "from memtraffic import planted\n'planted.function'  # planted.other()",
            {"Result", "function", "other"},
        ),
        ("import memtraffic.planted\nmemtraffic.planted.function()", {"other"}),
        ("from memtraffic import planted as p\np.other(p.function)", set()),
    ],
)
def test_unused_are_what_only_api_md_names(page, unused):
    found = planted(page)
    assert {*found.unused()} == {f"memtraffic.planted.{it}" for it in unused}
    assert ("memtraffic.planted" in found.lonely()) == (not page)


def test_unshown_are_experiments_that_no_page_asks_for():
    asks = "from memtraffic_book import experiment, experiments\nnames = ['third']\n"
    asks += "experiment('first'), experiments(f'second_{1}', *names), print('fourth')"
    ids = ["first", "second_float32", "third", "fourth"]
    assert planted(asks).unshown(ids) == {"fourth"}
    assert planted().unshown(ids) == {*ids}


if __name__ == "__main__":
    for room, (lines, statements) in sizes(repository()).items():
        print(f'    "{room}": ({lines}, {statements}),')
