"""The notebooks for Google Colab: what is in them, and that they run without the package."""

import ast
import base64
import functools
import hashlib
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

import nbformat
import pandas as pd
import pytest
import run_colab  # tests/run_colab.py
import run_t4
import torch
from cases import cases, put_command
from markdown_it import MarkdownIt
from notebooks import ROOT, TOC, code_cells, folded, load, said, tags
from torch._subclasses import FakeTensorMode

from memtraffic import device
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.op import find_op
from memtraffic_book import colab, marked_counters, measurements, recording
from memtraffic_book.catalog import EXPERIMENTS

CHAPTERS = sorted(path.name for path in (ROOT / "book").glob("*.ipynb"))
HOLDS = "book/recordings", "examples/survey", "src/memtraffic", "src/memtraffic_book"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The book in both forms, written by the script, where there is no package."""
    folder = tmp_path_factory.mktemp("colab")
    command = [sys.executable, "-I", colab.__file__, folder, "--markdown", folder / "book.md"]
    subprocess.run(command, check=True)
    return folder


@functools.cache
def given(path):
    """The address and the digest of the archive that a notebook unpacks."""
    return re.search(r'^set_up\("(.*)", "(.*)"\)$', code_cells(load(path))[0].source, re.M).groups()


# ---- the notebooks of the book


def test_archive_holds_the_package_and_the_recordings_and_nothing_else(folder):
    assert len({given(folder / name) for name in CHAPTERS}) == 1
    data = base64.b64decode(given(folder / CHAPTERS[0])[0].partition(",")[2])
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        found = {it.name: files.extractfile(it).read() for it in files if it.isfile()}
        facts = {(it.mtime, it.mode, it.uid, it.gid, it.uname, it.gname) for it in files}
    assert facts == {(0, 0o755, 0, 0, "", "")}  # the same files give the same bytes
    kept = [it for folder in HOLDS for it in (ROOT / folder).rglob("*") if it.is_file()]
    kept = {it.relative_to(ROOT).as_posix(): it for it in kept if "__pycache__" not in it.parts}
    assert found == {name: it.read_bytes() for name, it in kept.items()}


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
        for output in (it for it in after.outputs if "image/png" in it.get("data", {})):
            assert output.metadata == {"image/png": before.metadata.mystnb.image}  # its alt text


def test_markdown_of_the_book_says_what_the_notebooks_say(folder):
    """In its order. A picture is its alternative text, an error what it says; no folded code."""
    text = (folder / "book.md").read_text("utf-8")
    assert "{glue:" not in text and "base64" not in text and "\n**warp**\n  " in text
    names = re.findall(r"(?:root|file): book/(\S+)", TOC)
    for name, page in zip(names, text.split("\n\n---\n\n"), strict=True):
        assert re.search("^# ", page, re.M)
        for cell in load(folder / f"{name}.ipynb").cells if f"{name}.ipynb" in CHAPTERS else ():
            if cell.cell_type == "markdown":
                source = re.sub(r"!\[(.*?)\]\(data:.*?\)", r"*\1*", cell.source, flags=re.S)
                assert source.strip() in page
            elif not cell.source.startswith(("# @title", "try:")):
                assert f"```python\n{cell.source}\n```" in page
            for output in cell.get("outputs", ()):
                assert (said(output) or "".join(output.get("traceback", ""))).strip() in page
                for name in output.get("metadata", {}).keys() & {"image/png"}:
                    assert f"*{output.metadata[name].alt}*" in page
        assert "# @title" not in page and "  # meant" not in page


@cases(
    ("change", "advice"),
    {
        "edited": (lambda it, digest: (f"{it[:999]}AAAA{it[1003:]}", digest), "open the chapter"),
        "gone": (lambda it, digest: ("file:///nowhere", digest), "open the chapter anew"),
        "imported": (lambda it, digest: (it, digest), "/memtraffic/__init__.py is imported: rest"),
    },
)
def test_set_up_says_what_to_do_and_leaves_nothing(folder, change, advice, tmp_path, monkeypatch):
    """Also about another package of that name, as in these tests."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(RuntimeError, match=advice):
        colab.set_up(*change(*given(folder / CHAPTERS[0])))
    assert not list(tmp_path.iterdir()) and sys.path == before


# ---- what depends on addresses, and what has no rule

NOWHERE = "html: {}\nrepository: {branch: trunk, url: ''}"
PLACE = "html: {}\nrepository: {branch: trunk, url: 'https://code.org/r/'}"
SITE = PLACE.replace("{}", "{baseurl: 'https://site.org/b/'}")
BLOB = "https://code.org/r/blob/trunk/book"


@pytest.fixture
def made(tmp_path):
    """A function that makes a book without pages, but with values for the text of one."""

    def make(config=NOWHERE):
        (tmp_path / "_config.yml").write_text(config, "utf-8")
        book = colab.Book(tmp_path)
        book.values = {"page.ipynb": {"near": "5.07x"}, "other.ipynb": {"far": "4 kB"}}
        return book

    return make


@cases(
    ("config", "before", "after"),
    {
        "no-address": (NOWHERE, "[a *b*](other.ipynb#c)", "a *b*"),
        "page": (SITE, "[a](b.md#c)", "[a](https://site.org/b/book/b.html#c)"),
        "file": (SITE, "[a](b.py)", f"[a]({BLOB}/b.py)"),
        "repository": (PLACE, "[`c`](other.ipynb)", f"[`c`]({BLOB}/other.ipynb)"),
        "absolute": (SITE, *2 * ["[a](https://x.org/y(z)) ![b](https://x.org/c.png)"]),
        "values": (NOWHERE, "{glue:text}`near:>6`, {glue:text}`other.ipynb::far`", " 5.07x, 4 kB"),
        "block-of-code": (SITE, *2 * ["```python\nk[(1,)](y)\n[a](b.md) {glue:text}`c`\n```"]),
        "code-span": (SITE, *2 * ["a `[a](b.md) {d}` {e} (b)[c] <details>"]),
    },
)
def test_text_is_what_any_notebook_shows(made, config, before, after):
    assert made(config).text("page.ipynb", before) == after


@pytest.mark.parametrize(
    "text",
    ["{glue:text}`none`", "{glue:text}`none.ipynb::far`", "{numref}`a`", ":::{note}\na\n:::"],
)
def test_text_without_a_rule_is_an_error_that_names_its_page(made, text):
    with pytest.raises(ValueError, match=r"page\.ipynb: no rule"):
        made().text("page.ipynb", text)


def test_archive_lies_beside_the_notebooks_where_there_is_an_address(tmp_path, monkeypatch):
    monkeypatch.setattr(colab, "pack", lambda root: b"an archive")
    book = colab.Book(ROOT)
    book.repository = "https://code.org/r"
    book.write_notebooks(tmp_path / "out")
    address, digest = given(tmp_path / "out" / CHAPTERS[0])
    where, _, name = address.rpartition("/")
    assert where == "https://code.org/r/raw/gh-pages/_sources/book"
    assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest


# ---- executed as on Colab


def some_or_all(*names):
    every = pytest.param(CHAPTERS, id="all", marks=pytest.mark.oracle)
    return pytest.mark.parametrize("names", [pytest.param(names, id="some"), every])


@some_or_all("fused.ipynb", "survey.ipynb")
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
def t4():
    """The GPU that is here is a T4."""
    with run_t4.on_a_t4():
        yield run_t4.T4


@pytest.fixture
def measured(t4):
    """The experiments that a T4 measures."""
    every = EXPERIMENTS.values()
    return [it for it in every if not it.needs.commands and not it.needs.lacking(reader=True)]


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


def test_all_experiments_take_a_t4_eight_minutes_and_12_gb_at_most(measured):
    """And a notebook no more than all of them."""
    assert sum(map(seconds, measured)) <= 8 * 60
    for subject in measured:
        frame = recorded(subject)
        assert subject.needs.gib * 2**30 <= 12e9
        if {"m", "n"} <= set(frame):  # inputs, results and copies
            assert 5 * 4 * (frame["m"] * frame["n"]).max() <= 12e9, subject.id


def unlaunchable(launches):
    """What cannot be launched on a T4, and why; fails where one of them does not compile."""
    kernels = compile_launches([(launch, run_t4.T4) for launch in launches])
    return [(it.kernel, it.unlaunchable) for it in kernels if it.unlaunchable]


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
@pytest.mark.parametrize("some", [12, pytest.param(None, marks=pytest.mark.oracle)])
def test_kernels_of_experiments_compile_for_a_t4(some, measured, t4, timed, monkeypatch):
    """And can be launched there; what a launcher refuses is named, with the number."""
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    subjects = [it for it in measured if it.id != "occupancy_driver"]  # which asks the driver
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
    assert not unlaunchable(random.Random(6).sample([*launches.values()], some or len(launches)))
    assert all(re.search(r"\d", error) for error in refused.values())
    assert {name.partition(":")[0] for name in refused} == REFUSED
    assert {launch.qualname for launch in launches.values()} >= LAUNCHED


@some_or_all("long-rows.ipynb")
@pytest.mark.slow
def test_notebook_goes_on_on_a_t4(names, measured, tmp_path, monkeypatch):
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
    kernels = {it.module + it.qualname: it for found in launches.values() for it in found}
    assert "cells_of_long_rowstwo_passes_kernel" in kernels
    assert not unlaunchable(kernels.values())
    assert sum(map(seconds, measured)) + TRITON * max(map(len, launches.values())) <= 8 * 60


def test_counters_that_the_driver_denies_are_those_recorded(t4, tmp_path, monkeypatch, capsys):
    """As on Colab. The driver is asked once, by one process, and the page says it once."""
    put_command(tmp_path, "ncu", "echo $$ >> asked; echo ==ERROR== ERR_NVGPUCTRPERM; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MEMTRAFFIC_RECORDINGS", str(ROOT / "book" / "recordings"))
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(device, "require_gpu", lambda what: None)
    monkeypatch.setattr(marked_counters, "_predict_alone", None)  # nothing is compiled for it
    monkeypatch.chdir(tmp_path)
    recording.said.clear()
    frames = recording.experiments("naive_counters", "fused_counters", "sectors_packed")
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("(ERR_NVGPUCTRPERM), so this is a recording.")
    assert said[1].startswith("Recorded on NVIDIA H200") and len(said) == 2
    assert all(map(len, frames)) and len((tmp_path / "asked").read_text().split()) == 1
