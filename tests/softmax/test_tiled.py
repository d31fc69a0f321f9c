from unittest.mock import MagicMock, call

import pytest

from memtraffic.compile import resources
from memtraffic.kernels.softmax import tiled
from memtraffic.residency import BlockedLayout
from memtraffic.tensors import matrix


def test_softmax_launches_no_more_programs_than_tiles(monkeypatch):
    """One too many would touch nothing."""
    kernel = MagicMock()
    monkeypatch.setattr(tiled, "_softmax_tiled_kernel", kernel)
    for m in (3, 64, 65):
        tiled.softmax(matrix(m, 32), rows=32)
    assert kernel.__getitem__.call_args_list == [call((1,)), call((2,)), call((3,))]


# ---- compiled


ON_SM_90 = {  # the matrix, the bits of loads and of stores, the layout of a tile
    "4096": (matrix(2, 4096), {128: 8}, {128: 8}, BlockedLayout((1, 4), (1, 32), (1, 4))),
    "odd": (matrix(2, 4097), {32: 32}, {32: 32}, BlockedLayout((1, 1), (1, 32), (1, 8))),
    "half": (
        matrix(2, 4104, "bfloat16"), {128: 4}, {128: 4}, BlockedLayout((1, 8), (1, 32), (1, 8)),
    ),
    "padded-to-odd": (
        matrix(2, 4101)[:, :4100], {32: 32}, {32: 32}, BlockedLayout((1, 1), (1, 32), (1, 8)),
    ),
    "eight": (matrix(2, 8), {128: 4}, {128: 4}, BlockedLayout((1, 4), (16, 2), (1, 1))),
}  # fmt: skip


@pytest.mark.slow
def test_softmax_accesses_are_as_wide_as_the_matrix_permits():
    xs = tuple(x for x, *_ in ON_SM_90.values())
    compiled = resources(lambda *xs: [*map(tiled.softmax, xs)], xs, target="sm_90")
    kernels = dict(zip(ON_SM_90, compiled, strict=True))
    for name, (_, *expected) in ON_SM_90.items():
        kernel = kernels[name]
        assert [kernel.load_bits, kernel.store_bits, kernel.layout] == expected, name
        assert kernel.spill_bytes == 0
    # One warp exchanges nothing.
    assert kernels["eight"].shared_bytes == 0 < kernels["4096"].shared_bytes
