"""The rule by which measured numbers are left out of a comparison, read as nbval reads it."""

import re
from pathlib import Path

import pytest
from nbval.plugin import get_sanitize_patterns

RULES = get_sanitize_patterns(Path(__file__).with_name("units.cfg").read_text("utf-8"))


def sanitize(text):
    for regex, replacement in RULES:
        text = re.sub(regex, replacement, text)
    return text


def test_there_is_one_rule_with_a_replacement():
    [(regex, replacement)] = RULES
    assert regex and replacement.strip()


MEASURED = ["3957 GB/s", "4.8 TB/s", "101 µs", "0.5 ms", "1.03x", "97.4 %", "-3.2 %"]
MEASURED += ["16.4 kB", "268.4 MB", "1,073.7 MB", "51.2 TFLOP/s", "12.1 FLOP/byte"]


@pytest.mark.parametrize("text", MEASURED)
@pytest.mark.parametrize(
    "around",
    ["{}", "a copy runs at {}.", "<td>{}</td>", "| {} |"],
    ids=["alone", "prose", "html", "table"],
)
def test_a_number_with_a_unit_is_replaced_and_the_unit_kept(text, around):
    [unit] = re.findall(r"x$| .*", text)
    assert sanitize(around.format(text)) == around.format(f"NUMBER{unit}")


COUNTED = ["5MN + 2M", "3 x 5", "128 bits", "sm_90", "81 reads", "268,435,456"]
COUNTED += ["2026-11-21", "PyTorch 2.11.0+cu130", "gfx90a", "0x10", "1024x1024"]
COUNTED += ["16 bytes", "3 GBs", "5 msec", "7 %s"]


@pytest.mark.parametrize("text", COUNTED)
def test_any_other_number_is_kept(text):
    assert sanitize(f"says {text}, here") == f"says {text}, here"
