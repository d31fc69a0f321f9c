"""One plain Python file for each kernel that a chapter builds: it runs without the package.

It holds the kernel and its launcher as they stand in the package, and all that they need. In place
of the package's launch code it has that of `plain_launch`. Everything is read from the sources,
because the environment that builds the book has no PyTorch.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOFTMAX = "memtraffic.kernels.softmax"
LAUNCH = "plain_launch"
# By chapter: the module of its launcher, whose docstring is the file's.
KERNELS = {
    name: f"{SOFTMAX}.{name}"
    for name in ("naive", "fused", "masked", "tiled", "chunks", "persistent")
}
HEAD = '''\
"""{docstring}

From the book Memory traffic, which explains it in the chapter {chapter}.{shorter}
Compare it with torch.softmax: python {file}

SPDX-License-Identifier: MIT. {copyright}
"""
'''
SHORTER = (
    " The kernel is the\nbook's, unchanged; the code that launches it is shorter, and checks less."
)
INTERPRET = """\
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
"""
COMPARISON = """\
if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in {shapes}:
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(softmax(x), torch.softmax(x, dim=1))
    print("equal to torch.softmax")
"""
SHAPES = (1, 1), (37, 64), (5, 8192)
ODD = *SHAPES, (37, 33), (5, 781)  # not for a kernel that takes powers of two alone


class Place(NamedTuple):
    """Where a name is defined."""

    module: str
    name: str


class Sources:
    """Modules, parsed once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._texts: dict[str, str] = {}
        self._names: dict[str, dict[str, ast.stmt]] = {}

    def text(self, module: str) -> str:
        if module not in self._texts:
            folder = self.root / ("book/_ext" if module == LAUNCH else "src")
            path = folder.joinpath(*module.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._texts[module] = path.read_text("utf-8")
        return self._texts[module]

    def names(self, module: str) -> dict[str, ast.stmt]:
        """The statement that defines or imports each name of a module."""
        if module not in self._names:
            body = ast.parse(self.text(module)).body
            self._names[module] = {name: node for node in body for name in bound(node)}
        return self._names[module]

    def kind(self, place: Place) -> int:
        """Constants come first, then what runs on the GPU, then what launches it."""
        node = self.names(place.module)[place.name]
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return 0
        return 2 - ("triton.jit" in map(ast.unparse, getattr(node, "decorator_list", ())))

    def definition(self, place: Place) -> str:
        """The lines of a definition and of the comment above it, without examples."""
        lines = self.text(place.module).splitlines()
        node = self.names(place.module)[place.name]
        first = min(it.lineno for it in (node, *getattr(node, "decorator_list", ()))) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        text = "\n".join(lines[first : node.end_lineno])
        return re.sub(r'\n\n +>>> .+?(?=\n\n|\n *""")', "", text, flags=re.S)


def bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines or imports."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (
            name.id for it in targets for name in ast.walk(it) if isinstance(name, ast.Name)
        )


class Linker:
    """Gathers a definition and all that it needs, what is needed first.

    Raises LookupError for two definitions of one name, and for a module of the package that is
    used as a value: a plain file cannot hold either.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.places: dict[str, Place] = {}  # of what was gathered, in order
        self.imports: dict[str, set[str]] = {}  # names by module, of other libraries

    def gather(self, module: str, name: str) -> None:
        """Adds what `module` calls `name`."""
        node = self.sources.names(module)[name]
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._gather_imported(node, name)
            return
        place = Place(module, name)
        if self.places.get(name, place) != place:
            raise LookupError(f"{name} is defined in {module} and {self.places[name].module}")
        if name in self.places:
            return
        named = [it for it in ast.walk(node) if isinstance(it, ast.Name)]
        own = {it.arg for it in ast.walk(node) if isinstance(it, ast.arg)}
        own |= {it.id for it in named if isinstance(it.ctx, ast.Store)}
        used = {it.id for it in named} - own
        known = [it for it in self.sources.names(module) if it in used]
        for other in known:
            self.gather(module, other)
        self.places[name] = place

    def _gather_imported(self, node: ast.Import | ast.ImportFrom, name: str) -> None:
        [alias] = (it for it in node.names if (it.asname or it.name) == name)
        origin = (node.module if isinstance(node, ast.ImportFrom) else alias.name) or ""
        if origin.split(".")[0] != "memtraffic":
            whole = isinstance(node, ast.Import)  # as "", the name of no definition
            module, part = (ast.unparse(alias), "") if whole else (origin, ast.unparse(alias))
            self.imports.setdefault(module, set()).add(part)
            return
        own = self.sources.names(LAUNCH).get(alias.name)
        if own is not None and not isinstance(own, ast.Import | ast.ImportFrom):
            origin = LAUNCH
        if (
            isinstance(node, ast.Import)
            or alias.asname
            or alias.name not in self.sources.names(origin)
        ):
            raise LookupError(f"{ast.unparse(node)}: only definitions can be taken along")
        self.gather(origin, alias.name)


def file_name(chapter: str) -> str:
    return f"softmax_{chapter}.py"


def plain_file(chapter: str, sources: Sources) -> str:
    """The source of the file for the kernel of `chapter`, one of KERNELS."""
    module, linker = KERNELS[chapter], Linker(sources)
    linker.gather(module, "softmax")
    docstring = ast.get_docstring(ast.parse(sources.text(module))) or ""
    [copyright] = re.findall(r"^Copyright.*", (sources.root / "LICENSE").read_text("utf-8"), re.M)
    head = HEAD.format(
        docstring=docstring,
        chapter=chapter,
        shorter=SHORTER if any(it.module == LAUNCH for it in linker.places.values()) else "",
        copyright=copyright,
        file=file_name(chapter),
    )
    imports = linker.imports
    imports.setdefault("torch", set()).add("")
    triton = {it for it in imports if it.startswith("triton")}
    if triton:
        imports["os"] = {""}
    standard = {it for it in imports if it.split(".")[0] in sys.stdlib_module_names}
    blocks = [import_block(imports, it) for it in (standard, imports.keys() - standard - triton)]
    if triton:
        blocks += [INTERPRET.rstrip(), import_block(imports, triton)]
    text = head + "\n" + "\n\n".join(filter(None, blocks))
    for constants, places in itertools.groupby(
        sorted(linker.places.values(), key=sources.kind), lambda it: sources.kind(it) == 0
    ):
        definitions = dict.fromkeys(map(sources.definition, places))  # two may share a statement
        text += (
            "\n\n" + "\n".join(definitions)
            if constants
            else "".join(map("\n\n\n{}".format, definitions))
        )
    comparison = COMPARISON.format(shapes=SHAPES if chapter == "fused" else ODD)
    return f"{text}\n\n\n{comparison}"


def import_block(imports: dict[str, set[str]], modules: Set[str]) -> str:
    """The statements that import `modules`, or names of them."""
    whole = [f"import {it}" for it in sorted(modules) if "" in imports[it]]
    named = [(it, ", ".join(sorted(imports[it] - {""}))) for it in sorted(modules)]
    parts = [f"from {it} import {names}" for it, names in named if names]
    return "\n".join(whole + parts)


def write_plain_files(folder: Path, root: Path = ROOT) -> list[Path]:
    """Writes the plain file of each kernel of the checkout `root` into `folder`."""
    sources = Sources(root)
    folder.mkdir(parents=True, exist_ok=True)
    for chapter in KERNELS:
        (folder / file_name(chapter)).write_text(plain_file(chapter, sources), "utf-8")
    return [folder / file_name(chapter) for chapter in KERNELS]
