"""The loads and stores of a compiled kernel: how each is spread over threads, and how wide it is.

A block's layout stands in Triton's GPU dialect (TTGIR), the width of the instructions in PTX or in
AMD's assembly. All say which line and column of the source an operation comes from.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from memtraffic.compile import amdgcn, sass
from memtraffic.compile.layouts import Layout, read_layouts
from memtraffic.errors import CountError
from memtraffic.residency.resources import Resources

# Each a file's name, a line and a column: the innermost place, then where each function is called.
Chain: TypeAlias = tuple[tuple[str, int, int], ...]
Kind: TypeAlias = Literal["load", "store"]


class Code(NamedTuple):
    """What the compiler wrote of one kernel, and what that uses.

    assembly: PTX, or that of AMD. machine_code: its instructions, one a line.
    """

    resources: Resources
    ttgir: str
    assembly: str
    machine_code: str


@dataclass(frozen=True)
class CompiledAccess:
    """One load or store of a kernel, as it is compiled.

    where: its place in the source. layout: of its block; None for a single number. bits: what an
    instruction moves for each lane. in_loop: whether it is in a loop of the compiled kernel.
    type: of its pointers, as the compiler writes it. copies: whether it is a load by cp.async.
    """

    kind: Kind
    where: Chain
    layout: Layout | None
    bits: int
    in_loop: bool
    type: str = ""
    copies: bool = False


_REFUSED = {
    "buffer_load_to_local": "copies asynchronously, as in a pipelined loop: num_stages=1 makes "
    "ordinary loads",
    r"tt\.descriptor_|ttng\.async_tma|tensormap": "copies by descriptor (TMA)",
    r"ttg\.warp_specialize": "gives warps different tasks",
    r"tt\.func private .*(?:\n(?!  }).*)*\b(?:tt\.(?:load|store|atomic)|buffer_)": "accesses "
    "memory in a function that is not inlined",
    r'"ttg\.num-ctas" = (?!1 )': "spreads a program over several thread blocks",
}
_OPERATION = re.compile(
    r"\b(?:tt\.|\w+\.buffer_)(load|store) .* : (?:!tt\.ptr<\w+> -> )?(\S.*?) loc\((.*)\)$"
    r"|\bttg\.(async_copy)_global_to_local .* : (tensor<\S.*?>) -> .* loc\((.*)\)$"
)
_POLLED = re.compile(r"tt\.atomic_|isVolatile = true")
_PTX = re.compile(
    r"\b(ld|st)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*?(?:\.v(\d))?\.[a-z]+(\d+)\s"
    r"[^\[]*\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\d+))?"
)
_PTX_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global(?:\.\w+)*\s.*?,\s*\[\s*([^\s+\]]+)\s*"
    r"(?:\+\s*(-?\d+))?\s*\],\s*(\w+)"
)
_PTX_LOAD = r"\bld\.(?:[\w:]+\.)*?global|\bcp\.async\.c[ag]\.shared\.global"
_PTX_BRANCH = r"^\s*@!?%p\d+\s+bra|^\$L__BB\w+:"
_PTX_LOOP = re.compile(r"^(\$L__BB\w+):.*\bbra(?:\.uni)?\s+\1;", re.MULTILINE | re.DOTALL)
_PTX_SUM = re.compile(r"^\s*add\.s64\s+(%rd\d+), (%rd\d+), (-?\d+);")
_SASS_BRANCH = r"^@!?U?P\w+\s+(?:BRA|EXIT|RET)\b"
_AMD = re.compile(r"\b(global|buffer|flat|s)_(load|store)_(\w+)")
_INLINE = re.compile(r"(// begin inline asm|;#ASMSTART)|// end inline asm|;#ASMEND")
_CALL = re.compile(r"\binlined_at (\d+) (\d+) (\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+) "(?:[^"]*/)?([^"/]+)"', re.MULTILINE)
_COMMENT = re.compile(r"^\s*\.loc\s.*(?://|;)\s*(\S.*)$")


def read_accesses(code: Code) -> list[CompiledAccess]:
    """The loads and stores of a compiled kernel, in the order of its text.

    Raises CountError for a kernel that reaches memory in a way that is not counted here, and
    CompileError for a layout that is not known.
    """
    used = code.resources
    for pattern, what in _REFUSED.items():
        if re.search(pattern, code.ttgir):
            raise CountError(f"{used.kernel} {what}; sectors counts loads, stores and cp.async")
    operations = list(_operations(code))
    layouts = read_layouts(code.ttgir, [type_text for _, _, _, type_text, _ in operations])
    widths: defaultdict[tuple[str, Chain], list[int]] = defaultdict(list)
    # Since Triton 3.8, PTX says where a function is called, and not where that place's function is.
    depth = 2 if _CALL.search(code.assembly) else None
    loaded: list[tuple[str, int, int]] = []  # of each load, the register and the bytes behind it
    for made, where, width, base, begin in _instructions(code.assembly):
        widths[made, where].append(width)
        if made == "load" and base:
            loaded.append((base, begin, begin + width // 8))
    found = []
    for (kind, where, text, type_text, in_loop), layout in zip(operations, layouts, strict=True):
        bits = widths.get((kind, where[:depth])) or widths.get(("scalar", where))
        if not bits:
            raise CountError(f"{used.kernel}: no instruction is marked as that of {text.strip()}")
        if len({*bits}) > 1:
            raise CountError(f"{used.kernel}: the {kind}s of {describe(where)} differ in width")
        copies = "async_copy" in text
        found.append(CompiledAccess(kind, where, layout, bits[0], in_loop, type_text, copies))
    known = {(access.kind, access.where[:depth]) for access in found}
    if unknown := {it for it in widths if it[0] != "scalar"} - known:
        _, where = min(unknown)
        raise CountError(f"{used.kernel}: {describe(where)} is no tl.load or tl.store")
    for name, there in (("load", used.load_bits), ("store", used.store_bits)):
        written = {access.bits for access in found if access.kind == name}
        if not {*there} <= {max(bits, 8) for bits in written}:
            raise CountError(
                f"{used.kernel}: its {name}s have {sorted(written)} bits in PTX and "
                f"{[*there]} in the machine code"
            )
    pairs = itertools.pairwise(sorted(loaded))
    _check_made(code, sum(it == base and at < end for (it, _, end), (base, at, _) in pairs))
    return found


def _check_made(code: Code, again: int) -> None:
    """Raises CountError unless it is known that each load in PTX is made as it stands there.

    NVIDIA's assembler leaves out a load whose value nobody needs, and that of bytes which another
    one loads. If it unrolls a loop, the number of its loads does not tell. again: loads in PTX of
    the latter kind.
    """
    every = len(re.findall(_PTX_LOAD, code.assembly))
    made = sum(code.resources.load_bits.values())
    unrolled = made > every or _PTX_LOOP.search(code.assembly)
    if made < every or (again and unrolled):
        raise CountError(
            f"{code.resources.kernel}: of {every} loads in PTX, {again} load the same again, and "
            f"it is not known which of them are among the {made} of the machine code"
        )


def delayed_loads(code: Code) -> int:
    """How many loads are made before any branch in PTX, and behind one in NVIDIA's machine code.

    The assembler moves a load to where its value is used, such as into a loop; a program that does
    not come there does not make it.
    """
    before, *branched = re.split(_PTX_BRANCH, code.assembly, maxsplit=1, flags=re.MULTILINE)
    made, *_ = re.split(_SASS_BRANCH, code.machine_code, maxsplit=1, flags=re.MULTILINE)
    delayed = len(re.findall(_PTX_LOAD, before)) - len(re.findall(sass.LOAD, made))
    return max(0, delayed) if branched else 0


def describe(where: Chain) -> str:
    """A place in the source for a message: that of the innermost function."""
    return f"{where[0][0]}:{where[0][1]}" if where else "an unknown place"


def _operations(code: Code) -> Iterator[tuple[Kind, Chain, str, str, bool]]:
    """Each load and store: its kind, place, text and type, and whether it is in a loop."""
    locations = dict(re.findall(r"^(#loc\w*) = loc\((.*)\)$", code.ttgir, re.MULTILINE))
    loops: list[tuple[str, str]] = []  # indent and kind of each that is open
    for line in code.ttgir.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if loops and line.startswith(f"{loops[-1][0]}}}") and " do {" not in line:
            loops.pop()
        if found := re.search(r"\bscf\.(for|while)\b", line):
            loops.append((indent, found[1]))
        if any(kind == "while" for _, kind in loops) and _POLLED.search(line):
            raise CountError(
                f"{code.resources.kernel} waits for other programs: how often it looks is not known"
            )
        if found := _OPERATION.search(line):
            name, type_text, place = filter(None, found.groups())
            kind: Kind = "store" if name == "store" else "load"
            yield kind, _chain(place, locations), line, type_text, bool(loops)


def _chain(text: str, locations: Mapping[str, str]) -> Chain:
    """The place that a location of MLIR stands for; empty if it is unknown."""
    text = locations.get(text, text)
    if found := re.fullmatch(r'"([^"]*)":(\d+):(\d+)(?: to .*)?', text):
        return ((os.path.basename(found[1]), int(found[2]), int(found[3])),)
    # A call, or the name of a variable.
    found = re.fullmatch(r'callsite\((\S+) at (\S+)\)|"[^"]*"\((.*)\)', text)
    parts = filter(None, found.groups()) if found else ()
    return tuple(place for part in parts for place in _chain(part, locations))


def _instructions(assembly: str) -> Iterator[tuple[str, Chain, int, str, int]]:
    """The kind, place and width in bits of loads and stores; in PTX, from what register, and where.

    On AMD, those of the kind "scalar" load numbers that are no block, and a kernel's arguments.
    """
    where: Chain = ()
    sums: dict[str, tuple[str, int]] = {}  # registers that are another and a number
    files = dict(_FILE.findall(assembly))
    inline = False  # assembly, whose lines LLVM may number as if they were the source's next ones
    for line in assembly.splitlines():
        if edge := _INLINE.search(line):
            inline = edge[1] is not None
        elif inline and _COMMENT.match(line):
            continue
        elif comment := _COMMENT.match(line):
            places = re.findall(r"([^\s\[\]]+):(\d+):(\d+)", comment[1])
            if call := _CALL.search(line):
                places.append((files[call[1]], call[2], call[3]))
            where = tuple((name, int(row), int(column)) for name, row, column in places)
        elif made := _PTX_SUM.match(line):
            base, begin = sums.get(made[2], (made[2], 0))
            sums[made[1]] = base, begin + int(made[3])
        elif access := _PTX.search(line):
            kind, bits = "load" if access[1] == "ld" else "store", int(access[3])
            base, begin = sums.get(access[4], (access[4], 0))
            yield kind, where, int(access[2] or 1) * bits, base, begin + int(access[5] or 0)
        elif copy := _PTX_COPY.search(line):
            base, begin = sums.get(copy[1], (copy[1], 0))
            yield "load", where, 8 * int(copy[3], 0), base, begin + int(copy[2] or 0)
        elif access := _AMD.search(line):
            kind = "scalar" if access[1] == "s" else access[2]
            yield kind, where, amdgcn.bits(access[3]), "", 0
