"""What operations of Triton make of odd values, and what a GPU once made of them.

    python tests/compile/odd_values.py FOLDER

writes the latter, where there is a GPU, to odd_values.json. Each operation is a kernel of its own,
in a module that is written to FOLDER.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).with_name("odd_values.json")
N = 16
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
EIGHTS = ("float8_e5m2", "float8_e4m3fn")
ALL, WIDE = FLOATS + INTEGERS, FLOATS[2:]
COMPARED = tuple(f"x {it} z" for it in ("<", "<=", "==", "!=", ">="))

# By the kind of a kernel: what it does; by expression: of which dtypes.
KERNELS = {
    "each": "tl.store(y + i, {}(x))",
    "pairs": "tl.store(y + at, {}(x2, z2))",
    "rows": "tl.store(y + i, {}(rows))",
    "whole": "tl.store(y, {}(x))",
    "atomic": "tl.store(y + at, x2); tl.debug_barrier(); tl.store(old + at, {}(y + at, z2))",
}
OPERATIONS = {
    "each": {
        "-x": ALL, "~x": INTEGERS, "tl.abs(x)": ALL, "tl.where(x != 0, x, 3)": ALL,
        "tl.floor(x)": WIDE, "tl.ceil(x)": WIDE, "tl.sqrt_rn(x)": FLOATS[2:3],
        "tl.exp(x)": WIDE, "tl.log(x)": WIDE, "tl.clamp(x, -2.0, 3.0)": FLOATS[:3],
        "tl.clamp(x, -2.0, 2.0)": FLOATS[:3],
    },
    "pairs": dict.fromkeys(("x + z", "x - z", "x * z", *COMPARED), ALL) | {
        "tl.maximum(x, z)": ALL, "tl.minimum(x, z)": ALL,
        "tl.maximum(x, z, tl.PropagateNan.ALL)": FLOATS,
        "tl.minimum(x, z, tl.PropagateNan.ALL)": FLOATS,
        "x / z": ALL, "x // z": INTEGERS, "x % z": WIDE + INTEGERS,
        "x & z": INTEGERS, "x | z": INTEGERS, "x ^ z": INTEGERS,
        "x << (z & 7)": INTEGERS, "x >> (z & 7)": INTEGERS,
        "tl.umulhi(x, z)": ("int32", "uint32", "int64", "uint64"),
    },
    "rows": dict.fromkeys((
        "tl.sum(x, axis=1)", "tl.max(x, axis=1)", "tl.min(x, axis=1)", "tl.argmax(x, axis=1)",
        "tl.argmin(x, axis=1)", "tl.argmax(x, axis=1, tie_break_left=False)",
        "tl.sum(tl.cumsum(x, axis=1), axis=1)",
    ), ALL) | {
        "tl.xor_sum(x, axis=1)": INTEGERS,
        # Since Triton 3.9 those of narrower integers are wider.
        "tl.max(tl.cumprod(x, axis=1), axis=1)": (*FLOATS, "int32", "int64", "uint32", "uint64"),
    },
    "whole": dict.fromkeys(("tl.sum(x)", "tl.max(x)", "tl.min(x)", "tl.argmax(x, axis=0)"), ALL),
    "atomic": dict.fromkeys(
        (f"tl.atomic_{it}(x, z)" for it in ("add", "max", "min", "xchg", "and", "or", "xor")), ALL
    ) | {"tl.atomic_cas(x, z, z)": ALL},
}  # fmt: skip
CAST = "x.to(y.dtype.element_ty)"
HEAD = """
import triton
import triton.language as tl
"""
FUNCTION = """
@triton.jit
def {name}({parameters}):
    return {expression}


@triton.jit
def {name}_kernel(y, old, a, b, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    x = tl.load(a + i)
    x2 = tl.load(a + at // N)
    z2 = tl.load(b + at % N)
    rows = tl.load(a + (at // N + at) % N)
    {body}
"""


class Case(NamedTuple):
    """An operation on values of a dtype. regular: without infinities, NaN and huge numbers."""

    kind: str
    expression: str
    dtype: str
    result: str
    regular: bool = False

    def __str__(self) -> str:
        return f"{self.expression} {self.dtype} {self.result} {self.kind} {self.regular}"


def cases() -> list[Case]:
    found = []
    for kind, operations in OPERATIONS.items():
        for expression, names in operations.items():
            for name in names:
                integer = "arg" in expression or (expression in COMPARED and "int8")
                result = "int32" if integer is True else integer or name
                result = "float32" if expression == "x / z" and name in INTEGERS else result
                regular = {kind in ("rows", "whole") and name in FLOATS, False}
                found += [Case(kind, expression, name, result, it) for it in sorted(regular)]
    names = ALL + EIGHTS
    found += [Case("each", CAST, it, to) for it in names for to in names if it != to]
    return found


def values(name: str, regular: bool = False) -> torch.Tensor:
    """16 values of a dtype."""
    dtype = getattr(torch, name)
    if not dtype.is_floating_point:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        wide = [0, 1, 2, 3, 5, 7, 15, 16, 31, 100, most, most - 1, most // 2, least, least + 1, -1]
        size = 8 * dtype.itemsize
        wrapped = [(it + 2 ** (size - 1)) % 2**size - 2 ** (size - 1) for it in wide]
        return torch.tensor(wrapped, dtype=BITS[dtype.itemsize]).view(dtype)
    info = torch.finfo(dtype)
    tiny = info.tiny * info.eps if dtype.itemsize > 1 else info.tiny / 4
    last = float("inf") if name != EIGHTS[1] else info.max
    odd = [float("nan"), last, -last, 0.0, -0.0, tiny, info.tiny, -tiny, info.max, -info.max]
    found = torch.tensor([*odd, 1.0, -1.5, 2.5, 126.24, 0.3, 1.0625], dtype=torch.float64).to(dtype)
    return torch.where(found.isfinite() & (found.abs() < 999), found, 1) if regular else found


def load_kernels(path: Path):
    """The kernel of each kind and expression, of a module that is written to `path`."""
    text, names = HEAD, {}
    for case in cases():
        name = names.setdefault((case.kind, case.expression), f"f{len(names)}")
        if f"def {name}(" in text:
            continue
        cast = case.expression == CAST
        text += FUNCTION.format(
            name=name,
            parameters="x" if case.kind in ("each", "rows", "whole") else "x, z",
            expression="x" if cast else case.expression,
            body="tl.store(y + i, x.to(y.dtype.element_ty))" if cast
            else KERNELS[case.kind].format(name),
        )  # fmt: skip
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {key: getattr(module, f"{name}_kernel") for key, name in names.items()}


def run(case: Case, kernel, device: str) -> torch.Tensor:
    """What a case stores: a kernel's results, and for an atomic operation what was there before."""
    x = z = values(case.dtype, case.regular)
    if case.dtype in INTEGERS and ("/" in case.expression or "%" in case.expression):
        signed = x.view(BITS[x.itemsize])
        z = torch.where(signed > 0, signed, 3).view(x.dtype)
    kind = getattr(torch, case.result)
    bits = torch.zeros(2, N * N, dtype=BITS[kind.itemsize], device=device)
    y, old = bits.view(kind)
    kernel[(1,)](y, old, x.to(device), z.to(device), N, num_warps=1)
    used = {"each": N, "rows": N, "whole": 1}.get(case.kind, N * N)
    return bits[: 1 + (case.kind == "atomic"), :used].cpu().view(kind)


def read() -> dict[str, bytes]:
    """By case: the bits that a GPU stored; but for what does not compile."""
    stored = json.loads(TABLE.read_text("utf-8"))
    return {case: zlib.decompress(base64.b64decode(text)) for case, text in stored.items()}


def record(part: list[Case]) -> dict[str, str]:
    kernels, found = load_kernels(Path(f"{sys.argv[1]}/odd_{os.getpid()}.py")), {}
    for case in part:
        try:
            bits = run(case, kernels[case.kind, case.expression], "cuda")
        except Exception as error:
            print(case, type(error).__name__, *str(error).splitlines()[-1:])
        else:
            octets = bits.contiguous().view(torch.uint8).numpy().tobytes()
            found[str(case)] = base64.b64encode(zlib.compress(octets, 9)).decode()
    return found


if __name__ == "__main__":
    parts = [cases()[i::8] for i in range(8)]
    with ProcessPoolExecutor(8, get_context("spawn")) as pool:
        found = {case: text for part in pool.map(record, parts) for case, text in part.items()}
    in_order = {str(case): found[str(case)] for case in cases() if str(case) in found}
    TABLE.write_text(json.dumps(in_order, indent=0) + "\n", "utf-8")
