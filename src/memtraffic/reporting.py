"""One page about a function: its formula, a trace, and what its kernels use on every target.

`report` returns it as Markdown; the command `report` writes that to a file, or HTML. A page is a
list of blocks, which are text, tables and pictures: two renderers turn them into what is written.
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

import memtraffic
from memtraffic import runtime
from memtraffic.compile import CompileError, Resources, resources
from memtraffic.functions import as_function, function_name
from memtraffic.gpus import TARGETS, AmdGpu, Gpu, NvidiaGpu, find_gpu
from memtraffic.inputs import AnyInputs, Arguments, Inputs, find_inputs
from memtraffic.ops import Op
from memtraffic.progress import progress
from memtraffic.residency import report as residency_report
from memtraffic.traffic.count import CountError, Traffic, count
from memtraffic.traffic.formula import (
    Formula,
    FormulaError,
    formula,
    parse_formula,
    plan,
    polynomial,
    solve,
)

Shape: TypeAlias = tuple[int, ...]
Row: TypeAlias = tuple[str, ...]

PASSES = ("forward", "backward")
MOST_ELEMENTS = 2**24  # of a tensor, at the sizes that are chosen
MOST_ACCESSES = 24  # of a trace, that a page shows
BLUE, PALE, INK, ORANGE = "#0969da", "#9ec5fe", "#1f2328", "#bc4c00"


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    """Sentences; what stands between backquotes is code."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells of text. Every column but the first `names` is aligned to the right."""

    columns: Row
    rows: list[Row]
    names: int = 1


@dataclass(frozen=True)
class Picture:
    """An SVG image. name: of its file, beside that of the page. alt: what it shows, in words."""

    name: str
    alt: str
    svg: str


Block: TypeAlias = Heading | Text | Table | Picture


@dataclass
class Page:
    """What a report says. title: its first heading."""

    title: str
    blocks: list[Block] = field(default_factory=list)


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

    >>> from memtraffic.ladder import naive
    >>> print(report(naive.softmax).splitlines()[0])
    # Memory traffic of memtraffic.ladder.naive.softmax

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
    subject = _Subject(function, made, dtype, backward, shape)
    page = Page(f"Memory traffic of {name or function_name(fn)}")
    failures: list[Exception] = []
    steps: list[tuple[str, Callable[[], list[Block]]]] = [
        ("Formula", lambda: _formula(subject)),
        ("A small case", lambda: _trace(subject)),
        ("Compiled", lambda: _compiled(subject, gpus)),
        ("Measured", lambda: _measured(subject, name or fn, inputs)),
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


@dataclass
class _Subject:
    """What a page is about, and what its sections found so far."""

    fn: Callable[..., Any]
    made: Inputs
    dtype: str
    backward: bool
    shape: Shape
    formulas: tuple[Formula, ...] = ()
    succeeded: bool = False

    def at(self, shape: Shape) -> str:
        sizes = zip(self.made.sizes, shape, strict=True)
        return "with " + (", ".join(f"{name} = {n}" for name, n in sizes) or "these inputs")

    def arguments(self, shape: Shape) -> Arguments:
        return self.made.arguments(shape, self.dtype)

    def counted(self, shape: Shape, trace: bool = False) -> tuple[Traffic, ...]:
        options: Any = {"inputs": self.arguments(shape), "trace": trace}
        options |= {"backward": self.backward}
        found: Any = count(self.fn, **options)
        return found if self.backward else (found,)

    def small(self) -> Iterable[Shape]:
        """Shapes for a small case: the smallest first."""
        if self.formulas:
            return [min(self.formulas[0].fitted, key=math.prod)]
        rounds = plan(len(self.made.sizes))
        return sorted(
            {shape for sides in rounds for side in sides for shape in side}, key=math.prod
        )


def _smallness(shape: Shape) -> tuple[bool, int]:
    """What shapes for a small case are sorted by: sizes of 1 show too little."""
    return 1 in shape, math.prod(shape)


def _why(error: BaseException) -> str:
    text = " ".join(str(error).split())
    of_package = type(error).__module__.startswith("memtraffic.")
    kind = type(error).__qualname__
    said = text if of_package else f"{kind}: {text}".removesuffix(": ")
    return f"There is nothing to show here: {said}" + ("" if said.endswith(".") else ".")


def _versions(subject: _Subject) -> str:
    try:
        triton = f"Triton {version('triton')}"
    except PackageNotFoundError:
        triton = "no Triton"
    return (
        f"Inputs: `{subject.made.name}`, {subject.dtype} where no dtype is named. Made by "
        f"memtraffic {memtraffic.__version__} with PyTorch {torch.__version__} and {triton}."
    )


# ---- the formula


@dataclass
class _Watched:
    """A function, and the elements of its arguments and results by the shape that it is called at.

    roles: which tensors among the arguments are read, and which are written.
    """

    subject: _Subject
    shape: Shape = ()
    roles: list[tuple[bool, bool]] = field(default_factory=list)
    seen: dict[Shape, tuple[int, int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, _, name = function_name(self.subject.fn).rpartition(".")
        vars(self).update(__module__=module, __qualname__=name)  # what messages call it

    @property
    def inputs(self) -> Inputs:
        def make(shape: Shape, dtype: str, layout: str) -> Arguments:
            self.shape = shape
            return self.subject.made.make(shape, dtype, layout)

        return replace(self.subject.made, make=make)

    def __call__(self, *args: Any, **options: Any) -> Any:
        arguments = Arguments(args, options)
        result = arguments.call(self.subject.fn)
        self.seen[self.shape] = once(self.subject.fn, arguments, result, self.roles, Tensor.numel)
        return result

    def least(self, which: int, found: Formula) -> list[str]:
        """The least that a pass reads and writes, as formulas."""
        columns = [(0, 1), (2, 3)][which]
        texts = []
        for column in columns:
            elements = {
                shape: self.seen[shape][column] for shape in (*found.fitted, *found.checked)
            }
            like: Any = found  # which has sizes and shapes, as `Counts` has
            solved = solve(elements, like)
            texts.append("no such sum" if solved is None else polynomial(solved))
        return texts


def once(
    fn: Any,
    arguments: Arguments,
    result: Any,
    roles: Sequence[tuple[bool, bool]],
    size: Callable[[Tensor], int],
) -> tuple[int, int, int, int]:
    """The least that is moved: read and written by the forward pass, and by the backward pass.

    roles: of each tensor among the arguments, whether it is read and whether it is written. size:
    of a tensor, in elements or in bytes. The backward pass reads what the forward pass reads and
    the gradients of its results, and writes those of what it reads.
    """
    given = arguments.tensors
    held = {x.untyped_storage().data_ptr() for x in given}
    new = [x for x in _tensors([result]) if x.untyped_storage().data_ptr() not in held]
    roles = roles or [(True, False)] * len(given)
    read = [x for x, (is_read, _) in zip(given, roles, strict=True) if is_read]
    written = [x for x, (_, is_written) in zip(given, roles, strict=True) if is_written]
    read += list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
    written += new
    floats = [sum(size(x) for x in xs if x.is_floating_point()) for xs in (read, written)]
    reads, writes = sum(map(size, read)), sum(map(size, written))
    return reads, writes, reads + floats[1], floats[0]


def find_roles(fn: Callable[..., Any], arguments: Arguments) -> list[tuple[bool, bool]]:
    """Whether `fn` reads and writes each tensor among its arguments.

    >>> import torch
    >>> find_roles(lambda y, x: y.copy_(x), Arguments((torch.zeros(2), torch.ones(2))))
    [(False, True), (True, False)]

    It is run twice. What it changes, it writes. What it changes to the same from other numbers, it
    does not read.
    """
    with torch.no_grad():
        first, second = (arguments.map(Tensor.clone) for _ in range(2))
        first.call(fn)
        pairs = zip(arguments.tensors, first.tensors, strict=True)
        written = [not torch.equal(before, after) for before, after in pairs]
        if not any(written):
            return [(True, False) for _ in written]
        for x, is_written in zip(second.tensors, written, strict=True):
            if is_written:
                x.fill_(float("nan") if x.is_floating_point() else 1)
        second.call(fn)
        same = map(torch.equal, first.tensors, second.tensors)
        return [(not (w and s), w) for w, s in zip(written, same, strict=True)]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _formula(subject: _Subject) -> list[Block]:
    watched = _Watched(subject)
    options: dict[str, Any] = {"backward": subject.backward, "dtype": subject.dtype}
    try:
        found: Any = formula(watched, watched.inputs, **options)
    except (CountError, FormulaError) as error:
        return [Text(f"There is no formula: {' '.join(str(error).split())}.".replace("..", "."))]
    subject.formulas = found if subject.backward else (found,)
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


def _share(subject: _Subject, which: int, each: Formula, reads: str, writes: str) -> str:
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


def _traffic_picture(subject: _Subject, watched: _Watched) -> list[Block]:
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
    return [Picture("traffic", alt, _draw_traffic(bars, title, 2 * len(traffic)))]


# ---- a small case


def _trace(subject: _Subject) -> list[Block]:
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


def _compiled(subject: _Subject, gpus: Sequence[Gpu]) -> list[Block]:
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
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            results = [x for x in _tensors([leaves.call(fn)]) if x.requires_grad]
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
        one, slots = residency_report(kernel, gpu), warp_slots(gpu)
        warps = one["resident"] * kernel.num_warps
        share = warps / slots
        target = f"{gpu.target} ({gpu.product})"
        bars.setdefault(kernel.kernel, {}).setdefault(target, share)
        least = f"{one['resident']:,}", one["binding"]
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
    return [*blocks, Picture("occupancy", alt, _draw_occupancy(bars))]


# ---- measured


def _measured(subject: _Subject, fn: Any, inputs: AnyInputs) -> list[Block]:
    if not runtime.HAS_GPU:
        return [
            Text("This machine has no GPU, so there are no hardware counters and no bandwidth.")
        ]
    if runtime.INTERPRETED:
        return [Text("Kernels are interpreted here, so no counters were read and nothing timed.")]
    return [*_counters(subject, fn, inputs), *_bandwidth(subject)]


def _counters(subject: _Subject, fn: Any, inputs: AnyInputs) -> list[Block]:
    from memtraffic.traffic.counters import CountersError, counters

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


def _bandwidth(subject: _Subject) -> list[Block]:
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


# ---- pictures


def _svg(figure: Any) -> str:
    """A figure as SVG, the same text each time."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "memtraffic", "svg.fonttype": "path"}):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _axes(bars: int, title: str, xlabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 1.1 + 0.28 * bars), layout="constrained", facecolor="white")
    ax = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_xlabel(xlabel)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def _draw_traffic(bars: Sequence[tuple[str, int, int]], title: str, sums: int) -> str:
    figure, ax = _axes(len(bars) + 2, title, "elements")
    places = range(len(bars))
    reads, writes = [read for _, read, _ in bars], [written for *_, written in bars]
    ax.barh(places, reads, color=BLUE, edgecolor=INK, linewidth=0.5, label="read")
    ax.barh(
        places, writes, left=reads, color=PALE, edgecolor=INK, linewidth=0.5, hatch="///",
        label="written",
    )  # fmt: skip
    ax.set_yticks(places, [name for name, *_ in bars])
    for label in ax.get_yticklabels()[-sums:]:
        label.set_fontweight("bold")
    ax.axhline(len(bars) - sums - 0.5, color=INK, linewidth=0.8)
    ax.margins(y=0.02)
    ax.invert_yaxis()
    ax.locator_params(axis="x", nbins=5)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return _svg(figure)


def _draw_occupancy(bars: Mapping[str, Mapping[str, float]]) -> str:
    targets = list(dict.fromkeys(target for each in bars.values() for target in each))
    title = "The share of an SM's slots for warps that programs take."
    figure, ax = _axes(len(targets) * len(bars), title, "percent")
    height = 0.8 / len(bars)
    looks = [(BLUE, ""), (PALE, "///"), (ORANGE, "..."), ("white", "xxx")]
    for i, (kernel, each) in enumerate(bars.items()):
        places = [targets.index(target) + (i - (len(bars) - 1) / 2) * height for target in each]
        color, hatch = looks[i]
        drawn = ax.barh(
            places, [100 * share for share in each.values()], height=height, color=color,
            hatch=hatch, edgecolor=INK, linewidth=0.5, label=kernel.lstrip("_"),
        )  # fmt: skip
        ax.bar_label(drawn, [f"{share:.0%}" for share in each.values()], padding=3, fontsize=8)
    ax.set_yticks(range(len(targets)), targets)
    ax.invert_yaxis()
    ax.set_xlim(0, 112)
    ax.margins(y=0.02)
    if len(bars) > 1:
        figure.legend(frameon=False, loc="outside lower center")
    return _svg(figure)


# ---- what is written


def to_markdown(page: Page, folder: str | None = None) -> str:
    """A page as Markdown. folder: what stands before the names of its pictures; None leaves these
    out."""
    parts = [f"# {_plain(page.title)}"]
    for block in page.blocks:
        match block:
            case Heading(text):
                parts.append(f"## {text}")
            case Text(text):
                parts.append(_plain(text))
            case Table(columns, rows, names):
                rule = ["---" if i < names else "---:" for i in range(len(columns))]
                lines = [columns, rule, *rows]
                cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
            case Picture(name, alt, _) if folder is not None:
                parts.append(f"![{_plain(alt)}]({folder}{name}.svg)")
    return "\n\n".join(parts)


def _plain(text: str) -> str:
    """Text in which nothing outside of code means anything to Markdown."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_\[\]<>|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; background: white;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #d1d9e0; padding: 0.25rem 0.6rem; text-align: left; }
.number { text-align: right; }
img { max-width: 100%; height: auto; }
""".strip()


def to_html(page: Page) -> str:
    """A page as HTML that needs no other file."""
    title = html.escape(page.title)
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>",
    ]
    for block in page.blocks:
        match block:
            case Heading(text):
                parts.append(f"<h2>{html.escape(text)}</h2>")
            case Text(text):
                parts.append(f"<p>{_inline(text)}</p>")
            case Table(columns, rows, names):
                parts.append(_html_table(columns, rows, names))
            case Picture(_, alt, svg):
                data = base64.b64encode(svg.encode()).decode()
                source = f"data:image/svg+xml;base64,{data}"
                parts.append(f'<img alt="{html.escape(alt)}" src="{source}">')
    return "\n".join([*parts, "</body>\n</html>"])


def _inline(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))


def _html_table(columns: Row, rows: Iterable[Row], names: int) -> str:
    def line(cells: Row, tag: str) -> str:
        kinds = ["" if i < names else ' class="number"' for i in range(len(cells))]
        scope = ' scope="col"' if tag == "th" else ""
        each = zip(cells, kinds, strict=True)
        return "".join(f"<{tag}{scope}{kind}>{_inline(cell)}</{tag}>" for cell, kind in each)

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(columns, 'th')}</tr></thead>"
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table></div>'


def write_page(page: Page, path: Path) -> list[Path]:
    """Writes a page to a file that ends in .md or .html; returns the files that it wrote.

    Beside Markdown lie its pictures. Raises OSError for a file that cannot be written.
    """
    if path.suffix.lower() == ".html":
        path.write_text(to_html(page) + "\n", encoding="utf-8")
        return [path]
    pictures = {path.with_name(f"{path.stem}.{block.name}.svg"): block.svg
                for block in page.blocks if isinstance(block, Picture)}  # fmt: skip
    path.write_text(to_markdown(page, f"{path.stem}.") + "\n", encoding="utf-8")
    for file, svg in pictures.items():
        file.write_text(svg, encoding="utf-8")
    return [path, *pictures]
