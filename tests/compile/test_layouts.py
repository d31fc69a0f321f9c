"""Layouts against Triton's own algebra, and against what they mean, element by element."""

import math
import random

import numpy as np
import pytest

from memtraffic.compile.layouts import Layout, layout_of
from memtraffic.errors import CompileError

HARDWARE = ("reg_bases", "lane_bases", "warp_bases")
BLOCKED = "#ttg.blocked<{{sizePerThread = {}, threadsPerWarp = {}, warpsPerCTA = {}, order = {}}}>"
LANES_BY_THREES = "#ttg.linear<{register = [[1]], lane = [[2], [4], [0]], warp = [], block = []}>"


def product_of(rng, total, rank):
    """`rank` powers of two whose product is `total`."""
    parts = [1] * rank
    for _ in range(int(math.log2(total))):
        parts[rng.randrange(rank)] *= 2
    return parts


def random_blocked(rng, rank):
    sizes = [product_of(rng, total, rank) for total in (2 ** rng.randrange(5), 32)]
    return [*sizes, product_of(rng, 2 ** rng.randrange(4), rank), rng.sample(range(rank), rank)]


@pytest.fixture(scope="module")
def oracle():
    """What Triton makes of a blocked layout, or of a slice of one: its bases."""
    gluon = pytest.importorskip("triton._C.libtriton.gluon_ir")
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    builder = gluon.GluonOpBuilder(context)

    def bases(blocked, shape, dims, context=context):  # which must outlive the builder
        attribute = builder.get_blocked_layout(*blocked, [])
        for dim in dims:
            attribute = builder.get_slice_layout(dim, attribute)
        return builder.to_linear_layout(attribute, list(shape))

    return bases


@pytest.mark.parametrize("seed", range(60))
def test_layout_of_is_what_triton_says(oracle, seed):
    rng = random.Random(seed)
    rank = rng.choice((1, 2, 2, 3))
    blocked = random_blocked(rng, rank)
    dims = [rng.randrange(rank)] if rank > 1 and rng.random() < 0.6 else []
    if dims and rank > 2 and rng.random() < 0.5:
        dims.append(rng.randrange(rank - 1))
    shape = tuple(2 ** rng.randrange(9) for _ in range(rank - len(dims)))
    text = BLOCKED.format(*blocked)
    for dim in dims:
        text = f"#ttg.slice<{{dim = {dim}, parent = {text}}}>"
    theirs = oracle(blocked, shape, dims)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    expected = [
        tuple(sum(a * s for a, s in zip(base, strides, strict=True)) for base in bases)
        for bases in (getattr(theirs, name) for name in HARDWARE)
    ]
    ours = layout_of(text, shape, {})
    assert [ours.registers, ours.lanes, ours.warps] == expected


def test_layout_of_finds_aliases_and_linear_forms():
    aliases = {"#linear": LANES_BY_THREES}
    assert layout_of("#linear", (8,), aliases) == Layout((8,), (1,), (2, 4, 0), ())
    sliced = layout_of("#ttg.slice<{dim = 0, parent = #blocked}>", (32,), {
        "#blocked": BLOCKED.format([1, 1], [1, 32], [4, 1], [1, 0])
    })  # fmt: skip
    assert sliced == Layout((32,), (), (1, 2, 4, 8, 16), (0, 0))


def test_layout_of_an_unknown_form():
    with pytest.raises(CompileError, match=r"#ttg\.nvidia_mma of a load"):
        layout_of("#ttg.nvidia_mma<{versionMajor = 3}>", (64, 64), {})


@pytest.mark.parametrize("seed", range(20))
def test_layout_elements_bit_by_bit(seed):
    rng = random.Random(seed)
    size = 2 ** rng.randrange(4, 10)
    bases = [
        tuple(rng.choice((0, 2 ** rng.randrange(int(math.log2(size))))) for _ in range(bits))
        for bits in (3, 5, 2)
    ]
    layout = Layout((size,), *bases)
    found, seen = layout.elements(), []

    def element(register, lane, warp):
        at = 0
        for number, each in zip((register, lane, warp), bases, strict=True):
            for bit, base in enumerate(each):
                at ^= base if number & 1 << bit else 0
        return at

    for warp in range(4):
        for lane in range(32):
            registers = [r for r in range(8) if r & layout.copies[0] == 0]
            assert found[warp, :, lane].tolist() == [element(r, lane, warp) for r in registers]
            if layout.holders()[warp, 0, lane]:
                seen += found[warp, :, lane].tolist()
    held = {element(r, lane, w) for r in range(8) for lane in range(32) for w in range(4)}
    assert sorted(seen) == sorted(held)  # each by one lane, once


def test_layout_elements_of_vectors():
    layout = Layout((16,), (1, 2), (4, 8), ())
    assert layout.elements(4).tolist() == [[[0, 4, 8, 12]]]
    assert layout.elements(2).tolist() == [[[0, 4, 8, 12], [2, 6, 10, 14]]]
    assert np.array_equal(layout.holders(), np.ones((1, 1, 4), dtype=bool))
