"""Reads AMD's assembly as LLVM writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memtraffic.gpus import Gpu
from memtraffic.residency.amd import usage

LOAD = r"\b(?:global|buffer|flat)_load_(\w+)"  # a load from global memory, by the end of its name
STORE = r"\b(?:global|buffer|flat)_store_(\w+)"


def read(asm: Mapping[str, Any], kernel: str, gpu: Gpu) -> tuple[dict[str, int], list[str]]:
    """What a compiled kernel uses, as fields of `Resources`, and its instructions."""
    return usage(asm["amdgcn"]), instructions(asm["amdgcn"], kernel)


def instructions(assembly: str, kernel: str) -> list[str]:
    """The instructions of a kernel, without comments, labels and directives."""
    code = assembly.split(f"\n{kernel}:")[1].split(".Lfunc_end")[0]
    return re.findall(r"^\t([a-z].*?)(?:\s*;.*)?$", code, re.MULTILINE)


def bits(suffix: str) -> int:
    """How many bits one lane moves, by the end of the instruction's name.

    >>> bits("dwordx4"), bits("dword"), bits("ushort"), bits("d16_hi_b16"), bits("b128")
    (128, 32, 16, 16, 128)
    >>> bits("lds_dwordx4"), bits("short_d16_hi"), bits("ubyte"), bits("b96"), bits("u8")
    (128, 16, 8, 96, 8)
    """
    if found := re.search(r"dwordx(\d)", suffix):
        return 32 * int(found[1])
    if found := re.search(r"(?:^|_)[biu](8|16|32|64|96|128)(?:_|$)", suffix):
        return int(found[1])
    if "byte" in suffix:
        return 8
    return 16 if "short" in suffix else 32
