"""The chapters as self-contained notebooks for Google Colab: each has the package inside.

Every `book/<name>.ipynb` becomes `FOLDER/<name>.ipynb`. Its set-up cell unpacks one archive, which
holds the package and the recordings, and installs nothing. With `repository.url` in _config.yml the
archive lies beside the notebooks, and the cell fetches it from there: the repository's branch
gh-pages. A notebook outside the book's site has no MyST, so what only MyST understands is resolved
here: quoted values, relative links, folded cells. A cell that raises on purpose prints its error
instead, so that "Run all" reaches the end.

The script needs a checkout, nbformat and PyYAML, but neither the package nor PyTorch:

    python src/memtraffic_book/colab.py FOLDER

With `--markdown FILE` it also writes the whole book as one file of plain Markdown.
"""

import argparse
import ast
import base64
import hashlib
import io
import os
import re
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from inspect import getsource
from pathlib import Path

import nbformat
import yaml

RECORD = "application/papermill.record/text/plain"
FOLDERS = ("book/recordings", "examples/survey", "src/memtraffic", "src/memtraffic_book")

# How the set-up cell begins: with what `set_up` needs. tests/book/test_colab.py
# compiles the kernels for a T4.
START = """# @title Set-up: unpack the book's package, look for a GPU
# @markdown Not run on a T4, which Colab lends for free; but the kernels were compiled for one.
import hashlib, io, os, sys, tarfile, urllib.request"""

SHOWN = 'print(f"{type(error).__name__}: {error}")'  # in place of an error that is meant

# What the pages have of MyST: a block between fences, a role, a code span, an image, and a link to
# another page. The last two are not absolute.
MYST = r"""(?msx)
    ^(?P<fence>`{3,}|:{3,})(?P<directive>\{)?[^\n]*\n.*?^(?P=fence)$
    | \{(?P<role>[\w:-]+)\}`(?:(?P<page>[^`]+)::)?(?P<name>[^`:]+):?(?P<form>[^`]*)`
    | `[^`]+`
    | (?P<image>!?)\[(?P<label>[^\]]*)\]\((?![a-z]+:)(?P<target>[^)#]+)(?P<fragment>[^)]*)\)
"""


def set_up(address: str, digest: str) -> None:
    """Unpacks the package, the archive at an address, and looks for a GPU; installs nothing."""
    try:
        data = urllib.request.urlopen(address).read()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("this notebook has another package")
    except Exception as error:  # of the network, or of what arrived
        raise RuntimeError("The package is not whole: open the chapter anew.") from error
    folder = os.path.abspath(f"memtraffic-{digest[:8]}")
    source, there = f"{folder}/src", sys.modules.get("memtraffic")
    if there and not str(there.__file__).startswith(source):
        raise RuntimeError(f"{there.__file__} is imported: restart, then run this cell first.")
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        files.extractall(folder, filter="data")
    os.environ["MEMTRAFFIC_RECORDINGS"] = f"{folder}/book/recordings"
    os.environ["PYTHONPATH"] = f"{source}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    sys.path.insert(0, source)

    from memtraffic import device, progress  # before Triton: it decides what runs the kernels

    progress.enable(notebook=True)
    if not device.HAS_GPU:
        print("There is no GPU here: kernels are interpreted, and measured results are replayed.")
        print("To measure: Runtime > Change runtime type > T4 GPU > Save, then Runtime > Run all.")


def pack(root: Path) -> bytes:
    """The package and the recordings of the checkout `root` as a tar.xz archive.

    The same files give the same bytes: times, owners and modes are left out.
    """

    def plain(it: tarfile.TarInfo) -> tarfile.TarInfo | None:
        it.mtime, it.mode, it.uid, it.gid, it.uname, it.gname = 0, 0o755, 0, 0, "", ""
        return None if it.name.endswith("/__pycache__") else it

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz", preset=9) as files:
        for folder in FOLDERS:
            files.add(root / folder, folder, filter=plain)
    return data.getvalue()


def glued(notebook: nbformat.NotebookNode) -> dict[str, object]:
    """What the cells of a notebook kept for the text, by name, read from its stored outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kept = [output for output in outputs if RECORD in output.get("data", {})]
    return {it.metadata.scrapbook.name: ast.literal_eval(it.data[RECORD]) for it in kept}


class Book:
    """The book of the checkout `root`, to be read without its site.

    A link to a page leads to `html.baseurl` or, without, to `repository.url`: both stand in
    _config.yml. Raises ValueError, which names the page, for MyST that has no rule here.
    """

    def __init__(self, root: Path) -> None:
        self.root, paths = root, sorted((root / "book").glob("*.ipynb"))
        self.notebooks = {path.name: nbformat.read(path, as_version=4) for path in paths}
        self.values = {name: glued(notebook) for name, notebook in self.notebooks.items()}
        config = yaml.safe_load((root / "_config.yml").read_bytes())
        self.repository = config["repository"]["url"].rstrip("/")
        self.branch = config["repository"]["branch"]
        self.site = config["html"].get("baseurl", "").rstrip("/")

    def write_notebooks(self, folder: Path) -> None:
        """Writes a notebook for each chapter, and the archive that they fetch.

        Without `repository.url` the archive is in each notebook.
        """
        digest = hashlib.sha256(archive := pack(self.root)).hexdigest()
        address = f"data:;base64,{base64.b64encode(archive).decode()}"
        folder.mkdir(parents=True, exist_ok=True)
        if self.repository:
            name = f"memtraffic-{digest[:8]}.tar.xz"
            (folder / name).write_bytes(archive)
            address = f"{self.repository}/raw/gh-pages/_sources/book/{name}"
        source = f'{START}\n\n\n{getsource(set_up)}\n\nset_up("{address}", "{digest}")\n'
        first = nbformat.v4.new_code_cell(source, id="set-up", metadata={"cellView": "form"})
        for page, notebook in self.notebooks.items():
            title, *rest = self.cells(page, runs=True)
            made = nbformat.from_dict(notebook | {"cells": [title, first, *rest]})
            nbformat.write(made, folder / page)

    def markdown(self) -> str:
        """All pages in their order as Markdown, for readers that see no pictures."""
        pages, toc = [], (self.root / "_toc.yml").read_text("utf-8")
        for name in re.findall(r"(?:root|file): book/(\S+)", toc):
            if f"{name}.ipynb" in self.notebooks:
                parts = map(said, self.cells(f"{name}.ipynb", runs=False))
                pages.append("\n\n".join(filter(None, parts)))
            else:
                text = (self.root / "book" / f"{name}.md").read_text("utf-8")
                pages.append(self.text(f"{name}.md", text).strip())
        return re.sub(r"!\[([^\]]*)\]\(data:[^)]+\)", r"*\1*", "\n\n---\n\n".join(pages) + "\n")

    def cells(self, page: str, runs: bool) -> Iterator[nbformat.NotebookNode]:
        """The cells of a notebook that readers see.

        runs: whether those that raise on purpose print the error instead.
        """
        for cell in nbformat.from_dict(self.notebooks[page]).cells:
            tags = cell.metadata.get("tags", [])
            if cell.cell_type == "markdown":
                cell.source = self.text(page, cell.source)
            elif "raises-exception" in tags and runs:
                body = cell.source.replace("\n", "\n    ")
                cell.source = f"try:\n    {body}\nexcept Exception as error:  # meant\n    {SHOWN}"
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):  # its alt text
                    output.metadata = {"image/png": cell.metadata.mystnb.image}
            if "remove-cell" not in tags:  # it imports the package, or keeps values for the text
                yield cell

    def text(self, page: str, markdown: str) -> str:
        """MyST Markdown of a page as Markdown that any notebook shows."""
        return re.sub(MYST, lambda match: self._plain(page, match), markdown)

    def _plain(self, page: str, match: re.Match[str]) -> str:
        label, target = match["label"], match["target"]
        if match["image"]:
            data = base64.b64encode((self.root / "book" / target).read_bytes()).decode()
            return f"![{label}](data:image/{'png' if 'png' in target else 'svg+xml'};base64,{data})"
        if target:
            address = self.repository and f"{self.repository}/blob/{self.branch}/book/{target}"
            if self.site and target.endswith((".ipynb", ".md")):
                address = f"{self.site}/book/{target.rpartition('.')[0]}.html"
            return f"[{label}]({address}{match['fragment']})" if address else label
        values = self.values.get(match["page"] or page, {})
        if match["role"] == "glue:text" and match["name"] in values:
            return format(values[match["name"]], match["form"])
        of_the_site = page.endswith(".md") or "occupancy-chart" in match[0]
        if match["role"] or (match["directive"] and not of_the_site):
            raise ValueError(f"{page}: no rule, or no stored value, for {match[0]}")
        if match[0].startswith("```{glossary}"):  # each term in bold, before its definition
            return self.text(page, re.sub(r"(?m)^(\S.*)$", r"**\1**", match[0][13:-4]))
        return "" if match["directive"] else match[0]


def said(cell: nbformat.NotebookNode) -> str:
    """A cell as Markdown: its text or its visible code, then what it says."""
    if cell.cell_type == "markdown":
        return str(cell.source).strip()
    folded = "hide-input" in cell.metadata.get("tags", [])
    parts = [] if folded else [f"```python\n{cell.source}\n```"]
    for output in cell.outputs:
        data = {"text/plain": output.get("text") or "".join(output.get("traceback", ""))}
        data |= output.get("data", {})
        text = (data.get("text/markdown") or data["text/plain"]).strip()
        if "image/png" in data:
            parts.append(f"*{output.metadata['image/png'].alt}*")
        elif text:
            parts.append(text if "text/markdown" in data else f"```\n{text}\n```")
    return "\n\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write self-contained notebooks for Google Colab.")
    parser.add_argument("folder", type=Path, help="where the notebooks go")
    parser.add_argument("--markdown", type=Path, help="where all of the book goes as Markdown")
    chosen, book = parser.parse_args(), Book(Path(__file__).resolve().parents[2])
    book.write_notebooks(chosen.folder)
    if chosen.markdown:
        chosen.markdown.write_text(book.markdown(), "utf-8")
