"""Loads that the compiler makes again, and that NVIDIA's assembler delays, by hand."""

import pytest

from memtraffic.compile.accesses import Code, delayed_loads, read_accesses
from memtraffic.errors import CountError

LOAD, VOLATILE = "\tld.global.v4.b32 { %r1 }, [ %rd2 + 0 ];", "\t@%p1 ld.volatile.global.b32 %r1;"
JUMP, LABEL, RETURN = "\t@%p2 bra \t$L__BB0_2;", "$L__BB0_1:", "\t@!%p2 bra $L__BB0_3;"
STORE, MADE = "\tst.global.b32 [ %rd2 + 0 ], %r1;", "LDG.E.128 R8, desc[UR4][R2.64]"
GUARDED, COPIED = "@!P0 LDG.E R8, desc[UR4][R2.64]", "LDGSTS.E [R2], desc[UR4][R4.64]"
BRANCH, EXIT = "@P0 BRA 0x120", "@!UP1 EXIT"
REGION, SKIPPED = ["BSSY B0, 0x120", BRANCH], "BSYNC B0"


@pytest.mark.parametrize(
    ("ptx", "sass", "delayed"),
    [
        pytest.param([LOAD, JUMP, STORE], [MADE, BRANCH], 0, id="where-it-was"),
        pytest.param([LOAD, JUMP, STORE], [BRANCH, MADE], 1, id="behind-a-branch"),
        pytest.param([LOAD, VOLATILE, RETURN], [EXIT, GUARDED, COPIED], 2, id="behind-an-exit"),
        pytest.param([LOAD, LABEL, JUMP], [BRANCH, MADE, BRANCH], 1, id="into-a-loop"),
        pytest.param([LABEL, LOAD, JUMP], [BRANCH, MADE], 0, id="of-a-loop"),
        pytest.param([LOAD, LOAD, JUMP], [MADE, BRANCH], 0, id="left-out"),
        pytest.param([LOAD, LOAD, JUMP], [BRANCH, MADE], 1, id="left-out-and-behind-a-branch"),
        pytest.param([LOAD, LABEL, LOAD], [MADE, BRANCH, *[MADE] * 8], 0, id="unrolled"),
        pytest.param([LOAD, LABEL, LOAD], [BRANCH, *[MADE] * 9], 1, id="unrolled-and-delayed"),
        pytest.param([VOLATILE, STORE], [BRANCH, MADE, "BSYNC B0"], 0, id="branch-for-a-mask"),
        pytest.param([VOLATILE, JUMP], [*REGION, MADE, SKIPPED, BRANCH], 0, id="and-another"),
        pytest.param([LOAD, JUMP], [*REGION, MADE, SKIPPED], 1, id="no-mask"),
        pytest.param([VOLATILE, JUMP], [*REGION, GUARDED, SKIPPED], 1, id="mask-and-branch"),
        pytest.param([VOLATILE, JUMP], [*REGION, BRANCH, MADE, SKIPPED], 1, id="two-branches"),
        pytest.param([VOLATILE, LOAD, JUMP], [GUARDED, *REGION, MADE, SKIPPED], 1, id="other-mask"),
        pytest.param([VOLATILE, LOAD, JUMP], [*REGION, MADE, SKIPPED], 1, id="left-out-mask"),
    ],
)
def test_delayed_loads(ptx, sass, delayed):
    code = Code("kernel", "", "\n".join(ptx), frozenset(), frozenset(), "\n".join(sass))
    assert delayed_loads(code) == delayed


AGAIN = """
#wide = #ttg.blocked<{sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [1], order = [0]}>
#narrow = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [1], order = [0]}>
#loc1 = loc("mine.py":7:16)
    %a = tt.load %p : tensor<128x!tt.ptr<f32>, #wide> loc(#loc1)
    %b = tt.load %q : tensor<128x!tt.ptr<f32>, #narrow> loc(#loc1)
"""
WIDE, NARROW = "\tld.global.v4.b32 { %r1 }, [ %rd2 ];", "\tld.global.b32 { %r1 }, [ %rd2 ];"


def test_read_accesses_of_a_place_whose_loads_differ_in_width():
    def read(*loads, ttgir=AGAIN, bits=(32, 128)):
        ptx = "\n".join(("\t.loc\t1 7 16  // mine.py:7:16", *loads))
        return read_accesses(Code("kernel", ttgir, ptx, frozenset(bits), frozenset()))

    assert [access.bits for access in read(WIDE, *[NARROW] * 4)] == [128, 32]
    one = "\tld.global.b8 { %rs1 }, [ %rd2 ];"
    bools = read(NARROW, *[one] * 4, ttgir=AGAIN.replace("f32", "i1"), bits=(8, 32))
    assert [access.bits for access in bools] == [32, 8]
    on_amd = "\ts_load_dword s0, s[4:5], 0x0", "\ts_load_dwordx2 s[0:1], s[4:5], 0x0"
    for loads in ([NARROW, WIDE, *[NARROW] * 3], [WIDE, NARROW, NARROW], on_amd):
        with pytest.raises(CountError, match=r"the loads of mine.py:7 differ in width"):
            read(*loads)


LOOPS = """
#loc1 = loc("mine.py":7:16)
    scf.for %i = %c0 to %n step %c1  : i32 {
      %a = tt.load %p : !tt.ptr<f32> loc(#loc1)
      scf.for %j = %c0 to %n step %c1  : i32 {
        %b = tt.load %p : !tt.ptr<f32> loc(#loc1)
      } loc(#loc1)
      %c = tt.load %p : !tt.ptr<f32> loc(#loc1)
    } loc(#loc1)
    scf.for %i = %c0 to %n step %c1  : i32 {
      %d = tt.load %p : !tt.ptr<f32> loc(#loc1)
    } loc(#loc1)
    %e = tt.load %p : !tt.ptr<f32> loc(#loc1)
"""


def test_read_accesses_tells_loops_apart():
    ptx = "\t.loc\t1 7 16  // mine.py:7:16\n" + NARROW
    found = read_accesses(Code("kernel", LOOPS, ptx, frozenset({32}), frozenset()))
    outer, inner, again, other, outside = (access.loops for access in found)
    assert outer == again == inner[:1] != other
    assert [*map(len, (outer, inner, other, outside))] == [1, 2, 1, 0]


ROWS = """
#rows = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [1, 1],
 order = [1, 0]}>
#loc1 = loc("mine.py":7:16)
#loc2 = loc("mine.py":8:16)
    %a = tt.load %p : tensor<4x128x!tt.ptr<f32>, #rows> loc(#loc1)
    %b = tt.load %q : !tt.ptr<f32> loc(#loc2)
    %c = tt.load %q : !tt.ptr<f32> loc(#loc2)
""".replace(",\n ", ", ")
BLOCK_AT, NUMBER_AT = "\t.loc\t1 7 16  // mine.py:7:16", "\t.loc\t1 8 16  // mine.py:8:16"
FIRST, SECOND = (f"\t@%p1 ld.global.v4.b32 {{ %r1 }}, [ %rd{n} + 0 ];" for n in (1, 2))
UNLIKE, WHOLE = FIRST.replace("%p1", "%p3"), FIRST.replace("@%p1 ", "")
EACH_TIME, RELAXED, ACQUIRED = (
    FIRST.replace("ld", f"ld.{it}") for it in ("volatile", "relaxed.gpu", "acquire.gpu")
)
NUMBER, BARRIER = "\tld.global.b32 \t%r9, [%rd9];", "\tbar.sync \t0;"
SHARED, GLOBAL = "\t@%p2 st.shared.b32 [ %r20 ], %r21;", "\t@%p2 st.global.b32 [ %rd8 ], %r1;"
STORED = "    tt.store %q, %b : !tt.ptr<f32> loc(#loc1)\n"
LATER = [NUMBER_AT, NUMBER, BARRIER, NUMBER]
MOVED = "\tadd.s64 \t%rd10, %rd1, 20;\n\tadd.s64 \t%rd11, %rd10, -4;"
PART, BEHIND = (f"\t@%p3 ld.global.b32 \t%r9, [%rd11{offset}];" for offset in ("+-4", ""))
PARTS = [NUMBER_AT, MOVED, PART, BEHIND]
BETWEEN = {BARRIER: "barrier", GLOBAL: "store", LABEL: "label", JUMP: "branch"}
BETWEEN |= {f"\t{it} \t%r1;": it for it in ("bra.uni", "barrier.sync", "call.uni", "membar.gl")}
BETWEEN |= {f"\t{it} \t%r1;": it for it in ("atom.global.inc", "red.global.inc", "fence.acq_rel")}
OFF, ON = "\tmov.pred \t%p3, 0;", "\tmov.pred \t%p3, -1;"
BACK = "\t@%p9 bra \t$L__BB0_1;"


@pytest.mark.parametrize(
    ("ptx", "made", "merged"),
    [
        pytest.param([FIRST, SECOND] * 2 + LATER, 6, [[], [], []], id="none"),
        pytest.param([FIRST, SECOND] * 2 + LATER, 4, [[2, 3], [], []], id="in-turn"),
        pytest.param([FIRST] * 4 + LATER, 3, [[1, 2, 3], [], []], id="one-row"),
        pytest.param([WHOLE, SECOND] * 2 + PARTS, 3, [[2, 3], [0], []], id="part"),
        pytest.param([FIRST, UNLIKE] * 2 + LATER, 4, [[2, 3], [], []], id="two-masks"),
        pytest.param([FIRST, UNLIKE] * 2 + LATER, 3, None, id="masks-that-are-true"),
        pytest.param([FIRST, UNLIKE, BARRIER] * 2 + LATER, 5, None, id="no-mask-again"),
        pytest.param([FIRST, SHARED] * 4 + LATER, 3, [[1, 2, 3], [], []], id="shared-memory"),
        pytest.param([FIRST] * 4 + [NUMBER_AT, NUMBER, NUMBER], 2, [[1, 2, 3], [], [0]], id="all"),
        *(
            pytest.param([FIRST] * 2 + [between] + [FIRST] * 2 + LATER, 4, [[1, 3], [], []], id=id)
            for between, id in BETWEEN.items()
        ),
        pytest.param([EACH_TIME, FIRST] * 2 + LATER, 5, [[3], [], []], id="volatile"),
        pytest.param([RELAXED] * 2 + [ACQUIRED] * 2 + LATER, 6, [[]] * 3, id="ordered"),
        pytest.param([FIRST] * 4 + LATER + LATER[2:], 4, [[1, 2, 3], [], []], id="more-elsewhere"),
        pytest.param([EACH_TIME] * 4 + LATER, 6, [[]] * 3, id="volatile"),
        pytest.param([FIRST, WHOLE] * 2 + LATER, 3, [[0, 2, 3], [], []], id="mask-before-whole"),
        pytest.param([*PARTS, BLOCK_AT, *[WHOLE] * 4], 2, [[1, 2, 3], [0], []], id="part-before"),
        pytest.param([ON, UNLIKE, *[FIRST] * 3, *LATER], 3, [[1, 2, 3], [], []], id="true-mask"),
        pytest.param([OFF, *[UNLIKE] * 2, *[FIRST] * 2, *LATER], 3, [[3], [], []], id="no-lane"),
        pytest.param([OFF, ON, *[UNLIKE, FIRST] * 2, *LATER], 2, None, id="mask-that-changes"),
        pytest.param([FIRST, SECOND, EACH_TIME, *LATER], 4, None, id="unused"),
        pytest.param([LABEL, *[FIRST] * 4, BACK, *LATER], 3, [[1, 2, 3], [], []], id="in-a-loop"),
        pytest.param([LABEL, *[FIRST] * 4, BACK, *LATER], 6, None, id="unrolled-by-chance"),
        pytest.param([FIRST, SECOND, SECOND, EACH_TIME, *LATER], 5, [[2], [], []], id="each-time"),
        pytest.param([FIRST] * 4 + LATER, 4, None, id="some"),
        pytest.param([FIRST] * 4 + LATER, 12, None, id="unrolled"),
        pytest.param([FIRST] * 5 + LATER, 3, None, id="another-instruction"),
        pytest.param([FIRST] * 8 + LATER, 3, None, id="of-no-loop"),
    ],
)
def test_read_accesses_whose_loads_the_assembler_merges(ptx, made, merged):
    ttgir, text = ROWS + STORED * (GLOBAL in ptx), "\n".join((BLOCK_AT, *ptx))
    machine_code = "\n".join([BRANCH, *[MADE] * made])
    code = Code("kernel", ttgir, text, frozenset({32, 128}), frozenset(), machine_code)
    if merged is None:
        with pytest.raises(
            CountError, match=rf"^kernel: of \d+ loads in PTX, . .* the {made} of the"
        ):
            read_accesses(code)
    else:
        for of_copies in ("[1, 4]", "[8, 4]"):  # which the compiler leaves out
            code = code._replace(ttgir=ttgir.replace("[1, 4]", of_copies))
            found = [access for access in read_accesses(code) if access.kind == "load"]
            assert [sorted(access.merged) for access in found] == merged
