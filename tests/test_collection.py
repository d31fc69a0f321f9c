"""What `pytest` and `pytest --nbval` run when nothing is typed after them (conftest.py)."""

import re
import shutil

import nbformat
import pytest
from another_process import run_python
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebooks import ROOT

FAKE_GPU = "import memtraffic.device\nmemtraffic.device.HAS_GPU = True\n"
pytestmark = pytest.mark.slow


def outcomes(folder, *arguments):
    """PASSED, FAILED or ERROR by the id of each test that pytest runs as a process of its own."""
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments, folder=folder)
    found = re.findall(r"^(PASSED|FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
    return {name: outcome for outcome, name in found}


@pytest.fixture
def project(tmp_path):
    """A project with the settings of this one, and a test and an example that pass."""
    for folder in ("src", "tests"):
        (tmp_path / folder).mkdir()
    example = 'def f():\n    """\n    >>> 1\n    1\n    """\n'
    (tmp_path / "src/a.py").write_text(f"{example}def test_passes(): pass\n", "utf-8")
    for name in ("_toc.yml", "conftest.py", "pyproject.toml", "tests/notebooks.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def write_notebook(path, *cells, solution=None):
    """A notebook of (source, stored output); with a solution, an exercise, which wants a 1."""
    cells = list(cells)
    if solution is not None:
        check = "def check_exercise(right):\n    print('✓' if right else '○ 1')\n\n\n"
        cells.append((f"{check}answer_1 = None\ncheck_exercise(answer_1 == 1)", "○ 1\n"))
    made = [
        new_code_cell(source, execution_count=i, outputs=[new_output("stream", text=text)])
        for i, (source, text) in enumerate(cells, 1)
    ]
    if solution is not None:
        fold = "<details><summary>Solution</summary>\n\n```python\nanswer_1 = "
        text = f"{fold}{solution}\n```\n</details>"
        exercise = f"text\n\n## Exercises\n\n**1.** How many?\n\n{text}"
        made.insert(-1, new_markdown_cell(exercise))
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=made), path)


def test_plain_pytest_runs_the_unit_tests_and_the_examples(project):
    """In each file, but examples of `src` alone; a module that cannot be imported is an error."""
    files = {it.relative_to(ROOT).as_posix() for it in ROOT.glob("tests/**/test_*.py")}
    for name in files:
        (project / name).parent.mkdir(exist_ok=True)
        shutil.copy(project / "src/a.py", project / name)
    (project / "tests/test_broken.py").write_text("import no_such_module\n", "utf-8")
    write_notebook(project / "book/a.ipynb", ("print(1)", "2\n"))
    passed = ["src/a.py::src.a.f", *(f"{name}::test_passes" for name in files)]
    found = outcomes(project, "--continue-on-collection-errors", "--site=_build")
    assert found == dict.fromkeys(passed, "PASSED") | {"tests/test_broken.py": "ERROR"}


def test_nbval_compares_strictly_and_tries_the_solutions(project):
    """A kernel starts in the environment of a reader, and nothing in a build folder is run."""
    book, environment = project / "book", "import os\nprint('TRITON_INTERPRET' in os.environ)"
    counted = "print('5 elements')"  # not measured: a GPU compares it, too
    write_notebook(book / "same.ipynb", (counted, "5 elements\n"), (environment, "False\n"))
    write_notebook(book / "other.ipynb", (counted, "6 elements\n"))
    write_notebook(book / "right.ipynb", solution="print('– Not timed: no GPU.') or 1")
    write_notebook(book / "wrong.ipynb", solution="2")
    for folder in (book / "_build", project / "_build"):
        write_notebook(folder / "a.ipynb", ("print(1)", "1\n"))
    assert outcomes(project, "--nbval") == {
        "book/same.ipynb::Cell 0": "PASSED",
        "book/same.ipynb::Cell 1": "PASSED",
        "book/other.ipynb::Cell 0": "FAILED",
        "book/right.ipynb::Cell 0": "PASSED",
        "book/right.ipynb::Solutions": "PASSED",
        "book/wrong.ipynb::Cell 0": "PASSED",
        "book/wrong.ipynb::Solutions": "FAILED",
    }


def test_nbval_on_a_gpu_leaves_out_measured_numbers(project):
    (project / "fake_gpu.py").write_text(FAKE_GPU, "utf-8")
    mode = "import os\nprint(os.environ['MEMTRAFFIC_MODE'])"
    cells = (mode, "verify\n"), ("print('5 µs')", "7 µs\n"), ("print('5 elements')", "7 elements\n")
    write_notebook(project / "book/a.ipynb", *cells)
    found = outcomes(project, "--nbval", "-p", "fake_gpu")
    assert list(found.values()) == ["PASSED", "PASSED", "FAILED"]
