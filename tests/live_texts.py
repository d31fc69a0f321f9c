"""The code that live kernels are tried with: of pages, of solutions, and wrong on purpose."""

import ast
import re
import sys
from pathlib import Path

import live
import notebooks
import numpy as np
from notebooks import BOOK

from memtraffic.kernels import chunking
from memtraffic.kernels.softmax import fused, masked, naive, online, persistent, tiled
from memtraffic_book import exhibits
from memtraffic_book.text import source

# CPython as a host: functions that behave as those of JavaScript do.
quiet = np.errstate(all="ignore")
for name in live.HOSTED:
    of = getattr(np, name, np.float32)
    live.MATH[name] = quiet(lambda x, of=of: float(of(np.float64(x))))
live.MODULES = sys.modules
live.FRAME["get"] = sys._getframe

HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n"
# What the launchers of the rungs import, as far as a run needs it.
STAND_INS = """
import torch, triton

MAX_COLS, MAX_ROW, INTERPRETED_PROGRAMS = 32768, 2**24, 4
class Gpu:
    __enter__ = lambda self: self
    __exit__ = lambda self, *error: False
    rows = num_warps = 1
def Launch(kernel, grid, args, constants, **options):
    return lambda y, x: kernel[grid](y, *args[1:3], x, *args[4:], **constants, **options)
def common_divisor(x, y):
    divisor = 16 // x.element_size()
    while any(n % divisor for n in (x.shape[1], x.stride(0))):
        divisor //= 2
    return divisor
def tile_shape(n_cols, itemsize, gpu, rows=None, num_warps=None):
    tile, block = Gpu(), triton.next_power_of_2(n_cols)
    tile.block, tile.rows = block, rows or max(1, 2048 // (block * itemsize))
    return tile
pass_tile = lambda n, itemsize, gpu: tile_shape(min(n, 16384 // itemsize), itemsize, gpu, rows=1)
planning_gpu, device_guard, runs_on_gpu = (lambda x: Gpu()), (lambda x: Gpu()), lambda: False
check_operands, cached = (lambda rung, x, most: torch.empty_like(x)), lambda plan: plan
num_warps_of_row = choose_num_stages = lambda *sizes: 4
"""
MODULES = {"stand_ins": STAND_INS, "chunking": Path(chunking.__file__).read_text("utf-8")}
TAKEN = HEAD + "from torch import Tensor\nfrom stand_ins import *\nfrom chunking import widen\n\n"
LAUNCHER = "\n\ndef launched(x):\n    y = torch.empty_like(x)\n    {}\n    return y\n"
# What a function of a page takes, where that is not one matrix.
INPUTS = {"persistent answer_3": "M,N N", "your-kernel answer_2": "M,N M,N N"}
INPUTS |= dict.fromkeys(["your-kernel answer_3", "your-kernel cross_entropy"], "M,N M:int64<N")
INPUTS |= {"your-kernel": "M,N N", "backward": "M,N M,N"}
# These need several GPUs, numbers that tell where to read, or programs that wait for one another.
OTHERS = "long-rows shared, long-rows answer_3, many-gpus ours, ship answer_2, "
OTHERS += "in-flight answer_3, chunks in_chunks"


def functions_of(page):
    """The source of each function of a page's cells, by name."""
    found = {}
    for cell in notebooks.code_cells(notebooks.load(BOOK / f"{page}.ipynb")):
        code = re.sub(r"^[%!].*", "", cell.source, flags=re.M)
        for node in ast.parse(code).body:
            if isinstance(node, ast.FunctionDef) and not re.search(
                "library|registered|test_", code
            ):
                first = (node.decorator_list or [node])[0].lineno - 1
                found[node.name] = "\n".join(code.splitlines()[first : node.end_lineno])
    return found


def texts_of(page):
    """(page and function, text) of each function of a page, or of a solution, with a kernel."""
    own = functions_of(page)
    text = HEAD + "\n\n\n".join(own.values()) + "\n\n\n"
    yield from ((f"{page} {name}", text) for name in own if "[(" in own[name])
    questions = notebooks.exercises(notebooks.markdown(notebooks.load(BOOK / f"{page}.ipynb")))
    for number, question in questions:
        solution = notebooks.solution(question)
        if "@triton.jit" in solution or (page == "naive" and "def " in solution):
            yield f"{page} answer_{number}", text + solution


ROW = "[(x.shape[0],)](y, x, x.stride(0), "
BLOCK = "BLOCK=triton.next_power_of_2(x.shape[1]))"
FUSED = HEAD + functions_of("fused")["softmax_rows"]
FUSED += LAUNCHER.format(f"softmax_rows{ROW}BLOCK=x.shape[1])")
MASKED = HEAD + functions_of("masked")["masked_rows"]
MASKED += LAUNCHER.format(f"masked_rows{ROW}x.shape[1], {BLOCK}")
NAIVE = TAKEN + source(naive.softmax)
PAGES = {"fused softmax_rows": FUSED, "masked masked_rows": MASKED}
for path in sorted(BOOK.glob("*.ipynb")):
    PAGES |= {name: text for name, text in texts_of(path.stem) if name not in OTHERS}
OPTIONS = {}  # of a run of each
for name, text in PAGES.items():
    page, function = name.split()
    OPTIONS[name] = {"function": "launched" if "def launched" in text else function}
    OPTIONS[name] |= {"inputs": INPUTS.get(name, INPUTS.get(page, ""))}
# Functions of the library, with the text that a page shows.
PARTS = [
    [naive.softmax], [fused._softmax_fused_kernel, fused.softmax],
    [masked._softmax_masked_kernel, masked.softmax],
    [tiled._softmax_tile, tiled._softmax_tiled_kernel, tiled.softmax],
    [tiled._softmax_tile, persistent._softmax_persistent_kernel, persistent.plan,
     persistent.softmax],
    [online._load, online.online_kernel, online.softmax],
    [exhibits._no_other_kernel, exhibits.softmax_no_other],
    [exhibits._no_other_kernel, exhibits.softmax_no_other, exhibits.softmax_block_of_512],
    [exhibits.copy_rows, exhibits.first_copy],
]  # fmt: skip
SHOWN = {}
for parts in PARTS:
    name = f"{parts[-1].__module__.rpartition('.')[2]} {parts[-1].__name__}"
    SHOWN[name] = parts[-1], TAKEN + "\n\n".join(map(source, parts))
FIVE = {"naive": NAIVE, "fused": FUSED, "masked": MASKED}
FIVE |= {name: SHOWN[f"{name} softmax"][1] for name in ("tiled", "persistent")}


def of_masked(old, new=""):
    assert old in MASKED
    return MASKED.replace(old, new)


def with_syntax_errors(text):
    """(line, the text with an error in this line), for each line of code."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        quoted = "\n".join(lines[: i + 1]).count('"""') % 2 or '"""' in line
        if line.strip() and not quoted:
            broken = line.replace(line.lstrip(), f"$ {line.lstrip()}")
            yield i + 1, "\n".join([*lines[:i], broken, *lines[i + 1 :]])
