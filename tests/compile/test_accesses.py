"""Loads that NVIDIA's assembler may leave out or delay, by hand."""

import pytest

from memtraffic.compile.accesses import Code, delayed_loads, read_accesses
from memtraffic.errors import CountError
from memtraffic.residency import Resources

LOAD, VOLATILE = "\tld.global.v4.b32 { %r1 }, [ %rd2 + 0 ];", "\t@%p1 ld.volatile.global.b32 %r1;"
JUMP, LABEL, RETURN = "\t@%p2 bra \t$L__BB0_2;", "$L__BB0_1:", "\t@!%p2 bra $L__BB0_3;"
STORE, MADE = "\tst.global.b32 [ %rd2 + 0 ], %r1;", "LDG.E.128 R8, desc[UR4][R2.64]"
GUARDED, COPIED = "@!P0 LDG.E R8, desc[UR4][R2.64]", "LDGSTS.E [R2], desc[UR4][R4.64]"
BRANCH, EXIT = "@P0 BRA 0x120", "@!UP1 EXIT"


def code_of(ptx, ttgir="", sass=(), **widths):
    """The code of a kernel. widths: as of `Resources`."""
    used = Resources("kernel", "sm_90", 1, 32, 0, 0, **widths)
    return Code(used, ttgir, "\n".join(ptx), "\n".join(sass))


@pytest.mark.parametrize(
    ("ptx", "sass", "delayed"),
    [
        pytest.param([LOAD, JUMP, STORE], [MADE, BRANCH], 0, id="where-it-was"),
        pytest.param([LOAD, VOLATILE, RETURN], [EXIT, GUARDED, COPIED], 2, id="behind-an-exit"),
        pytest.param([LOAD, LABEL, JUMP], [BRANCH, MADE, BRANCH], 1, id="into-a-loop"),
        pytest.param([LABEL, LOAD, JUMP], [BRANCH, MADE], 0, id="of-a-loop"),
        pytest.param([LOAD, LABEL, LOAD], [MADE, BRANCH, *[MADE] * 8], 0, id="unrolled"),
        pytest.param([LOAD, LABEL, LOAD], [BRANCH, *[MADE] * 9], 1, id="unrolled-and-delayed"),
        pytest.param([VOLATILE, STORE], [BRANCH, MADE, "BSYNC B0"], 0, id="branch-for-a-mask"),
    ],
)
def test_delayed_loads(ptx, sass, delayed):
    assert delayed_loads(code_of(ptx, sass=sass)) == delayed


PLACE, NARROW = "\t.loc\t1 7 16  // mine.py:7:16", "\tld.global.b32 { %r1 }, [ %rd2 ];"


@pytest.mark.parametrize("ptx", [
    [NARROW, LOAD],
    ["\ts_load_dword s0, s[4:5], 0x0", "\ts_load_dwordx2 s[0:1], s[4:5], 0x0"],  # on AMD
])  # fmt: skip
def test_read_accesses_of_a_place_whose_loads_differ_in_width(ptx):
    ttgir = '    %a = tt.load %p : !tt.ptr<f32> loc("mine.py":7:16)\n'
    with pytest.raises(CountError, match=r"the loads of mine.py:7 differ in width"):
        read_accesses(code_of([PLACE, *ptx], ttgir, load_bits={32: 1, 128: 1}))


ROWS = """
#rows = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [1, 1],
 order = [1, 0]}>
#loc1 = loc("mine.py":7:16)
    %a = tt.load %p : tensor<4x128x!tt.ptr<f32>, #rows> loc(#loc1)
""".replace(",\n ", ", ")
FIRST, SECOND = (f"\t@%p1 ld.global.v4.b32 {{ %r1 }}, [ %rd{n} + 0 ];" for n in (1, 2))
BEHIND, MOVED = FIRST.replace("+ 0", "+ 16"), "\tadd.s64 \t%rd10, %rd1, 20;"
INSIDE = "\tadd.s64 \t%rd11, %rd10, -4;\n\t@%p3 ld.global.v4.b32 \t{ %r9 }, [%rd11+-4];"
BACK = "\t@%p9 bra \t$L__BB0_1;"


@pytest.mark.parametrize(
    ("ptx", "made", "known"),
    [
        pytest.param([FIRST, FIRST], 2, True, id="each-again"),
        pytest.param([LABEL, FIRST, SECOND, BACK], 8, True, id="unrolled"),
        pytest.param([LABEL, FIRST, BEHIND, BACK], 8, True, id="unrolled-beside-another"),
        pytest.param([LABEL, FIRST, SECOND, FIRST, BACK], 8, False, id="unrolled-and-merged"),
        pytest.param([LABEL, FIRST, FIRST, BACK], 2, False, id="unrolled-and-as-many-by-chance"),
        pytest.param([LABEL, FIRST, MOVED, INSIDE, BACK], 8, False, id="inside-of-another"),
    ],
)
def test_read_accesses_refuses_loads_that_may_not_be_made(ptx, made, known):
    code = code_of([PLACE, *ptx], ROWS, load_bits={128: made})
    if known:
        assert [access.bits for access in read_accesses(code)] == [128]
    else:
        with pytest.raises(CountError, match=rf"^kernel: of . loads in PTX, . .* the {made} of"):
            read_accesses(code)
