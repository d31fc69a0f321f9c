"""Narrow rows that a program loads as one run: which, how many, and what is at the end of them."""

import math

import pytest
import torch

from memtraffic import count, device, resources
from memtraffic.kernels.softmax import narrow, planning
from memtraffic.kernels.softmax.op import backward, softmax
from memtraffic.kernels.softmax.rows import softmax_backward_kernel, softmax_kernel
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct

KINDS = [*narrow.WIDEST]


pytestmark = pytest.mark.usefixtures("narrow_of_few_rows")


TAKEN = {(4, 1): 28, (4, 2): 166, (2, 1): 50, (2, 2): 42}  # of the widths below 300


@pytest.mark.parametrize(("itemsize", "inputs"), KINDS)
def test_runs_hold_whole_rows_and_whole_vectors(itemsize, inputs):
    """And every index that the kernel makes of them lies inside of the run."""
    taken = 0
    for n in range(1, 300):
        if not (run := narrow.narrow_run(n, itemsize, inputs)):
            continue
        taken += 1
        its = run.constants
        assert run.rows * n % its["VECTOR"] == 0 and n * itemsize % 16
        assert its["RUN"] / 3 < run.rows * n <= its["RUN"] and run.rows <= its["ROWS"]
        assert n <= its["PLACES"] < 2 * n and its["ROWS"] % its.get("SKIP", 1) == 0
        assert (run.rows - 1) * n + its["PLACES"] <= its["RUN"]
        places = range(run.rows * n)
        reciprocal, bits = narrow.reciprocal(n), narrow.RECIPROCAL_BITS.value
        assert all(i * reciprocal >> bits == i // n for i in places)
        assert (its["RUN"] - 1) * reciprocal < 2**31 and its["RUN"] <= 512 * run.num_warps * 2
    assert taken == TAKEN[itemsize, inputs]


def test_rows_that_are_faster_in_tiles_are_left_to_them():
    assert narrow.narrow_run(2, 4, 1) is None and narrow.narrow_run(41, 4, 1) is None
    assert narrow.narrow_run(65, 2, 1) is None and narrow.narrow_run(63, 2, 2) is not None
    assert narrow.narrow_run(28, 2, 1) is None and narrow.narrow_run(36, 2, 1) is not None
    assert narrow.narrow_run(36, 2, 2) is None and narrow.narrow_run(18, 2, 1) is not None
    assert narrow.narrow_run(50, 2, 2) is None and narrow.narrow_run(46, 2, 2) is not None
    assert narrow.narrow_run(223, 4, 2) is not None and narrow.narrow_run(225, 4, 2) is None


@pytest.mark.parametrize(
    ("n", "itemsize", "inputs", "rows", "places", "size", "num_warps", "skip"),
    [
        *((11, 2, 1, 184, 12, 2048, 4, 2), (22, 2, 1, 92, 22, 2048, 4, 1)),
        *((39, 2, 1, 104, 40, 4096, 4, 2), (41, 2, 1, 48, 41, 2048, 2, 2)),
        *((49, 2, 1, 16, 64, 1024, 2, 1), (51, 2, 1, 40, 52, 2048, 2, 2)),  # 51: 3 to a bank
        *((57, 2, 1, 16, 64, 1024, 2, 1), (55, 2, 1, 32, 64, 2048, 4, 1)),
        *((21, 2, 2, 96, 32, 2048, 2, None), (33, 2, 2, 56, 64, 2048, 4, None)),
        *((33, 4, 1, 60, 33, 2048, 4, 1), (26, 4, 1, 64, 32, 2048, 4, 1)),
    ],
)
def test_narrow_run(n, itemsize, inputs, rows, places, size, num_warps, skip):
    run = narrow.narrow_run(n, itemsize, inputs)
    its = run.constants
    assert (run.rows, its["PLACES"], its["RUN"], its.get("SKIP")) == (rows, places, size, skip)
    x = torch.empty(
        100, n, dtype={2: torch.bfloat16, 4: torch.float32}[itemsize], device=device.default()
    )
    launch = planning.plan(print, [x] * (1 + inputs), 1, inputs == 2)
    assert launch.constants == its and launch.options["num_warps"] == run.num_warps == num_warps


def test_runs_of_two_dtypes_hold_whole_vectors_of_both():
    """And a number is converted first, wherever it is used."""
    x = matrix(100, 33)
    x[::2, 0], x[::2, 32], x[1::2, 3], x[1::2, 5] = 300, 301, 300, 301  # equal in bfloat16
    x[::4, 32] = 500  # the maximum is behind the first power of two, and far above all of that
    launch = planning.plan(print, (x.bfloat16(), x), 1, False)
    assert launch.kernel is narrow.narrow_kernel and launch.constants["VECTOR"] == 8
    assert_correct("softmax", lambda _: softmax(x, dtype=torch.bfloat16), x.bfloat16())


@pytest.mark.parametrize(
    ("dtype", "inputs", "n", "m"),
    [
        ("float32", 1, 33, 8192),
        *(("float32", 2, 63, 4292), ("float32", 2, 66, 32768)),
        ("bfloat16", 1, 33, 4096),
        ("bfloat16", 2, 63, 2146),
    ],
)
def test_few_rows_are_left_to_tiles(monkeypatch, dtype, inputs, n, m):
    """Below as many numbers for each of an H200's 132 SMs as the rule says."""
    monkeypatch.undo()
    kernels = {
        1: (softmax_kernel, narrow.narrow_kernel),
        2: (softmax_backward_kernel, narrow.narrow_backward_kernel),
    }
    for rows, kernel in zip((m - 1, m), kernels[inputs], strict=True):
        x = torch.empty(rows, n, dtype=getattr(torch, dtype), device=device.default())
        assert planning.plan(print, [x] * (1 + inputs), 1, inputs == 2).kernel is kernel


def names(x):
    return [it.name for it in count(softmax, x).ops]


@pytest.mark.parametrize(
    ("x", "kernel"),
    [
        (matrix(9, 7), "narrow_kernel"),
        (matrix(9, 7, "float64"), "softmax_kernel"),
        (matrix(9, 7).view(3, 3, 7), "narrow_kernel"),
        (matrix(9, 8)[:, :7], "softmax_kernel"),  # rows do not follow one another
        (matrix(9, 7)[1:], "softmax_kernel"),  # and here they start elsewhere in memory
        (matrix(7, 9).t(), "softmax_kernel"),
    ],
    ids=["packed", "float64", "three-dimensions", "apart", "misaligned", "transposed"],
)
def test_rows_must_follow_one_another_from_an_aligned_address_on(x, kernel):
    assert names(x) == [kernel]
    assert torch.allclose(softmax(x), torch.softmax(x, dim=-1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# Two with a second power of two; one not full, whose lanes without a row would read past the run.
@pytest.mark.parametrize("n", [3, 19, 33, 39])
def test_last_program_may_end_inside_of_a_vector(n, dtype):
    """What lies behind the last row is untouched."""
    rows = narrow.narrow_run(n, matrix(1, 1, dtype).element_size(), 1).rows
    for m in (1, rows - 1, rows, rows + 1, 2 * rows + 3):
        x, dy = matrix(m, n, dtype), matrix(m, n, dtype, seed=1)
        behind = torch.full((m * n + 64,), 7, dtype=x.dtype, device=device.default())
        y = behind[: m * n].view(m, n)
        assert_correct("softmax", softmax, x)
        softmax(x, out=y)
        assert (behind[m * n :] == 7).all()
        dx = backward(dy, y, 1, y.dtype, out=torch.full_like(behind, 7)[: m * n].view(m, n))
        wide, by = y.double(), dy.double()
        wanted = wide * (by - (wide * by).sum(dim=1, keepdim=True))
        assert (dx - wanted).abs().max() < 4 * torch.finfo(x.dtype).eps


def test_rows_of_infinities_do_not_reach_their_neighbours():
    """Nor does NaN: each row is a lane's own."""
    x = matrix(40, 13)
    x[3], x[4, 5], x[7, 2] = -math.inf, math.inf, math.nan
    y, wanted = softmax(x), torch.softmax(x, dim=1)
    assert torch.allclose(y, wanted, equal_nan=True)
    assert y.isnan().any(dim=1).nonzero().flatten().tolist() == [3, 4, 7]


@pytest.mark.parametrize("n", [13, 39])
def test_runs_are_loaded_in_whole_vectors(n):
    [used] = resources(softmax, matrix(1001, n), target="sm_90")
    assert used.kernel == "narrow_kernel" and 128 in used.load_bits and used.spill_bytes == 0
