"""Tiles of several rows: those at the end that do not fill one take a program each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtraffic import device
from memtraffic.gpus import find_gpu
from memtraffic.kernels.launch import Launch
from memtraffic.kernels.softmax import planning
from memtraffic.kernels.softmax.planning import Tile, tile_constants, tile_programs
from memtraffic.kernels.softmax.rows import softmax_backward_kernel, softmax_kernel
from memtraffic.meters.count import count
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
        (Tile(64, 16, 1, 1), True, 11),
        (Tile(128, 8, 1, 1), True, 1),
        (Tile(4, 64, 3, 1), True, 3),  # each lane has one row, and needs no predicate for others
        (Tile(1, 1024, 1, 4), True, 11),
    ):
        constants = tile_constants(tile, 131, 1, 1, H200, packed)
        assert tile_programs(tile, 11, constants) == programs


HALVES = st.sampled_from([torch.bfloat16, torch.float16])
ENDS = st.integers(0, 7) | st.integers(0, planning.SHIFTED_FROM - 1)  # from an end of the row
INF, NAN = float("inf"), float("nan")


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(2, 13), st.integers(planning.SHIFTED_FROM, 530)),
    apart=st.integers(0, 9),
    farther=st.lists(st.tuples(*[st.integers(0, 2)] * 2), min_size=4, max_size=4),
    dtypes=st.tuples(HALVES, HALVES, HALVES),
    peaks=st.tuples(ENDS, ENDS, st.booleans()),
)
def test_halves_that_start_anywhere_are_loaded_in_whole_vectors(
    sizes, apart, farther, dtypes, peaks
):
    """What lies between the rows, and behind the last, is neither read nor written."""
    batches, m, n = sizes
    stride, of_batch = n + apart, m * (n + apart + 16) + 5
    first, second = (n - 1 - at if peaks[2] else at for at in peaks[:2])

    def rows(dtype, seed):
        """Each tensor starts its rows at another place, but as far from whole vectors."""
        steps = of_batch + 8 * farther[seed][0], stride + 8 * farther[seed][1], 1
        memory = torch.full((batches * steps[0] + 64,), NAN, dtype=dtype, device=device.default())
        x = memory.as_strided((batches, m, n), steps)
        return x.copy_(matrix(batches * m, n, seed=seed).view(x.shape)), memory

    of_x, of_y, of_dy = dtypes
    (x, _), (y, around_y), (dy, _), (dx, around_dx) = map(rows, (of_x, of_y, of_dy, of_x), range(4))
    x[:, 1::3, second], x[:, 1::3, first] = 300, 301  # equal in bfloat16
    x[:, ::5, first], x[0, 0] = 500, -INF
    for out, inputs in ((y, [x]), (dx, [y, dy])):
        launch = planning.plan(print, (out, *inputs), -1, out is dx)
        whole = stride % 8 or (batches > 1 and of_batch % 8)
        assert launch.constants["VECTOR"] == (8 if whole else 1)
        launch(out, *inputs)
        if out is y:
            assert_correct("softmax", lambda _: y.reshape(-1, n), x.to(of_y).reshape(-1, n))
            assert around_y.isnan().sum() == around_y.numel() - y.numel() + n
            y[0, 0], dy[:, 1::3, second], dy[:, 1::3, first] = 0, 300, 301
    wide, by = y.double(), dy.to(of_y).double()
    wanted = wide * (by - (wide * by).sum(dim=2, keepdim=True))
    assert (dx - wanted).abs().max() < 4 * max(torch.finfo(it).eps for it in (of_x, of_y))
    assert torch.equal(dx.to(of_y).to(of_x), dx)  # rounded to the dtype of y first
    assert around_dx.isnan().sum() == around_dx.numel() - dx.numel()
