"""The notebooks for Google Colab: what is in them, and that they run without the package."""

from __future__ import annotations

import ast
import base64
import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import nbformat
import pytest
import run_colab  # tests/run_colab.py
from markdown_it import MarkdownIt

from memtraffic_book import colab

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted(path.name for path in (ROOT / "book").glob("*.ipynb"))
PICTURE = base64.b64encode(b"a picture").decode()
per_chapter = pytest.mark.parametrize("name", CHAPTERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The notebooks of the book, written by the script, where there is no package."""
    folder = tmp_path_factory.mktemp("colab")
    subprocess.run([sys.executable, "-I", colab.__file__, folder], check=True)
    return folder


def load(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def cells(notebook, kind):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


# ---- the notebooks of the book


def test_write_notebooks_one_for_each_chapter_of_the_toc(folder):
    pages = re.findall(r"(?:file|root): book/(\S+)", (ROOT / "_toc.yml").read_text("utf-8"))
    chapters = [f"{page}.ipynb" for page in pages if (ROOT / "book" / f"{page}.ipynb").exists()]
    assert sorted(chapters) == sorted(path.name for path in folder.iterdir())


def test_write_notebooks_same_bytes_from_another_checkout(folder, tmp_path):
    for part in ("book", "examples", "src"):
        shutil.copytree(ROOT / part, tmp_path / part, copy_function=shutil.copyfile)
    shutil.copy(ROOT / "_config.yml", tmp_path)
    cache = tmp_path / "src/memtraffic/__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "stray.pyc").write_bytes(b"stray")
    for path in colab.write_notebooks(tmp_path / "out", tmp_path):
        assert path.read_bytes() == (folder / path.name).read_bytes()


@per_chapter
def test_write_notebooks_for_a_t4_and_under_a_megabyte(folder, name):
    metadata = load(folder / name).metadata
    assert metadata.accelerator == "GPU"
    assert metadata.colab == {"gpuType": "T4", "provenance": []}
    assert metadata.kernelspec.name == "python3"
    assert (folder / name).stat().st_size < 1_000_000


@per_chapter
def test_set_up_holds_the_package_and_the_recordings(folder, name):
    set_up = cells(load(folder / name), "code")[0]
    assert set_up.metadata == {"cellView": "form"} and set_up.source.startswith("# @title Set-up")
    archive = ast.parse(set_up.source).body[-1].value.args[0].value
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as files:
        found = {file.name: files.extractfile(file).read() for file in files.getmembers()}
    kept = [path for folder in colab.FOLDERS for path in (ROOT / folder).rglob("*")]
    wanted = {path.relative_to(ROOT).as_posix(): path for path in kept if path.is_file()}
    wanted = {name: path for name, path in wanted.items() if "__pycache__" not in name}
    assert {"src/memtraffic/__init__.py", "examples/survey/measure.py"} <= set(found)
    assert found == {name: path.read_bytes() for name, path in wanted.items()}


def tokens(markdown):
    """The tokens of Markdown as any notebook reads it, also those inside lines."""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        yield token
        yield from token.children or ()


@per_chapter
def test_text_has_no_markup_that_only_myst_reads(folder, name):
    for cell in cells(load(folder / name), "markdown"):
        for token in tokens(cell.source):
            assert not (token.type == "fence" and "{" in token.info), token.info
            if token.type == "text":
                assert not re.search(r"\{[\w:-]+\}|:::|^\(.*\)=$|\[\^|\{glue", token.content), token


@per_chapter
def test_text_has_no_relative_link(folder, name):
    for cell in cells(load(folder / name), "markdown"):
        for token in tokens(cell.source):
            address = token.attrs.get("href") or token.attrs.get("src") or "https:"
            assert re.match(r"https?:|data:", address), address


@per_chapter
def test_code_is_that_of_the_chapter(folder, name):
    """Nothing but titles and a `try` around what raises is added; no output is an error."""
    was, now = (cells(load(path / name), "code")[1:] for path in (ROOT / "book", folder))
    for before, after in zip(was, now, strict=True):
        tree = ast.parse(after.source)
        if "raises-exception" in before.metadata.get("tags", []):
            attempt = tree.body.pop()
            tree.body += attempt.body
        assert ast.dump(tree) == ast.dump(ast.parse(before.source))
        assert "tags" not in after.metadata
        assert not [output for output in after.outputs if output.output_type == "error"]


# ---- the rules, on a page of our own


@pytest.fixture
def convert(tmp_path):
    """Converts a chapter `page` of these cells; returns the cells after its set-up."""
    book = tmp_path / "book"
    for part in ("book/_static", "book/recordings", "src/memtraffic", "src/memtraffic_book"):
        (tmp_path / part).mkdir(parents=True)
    (book / "_static" / "a.png").write_bytes(b"a picture")

    def convert(*made, config=""):
        first = nbformat.v4.new_code_cell("import memtraffic")
        for name, extra in ("page", made), ("other", [glued("far", "3957 GB/s")]):
            notebook = nbformat.v4.new_notebook(cells=[first, *extra])
            nbformat.write(notebook, book / f"{name}.ipynb")
        (tmp_path / "_config.yml").write_text(config, "utf-8")
        colab.write_notebooks(tmp_path / "out", tmp_path)
        return load(tmp_path / "out" / "page.ipynb").cells[1:]

    return convert


def code(source, *tags, **metadata):
    return nbformat.v4.new_code_cell(source, metadata={"tags": [*tags], **metadata})


def glued(name, value):
    """A cell that kept a value for the text, as `memtraffic_book.glue` does."""
    mime = "application/papermill.record/"
    scrapbook = {"name": name, "mime_prefix": mime}
    kept = nbformat.v4.new_output(
        "display_data", {f"{mime}text/plain": repr(value)}, metadata={"scrapbook": scrapbook}
    )
    return nbformat.v4.new_code_cell("glue()", outputs=[kept])


def text(convert, markdown, *more, **options):
    [cell, *_] = convert(nbformat.v4.new_markdown_cell(markdown), *more, **options)
    return cell.source


def test_text_quotes_what_cells_kept(convert):
    quoted = "{glue:text}`near`, {glue:text}`near:s`, {glue:text}`other.ipynb::far:s`"
    assert text(convert, quoted, glued("near", "5.07x")) == "5.07x, 5.07x, 3957 GB/s"


def test_notebook_leaves_out_the_record_of_a_quoted_value(convert):
    [cell] = convert(glued("near", "5.07x"))
    assert not cell.outputs


SITE = "html:\n  # where it is\n  baseurl: https://site.org/b/\n"
REPOSITORY = "repository:\n  url: 'https://code.org/r'  # ours\n  branch: trunk\n"


@pytest.mark.parametrize(
    ("config", "link", "wanted"),
    [
        pytest.param("", "[a *b*](other.ipynb#c)", "a *b*", id="no-address"),
        pytest.param('repository:\n  url: ""\n', "[a](b.md)", "a", id="empty-address"),
        pytest.param("# repository:\n#  url: x\n", "[a](b.md)", "a", id="address-in-a-comment"),
        pytest.param(
            "title: t\nother:\n  url: x\n", "[a](b.md)", "a", id="address-of-something-else"
        ),
        pytest.param(
            SITE, "[a](other.ipynb#c)", "[a](https://site.org/b/book/other.html#c)", id="page"
        ),
        pytest.param(SITE, "[a](b.md)", "[a](https://site.org/b/book/b.html)", id="markdown-page"),
        pytest.param(SITE, "[a](#c)", "[a](https://site.org/b/book/page.html#c)", id="same-page"),
        pytest.param(SITE, "[a](../src/a.py)", "a", id="file-outside-the-site"),
        pytest.param(
            REPOSITORY,
            "[a](other.ipynb)",
            "[a](https://code.org/r/blob/trunk/book/other.ipynb)",
            id="page-in-the-repository",
        ),
        pytest.param(
            SITE + REPOSITORY,
            "[a](b.md), [`c[0]`](../_config.yml)",
            "[a](https://site.org/b/book/b.html), [`c[0]`](https://code.org/r/blob/trunk/_config.yml)",
            id="both",
        ),
        pytest.param(REPOSITORY, "[a](made.md)", "a", id="page-made-with-the-site"),
        pytest.param(SITE, "[a](https://x.org/y(z))", "[a](https://x.org/y(z))", id="absolute"),
        pytest.param("", "[{glue:text}`other.ipynb::far`](b.md)", "3957 GB/s", id="value-in-label"),
        pytest.param(
            "", "![a](_static/a.png)", f"![a](data:image/png;base64,{PICTURE})", id="image"
        ),
    ],
)
def test_text_links(convert, config, link, wanted):
    assert text(convert, link, config=config) == wanted


@pytest.mark.parametrize(
    "markdown",
    [
        pytest.param("```python\nkernel[(1,)](y, x)\n[a](b.md) {glue:text}`c`\n```", id="block"),
        pytest.param("a ``[a](b.md) `c` {d}`` e", id="span"),
        pytest.param("{a} (b)[c] <details>", id="plain"),
    ],
)
def test_text_leaves_code_alone(convert, markdown):
    assert text(convert, markdown) == markdown


@pytest.mark.parametrize(
    "markdown",
    [
        "{glue:text}`missing`",
        "{glue:text}`missing.ipynb::far`",
        "{numref}`a`",
        "```{note}\na\n```",
        ":::{note}\na\n:::",
        "```{raw} html\n<div>\n```",
        '<a href="other.html">a</a>',
    ],
)
def test_text_names_the_cell_that_has_no_rule(convert, markdown):
    with pytest.raises(ValueError, match=r"page\.ipynb cell 1"):
        text(convert, markdown)


def test_text_leaves_out_the_chart_of_the_site(convert):
    shown = text(convert, 'a\n\n```{raw} html\n<div class="occupancy-chart"></div>\n```\n\nb')
    assert shown == "a\n\n\n\nb"


def test_notebook_folds_what_the_page_folds(convert):
    folded, shown = convert(
        code("# @title Mine\nf()", "hide-input", cellView="form", jupyter={"source_hidden": True}),
        code("f()"),
    )
    assert folded.metadata == {"cellView": "form"} and folded.source == "# @title Mine\nf()"
    assert shown.metadata == {} and shown.source == "f()"


@pytest.mark.parametrize("tag", ["hide-input", "hide-cell", "remove-input", "remove-cell"])
def test_notebook_wants_a_title_for_what_is_folded(convert, tag):
    with pytest.raises(ValueError, match=r"page\.ipynb cell 1: a folded cell .* `# @title"):
        convert(code("f()", tag))


def test_notebook_keeps_the_alt_text_of_a_figure(convert):
    figure = code("draw()", mystnb={"image": {"alt": "Two bars."}})
    figure.outputs = [
        nbformat.v4.new_output("display_data", {"image/png": PICTURE, "text/plain": "a"})
    ]
    [cell] = convert(figure)
    assert cell.outputs[0].metadata == {"image/png": {"alt": "Two bars."}}


def test_notebook_prints_a_meant_error(convert):
    cell = code("1 / 0", "raises-exception")
    cell.outputs = [nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="by zero")]
    [cell] = convert(cell)
    assert [(out.output_type, out.text) for out in cell.outputs] == [
        ("stream", "ZeroDivisionError: by zero\n")
    ]


def test_catch_prints_the_error_and_goes_on(capsys):
    caught = colab.catch(
        'def f(x):\n    return 1 / x\n\n\ny = f(1)\nprint(y,\n      f"{y}")\nf(0)\n'
    )
    exec(caught, {})
    assert capsys.readouterr().out == "1.0 1.0\nZeroDivisionError: division by zero\n"


# ---- executed as on Colab


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with what Colab preinstalls."""
    return run_colab.make_environment(tmp_path_factory.mktemp("python"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.oracle] * (name not in ("fused.ipynb", "survey.ipynb"))
        )
        for name in CHAPTERS
    ],
)
@pytest.mark.slow
def test_notebook_runs_as_on_colab(folder, python, name):
    """From an empty folder, without this repository: `run_colab.execute` asserts that."""
    from memtraffic import runtime

    notebook = run_colab.execute(folder / name, python)
    said = "".join(output.text for output in cells(notebook, "code")[0].outputs)
    assert ("Runtime > Change runtime type > T4 GPU" in said) != runtime.HAS_GPU


def test_execute_refuses_a_python_that_has_the_package(folder, tmp_path):
    python = run_colab.make_environment(tmp_path / "python")
    [site] = (tmp_path / "python").glob("lib/python*/site-packages")
    for package in ("memtraffic", "memtraffic_book"):
        (site / package).symlink_to(ROOT / "src" / package)
    with pytest.raises(AssertionError, match="already installed"):
        run_colab.execute(folder / "naive.ipynb", python)
