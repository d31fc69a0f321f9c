"""The chapters as self-contained notebooks for Google Colab: each has the package inside.

Every `book/<name>.ipynb` becomes `FOLDER/<name>.ipynb`. Its set-up cell unpacks one archive, which
holds the package and the recordings, and installs nothing. With `repository.url` in _config.yml the
archive lies beside the notebooks, and the cell fetches it from there: the repository's branch
gh-pages. A notebook outside the book's site has no MyST, so what only MyST understands is resolved
here: quoted values, relative links, folded cells. A cell that raises on purpose prints its error
instead, so that "Run all" reaches the end.

The script needs a checkout and PyYAML, but neither the package nor PyTorch:

    python src/memtraffic_book/colab.py FOLDER

With `--markdown FILE` it also writes the whole book as one file of plain Markdown.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import io
import json
import mimetypes
import re
import tarfile
import textwrap
from inspect import getsource
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RECORD = "application/papermill.record/text/plain"
FOLDERS = ("book/recordings", "examples/survey", "src/memtraffic", "src/memtraffic_book")
# Ends of paths. The modules make the book.
LEFT_OUT = ("/__pycache__", "_book/__main__.py", "/build.py", "/colab.py", "/moving.py")

TITLE = "# @title Set-up: unpack the book's package, look for a GPU"
# tests/book/test_colab.py compiles them.
NOT_RUN = """
# @markdown This notebook was not run on a T4, the GPU that Colab lends for free; its kernels were
# @markdown compiled for one."""

# A block between fences, a role, a code span, or a link or an image that is not absolute.
MYST = re.compile(
    r"""
    ^(?P<fence>`{3,}|~{3,}|:{3,})(?P<info>[^\n`]*)\n.*?^(?P=fence)[ \t]*$
    | \{(?P<role>[\w:-]+)\}`(?:(?P<page>[^`]+)::)?(?P<name>[^`:]+):?(?P<form>[^`]*)`
    | (?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)
    | (?P<image>!?)\[(?P<label>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:|//)(?P<target>[^\s()]+)\)
    """,
    re.M | re.S | re.X,
)

PICTURE = re.compile(r"!\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(data:[^)]+\)")  # and its alt text
Json = dict[str, Any]


def set_up(address: str, digest: str) -> None:
    """Unpacks the package, the archive at an address, and looks for a GPU; installs nothing."""
    import hashlib
    import importlib.util
    import io
    import os
    import sys
    import tarfile
    from pathlib import Path
    from urllib.request import urlopen

    try:
        data = urlopen(address).read()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("it is not what this notebook was written with")
    except Exception as error:  # of the network, or of what arrived
        again = "Open the chapter anew from where you have it, then run this cell."
        raise RuntimeError(f"The book's package did not arrive whole. {again}") from error
    folder = Path(f"memtraffic-{digest[:8]}").resolve()
    source, there = str(folder / "src"), importlib.util.find_spec("memtraffic")
    if there and not str(there.origin).startswith(source):
        again = "Uninstall it, restart the session, then run this cell first."
        raise RuntimeError(f"Python has another memtraffic: {there.origin}. {again}")
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        files.extractall(folder, filter="data")
    os.environ["MEMTRAFFIC_RECORDINGS"] = str(folder / "book" / "recordings")
    os.environ["PYTHONPATH"] = f"{source}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    sys.path.insert(0, source)

    import torch

    from memtraffic.progress import enable  # before Triton: it decides what runs the kernels

    enable(notebook=True)
    if torch.cuda.is_available():
        print(f"GPU: {torch.cuda.get_device_name()}. Cells that measure say its name, or")
        print("that they replay. The numbers in the text come from the book's recordings.")
    else:
        print("There is no GPU here: Triton's interpreter, if it is installed, runs the kernels,")
        print(
            "and measured results are replayed. Each says on which GPU it was recorded. To measure:"
        )
        print("Runtime > Change runtime type > T4 GPU > Save, then Runtime > Run all.")


def pack(root: Path) -> bytes:
    """The package and the recordings of the checkout `root` as a tar.xz archive.

    The same files give the same bytes: times, owners and modes are left out.
    """

    def plain(it: tarfile.TarInfo) -> tarfile.TarInfo | None:
        it.mtime, it.mode, it.uid, it.gid, it.uname, it.gname = 0, 0o755, 0, 0, "", ""
        return None if it.name.endswith(LEFT_OUT) else it

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz", preset=9) as files:
        for folder in FOLDERS:
            files.add(root / folder, folder, filter=plain)
    return data.getvalue()


def glued(notebook: Json) -> dict[str, Any]:
    """What the cells of a notebook kept for the text, by name, read from its stored outputs."""
    return {
        output["metadata"]["scrapbook"]["name"]: ast.literal_eval("".join(output["data"][RECORD]))
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
        if RECORD in output.get("data", {})
    }


def catch(source: str) -> str:
    """The code of a cell that raises on purpose, changed so that it prints the error and ends.

    >>> print(catch("import math\\nmath.sqrt(-1)"), end="")
    try:
        import math
        math.sqrt(-1)
    except Exception as error:  # meant: this is where it breaks
        print(f"{type(error).__name__}: {error}")
    """
    return f"""try:
{textwrap.indent(source.rstrip(), "    ")}
except Exception as error:  # meant: this is where it breaks
    print(f"{{type(error).__name__}}: {{error}}")
"""


class Book:
    """The book of the checkout `root`, to be read without its site.

    A link to a page leads to `html.baseurl` or, without, to `repository.url`: both stand in
    _config.yml. Raises ValueError, which names the page, for MyST that has no rule here.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root, paths = root, sorted((root / "book").glob("*.ipynb"))
        self.notebooks: dict[str, Json] = {it.name: json.loads(it.read_bytes()) for it in paths}
        self.values = {name: glued(notebook) for name, notebook in self.notebooks.items()}
        config = yaml.safe_load((root / "_config.yml").read_bytes()) or {}
        places = config.get("repository", {})
        self.site = (config.get("html", {}).get("baseurl") or "").rstrip("/")
        self.repository = (places.get("url") or "").rstrip("/")
        self.branch = places.get("branch", "main")

    def write_notebooks(self, folder: Path) -> list[Path]:
        """Writes a notebook for each chapter, and the archive that they fetch; returns the paths.

        Without `repository.url` the archive is in each notebook.
        """
        archive = pack(self.root)
        digest = hashlib.sha256(archive).hexdigest()
        address = f"data:;base64,{base64.b64encode(archive).decode()}"
        folder.mkdir(parents=True, exist_ok=True)
        if self.repository:
            name = f"memtraffic-{digest[:8]}.tar.xz"
            (folder / name).write_bytes(archive)
            address = f"{self.repository}/raw/gh-pages/_sources/book/{name}"
        given = f'ADDRESS = "{address}"\nDIGEST = "{digest}"'
        source = f"{TITLE}{NOT_RUN}\n{given}\n\n\n{getsource(set_up)}\n\nset_up(ADDRESS, DIGEST)\n"
        first: Json = {"cell_type": "code", "id": "set-up", "metadata": {"cellView": "form"}}
        first |= {"source": source, "outputs": [], "execution_count": None}
        for page, notebook in self.notebooks.items():
            title, *rest = self.cells(page, runs=True)
            made = notebook | {"cells": [title, first, *rest]}
            text = json.dumps(made, ensure_ascii=False, indent=1) + "\n"
            (folder / page).write_text(text, "utf-8")
        return [folder / page for page in self.notebooks]

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
        return PICTURE.sub(r"*\1*", "\n\n---\n\n".join(pages) + "\n")

    def cells(self, page: str, runs: bool) -> list[Json]:
        """The cells of a notebook that readers see.

        runs: whether those that raise on purpose print the error instead.
        """
        found = []
        for cell in self.notebooks[page]["cells"]:
            source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
            if cell["cell_type"] == "markdown":
                source = self.text(page, source)
            elif "raises-exception" in tags and runs:
                source = catch(source)
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):  # its alt text
                    output["metadata"] = {"image/png": cell["metadata"]["mystnb"]["image"]}
            if "remove-cell" not in tags:  # it imports the package, or keeps values for the text
                found.append(cell | {"source": source})
        return found

    def text(self, page: str, markdown: str) -> str:
        """MyST Markdown of a page as Markdown that any notebook shows."""
        return MYST.sub(lambda match: self._plain(page, match), markdown)

    def _plain(self, page: str, match: re.Match[str]) -> str:
        label, target, name = match["label"], match["target"], match["name"]
        if match["ticks"] or (match["fence"] and "{" not in match["info"]):
            return match[0]
        if match["image"]:
            kind = mimetypes.guess_type(target)[0]
            data = base64.b64encode((self.root / "book" / target).read_bytes()).decode()
            return f"![{label}](data:{kind};base64,{data})"
        if target:
            label, address = self.text(page, label), self.link(page, target)
            return f"[{label}]({address})" if address else label
        if match["fence"] and (page.endswith(".md") or "occupancy-chart" in match[0]):
            return ""  # only the site has it
        values = self.values.get(match["page"] or page, {})
        if match["role"] == "glue:text" and name in values:
            return format(values[name], match["form"])
        raise ValueError(f"{page}: no rule, or no stored value, for {match[0]}")

    def link(self, page: str, target: str) -> str:
        """The absolute address of a relative link on a page, or ""."""
        name, mark, fragment = target.partition("#")
        stem, _, suffix = (name or page).rpartition(".")
        if self.site and suffix in ("ipynb", "md"):
            return f"{self.site}/book/{stem}.html{mark}{fragment}"
        blob = f"{self.repository}/blob/{self.branch}/book"
        return f"{blob}/{name or page}{mark}{fragment}" if self.repository else ""


def said(cell: Json) -> str:
    """A cell as Markdown: its text or its visible code, then what it says."""
    if cell["cell_type"] == "markdown":
        return str(cell["source"]).strip()
    folded = "hide-input" in cell["metadata"].get("tags", [])
    parts = [] if folded else [f"```python\n{cell['source']}\n```"]
    for output in cell["outputs"]:
        data = {"text/plain": output.get("text") or output.get("traceback", "")}
        data |= output.get("data", {})
        text = "".join(data.get("text/markdown") or data["text/plain"]).strip()
        if "image/png" in data:
            parts.append(f"*{output['metadata']['image/png']['alt']}*")
        elif text:
            parts.append(text if "text/markdown" in data else f"```\n{text}\n```")
    return "\n\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write self-contained notebooks for Google Colab.")
    parser.add_argument("folder", type=Path, help="where the notebooks go")
    parser.add_argument("--markdown", type=Path, help="where all of the book goes as Markdown")
    chosen, book = parser.parse_args(), Book()
    print(f"{len(book.write_notebooks(chosen.folder))} notebooks for Colab in {chosen.folder}")
    if chosen.markdown:
        chosen.markdown.write_text(book.markdown(), "utf-8")
