import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import device
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.gpus import DEFAULT_GPU, find_gpu
from memtraffic.kernels.launch import Launch
from memtraffic.kernels.softmax import planning
from memtraffic.kernels.softmax.op import backward, forward
from memtraffic.kernels.softmax.planning import (
    SPLIT_FROM,
    WARPS,
    ShiftedTile,
    Slices,
    Tile,
    as_rows,
    column_tile,
    common_divisor,
    plan,
    row_tile,
    softmax_tile,
)
from memtraffic.kernels.tiling import shifted_vector

DEVICE = device.default()
H200, MI300X = DEFAULT_GPU, find_gpu("MI300X")


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


# ---- tiles


@settings(max_examples=150, deadline=None)
@given(
    n_cols=st.integers(1, 2**10) | st.integers(1, 2**17),
    itemsize=st.sampled_from([2, 4, 8]),
    inputs=st.sampled_from([1, 2]),
    gpu=st.sampled_from([H200, MI300X]),
    shifted=st.booleans(),
)
def test_row_tile_holds_a_row(n_cols, itemsize, inputs, gpu, shifted):
    tile = row_tile(n_cols, itemsize, inputs, gpu, shifted)
    if tile is None:
        assert n_cols > max(WARPS[itemsize, inputs].values())
        return
    most = 512 if n_cols > max(WARPS[itemsize, inputs].values()) else 256
    if isinstance(tile, ShiftedTile):
        assert_whole_vectors(tile, n_cols, gpu)
        return
    assert (tile.chunks - 1) * tile.block < n_cols <= tile.chunks * tile.block
    assert all(map(is_power_of_two, (tile.rows, tile.block, tile.num_warps)))
    lanes = tile.num_warps * gpu.warp_size
    assert lanes <= gpu.max_threads_per_program
    elements = tile.rows * tile.block * tile.chunks / lanes
    assert elements * itemsize <= most  # bytes per lane and tensor
    narrower = row_tile(n_cols, itemsize, inputs, gpu, shifted, sm_bytes=1)
    assert narrower == tile or 1 <= narrower.rows <= tile.rows
    narrow = tile.rows > 1 and tile.chunks == 1 and tile.block < 2 * n_cols
    # A lane loads whole vectors; where a program has several rows, 32 or 8 lanes have one of them.
    assert narrow or tile.block * itemsize * tile.rows % (16 * lanes) == 0
    assert narrow or tile.rows == 1 or lanes in (tile.rows * 32, tile.rows * 8)
    if shifted and n_cols >= 1024:
        assert tile.rows == 1


def assert_whole_vectors(tile, n_cols, gpu):
    """All rows have the first chunk, and with the rest it holds all that is not at their edges."""
    constants = planning.tile_constants(tile, n_cols, 8, 1, gpu, packed=True)
    assert constants["SINGLY"] and constants["VECTOR"] == 8
    assert constants["CHUNKS"] == constants["WHOLE"] == tile.chunks == 1 < tile.rows <= 8
    inner = {(n_cols - head) // 8 * 8 for head in range(8)}
    assert tile.block <= min(inner) and max(inner) <= tile.block + tile.rest
    assert is_power_of_two(tile.block) and tile.rest in (0, *(2**k for k in range(3, 10)))
    assert tile.rest <= tile.block
    assert tile.rows * (tile.block + tile.rest) <= 40 * tile.num_warps * gpu.warp_size


# Columns, bytes of an element and inputs: the tile, and that of rows between multiples of 16 bytes.
TILES = {
    (1, 4, 1): (Tile(512, 1, 1, 1), Tile(512, 1, 1, 1)),
    (8, 4, 2): (Tile(64, 8, 1, 1), Tile(64, 8, 1, 1)),  # 64 bytes of each tensor in a lane
    (9, 4, 1): (Tile(32, 16, 1, 1), Tile(32, 16, 1, 1)),
    (8, 2, 1): (Tile(128, 8, 1, 1), Tile(128, 8, 1, 1)),
    (255, 2, 2): (Tile(4, 64, 4, 1), ShiftedTile(4, 128, 1, 2, 128)),
    (8, 8, 1): (Tile(32, 8, 1, 1), Tile(32, 8, 1, 1)),
    (100, 4, 1): (Tile(4, 128, 1, 1), Tile(8, 128, 1, 1)),
    (128, 2, 1): (Tile(8, 128, 1, 1), ShiftedTile(8, 64, 1, 2, 64)),  # in whole vectors, too
    (64, 2, 1): (Tile(16, 64, 1, 1), Tile(8, 64, 1, 1)),
    (65, 2, 2): (Tile(8, 128, 1, 1), ShiftedTile(8, 32, 1, 1, 32)),
    (70, 2, 1): (Tile(8, 128, 1, 1), ShiftedTile(8, 32, 1, 1, 32)),  # of 70, some rows have 56
    (71, 2, 1): (Tile(8, 128, 1, 1), ShiftedTile(8, 64, 1, 1, 0)),
    (77, 2, 1): (Tile(8, 128, 1, 1), ShiftedTile(8, 64, 1, 1, 8)),
    (103, 2, 1): (Tile(8, 128, 1, 1), ShiftedTile(8, 64, 1, 1, 32)),
    (129, 2, 1): (Tile(4, 64, 3, 1), ShiftedTile(8, 64, 1, 2, 64)),  # eight lanes a row
    (167, 2, 1): (Tile(4, 64, 3, 1), ShiftedTile(8, 128, 1, 1, 32)),
    (168, 2, 1): (Tile(4, 64, 3, 1), ShiftedTile(8, 128, 1, 2, 64)),
    (79, 2, 2): (Tile(8, 128, 1, 1), ShiftedTile(8, 64, 1, 1, 8)),
    (80, 2, 2): (Tile(8, 128, 1, 1), ShiftedTile(8, 64, 1, 2, 16)),
    (143, 2, 2): (Tile(4, 64, 3, 1), ShiftedTile(8, 128, 1, 2, 8)),
    (144, 2, 2): (Tile(4, 64, 3, 1), ShiftedTile(4, 128, 1, 2, 16)),
    (391, 2, 2): (Tile(4, 256, 2, 4), ShiftedTile(4, 256, 1, 2, 128)),
    (392, 2, 2): (Tile(4, 256, 2, 4), ShiftedTile(2, 256, 1, 2, 256)),
    (60, 2, 1): (Tile(16, 64, 1, 1), Tile(8, 64, 1, 1)),
    (60, 2, 2): (Tile(8, 64, 1, 1), Tile(16, 64, 1, 1)),
    (256, 4, 1): (Tile(4, 256, 1, 1), Tile(4, 256, 1, 1)),  # loads of 16 bytes
    (255, 4, 1): (Tile(4, 256, 1, 2), Tile(4, 256, 1, 2)),  # of 4
    (256, 4, 2): (Tile(4, 256, 1, 2), Tile(4, 256, 1, 2)),
    (512, 4, 1): (Tile(2, 512, 1, 2), Tile(2, 512, 1, 2)),
    # A warp to each row; a wide one that starts in between needs a program of its own.
    (320, 2, 1): (Tile(4, 64, 5, 1), ShiftedTile(4, 256, 1, 2, 64)),
    (321, 2, 1): (Tile(4, 256, 2, 4), ShiftedTile(4, 256, 1, 2, 64)),
    (647, 2, 1): (Tile(4, 256, 3, 4), ShiftedTile(4, 512, 1, 2, 128)),
    (648, 2, 1): (Tile(4, 256, 3, 4), Tile(1, 256, 3, 1)),
    (130, 4, 1): (Tile(4, 256, 1, 1), Tile(4, 256, 1, 1)),
    (1792, 2, 1): (Tile(4, 256, 7, 4), Tile(1, 256, 7, 1)),
    (1793, 2, 1): (Tile(1, 512, 4, 2), Tile(1, 512, 4, 2)),
    (519, 2, 2): (Tile(4, 256, 3, 4), ShiftedTile(2, 512, 1, 2, 0)),
    (520, 2, 2): (Tile(4, 256, 3, 4), Tile(1, 256, 3, 1)),
    (769, 2, 2): (Tile(1, 512, 2, 2), Tile(1, 512, 2, 2)),
    (257, 4, 2): (Tile(1, 128, 3, 1), Tile(1, 128, 3, 1)),
    (512, 4, 2): (Tile(1, 128, 4, 1), Tile(1, 128, 4, 1)),
    (513, 4, 2): (Tile(1, 512, 2, 4), Tile(1, 512, 2, 4)),
    # Programs of whole rows
    (513, 4, 1): (Tile(1, 256, 3, 2), Tile(1, 256, 3, 2)),
    (4096, 4, 1): (Tile(1, 256, 16, 2), Tile(1, 256, 16, 2)),
    (4097, 4, 1): (Tile(1, 512, 9, 4), Tile(1, 512, 9, 4)),
    (8193, 4, 1): (Tile(1, 2048, 5, 8), Tile(1, 2048, 5, 8)),  # two vectors of a chunk
    (32768, 2, 1): (Tile(1, 4096, 8, 8), Tile(1, 2048, 16, 8)),
    (16384, 4, 2): (Tile(1, 2048, 8, 16), Tile(1, 2048, 8, 16)),
    (50257, 2, 1): (None, Tile(1, 2048, 25, 8)),
    (50257, 4, 1): (None, None),
    (51201, 2, 1): (None, None),
}


@pytest.mark.parametrize(("point", "expected"), TILES.items(), ids=str)
def test_row_tile(point, expected):
    """On a GPU of wider warps, rows of a program of their own take half as many of them."""
    for shifted, tile in enumerate(expected):
        assert row_tile(*point, H200, bool(shifted)) == tile
        if tile and (isinstance(tile, ShiftedTile) or (tile.num_warps > 1 and point[0] > 512)):
            wide = replace(tile, num_warps=math.ceil(tile.num_warps / 2))
            assert row_tile(*point, MI300X, bool(shifted)) == wide
        elif tile and point[0] < 255:
            assert row_tile(*point, MI300X, bool(shifted)) == replace(tile, rows=2 * tile.rows)


def test_row_tile_ends_where_a_program_does():
    for (itemsize, inputs), gpu in product(WARPS, (H200, MI300X)):
        widest = max(WARPS[itemsize, inputs].values())
        assert row_tile(widest, itemsize, inputs, gpu) is not None
        assert row_tile(widest + 1, itemsize, inputs, gpu) is None


def test_row_tile_of_a_gpu_with_small_programs():
    small = replace(H200, max_threads_per_program=256)
    assert row_tile(14336, 4, 1, small) == row_tile(14336, 4, 1, H200)
    assert row_tile(14337, 4, 1, small) is None


@pytest.mark.parametrize(
    ("m", "n", "itemsize", "inputs", "expected"),
    [
        (4223, 64, 4, 1, Tile(4, 64, 1, 1)),  # 4 tiles an SM
        (4224, 64, 4, 1, Tile(8, 64, 1, 1)),
        (4223, 32, 2, 1, Tile(4, 32, 1, 1)),
        (256, 197, 2, 1, Tile(1, 256, 1, 1)),
        (131, 16384, 4, 1, None),  # not a row for each SM
        (132, 16384, 4, 1, Tile(1, 2048, 8, 16)),
        (131, 9216, 4, 1, None),  # of 36 KiB
        (131, 9215, 4, 1, Tile(1, 2048, 5, 8)),
        (131, 16384, 8, 1, Tile(1, 1024, 16, 16)),  # a sum of float64 outgrows half a word
        (10**6, 24576, 4, 1, Tile(1, 2048, 12, 16)),
        (10**6, 24577, 4, 1, None),
    ],
)
def test_softmax_tile(m, n, itemsize, inputs, expected):
    assert softmax_tile(m, n, itemsize, inputs, H200) == expected


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
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


# ---- shifted_vector


def odd(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        pytest.param(odd(4, 41), odd(4, 41), 4, id="odd-width"),
        pytest.param(odd(4, 42), odd(4, 42), 4, id="two-of-four"),
        pytest.param(odd(4, 41).half(), odd(4, 41).half(), 8, id="float16"),
        pytest.param(odd(4, 41).half(), odd(4, 41), 1, id="two-dtypes"),
        pytest.param(odd(4, 40), odd(4, 40), 1, id="whole-vectors"),
        pytest.param(odd(4, 44)[:, :41], odd(4, 41), 1, id="other-strides"),
        pytest.param(odd(4, 45)[:, :41], odd(4, 41), 4, id="strides-alike"),
        pytest.param(odd(165)[1:].view(4, 41), odd(4, 41), 1, id="starts-at-the-second"),
        pytest.param(odd(2, 3, 41), odd(2, 3, 41), 4, id="batches"),
    ],
)
def test_shifted_vector(x, y, expected):
    _, strides = as_rows([y, x], x.dim() - 1)
    assert shifted_vector([y, x], strides) == expected


# ---- plan


def planned(x, dim=-1, dtype=None, backward=False):
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    tensors = (torch.empty_like(y), y, x) if backward else (y, x)
    return plan(lambda *tensors: None, tensors, dim, backward)


CASES = {
    "rows": (lambda: torch.empty(8, 1000), -1, "softmax_kernel"),
    "widest-row": (lambda: torch.empty(132, 24576), -1, "softmax_kernel"),
    "few-rows": (lambda: torch.empty(131, 24576), -1, "split_kernel"),
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

    class Named(Launch):
        def __init__(self, kernel, *args, **options):
            made.append(kernel.__name__)
            super().__init__(kernel, *args, **options)

    monkeypatch.setattr(planning, "Launch", Named)
    monkeypatch.setattr("memtraffic.kernels.softmax.split.Launch", Named)
    with device.capturing_launches(H200):  # it plans for that GPU, and compiles nothing
        assert isinstance(planned(make(), dim), Named)
    assert made == [name]


def test_plan_reads_rows_twice_for_no_other_reason(monkeypatch):
    def wrong(*arguments, **options):
        raise ValueError("not the number of programs")

    monkeypatch.setattr(planning, "split_launch", wrong)
    with pytest.raises(ValueError, match="not the number"):
        planned(torch.empty(2, 100000))


@pytest.mark.parametrize(
    ("m", "n", "rows"),
    [
        (1, 8, 16),
        (15, 8, 16),
        (16, 8, 16),
        (17, 8, 16),
        (8447, 8, 16),
        (8448, 8, 32),
        (33791, 8, 32),
        (33792, 8, 64),
        *((5000, 100, 4), (5000, 101, 8)),  # rows that start at whole vectors, and anywhere
        (5, 513, 1),
    ],
)
def test_plan_has_programs_for_all_rows(m, n, rows):
    with device.capturing_launches(H200):
        run = planned(torch.empty(m, n))
    assert run.grid == (m // rows + m % rows, 1)


def test_plan_of_more_batches_than_a_grid_has(monkeypatch):
    monkeypatch.setattr(planning, "MAX_BATCHES", 3)
    x = torch.empty(4, 6, 8)
    assert not isinstance(planned(x[:3, :3]), Slices)
    assert isinstance(planned(x[:, :3]), Slices)
    assert not isinstance(planned(x), Slices)


# ---- compiled


def captured(target, x, backward_too=False, dtype=None):
    """The launch of the softmax of a tensor like `x` on a GPU, or of its backward."""
    if backward_too:
        fn = lambda y: backward(y, y.clone(), 1, y.dtype)  # noqa: E731
    else:
        fn = lambda x: forward(x, -1, dtype)  # noqa: E731
    [launch] = capture_launches(fn, x, gpu=find_gpu(target))
    return launch, target


def rows(n, name):
    return torch.empty(H200.num_sms, n, dtype=getattr(torch, name), device=DEVICE)  # not few


def assert_wide_without_spills(kernel):
    assert kernel.spill_bytes == 0
    words = {64} if kernel.kernel.startswith("split") else set()
    assert set(kernel.load_bits) == {128} | words
    assert set(kernel.store_bits) == {128}


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [1, 2])  # that a program holds
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_widest_rows_compile_without_spills_to_wide_loads(name, inputs):
    """The widest for each number of warps; and long rows, which are split or read twice."""
    widths = [*WARPS[getattr(torch, name).itemsize, inputs].values(), 131072, 2**20]
    jobs = [captured("sm_90", rows(n, name), inputs == 2) for n in widths]
    for kernel in compile_launches(jobs):
        assert_wide_without_spills(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_no_number_of_whole_chunks_spills(name):
    """Of the forward, and 14 chunks would; of 8 warps and more, every fourth number."""
    tiles = [
        (n, row_tile(n, getattr(torch, name).itemsize, 1, H200)) for n in range(128, 32769, 128)
    ]
    widths = {tile: n for n, tile in tiles if tile and tile.block * tile.chunks == n}
    assert len(widths) > 30
    kept = [n for tile, n in widths.items() if tile.chunks >= 12 or tile.chunks % 4 == 1]
    kernels = compile_launches([captured("sm_90", rows(n, name)) for n in kept])
    assert [n for n, it in zip(kept, kernels, strict=True) if it.spill_bytes] == []


def test_registers_are_limited_where_a_forward_would_spill():
    for n, gpu, inputs, name in product(
        (781, 3328, 3584, 3600, 7168, 14336), ("H200", "MI300X"), (1, 2), ("float32", "bfloat16")
    ):
        with device.capturing_launches(find_gpu(gpu)):
            tensors = [rows(n, name) for _ in range(1 + inputs)]
            run = plan(lambda *tensors: None, tensors, -1, inputs == 2)
        limited = (n in (3584, 7168), gpu, inputs, name) == (True, "H200", 1, "float32")
        assert (run.options.get("maxnreg") == 255) == limited, (n, gpu, inputs, name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "inputs"), [*product(("float32", "bfloat16"), (1, 2))])
def test_odd_rows_compile_without_spills(name, inputs):
    """Whole vectors, and one load for both ends of the row."""
    kind = getattr(torch, name).itemsize, inputs
    widest = min(max(WARPS[kind].values()), SPLIT_FROM.get(kind, 2**20) - 1) - 1
    jobs = [captured("sm_90", rows(n, name), inputs == 2) for n in (781, 50257, 4095, widest)]
    narrow, long, *wide = compile_launches(jobs)
    assert narrow.spill_bytes == long.spill_bytes == 0
    element = 8 * kind[0]
    for kernel in wide:
        assert kernel.spill_bytes == 0
        assert kernel.load_bits[128] == inputs * kernel.store_bits[128]
        assert kernel.load_bits[element] == inputs * kernel.store_bits[element] == inputs


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [1, 2])
def test_several_odd_rows_are_loaded_once(inputs):
    """In whole vectors. A matrix of fewer elements than lanes would be loaded twice."""
    widths = (65, 135, 197, 321, 449, 519)
    jobs = [captured("sm_90", rows(n, "bfloat16"), inputs == 2) for n in widths]
    for n, kernel in zip(widths, compile_launches(jobs), strict=True):
        assert kernel.load_bits[128] and not kernel.spill_bytes
        loads, stores = kernel.load_bits.values(), kernel.store_bits.values()
        assert sum(loads) == inputs * sum(stores), n


@pytest.mark.slow
def test_softmax_compiles_for_other_gpus():
    """For sm_75, NVIDIA's compiler spills a little, so that a program more fits an SM."""
    points = [*product(("sm_75", "gfx942", "gfx1100"), (781, 131072))]
    jobs = [captured(target, rows(n, "float32")) for target, n in points]
    jobs += [
        captured("sm_90", rows(1024, "float64"), dtype=it) for it in (torch.bfloat16, torch.float16)
    ]
    spilled = [kernel.spill_bytes for kernel in compile_launches(jobs)]
    assert spilled[1] <= 40 and not any(spilled[:1] + spilled[2:])
