import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import runtime
from memtraffic.compile import resources
from memtraffic.gpus import DEFAULT_GPU, find_gpu
from memtraffic.ladder.call import Call
from memtraffic.ops import planning
from memtraffic.ops.planning import (
    Slices,
    as_rows,
    column_tile,
    common_divisor,
    plan,
    row_tile,
    split_tile,
)
from memtraffic.ops.softmax import backward, forward

DEVICE = runtime.device()
H200, MI300X = DEFAULT_GPU, find_gpu("MI300X")


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


# ---- tiles


@settings(max_examples=300, deadline=None)
@given(
    n_cols=st.integers(1, 2**17),
    itemsize=st.sampled_from([2, 4, 8]),
    inputs=st.sampled_from([1, 2]),
    gpu=st.sampled_from([H200, MI300X]),
)
def test_row_tile_holds_a_row(n_cols, itemsize, inputs, gpu):
    tile = row_tile(n_cols, itemsize, inputs, gpu)
    if tile is None:
        assert n_cols > 8192 // inputs
        return
    assert tile.block + tile.tail >= n_cols
    assert tile.block + tile.tail < 2 * n_cols or n_cols == 1
    assert tile.tail == 0 or n_cols > tile.block > tile.tail
    assert all(map(is_power_of_two, (tile.rows, tile.block, tile.num_warps)))
    assert tile.tail == 0 or is_power_of_two(tile.tail)
    assert tile.num_warps * gpu.warp_size <= gpu.max_threads_per_program
    elements = tile.rows * tile.block * inputs // (tile.num_warps * gpu.warp_size)
    assert elements * itemsize <= 256  # bytes per lane: 64 registers


@pytest.mark.parametrize(
    ("itemsize", "inputs", "widest"), [(4, 1, 32768), (2, 1, 65536), (4, 2, 16384), (2, 2, 32768)]
)
def test_row_tile_ends_where_a_program_does(itemsize, inputs, widest):
    assert row_tile(widest, itemsize, inputs, H200).block == widest
    assert row_tile(2 * widest, itemsize, inputs, H200) is None


@settings(max_examples=200, deadline=None)
@given(n_cols=st.integers(1, 2**17), n_rows=st.integers(1, 2**20))
def test_column_tile_holds_a_row(n_cols, n_rows):
    tile = column_tile(n_cols, n_rows)
    if tile is None:
        assert n_cols > 2048
        return
    assert n_cols <= tile.block < 2 * n_cols
    assert tile.rows < 2 * n_rows
    assert all(map(is_power_of_two, (tile.rows, tile.block, tile.num_warps)))
    assert tile.rows * tile.block <= 64 * 32 * tile.num_warps


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_split_tile_is_128_bytes_per_lane(itemsize, inputs):
    block, num_warps = split_tile(itemsize, inputs)
    assert block * itemsize * inputs == 128 * 32 * num_warps


# ---- as_rows


@st.composite
def views(draw, tensors=2):
    """Tensors of one shape, each in a memory order of its own, with gaps and repeated elements."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    found = []
    for i in range(tensors):
        order = draw(st.permutations(range(len(sizes))))
        strides, step = [0] * len(sizes), 1
        for at in order:
            strides[at] = draw(st.sampled_from([step, step, step, step + 1, 0 if i else step]))
            step = max(step, strides[at]) * sizes[at]
        found.append(torch.empty(2 * step).as_strided(sizes, strides))
    return found, draw(st.integers(0, len(sizes) - 1))


def rows_of(sizes, *strides):
    """For each row, where its elements lie in each tensor; the rows in no order."""
    return sorted(
        [
            tuple(sum(map(math.prod, zip((*i, j), s, strict=True))) for s in strides)
            for j in range(sizes[-1])
        ]
        for i in product(*map(range, sizes[:-1]))
    )


@settings(max_examples=200, deadline=None)
@given(case=views())
def test_as_rows_reaches_each_row_once(case):
    tensors, dim = case
    sizes, strides = as_rows(tensors, dim)
    assert len(sizes) >= 3 and {len(s) for s in strides} == {len(sizes)}
    last = [t.movedim(dim, -1) for t in tensors]
    assert rows_of(sizes, *strides) == rows_of(last[0].shape, *(t.stride() for t in last))


@pytest.mark.parametrize(
    ("make", "dim", "expected"),
    [
        pytest.param(lambda x: x, -1, [1, 24, 5], id="contiguous"),
        pytest.param(lambda x: x, 0, [1, 60, 2], id="first-dimension"),
        pytest.param(lambda x: x, 1, [2, 20, 3], id="in-the-middle"),
        pytest.param(lambda x: x.permute(2, 1, 0, 3), -1, [1, 24, 5], id="rows-in-another-order"),
        pytest.param(lambda x: x[..., :4], -1, [1, 24, 4], id="padded-rows"),
        pytest.param(lambda x: x[:, :2], -1, [2, 8, 5], id="padded-matrices"),
        pytest.param(lambda x: x[:, ::2, ::2], -1, [2, 2, 2, 5], id="too-many-to-join"),
        pytest.param(lambda x: x[:, :1].expand(2, 9, 4, 5), -1, [2, 4, 9, 5], id="repeated"),
    ],
)
def test_as_rows_joins_what_it_can(make, dim, expected):
    x = make(torch.empty(2, 3, 4, 5))
    y = torch.empty_strided(x.shape, x.stride()) if 0 not in x.stride() else x
    sizes, _ = as_rows([y, x], dim % x.dim())
    assert sizes == expected


def test_as_rows_joins_only_what_all_of_the_tensors_can():
    x = torch.empty(2, 3, 5)
    assert as_rows([x, x], 2)[0] == [1, 6, 5]
    assert as_rows([torch.empty(2, 4, 5)[:, :3], x], 2)[0] == [2, 3, 5]


@pytest.mark.parametrize("outer", [1, 2])
def test_slices_are_the_parts_of_each_tensor(outer):
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    wide = torch.zeros(2, 3, 4, 7, dtype=x.dtype)
    y = wide[..., 1:6]  # it does not start where its memory does
    run = Slices(lambda y, x: y.copy_(x), [2, 3, 4, 5], [list(y.stride()), list(x.stride())], outer)
    run(y, x)
    assert torch.equal(y, x)
    assert int(wide.sum()) == int(x.sum())


# ---- common_divisor


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda: torch.empty(4, 40), 4, id="float32"),
        pytest.param(lambda: torch.empty(4, 40).half(), 8, id="float16"),
        pytest.param(lambda: torch.empty(4, 40).double(), 2, id="float64"),
        pytest.param(lambda: torch.empty(4, 38), 2, id="two-of-four"),
        pytest.param(lambda: torch.empty(4, 41), 1, id="odd-width"),
        pytest.param(lambda: torch.empty(4, 41)[:, :40], 1, id="odd-rows"),
        pytest.param(lambda: torch.empty(40, 4).t(), 1, id="transposed"),
        pytest.param(lambda: torch.empty(2, 122)[:, :120].unflatten(1, (3, 40)), 2, id="batches"),
    ],
)
def test_common_divisor(make, expected):
    x = make()
    y = torch.empty(x.shape, dtype=x.dtype)
    sizes, strides = as_rows([y, x], x.dim() - 1)
    assert common_divisor([y, x], sizes, strides) == expected


# ---- plan


def planned(x, dim=-1, dtype=None, backward=False):
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    tensors = (torch.empty_like(y), y, x) if backward else (y, x)
    return plan(lambda *tensors: None, tensors, dim, backward)


CASES = {
    "rows": (lambda: torch.empty(8, 1000), -1, "softmax_kernel"),
    "widest-row": (lambda: torch.empty(2, 32768), -1, "softmax_kernel"),
    "columns": (lambda: torch.empty(1000, 8), 0, "softmax_kernel"),
    "batches-of-columns": (lambda: torch.empty(4, 100, 8), 1, "softmax_kernel"),
    "long-rows": (lambda: torch.empty(2, 100000), -1, "split_kernel"),
    "long-columns": (lambda: torch.empty(100000, 2), 0, "online_kernel"),
    "long-float64": (lambda: torch.empty(2, 100000).double(), -1, "online_kernel"),
    "longest-rows": (lambda: torch.empty(1).expand(2, 2**24), -1, "online_kernel"),
    "more-programs-than-fit": (lambda: torch.empty(2, 2**22), -1, "online_kernel"),
}


@pytest.mark.parametrize(("make", "dim", "name"), CASES.values(), ids=CASES)
def test_plan_chooses_the_kernel(make, dim, name, monkeypatch):
    made = []

    class Named(Call):
        def __init__(self, kernel, *args, **options):
            made.append(kernel.__name__)
            super().__init__(kernel, *args, **options)

    monkeypatch.setattr(planning, "Call", Named)
    monkeypatch.setattr("memtraffic.ladder.split.Call", Named)
    with runtime.capturing_launches(H200):  # it plans for that GPU, and compiles nothing
        assert isinstance(planned(make(), dim), Named)
    assert made == [name]


@pytest.mark.parametrize(
    ("m", "n", "rows"), [(1, 8, 64), (63, 8, 64), (64, 8, 64), (65, 8, 64), (5, 512, 1)]
)
def test_plan_has_programs_for_all_rows(m, n, rows):
    with runtime.capturing_launches(H200):
        run = planned(torch.empty(m, n))
    assert run._grid == (-(-m // rows), 1)


def test_plan_of_more_batches_than_a_grid_has(monkeypatch):
    monkeypatch.setattr(planning, "MAX_BATCHES", 3)
    x = torch.empty(4, 6, 8)
    assert not isinstance(planned(x[:3, :3]), Slices)
    assert isinstance(planned(x[:, :3]), Slices)
    assert not isinstance(planned(x), Slices)


# ---- compiled


def on(target, x, dim=-1, dtype=None):
    [kernel] = resources(lambda x: forward(x, dim, dtype), target, x)
    return kernel


def backward_on(target, y):
    [kernel] = resources(lambda y, dy: backward(dy, y, 1, y.dtype), target, y, y.clone())
    return kernel


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("n", "name"),
    [
        pytest.param(8320, "float32", id="block-and-tail"),
        pytest.param(1024, "bfloat16", marks=SLOW),
        pytest.param(12672, "bfloat16", marks=SLOW),
        pytest.param(32768, "float32", marks=SLOW),
        pytest.param(32768, "bfloat16", marks=SLOW),
        pytest.param(16384, "float64", marks=SLOW),
        pytest.param(131072, "float32", marks=SLOW),
        pytest.param(131072, "bfloat16", marks=SLOW),
        pytest.param(131072, "float64", marks=SLOW),
    ],
)
def test_softmax_compiles_without_spills_to_wide_loads(n, name):
    kernel = on("sm_90", torch.empty(4, n, dtype=getattr(torch, name), device=DEVICE))
    assert kernel.spill_bytes == 0
    assert 128 in kernel.load_bits and 128 in kernel.store_bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "name"), [(781, "float32"), (16384, "float32"), (131072, "float32"), (131072, "bfloat16")]
)
def test_backward_compiles_without_spills(n, name):
    kernel = backward_on("sm_90", torch.empty(4, n, dtype=getattr(torch, name), device=DEVICE))
    assert kernel.spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_75", "gfx942", "gfx1100"])
@pytest.mark.parametrize("n", [781, 131072])
def test_softmax_compiles_for_other_gpus(target, n):
    assert on(target, torch.empty(4, n, device=DEVICE)).spill_bytes == 0


@pytest.mark.slow
def test_softmax_of_two_dtypes_compiles():
    x = torch.empty(4, 1024, dtype=torch.float64, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        assert on("sm_90", x, dtype=dtype).spill_bytes == 0
