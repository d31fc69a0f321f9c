from collections import Counter

import pytest
import torch

from memtraffic import machine
from memtraffic.judge import assert_softmax, is_softmax
from memtraffic.traffic.count import count

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from kernels import random

from memtraffic.ladder import masked, warps
from memtraffic.targets import Layout, compile_launches, launches

warps_of_32 = pytest.mark.skipif(
    machine.warp_size() != 32, reason="for warps of 32 lanes"
)


# ---- the shape of a program


@warps_of_32
@pytest.mark.parametrize(
    ("n", "itemsize", "rows", "block", "num_warps"),
    [
        pytest.param(1, 4, 512, 1, 1, id="one-column"),
        pytest.param(1, 2, 1024, 1, 1, id="one-column-of-half"),
        pytest.param(7, 4, 64, 8, 1, id="narrow"),
        pytest.param(256, 4, 2, 256, 1, id="two-rows"),
        pytest.param(512, 4, 1, 512, 1, id="one-row-of-2048-bytes"),
        pytest.param(512, 2, 2, 512, 1, id="half-as-many-bytes"),
        pytest.param(781, 4, 1, 1024, 1, id="odd"),
        pytest.param(1025, 4, 1, 2048, 2, id="one-past-block"),
        pytest.param(4096, 4, 1, 4096, 4, id="wide"),
        pytest.param(4096, 2, 1, 4096, 4, id="warps-by-columns-not-bytes"),
        pytest.param(32768, 4, 1, 32768, 32, id="widest"),
        pytest.param(32768, 2, 1, 32768, 32, id="widest-of-half"),
    ],
)
def test_the_shape_of_a_program(n, itemsize, rows, block, num_warps):
    expected = {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}
    assert warps.choose(n, itemsize) == expected


def test_a_program_of_wavefronts_has_1024_threads_too(monkeypatch):
    monkeypatch.setattr(machine, "warp_size", lambda: 64)
    assert warps.choose(32768, 2)["num_warps"] == 16
    with pytest.raises(ValueError, match=r"^warps: 32 warps, more than 16$"):
        warps.choose(4096, 4, num_warps=32)


@warps_of_32
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 3}, "rows is 3, not a power of two"),
        ({"rows": -2}, "rows is -2, not a power of two"),
        ({"num_warps": 6}, "num_warps is 6, not a power of two"),
        ({"num_warps": 64}, "64 warps, more than 32"),
        ({"num_warps": 1}, "1 x 4096 elements on 32 lanes, more than 64 a lane"),
        ({"rows": 4}, "4 x 4096 elements on 128 lanes, more than 64 a lane"),
    ],
)
def test_a_shape_that_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^warps: {message}$"):
        warps.softmax(random(2, 4096), **options)


@warps_of_32
def test_a_lane_may_hold_64_elements():
    assert warps.choose(2048, 4, num_warps=1)["num_warps"] == 1
    assert warps.choose(4096, 4, rows=2)["ROWS"] == 2


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        pytest.param((8, 4096), None, 4, id="packed"),
        pytest.param((8, 4100), None, 4, id="a-multiple-of-4"),
        pytest.param((8, 6), None, 2, id="a-multiple-of-2"),
        pytest.param((8, 781), None, 1, id="odd"),
        pytest.param((8, 4104, torch.bfloat16), None, 8, id="16-bytes-of-half"),
        pytest.param((8, 4100, torch.float16), None, 4, id="8-bytes-of-half"),
        pytest.param(random(8, 9)[:, :8], None, 1, id="odd-stride"),
        pytest.param(random(8, 10)[:, :8], None, 2, id="even-stride"),
        pytest.param(random(8, 16)[:, ::2], None, 1, id="column-stride-2"),
        pytest.param(random(8, 1).expand(8, 8), None, 1, id="column-stride-0"),
        pytest.param(random(1, 8).expand(8, 8), None, 4, id="row-stride-0"),
        pytest.param(random(8, 8)[:, :1], None, 1, id="one-column"),
        pytest.param(random(8, 8)[:, :6], random(8, 8)[:, :6], 2, id="both-padded"),
        pytest.param((8, 8), random(8, 9)[:, :8], 1, id="odd-stride-of-out"),
        pytest.param((8, 8), random(8, 16)[:, ::2], 1, id="column-stride-of-out"),
    ],
)
def test_what_divides_rows_and_strides(x, y, expected):
    x = x if isinstance(x, torch.Tensor) else random(*x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y
    assert warps.align(x, y) == expected


# ---- tiles


def ends_in_the_middle(n):
    """Numbers of rows around that of a tile of `n` columns of float32."""
    rows = warps.choose(n, 4)["ROWS"]
    return [1, rows - 1, rows, rows + 1, 2 * rows + 3]


@pytest.mark.parametrize("n", [3, 64, 256])
def test_rows_that_do_not_fill_the_last_tile(n):
    for m in ends_in_the_middle(n):
        x = random(m, n)
        assert_softmax(warps.softmax, x)
        accesses = count(warps.softmax, x, trace=True).accesses
        touched = Counter(
            (it.argument, offset) for it in accesses for offset in it.offsets
        )
        assert touched == Counter(
            (argument, at) for argument in ("x_ptr", "y_ptr") for at in range(m * n)
        )


class Launched(list):
    """Stands for a kernel: the grids that it was launched with."""

    def __getitem__(self, grid):
        self.append(grid)
        return lambda *args, **kwargs: None


def test_no_more_programs_than_tiles(monkeypatch):
    fixed, tuned = Launched(), Launched()
    monkeypatch.setattr(warps, "_warps_kernel", fixed)
    monkeypatch.setattr(warps, "tuned_kernel", lambda: tuned)
    for m in (3, 64, 65):
        warps.softmax(random(m, 32), rows=32)
        warps.softmax_tuned(random(m, 32))
    assert list(fixed) == [(1,), (2,), (3,)]
    assert [grid({"ROWS": 8}) for grid in tuned] == [(1,), (8,), (9,)]


@pytest.mark.parametrize(
    ("rows", "num_warps"), [(1, None), (None, 2), (2, 1), (8, 4), (64, 16)]
)
def test_another_shape_gives_the_same_softmax_for_the_same_traffic(rows, num_warps):
    x = random(11, 300, torch.bfloat16)

    def softmax(x):
        return warps.softmax(x, rows=rows, num_warps=num_warps)

    [launch] = launches(softmax, x)
    chosen = warps.choose(300, 2)
    assert launch.constants["ROWS"] == (rows or chosen["ROWS"])
    assert launch.options["num_warps"] == (num_warps or chosen["num_warps"])
    assert_softmax(softmax, x)
    moved = count(softmax, x)
    assert (moved.read_elements, moved.written_elements) == (x.numel(), x.numel())


def aligned(x, align):
    """The softmax of `x` by a kernel that believes `align` divides its rows."""
    y = torch.empty_like(x)
    options = warps.choose(x.shape[1], x.element_size())
    warps._warps_kernel[(triton.cdiv(x.shape[0], options["ROWS"]),)](
        y, x, *y.stride(), *x.stride(), *x.shape, ALIGN=align, **options
    )
    return y


def test_a_wrong_alignment_is_caught():
    x = random(3, 782)
    assert is_softmax(lambda x: aligned(x, warps.align(x, x)), x)
    assert not is_softmax(lambda x: aligned(x, 4), x)
    padded = random(3, 785)[:, :784]
    assert not is_softmax(lambda x: aligned(x, 4), padded)


# ---- compiled


def matrices():
    half = torch.bfloat16
    return {
        "4096": random(2, 4096),
        "4100": random(2, 4100),
        "odd": random(2, 4097),
        "half": random(2, 4104, half),
        "padded-to-odd": random(2, 4101)[:, :4100],
        "transposed": random(4096, 2).t(),
        "eight": random(2, 8),
    }


@pytest.fixture(scope="module")
def on_sm_90():
    """The resources of `warps` on sm_90 by matrix, and those of `masked` at 4100."""
    found = {name: launches(warps.softmax, x) for name, x in matrices().items()}
    found["masked"] = launches(masked.softmax, random(2, 4100))
    jobs = [(launch, "sm_90") for [launch] in found.values()]
    return dict(zip(found, compile_launches(jobs), strict=True))


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
def test_accesses_are_as_wide_as_the_matrix_permits(on_sm_90, name, loads, stores):
    kernel = on_sm_90[name]
    assert (kernel.load_bits, kernel.store_bits) == (loads, stores)


def test_packed_rows_do_not_spill(on_sm_90):
    packed = on_sm_90.keys() - {"transposed"}
    assert {on_sm_90[name].spill_bytes for name in packed} == {0}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("4096", Layout((1, 4), (1, 32), (1, 4))),
        ("half", Layout((1, 8), (1, 32), (1, 8))),
        ("odd", Layout((1, 1), (1, 32), (1, 8))),
        ("eight", Layout((1, 4), (16, 2), (1, 1))),
        ("masked", Layout((1,), (32,), (16,))),
    ],
)
def test_how_a_tile_is_dealt_out(on_sm_90, name, layout):
    assert on_sm_90[name].layout == layout


def test_a_row_of_one_warp_needs_no_shared_memory(on_sm_90):
    assert on_sm_90["eight"].shared_bytes == 0 < on_sm_90["4096"].shared_bytes


# ---- tuned


@pytest.mark.parametrize("n", [32, 781])
def test_each_tuned_configuration_moves_the_least(n):
    found = count(warps.softmax_tuned, random(3, n))
    assert (found.read_elements, found.written_elements) == (3 * n, 3 * n)
    assert [op.name for op in found.ops] == ["_warps_kernel"]


def test_each_width_is_tuned_once():
    tuner = warps.tuned_kernel()
    assert warps.tuned_kernel() is tuner
    assert {"n_cols", "ALIGN"} <= set(tuner.keys)


def test_narrow_rows_are_not_tuned():
    with pytest.raises(ValueError, match=r"^warps: 31 columns, too few to tune for$"):
        warps.softmax_tuned(random(4, 31))
    with pytest.raises(TypeError, match=r"^warps: "):
        warps.softmax_tuned(random(4, 64).int())


@warps_of_32
@pytest.mark.parametrize("block", [32, 1024, 32768])
def test_only_shapes_that_fit_are_tried(block):
    tuner = warps.tuned_kernel()
    tuner.nargs = {}
    found = {
        (config.kwargs["ROWS"], config.num_warps)
        for config in tuner.prune_configs({"BLOCK": block, "ALIGN": 4})
    }
    assert found == {
        (rows, num_warps)
        for rows in (1, 2, 4, 8)
        for num_warps in (1, 2, 4, 8, 16, 32)
        if num_warps * 32 <= rows * block <= 64 * num_warps * 32
    }
    assert found


@pytest.mark.skipif(machine.INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("n", [32, 781, 4100])
def test_the_tuned_kernel_is_right(n):
    for _ in range(2):  # the one that tunes, and one that is tuned
        assert_softmax(warps.softmax_tuned, random(67, n))
