"""What reads layouts; that they are right is asked of compiled kernels, in the tests of sectors."""

import pytest

from memtraffic.compile.layouts import Layout, read_layouts
from memtraffic.errors import CompileError

TTGIR = """
#linear = #ttg.linear<{register = [[1]], lane = [[2], [4], [0], [0], [0]], warp = [[0], [0]], block = []}>
module attributes {"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, "ttg.threads-per-warp" = 32 : i32} {
"""  # noqa: E501


def test_read_layouts():
    linear, number = read_layouts(TTGIR, ["tensor<8xf32, #linear>", "!tt.ptr<f32>"])
    assert linear == Layout((1,), (2, 4, 0, 0, 0), (0, 0)) and number is None
    with pytest.raises(CompileError, match="the layout of a load or store is not known"):
        read_layouts(TTGIR, ["tensor<8xf32, #ttg.of_tomorrow<{}>>"])
