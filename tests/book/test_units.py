"""Units of measured numbers, and the rule that leaves the numbers out, read as nbval reads it."""

import json
import re
from pathlib import Path

import pytest

from memtraffic_book import units
from memtraffic_book.catalog import EXPERIMENTS

BOOK = Path(__file__).resolve().parents[2] / "book"

# What looks like a unit of time, memory, rate, energy or frequency, after a number and a space.
LIKE_A_UNIT = re.compile(
    r"(?<![\w.])\d[\d,.]* ((?:[kKMGTPµumn]i?)?(?:B|s|sec|Hz|FLOPs?|W|J)(?:/\w+)?|%)(?![\w/])"
)


@pytest.fixture(scope="module")
def sanitize():
    """What is left of a text after nbval's rules."""
    nbval = pytest.importorskip("nbval.plugin")
    rules = nbval.get_sanitize_patterns(units.sanitize_rule())
    assert len(rules) == 2 and all(regex and replacement.strip() for regex, replacement in rules)

    def sanitized(text):
        for regex, replacement in rules:
            text = re.sub(regex, replacement, text)
        return text

    return sanitized


MEASURED = ["3957 GB/s", "4.8 TB/s", "101 µs", "0.5 ms", "352 ns", "1.03x", "97.4 %", "-3.2 %"]
MEASURED += ["16.4 kB", "268.4 MB", "1,073.7 MB", "51.2 TFLOP/s", "12.1 FLOP/byte", "0.54 GB"]
MEASURED += ["4.14 T/s", "15.8 per clock", "0.98 per byte", "1.98 GHz", "5.3 times", "697 cycles"]


@pytest.mark.parametrize("text", MEASURED)
def test_sanitize_rule_replaces_a_number_and_keeps_its_unit(text, sanitize):
    [unit] = re.findall(r"x$| .*", text)
    for around in ("{}", "a copy runs at {}.", "<td>{}</td>", "| {} |"):
        assert sanitize(around.format(text)) == around.format(f"NUMBER{unit}")


COUNTED = ["5MN + 2M", "3 x 5", "128 bits", "sm_90", "81 reads", "268,435,456"]
COUNTED += ["2026-11-21", "PyTorch 2.11.0+cu130", "gfx90a", "0x10", "1024x1024"]
COUNTED += [
    "16 bytes",
    "3 GBs",
    "5 msec",
    "7 %s",
    "8 nsec",
    "16 KiB",
    "3 per clocks",
    "2 per SM",
    "5 times",
]


@pytest.mark.parametrize("text", COUNTED)
def test_sanitize_rule_keeps_any_other_number(text, sanitize):
    assert sanitize(f"says {text}, here") == f"says {text}, here"


def test_sanitize_rule_hides_the_size_of_a_figure(sanitize):
    shown = "<Figure size 960x246.4 with 1 Axes>"
    assert sanitize(shown) == "<Figure size SIZE with 1 Axes>"


def outputs(path):
    """The texts that the cells of a notebook print or display."""
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            data = {"text/plain": output.get("text", []), **output.get("data", {})}
            for kind in ("text/plain", "text/html", "text/markdown"):
                yield "".join(data.get(kind, []))


def test_units_know_every_unit_in_an_output():
    texts = [text for path in sorted(BOOK.glob("*.ipynb")) for text in outputs(path)]
    found = {unit for text in texts for unit in LIKE_A_UNIT.findall(text)}
    assert {"GB/s", "µs", "%"} <= found
    unknown = found - {*units.UNITS, "KiB", "MiB", "GiB"}  # of sizes that are chosen, not measured
    assert not unknown, f"add {unknown} to units.UNITS, or print it otherwise"


def test_units_know_what_experiments_measure():
    """All that is measured has a unit that a page can print: itself, or bytes as kB and MB.

    A loss is printed in percent of another.
    """
    measured = {c.unit for e in EXPERIMENTS.values() for c in e.columns if c.tolerance != 0}
    counted = {"", "bytes", "sectors", "instructions", "registers", "configurations"}
    counted |= {"kernels", "squared error"}
    assert measured - counted <= set(units.UNITS)
