"""Tiles of several rows: those at the end that do not fill one take a program each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic.gpus import find_gpu
from memtraffic.kernels.launch import Launch
from memtraffic.kernels.softmax import planning
from memtraffic.kernels.softmax.planning import Tile, tile_constants, tile_programs
from memtraffic.kernels.softmax.rows import softmax_backward_kernel, softmax_kernel
from memtraffic.meters.count import count
from memtraffic.runtime import device
from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct

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


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(2, 40),
    n=st.integers(planning.SHIFTED_FROM, 530).filter(lambda n: n % 8),
    apart=st.integers(0, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_halves_that_start_anywhere_are_loaded_in_whole_vectors(m, n, apart, dtype):
    """What lies between the rows, and behind the last, is neither read nor written."""
    stride, size = n + apart, m * (n + apart) + 64

    def rows(seed):
        memory = torch.full((size,), float("nan"), dtype=dtype, device=device())
        x = memory.as_strided((m, n), (stride, 1))
        return x.copy_(matrix(m, n, seed=seed)), memory

    (x, _), (dy, _) = rows(0), rows(1)
    (y, of_y), (dx, of_dx) = rows(2), rows(3)
    for out, inputs, dim in ((y, (x,), -1), (dx, (dy, y), -1)):
        launch = planning.plan(print, (out, *inputs[::-1]), dim, len(inputs) == 2)
        constants = launch.constants
        assert constants["VECTOR"] == (8 if stride % 8 else 1)
        launch(out, *inputs[::-1])
    assert_correct("softmax", lambda x: y, x)
    wide, by = y.double(), dy.double()
    wanted = wide * (by - (wide * by).sum(dim=1, keepdim=True))
    assert (dx - wanted).abs().max() < 4 * torch.finfo(dtype).eps
    for memory in (of_y, of_dx):
        assert memory.isnan().sum() == size - m * n
