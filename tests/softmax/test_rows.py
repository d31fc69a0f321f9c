"""Tiles of several rows: those at the end that do not fill one take a program each."""

import pytest
import torch

from memtraffic.gpus import find_gpu
from memtraffic.kernels.launch import Launch
from memtraffic.kernels.softmax.planning import Tile, tile_constants, tile_programs
from memtraffic.kernels.softmax.rows import softmax_backward_kernel, softmax_kernel
from memtraffic.meters.count import count
from memtraffic.tensors import matrix

H200 = find_gpu("H200")


def launched(kernel, tile, packed=True):
    def run(*tensors):
        out = torch.full_like(tensors[0], float("nan"))
        n_rows, n_cols = out.shape
        constants = tile_constants(tile, n_cols, 1, 1, H200, packed) | {"PTX": False}
        programs = tile_programs(tile, n_rows, constants)
        strides = [it for x in (out, *tensors) for it in (x, 0, *x.stride())]
        Launch(
            kernel, (programs, 1), (*strides, n_rows, n_cols), constants, num_warps=1
        )(out, *tensors)  # fmt: skip
        return out

    return run


@pytest.mark.parametrize("m", [1, 3, 4, 11, 12])
@pytest.mark.parametrize(
    "tile",
    [Tile(4, 256, 1, 1), Tile(4, 64, 3, 1), Tile(8, 256, 1, 1), Tile(16, 256, 1, 1)],
    ids=str,
)
def test_each_row_is_computed_once(m, tile):
    x, dy = matrix(m, 131), matrix(m, 131, seed=1)
    y = torch.softmax(x, dim=1)
    forward = launched(softmax_kernel, tile)
    assert torch.allclose(forward(x), y)
    dx = y * (dy - (y * dy).sum(dim=1, keepdim=True))
    backward = launched(softmax_backward_kernel, tile)
    assert torch.allclose(backward(y, dy), dx, atol=1e-6)
    for fn, inputs in ((forward, (x,)), (backward, (y, dy))):
        *_, kernel = count(fn, inputs).ops
        size = m * 131
        assert (kernel.read_elements, kernel.written_elements) == (size * len(inputs), size)


def test_tiles_of_few_packed_rows_alone_leave_rows_to_programs_of_their_own():
    for tile, packed, programs in (
        (Tile(4, 256, 1, 1), True, 2 + 3),
        (Tile(4, 256, 1, 1), False, 3),  # a column alone would touch as many sectors as four
        (Tile(16, 64, 1, 1), True, 1),
        (Tile(4, 64, 3, 1), True, 3),  # each lane has one row, and needs no predicate for others
        (Tile(1, 1024, 1, 4), True, 11),
    ):
        constants = tile_constants(tile, 131, 1, 1, H200, packed)
        assert tile_programs(tile, 11, constants) == programs
