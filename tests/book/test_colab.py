"""The notebooks for Google Colab: what is in them, and that they run without the package."""

from __future__ import annotations

import ast
import base64
import fnmatch
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
from torch._subclasses import FakeTensorMode

from memtraffic import device, gpus
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.op import find_op
from memtraffic_book import chapters, colab, marked_counters, measurements, recording
from memtraffic_book.catalog import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted(path.name for path in (ROOT / "book").glob("*.ipynb"))
PICTURE = base64.b64encode(b"a picture").decode()
MOVES = b'<svg><path/><script type="application/json">{}</script></svg>'
STANDS = base64.b64encode(b"<svg><path/></svg>").decode()


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


@pytest.mark.slow
def test_set_up_holds_the_package_and_the_recordings(folder):
    first = [cells(load(folder / name), "code")[0] for name in CHAPTERS]
    assert all(cell.source == first[0].source for cell in first)
    assert first[0].source.startswith("# @title Set-up")
    assert "enable(notebook=True)" in first[0].source  # which shows progress
    archive = ast.parse(first[0].source).body[-1].value.args[0].value
    with tarfile.open(fileobj=io.BytesIO(base64.b85decode("".join(archive.split())))) as files:
        found = {file.name: files.extractfile(file).read() for file in files.getmembers()}
    kept = [path for folder in colab.FOLDERS for path in (ROOT / folder).rglob("*")]
    wanted = {path.relative_to(ROOT).as_posix(): path for path in kept if path.is_file()}
    wanted = {name: path for name, path in wanted.items() if "__pycache__" not in name}
    for name in colab.LEFT_OUT:
        del wanted[f"src/memtraffic_book/{name}"]
    assert {"src/memtraffic/__init__.py", "examples/survey/measure.py"} <= set(found)
    assert found == {name: path.read_bytes() for name, path in wanted.items()}


def tokens(markdown):
    """The tokens of Markdown as any notebook reads it, also those inside lines."""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        yield token
        yield from token.children or ()


@pytest.mark.parametrize("name", CHAPTERS)
def test_notebook_is_the_chapter_as_colab_reads_it(folder, name):
    """For a T4, under a megabyte; no MyST, no relative link, no error; a `try` around what raises.

    Nothing else is added to the code but titles.
    """
    notebook = load(folder / name)
    assert notebook.metadata.accelerator == "GPU"
    assert notebook.metadata.colab == {"gpuType": "T4", "provenance": []}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].source.split("\n\n")[1] == colab.NOT_RUN
    assert (folder / name).stat().st_size < 1_000_000
    for token in (it for cell in cells(notebook, "markdown") for it in tokens(cell.source)):
        assert not (token.type == "fence" and "{" in token.info), token.info
        if token.type == "text":
            assert not re.search(r"\{[\w:-]+\}|:::|^\(.*\)=$|\[\^|\{glue", token.content), token
        address = token.attrs.get("href") or token.attrs.get("src") or "https:"
        assert re.match(r"https?:|data:", address), address
    was, now = (cells(it, "code") for it in (load(ROOT / "book" / name), notebook))
    was[1:] = [cell for cell in was[1:] if "remove-cell" not in cell.metadata.get("tags", [])]
    for before, after in zip(was[1:], now[1:], strict=True):
        tree = ast.parse(after.source)
        hidden = "hide-input" in before.metadata.get("tags", [])
        assert after.metadata == ({"cellView": "form"} if hidden else {})
        if "raises-exception" in before.metadata.get("tags", []):
            attempt = tree.body.pop()
            tree.body += attempt.body
        assert ast.dump(tree) == ast.dump(ast.parse(before.source))
        assert not [output for output in after.outputs if output.output_type == "error"]


# ---- the rules, on a page of our own


@pytest.fixture
def convert(tmp_path):
    """Converts a chapter `page` of these cells; returns the cells after its set-up."""
    book = tmp_path / "book"
    for part in ("book/_static", "book/recordings", "src/memtraffic", "src/memtraffic_book"):
        (tmp_path / part).mkdir(parents=True)
    (book / "_static" / "a.png").write_bytes(b"a picture")
    (book / "_static" / "moves.svg").write_bytes(MOVES)

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


def text(convert, markdown, **options):
    """What becomes of Markdown beside a cell that kept `near` and a notebook that kept `far`."""
    cell, kept = convert(nbformat.v4.new_markdown_cell(markdown), glued("near", "5.07x"), **options)
    assert not kept.outputs
    return cell.source


def test_pack_gives_the_same_bytes_from_another_checkout(tmp_path):
    archives = []
    for i, checkout in enumerate((tmp_path / "a", tmp_path / "b")):
        source = checkout / "src" / "memtraffic"
        (source / "__pycache__").mkdir(parents=True)
        for name in sorted(("b.py", "a.py"), reverse=bool(i)):
            (source / name).write_text(f"# {name}", "utf-8")
            os.utime(source / name, (i, i))
        (source / "__pycache__" / "stray.pyc").write_bytes(bytes(i))
        archives.append(colab.pack(checkout))
    assert archives[0] == archives[1]


SITE = "html:\n  # where it is\n  baseurl: https://site.org/b/\n"
PLACE = "repository:\n  url: 'https://code.org/r'  # ours\n  branch: trunk\n"


@cases(
    ("config", "before", "after"),
    {
        "no-address": ("", "[a *b*](other.ipynb#c)", "a *b*"),
        "empty-address": ('repository:\n  url: ""\n', "[a](b.md)", "a"),
        "page": (SITE, "[a](other.ipynb#c)", "[a](https://site.org/b/book/other.html#c)"),
        "markdown-page": (SITE, "[a](b.md)", "[a](https://site.org/b/book/b.html)"),
        "same-page": (SITE, "[a](#c)", "[a](https://site.org/b/book/page.html#c)"),
        "outside-the-site": (SITE, "[a](../src/a.py)", "a"),
        "repository": (
            PLACE,
            "[a](other.ipynb)",
            "[a](https://code.org/r/blob/trunk/book/other.ipynb)",
        ),
        "site-and-repository": (
            SITE + PLACE,
            "[a](b.md), [`c[0]`](../_config.yml)",
            "[a](https://site.org/b/book/b.html), [`c[0]`](https://code.org/r/blob/trunk/_config.yml)",
        ),
        "made-with-the-site": (PLACE, "[a](made.md)", "a"),
        "absolute": (SITE, "[a](https://x.org/y(z))", "[a](https://x.org/y(z))"),
        "image": ("", "![a](_static/a.png)", f"![a](data:image/png;base64,{PICTURE})"),
        "moving-image": (
            "",
            "![a](_static/moves.svg)",
            f"![a](data:image/svg+xml;base64,{STANDS})",
        ),
        "value-in-label": ("", "[{glue:text}`other.ipynb::far`](b.md)", "3957 GB/s"),
        "values": ("", "{glue:text}`near`, {glue:text}`near:s`", "5.07x, 5.07x"),
        "block-of-code": ("", *2 * ["```python\nk[(1,)](y)\n[a](b.md) {glue:text}`c`\n```"]),
        "code-span": ("", *2 * ["a ``[a](b.md) `c` {d}`` e"]),
        "plain": ("", *2 * ["{a} (b)[c] <details>"]),
        "chart-of-the-site": (
            "",
            'a\n\n```{raw} html\n<div class="occupancy-chart"></div>\n```\n\nb',
            "a\n\n\n\nb",
        ),
    },
)
def test_text_is_what_any_notebook_shows(convert, config, before, after):
    assert text(convert, before, config=config) == after


@pytest.mark.parametrize(
    "cell",
    [
        *map(
            nbformat.v4.new_markdown_cell,
            (
                "{glue:text}`missing`",
                "{glue:text}`missing.ipynb::far`",
                "{numref}`a`",
                "```{note}\na\n```",
                ":::{note}\na\n:::",
                "```{raw} html\n<div>\n```",
                '<a href="other.html">a</a>',
            ),
        ),
        *(code("f()", tag) for tag in ("hide-input", "hide-cell", "remove-input")),
    ],
    ids=lambda cell: cell.source,
)
def test_notebook_names_the_cell_that_has_no_rule_or_no_title(convert, cell):
    with pytest.raises(ValueError, match=r"page\.ipynb cell 1"):
        convert(cell)


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


# ---- the book as Markdown


def test_markdown_is_what_is_seen_without_pictures(convert, tmp_path):
    shown, folded = (
        code("f()"),
        code("# @title T\ng()", "hide-input", mystnb={"image": {"alt": "A."}}),
    )
    shown.outputs = [nbformat.v4.new_output("stream", text="a\n")]
    drawn = {"image/png": PICTURE, "text/plain": "<Figure>"}
    folded.outputs = [
        nbformat.v4.new_output("display_data", {"text/plain": "✓ 3.", "text/html": "<details>"}),
        nbformat.v4.new_output("display_data", drawn),
        nbformat.v4.new_output("display_data", {"text/markdown": "**b**", "text/plain": "b"}),
    ]
    said = nbformat.v4.new_markdown_cell("# P\n\n{glue:text}`near`\n\n![B.](_static/a.png)")
    convert(said, glued("near", "5.07x"), shown, folded)
    (tmp_path / "book" / "intro.md").write_text(
        "# I\n\n```{start} page\n```\n\n[p](page.ipynb)", "utf-8"
    )
    (tmp_path / "_toc.yml").write_text("root: book/intro\n  - file: book/page\n", "utf-8")
    made = colab.write_markdown(tmp_path / "book.md", tmp_path).read_text("utf-8")
    expected = ["# I", "p", "---", "```python\nimport memtraffic\n```", "# P", "5.07x", "*B.*"]
    expected += ["```python\nglue()\n```", "```python\nf()\n```", "```\na\n```", "```\n✓ 3.\n```"]
    expected += ["*A.*", "**b**"]
    assert [part for part in made.split("\n\n") if part.strip()] == [*expected[:-1], "**b**\n"]


# ---- on a T4, which Colab lends

# It asks the driver, which leaves out what does not fit.
NEED_A_GPU = {"occupancy_driver"}
PYTORCHS = re.compile(r"copy|naive|.*torch|.*PyTorch|.*compile\(", re.I)
DRAWN = 6


@pytest.fixture
def t4(monkeypatch):
    """The GPU that is here is a T4, whose driver lets nobody read counters."""
    gpu = gpus.find_gpu("T4")
    monkeypatch.setattr(device, "this_gpu", lambda *index: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, 15_095 * 2**20))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return gpu


def asked(name):
    """The experiments that a notebook asks for, as its cells and their modules name them.

    All that a module names: no page leaves out a part of it. What is asked of another GPU is read.
    """
    code = "\n".join(cell.source for cell in cells(load(ROOT / "book" / name), "code"))
    modules = set(re.findall(r"memtraffic_book.chapters import (\w+)", code))
    folder = Path(chapters.__file__).parent
    found, left = set(), [ast.parse(code)]
    left += [ast.parse((folder / f"{module}.py").read_text("utf-8")) for module in modules]
    while left:
        node = left.pop()
        if isinstance(node, ast.Call) and "PUBLISHED" in map(_last, node.keywords):
            continue
        if isinstance(node, ast.JoinedStr):  # such as f"map_{dtype}"
            parts = [getattr(part, "value", "*") for part in node.values]
            pattern = "".join(part if isinstance(part, str) else "*" for part in parts)
            found |= {*fnmatch.filter(EXPERIMENTS, pattern)} if len(pattern) > 3 else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & set(EXPERIMENTS)
        left += ast.iter_child_nodes(node)
    return found


def _last(keyword):
    return ast.unparse(keyword.value).rpartition(".")[2]


def measured(names=CHAPTERS):
    """The experiments that a T4 measures for these notebooks."""
    subjects = [EXPERIMENTS[id] for id in sorted(set().union(*map(asked, names)))]
    return [it for it in subjects if not it.needs.commands and not it.needs.lacking(reader=True)]


def test_asked_finds_what_a_page_measures_and_not_what_it_reads():
    assert "fused_race" in asked("memory-wall.ipynb")
    assert "map_float32" not in asked("memory-wall.ipynb")
    assert asked("ship.ipynb") >= {"decision_attention", "decision_gradient_bfloat16"}
    assert not asked("cdna.ipynb")


@pytest.mark.parametrize("name", CHAPTERS)
def test_notebook_takes_a_t4_eight_minutes_and_12_gb_at_most(name, t4):
    assert sum(map(seconds, measured([name]))) <= 8 * 60
    for subject in measured([name]):
        frame = recorded(subject)
        assert subject.needs.gib * 2**30 <= 12e9
        if {"m", "n"} <= set(frame):  # inputs, results and copies
            assert 5 * 4 * (frame["m"] * frame["n"]).max() <= 12e9, subject.id


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


TRITON, INDUCTOR = 0.5, 10  # seconds to compile a kernel with two cores; the latter tries several


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
            inputs = empty(op, shape, dtype)
            call = functools.partial(impls[label], *inputs, **({name: value} if name else {}))
            yield f"{subject.id}: {label} {shape} {dtype} {value}", call


def empty(op, shape, dtype):
    """The inputs of an operation, in memory that nothing has written and that takes up no room."""
    with FakeTensorMode():
        made = op.arguments(shape, dtype).positional
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in made]


@pytest.mark.parametrize(
    "drawn", [pytest.param(True, id="drawn"), pytest.param(False, id="all", marks=pytest.mark.slow)]
)
def test_kernels_of_experiments_compile_for_a_t4(drawn, t4, timed, monkeypatch):
    """And can be launched there; what a launcher refuses is named, with the number."""
    monkeypatch.setattr(device, "gpu_name", lambda: t4.driver_name)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(device, "default", lambda: torch.device("cpu"))
    subjects = [it for it in measured() if it.id not in NEED_A_GPU]
    calls = [call for subject in subjects for call in calls_of(subject)]
    launches, refused = {}, {}
    for name, call in random.Random(DRAWN).sample(calls, DRAWN) if drawn else calls:
        if name in EXPERIMENTS:
            monkeypatch.setattr(device, "default", lambda: torch.device("meta"))
        try:
            launches |= {repr(it): it for it in capture_launches(call, gpu=t4)}
        except ValueError as error:
            refused[name] = str(error)
        monkeypatch.setattr(device, "default", lambda: torch.device("cpu"))
    kernels = compile_launches([(launch, t4) for launch in launches.values()])
    assert not [(it.kernel, it.unlaunchable) for it in kernels if it.unlaunchable]
    assert all(re.search(r"\d", error) for error in refused.values())
    if not drawn:
        assert {name.partition(":")[0] for name in refused} == REFUSED
        assert {launch.qualname for launch in launches.values()} >= LAUNCHED


# A tile of more numbers than lanes have room for, which is judged; 64 programs, and 40 fit.
REFUSED = {"tiled_rows_float32", "long_few"}
LAUNCHED = {"split_kernel", "_arithmetic_kernel", "_idle_kernel", "_pointer_chase_kernel"}


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
    assert ("long_few is refused here (a row of" in done.stdout) == ("long-rows.ipynb" in names)
    launches = pickle.loads((tmp_path / "launches.pickle").read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    for path in tmp_path.glob("*.py"):
        importlib.import_module(path.stem)
    every = {repr(launch): launch for found in launches.values() for launch in found}.values()
    of_cells = [it for it in every if it.module.startswith("cells_of_")]
    assert {it.qualname for it in of_cells} >= {"softmax_rows", "two_passes_kernel"}
    others = random.Random(DRAWN).sample([it for it in every if it not in of_cells], DRAWN)
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
    from memtraffic import device

    notebook = run_colab.execute(folder / name, python)
    said = "".join(output.text for output in cells(notebook, "code")[0].outputs)
    assert ("Runtime > Change runtime type > T4 GPU" in said) != device.HAS_GPU
