"""Bad command lines and specifications by the hundred: each gets one line and exit status 2."""

import contextlib
import io
import random
import string

import pytest

from memtraffic import progress
from memtraffic.__main__ import main

LINES = [
    ["formula", "naive"],
    ["formula", "naive", "--inputs", "M,N", "--json"],
    ["formula", "memtraffic_book.yours:rms_norm", "--inputs", "M,N N eps=1e-6"],
    ["count", "naive", "2", "3"],
    ["count", "naive", "M=2", "N=3", "--dtype", "bf16"],
    ["count", "memtraffic_book.yours:cross_entropy", "2", "3", "--inputs", "M,N M:int64<N"],
    ["resources", "fused", "--target", "sm_90", "--n", "64"],
    ["occupancy", "fused", "--target", "gfx942", "--n", "64"],
    ["report", "naive", "2", "3"],
    ["counters", "fused", "2", "4"],
    ["bench", "tiled", "--shapes", "4x8"],
    ["roof"],
]
JUNK = [
    *"-_=:,<%{}()[]'\"\\/|*&^$#@!~ \t\n",
    "", "--", "-0", "-1", "0", "1.5", "1e9", "nan", "inf", "None", "true", "M,", ",N", "M,,N",
    "M,N:", "M,N:int3", "M:int64<", "M<N", "m,n", "Ω,N", "=", "x=", "=3", "a=b=c", "x:y:z", ":",
    "a:", ":b", "..", ".a:b", "os:system", "torch:", "torch:Tensor", "sm_", "99", "naive:naive",
    "--json=3", "--n=", "--inputs", "--inputs=", "--target", "--dtype", "é", "日本", "9" * 40,
    "M,N " * 40, "A,B,C,D,E,F", "__import__:os", "memtraffic_book:nothing", "\x00", "\x7f",
    "a\nb:c",
]  # fmt: skip


def mutated(rng):
    """A command line with one to three changes of the kind that a hand or a script makes."""
    line = list(rng.choice(LINES))
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(line))
        word = line[i]
        at = rng.randrange(len(word) + 1)
        line[i : i + 1] = rng.choice(
            [
                [word[:at] + rng.choice(JUNK + list(string.printable)) + word[at:]],
                [word[:at] + word[at + 1 :]],
                [word[::-1]],
                [word.upper() if word.islower() else word.lower()],
                [rng.choice(JUNK)],
                [word, rng.choice(JUNK)],
                [word, word],
                [],
            ]
        )
        line = line or [""]
    return line


def run(line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(line)
        except SystemExit as exit:
            status = exit.code
    return status, out.getvalue(), err.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_bad_command_lines_get_one_line_and_status_2(seed, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "_enabled", False)
    monkeypatch.chdir(tmp_path)
    rng, bad = random.Random(seed), 0
    for _ in range(125):
        line = mutated(rng)
        status, out, err = run(line)
        assert "Traceback" not in out + err, line
        if status == 0:  # the change did no harm
            assert out, line
            continue
        assert (status, out) == (2, ""), line
        assert err.count("\n") == 1 and err.endswith("\n"), (line, err)
        assert err.startswith(("memtraffic: ", "usage: ", "python -m memtraffic")), (line, err)
        bad += 1
    assert bad >= 85, f"{bad} of 125 are bad: fewer than 500 of all"
