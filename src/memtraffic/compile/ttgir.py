"""Reads Triton's GPU dialect (TTGIR), the last form of a kernel in which blocks are still whole."""

from __future__ import annotations

import re

from memtraffic.residency import BlockedLayout


def first_load_layout(ttgir: str) -> BlockedLayout | None:
    """The layout of the first load of a block; None without one, or if it is no blocked layout."""
    load = re.search(
        r"(?:tt\.load|async_copy_global_to_local|buffer_load) .*?tensor<[^#\n]*?(#\w+)>", ttgir
    )
    name = re.escape(load[1]) if load else ""
    found = load and re.search(rf"^{name} = #ttg\.blocked<\{{(.*?)\}}>", ttgir, re.MULTILINE)
    if not found:
        return None
    sizes = {
        key: tuple(map(int, values.split(",")))
        for key, values in re.findall(r"(\w+) = \[([\d, ]+)\]", found[1])
    }
    return BlockedLayout(sizes["sizePerThread"], sizes["threadsPerWarp"], sizes["warpsPerCTA"])


_STEPS = {
    r"(?:tt\.|buffer_)load ": "load",
    r"ttg\.async_copy_global_to_local ": "copy",
    r"ttg\.async_wait .*?num = (\d+)": "wait",
    r'"tt\.reduce"': "reduce",
    r"math\.exp2? ": "exp",
    r"(?:tt\.|buffer_)store ": "store",
}


def schedule(ttgir: str) -> tuple[str, ...]:
    """A kernel's steps on blocks in the order of the text; those on single numbers are left out.

    A step is "load", "copy" (an asynchronous one), "wait 2" (until two copies are still in flight),
    "reduce", "exp", "store", or "for" and "end" around the steps of a loop.
    """
    steps, loops = [], []
    for line in ttgir.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if "scf.for " in line:
            steps.append("for")
            loops.append(indent)
        elif loops and line.startswith(loops[-1] + "}"):
            steps.append("end")
            loops.pop()
        for pattern, step in _STEPS.items():
            found = re.search(pattern, line)
            if found and step == "wait":
                steps.append(f"wait {found[1]}")
            elif found and (step == "reduce" or "tensor<" in line):
                steps.append(step)
    return tuple(steps)
