"""One page about a function: its formula, a trace, and what its kernels use on every target.

`report` returns it as Markdown; the command `report` writes that to a file, or HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import memtraffic
from memtraffic.functions import as_function, function_name
from memtraffic.gpus import TARGETS, Gpu, find_gpu
from memtraffic.inputs import AnyInputs, Inputs, find_inputs
from memtraffic.reporting.page import Block, Heading, Page, Text, to_html, to_markdown, write_page
from memtraffic.reporting.sections import (
    compiled_section,
    formula_section,
    measured_section,
    trace_section,
)
from memtraffic.reporting.subject import Shape, Subject

__all__ = ["Page", "make_page", "report", "to_html", "to_markdown", "write_page"]

MOST_ELEMENTS = 2**24  # of a tensor, at the sizes that are chosen


def report(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    sizes: Sequence[int] | None = None,
    *,
    targets: Iterable[str | Gpu] | None = None,
    backward: bool = False,
    dtype: str = "float32",
) -> str:
    """One page of Markdown about `fn`: what it moves, and what its kernels use on each target.

    >>> from memtraffic.kernels.softmax import naive
    >>> print(report(naive.softmax).splitlines()[0])
    # Memory traffic of memtraffic.kernels.softmax.naive.softmax

    The page has the formula of the traffic beside the least, which reads each argument once and
    writes each result once; the loads and stores of a small case; registers, spills, shared memory
    and access widths of each kernel, compiled for each target; and how many programs fit. On a GPU
    it has hardware counters, and the bandwidth beside that of the fastest copy; elsewhere it says
    that nothing was measured.

    fn: what `functions.as_function` takes. inputs, dtype, backward: as for `formula`. sizes: a
    number for each size of the inputs, to compile and to measure at; by default, powers of two.
    targets: GPUs or their names; by default, each target of the table.

    Raises LookupError for an unknown target; what `fn` raises, where nothing else can be said; and
    what `as_function` and `find_inputs` raise.
    """
    return to_markdown(
        make_page(fn, inputs, sizes, targets=targets, backward=backward, dtype=dtype)
    )


def make_page(
    fn: Any,
    inputs: AnyInputs = None,
    sizes: Sequence[int] | None = None,
    *,
    targets: Iterable[str | Gpu] | None = None,
    backward: bool = False,
    dtype: str = "float32",
    name: str = "",
) -> Page:
    """The page of `report`. name: what it calls the function."""
    made, function = find_inputs(inputs), as_function(fn)
    gpus = [find_gpu(it) if isinstance(it, str) else it for it in targets or TARGETS.values()]
    shape = default_sizes(made) if sizes is None else tuple(sizes)
    made.check(shape)
    subject = Subject(function, made, dtype, backward, shape)
    page = Page(f"Memory traffic of {name or function_name(fn)}")
    failures: list[Exception] = []
    steps: list[tuple[str, Callable[[], list[Block]]]] = [
        ("Formula", lambda: formula_section(subject)),
        ("A small case", lambda: trace_section(subject)),
        ("Compiled", lambda: compiled_section(subject, gpus)),
        ("Measured", lambda: measured_section(subject, name or fn, inputs)),
    ]
    page.blocks.append(Text(_versions(subject)))
    for heading, step in steps:
        try:
            blocks = step()
        except Exception as error:  # a function may raise what it likes
            failures.append(error)
            blocks = [Text(_why(error))]
        page.blocks += [Heading(heading), *blocks]
    if not subject.succeeded and failures:
        raise failures[0]
    return page


def default_sizes(made: Inputs) -> Shape:
    """Sizes to compile and to measure at: all the same power of two, for up to 2**24 elements.

    >>> default_sizes(find_inputs("M,N")), default_sizes(find_inputs("B,H,S,D"))
    ((4096, 4096), (64, 64, 64, 64))
    """
    counts = (2**power for power in range(12, 0, -1))
    every = ((n,) * len(made.sizes) for n in counts)
    return next((each for each in every if made.elements(each) <= MOST_ELEMENTS), (1,))


def _why(error: BaseException) -> str:
    text = " ".join(str(error).split())
    of_package = type(error).__module__.startswith("memtraffic.")
    kind = type(error).__qualname__
    said = text if of_package else f"{kind}: {text}".removesuffix(": ")
    return f"There is nothing to show here: {said}" + ("" if said.endswith(".") else ".")


def _versions(subject: Subject) -> str:
    try:
        triton = f"Triton {version('triton')}"
    except PackageNotFoundError:
        triton = "no Triton"
    return (
        f"Inputs: `{subject.made.name}`, {subject.dtype} where no dtype is named. Made by "
        f"memtraffic {memtraffic.__version__} with PyTorch {torch.__version__} and {triton}."
    )
