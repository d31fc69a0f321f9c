"""The loads and stores of a compiled kernel: how each is spread over threads, and how wide it is.

A block's layout stands in Triton's GPU dialect (TTGIR), the width of the instructions in PTX or in
AMD's assembly. All say which line and column of the source an operation comes from.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from memtraffic.compile import amdgcn, sass
from memtraffic.compile.layouts import Layout, read_layouts
from memtraffic.errors import CountError

Place: TypeAlias = tuple[str, int, int]  # a file's name, a line and a column
Chain: TypeAlias = tuple[Place, ...]  # the innermost first, then where each function is called
Kind: TypeAlias = Literal["load", "store"]


class Code(NamedTuple):
    """What the compiler wrote of one kernel. bits: widths in the machine code, as `Resources`.

    assembly: PTX, or that of AMD. machine_code: its instructions, one a line.
    """

    kernel: str
    ttgir: str
    assembly: str
    load_bits: frozenset[int]
    store_bits: frozenset[int]
    machine_code: str = ""


@dataclass(frozen=True)
class CompiledAccess:
    """One load or store of a kernel, as it is compiled.

    where: its place in the source. layout: of its block; None for a single number. bits: what an
    instruction moves for each lane. loops: those of the compiled kernel that it is in, by number.
    type: of its pointers, as the compiler writes it. copies: whether a thread loads again what
    another of its registers holds. merged: which of its instructions, in order, NVIDIA's assembler
    leaves out, because another loads the same.
    """

    kind: Kind
    where: Chain
    layout: Layout | None
    bits: int
    loops: tuple[int, ...]
    type: str = ""
    copies: bool = False
    merged: frozenset[int] = frozenset()

    @property
    def instructions(self) -> int:
        """How many a thread makes in PTX."""
        vector = max(1, self.bits // _item_bits(self.type))
        return self.layout.elements(vector, self.copies).shape[1] if self.layout else 1


_REFUSED = {
    r"async_copy_global_to_local|buffer_load_to_local": "copies asynchronously (cp.async), as in a "
    "pipelined loop: num_stages=1 makes ordinary loads",
    r"tt\.descriptor_|ttng\.async_tma|tensormap": "copies by descriptor (TMA)",
    r"ttg\.warp_specialize": "gives warps different tasks",
    r"tt\.func private .*(?:\n(?!  }).*)*\b(?:tt\.(?:load|store|atomic)|buffer_)": "accesses "
    "memory in a function that is not inlined",
    r'"ttg\.num-ctas" = (?!1 )': "spreads a program over several thread blocks",
}
_OPERATION = re.compile(r"\b(?:tt\.|\w+\.buffer_)(load|store) .* : (\S.*?) loc\((.*)\)$")
_POLLED = re.compile(r"tt\.atomic_|isVolatile = true")
_PTX = re.compile(r"\b(ld|st)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z]+(\d+)\s")
_PTX_LOAD, _PTX_BRANCH = r"\bld\.(?:[\w:]+\.)*?global", r"^\s*@!?%p\d+\s+bra|^\$L__BB\w+:"
_PTX_LOOP = re.compile(r"^(\$L__BB\w+):.*\bbra(?:\.uni)?\s+\1;", re.MULTILINE | re.DOTALL)
_PTX_SUM = re.compile(r"^\s*add\.s64\s+(%rd\d+), (%rd\d+), (-?\d+);")
_PTX_PLACE = re.compile(rf"(@\S+)?\s*{_PTX_LOAD}\S*\s.*\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\d+)\s*)?\]")
_PTX_MASK = re.compile(r"^\s*(?:@\S+\s+)?[a-z][\w.]*\s+(%p\d+)\b(?:, (0|-1);)?", re.MULTILINE)
_ORDERED = r"volatile|acquire|relaxed"  # loads that are made each time
_PTX_ORDER = (  # after which a load may find something else
    rf"{_PTX_BRANCH}|^\s*(?:@!?%p\d+\s+)?(?:bra|bar|barrier|atom|red|membar|fence|call|st)\b"
    r"(?!\S*\.shared)"
)
_SASS_BRANCH = r"^@!?U?P\w+\s+(?:BRA|EXIT|RET)\b"
_PLAIN = r"(?:(?!.*\b(?:BRA|BSSY|BSYNC|EXIT|RET|CALL)\b).*\n)*"  # lines without a jump
_SKIP = re.compile(  # one branch over some of them
    rf"^(BSSY\S* (B\d+)\b.*\n{_PLAIN})@!?U?P\w+ BRA .*\n({_PLAIN}BSYNC\S* \2\b)", re.MULTILINE
)
_AMD = re.compile(r"\b(global|buffer|flat|s)_(load|store)_(\w+)")
_COMMENT = re.compile(r"^\s*\.loc\s.*(?://|;)\s*(\S.*)$")


def read_accesses(code: Code) -> list[CompiledAccess]:
    """The loads and stores of a compiled kernel, in the order of its text.

    Raises CountError for a kernel that reaches memory in a way that is not counted here, and
    CompileError for a layout that is not known.
    """
    for pattern, what in _REFUSED.items():
        if re.search(pattern, code.ttgir):
            raise CountError(f"{code.kernel} {what}; sectors counts ordinary loads and stores")
    operations = list(_operations(code))
    layouts = read_layouts(code.ttgir, [type_text for _, _, _, type_text, _ in operations])
    widths = _instructions(code.assembly)
    left = {place: iter(bits) for place, bits in widths.items()}
    found = []
    for (kind, where, text, type_text, loops), layout in zip(operations, layouts, strict=True):
        bits = widths.get((kind, where)) or widths.get(("scalar", where))
        if not bits:
            raise CountError(f"{code.kernel}: no instruction is marked as that of {text.strip()}")
        if len(set(bits)) > 1:
            bits = _taken(left.get((kind, where), iter(())), layout, type_text)
        if not bits:
            raise CountError(f"{code.kernel}: the {kind}s of {describe(where)} differ in width")
        found.append(CompiledAccess(kind, where, layout, bits[0], loops, type_text))
    known = {(access.kind, access.where) for access in found}
    if unknown := {it for it in widths if it[0] != "scalar"} - known:
        _, where = min(unknown)
        raise CountError(f"{code.kernel}: {describe(where)} is no tl.load or tl.store")
    for kind, bits_there in (("load", code.load_bits), ("store", code.store_bits)):
        written = {access.bits for access in found if access.kind == kind}
        if not bits_there <= {max(bits, 8) for bits in written}:
            raise CountError(
                f"{code.kernel}: its {kind}s have {sorted(written)} bits in PTX and "
                f"{sorted(bits_there)} in the machine code"
            )
    return _merge(code, found)


def _taken(widths: Iterator[int], layout: Layout | None, type_text: str) -> list[int]:
    """The next instructions of a place that together move an access; none if they differ."""
    total = _item_bits(type_text) * (layout.elements().shape[1] if layout else 1)
    taken: list[int] = []
    while sum(taken) < total and (bits := next(widths, 0)):
        taken.append(bits)
    return taken if sum(taken) == total and len(set(taken)) == 1 else []


def _item_bits(type_text: str) -> int:
    """The bits in memory of an element, by the type of its pointer."""
    item = re.search(r"(?:ptr<|x)[a-z]+(\d+)", type_text)
    return max(8, int(item[1]) if item else 64)


def _merge(code: Code, found: list[CompiledAccess]) -> list[CompiledAccess]:
    """The accesses, with the loads that NVIDIA's assembler makes once for several in PTX.

    It does that where a thread loads the same elsewhere, or more around it, and nothing between the
    two may change what is there: as of a block whose rows are one. Raises CountError unless the
    machine code has as many loads less as this would leave out, or none.
    """
    again, alike, never = _repeated(code.assembly)
    every, repeats = sum(map(len, again.values())) - never, sum(map(sum, again.values()))
    made = len(re.findall(sass.LOAD, code.machine_code))
    if not made or not every:
        return found
    unknown = (
        f"{code.kernel}: of {every} loads in PTX, {alike} load the same again, and it is not "
        f"known which of them are among the {made} of the machine code"
    )
    # Each is made: once, or several times in an unrolled loop, whose number may be that by chance.
    if (not alike and made >= every) or (made == every and not _PTX_LOOP.search(code.assembly)):
        again = {where: [False] * len(flags) for where, flags in again.items()}
    elif made != every - repeats:
        raise CountError(unknown)
    instead: dict[int, CompiledAccess] = {}  # by the id of the load that each takes the place of
    for where, flags in again.items():
        loads = [access for access in found if (access.kind, access.where) == ("load", where)]
        taken = _merged(loads, flags, True) or _merged(loads, flags, False)
        if any(flags) and not taken:
            raise CountError(unknown)
        instead |= zip(map(id, loads), taken, strict=False)
    return [instead.get(id(access), access) for access in found]


def _merged(
    loads: Sequence[CompiledAccess], flags: Sequence[bool], copies: bool
) -> list[CompiledAccess]:
    """The loads of a place, of whose instructions in PTX some are left out; empty if they differ.

    flags: whether each is, in turn, and again where a loop is unrolled. copies: as of the loads.
    """
    loads = [replace(access, copies=copies) for access in loads]
    number = sum(access.instructions for access in loads)
    times = len(flags) // max(1, number)
    unrolled = times == 1 or all(access.loops for access in loads)
    if not unrolled or [*flags] != [*flags[:number]] * times:
        return []
    each, merged = iter(flags), []
    for access in loads:
        left_out = enumerate(islice(each, access.instructions))
        merged.append(replace(access, merged=frozenset(n for n, flag in left_out if flag)))
    return merged


class _Load(NamedTuple):
    """A load in PTX: the mask of its lanes, and its bytes behind the address in a register."""

    mask: str | None
    begin: int
    end: int
    order: int

    def contains(self, other: _Load, masks: bool) -> bool:
        """Whether it loads what another of its register does; of two that do, the first one.

        masks: whether they matter.
        """
        inside = self.begin <= other.begin and other.end <= self.end
        wider = self.end - self.begin > other.end - other.begin
        if masks:
            inside &= self.mask in (None, other.mask)
            wider |= self.mask != other.mask
        return inside and (wider or self.order < other.order)


def _repeated(ptx: str) -> tuple[dict[Chain, list[bool]], int, int]:
    """Of the loads of each place, in order, which load what another of the thread loads.

    And how many there would be if all masks were the same: a mask may be true of every thread. And
    how many are made by no thread, as of the end of a block that is longer than its row.
    """
    assigned = _PTX_MASK.findall(ptx)
    times = Counter(mask for mask, _ in assigned)
    masks = {mask: number for mask, number in assigned if times[mask] == 1}  # -1: of all lanes
    again: defaultdict[Chain, list[bool]] = defaultdict(list)
    sums: dict[str, tuple[str, int]] = {}  # registers that are another and a number
    # By register, and by how often what is in memory may have changed.
    known: defaultdict[tuple[str, int], list[tuple[_Load, Chain, int]]] = defaultdict(list)
    alike = never = changes = 0
    for order, (where, line) in enumerate(_placed(ptx)):
        if (found := _PTX_PLACE.search(line)) and (kind := _PTX.search(line)):
            base, begin = sums.get(found[2], (found[2], 0))
            begin += int(found[3] or 0)
            end = begin + int(kind[2] or 1) * int(kind[3]) // 8
            value = masks.get((found[1] or "").lstrip("@"))
            if value == "0":
                never += 1
            elif not re.search(_ORDERED, line):
                mask = None if value == "-1" else found[1]
                load = _Load(mask, begin, end, order)
                known[base, changes].append((load, where, len(again[where])))
            again[where].append(False)
        elif made := _PTX_SUM.match(line):
            base, begin = sums.get(made[2], (made[2], 0))
            sums[made[1]] = base, begin + int(made[3])
        elif re.search(_PTX_ORDER, line):
            changes += 1
    for loads in known.values():
        for load, where, number in loads:
            again[where][number] = any(it.contains(load, True) for it, _, _ in loads)
            alike += any(it.contains(load, False) for it, _, _ in loads)
    return again, alike, never


def delayed_loads(code: Code) -> int:
    """How many loads are made before any branch in PTX, and behind one in NVIDIA's machine code.

    The assembler moves a load to where its value is used, such as into a loop; a program that does
    not come there does not make it. Where PTX has no branch, those of the machine code only skip
    lanes that are masked out; so does one around loads that PTX masks, and that are not masked
    there. Of a loop that is unrolled, it has more loads than PTX.
    """
    machine_code = code.machine_code
    every = len(re.findall(_PTX_LOAD, code.assembly))
    left_out = max(0, every - len(re.findall(sass.LOAD, machine_code)))
    masked = len(re.findall(rf"@!?%p\d+\s+{_PTX_LOAD}", code.assembly))
    masked -= len(re.findall(rf"^@.*{sass.LOAD}", machine_code, re.MULTILINE)) + left_out
    skipped = "".join(found[3] for found in _SKIP.finditer(machine_code))
    if 0 < len(re.findall(sass.LOAD, skipped)) <= masked:
        machine_code = _SKIP.sub(r"\1\3", machine_code)
    before, *branched = re.split(_PTX_BRANCH, code.assembly, maxsplit=1, flags=re.MULTILINE)
    before_made, *_ = re.split(_SASS_BRANCH, machine_code, maxsplit=1, flags=re.MULTILINE)
    delayed = len(re.findall(_PTX_LOAD, before)) - len(re.findall(sass.LOAD, before_made))
    return max(0, delayed - left_out) if branched else 0


def describe(where: Chain) -> str:
    """A place in the source for a message: that of the innermost function."""
    return f"{where[0][0]}:{where[0][1]}" if where else "an unknown place"


def _operations(code: Code) -> Iterator[tuple[Kind, Chain, str, str, tuple[int, ...]]]:
    """Each load and store: its kind, place, text and type, and the loops that it is in."""
    locations = dict(re.findall(r"^(#loc\w*) = loc\((.*)\)$", code.ttgir, re.MULTILINE))
    loops: list[tuple[str, str, int]] = []  # indent, kind and number of each that is open
    for number, line in enumerate(code.ttgir.splitlines()):
        indent = line[: len(line) - len(line.lstrip())]
        if loops and line.startswith(f"{loops[-1][0]}}}") and " do {" not in line:
            loops.pop()
        if found := re.search(r"\bscf\.(for|while)\b", line):
            loops.append((indent, found[1], number))
        if any(kind == "while" for _, kind, _ in loops) and _POLLED.search(line):
            raise CountError(
                f"{code.kernel} waits for other programs: how often it looks is not known"
            )
        if found := _OPERATION.search(line):
            kind: Kind = "load" if found[1] == "load" else "store"
            yield kind, _chain(found[3], locations), line, found[2], tuple(it[2] for it in loops)


def _chain(text: str, locations: Mapping[str, str]) -> Chain:
    """The place that a location of MLIR stands for; empty if it is unknown."""
    text = locations.get(text, text)
    if found := re.fullmatch(r'"([^"]*)":(\d+):(\d+)(?: to .*)?', text):
        return ((os.path.basename(found[1]), int(found[2]), int(found[3])),)
    # A call, or the name of a variable.
    found = re.fullmatch(r'callsite\((\S+) at (\S+)\)|"[^"]*"\((.*)\)', text)
    parts = filter(None, found.groups()) if found else ()
    return tuple(place for part in parts for place in _chain(part, locations))


def _placed(assembly: str) -> Iterator[tuple[Chain, str]]:
    """The lines of PTX or of AMD's assembly that say no place, each with the one it comes from."""
    where: Chain = ()
    for line in assembly.splitlines():
        if comment := _COMMENT.match(line):
            places = re.findall(r"([^\s\[\]]+):(\d+):(\d+)", comment[1])
            where = tuple((name, int(row), int(column)) for name, row, column in places)
        else:
            yield where, line


def _instructions(assembly: str) -> dict[tuple[str, Chain], list[int]]:
    """The widths in bits of loads and stores, by kind and place.

    On AMD, those of the kind "scalar" load numbers that are no block, and a kernel's arguments.
    """
    found: defaultdict[tuple[str, Chain], list[int]] = defaultdict(list)
    for where, line in _placed(assembly):
        if access := _PTX.search(line):
            kind = "load" if access[1] == "ld" else "store"
            found[kind, where].append(int(access[2] or 1) * int(access[3]))
        elif access := _AMD.search(line):
            kind = "scalar" if access[1] == "s" else access[2]
            found[kind, where].append(amdgcn.bits(access[3]))
    return found
