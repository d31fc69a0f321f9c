import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import runtime
from memtraffic.compile import resources
from memtraffic.gpus import DEFAULT_GPU, find_gpu
from memtraffic.kernels.launch import Launch
from memtraffic.kernels.softmax import planning
from memtraffic.kernels.softmax.op import backward, forward
from memtraffic.kernels.softmax.planning import (
    WARPS,
    Slices,
    Tile,
    as_rows,
    column_tile,
    common_divisor,
    plan,
    row_tile,
    shifted_vector,
)

DEVICE = runtime.device()
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
    assert (tile.chunks - 1) * tile.block < n_cols <= tile.chunks * tile.block
    assert all(map(is_power_of_two, (tile.rows, tile.block, tile.num_warps)))
    lanes = tile.num_warps * gpu.warp_size
    assert lanes <= gpu.max_threads_per_program
    elements = tile.rows * tile.block * tile.chunks / lanes
    assert elements * itemsize <= most  # bytes per lane and tensor
    narrow = tile.rows > 1 and tile.chunks == 1 and tile.block < 2 * n_cols
    # A lane loads whole vectors, and where a program has several rows, a warp has one of them.
    assert narrow or tile.block * itemsize * tile.rows % (16 * lanes) == 0
    assert narrow or tile.rows == 1 or tile.rows * 32 == lanes
    if shifted and n_cols >= 1024:
        assert tile.rows == 1


@pytest.mark.parametrize(
    ("n", "itemsize", "expected"),
    [
        pytest.param(1, 4, Tile(512, 1, 1, 1), id="one-column"),
        pytest.param(8, 4, Tile(64, 8, 1, 1), id="eight"),
        pytest.param(9, 4, Tile(32, 16, 1, 1), id="nine"),
        pytest.param(128, 4, Tile(4, 128, 1, 1), id="widest-of-a-warp"),
        pytest.param(8, 2, Tile(128, 8, 1, 1), id="eight-of-16-bits"),
        pytest.param(255, 2, Tile(4, 256, 1, 1), id="widest-of-16-bits"),
        pytest.param(8, 8, Tile(32, 8, 1, 1), id="eight-of-64-bits"),
    ],
)
def test_row_tile_of_narrow_rows(n, itemsize, expected):
    """64 bytes of each tensor in a lane; on a GPU of wider warps, twice as many rows."""
    for inputs, shifted in product((1, 2), (False, True)):
        assert row_tile(n, itemsize, inputs, H200, shifted) == expected
        wide = replace(expected, rows=2 * expected.rows)
        assert row_tile(n, itemsize, inputs, MI300X, shifted) == wide


@pytest.mark.parametrize(
    ("n", "itemsize", "inputs", "expected"),
    [
        pytest.param(255, 4, 1, Tile(4, 256, 1, 2), id="two-warps"),
        pytest.param(257, 4, 1, Tile(2, 512, 1, 2), id="two-warps-at-most"),
        pytest.param(257, 4, 2, Tile(1, 512, 1, 1), id="backward"),
        pytest.param(511, 2, 1, Tile(2, 512, 1, 1), id="16-bits"),
        pytest.param(50257, 2, 1, Tile(1, 2048, 25, 8), id="vocabulary"),
        pytest.param(50257, 2, 2, Tile(1, 2048, 25, 8), id="vocabulary-backward"),
        pytest.param(50257, 4, 1, Tile(1, 2048, 25, 16), id="vocabulary-float32"),
        pytest.param(50257, 4, 2, None, id="vocabulary-float32-backward"),
        pytest.param(65537, 2, 1, None, id="past-what-fits"),
    ],
)
def test_row_tile_of_shifted_rows(n, itemsize, inputs, expected):
    assert row_tile(n, itemsize, inputs, H200, shifted=True) == expected


@pytest.mark.parametrize(
    ("n", "itemsize", "inputs", "expected", "shifted"),
    [
        pytest.param(256, 4, 1, Tile(2, 256, 1, 4), Tile(4, 256, 1, 2), id="several-warps"),
        pytest.param(512, 4, 1, Tile(2, 512, 1, 4), Tile(2, 512, 1, 2), id="several-warps-at-most"),
        pytest.param(256, 2, 1, Tile(4, 256, 1, 4), Tile(4, 256, 1, 1), id="forward"),
        pytest.param(1792, 2, 1, Tile(4, 256, 7, 4), Tile(1, 256, 7, 1), id="forward-at-most"),
        pytest.param(1793, 2, 1, Tile(1, 512, 4, 2), None, id="forward-and-one"),
        pytest.param(256, 2, 2, Tile(4, 256, 1, 4), Tile(4, 256, 1, 1), id="backward"),
        pytest.param(512, 2, 2, Tile(4, 256, 2, 4), Tile(2, 512, 1, 1), id="backward-at-most"),
        pytest.param(513, 2, 2, Tile(1, 512, 2, 2), None, id="backward-and-one"),
        pytest.param(512, 4, 2, Tile(1, 128, 4, 1), Tile(1, 512, 1, 1), id="float32-at-most"),
        pytest.param(513, 4, 2, Tile(1, 512, 2, 4), None, id="float32-and-one"),
    ],
)
def test_row_tile_of_a_warp_to_each_row(n, itemsize, inputs, expected, shifted):
    """A wide row that starts between two multiples of 16 bytes needs a program of its own."""
    assert row_tile(n, itemsize, inputs, H200) == expected
    assert row_tile(n, itemsize, inputs, H200, shifted=True) == (shifted or expected)


@pytest.mark.parametrize(
    ("n", "itemsize", "inputs", "expected"),
    [
        pytest.param(513, 4, 1, Tile(1, 256, 3, 2), id="one-past-narrow-rows"),
        pytest.param(4096, 4, 1, Tile(1, 256, 16, 2), id="two-warps"),
        pytest.param(4097, 4, 1, Tile(1, 512, 9, 4), id="four-warps"),
        pytest.param(8193, 4, 1, Tile(1, 2048, 5, 8), id="two-vectors-of-a-chunk"),
        pytest.param(32768, 2, 1, Tile(1, 4096, 8, 8), id="16-bits"),
        pytest.param(16384, 4, 2, Tile(1, 2048, 8, 16), id="backward"),
    ],
)
def test_row_tile_of_wide_rows(n, itemsize, inputs, expected):
    assert row_tile(n, itemsize, inputs, H200) == expected
    half = replace(expected, num_warps=expected.num_warps // 2)  # of twice as many lanes
    assert row_tile(n, itemsize, inputs, MI300X) == half


@pytest.mark.parametrize(("itemsize", "inputs"), WARPS)
@pytest.mark.parametrize("gpu", [H200, MI300X], ids=["H200", "MI300X"])
def test_row_tile_ends_where_a_program_does(itemsize, inputs, gpu):
    widest = max(WARPS[itemsize, inputs].values())
    assert row_tile(widest, itemsize, inputs, gpu) is not None
    assert row_tile(widest + 1, itemsize, inputs, gpu) is None


def test_row_tile_of_a_gpu_with_small_programs():
    small = replace(H200, max_threads_per_program=256)
    assert row_tile(14336, 4, 1, small) == row_tile(14336, 4, 1, H200)
    assert row_tile(14337, 4, 1, small) is None


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

    class Named(Launch):
        def __init__(self, kernel, *args, **options):
            made.append(kernel.__name__)
            super().__init__(kernel, *args, **options)

    monkeypatch.setattr(planning, "Launch", Named)
    monkeypatch.setattr("memtraffic.kernels.softmax.split.Launch", Named)
    with runtime.capturing_launches(H200):  # it plans for that GPU, and compiles nothing
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
    [(1, 8, 64), (63, 8, 64), (64, 8, 64), (65, 8, 64), (5, 512, 2), (5, 513, 1)],
)
def test_plan_has_programs_for_all_rows(m, n, rows):
    with runtime.capturing_launches(H200):
        run = planned(torch.empty(m, n))
    assert run.grid == (-(-m // rows), 1)


def test_plan_of_more_batches_than_a_grid_has(monkeypatch):
    monkeypatch.setattr(planning, "MAX_BATCHES", 3)
    x = torch.empty(4, 6, 8)
    assert not isinstance(planned(x[:3, :3]), Slices)
    assert isinstance(planned(x[:, :3]), Slices)
    assert not isinstance(planned(x), Slices)


# ---- compiled


def on(target, x, dim=-1, dtype=None):
    [kernel] = resources(lambda x: forward(x, dim, dtype), x, target=target)
    return kernel


def backward_on(target, y):
    [kernel] = resources(lambda y, dy: backward(dy, y, 1, y.dtype), (y, y.clone()), target=target)
    return kernel


SLOW = pytest.mark.slow


FORWARD = [  # the widest rows for each number of warps, and rows of several programs
    *product((4096, 8192, 14336, 32768, 131072), ["float32"]),
    *product((6144, 16384, 32768, 131072), ["bfloat16", "float16"]),
    *product((2048, 4096, 8192, 16384, 131072), ["float64"]),
]
BACKWARD = [
    *product((3072, 8192, 16384, 24576, 131072), ["float32"]),
    *product((1536, 6144, 12288, 16384, 32768, 131072), ["bfloat16", "float16"]),
    *product((1024, 2048, 4096, 8192, 131072), ["float64"]),
]


def cases(widths, *fast):
    return [
        pytest.param(*it, id="-".join(map(str, it)), marks=() if it in fast else SLOW)
        for it in widths
    ]


def test_compiled_widths_are_those_of_the_rule():
    for inputs, widths in ((1, FORWARD), (2, BACKWARD)):
        for name in ("float32", "bfloat16", "float64"):
            table = WARPS[getattr(torch, name).itemsize, inputs]
            assert [n for n, it in widths if it == name and n < 131072] == list(table.values())


def assert_wide_without_spills(kernel):
    assert kernel.spill_bytes == 0
    words = {64} if kernel.kernel.startswith("split") else set()
    assert set(kernel.load_bits) == {128} | words
    assert set(kernel.store_bits) == {128}


@pytest.mark.parametrize(
    ("n", "name"),
    cases(FORWARD, (14336, "float32"), (32768, "bfloat16"), (131072, "bfloat16")),
)
def test_softmax_compiles_without_spills_to_wide_loads(n, name):
    x = torch.empty(4, n, dtype=getattr(torch, name), device=DEVICE)
    assert_wide_without_spills(on("sm_90", x))


@pytest.mark.parametrize(
    ("n", "name"), cases(BACKWARD, (24576, "float32"), (32768, "bfloat16"), (131072, "float32"))
)
def test_backward_compiles_without_spills_to_wide_loads(n, name):
    y = torch.empty(4, n, dtype=getattr(torch, name), device=DEVICE)
    assert_wide_without_spills(backward_on("sm_90", y))


@pytest.mark.parametrize("n", [781, 1792, 3328, 3584, 3600, 7168, 14336, 28672])
@pytest.mark.parametrize("gpu", ["H200", "MI300X"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_registers_are_limited_where_a_forward_would_spill(n, gpu, backward, name):
    x = torch.empty(4, n, dtype=getattr(torch, name), device=DEVICE)
    tensors = [torch.empty_like(x) for _ in range(2 + backward)]
    with runtime.capturing_launches(find_gpu(gpu)):
        run = planning.plan(lambda *tensors: None, tensors, -1, backward)
    limited = (n in (3584, 7168), gpu, backward, name) == (True, "H200", False, "float32")
    assert (run.options.get("maxnreg") == 255) == limited


@pytest.mark.parametrize("n", [3584, 7168])
def test_softmax_compiles_without_the_spill_of_14_chunks(n):
    assert_wide_without_spills(on("sm_90", torch.empty(4, n, device=DEVICE)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_no_number_of_whole_chunks_spills(name):
    dtype, gpu = getattr(torch, name), find_gpu("H200")
    tiles = [(n, row_tile(n, dtype.itemsize, 1, gpu)) for n in range(128, 32769, 128)]
    widths = {tile: n for n, tile in tiles if tile and tile.block * tile.chunks == n}
    assert len(widths) > 30
    kernels = {n: on("sm_90", torch.empty(4, n, dtype=dtype)) for n in widths.values()}
    assert {n: it.spill_bytes for n, it in kernels.items() if it.spill_bytes} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("n", "name"), [(781, "float32"), *FORWARD])
def test_softmax_of_odd_rows_compiles_without_spills(n, name):
    x = torch.empty(4, n - 1 + n % 2, dtype=getattr(torch, name), device=DEVICE)
    kernel = on("sm_90", x)
    assert kernel.spill_bytes == 0
    if 781 < n < 131072:  # whole vectors, and one load for both ends of the row
        element = 8 * x.element_size()
        assert kernel.load_bits[128] == kernel.store_bits[128]
        assert kernel.load_bits[element] == kernel.store_bits[element] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("n", "name"), [(781, "float32"), *BACKWARD])
def test_backward_of_odd_rows_compiles_without_spills(n, name):
    y = torch.empty(4, n - 1 + n % 2, dtype=getattr(torch, name), device=DEVICE)
    kernel = backward_on("sm_90", y)
    assert kernel.spill_bytes == 0
    if 781 < n < 131072:  # as in the forward, of each of the two matrices
        element = 8 * y.element_size()
        assert kernel.load_bits[128] == 2 * kernel.store_bits[128]
        assert kernel.load_bits[element] == 2 * kernel.store_bits[element] == 2


@pytest.mark.slow
def test_backward_is_planned_for_the_gpu_that_it_is_compiled_for():
    """A plan of one GPU does not serve another, whose warps are wider."""
    y = torch.empty(4, 2048, device=DEVICE)
    warps = {target: backward_on(target, y).num_warps for target in ("sm_90", "gfx942", "sm_90")}
    assert warps == {"sm_90": 4, "gfx942": 2}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_75", "gfx942", "gfx1100"])
@pytest.mark.parametrize("n", [781, 131072])
def test_softmax_compiles_for_other_gpus(target, n):
    """For sm_75, NVIDIA's compiler spills a little, so that a program more fits an SM."""
    spilled = on(target, torch.empty(4, n, device=DEVICE)).spill_bytes
    assert spilled <= (40 if (target, n) == ("sm_75", 131072) else 0)


@pytest.mark.slow
def test_softmax_of_two_dtypes_compiles():
    x = torch.empty(4, 1024, dtype=torch.float64, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        assert on("sm_90", x, dtype=dtype).spill_bytes == 0
