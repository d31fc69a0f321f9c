"""The notebooks for Google Colab: what is in them, and that they run without the package."""

from __future__ import annotations

import ast
import base64
import functools
import importlib
import io
import itertools
import os
import pickle
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import run_colab  # tests/run_colab.py
import torch
from cases import cases
from markdown_it import MarkdownIt
from notebooks import code_cells, folded, load, tags
from torch._subclasses import FakeTensorMode

from memtraffic import device, gpus
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.op import find_op
from memtraffic_book import colab, marked_counters, measurements, recording
from memtraffic_book.catalog import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted(path.name for path in (ROOT / "book").glob("*.ipynb"))
HOLDS = "book/recordings", "examples/survey", "src/memtraffic", "src/memtraffic_book"
LACKS = "__main__.py", "build.py", "colab.py", "figures/moving.py"  # which make the book
PICTURE = base64.b64encode(b"a picture").decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The notebooks of the book, written by the script, where there is no package."""
    folder = tmp_path_factory.mktemp("colab")
    subprocess.run([sys.executable, "-I", colab.__file__, folder], check=True)
    return folder


@functools.cache
def given(path):
    """The address and the digest of the archive that a notebook unpacks."""
    return re.findall(r'^[A-Z]+ = "(.*)"$', code_cells(load(path))[0].source, re.M)


# ---- the notebooks of the book


def test_archive_holds_the_package_and_the_recordings_and_nothing_else(folder):
    assert len({tuple(given(folder / name)) for name in CHAPTERS}) == 1
    data = base64.b64decode(given(folder / CHAPTERS[0])[0].partition(",")[2])
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        found = {it.name: files.extractfile(it).read() for it in files if it.isfile()}
        facts = {(it.mtime, it.mode, it.uid, it.gid, it.uname, it.gname) for it in files}
    assert facts == {(0, 0o755, 0, 0, "", "")}  # the same files give the same bytes
    kept = {it for folder in HOLDS for it in (ROOT / folder).rglob("*") if it.is_file()}
    kept = {it for it in kept if "__pycache__" not in it.parts}
    kept -= {ROOT / "src/memtraffic_book" / name for name in LACKS}
    assert found == {it.relative_to(ROOT).as_posix(): it.read_bytes() for it in kept}


@pytest.mark.parametrize("name", CHAPTERS)
def test_notebook_is_the_chapter_as_colab_reads_it(folder, name):
    """For a T4, under a megabyte; no MyST, no relative link; a `try` around what raises."""
    notebook, chapter = load(folder / name), load(ROOT / "book" / name)
    nbformat.validate(notebook)
    assert notebook.metadata == chapter.metadata
    assert (folder / name).stat().st_size < 1_000_000
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for block in (it for text in texts for it in MarkdownIt().enable("table").parse(text)):
        assert "{" not in block.info, block.info
        for token in (block, *(block.children or ())):
            if token.type.startswith("html"):
                assert not re.search(r"(?:href|src)=(?!.?(?:https?|data):)", token.content), token
            found = token.type == "text" and re.search(r"\{[\w:-]+\}|:::|^\(.*\)=$", token.content)
            address = token.attrs.get("href") or token.attrs.get("src") or "https:"
            assert not found and re.match(r"https?:|data:", address), token
    first, *now = code_cells(notebook)
    assert notebook.cells.index(first) == 1 and first.metadata == {"cellView": "form"}
    was = [cell for cell in code_cells(chapter) if "remove-cell" not in tags(cell)]
    for before, after in zip(was, now, strict=True):
        tree = ast.parse(after.source)
        assert (after.metadata.get("cellView") == "form") == folded(before)
        if "raises-exception" in tags(before):
            [tree.body] = [it.body for it in tree.body if isinstance(it, ast.Try)]
        assert ast.dump(tree) == ast.dump(ast.parse(before.source))


@cases(
    ("change", "advice"),
    {
        "cut": (lambda it, digest: (it[:-8], digest), "Open the chapter anew"),
        "no-base64": (lambda it, digest: (it[:-9], digest), "Open the chapter anew"),
        "edited": (lambda it, digest: (f"{it[:999]}AAAA{it[1003:]}", digest), "Open the chapter"),
        "gone": (lambda it, digest: ("file:///nowhere", digest), "Open the chapter anew"),
        "installed": (lambda it, digest: (it, digest), "Uninstall it, restart"),
    },
)
def test_set_up_says_what_to_do_and_leaves_nothing(folder, change, advice, tmp_path, monkeypatch):
    """Also about another package of that name, as in these tests."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(RuntimeError, match=advice):
        colab.set_up(*change(*given(folder / CHAPTERS[0])))
    assert not list(tmp_path.iterdir()) and sys.path == before


# ---- the rules, on a book of our own


@pytest.fixture
def made(tmp_path):
    """A function that makes a book of one page, of these cells, with values for the text."""

    def make(*cells, config=""):
        for folder in HOLDS:
            (tmp_path / folder / "__pycache__").mkdir(parents=True)
        (tmp_path / "book" / "a.png").write_bytes(b"a picture")
        (tmp_path / "_config.yml").write_text(config, "utf-8")
        notebook = nbformat.v4.new_notebook(cells=cells)
        nbformat.write(notebook, tmp_path / "book" / "page.ipynb")
        book = colab.Book(tmp_path)
        book.values |= {"other.ipynb": {"far": "3957 GB/s"}}
        return book

    return make


SITE = "html:\n  baseurl: https://site.org/b/\n"
PLACE = "repository:\n  url: 'https://code.org/r/'\n  branch: trunk\n"
BLOB = "https://code.org/r/blob/trunk/book"
RAW = "```{raw} html\n<div>\n```"


@cases(
    ("config", "before", "after"),
    {
        "no-address": ('repository:\n  url: ""\n', "[a *b*](other.ipynb#c)", "a *b*"),
        "page": (SITE + PLACE, "[a](b.md#c)", "[a](https://site.org/b/book/b.html#c)"),
        "same-page": (SITE, "[a](#c)", "[a](https://site.org/b/book/page.html#c)"),
        "repository": (PLACE, "[`c[0]`](other.ipynb)", f"[`c[0]`]({BLOB}/other.ipynb)"),
        "absolute": (SITE, *2 * ["[a](https://x.org/y(z)) ![b](//x.org/c.png)"]),
        "image": ("", "![a](a.png)", f"![a](data:image/png;base64,{PICTURE})"),
        "values": ("", "{glue:text}`near`, {glue:text}`near:>6`", "5.07x,  5.07x"),
        "value-in-label": ("", "[{glue:text}`other.ipynb::far`](b.md)", "3957 GB/s"),
        "block-of-code": ("", *2 * ["```python\nk[(1,)](y)\n[a](b.md) {glue:text}`c`\n```"]),
        "code-span": ("", *2 * ["a ``[a](b.md) `c` {d}`` {e} (b)[c] <details>"]),
        "chart": ("", '```{raw} html\n<div class="occupancy-chart"></div>\n```', ""),
    },
)
def test_text_is_what_any_notebook_shows(made, config, before, after):
    assert made(KEPT, config=config).text("page.ipynb", before) == after


@pytest.mark.parametrize(
    "text",
    ["{glue:text}`none`", "{glue:text}`none.ipynb::far`", "{numref}`a`", ":::{note}\na\n:::", RAW],
)
def test_notebook_names_the_page_that_has_no_rule(made, tmp_path, text):
    with pytest.raises(ValueError, match=r"page\.ipynb: no rule"):
        made(nbformat.v4.new_markdown_cell(text)).write_notebooks(tmp_path)


def code(source, *tags, **metadata):
    return nbformat.v4.new_code_cell(source, metadata={"tags": tags, **metadata})


# A cell that kept a value for the text, as `memtraffic_book.glue` does.
KEPT = code("glue()", "remove-cell")
KEPT.outputs = [
    nbformat.v4.new_output(
        "display_data",
        {"application/papermill.record/text/plain": "'5.07x'"},
        metadata={"scrapbook": {"name": "near"}},
    )
]


def test_page_as_a_notebook_and_as_markdown(made, tmp_path):
    """It is set up, does not stop at an error, and has alt texts; Markdown shows no folded code."""
    raises = code("1 / 0", "raises-exception")
    raises.outputs = [nbformat.v4.new_output("error", ename="E", traceback=["E: no"])]
    folded = code("# @title T\ng()", "hide-input", mystnb={"image": {"alt": "A."}})
    folded.outputs = [
        nbformat.v4.new_output("display_data", data)
        for data in (
            {"text/plain": "✓ 3.", "text/html": "<p>"},
            {"image/png": PICTURE, "text/plain": "<F>"},
            {"text/markdown": "**b**", "text/plain": "b"},
        )
    ]
    title = nbformat.v4.new_markdown_cell("# P\n\n{glue:text}`near`\n\n![B.](a.png)")
    book = made(title, KEPT, raises, folded, config=PLACE)
    [path] = book.write_notebooks(tmp_path / "out")
    first, set_up, caught, drawing = load(path).cells
    assert first.source.startswith("# P\n\n5.07x") and "set_up(ADDRESS, DIGEST)" in set_up.source
    assert drawing.outputs[1].metadata == {"image/png": {"alt": "A."}}
    assert caught.source == colab.catch("1 / 0")
    assert given(path)[0].startswith("https://code.org/r/raw/gh-pages/_sources/book/memtraffic-")
    with tarfile.open(path.parent / given(path)[0].rpartition("/")[2]) as files:
        assert files.getnames() == list(HOLDS)  # no bytecode
    (tmp_path / "_toc.yml").write_text("root: book/intro\n  - file: book/page\n", "utf-8")
    (tmp_path / "book/intro.md").write_text("# I\n\n```{start} page\n```\n\n[p](page.ipynb)")
    parts = [it for it in book.markdown().split("\n\n") if it.strip()]
    assert parts[:4] == ["# I", f"[p]({BLOB}/page.ipynb)", "---", "# P"]
    assert parts[4:8] == ["5.07x", "*B.*", "```python\n1 / 0\n```", "```\nE: no\n```"]
    assert parts[8:] == ["```\n✓ 3.\n```", "*A.*", "**b**\n"]


# ---- executed as on Colab


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["fused.ipynb", "survey.ipynb"], id="two"),
        pytest.param(CHAPTERS, id="all", marks=pytest.mark.oracle),
    ],
)
@pytest.mark.slow
def test_notebook_runs_as_on_colab(folder, names, tmp_path):
    """From an empty folder, in one process, so that the set-up cell runs again."""
    (tmp_path / "content").mkdir()
    python = run_colab.make_environment(tmp_path / "python")
    said = run_colab.execute(python, tmp_path / "content", *(folder / name for name in names))
    assert said.count("Runtime > Change runtime type > T4 GPU") == len(names) * (not device.HAS_GPU)
    assert f"The package is {tmp_path / 'content' / 'memtraffic-'}" in said


# ---- on a T4, which Colab lends

PYTORCHS = re.compile(r"copy|naive|.*torch|.*PyTorch|.*compile\(", re.I)
TRITON, INDUCTOR = 0.5, 10  # seconds to compile a kernel with two cores; the latter tries several
# A tile of more numbers than lanes have room for, which is judged; 64 programs, and 40 fit.
REFUSED = {"tiled_rows_float32", "long_few"}
LAUNCHED = {"split_kernel", "_arithmetic_kernel", "_idle_kernel", "_pointer_chase_kernel"}


@pytest.fixture
def t4(monkeypatch):
    """The GPU that is here is a T4, whose driver lets nobody read counters."""
    gpu = gpus.find_gpu("T4")
    monkeypatch.setattr(device, "this_gpu", lambda *index: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, 15_095 * 2**20))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return gpu


@functools.cache
def asked(name):
    """The experiments that a notebook asks for, as its cells and their modules name them.

    All that a module names: no page leaves out a part of it. What is asked of another GPU is read.
    """
    code = "\n".join(cell.source for cell in code_cells(load(ROOT / "book" / name)))
    modules = ROOT / "src/memtraffic_book/chapters"
    for module in set(re.findall(r"memtraffic_book.chapters import (\w+)", code)):
        code += (modules / f"{module}.py").read_text("utf-8")
    code = re.sub(r"\([^()]*PUBLISHED\)", "", code)
    texts = re.findall(r'"(\w{4,})((?:\{[^}"]*\}\w*)*)"', code)  # such as f"map_{dtype}"
    found = {start + re.sub(r"\{.*?\}", r"\\w*", rest) for start, rest in texts}
    return {id for id in EXPERIMENTS if any(re.fullmatch(it, id) for it in found)}


def measured(names=CHAPTERS):
    """The experiments that a T4 measures for these notebooks."""
    subjects = [EXPERIMENTS[id] for id in sorted(set().union(*map(asked, names)))]
    return [it for it in subjects if not it.needs.commands and not it.needs.lacking(reader=True)]


def recorded(subject):
    return recording.read(recording.root() / recording.PUBLISHED, subject)


def seconds(subject):
    """What an experiment takes a T4: each row in as many rounds as the timer makes, or its budget.

    By a fifteenth of the bandwidth, and each row has a kernel to be compiled.
    """
    frame = recorded(subject)
    compiled = frame.get("impl", pd.Series(dtype=str)).str.contains("compile").sum()
    rounds = 36 * 15 * frame["us"].sum() * 1e-6 if "us" in frame else 0
    return rounds + (0.3 + TRITON) * len(frame) + INDUCTOR * compiled


def test_notebooks_take_a_t4_eight_minutes_and_12_gb_at_most(t4):
    assert "fused_race" in asked("memory-wall.ipynb")
    assert "map_float32" not in asked("memory-wall.ipynb")  # which it reads
    assert "decision_gradient_bfloat16" in asked("ship.ipynb")
    assert max(sum(map(seconds, measured([name]))) for name in CHAPTERS) <= 8 * 60
    for subject in measured():
        frame = recorded(subject)
        assert subject.needs.gib * 2**30 <= 12e9
        if {"m", "n"} <= set(frame):  # inputs, results and copies
            assert 5 * 4 * (frame["m"] * frame["n"]).max() <= 12e9, subject.id


def calls_of(subject):
    """The calls by which an experiment launches our kernels, by name; tensors have no numbers."""
    found = measurements.resolve(subject.arguments)
    impls = found.get("impls") or ({"": found["fn"]} if "fn" in found else {})
    if not impls:
        yield subject.id, functools.partial(subject.measure, **found)
        return
    op, shapes = find_op(found.get("inputs")), found.get("shapes") or [found["shape"]]
    name = found.get("option", "programs" if "programs_per_sm" in found else "")
    values = found.get("values") or [int(40 * it) for it in found.get("programs_per_sm", [0])]
    dtypes = found.get("dtypes") or [found.get("dtype", "float32")]
    for label, shape, dtype, value in itertools.product(impls, shapes, dtypes, values):
        if not PYTORCHS.match(label):
            with FakeTensorMode():
                made = op.arguments(shape, dtype).positional
            empty = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in made]
            call = functools.partial(impls[label], *empty, **({name: value} if name else {}))
            yield f"{subject.id}: {label} {shape} {dtype} {value}", call


@pytest.mark.slow
def test_kernels_of_experiments_compile_for_a_t4(t4, timed, monkeypatch):
    """And can be launched there; what a launcher refuses is named, with the number."""
    monkeypatch.setattr(device, "gpu_name", lambda: t4.driver_name)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    subjects = [it for it in measured() if it.id != "occupancy_driver"]  # which asks the driver
    monkeypatch.setattr(device, "default", lambda: torch.device("cpu"))
    launches, refused = {}, {}
    for name, call in (it for subject in subjects for it in calls_of(subject)):
        with monkeypatch.context() as patch:
            if name in EXPERIMENTS:
                patch.setattr(device, "default", lambda: torch.device("meta"))
            try:
                launches |= {repr(it): it for it in capture_launches(call, gpu=t4)}
            except ValueError as error:
                refused[name] = str(error)
    kernels = compile_launches([(launch, t4) for launch in launches.values()])
    assert not [(it.kernel, it.unlaunchable) for it in kernels if it.unlaunchable]
    assert all(re.search(r"\d", error) for error in refused.values())
    assert {name.partition(":")[0] for name in refused} == REFUSED
    assert {launch.qualname for launch in launches.values()} >= LAUNCHED


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["fused.ipynb", "long-rows.ipynb", "occupancy.ipynb"], id="three"),
        pytest.param(CHAPTERS, id="all", marks=pytest.mark.oracle),
    ],
)
@pytest.mark.slow
def test_notebook_goes_on_on_a_t4(names, tmp_path, t4, monkeypatch):
    """No cell fails, and what cells and solutions launch compiles, within the eight minutes."""
    pages = [ROOT / "book" / name for name in names]
    command = [sys.executable, ROOT / "tests" / "run_t4.py", tmp_path, *pages]
    environment = {**os.environ, "MPLBACKEND": "agg"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # it interprets
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    assert "long_few is refused here (a row of" in done.stdout
    launches = pickle.loads((tmp_path / "launches.pickle").read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    for path in tmp_path.glob("*.py"):
        importlib.import_module(path.stem)
    every = {repr(launch): launch for found in launches.values() for launch in found}.values()
    of_cells = [it for it in every if it.module.startswith("cells_of_")]
    assert {it.qualname for it in of_cells} >= {"softmax_rows", "two_passes_kernel"}
    others = random.Random(6).sample([it for it in every if it not in of_cells], 6)
    kernels = compile_launches([(launch, t4) for launch in (*of_cells, *others)])
    assert not [(it.kernel, it.unlaunchable) for it in kernels if it.unlaunchable]
    for name, found in launches.items():
        assert sum(map(seconds, measured([name]))) + TRITON * len(found) <= 8 * 60, name


@pytest.mark.parametrize("ids", [["naive_counters", "fused_counters"], ["sectors_packed"]])
def test_counters_that_the_driver_denies_are_those_recorded(ids, t4, tmp_path, monkeypatch, capsys):
    """As on Colab. The driver is asked once, by one process, and the page says it once."""
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\necho $$ >> asked; echo ==ERROR== ERR_NVGPUCTRPERM; exit 1\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MEMTRAFFIC_MODE", "live")
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", str(ROOT / "book" / "recordings"))
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(device, "require_gpu", lambda what: None)
    monkeypatch.setattr(marked_counters, "_each", None)  # nothing is compiled for it
    monkeypatch.chdir(tmp_path)
    recording.said.clear()
    frames = recording.experiments(*ids)
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("(ERR_NVGPUCTRPERM), so this is a recording.")
    assert said[1].startswith("Recorded on NVIDIA H200") and len(said) == 2
    assert all(map(len, frames)) and len((tmp_path / "asked").read_text().split()) == 1
