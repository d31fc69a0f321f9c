"""Hardware counters of surveyed kernels: what a GPU moved, to set beside what was counted.

A second process runs all of them under Nsight Compute, one after the other.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from memtraffic.benchmark.comparing import ABSENT
from memtraffic.errors import CountersError
from memtraffic.functions import as_function
from memtraffic.inputs import find_inputs
from memtraffic.meters import counters as hardware
from memtraffic.meters.count import differentiable, gradients_of, leaves_of, tensors_in
from memtraffic_book.marked_counters import AMOUNTS, WARMUP, add_up, counted, split

if TYPE_CHECKING:
    from memtraffic_book.survey import Published

FOLDER = "MEMTRAFFIC_TUTORIALS"  # the setting that says where Triton's tutorials are
FACTS = ("package", "version", "kernel", "direction", "at")


def measure(kernels: Sequence[str], sizes: dict[str, int]) -> pd.DataFrame:
    """What the hardware moved in passes of surveyed kernels, all launches of a pass added up.

    kernels: each is `path direction`, a row of the survey, or `path direction N=512` with sizes of
    its own. sizes: a number for each letter of their inputs. Columns: `package`, its `version`,
    `kernel`, `direction`; the sizes `at`, as the survey writes them; the number of `launches`; the
    amounts of `traffic.counters.counters`, such as `dram_read_bytes`; `missing`, why there are
    none, and then the numbers are 0. A kernel is missing if its package or its file is, or if it
    fails.

    Raises LookupError for a kernel that is not in the survey, and what `counters.profile` raises.
    """
    from memtraffic_book import survey  # which needs the recordings, and they the catalog

    jobs = [_job(kernel, sizes) for kernel in kernels]
    worker = "from memtraffic_book.survey_counters import _worker; _worker()"
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        job = {"kernels": list(kernels), "sizes": sizes, "told": str(told)}
        settings = survey.SETTINGS | {"FLAGGEMS_CACHE_DIR": folder}
        report = hardware.profile(worker, job, settings)
        outcomes = json.loads(told.read_text(encoding="utf-8"))
    begun = sum(outcome["begun"] for outcome in outcomes)
    parts = split(hardware.parse(report)) if begun else []
    if len(parts) != begun:
        raise CountersError(f"survey_counters: {begun} kernels ran, ncu saw {len(parts)}")
    rows, seen = [], iter(parts)
    for (published, direction, shape), outcome in zip(jobs, outcomes, strict=True):
        frame = next(seen) if outcome["begun"] else pd.DataFrame(columns=hardware.COLUMNS)
        used = frame if not outcome["missing"] else frame.iloc[:0]
        at = zip(_letters(published), shape, strict=True)
        facts = (
            published.package,
            outcome["version"],
            published.path,
            direction,
            ", ".join(f"{size}={number}" for size, number in at),
        )
        rows.append(
            dict(zip(FACTS, facts, strict=True)) | add_up(used) | {"missing": outcome["missing"]}
        )
    return pd.DataFrame(rows, columns=[*FACTS, "launches", *AMOUNTS, "missing"])


def _job(kernel: str, sizes: Mapping[str, int]) -> tuple[Published, str, tuple[int, ...]]:
    """What the text of a kernel names: the surveyed kernel, the pass, and its sizes.

    Raises LookupError if there is none.
    """
    from memtraffic_book import survey

    path, direction, *own = kernel.split() if " " in kernel else (kernel, "")
    given = {**sizes, **{size: int(number) for size, number in (it.split("=") for it in own)}}
    for published in survey.KERNELS:
        letters = _letters(published)
        if published.path == path and {*letters} <= given.keys():
            if direction in ("forward", "backward"):
                return published, direction, tuple(given[size] for size in letters)
    raise LookupError(
        f"{kernel!r} is no kernel of the survey with sizes {', '.join(given)}: give "
        "`module:function forward` or `module:function backward`"
    )


def _letters(kernel: Published) -> tuple[str, ...]:
    return find_inputs(kernel.inputs).sizes


# ---- what runs under ncu


def _worker() -> None:
    """Runs each pass, and tells what became of it; no error of a package stops the others."""
    from memtraffic_book import survey

    job = json.loads(sys.argv[1])
    told = []
    for kernel in job["kernels"]:
        published, direction, shape = _job(kernel, job["sizes"])
        outcome: dict[str, Any] = {"version": "", "begun": False, "missing": ""}
        try:
            outcome["version"] = version(
                "triton" if published.package == survey.TUTORIALS else published.package
            )
            run = _pass(published, direction, shape)
            for _ in range(WARMUP):
                run(None)
            run(outcome)
        except ImportError as error:  # of a package, or of a file of the tutorials
            outcome["missing"] = ABSENT + survey.reason_of(error)
        except Exception as error:
            outcome["missing"] = survey.reason_of(error)
        told.append(outcome)
    Path(job["told"]).write_text(json.dumps(told), encoding="utf-8")


def _pass(
    published: Published, direction: str, shape: tuple[int, ...]
) -> Callable[[dict[str, Any] | None], None]:
    """A function that runs one pass of a kernel; it is counted if it is given its outcome."""
    from memtraffic_book import survey

    tutorials = Path(os.environ.get(FOLDER, "tutorials"))
    fn = survey.with_fixed(
        as_function(survey.find_kernel(published.path, tutorials)), published.fixed
    )
    for path in published.keep.split():
        survey.keep_first(survey.find_kernel(path, tutorials))
    if published.compiled:
        fn = torch.compile(fn)
    arguments = differentiable(find_inputs(published.inputs).arguments(shape))

    def run(outcome: dict[str, Any] | None) -> None:
        if direction == "forward":
            _counted(lambda: arguments.call(fn), outcome)
            return
        outputs = [x for x in tensors_in([arguments.call(fn)]) if x.requires_grad]
        wanted, gradients = leaves_of(outputs), gradients_of(outputs)
        _counted(
            lambda: torch.autograd.grad(outputs, wanted, gradients, allow_unused=True), outcome
        )

    return run


def _counted(call: Callable[[], object], outcome: dict[str, Any] | None) -> None:
    """Calls; with an outcome, between a marker and the end of what the profiler sees."""
    if outcome is None:
        call()
        return
    with counted():
        outcome["begun"] = True
        call()
