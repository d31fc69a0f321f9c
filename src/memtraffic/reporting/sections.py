"""The sections of a page: each returns what it says of a subject."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from memtraffic import runtime
from memtraffic.compile import resources
from memtraffic.errors import CompileError, CountError, CountersError, FormulaError
from memtraffic.gpus import AmdGpu, Gpu, NvidiaGpu
from memtraffic.inputs import AnyInputs, Arguments, Inputs
from memtraffic.meters.count import Traffic
from memtraffic.meters.formula import Formula, formula, parse_formula, polynomial
from memtraffic.op import Op
from memtraffic.progress import progress
from memtraffic.reporting.page import Block, Heading, Picture, Row, Table, Text
from memtraffic.reporting.pictures import draw_occupancy, draw_traffic
from memtraffic.reporting.subject import Subject, Watched, all_tensors, find_roles, once
from memtraffic.residency import Occupancy, Resources

PASSES = ("forward", "backward")
MOST_ACCESSES = 24  # of a trace, that a page shows


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


# ---- the formula


def formula_section(subject: Subject) -> list[Block]:
    watched = Watched(subject)
    options: dict[str, Any] = {"backward": subject.backward, "dtype": subject.dtype}
    try:
        found = formula(watched, watched.inputs, **options)
    except (CountError, FormulaError) as error:
        return [Text(f"There is no formula: {' '.join(str(error).split())}.".replace("..", "."))]
    subject.formulas = (found, found.backward) if found.backward else (found,)
    subject.succeeded = True
    one, seen = subject.formulas[0], dict(watched.seen)
    watched.roles = find_roles(subject.fn, subject.arguments(min(one.fitted, key=math.prod)))
    if any(is_written for _, is_written in watched.roles):
        for shape in seen:
            watched.inputs.arguments(shape, subject.dtype).call(watched)
    rows, sentences = [], []
    for which, each in enumerate(subject.formulas):
        reads, writes = watched.least(which, each)
        rows += [
            (PASSES[which], "reads", polynomial(each.reads), reads),
            (PASSES[which], "writes", polynomial(each.writes), writes),
        ]
        sentences.append(_share(subject, which, each, reads, writes))
    kept = 0 if subject.backward else 1
    columns = ("pass", "direction", "elements", "least")
    checked = f"Solved at {len(one.fitted)} shapes, checked at {len(one.checked)} others" + (
        f"; {len(one.refused)} were refused: {one.refused[0][-1]}." if one.refused else "."
    )
    least = "The least reads each argument once and writes each result once" + (
        "; that of the backward pass reads the arguments and the gradients of the results, and "
        "writes the gradients of the arguments."
        if subject.backward
        else "."
    )
    return [
        Table(columns[kept:], [row[kept:] for row in rows], len(columns) - kept),
        Text(f"{checked} {least}"),
        *(Text(sentence) for sentence in sentences if sentence),
        *_traffic_picture(subject, watched),
    ]


def _share(subject: Subject, which: int, each: Formula, reads: str, writes: str) -> str:
    """What a pass moves at the sizes of the page, beside the least."""
    if "no such sum" in (reads, writes):
        return ""
    least = sum(parse_formula(reads, writes, each.symbols).elements(*subject.shape))
    moved = sum(each.elements(*subject.shape))
    name = f"the {PASSES[which]} pass" if subject.backward else "the function"
    sentence = f"{_capital(subject.at(subject.shape))}, {name} moves {int(moved):,} elements"
    if not least:
        return f"{sentence}."
    sentence += f", {float(Fraction(moved) / least):.2f} times the least of {int(least):,}."
    if moved < least:
        sentence += " That is less because it does not touch every element of its arguments."
    return sentence


def _traffic_picture(subject: Subject, watched: Watched) -> list[Block]:
    """The traffic by operation beside the least, where there are several operations."""
    one = subject.formulas[0]
    shape = max((*one.fitted, *one.checked), key=math.prod)
    traffic = subject.counted(shape)
    heads = [f"{name}: " if subject.backward else "" for name in PASSES]
    bars = [
        (f"{heads[which]}{op.name}", op.read_elements, op.written_elements)
        for which, each in enumerate(traffic)
        for op in each.ops
    ]
    if not 2 <= len(bars) <= 30:
        return []
    least = watched.seen[shape]
    moved, wanted = 0, 0
    for which, each in enumerate(traffic):
        reads, writes = least[2 * which], least[2 * which + 1]
        bars += [
            (f"{heads[which]}all of them", each.read_elements, each.written_elements),
            (f"{heads[which]}the least", reads, writes),
        ]
        moved += each.read_elements + each.written_elements
        wanted += reads + writes
    share = f"{moved / wanted:.2f} times the least" if wanted else f"{moved:,} elements"
    title = f"All operations together move {share} {subject.at(shape)}."
    each_bar = "; ".join(f"{name} {read:,} and {written:,}" for name, read, written in bars)
    alt = f"{title} Elements read and written: {each_bar}."
    return [Picture("traffic", alt, draw_traffic(bars, title, 2 * len(traffic)))]


# ---- a small case


def trace_section(subject: Subject) -> list[Block]:
    failure: Exception | None = None
    for shape in subject.small():
        try:
            passes = subject.counted(shape, trace=True)
            break
        except ValueError as error:
            failure = failure or error
    else:
        raise failure or ValueError("the function takes no shape")
    subject.succeeded = True
    blocks: list[Block] = [Text(f"Counted {subject.at(shape)}, in elements:")]
    for which, traffic in enumerate(passes):
        if subject.backward:
            blocks.append(Text(f"The {PASSES[which]} pass:"))
        rows = [
            (f"`{op.name}`", f"{op.read_elements:,}", f"{op.written_elements:,}")
            for op in traffic.ops
        ]
        total = ("total", f"{traffic.read_elements:,}", f"{traffic.written_elements:,}")
        blocks.append(Table(("operation", "read", "written"), [*rows, total]))
        if traffic.accesses:
            blocks += _accesses(traffic)
    return blocks


def _accesses(traffic: Traffic) -> list[Block]:
    """Each load and store of the Triton kernels, in the order in which they were made."""
    rows: list[Row] = [
        (
            ", ".join(map(str, access.program)),
            "load" if access.kind == "read" else "store",
            f"`{access.argument}`",
            f"{len(access.offsets):,}",
            _ranges(access.offsets),
        )
        for access in traffic.accesses
    ]
    kinds = Counter(row[1] for row in rows)
    made = " and ".join(_plural(kinds[kind], kind) for kind in ("load", "store"))
    text = f"The programs of its Triton kernels make {made}"
    shown = rows[:MOST_ACCESSES]
    text += f", of which these are the first {len(shown)}:" if len(rows) > len(shown) else ":"
    columns = ("program", "access", "argument", "elements", "offsets")
    return [Text(text), Table(columns, shown, 3)]


def _ranges(offsets: Sequence[int]) -> str:
    """Offsets as text, in runs.

    >>> _ranges([0, 1, 2, 3, 8, 9]), _ranges([0, 2, 4]), _ranges([])
    ('0-3, 8-9', '0, 2, 4', 'none')
    """
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset == runs[-1][1] + 1:
            runs[-1][1] = offset
        else:
            runs.append([offset, offset])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "") or "none"


# ---- compiled


def compiled_section(subject: Subject, gpus: Sequence[Gpu]) -> list[Block]:
    arguments = subject.arguments(subject.shape)
    call = _both_passes(subject.fn) if subject.backward else subject.fn
    found: list[tuple[Gpu, Resources]] = []
    failed: list[str] = []
    for gpu in progress(gpus, "compiling"):
        try:
            kernels = resources(call, gpu, inputs=arguments)
        except CompileError as error:
            failed.append(f"For {gpu.target}: {' '.join(str(error).split())[:300]}.")
            continue
        if not kernels:
            return [Text("The function launches no Triton kernel, so there is none to compile.")]
        found += [(gpu, kernel) for kernel in kernels]
    blocks: list[Block] = [Text(failure) for failure in failed]
    if not found:
        return blocks
    subject.succeeded = True
    where = f"Compiled {subject.at(subject.shape)}; no kernel ran, and the GPUs need not be here."
    limits = dict.fromkeys(
        f"No {gpu.target} launches `{kernel.kernel}`: {kernel.unlaunchable}."
        for gpu, kernel in found
        if kernel.unlaunchable
    )
    blocks += [Text(where), _resources_table(found), *map(Text, limits)]
    return [*blocks, Heading("Occupancy"), *_occupancy(found)]


def _both_passes(fn: Callable[..., Any]) -> Callable[..., None]:
    """`fn` and its backward pass, as `count` makes it, for each floating-point argument."""

    def call(*args: Any, **options: Any) -> None:
        leaves = Arguments(args, options).map(
            lambda x: x.detach().requires_grad_() if x.is_floating_point() else x
        )
        with torch.enable_grad():
            results = [x for x in all_tensors([leaves.call(fn)]) if x.requires_grad]
            wanted = [x for x in leaves.tensors if x.requires_grad]
            if isinstance(fn, torch.nn.Module):
                wanted += [x for x in fn.parameters() if x.requires_grad]
            gradients = [torch.ones_like(x) for x in results]
            torch.autograd.grad(results, wanted, gradients, allow_unused=True)

    return call


def _widths(bits: Mapping[int, int]) -> str:
    return " + ".join(f"{n} of {width}" for width, n in sorted(bits.items())) or "none"


def _repeated(rows: Iterable[Row], place: int) -> list[Row]:
    """Rows without repetitions; how often each occurs stands in one of its columns."""
    return [
        (*row[:place], f"{row[place]} × {times}" if times > 1 else row[place], *row[place + 1 :])
        for row, times in Counter(rows).items()
    ]


def _resources_table(found: Sequence[tuple[Gpu, Resources]]) -> Table:
    rows = [
        (
            f"{gpu.target} ({gpu.product})",
            f"`{kernel.kernel}`",
            *(
                f"{number:,}"
                for number in (
                    kernel.num_warps, kernel.registers, kernel.spill_bytes, kernel.shared_bytes,
                )
            ),
            _widths(kernel.load_bits),
            _widths(kernel.store_bits),
        )
        for gpu, kernel in found
    ]  # fmt: skip
    columns = (
        *("target", "kernel", "warps", "registers per thread", "bytes spilled", "bytes shared"),
        *("loads, in bits", "stores, in bits"),
    )
    return Table(columns, _repeated(rows, 1), 2)


def warp_slots(gpu: Gpu) -> int:
    """The warps that one SM or compute unit holds at most.

    >>> from memtraffic.gpus import find_gpu
    >>> warp_slots(find_gpu("sm_90")), warp_slots(find_gpu("gfx942"))
    (64, 32)
    """
    if isinstance(gpu, AmdGpu):
        return gpu.max_waves_per_simd * gpu.simds
    assert isinstance(gpu, NvidiaGpu)
    return gpu.max_threads_per_sm // gpu.warp_size


def _occupancy(found: Sequence[tuple[Gpu, Resources]]) -> list[Block]:
    rows: list[Row] = []
    bars: dict[str, dict[str, float]] = {}
    for gpu, kernel in found:
        one, slots = Occupancy.of(kernel, gpu), warp_slots(gpu)
        warps = one.resident * kernel.num_warps
        share = warps / slots
        target = f"{gpu.target} ({gpu.product})"
        bars.setdefault(kernel.kernel, {}).setdefault(target, share)
        least = f"{one.resident:,}", one.binding
        rows.append((target, f"`{kernel.kernel}`", *least, f"{warps} of {slots}", f"{share:.0%}"))
    text = Text(
        "How many programs one SM, or on AMD one compute unit, holds at once; which limit allows "
        "no more; and how many of its slots for warps the programs take:"
    )
    columns = ("target", "kernel", "programs", "bound by", "warps", "occupancy")
    blocks: list[Block] = [text, Table(columns, _repeated(rows, 1), 2)]
    if len({target for target, *_ in rows}) < 2 or len(bars) > 4:
        return blocks
    alt = "Occupancy by target. " + " ".join(
        f"{kernel}: " + ", ".join(f"{target} {share:.0%}" for target, share in each.items()) + "."
        for kernel, each in bars.items()
    )
    return [*blocks, Picture("occupancy", alt, draw_occupancy(bars))]


# ---- measured


def measured_section(subject: Subject, fn: Any, inputs: AnyInputs) -> list[Block]:
    if not runtime.HAS_GPU:
        return [
            Text("This machine has no GPU, so there are no hardware counters and no bandwidth.")
        ]
    if runtime.INTERPRETED:
        return [Text("Kernels are interpreted here, so no counters were read and nothing timed.")]
    return [*_counters(subject, fn, inputs), *_bandwidth(subject)]


def _counters(subject: Subject, fn: Any, inputs: AnyInputs) -> list[Block]:
    from memtraffic.meters.counters import counters

    given: dict[str, Any] = {"inputs": subject.made.name}
    if isinstance(inputs, Op):
        given = {"op": inputs}
    elif not isinstance(inputs, str | Inputs | None):
        return [Text("Hardware counters need inputs that are given as text.")]
    try:
        frame = counters(fn, subject.shape, dtype=subject.dtype, **given)
    except (CountersError, LookupError) as error:
        return [Text(f"There are no hardware counters: {error}.")]
    columns = {
        "L2 to L1, bytes": frame["l1_l2_read_bytes"],
        "L1 to L2, bytes": 32 * frame["l2_write_sectors"],
        "DRAM read, bytes": frame["dram_read_bytes"],
        "DRAM written, bytes": frame["dram_write_bytes"],
        "ns": frame["ns"],
    }
    rows: list[Row] = [
        (f"`{kernel}`", *(f"{int(column.iloc[i]):,}" for column in columns.values()))
        for i, kernel in enumerate(frame["kernel"])
    ]
    text = f"What the hardware moved {subject.at(subject.shape)}, in one call of the forward pass:"
    return [Text(text), Table(("kernel", *columns), rows)]


def _bandwidth(subject: Subject) -> list[Block]:
    """The least traffic over the time, beside a copy that moves as many bytes."""
    from memtraffic.benchmark import fastest_copy, summary, time_interleaved

    arguments = subject.arguments(subject.shape)
    roles = find_roles(subject.fn, arguments)
    result = arguments.call(subject.fn)
    moved = sum(once(subject.fn, arguments, result, roles, _bytes)[:2])
    source = torch.empty(max(4, moved // 8), device=runtime.device()).normal_()  # read and written
    calls = [lambda: arguments.call(subject.fn), fastest_copy(source)]
    own, copied = (
        summary(samples, n_bytes)
        for samples, n_bytes in zip(
            time_interleaved(calls), (moved, 2 * source.nbytes), strict=True
        )
    )
    subject.succeeded = True
    rows: list[Row] = [
        (
            name,
            f"{each['us']:.1f}",
            f"{each['us_p20']:.1f} to {each['us_p80']:.1f}",
            f"{each['gb_per_s']:.0f}",
        )
        for name, each in (("the function", own), ("the fastest copy", copied))
    ]
    share = own["gb_per_s"] / copied["gb_per_s"]
    return [
        Text(
            f"Timed on {runtime.gpu_name()} {subject.at(subject.shape)}, from a cold L2: the "
            f"forward pass reaches {share:.2f} times the bandwidth of the fastest copy. Its "
            f"bandwidth is the least traffic, {moved:,} bytes, over the median time."
        ),
        Table(("", "µs", "20th to 80th percentile", "GB/s"), rows),
    ]


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
