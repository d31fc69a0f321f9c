"""Runs the PTX of a kernel thread by thread, as far as its addresses and masks need it.

All threads of a program run side by side, as arrays. A value that a floating-point operation, a
shuffle or shared memory has made is not known, and no branch, mask or address may depend on it.
"""

import ctypes
import re

import numpy as np

WARP, SECTOR = 32, 32
INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z]\w*(?:[.:]\w+)*)\s*(.*)$")
OPERAND = re.compile(r"%[\w.]+|-?0x[0-9a-fA-F]+|-?\d+|\$?\w+")
COMPARE = {
    "lt": np.less, "gt": np.greater, "eq": np.equal, "ne": np.not_equal,
    "le": np.less_equal, "ge": np.greater_equal,
}  # fmt: skip
BINARY = {
    "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift, "sub": np.subtract,
}  # fmt: skip


def width(kind):
    """The bits of a type such as `u32`."""
    return 1 if kind == "pred" else int(re.sub(r"\D", "", kind) or 0)


class Threads:
    """The threads of one program, and what they did to global memory: `accesses`.

    ptx: of one kernel. arguments: numbers and addresses, in the kernel's order. program, grid:
    three numbers each. threads: of a program. An access is a kind, the addresses, the bits that
    each thread moves, and which threads take part.
    """

    def __init__(self, ptx, arguments, program, grid, threads):
        body = re.sub(r"//.*", "", ptx[ptx.index(".entry") :])
        head, code = body.split("{", 1)
        names = re.findall(r"\.param [^\n]*?(\w+),?\n", head + "\n")
        self.memory = dict(zip(names, [*arguments, 0, 0, 0], strict=False))
        self.lines = [line.strip() for line in code.replace("{\n", "\n").splitlines()]
        self.labels = {line[:-1]: at for at, line in enumerate(self.lines) if line.endswith(":")}
        self.threads, self.accesses = threads, []
        self.registers = {"%tid.x": np.arange(threads, dtype=np.uint64)}
        for axis, number, size in zip("xyz", program, grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(threads, number, dtype=np.uint64)
            self.registers[f"%nctaid.{axis}"] = np.full(threads, size, dtype=np.uint64)
        at = 0
        while self.lines[at] != "ret;":
            target = self.step(self.lines[at])
            at = self.labels[target] if target else at + 1

    def get(self, operand, kind):
        """The values of an operand, read as numbers of a type; None if they are not known."""
        if operand == "global_smem":  # where shared memory begins
            return None
        if not operand.startswith("%"):
            return np.full(self.threads, int(operand, 0), dtype=np.int64)
        value = self.registers.get(operand)  # none of what instructions make that are not known
        if value is None:
            return None
        value, bits = value.astype(np.int64), width(kind)
        if bits < 64:
            value &= (1 << bits) - 1
            if kind[0] == "s":
                value -= (value >> (bits - 1)) << bits
        return value

    def put(self, register, value, bits):
        if value is not None:
            value = value.astype(np.uint64)
            if bits < 64:
                value &= np.uint64((1 << bits) - 1)
        self.registers[register] = value

    def step(self, text):
        """Makes one step; returns the label to go to, if it is a jump."""
        found = INSTRUCTION.match(text)
        if not found or text.endswith(":"):
            return None
        active = np.ones(self.threads, dtype=bool)
        if found[2]:
            mask = self.get(found[2], "pred")
            active = None if mask is None else mask.astype(bool) ^ bool(found[1])
        name, *suffixes = re.split(r"[.:]+", found[3])
        operands = OPERAND.findall(found[4])
        if name == "bra":
            assert active is not None and len(set(active.tolist())) == 1, text
            return operands[0] if active[0] else None
        if name in ("ld", "st") and "global" in suffixes:
            self.access(name, suffixes, operands, active)
        elif name == "cp" and "global" in suffixes:  # of so many bytes, or of none
            _, _, base, offset, size, copied = operands
            at, taking_part = self.get(base, "b64") + int(offset), self.get(copied, "b32") > 0
            self.accesses.append(("ld", at, 8 * int(size, 0), active & taking_part))
        elif name in ("ld", "ldmatrix") and "shared" in suffixes:
            for register in operands[: int((re.search(r"[vx](\d)\b", found[3]) or [1, 1])[1])]:
                self.put(register, None, 0)
        elif name in ("ld", "mov") and "param" in suffixes:
            value = np.full(self.threads, self.memory[operands[1]])
            self.put(operands[0], value, width(suffixes[-1]))
        elif operands and operands[0].startswith("%") and name != "st":
            self.compute(name, suffixes, operands, active)
        return None

    def access(self, name, suffixes, operands, active):
        size = re.search(r"v(\d)", ".".join(suffixes))
        count, bits = int(size[1]) if size else 1, width(suffixes[-1])
        registers = operands[:count] if name == "ld" else operands[-count:]
        base, *offset = operands[count:] if name == "ld" else operands[:-count]
        addresses = self.get(base, "b64") + (int(offset[0]) if offset else 0)
        self.accesses.append((name, addresses, count * bits, active))
        for i, register in enumerate(registers if name == "ld" else ()):
            value = np.zeros(self.threads, dtype=np.uint64)
            for thread in np.flatnonzero(active):
                at = int(addresses[thread]) + i * bits // 8
                value[thread] = int.from_bytes(ctypes.string_at(at, bits // 8), "little")
            self.put(register, value, bits)

    def compute(self, name, suffixes, operands, active):
        """Arithmetic with whole numbers; what anything else makes is not known."""
        kind, target, sources = suffixes[-1] if suffixes else "", operands[0], operands[1:]
        if name == "setp":
            kind, sources = suffixes[-1], sources[:2]
        known = kind[:1] in ("u", "s", "b", "p") and all(
            source.startswith(("%", "-", "0x", "global_smem")) or source.isdigit()
            for source in sources
        )
        values = [self.get(source, kind) for source in sources] if known else [None]
        bits, value = width(kind), None
        if all(each is not None for each in values) and known:
            if name == "mov":
                value = values[0] if len(values) == 1 else None  # packed ones
            elif name == "cvt" and suffixes[-2][0] in "usb":
                [value], bits = values, width(suffixes[-2])
            elif name == "setp":
                value, bits = COMPARE[suffixes[0]](*values), 1
            elif name == "selp":
                value = np.where(values[2], *values[:2])
            elif name == "not":
                value = ~values[0]
            elif name == "bfe":
                value = values[0] >> values[1] & (1 << values[2]) - 1
            elif name in ("mul", "mad") and "hi" not in suffixes:
                bits *= 2 if "wide" in suffixes else 1
                value = values[0] * values[1]
                if name == "mad":
                    value = value + self.get(sources[2], f"b{bits}")
            elif name in BINARY and len(values) == 2:
                value = BINARY[name](*values)
        everywhere = active is not None and active.all()
        self.put(target, value if everywhere else None, bits)


def totals(accesses, sector=SECTOR):
    """Requests and sectors of loads and of stores, warp by warp and lane by lane."""
    found = dict.fromkeys(("load_requests", "load_sectors", "store_requests", "store_sectors"), 0)
    for name, addresses, bits, active in accesses:
        kind = "load" if name == "ld" else "store"
        for warp in range(0, len(addresses), WARP):
            touched = set()
            for thread in range(warp, warp + WARP):
                if active[thread]:
                    first, end = int(addresses[thread]), int(addresses[thread]) + bits // 8
                    touched |= {at // sector for at in range(first, end)}
            found[f"{kind}_requests"] += bool(touched)
            found[f"{kind}_sectors"] += len(touched)
    return found
