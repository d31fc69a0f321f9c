import subprocess

import pytest

from memtraffic.compile import sass
from memtraffic.gpus import find_gpu


@pytest.mark.parametrize(
    "line",
    [
        "        /*0040*/   @P2 LDG.E.128 R8, desc[UR8][R46.64] ;   /* 0x0c1e */",
        "    /*0040*/  @P2 LDG.E.128 R8, desc[UR8][R46.64]  &wr=0x4  ?trans1;  /* 0x0c1e */",
        "    /*12340*/  @P2 LDG.E.128 R8, desc[UR8][R46.64] ;  /* 0x0c1e */",
    ],
    ids=["sm_90", "sm_120-waits-and-transitions", "address-of-five-digits"],
)
def test_instructions_are_without_what_follows_them(line):
    code = f"\t.headerflags\n{line}\n        /* 0x000ea2000c1e1d00 */\n"
    assert sass.instructions(code) == ["@P2 LDG.E.128 R8, desc[UR8][R46.64]"]


@pytest.mark.parametrize(
    ("target", "shared", "static"), [("sm_89", 1040, 1040), ("sm_90", 1040, 16), ("sm_120", 0, 0)]
)
def test_usage_from_sm_90_on_is_without_the_reserved_kilobyte(target, shared, static):
    text = f" Function k:\n  REG:26 STACK:8 SHARED:{shared} LOCAL:16 CONSTANT[0]:568 TEXTURE:0\n"
    assert sass.usage(text, find_gpu(target)) == {
        "registers": 26,
        "spill_bytes": 24,
        "static_shared_bytes": static,
    }


def test_read_of_what_is_no_machine_code():
    with pytest.raises(subprocess.CalledProcessError):
        sass.read({"cubin": b"no cubin"}, "k", find_gpu("sm_90"))
