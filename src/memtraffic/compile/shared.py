"""The bank conflicts of a compiled kernel's accesses to shared memory, from its PTX.

Where an access lies hangs on the thread's number alone, unless it moves in a loop; so each of them
is computed for all threads of a program at once. Shared memory has 32 banks of 4 bytes. A warp's
access takes a pass for each further word that its lanes want of the same bank: a conflict. Where a
lane moves 8 or 16 bytes, half or a quarter of the warp takes turns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
BANKS, WARP = 32, 32
_STEP = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z]\w*(?:[.:]+\w+)*)\s+(.*);$")
_OPERAND = re.compile(r"%[\w.]+|-?0x[0-9a-fA-F]+|-?\d+\b|[\w$]+")
_OPERATIONS: dict[str, Callable[..., Array]] = {
    "mov": lambda x: x, "cvt": lambda x: x, "not": np.invert, "neg": np.negative,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda x, y, z: x * y + z,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift, "min": np.minimum, "max": np.maximum,
    "bfe": lambda x, start, size: x >> start & (1 << size) - 1,
    "selp": lambda x, y, choice: np.asarray(np.where(choice != 0, x, y)),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less,
}  # fmt: skip
_SHARED = re.compile(r"(?:ld|st|ldmatrix|stmatrix)\.(?:.*\.)?shared\b")
_WHOLE = re.compile(r"[usb]\d+|pred")


def bank_conflicts(ptx: str, warps: int) -> int | None:
    """The conflicts of a program; None if some are not known, or in a loop or a branch."""
    code = re.sub(r"//.*", "", ptx[ptx.index(".entry") :]).split("{", 1)[1]
    lines = [line.strip() for line in code.splitlines()]
    once = _made_once(lines)
    steps = [(i, found) for i, line in enumerate(lines) if (found := _STEP.match(line))]
    shared = [(i, step) for i, step in steps if _SHARED.match(step[3])]
    writes = [step for _, step in steps if not step[3].startswith(("st", "bra", "bar", "red"))]
    values: dict[str, Array] = {"%tid.x": np.arange(WARP * warps)}

    def value(operand: str) -> Array | None:
        if operand.startswith("%"):
            return values.get(operand)
        if not re.fullmatch(r"-?(?:0x\w+|\d+)", operand):  # a float, or where shared memory begins
            return None if operand[:2] in ("0f", "0d") else np.zeros(WARP * warps, dtype=np.int64)
        number = int(operand, 0)
        return np.full(WARP * warps, number) if abs(number) < 2**62 else None

    known = 0
    while known < len(values):  # a register that is written twice may hold the same both times
        known, made = len(values), defaultdict[str, list[Any]](list)
        for step in writes:
            target, *operands = _OPERAND.findall(step[4]) or [""]
            taken = [it for operand in operands if (it := value(operand)) is not None]
            usable = len(taken) == len(operands) and not step[2]
            made[target].append(_computed(step[3], taken) if usable else None)
        for target, (first, *others) in made.items():
            if first is not None and all(np.array_equal(first, it) for it in others):
                values[target] = first
    total = 0
    for i, step in shared:
        conflicts = _conflicts(step, value)
        if conflicts is None or (conflicts and i not in once):
            return None
        total += conflicts
    return total


def _made_once(lines: list[str]) -> set[int]:
    """The numbers of the lines that are in no loop, and that no branch leaves out."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    left = set(range(len(lines)))
    for i, line in enumerate(lines):
        if (jump := re.search(r"\bbra(?:\.uni)?\s+(\S+);", line)) and jump[1] in labels:
            left -= set(range(*sorted((i, labels[jump[1]]))))
    return left


def _computed(operation: str, values: list[Array]) -> Array | None:
    """What an instruction makes of whole numbers; None of anything else."""
    name, *suffixes = re.split(r"[.:]+", operation)
    kinds = suffixes[-2 if name == "cvt" else -1 :]
    if not kinds or not all(map(_WHOLE.fullmatch, kinds)) or "hi" in suffixes:
        return None
    name = suffixes[0] if name == "setp" else name
    takes = {"mov": 1, "cvt": 1, "not": 1, "neg": 1, "mad": 3, "bfe": 3, "selp": 3}.get(name, 2)
    if name not in _OPERATIONS or len(values) != takes:
        return None
    bits = 1 if kinds[0] == "pred" else int(kinds[0][1:]) * (2 if "wide" in suffixes else 1)
    result = _OPERATIONS[name](*values)
    return result & (1 << bits) - 1 if bits < 63 else result


def _conflicts(step: re.Match[str], value: Callable[[str], Array | None]) -> int | None:
    """The conflicts of an access of all warps; None if its addresses are not known."""
    inside = re.search(r"\[(.*?)\]", step[4])
    assert inside is not None
    base, *offset = _OPERAND.findall(inside[1])
    address, guard = value(base), value(step[2]) if step[2] else np.ones(1)
    if address is None or guard is None or (offset and offset[0][0] == "%"):
        return None
    address = address + (int(offset[0]) if offset else 0)
    active: Array = np.broadcast_to((guard != 0) ^ bool(step[1]), address.shape)
    vector, kind = re.search(r"\.v(\d)", step[3]), re.search(r"(\d+)$", step[3])
    assert kind is not None
    words = max(1, int(vector[1] if vector else 1) * int(kind[1]) // 32)
    if "matrix" in step[3]:  # the lanes say where rows of 16 bytes are, eight for each matrix
        words, count = 4, re.search(r"\.x(\d)", step[3])
        rows = 8 * int(count[1] if count else 1)
        active = active & (np.arange(len(address)) % WARP < rows)
    phases = (address // 4).reshape(-1, WARP // words), active.reshape(-1, WARP // words)
    return sum(_passes(*phase, words) for phase in zip(*phases, strict=True))


def _passes(word: Array, active: Array, words: int) -> int:
    """The passes after the first that some lanes need, each of which wants so many words."""
    wanted = np.unique(word[active][:, None] + np.arange(words))
    return int(np.bincount(wanted % BANKS).max()) - 1 if len(wanted) else 0
