"""What is special about the rung `chunks`: the chunks that a row of some width takes."""

from dataclasses import replace

import pytest
import torch
from cases import cases

from memtraffic import device
from memtraffic.compile.launches import capture_launches
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import chunks
from memtraffic.kernels.softmax.rule import row_tile, tile_constants

H200 = find_gpu("H200")


def empty(m, n, dtype=torch.float32):
    return torch.empty(m, n, dtype=dtype, device=device.default())


MATRICES = {
    "wide": (empty(8, 12672), 4, 1),
    "odd": (empty(8, 8321, torch.bfloat16), 1, 8),
    "transposed": (empty(8, 8320).t(), 1, 1),
    "narrow-and-odd": (empty(80, 77), 1, 4),
}


@cases(("x", "align", "vector"), MATRICES)
def test_softmax_takes_the_chunks_of_the_rule(x, align, vector):
    (m, n), [launch] = x.shape, capture_launches(chunks.softmax, x, gpu=H200)
    tile = row_tile(n, x.element_size(), 1, H200, vector)
    with device.capturing_launches(H200):
        constants = tile_constants(tile, m, n, align, H200)
    assert constants.items() <= launch.constants.items()  # Triton makes one of each stride of 1
    assert launch.options["num_warps"] == tile.num_warps


def test_softmax_of_rows_that_no_program_holds():
    small = replace(H200, max_threads_per_program=256)
    with pytest.raises(ValueError, match=r"^chunks: 32768 columns do not fit .* an H200$"):
        capture_launches(chunks.softmax, empty(2, 32768), gpu=small)
