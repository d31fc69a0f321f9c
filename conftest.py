"""What `pytest` collects: the unit tests, or with `--nbval` the notebooks, compared strictly."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import notebooks  # tests/notebooks.py
import pytest
from _pytest.doctest import DoctestModule
from nbformat import NotebookNode
from nbval.plugin import IPyNbCell, IPyNbFile

BOOK = Path(__file__).parent / "book"
SRC = Path(__file__).parent / "src"
HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore = ["_build", "book/_build"]
if not HAS_TRITON:  # what imports it; tests/conftest.py has the unit tests
    collect_ignore += [
        "src",
        *(p for p in BOOK.glob("*.ipynb") if "triton" in p.read_text("utf-8")),
    ]


def pytest_addoption(parser):
    parser.addoption("--site", help="the folder of a built site to check")


def pytest_configure(config):
    if HAS_TRITON and sys.platform == "linux":
        _disassemble_once()
    if not config.option.site:  # unless it is named, and says so itself
        collect_ignore.append("tests/book/test_site.py")
    if not config.option.nbval:
        return
    if config.args_source is not config.ArgsSource.ARGS:  # no path was given
        config.args = [str(BOOK)]
    config.option.nbval_current_env = True
    config.option.doctestmodules = False

    in_environment = "TRITON_INTERPRET" in os.environ
    from memtraffic.device import HAS_GPU

    if not in_environment:  # a reader's kernel starts without it
        os.environ.pop("TRITON_INTERPRET", None)
    if HAS_GPU:  # measure again, and compare such numbers by their unit alone
        os.environ.setdefault("MEMTRAFFIC_MODE", "verify")
        from memtraffic_book import recording, units

        if not config.option.collectonly:  # as a test of what is collected
            shutil.rmtree(recording.folder_of_verify(), ignore_errors=True)  # of an earlier run
        if not config.option.nbval_sanitize_with:
            rule = tempfile.NamedTemporaryFile("w", suffix=".cfg", encoding="utf-8")
            rule.write(units.sanitize_rule())
            rule.flush()
            config.add_cleanup(rule.close)
            config.option.nbval_sanitize_with = rule.name


def _disassemble_once():
    """Keeps what NVIDIA's disassembler says until `make clean`: a third of a second a binary."""
    triton = Path(importlib.util.find_spec("triton").origin).parent  # not imported yet
    answers = Path(__file__).parent / "_build" / "cuobjdump"
    answers.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "CUOBJDUMP": str(triton / "backends" / "nvidia" / "bin" / "cuobjdump"),
        "CUOBJDUMP_ANSWERS": str(answers),
        "TRITON_CUOBJDUMP_PATH": str(Path(__file__).parent / "tests" / "cuobjdump"),
    }


def pytest_collection_finish():
    """What is imported and collected stays: Python need not look through it for garbage again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def new_page():
    """Each test and each docstring says the origins of its results as a page does, once."""
    if recording := sys.modules.get("memtraffic_book.recording"):
        recording.said.clear()


def pytest_report_header(config):
    if not HAS_TRITON:
        return f"no Triton here, so skipped: {', '.join(map(str, collect_ignore))}"


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    nodes = yield
    for node in nodes:
        if isinstance(node, IPyNbFile):
            return [Notebook.from_parent(parent, path=file_path)]
        # Examples of src alone: where a test file fails to import, pytest would take a second
        # import, by its doctests, for a file without tests. A GPU needs none that stands in.
        of_tests = SRC not in file_path.parents
        if isinstance(node, DoctestModule) and (of_tests or _needs_no_gpu(file_path)):
            nodes.remove(node)
    return nodes


def _needs_no_gpu(path):
    from memtraffic import device

    return path.name == "stand_in.py" and device.HAS_GPU


class Notebook(IPyNbFile):
    """The cells of a notebook, then its solutions, in one kernel."""

    def collect(self):
        yield from super().collect()
        source = notebooks.solved(self.nb)
        if source is not None:
            cell = NotebookNode(source=source, outputs=[], execution_count=None)
            number = len(notebooks.code_cells(self.nb))
            options = defaultdict(bool)
            yield Solutions.from_parent(
                self, name="Solutions", cell_num=number, cell=cell, options=options
            )


class Solutions(IPyNbCell):
    """The exercise cell again, with each answer replaced by its solution."""

    def runtest(self):
        super().runtest()
        said = "".join(output.get("text", "") for output in self.test_outputs)
        marks = [line[0] for line in said.splitlines() if not line.startswith("– Not timed")]
        if not marks or set(marks) != {"✓"}:
            self.raise_cell_error("A solution does not pass its check", said)
