from dataclasses import replace

import pytest
import torch

from memtraffic.gpus import GPUS, find_gpu
from memtraffic.kernels.tiling import (
    Tiling,
    choose_num_stages,
    common_divisor,
    max_warps,
    num_warps_of_row,
    tile_shape,
)
from memtraffic.tensors import matrix

H200, MI300X = find_gpu("H200"), find_gpu("MI300X")
SHARED = H200.shared_per_program


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.product)
def test_max_warps_are_1024_threads(gpu):
    assert max_warps(gpu) == (16 if gpu.target.startswith("gfx9") else 32)


@pytest.mark.parametrize(("n", "warps"), [(1, 4), (2048, 4), (4096, 8), (16384, 32), (32768, 32)])
def test_num_warps_of_row_gives_a_thread_at_most_32_elements(n, warps):
    assert num_warps_of_row(n, H200) == warps
    assert n <= 32 * 32 * warps
    assert num_warps_of_row(n, MI300X) == min(16, warps)


@pytest.mark.parametrize(
    ("n", "itemsize", "rows", "block", "num_warps"),
    [
        pytest.param(1, 4, 512, 1, 1, id="one-column"),
        pytest.param(7, 4, 64, 8, 1, id="narrow"),
        pytest.param(256, 4, 2, 256, 1, id="two-rows"),
        pytest.param(512, 4, 1, 512, 1, id="one-row-of-2048-bytes"),
        pytest.param(512, 2, 2, 512, 1, id="half-as-many-bytes"),
        pytest.param(1025, 4, 1, 2048, 2, id="one-past-block"),
        pytest.param(4096, 4, 1, 4096, 4, id="wide"),
        pytest.param(4096, 2, 1, 4096, 4, id="warps-by-columns-not-bytes"),
        pytest.param(32768, 4, 1, 32768, 32, id="widest"),
    ],
)
def test_tile_shape(n, itemsize, rows, block, num_warps):
    assert tile_shape(n, itemsize, H200) == Tiling(rows, block, num_warps, align=1, stages=1)


def test_tile_shape_of_wavefronts():
    assert tile_shape(32768, 2, MI300X).num_warps == 16
    with pytest.raises(ValueError, match="32, more than 16 on MI300X"):
        tile_shape(4096, 4, MI300X, num_warps=32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 3}, "rows is 3, not a power of two"),
        ({"rows": -2}, "rows is -2, not a power of two"),
        ({"num_warps": 6}, "num_warps is 6, not a power of two"),
        ({"num_warps": 64}, "num_warps is 64, more than 32 on H200"),
        ({"num_warps": 1}, "1 x 4096 elements on 32 lanes are more than 64 per lane"),
        ({"rows": 4}, "4 x 4096 elements on 128 lanes are more than 64 per lane"),
    ],
)
def test_tile_shape_refuses(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        tile_shape(4096, 4, H200, **options)


def test_tile_shape_allows_64_elements_per_lane():
    assert tile_shape(2048, 4, H200, num_warps=1).num_warps == 1
    assert tile_shape(4096, 4, H200, rows=2).rows == 2


def test_constants_are_those_of_the_tiling():
    tiling = tile_shape(256, 4, H200)
    assert tuple(tiling.constants.values()) == (2, 256, 1, 1)
    changed = {"ROWS": 2, "BLOCK": 256, "ALIGN": 4, "STAGES": 3}
    assert replace(tiling, align=4, stages=3).constants == changed


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        pytest.param((8, 4096), None, 4, id="packed"),
        pytest.param((8, 6), None, 2, id="a-multiple-of-2"),
        pytest.param((8, 781), None, 1, id="odd"),
        pytest.param((8, 4104, torch.bfloat16), None, 8, id="16-bytes-of-half"),
        pytest.param(matrix(8, 9)[:, :8], None, 1, id="odd-stride"),
        pytest.param(matrix(8, 10)[:, :8], None, 2, id="even-stride"),
        pytest.param(matrix(8, 16)[:, ::2], None, 1, id="column-stride-2"),
        pytest.param(matrix(1, 16)[:, ::2], None, 1, id="column-stride-2-of-one-row"),
        pytest.param(matrix(8, 1).expand(8, 8), None, 1, id="column-stride-0"),
        pytest.param(matrix(1, 8).expand(8, 8), None, 4, id="row-stride-0"),
        pytest.param(matrix(8, 8)[:, :1], None, 1, id="one-column"),
        pytest.param((8, 8), matrix(8, 9)[:, :8], 1, id="odd-stride-of-out"),
        pytest.param((8, 8), matrix(8, 16)[:, ::2], 1, id="column-stride-of-out"),
    ],
)
def test_common_divisor(x, y, expected):
    x = x if isinstance(x, torch.Tensor) else matrix(*x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y
    assert common_divisor(x, y) == expected


@pytest.mark.parametrize(
    ("tile_bytes", "vector_bytes", "expected"),
    [
        pytest.param(16384, 16, 3, id="three-fit"),
        pytest.param(131072, 16, 2, id="one-more-fits"),
        pytest.param(262144, 16, 1, id="none-more-fits"),
        pytest.param(SHARED - 1024, 16, 2, id="fits-exactly"),
        pytest.param(SHARED - 1023, 16, 1, id="one-byte-too-many"),
        pytest.param((SHARED - 1024) // 2, 16, 3, id="two-fit-exactly"),
        pytest.param((SHARED - 1024) // 2 + 1, 16, 2, id="two-do-not-fit"),
        pytest.param(2048, 8, 1, id="narrow-accesses"),
    ],
)
def test_choose_num_stages(tile_bytes, vector_bytes, expected):
    assert choose_num_stages(tile_bytes, vector_bytes, H200) == expected
    for in_registers in ("gfx950", "sm_75"):
        assert choose_num_stages(tile_bytes, vector_bytes, find_gpu(in_registers)) == 1
