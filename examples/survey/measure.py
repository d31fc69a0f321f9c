"""What runs under Nsight Compute when `memtraffic_book` measures kernels of the survey.

`memtraffic_book.marked_counters.count_surveyed` starts it in a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from memtraffic.benchmark.loop import ABSENT
from memtraffic.meters.count import backward_of, differentiable
from memtraffic.op import find_op
from memtraffic_book.marked_counters import WARMUP, counted

import survey

FOLDER = "MEMTRAFFIC_TUTORIALS"  # the setting that says where Triton's tutorials are


def run(kernels: Sequence[str], sizes: Mapping[str, int], told: str) -> None:
    """Runs each pass and tells in a file what became of it; no error of a package stops the others.

    kernels: each is `path direction`, a row of the survey, or `path direction N=512` with sizes of
    its own. sizes: a number for each letter of their inputs. told: the file. Raises LookupError for
    a kernel that is not in the survey.
    """
    os.environ |= survey.flag_gems_settings(str(Path(told).parent))
    outcomes = []
    for published, direction, shape in [_find(kernel, sizes) for kernel in kernels]:
        at = zip(find_op(published.inputs).sizes, shape, strict=True)
        outcome: dict[str, Any] = {
            "package": published.package,
            "version": "",
            "kernel": published.path,
            "direction": direction,
            "at": ", ".join(f"{size}={number}" for size, number in at),
            "begun": False,
            "missing": "",
        }
        try:
            outcome["version"] = published.release
            call = prepare(published, direction, shape)
            for _ in range(WARMUP):
                call()()
            final = call()
            with counted():
                outcome["begun"] = True
                final()
        except ImportError as error:  # of a package, or of a file of the tutorials
            outcome["missing"] = ABSENT + survey.reason_of(error)
        except Exception as error:
            outcome["missing"] = survey.reason_of(error)
        outcomes.append(outcome)
    Path(told).write_text(json.dumps(outcomes), encoding="utf-8")


def _find(kernel: str, sizes: Mapping[str, int]) -> tuple[survey.Published, str, tuple[int, ...]]:
    """What the text of a kernel names: the surveyed kernel, the pass, and its sizes."""
    path, direction, *own = kernel.split() if " " in kernel else (kernel, "")
    given = {**sizes, **{size: int(number) for size, number in (it.split("=") for it in own)}}
    for published in survey.read_kernels():
        letters = find_op(published.inputs).sizes
        if published.path == path and {*letters} <= given.keys():
            if direction in ("forward", "backward"):
                return published, direction, tuple(given[size] for size in letters)
    raise LookupError(
        f"{kernel!r} is no kernel of the survey with sizes {', '.join(given)}: give "
        "`module:function forward` or `module:function backward`"
    )


def prepare(
    published: survey.Published, direction: str, shape: tuple[int, ...]
) -> Callable[[], Callable[[], object]]:
    """A function that does what comes before the pass, and returns the pass."""
    fn, _ = published.prepare(Path(os.environ.get(FOLDER, "tutorials")))
    if published.package == "torch":
        fn = torch.compile(fn)
    arguments = differentiable(find_op(published.inputs).arguments(shape))

    def make() -> Callable[[], object]:
        if direction == "forward":
            return lambda: arguments.call(fn)
        return backward_of(arguments.call(fn))

    return make
