from dataclasses import replace

import pytest
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import rule
from memtraffic.kernels.softmax.rule import row_tile, tuned

H200, MI300X = find_gpu("H200"), find_gpu("MI300X")
SHARED = H200.shared_per_program


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def test_each_tuned_number_says_where_it_is_from():
    for name, number in rule.TUNED.items():
        assert tuned(name) == number.value > 0
        assert find_gpu(number.gpu) and number.sweep, name
        year, month, day = map(int, number.date.split("-"))
        assert year >= 2026 and 1 <= month <= 12 and 1 <= day <= 31


# ---- the rungs


def test_tile_shape_refuses_more_than_64_elements_per_lane():
    assert rule.tile_shape(4096, 4, H200, rows=2).rows == 2
    assert rule.tile_shape(2048, 4, H200, num_warps=1).num_warps == 1
    with pytest.raises(ValueError, match=r"^1 x 4096 elements on 32 lanes are more than 64 per"):
        rule.tile_shape(4096, 4, H200, num_warps=1)
    with pytest.raises(ValueError, match=r"^4 x 4096 elements on 128 lanes are more than 64 per"):
        rule.tile_shape(4096, 4, H200, rows=4)


STAGES = {
    "more-fit": (16384, 16, 3),
    "two-fit-exactly": ((SHARED - 1024) // 2, 16, 3),
    "two-do-not-fit": ((SHARED - 1024) // 2 + 1, 16, 2),
    "fits-exactly": (SHARED - 1024, 16, 2),
    "one-byte-too-many": (SHARED - 1023, 16, 1),
    "narrow-accesses": (2048, 8, 1),
}


@cases(("tile_bytes", "vector_bytes", "expected"), STAGES)
def test_choose_num_stages(tile_bytes, vector_bytes, expected):
    assert rule.choose_num_stages(tile_bytes, vector_bytes, H200) == expected
    for in_registers in ("gfx950", "sm_75"):
        assert rule.choose_num_stages(tile_bytes, vector_bytes, find_gpu(in_registers)) == 1


@pytest.mark.parametrize("gpu", [H200, MI300X], ids=lambda gpu: gpu.product)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_pass_tile_is_64_bytes_per_lane(gpu, itemsize):
    tile = rule.pass_tile(2**24, itemsize, gpu)
    assert tile.block * itemsize == 64 * gpu.warp_size * tile.num_warps
    assert rule.pass_tile(5, itemsize, gpu).block == 8  # no wider than the row


# ---- the op


@settings(max_examples=150, deadline=None)
@given(
    n_cols=st.integers(1, 2**10) | st.integers(1, 2**17),
    itemsize=st.sampled_from([2, 4, 8]),
    inputs=st.sampled_from([1, 2]),
    gpu=st.sampled_from([H200, MI300X]),
    shifted=st.booleans(),
)
def test_row_tile_holds_a_row(n_cols, itemsize, inputs, gpu, shifted):
    """And its lanes load whole vectors, where a row is wider than a block."""
    tile = row_tile(n_cols, itemsize, inputs, gpu, 16 // itemsize if shifted else 1)
    if tile is None:
        assert n_cols * itemsize * inputs > 16 * 32 * tuned("lane_bytes")
        return
    assert all(map(is_power_of_two, (tile.rows, tile.block, tile.num_warps)))
    lanes = tile.num_warps * gpu.warp_size
    assert lanes <= gpu.max_threads_per_program
    constants = rule.tile_constants(tile, 1000 * tile.rows, n_cols, 1, gpu)
    assert {"ROWS", "BLOCK", "CHUNKS", "WHOLE", "ALIGN", "VECTOR", "PTX"} <= constants.keys()
    assert (constants["ROWS"], constants["BLOCK"]) == (tile.rows, tile.block)
    assert constants["WHOLE"] <= constants["CHUNKS"]
    assert constants["WHOLE"] * tile.block <= n_cols
    assert (tile.chunks - 1) * tile.block < n_cols <= tile.chunks * tile.block
    assert tile.chunks == 1 or tile.rows * tile.block * itemsize == 16 * lanes
    bytes_per_lane = tile.rows * tile.chunks * tile.block * itemsize * inputs / lanes
    assert bytes_per_lane <= tuned("lane_bytes") + 16 * inputs


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_row_tile_ends_where_a_program_does(itemsize, inputs):
    """16 warps, of which each lane has so many bytes; and on a GPU of small programs, fewer."""
    widest = 16 * 32 * tuned("lane_bytes") // itemsize // inputs
    of_gpu = {gpu: row_tile(widest, itemsize, inputs, gpu) for gpu in (H200, MI300X)}
    for gpu, tile in of_gpu.items():
        assert tile.num_warps * gpu.warp_size == 512
        assert row_tile(widest + 1, itemsize, inputs, gpu) is None
        assert row_tile(widest, itemsize, inputs, gpu, most_warps=8) is None
        assert row_tile(widest // 2, itemsize, inputs, gpu, most_warps=8) is not None
    assert replace(of_gpu[H200], num_warps=8) == of_gpu[MI300X]


FITS = {
    "a-row-of-less-than-36-KiB": (131, 9215, 4, 1, True),
    "of-36-KiB": (131, 9216, 4, 1, False),
    "a-row-for-each-SM": (132, 9216, 4, 1, True),
    "a-sum-of-float64-outgrows-half-a-word": (131, 16384, 8, 1, True),
    "8-warps": (10**6, 16384, 4, 1, True),
    "more-than-8-warps": (10**6, 16385, 4, 1, False),
    "of-the-backward": (10**6, 8193, 4, 2, False),
}


@cases(("m", "n", "itemsize", "inputs", "fits"), FITS)
def test_op_tile_leaves_rows_to_several_programs(m, n, itemsize, inputs, fits):
    assert (rule.op_tile(m, n, itemsize, inputs, H200, 1) is not None) is fits


@settings(max_examples=100, deadline=None)
@given(
    n_cols=st.integers(1, 2**11),
    n_rows=st.integers(1, 2**10) | st.integers(1, 2**20),
    itemsize=st.sampled_from([2, 4, 8]),
)
def test_op_tile_leaves_no_sm_idle(n_cols, n_rows, itemsize):
    tile = rule.op_tile(n_rows, n_cols, itemsize, 1, H200, 1)
    assert -(-n_rows // tile.rows) >= min(n_rows, H200.num_sms)
    assert is_power_of_two(tile.rows)


@settings(max_examples=100, deadline=None)
@given(n_cols=st.integers(1, 2**17), n_rows=st.integers(1, 2**20))
def test_column_tile_holds_a_row(n_cols, n_rows):
    tile = rule.column_tile(n_cols, n_rows)
    if tile is None:
        assert n_cols > 2048
        return
    assert n_cols <= tile.block < 2 * n_cols and tile.rows < 2 * n_rows
    assert all(map(is_power_of_two, (tile.rows, tile.block, tile.num_warps)))
    assert tile.rows * tile.block <= 64 * 32 * tile.num_warps
