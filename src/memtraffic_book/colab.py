"""The chapters as self-contained notebooks for Google Colab: each has the package inside.

Every `book/<name>.ipynb` becomes `FOLDER/<name>.ipynb`. Its set-up cell unpacks the package and
installs nothing. A notebook outside the book's site has no MyST, so what only MyST understands is
resolved here: quoted values, relative links, folded cells. A cell that raises on purpose prints its
error instead, so that "Run all" reaches the end.

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
import lzma
import mimetypes
import posixpath
import re
import tarfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RECORD = "application/papermill.record/text/plain"
FOLDERS = ("book/recordings", "examples/survey", "src/memtraffic", "src/memtraffic_book")
# These make the book.
LEFT_OUT = (
    "__main__.py",
    "build.py",
    "colab.py",
    "figures/moving.py",
)
# For text, which has no words of two or four bytes.
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]
REMOVED = "remove-cell"  # a tag: a page shows neither code nor output
FOLDED = {"hide-input", "hide-cell", "remove-input", REMOVED}
METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

SET_UP = '''\
# @title Set-up: unpack the book's package, look for a GPU
def set_up(archive):
    import base64
    import importlib.util
    import io
    import os
    import sys
    import tarfile
    from pathlib import Path

    folder = Path("memtraffic-{digest}").resolve()  # nothing is installed
    if not folder.is_dir():
        part = folder.with_name(folder.name + ".part")
        data = io.BytesIO(base64.b85decode("".join(archive.split())))
        with tarfile.open(fileobj=data, mode="r:xz") as files:
            files.extractall(part, filter="data")
        part.rename(folder)
    os.environ["MEMTRAFFIC_RECORDINGS"] = str(folder / "book" / "recordings")
    source = str(folder / "src")
    if source not in sys.path:
        sys.path.insert(0, source)
        # for processes that a cell starts
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([source, *([others] if others else [])])

    import torch

    import memtraffic  # before Triton: it decides what runs the kernels
    from memtraffic.progress import enable

    enable(notebook=True)
    switch = "Runtime > Change runtime type > T4 GPU > Save, then Runtime > Run all"
    if torch.cuda.is_available():
        print(f"GPU: {{torch.cuda.get_device_name()}}. Cells that measure say its name, or")
        print("that they replay. The numbers in the text come from the book's recordings.")
    else:
        print("There is no GPU here: Triton's interpreter runs the kernels, and measured")
        print("results are replayed. Each says on which GPU it was recorded.")
        print(f"To measure a GPU yourself: {{switch}}.")
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed here, and the chapter's kernels need it.")
        print(f"A runtime with a GPU has it: {{switch}}.")


set_up("""
{archive}
""")
'''

# Below the title. tests/book/test_colab.py compiles them.
NOT_RUN = (
    "This notebook was not run on a T4, the GPU that Colab lends for free; its kernels were "
    "compiled for one."
)

# A block between fences, a role, a code span, or a link or an image.
MYST = re.compile(
    r"""
    ^(?P<fence>`{3,}|~{3,}|:{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$
    | \{(?P<role>[\w:-]+)\}`(?P<text>[^`]+)`
    | (?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)
    | (?P<image>!?)\[(?P<label>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^\s()]+)\)
    """,
    re.M | re.S | re.X,
)
SCRIPT = re.compile(rb"<script.*?</script>\n?", re.S)  # what moves a figure on the site
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.I)

Json = dict[str, Any]
LINE = 1000  # characters of the archive; a notebook adds ten to each line


def pack(root: Path) -> bytes:
    """The package and the recordings of the checkout `root` as a tar.xz archive.

    The same files give the same bytes: times, owners and modes are left out.
    """
    made_with = [root / "src" / "memtraffic_book" / name for name in LEFT_OUT]
    data = io.BytesIO()
    packed = lzma.open(data, "wb", filters=XZ)
    with packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(it for folder in FOLDERS for it in (root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path not in made_with:
                member = tarfile.TarInfo(path.relative_to(root).as_posix())
                member.size = path.stat().st_size
                archive.addfile(member, io.BytesIO(path.read_bytes()))
    return data.getvalue()


def linker(root: Path) -> Callable[[str, str], str]:
    """A function of a page's name and a relative link on it: its absolute address, or "".

    A page of the book leads to `html.baseurl`, any other file of the checkout `root` to
    `repository.url`; a page too, if only the repository has an address. Both stand in _config.yml.
    """
    config = yaml.safe_load((root / "_config.yml").read_text("utf-8")) or {}
    places = config.get("repository") or {}
    base = ((config.get("html") or {}).get("baseurl") or "").rstrip("/")
    repository, branch = (places.get("url") or "").rstrip("/"), places.get("branch") or "main"

    def absolute(page: str, target: str) -> str:
        name, mark, fragment = target.partition("#")
        path = posixpath.normpath(posixpath.join("book", name or f"{page}.ipynb"))
        stem, suffix = posixpath.splitext(path)
        if base and path.startswith("book/") and suffix in (".ipynb", ".md"):
            return f"{base}/{stem}.html{mark}{fragment}"
        if repository and (root / path).exists():  # some pages are made with the site
            return f"{repository}/blob/{branch}/{path}{mark}{fragment}"
        return ""

    return absolute


def glued(notebook: Json) -> dict[str, Any]:
    """What the cells of a notebook kept for the text, by name, read from its stored outputs."""
    outputs = (output for cell in notebook["cells"] for output in cell.get("outputs", ()))
    return {
        output["metadata"]["scrapbook"]["name"]: ast.literal_eval("".join(output["data"][RECORD]))
        for output in outputs
        if RECORD in output.get("data", {})
    }


@dataclass
class Chapter:
    """One notebook of the book, converted by `notebook`.

    values: for the name of each notebook, what it kept for the text. link: see `linker`.
    Raises ValueError, which names chapter and cell, for MyST that has no rule here.
    """

    path: Path
    values: Mapping[str, Mapping[str, Any]]
    link: Callable[[str, str], str]

    def notebook(self, set_up: str) -> Json:
        """The notebook for Colab. set_up: the source of its first code cell."""
        notebook: Json = json.loads(self.path.read_text("utf-8"))
        first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        kept = []
        for number, cell in enumerate(notebook["cells"]):
            source = "".join(cell["source"])
            if cell is not first and REMOVED in cell["metadata"].get("tags", []):
                continue  # it keeps values for the text of other pages
            kept.append(cell)
            try:
                if cell is first:
                    cell |= {"source": set_up, "outputs": [], "execution_count": None}
                    cell["metadata"] = {"cellView": "form"}
                elif cell["cell_type"] == "code":
                    self._code(cell, source)
                else:
                    if number == 0:
                        title, *rest = source.split("\n\n", 1)
                        source = "\n\n".join((title, NOT_RUN, *rest))
                    cell |= {"source": self.text(source), "metadata": {}}
            except ValueError as error:
                raise ValueError(f"{self.path.name} cell {number}: {error}") from error
            cell["source"] = cell["source"].splitlines(keepends=True)
        return notebook | {"cells": kept, "metadata": METADATA}

    def text(self, markdown: str) -> str:
        """MyST Markdown as Markdown that any notebook shows."""
        for quoted in re.findall(r"<[a-z][^>]*\s(?:href|src)=[\"']?([^\"'\s>]+)", markdown):
            if not ABSOLUTE.match(quoted):
                raise ValueError(f"a relative link in HTML: {quoted}")
        return MYST.sub(self._myst, markdown)

    def _myst(self, match: re.Match[str]) -> str:
        if match["fence"]:
            return self._block(match)
        if match["role"]:
            return self._role(match["role"], match["text"])
        if match["ticks"] or ABSOLUTE.match(match["target"]):
            return match[0]
        if match["image"]:
            return self._image(match["label"], self.path.parent / match["target"])
        label = MYST.sub(self._myst, match["label"])
        address = self.link(self.path.stem, match["target"])
        return f"[{label}]({address})" if address else label

    def _image(self, alt: str, picture: Path) -> str:
        mime, data = mimetypes.guess_type(picture)[0], picture.read_bytes()
        if picture.suffix == ".svg":
            data = SCRIPT.sub(b"", data)
        return f"![{alt}](data:{mime};base64,{base64.b64encode(data).decode()})"

    def _block(self, match: re.Match[str]) -> str:
        if "{" not in match["info"] and match["fence"][0] != ":":
            return match[0]
        if "occupancy-chart" in match["body"]:
            return ""  # which the text says the site has
        raise ValueError(f"no rule for the directive {match['info'].strip()}")

    def _role(self, role: str, text: str) -> str:
        if role == "glue:text":
            page, _, name = text.rpartition("::")
            name, _, form = name.partition(":")
            try:
                return format(self.values[page or self.path.name][name], form)
            except KeyError:
                raise ValueError(f"no stored output keeps {text!r}") from None
        raise ValueError(f"no rule for the role {role}")

    def _code(self, cell: Json, source: str) -> None:
        """Converts a code cell, in place."""
        tags = cell["metadata"].get("tags", [])
        alt = cell["metadata"].get("mystnb", {}).get("image", {}).get("alt")
        cell["metadata"] = {}
        cell["outputs"] = [out for out in cell["outputs"] if RECORD not in out.get("data", {})]
        for output in cell["outputs"]:
            for mime in output.get("data", {}):
                if alt and mime.startswith("image/"):
                    output["metadata"][mime] = {"alt": alt}
        if "raises-exception" in tags:
            source = catch(source)
            cell["outputs"] = [_printed(output) for output in cell["outputs"]]
        if FOLDED & set(tags):
            cell["metadata"] = {"cellView": "form"}  # shows the title in place of the code
            if not source.startswith("# @title "):
                raise ValueError("a folded cell does not start with a line `# @title ...`")
        cell["source"] = source


class Plain(Chapter):
    """One page of the book as Markdown alone, for readers that see no pictures: `markdown`."""

    def markdown(self) -> str:
        """The page's text, its visible code, and what cells say. A picture is its description."""
        if self.path.suffix == ".md":
            return self.text(self.path.read_text("utf-8"))
        parts = []
        for cell in json.loads(self.path.read_text("utf-8"))["cells"]:
            source, tags = "".join(cell["source"]), set(cell["metadata"].get("tags", []))
            if cell["cell_type"] == "markdown":
                parts.append(self.text(source))
                continue
            if REMOVED in tags:
                continue
            if not FOLDED & tags:
                parts.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                parts += self._said(output, cell["metadata"])
        return "\n\n".join(part.strip() for part in parts if part.strip())

    def _said(self, output: Json, metadata: Json) -> list[str]:
        data = output.get("data", {})
        if RECORD in data:
            return []
        if any(mime.startswith("image/") for mime in data):
            return [f"*{metadata['mystnb']['image']['alt']}*"]
        if "text/markdown" in data:
            return ["".join(data["text/markdown"])]
        said = "".join(_printed(output).get("text") or data.get("text/plain", ""))
        return [f"```\n{said.rstrip()}\n```"] if said.strip() else []

    def _image(self, alt: str, picture: Path) -> str:
        return f"*{alt}*"

    def _block(self, match: re.Match[str]) -> str:
        return "" if "{" in match["info"] else match[0]


def _printed(output: Json) -> Json:
    """An output of a cell after `catch`: an error has become a line of text."""
    if output["output_type"] != "error":
        return output
    text = f"{output['ename']}: {output['evalue']}\n"
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def catch(source: str) -> str:
    """The code of a cell that raises on purpose, changed so that it prints the error and ends.

    >>> print(catch("import math\\nmath.sqrt(-1)"), end="")
    try:
        import math
        math.sqrt(-1)
    except Exception as error:  # meant: this is where it breaks
        print(f"{type(error).__name__}: {error}")
    """
    return (
        f"try:\n{textwrap.indent(source.rstrip(), '    ')}\n"
        "except Exception as error:  # meant: this is where it breaks\n"
        '    print(f"{type(error).__name__}: {error}")\n'
    )


def write_notebooks(folder: Path, root: Path = ROOT) -> list[Path]:
    """Writes a notebook for each chapter of the checkout `root` into `folder`; returns the paths.

    Raises ValueError, which names chapter and cell, for MyST that has no rule here.
    """
    chapters = sorted((root / "book").glob("*.ipynb"))
    values = {path.name: glued(json.loads(path.read_text("utf-8"))) for path in chapters}
    link, archive = linker(root), pack(root)
    text = base64.b85encode(archive).decode()  # which has no quotes and no backslash
    lines = [text[i : i + LINE] for i in range(0, len(text), LINE)]
    digest = hashlib.sha256(archive).hexdigest()[:8]
    set_up = SET_UP.format(digest=digest, archive="\n".join(lines))
    done = {path.name: Chapter(path, values, link).notebook(set_up) for path in chapters}
    folder.mkdir(parents=True, exist_ok=True)
    for name, notebook in done.items():
        text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in done]


def write_markdown(path: Path, root: Path = ROOT) -> Path:
    """Writes the whole book of the checkout `root`, in its order, as one Markdown file."""
    chapters = sorted((root / "book").glob("*.ipynb"))
    values = {it.name: glued(json.loads(it.read_text("utf-8"))) for it in chapters}
    names = re.findall(r"(?:root|file): (\S+)", (root / "_toc.yml").read_text("utf-8"))
    files = [next(root.glob(f"{name}.[im]*")) for name in names]
    pages = [Plain(it, values, linker(root)).markdown() for it in files]
    path.write_text("\n\n---\n\n".join(pages) + "\n", "utf-8")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write self-contained notebooks for Google Colab.")
    parser.add_argument("folder", type=Path, help="where the notebooks go")
    parser.add_argument("--markdown", type=Path, help="where all of the book goes as Markdown")
    chosen = parser.parse_args()
    try:
        written = write_notebooks(folder := chosen.folder)
        if chosen.markdown:
            write_markdown(chosen.markdown)
    except ValueError as error:
        parser.exit(1, f"colab: {error}\n")
    print(f"{len(written)} notebooks for Colab in {folder}")
