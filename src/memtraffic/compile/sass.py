"""Reads NVIDIA's machine code (SASS) as `cuobjdump` prints it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from memtraffic.gpus import Gpu
from memtraffic.triton_adapter.compile import cuobjdump

LOAD = r"\b(?:LDG|LDGSTS)\.E((?:\.\w+)*)"  # a load from global memory and its suffixes
STORE = r"\bSTG\.E((?:\.\w+)*)"


def read(asm: Mapping[str, Any], kernel: str, gpu: Gpu) -> tuple[dict[str, int], list[str]]:
    """What a compiled kernel uses, as fields of `Resources`, and its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [cuobjdump(), "-res-usage", "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return usage(text, gpu), instructions(text)


def usage(text: str, gpu: Gpu) -> dict[str, int]:
    """What `cuobjdump -res-usage` says that a kernel uses, as fields of `Resources`."""
    counted = dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text))
    # From sm_90 on, it counts the kilobyte that the system reserves of a block that uses any.
    reserved = 1024 if int(gpu.architecture) >= 90 else 0
    return {
        "registers": int(counted["REG"]),
        "spill_bytes": int(counted["STACK"]) + int(counted["LOCAL"]),
        "static_shared_bytes": max(0, int(counted["SHARED"]) - reserved),
    }


def instructions(code: str) -> list[str]:
    """The instructions that `cuobjdump -sass` printed, without addresses and encodings.

    Without the barriers, too, that newer GPUs' lines name after the operands.
    """
    return re.findall(r"^\s+/\*\w{4,}\*/\s+(.*?)\s*(?:[&?][^;]*)?;", code, re.MULTILINE)


def bits(suffixes: str) -> int:
    """How many bits one thread moves, by the suffixes of the instruction.

    >>> bits(".128.CONSTANT"), bits(""), bits(".U16")
    (128, 32, 16)
    >>> bits(".128.SYS"), bits(".64"), bits(".S8"), bits(".ENL2.256"), bits(".LTC128B.64")
    (128, 64, 8, 256, 64)
    """
    found = re.search(r"\.[US]?(8|16|64|128|256)\b", suffixes)
    return int(found[1]) if found else 32
