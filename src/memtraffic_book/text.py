"""What a chapter says in words: claims, exercises, numbers for the prose, and source code."""

from __future__ import annotations

import ast
import difflib
import html
import inspect
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from IPython import get_ipython
from IPython.display import Markdown, display

GLUE_MIME = "application/papermill.record/"  # where MyST-NB looks for what is glued


CHECKED_TRITON = ("3.6.", "3.7.")  # whose compiled code the book speaks of
elsewhere: set[str] = set()  # the GPU, where a page has measured on another than the book's


def claim(sentence: str, holds: object, *, of_compiler: bool = False) -> None:
    """Says a sentence with a tick if it holds.

    >>> claim("A softmax reads each element once: 15 of 15.", 15 == 15)
    ✓ A softmax reads each element once: 15 of 15.

    sentence: with its subject, its condition and its number. of_compiler: it is about the code that
    Triton makes. If it does not hold with a Triton other than those of CHECKED_TRITON, or where a
    page has measured `elsewhere`, that is what is printed. A page shows the tick alone, which opens
    to the sentence.

    Raises AssertionError, which repeats the sentence, if it does not hold.
    """
    if bool(holds):
        mark = '<details class="claim"><summary>✓</summary>{}</details>'
        say(f"✓ {sentence}", mark.format(html.escape(sentence, quote=False)))
    elif of_compiler and not (here := version("triton")).startswith(CHECKED_TRITON):
        print(f"– With Triton {here} this does not hold: {sentence}")
    elif elsewhere:
        print(f"– Does not hold on a page measured on {', '.join(elsewhere)}: {sentence}")
    else:
        raise AssertionError(f"does not hold: {sentence}")


def say(line: str, shown: str) -> None:
    """Says a line: in a notebook as one output in two forms, text and HTML; else it is printed.

    shown: the HTML, which a notebook shows where it can. What compares notebooks compares both.
    """
    if get_ipython() is None:
        print(line)
    else:
        display({"text/plain": line, "text/html": shown}, raw=True)


def check_exercise(sentence: str, attempt: Any, judge: Callable[[Any], object]) -> None:
    """Checks an exercise: prints whether the attempt is open (None), right, or not right yet.

    >>> check_exercise("1: twice two", None, lambda answer: answer == 4)
    ○ 1: twice two: your turn
    >>> check_exercise("1: twice two", 4, lambda answer: answer == 4)
    ✓ 1: twice two

    >>> check_exercise("1: twice two", 5, lambda answer: answer == 4)
    ✗ 1: twice two: not yet

    judge: a function of the attempt, which returns something true for a right one, such as
    `prove.exam`. What it raises is printed as the reason, so that the exercises after it are
    checked too.
    """
    if attempt is None:
        print(f"○ {sentence}: your turn")
        return
    try:
        right, reason = bool(judge(attempt)), ""
    except AssertionError as error:
        right, reason = False, f". {error}" if str(error) else ""
    except Exception as error:  # an attempt may do anything
        right, reason = False, f" ({type(error).__name__}: {error})"
    print(f"✓ {sentence}" if right else f"✗ {sentence}: not yet{reason}")


def glue(name: str, value: str) -> None:
    """Stores `value` under `name` for the prose, which quotes it with the role `glue:text`.

    This is what `myst_nb.glue` does for a string; MyST-NB is not installed where the notebooks run.
    """
    data = {f"{GLUE_MIME}text/plain": repr(value)}
    display(data, raw=True, metadata={"scrapbook": {"name": name, "mime_prefix": GLUE_MIME}})


def show_source(*functions: Any) -> None:
    """Shows the source of functions or kernels."""
    display(Markdown("```python\n" + "\n\n\n".join(map(source, functions)) + "\n```"))


def show_diff(below: Any, above: Any) -> None:
    """Shows how the code of `above` differs from that of `below`, apart from their docstrings.

    below, above: functions or kernels, such as those of two rungs.
    """
    old, new = (source(part, docstring=False).splitlines() for part in (below, above))
    lines = list(difflib.unified_diff(old, new, lineterm="", n=len(old) + len(new)))[3:]
    display(Markdown("```diff\n" + "\n".join(lines) + "\n```"))


def source(function: Any, docstring: bool = True) -> str:
    """The source of a function or kernel, without what is written for the formatter."""
    while not inspect.isfunction(function):  # a kernel wraps the function that it is made of
        function = function.fn
    text = textwrap.dedent(inspect.getsource(function)).rstrip().replace("  # fmt: skip", "")
    [definition] = ast.parse(text).body
    assert isinstance(definition, ast.FunctionDef)
    if not docstring and ast.get_docstring(definition) is not None:
        lines, first = text.splitlines(), definition.body[0]
        text = "\n".join(lines[: first.lineno - 1] + lines[first.end_lineno :])
    return text
