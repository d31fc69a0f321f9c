import pytest

from memtraffic.compile import amdgcn

LLVM_SAYS = """
; Kernel info:
; codeLenInByte = 20
; TotalNumSgprs: 22
; NumVgprs: 10
; NumAgprs: 40
; TotalNumVgprs: 52
; ScratchSize: 16
; LDSByteSize: 1000 bytes/workgroup (compile time only)
; NumSGPRsForWavesPerEU: 24
; NumVGPRsForWavesPerEU: 60
; Occupancy: 8
; COMPUTE_PGM_RSRC2:SCRATCH_EN: 1
"""
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
	buffer_load_dwordx4 v[0:3], v4, s[4:7], 0 offen
	s_endpgm
.Lfunc_end1:
	s_nop 0
"""


def test_usage():
    assert amdgcn.usage(LLVM_SAYS) == {
        "registers": 52,
        "spill_bytes": 16,
        "static_shared_bytes": 1000,
        "vgprs": 10,
        "agprs": 40,
        "sgprs": 22,
        "allocated_vgprs": 60,
        "allocated_sgprs": 24,
        "llvm_waves": 8,
    }


def test_usage_without_accumulators():
    """On RDNA, which has none, LLVM counts neither AGPRs nor the sum of both kinds."""
    lines = (it for it in LLVM_SAYS.splitlines() if "Agprs" not in it and "TotalNumV" not in it)
    found = amdgcn.usage("\n".join(lines))
    assert (found["registers"], found["vgprs"], found["agprs"]) == (10, 10, 0)
    assert (found["allocated_vgprs"], found["allocated_sgprs"]) == (60, 24)


def test_instructions_are_those_of_the_kernel():
    assert amdgcn.instructions(ASSEMBLY, "kernel") == [
        "s_load_dword s0, s[4:5], 0x0",
        "buffer_load_dwordx4 v[0:3], v4, s[4:7], 0 offen",
        "s_endpgm",
    ]


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        ("dwordx4", 128),
        ("lds_dwordx4", 128),
        ("dwordx2", 64),
        ("dword", 32),
        ("ushort", 16),
        ("short", 16),
        ("short_d16_hi", 16),
        ("ubyte", 8),
        ("b128", 128),
        ("b96", 96),
        ("b64", 64),
        ("b32", 32),
        ("u16", 16),
        ("d16_b16", 16),
        ("d16_hi_b16", 16),
        ("u8", 8),
    ],
)
def test_bits(suffix, expected):
    assert amdgcn.bits(suffix) == expected
