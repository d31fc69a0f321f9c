"""One Markdown document about a function: what it moves, and what its kernels use on each GPU."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pandas as pd
import torch

import memtraffic
from memtraffic import runtime
from memtraffic.compile import resources
from memtraffic.errors import CompileError, CountersError, NoKernelError, described
from memtraffic.functions import as_function, function_name
from memtraffic.gpus import TARGETS, Gpu, find_gpus
from memtraffic.inputs import Arguments
from memtraffic.meters.count import Traffic, count, run_passes
from memtraffic.meters.formula import formula
from memtraffic.meters.sectors import UNCONFIRMED, sectors
from memtraffic.op import AnyInputs, Op, find_op, least_bytes
from memtraffic.progress import progress
from memtraffic.residency import Occupancy, Resources, rules_of
from memtraffic.residency.resources import widths_text

MOST_ELEMENTS = 2**20  # of a tensor, at the sizes that are chosen
MOST_PROGRAMS = 2**12  # likewise, where a program takes one row: the interpreter's time


def report(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    shape: Sequence[int] | None = None,
    *,
    targets: str | Gpu | Iterable[str | Gpu] | None = None,
    dtype: str = "float32",
    backward: bool = False,
) -> str:
    """What `fn` moves and what its kernels use on each target, as one Markdown document.

    >>> from memtraffic.kernels.softmax import naive
    >>> print(report(naive.softmax, shape=(16, 64)).splitlines()[0])
    # Memory traffic of memtraffic.kernels.softmax.naive.softmax

    It has the formula of the traffic; the traffic counted at the sizes of the report, beside the
    least, which reads each argument once and writes each new result once; registers, spills, shared
    memory and access widths of each kernel, compiled for each target; how many programs fit; and
    the sectors that loads and stores touch on the first target, if possible by NVIDIA. On a GPU it
    has hardware counters and the time beside a copy's. Where one of these cannot be had, a sentence
    says why.

    fn, inputs, dtype, backward: as for `formula`. shape: a number for each size of the inputs, to
    count, compile and measure at; by default `default_shape`. targets: a GPU or several, or their
    names; by default, each target of the table.

    Raises LookupError for an unknown target; what `fn` raises, where nothing else can be said; and
    what `as_function` and `find_op` raise.
    """
    made, function = find_op(inputs), as_function(fn)
    at = made.check(default_shape(made) if shape is None else shape)
    gpus = find_gpus(TARGETS.values() if targets is None else targets)
    subject = Subject(function, made, at, dtype, backward)
    parts, failures = [f"# Memory traffic of {function_name(fn)}", _versions(subject)], []
    sections: dict[str, Callable[[], list[str]]] = {
        "Formula": lambda: formula_section(subject),
        "Counted": lambda: counted_section(subject),
        "Compiled": lambda: compiled_section(subject, gpus),
        "Sectors": lambda: sectors_section(subject, gpus),
        "Measured": lambda: measured_section(subject, inputs),
    }
    for heading, section in sections.items():
        try:
            text = section()
        except Exception as error:  # a function may raise what it likes
            failures.append(error)
            text = [_sentence(f"There is nothing to show here: {described(error)}")]
        parts += [f"## {heading}", *text]
    if not subject.found:
        raise failures[0]
    return "\n\n".join(parts)


def default_shape(made: Op) -> tuple[int, ...]:
    """Sizes to report at, all the same power of two: what the interpreter counts in seconds.

    >>> default_shape(find_op("M,N")), default_shape(find_op("M,K K,N"))
    ((1024, 1024), (64, 64, 64))
    """
    sizes = len(made.sizes)
    for n in (2**power for power in range(12, 0, -1)):
        if made.elements((n,) * sizes) <= MOST_ELEMENTS and n ** (sizes - 1) <= MOST_PROGRAMS:
            return (n,) * sizes
    return (1,) * sizes


@dataclass
class Subject:
    """What a report is about. found: the sections that have something to show."""

    fn: Callable[..., Any]
    made: Op
    shape: tuple[int, ...]
    dtype: str
    backward: bool
    found: list[str] = field(default_factory=list)

    @property
    def at(self) -> str:
        """The sizes in words, such as "with M = 3, N = 5"."""
        sizes = zip(self.made.sizes, self.shape, strict=True)
        return "with " + (", ".join(f"{name} = {n}" for name, n in sizes) or "these inputs")

    def call(self, *args: Any, **options: Any) -> None:
        """Calls the function and, if asked for, its backward pass, as `count` makes it."""
        run_passes(self.fn, Arguments(args, options), self.backward, lambda run: run())

    def arguments(self) -> Arguments:
        """What the function is called with."""
        return self.made.arguments(self.shape, self.dtype)


# ---- the sections: each returns its paragraphs


def formula_section(subject: Subject) -> list[str]:
    options: dict[str, Any] = {"dtype": subject.dtype, "backward": subject.backward}
    found = formula(subject.fn, subject.made, **options)
    subject.found.append("formula")
    evidence = found.evidence.replace("\n", "; ")
    return ["In elements:", f"```\n{found}\n```", _sentence(evidence[:1].upper() + evidence[1:])]


def counted_section(subject: Subject) -> list[str]:
    results: list[object] = []

    def called(*args: Any, **keywords: Any) -> object:
        results.append(subject.fn(*args, **keywords))
        return results[-1]

    arguments = subject.arguments()
    traffic = count(called, arguments, backward=subject.backward)
    passes = [each for each in (traffic, traffic.backward) if each]
    subject.found.append("count")
    moved = passes[0].read_bytes + passes[0].written_bytes
    weights = list(subject.fn.parameters()) if isinstance(subject.fn, torch.nn.Module) else []
    least = least_bytes([*arguments.tensors, *weights], results[0])
    name = "the forward pass" if subject.backward else "the function"
    text = f"{subject.at}, {name} moves {moved:,} bytes"
    if least:
        text += f", {moved / least:.2f} times the least of {least:,}"
    if moved < least:
        text += ": it does not touch every element of its arguments"
    parts = [_sentence(text[:1].upper() + text[1:])]
    for which, traffic in zip(("The forward pass:", "The backward pass:"), passes, strict=False):
        parts += [which] * subject.backward + [_traffic_table(traffic)]
    return parts


def _traffic_table(traffic: Traffic) -> str:
    frame = pd.DataFrame(traffic.ops).rename(columns={"name": "operation"})
    if not traffic.sent_elements and not traffic.received_elements:
        frame = frame.drop(columns=list(frame.filter(regex="^(sent|received)_")))
    kept = frame.groupby("operation", sort=False).sum()
    times = frame["operation"].value_counts(sort=False)
    kept.index = [
        f"`{name}`" + (f" × {times[name]}" if times[name] > 1 else "") for name in kept.index
    ]
    kept.loc["total"] = kept.sum()
    kept.columns = [name.replace("_", " ") for name in kept.columns]
    return markdown(kept.rename_axis("operation").reset_index())


def compiled_section(subject: Subject, gpus: Sequence[Gpu]) -> list[str]:
    arguments, parts = subject.arguments(), []
    found: list[tuple[Gpu, Resources]] = []
    for gpu in progress(gpus, "compiling"):
        try:
            found += [(gpu, kernel) for kernel in resources(subject.call, arguments, target=gpu)]
        except CompileError as error:
            parts.append(_sentence(f"For {gpu.target}: {described(error)[:300]}"))
        except NoKernelError:
            hint = "launches one only for tensors on a GPU, compile it within `stand_in()`"
            return [f"The function launched no Triton kernel. If it {hint}."]
    if not found:
        return parts
    subject.found.append("resources")
    limits = (
        f"No {gpu.target} launches `{kernel.kernel}`: {kernel.unlaunchable}."
        for gpu, kernel in found
        if kernel.unlaunchable
    )
    uses = pd.DataFrame(
        {
            "target": f"{gpu.target} ({gpu.product})",
            "kernel": f"`{kernel.kernel}`",
            "warps": kernel.num_warps,
            "registers per thread": kernel.registers,
            "bytes spilled": kernel.spill_bytes,
            "bytes shared": kernel.shared_bytes,
            "loads, in bits": widths_text(kernel.load_bits),
            "stores, in bits": widths_text(kernel.store_bits),
        }
        for gpu, kernel in found
    )
    fits = pd.DataFrame(_occupancy(gpu, kernel) for gpu, kernel in found)
    return [
        *parts,
        f"Compiled {subject.at}; no kernel ran, and the GPUs need not be here.",
        markdown(uses.drop_duplicates()),
        *dict.fromkeys(limits),
        "How many programs one SM, or on AMD one compute unit, holds at once; which limit allows "
        "no more; and how many of its slots for warps the programs take:",
        markdown(fits.drop_duplicates()),
    ]


def sectors_section(subject: Subject, gpus: Sequence[Gpu]) -> list[str]:
    gpu = next((gpu for gpu in gpus if gpu.vendor == "nvidia"), gpus[0])
    try:
        found = sectors(subject.call, subject.arguments(), target=gpu)
    except NoKernelError:
        return ["The function launched no Triton kernel."]
    subject.found.append("sectors")
    known = found.bank_conflicts
    more = "" if known is None else f"There are {known:,} bank conflicts in shared memory."
    frame = found.frame
    shown = pd.DataFrame(
        {
            "kernel": "`" + frame["kernel"] + "`",
            "line": frame["file"] + ":" + frame["line"].astype(str),
            "": frame["kind"],
            "bits a lane": frame["bits"],
            "requests": frame["requests"],
            "sectors": frame["sectors"],
            "a request": frame["sectors_per_request"],
            "bytes wanted": frame["wanted_bytes"],
            "bytes moved": frame["fetched_bytes"],
        }
    )
    return [
        f"Predicted for {gpu.target} {subject.at}: a warp's load or store is a request, and "
        f"touches sectors of {gpu.sector_bytes} bytes. {more if found.confirmed else UNCONFIRMED}",
        markdown(shown),
    ]


def _occupancy(gpu: Gpu, kernel: Resources) -> dict[str, object]:
    one, slots = Occupancy.of(kernel, gpu), rules_of(gpu).warp_slots(gpu)
    warps = one.resident * kernel.num_warps
    return {
        "target": f"{gpu.target} ({gpu.product})",
        "kernel": f"`{kernel.kernel}`",
        "programs": one.resident,
        "bound by": one.binding,
        "warps": f"{warps} of {slots}",
        "occupancy": f"{warps / slots:.0%}",
    }


def measured_section(subject: Subject, inputs: AnyInputs) -> list[str]:
    if not runtime.HAS_GPU:
        return ["This machine has no GPU, so there are no hardware counters and no times."]
    if runtime.INTERPRETED:
        return ["Kernels are interpreted here, so no counters were read and nothing timed."]
    return [*_counters(subject, inputs), *_times(subject)]


def _counters(subject: Subject, inputs: AnyInputs) -> list[str]:
    from memtraffic.meters.counters import counters

    try:
        frame = counters(subject.fn, inputs, subject.shape, dtype=subject.dtype)
    except (CountersError, LookupError, TypeError, ValueError) as error:
        return [_sentence(f"There are no hardware counters: {described(error)}")]
    subject.found.append("counters")
    shown = pd.DataFrame(
        {
            "kernel": "`" + frame["kernel"] + "`",
            "L2 to L1, bytes": frame["l1_l2_read_bytes"],
            "L1 to L2, bytes": 32 * frame["l2_write_sectors"],
            "DRAM read, bytes": frame["dram_read_bytes"],
            "DRAM written, bytes": frame["dram_write_bytes"],
            "ns": frame["ns"],
        }
    )
    text = f"What the hardware moved {subject.at}, in one call of the forward pass:"
    return [text, markdown(shown)]


def _times(subject: Subject) -> list[str]:
    from memtraffic.benchmark import bench

    impls, shapes = {"the function": subject.fn}, [subject.shape]
    frame = bench(impls, subject.made, shapes, dtype=subject.dtype, beside_copy=True)
    subject.found.append("bench")
    copied, own = frame["us"]
    shown = pd.DataFrame(
        {
            "": ["the fastest copy of the first tensor", "the function"],
            "µs": frame["us"],
            "20th percentile": frame["us_p20"],
            "80th percentile": frame["us_p80"],
        }
    )
    return [
        f"Timed on {runtime.gpu_name()} {subject.at}, from a cold L2: the forward pass takes "
        f"{own / copied:.2f} times as long as the copy.",
        markdown(shown),
    ]


# ---- Markdown


def markdown(frame: pd.DataFrame) -> str:
    """A DataFrame as a table; numbers are aligned to the right.

    >>> print(markdown(pd.DataFrame({"name": ["a|b"], "bytes": [4096], "µs": [1.25]})))
    | name | bytes | µs |
    | --- | ---: | ---: |
    | a\\|b | 4,096 | 1.2 |
    """

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:,.1f}"
        return (f"{value:,}" if isinstance(value, int) else str(value)).replace("|", "\\|")

    numbers = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame]
    rule = ["---:" if number else "---" for number in numbers]
    rows = [[cell(value) for value in row] for row in frame.astype(object).values.tolist()]
    lines = [list(frame.columns), rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _versions(subject: Subject) -> str:
    try:
        triton = f"Triton {version('triton')}"
    except PackageNotFoundError:
        triton = "no Triton"
    return (
        f"Inputs: `{subject.made.name}`, {subject.dtype} where no dtype is named. Made by "
        f"memtraffic {memtraffic.__version__} with Python {platform.python_version()}, PyTorch "
        f"{torch.__version__} and {triton}."
    )
