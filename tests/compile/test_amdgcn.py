import pytest

from memtraffic.compile import amdgcn

ASSEMBLY = """
	.text
other:
	s_nop 0
.Lfunc_end0:
kernel:                                 ; @kernel
; %bb.0:
	s_load_dword s0, s[4:5], 0x0            ; comment
.LBB0_1:
	.loc	1 30 4
	s_endpgm
.Lfunc_end1:
	s_nop 0
"""


def test_instructions_are_those_of_the_kernel():
    expected = ["s_load_dword s0, s[4:5], 0x0", "s_endpgm"]
    assert amdgcn.instructions(ASSEMBLY, "kernel") == expected


WIDTHS = [("lds_dwordx4", 128), ("short_d16_hi", 16), ("ubyte", 8), ("b96", 96), ("u8", 8)]


@pytest.mark.parametrize(("suffix", "expected"), WIDTHS)
def test_bits(suffix, expected):
    """Beside those in the docstring."""
    assert amdgcn.bits(suffix) == expected
