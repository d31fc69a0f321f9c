"""What holds for every rung of the ladder, and what is special about the shortest of them."""

import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import DEVICE, H200, assert_softmax, cases

from memtraffic import device
from memtraffic.compile import capture_launches
from memtraffic.kernels.softmax import chunks, fused, online
from memtraffic.meters.formula import formula
from memtraffic.names import RUNGS, import_function, import_path
from memtraffic.tensors import matrix


def test_rungs_are_in_the_order_of_the_book():
    first = "naive", "fused", "masked", "tiled", "chunks"
    assert list(RUNGS) == [*first, "persistent", "online", "split"]
    assert [import_path(import_function(name)) for name in RUNGS] == list(RUNGS)


@pytest.mark.parametrize("name", RUNGS)
def test_formula_is_that_of_the_docstring(name):
    softmax = import_function(name)
    docstring = sys.modules[softmax.__module__].__doc__
    [traffic] = re.findall(r"Traffic: (reads .*?, writes .*?)\.\s", docstring)
    one_program = [(9, 8), (4, 2), (2, 700)]  # a row; of longer ones, split takes several
    assert formula(softmax, held_out=one_program).text == traffic


# ---- fused


REFUSED = {
    "not-a-power-of-two": (matrix(4, 781), "781"),
    "no-columns": (matrix(4, 0), "0"),
    "two-columns-3-apart": (matrix(4, 6)[:, ::3], "3"),
    "transposed": (matrix(8, 4).T, "4"),
}


@cases(("x", "numbers"), REFUSED)
def test_fused_refuses_and_repeats_the_numbers(x, numbers):
    with pytest.raises(ValueError, match=rf"^fused: .*\b{numbers}"):
        fused.softmax(x)


# ---- what is launched


def empty(n, dtype=torch.float32):
    return torch.empty(2, n, dtype=dtype, device=DEVICE)


LAUNCHES = [  # a rung, a matrix and options; some of what is launched on an H200
    ("chunks", empty(12672), {}, {"CHUNKS": 13, "BLOCK": 1024, "ALIGN": 4, "num_warps": 8}),
    ("chunks", empty(8321, torch.bfloat16), {}, {"CHUNKS": 9, "WHOLE": 8, "ALIGN": 1, "VECTOR": 8}),
    ("chunks", empty(77), {}, {"ROWS": 4, "CHUNKS": 3, "WHOLE": 0, "VECTOR": 4}),
    ("masked", empty(1), {}, {"BLOCK": 1, "num_warps": 4}),
    ("masked", empty(5000), {}, {"BLOCK": 8192, "num_warps": 16}),
    ("masked", empty(32768), {}, {"num_warps": 32}),
    ("tiled", empty(7), {}, {"ROWS": 64, "BLOCK": 8, "num_warps": 1}),
    ("tiled", empty(512, torch.float16), {}, {"ROWS": 2, "num_warps": 1}),  # by bytes
    ("tiled", empty(4096, torch.float16), {}, {"ROWS": 1, "num_warps": 4}),  # by columns
    ("tiled", empty(32768), {}, {"num_warps": 32}),
    ("tiled", empty(200), {"rows": 8}, {"ROWS": 8, "num_warps": 1}),
    ("tiled", empty(200), {"num_warps": 2}, {"ROWS": 2, "num_warps": 2}),
    ("persistent", empty(1004), {}, {"STAGES": 3}),
    ("persistent", empty(1004, torch.float16), {}, {"STAGES": 1}),  # 8 bytes at a time
    ("persistent", empty(1004, torch.float16), {"num_stages": 4}, {"STAGES": 4}),
    ("persistent", empty(32768), {}, {"STAGES": 2}),
    ("persistent", empty(1024), {"rows": 32, "num_warps": 16}, {"STAGES": 2, "num_warps": 16}),
    ("online", empty(78), {"block": 16, "num_warps": 2}, {"BLOCK": 16, "num_warps": 2}),
    ("split", empty(65536), {}, {"BLOCK": 512, "CHUNKS": 8, "SLOTS": 128}),  # a word a lane
    ("split", empty(65536), {"chunks": 1}, {"BLOCK": 512, "CHUNKS": 1}),
    ("split", empty(65536), {"block": 1024}, {"BLOCK": 1024, "CHUNKS": 8}),
    ("split", empty(640), {"block": 16, "chunks": 1}, {"SLOTS": 64}),  # more parts than lanes
]


@pytest.mark.parametrize(("name", "x", "options", "expected"), LAUNCHES)
def test_launch_is_by_the_rule_or_as_asked(name, x, options, expected):
    softmax = partial(import_function(name), **options)
    [launch] = capture_launches(softmax, x, gpu=H200)
    assert expected.items() <= (launch.constants | launch.options).items()


def test_chunks_refuses_rows_that_no_program_holds():
    small = replace(H200, max_threads_per_program=256)
    with pytest.raises(ValueError, match=r"^chunks: 32768 columns do not fit .* an H200$"):
        capture_launches(chunks.softmax, empty(32768), gpu=small)


# ---- online


def test_online_kernel_takes_float64_below_any_float32():
    """The running maximum starts at minus infinity: no other number stands for it."""
    x = torch.full((2, 40), -1e300, dtype=torch.float64, device=DEVICE)
    x[1, 20:] = -float("inf")
    y = torch.empty_like(x)
    with device.device_guard(x):
        online.online_kernel[(1,)](
            y, *y.stride(), x, *x.stride(), *x.shape, ROWS=2, BLOCK=16, ALIGN=1
        )
    assert_softmax(lambda _: y, x)
