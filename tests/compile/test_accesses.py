"""Loads that NVIDIA's assembler moves behind a branch, by hand."""

import pytest

from memtraffic.compile.accesses import Code, delayed_loads

LOAD, VOLATILE = "\tld.global.v4.b32 { %r1 }, [ %rd2 + 0 ];", "\t@%p1 ld.volatile.global.b32 %r1;"
JUMP, LABEL, RETURN = "\t@%p2 bra \t$L__BB0_2;", "$L__BB0_1:", "\t@!%p2 bra $L__BB0_3;"
STORE, MADE = "\tst.global.b32 [ %rd2 + 0 ], %r1;", "LDG.E.128 R8, desc[UR4][R2.64]"
GUARDED, COPIED = "@!P0 LDG.E R8, desc[UR4][R2.64]", "LDGSTS.E [R2], desc[UR4][R4.64]"
BRANCH, EXIT = "@P0 BRA 0x120", "@!UP1 EXIT"


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
    ],
)
def test_delayed_loads(ptx, sass, delayed):
    code = Code("kernel", "", "\n".join(ptx), frozenset(), frozenset(), sass)
    assert delayed_loads(code) == delayed
