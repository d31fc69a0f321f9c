"""Reads Triton's GPU dialect (TTGIR), the last form of a kernel in which blocks are still whole."""

from __future__ import annotations

import re

from memtraffic.residency import BlockedLayout


def first_load_layout(ttgir: str) -> BlockedLayout | None:
    """The layout of the first load of a block; None without one, or if it is no blocked layout."""
    load = re.search(
        r"(?:tt\.load|async_copy_global_to_local|buffer_load) .*?tensor<[^#\n]*?(#\w+)>", ttgir
    )
    found = load and re.search(rf"^{load[1]} = #ttg\.blocked<\{{(.*?)\}}>", ttgir, re.MULTILINE)
    if not found:
        return None
    sizes = dict(re.findall(r"(\w+) = \[([\d, ]+)\]", found[1]))
    names = "sizePerThread", "threadsPerWarp", "warpsPerCTA"
    return BlockedLayout(*(tuple(map(int, sizes[name].split(","))) for name in names))


_STEPS = {
    r"scf\.for ": "for",
    r"(?:tt\.|buffer_)load .*tensor<": "load",
    r"ttg\.async_copy_global_to_local .*tensor<": "copy",
    r"ttg\.async_wait .*?num = (\d+)": "wait {}",
    r'"tt\.reduce"': "reduce",
    r"math\.exp2? .*tensor<": "exp",
    r"(?:tt\.|buffer_)store .*tensor<": "store",
}


def schedule(ttgir: str) -> tuple[str, ...]:
    """A kernel's steps on blocks in the order of the text; those on single numbers are left out.

    A step is "load", "copy" (an asynchronous one), "wait 2" (until two copies are still in flight),
    "reduce", "exp", "store", or "for" and "end" around the steps of a loop.
    """
    steps: list[str] = []
    loops: list[str] = []  # the indent of each that is open
    for line in ttgir.splitlines():
        if loops and line.startswith(loops[-1] + "}"):
            steps.append("end")
            loops.pop()
        for pattern, step in _STEPS.items():
            if found := re.search(pattern, line):
                steps.append(step.format(*found.groups()))
                if step == "for":
                    loops.append(line[: len(line) - len(line.lstrip())])
    return tuple(steps)
