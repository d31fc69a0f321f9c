"""Units of measured numbers, and the rule that leaves the numbers out, read as nbval reads it."""

import re

import pytest
from notebooks import BOOK, code_cells, load, printed

from memtraffic_book import units
from memtraffic_book.catalog import EXPERIMENTS

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


MEASURED = ["3957 GB/s", "101 µs", "0.5 ms", "352 ns", "1.03x", "-3.2 %", "1,073.7 MB"]
MEASURED += ["12.1 FLOP/byte", "4.14 T/s", "15.8 per clock", "5.3 times"]
COUNTED = ["5MN + 2M", "3 x 5", "sm_90", "81 reads", "268,435,456", "2026-11-21", "gfx90a", "0x10"]
COUNTED += ["PyTorch 2.11.0+cu130", "1024x1024", "16 bytes", "3 GBs", "5 msec", "7 %s", "16 KiB"]
COUNTED += ["3 per clocks", "2 per SM", "5 times"]


@pytest.mark.parametrize("around", ["{}", "a copy runs at {}.", "<td>{}</td>", "| {} |"])
def test_sanitize_rule_replaces_what_is_measured_alone_and_keeps_its_unit(sanitize, around):
    for text in MEASURED:
        [unit] = re.findall(r"x$| .*", text)
        assert sanitize(around.format(text)) == around.format(f"NUMBER{unit}")
    for text in map(around.format, COUNTED):
        assert sanitize(text) == text
    shown = "<Figure size 960x246.4 with 1 Axes>"
    assert sanitize(shown) == "<Figure size SIZE with 1 Axes>"


def test_units_know_every_unit_in_an_output():
    cells = [cell for path in BOOK.glob("*.ipynb") for cell in code_cells(load(path))]
    texts = map(printed, cells)
    found = {unit for text in texts for unit in LIKE_A_UNIT.findall(text)}
    assert {"GB/s", "µs", "%"} <= found
    unknown = found - {*units.UNITS, "KiB", "MiB", "GiB"}  # of sizes that are chosen, not measured
    assert not unknown, f"add {unknown} to units.UNITS, or print it otherwise"


# What pages glue though its numbers have no unit: counted, compiled for a named GPU, or quoted from
# a note. All else that is glued belongs to the GPU, and is compared by its unit.
SAME_ON_EACH_GPU = {
    "chunks": "tiled_programs own many block_warps block_registers",
    "fused": "tried row_kib",
    "lab-notes": "dropped",
    "long-rows": "rows_at_once",
    "masked": "passed",
    "memory-wall": "impossible verdict_1 naive_reads naive_writes split_reads split_writes",
    "naive": "prefetch_predicted prefetch_found",
    "occupancy": "fit last lost",
    "persistent": "counter",
    "sectors": "times others",
    "ship": "ours cases lowest_at",
    "survey": "kernels packages passes again cached",
}


def test_what_pages_glue_of_a_gpu_has_a_unit(sanitize):
    """Another GPU holds another number, so a page would differ there from its stored outputs."""
    unknown = {}
    for path in BOOK.glob("*.ipynb"):
        outputs = [it for cell in code_cells(load(path)) for it in cell.outputs]
        glued = [it for it in outputs if "scrapbook" in it.get("metadata", {})]
        texts = {it.metadata.scrapbook.name: sanitize(str(it.data)) for it in glued}
        numbers = {name for name, text in texts.items() if re.search(r"\d", text)}
        if new := numbers - {*SAME_ON_EACH_GPU.get(path.stem, "").split()}:
            unknown[path.stem] = new
    assert not unknown, "print it with a unit, if it is not the same on every GPU"


def test_units_know_what_experiments_measure():
    """All that is measured has a unit that a page can print: itself, or bytes as kB and MB.

    A loss is printed in percent of another.
    """
    measured = {c.unit for e in EXPERIMENTS.values() for c in e.columns if c.tolerance != 0}
    counted = {"", "bytes", "sectors", "instructions", "registers", "configurations"}
    counted |= {"kernels", "squared error"}
    assert measured - counted <= set(units.UNITS)
