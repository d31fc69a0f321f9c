"""Layouts by hand, and against what they mean, element by element."""

import random

import numpy as np
import pytest

from memtraffic.compile.layouts import Layout, read_layouts
from memtraffic.errors import CompileError

TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1], order = [1, 0]}>
#linear = #ttg.linear<{register = [[1]], lane = [[2], [4], [0], [0], [0]], warp = [[0], [0]], block = []}>
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 2], instrShape = [16, 8]}>
module attributes {"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, "ttg.threads-per-warp" = 32 : i32} {
"""  # noqa: E501


def test_read_layouts_of_each_form():
    blocked, linear, sliced, mma, number = read_layouts(TTGIR, [
        "tensor<4x64x!tt.ptr<f32>, #blocked>",
        "tensor<8xf32, #linear>",
        "tensor<32x!tt.ptr<i1>, #ttg.slice<{dim = 0, parent = #blocked}>>",
        "tensor<32x16x!tt.ptr<f32>, #mma>",
        "!tt.ptr<f32>",
    ])  # fmt: skip
    assert blocked == Layout((32,), (1, 2, 4, 8, 16), (64, 128))
    assert linear == Layout((1,), (2, 4, 0, 0, 0), (0, 0))
    assert sliced == Layout((), (1, 2, 4, 8, 16), (0, 0))
    # https://docs.nvidia.com/cuda/parallel-thread-execution, accumulators of mma.m16n8: four lanes
    # have eight elements of a row, two each, and again those of the row eight below.
    assert mma == Layout((1, 128), (2, 4, 16, 32, 64), (8, 256))
    assert number is None
    with pytest.raises(CompileError, match="the layout of a load or store is not known"):
        read_layouts(TTGIR, ["tensor<8xf32, #ttg.of_tomorrow<{}>>"])


@pytest.mark.parametrize("seed", range(6))
def test_layout_elements_bit_by_bit(seed):
    rng = random.Random(seed)
    size = 2 ** rng.randrange(4, 10)
    bases = [tuple(rng.choice((0, rng.randrange(size))) for _ in range(bits)) for bits in (3, 5, 2)]
    layout = Layout(*bases)
    found, seen = layout.elements(), []

    def element(register, lane, warp):
        at = 0
        for number, each in zip((register, lane, warp), bases, strict=True):
            for bit, base in enumerate(each):
                at ^= base if number & 1 << bit else 0
        return at

    first = {element(register, 0, 0): register for register in reversed(range(8))}
    registers = sorted(first.values())  # the others hold copies
    held = set()
    for warp, lane in np.ndindex(4, 32):
        assert found[warp, :, lane].tolist() == [element(r, lane, warp) for r in registers]
        held |= {element(register, lane, warp) for register in range(8)}
        if layout.holders()[warp, 0, lane]:
            seen += found[warp, :, lane].tolist()
    assert sorted(seen) == sorted(held)  # each by one lane, once


def test_layout_elements_of_vectors():
    layout = Layout((1, 2), (4, 8), ())
    assert layout.elements(4).tolist() == [[[0, 4, 8, 12]]]
    assert layout.elements(2).tolist() == [[[0, 4, 8, 12], [2, 6, 10, 14]]]
    assert np.array_equal(layout.holders(), np.ones((1, 1, 4), dtype=bool))
