import subprocess
from pathlib import Path

import pytest

from memtraffic.compile import sass
from memtraffic.compile.compiler import _name
from memtraffic.gpus import find_gpu


@pytest.mark.parametrize(
    ("suffixes", "expected"),
    [
        (".128.SYS", 128),
        (".64", 64),
        ("", 32),
        (".U16", 16),
        (".U8.CONSTANT", 8),
        (".S8", 8),
        (".S16", 16),
        (".ENL2.256", 256),
        (".LTC128B.64", 64),
    ],
)
def test_bits(suffixes, expected):
    assert sass.bits(suffixes) == expected


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("LDG.E R1, [R2]", "LDG.E"),
        ("@P0 LDG.E R1, [R2]", "LDG.E"),
        ("@!UP1 UMOV UR4, 0x1", "UMOV"),
        ("@!PT  EXIT", "EXIT"),
        ("EXIT", "EXIT"),
    ],
)
def test_name_is_without_the_predicate(instruction, expected):
    assert _name(instruction) == expected


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            "        /*0040*/   @P2 LDG.E.128 R8, desc[UR8][R46.64] ;   /* 0x0c1e */",
            id="sm_90",
        ),
        pytest.param(
            "    /*0040*/  @P2 LDG.E.128 R8, desc[UR8][R46.64]  &wr=0x4  ?trans1;  /* 0x0c1e */",
            id="sm_120-waits-and-transitions",
        ),
        pytest.param(
            "    /*12340*/  @P2 LDG.E.128 R8, desc[UR8][R46.64] ;  /* 0x0c1e */",
            id="address-of-five-digits",
        ),
    ],
)
def test_instructions_are_without_what_follows_them(line):
    code = f"\t.headerflags\n{line}\n        /* 0x000ea2000c1e1d00 */\n"
    assert sass.instructions(code) == ["@P2 LDG.E.128 R8, desc[UR8][R46.64]"]


@pytest.mark.parametrize(("target", "static"), [("sm_89", 1040), ("sm_90", 16), ("sm_100", 16)])
def test_usage_from_sm_90_on_is_without_the_reserved_kilobyte(target, static):
    text = " Function k:\n  REG:26 STACK:8 SHARED:1040 LOCAL:16 CONSTANT[0]:568 TEXTURE:0\n"
    assert sass.usage(text, find_gpu(target)) == {
        "registers": 26,
        "spill_bytes": 24,
        "static_shared_bytes": static,
    }


def test_read_of_what_is_no_machine_code():
    with pytest.raises(subprocess.CalledProcessError):
        sass.read({"cubin": b"no cubin"}, "k", find_gpu("sm_90"))


def test_disassembler_is_asked_once_about_each_binary(tmp_path):
    """By the script through which these tests call it, with one that counts how often it is."""
    script = Path(__file__).parents[1] / "cuobjdump"
    calls, asked = tmp_path / "calls", tmp_path / "asked"
    calls.write_text(f'#!/bin/sh\necho "$@" >> {asked}\ntest -s "$2" && cat "$2"\n')
    calls.chmod(0o755)
    environment = {"CUOBJDUMP": str(calls), "CUOBJDUMP_ANSWERS": str(tmp_path)}

    def ask(option, name, binary):
        (tmp_path / name).write_text(binary)
        command = [script, option, tmp_path / name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.stdout, done.returncode, len(asked.read_text().splitlines())

    assert ask("-sass", "first", "one") == ("one", 0, 1)
    assert ask("-sass", "another-name", "one") == ("one", 0, 1)
    assert ask("-sass", "first", "two") == ("two", 0, 2)
    assert ask("-res-usage", "first", "two") == ("two", 0, 3)
    assert [ask("-sass", "none", "") for _ in range(2)] == [("", 1, 4), ("", 1, 5)]
