import pytest
import torch
import triton

from memtraffic.compile import BlockedLayout, capture_launches, compile_launches
from memtraffic.gpus import DEFAULT_GPU, find_gpu, planning_gpu
from memtraffic.kernels.softmax import masked, tiled
from memtraffic.kernels.tiling import common_divisor, tile_shape
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.testing import assert_softmax, assert_touches_once, is_softmax


@pytest.mark.parametrize("n", [3, 64, 256])
def test_softmax_when_rows_do_not_fill_the_last_tile(n):
    rows = tile_shape(n, 4, DEFAULT_GPU).rows
    for m in (1, rows - 1, rows, rows + 1, 2 * rows + 3):
        x = matrix(m, n)
        assert_softmax(tiled.softmax, x)
        traffic = count(tiled.softmax, x, trace=True)
        assert_touches_once(traffic, "x_ptr", x.numel())
        assert_touches_once(traffic, "y_ptr", x.numel())


def test_softmax_launches_no_more_programs_than_tiles(monkeypatch):
    class Kernel(list):
        def __getitem__(self, grid):
            self.append(grid)
            return lambda *args, **options: None

    grids = Kernel()
    monkeypatch.setattr(tiled, "_softmax_tiled_kernel", grids)
    for m in (3, 64, 65):
        tiled.softmax(matrix(m, 32), rows=32)
    assert list(grids) == [(1,), (2,), (3,)]


@pytest.mark.parametrize(("rows", "num_warps"), [(1, None), (None, 2), (2, 1), (8, 4), (64, 16)])
def test_softmax_of_another_tile_is_the_same_for_the_same_traffic(rows, num_warps):
    x = matrix(11, 300, "bfloat16")

    def softmax(x):
        return tiled.softmax(x, rows=rows, num_warps=num_warps)

    [launch] = capture_launches(softmax, x)
    default = tile_shape(300, 2, planning_gpu(x))
    assert launch.constants["ROWS"] == (rows or default.rows)
    assert launch.options["num_warps"] == (num_warps or default.num_warps)
    assert_softmax(softmax, x)
    traffic = count(softmax, x)
    assert (traffic.read_elements, traffic.written_elements) == (x.numel(), x.numel())


def test_softmax_refuses_a_tile_that_is_too_large():
    with pytest.raises(ValueError, match="8 x 4096 elements on 32 lanes"):
        tiled.softmax(matrix(2, 4096), rows=8, num_warps=1)


def test_softmax_plans_for_the_gpu_it_is_given():
    x = matrix(2, 32768)
    [launch] = capture_launches(tiled.softmax, x, gpu=find_gpu("MI300X"))
    assert launch.options["num_warps"] == 16


def test_softmax_tiled_kernel_of_a_wrong_alignment():
    def aligned(x, align):
        y, tile = torch.empty_like(x), tile_shape(x.shape[1], 4, planning_gpu(x))
        tiled._softmax_tiled_kernel[(triton.cdiv(x.shape[0], tile.rows),)](
            y, *y.stride(), x, *x.stride(), *x.shape,
            ROWS=tile.rows, BLOCK=tile.block, ALIGN=align, num_warps=tile.num_warps,
        )  # fmt: skip
        return y

    x = matrix(3, 782)
    assert is_softmax(lambda x: aligned(x, common_divisor(x, x)), x)
    assert not is_softmax(lambda x: aligned(x, 4), x)
    assert not is_softmax(lambda x: aligned(x, 4), matrix(3, 785)[:, :784])


# ---- compiled


@pytest.fixture(scope="module")
def on_sm_90():
    """The resources of `tiled` on sm_90 by matrix, and those of `masked` at 4100 columns."""
    matrices = {
        "4096": matrix(2, 4096),
        "4100": matrix(2, 4100),
        "odd": matrix(2, 4097),
        "half": matrix(2, 4104, "bfloat16"),
        "padded-to-odd": matrix(2, 4101)[:, :4100],
        "transposed": matrix(4096, 2).t(),
        "eight": matrix(2, 8),
    }
    launches = {name: capture_launches(tiled.softmax, x) for name, x in matrices.items()}
    launches["masked"] = capture_launches(masked.softmax, matrices["4100"])
    compiled = compile_launches([(launch, "sm_90") for [launch] in launches.values()])
    return dict(zip(launches, compiled, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [
        ("4096", {128: 8}, {128: 8}),
        ("4100", {128: 8}, {128: 8}),
        ("odd", {32: 32}, {32: 32}),
        ("half", {128: 4}, {128: 4}),
        ("padded-to-odd", {32: 32}, {32: 32}),
        ("transposed", {32: 32}, {128: 8}),
        ("eight", {128: 4}, {128: 4}),
        ("masked", {32: 16}, {32: 16}),
    ],
)
def test_softmax_accesses_are_as_wide_as_the_matrix_permits(on_sm_90, name, loads, stores):
    assert (on_sm_90[name].load_bits, on_sm_90[name].store_bits) == (loads, stores)


@pytest.mark.slow
def test_softmax_of_packed_rows_does_not_spill(on_sm_90):
    packed = on_sm_90.keys() - {"transposed"}
    assert {on_sm_90[name].spill_bytes for name in packed} == {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("4096", BlockedLayout((1, 4), (1, 32), (1, 4))),
        ("half", BlockedLayout((1, 8), (1, 32), (1, 8))),
        ("odd", BlockedLayout((1, 1), (1, 32), (1, 8))),
        ("eight", BlockedLayout((1, 4), (16, 2), (1, 1))),
        ("masked", BlockedLayout((1,), (32,), (16,))),
    ],
)
def test_softmax_layout_of_a_tile(on_sm_90, name, layout):
    assert on_sm_90[name].layout == layout


@pytest.mark.slow
def test_softmax_of_one_warp_needs_no_shared_memory(on_sm_90):
    assert on_sm_90["eight"].shared_bytes == 0 < on_sm_90["4096"].shared_bytes
