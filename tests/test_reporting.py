"""A report says what the meters say, section by section, and why where they refuse."""

import pandas as pd
import pytest
import torch

import memtraffic
from memtraffic import benchmark, reporting, runtime
from memtraffic.errors import CountersUnavailable
from memtraffic.inputs import Arguments
from memtraffic.kernels.softmax import fused, naive
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.meters import counters as hardware
from memtraffic.meters.formula import formula
from memtraffic.op import find_op
from memtraffic.reporting import report
from memtraffic.residency import Resources

pytest.importorskip("triton", reason="Triton is not installed")

HERE = ["sm_90", "gfx942"]


def section(text, heading):
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].strip()


def cells(text):
    """The cells of all rows of Markdown's tables, by line, without the rules."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture(scope="module")
def text():
    return report(fused.softmax, shape=(16, 4096), targets=HERE)


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    """All but `text` solve for a matrix's formula at a few small shapes, which takes no second."""

    def at_few_shapes(fn, inputs=None, **options):
        if len(find_op(inputs).sizes) == 2:
            options["fit"] = [(1, 8), (2, 4), (3, 16), (4, 1), (5, 2), (6, 32)]
            options["held_out"] = [(7, 64), (8, 128)]
        return formula(fn, inputs, **options)

    monkeypatch.setattr(reporting, "formula", at_few_shapes)


def test_report_formula(text):
    assert runtime.HAS_GPU or section(text, "Measured").startswith("This machine has no GPU")
    assert "\nreads MN, writes MN\n" in section(text, "Formula")
    assert "6 refused: fused: 5 columns" in section(text, "Formula")


def test_report_counts_at_its_own_size(text):
    found = section(text, "Counted")
    moved = f"{2 * 4 * 16 * 4096:,}"
    assert f"With M = 16, N = 4096, the function moves {moved} bytes, 1.00 times" in found
    assert cells(found)[1] == ["`_softmax_fused_kernel`", "65,536", "65,536", "262,144", "262,144"]


def test_report_counts_where_the_formula_holds_no_more():
    """A kernel whose blocks are larger than the shapes of the formula: it is not evaluated."""

    def copied(x):  # one more element for every 512 rows
        return (x.reshape(-1).clone(), torch.ones(x.shape[0] // 512, device=x.device).exp())

    found = section(report(copied, shape=(2048, 4)), "Counted")
    elements = 2 * 2048 * 4 + 3 * 4  # fill writes 4, exp reads and writes 4
    assert f"moves {4 * elements:,} bytes" in found


def test_report_of_what_moves_more_than_the_least():
    found = section(report(naive.softmax, shape=(2, 4)), "Counted")
    assert "moves 288 bytes, 4.50 times the least of 64." in found
    assert cells(found)[-1] == ["total", "44", "28", "176", "112"]


@pytest.mark.parametrize(
    ("fn", "inputs", "shape", "least"),
    [
        pytest.param(
            lambda x, w: (x * w, x.sum(1)), "M,N N", (4, 8), 128 + 32 + 128 + 16, id="two"
        ),
        pytest.param(torch.exp, Arguments((torch.ones(3, 5),)), (), 2 * 60, id="arguments"),
        pytest.param(lambda y, dy: y * dy, SOFTMAX_BACKWARD, (4, 8), 3 * 128, id="op"),
    ],
)
def test_report_least(fn, inputs, shape, least):
    if isinstance(inputs, Arguments):
        inputs = inputs.map(lambda x: x.to(runtime.device()))
    assert f"times the least of {least:,}" in section(report(fn, inputs, shape), "Counted")


def test_report_of_what_touches_a_part():
    found = section(report(lambda x: x[:, :1].exp(), shape=(4, 8)), "Counted")
    assert "does not touch every element" in found


def test_report_compiled_is_what_the_meters_say(text):
    uses, fits = cells(section(text, "Compiled"))[1:3], cells(section(text, "Compiled"))[4:]
    assert [row[0] for row in uses] == ["sm_90 (H200)", "gfx942 (MI300X)"]
    for use, fit, target, slots in zip(uses, fits, HERE, (64, 32), strict=True):
        [kernel] = memtraffic.resources(fused.softmax, "16,4096", target=target)
        numbers = kernel.num_warps, kernel.registers, kernel.spill_bytes, kernel.shared_bytes
        assert use[2:6] == [f"{number:,}" for number in numbers]
        assert use[6] == f"{kernel.load_bits[128]} of 128"
        [one] = memtraffic.occupancy(fused.softmax, "16,4096", target=target)
        warps = one.resident * one.num_warps
        assert fit[2:5] == [str(one.resident), one.binding, f"{warps} of {slots}"]
        assert fit[5] == f"{warps / slots:.0%}"


def test_report_says_why_a_section_is_refused():
    """And goes on."""
    text = report(lambda x: x[: int(x.shape[0] ** 0.5)].exp(), shape=(16, 4))
    assert section(text, "Formula").startswith("There is nothing to show here: it reads ")
    assert cells(section(text, "Counted"))[-1] == ["total", "16", "16", "64", "64"]
    assert "launched no Triton kernel" in section(text, "Compiled")
    text = report(fused.softmax, shape=(16, 100), targets=["sm_90"])
    assert "ValueError: fused: 100 columns" in section(text, "Compiled")
    assert "reads MN" in section(text, "Formula")


def test_report_of_a_kernel_that_no_gpu_launches(monkeypatch):
    kernel = Resources("_softmax_fused_kernel", "sm_90", 64, 32, 0, 64, unlaunchable="2048 threads")
    monkeypatch.setattr(reporting, "resources", lambda *args, **options: [kernel, kernel])
    found = section(report(fused.softmax, shape=(16, 64), targets=["sm_90"]), "Compiled")
    assert found.count("No sm_90 launches `_softmax_fused_kernel`: 2048 threads") == 1
    assert len(cells(found)) == 4


# ---- with a GPU, which is not here


@pytest.fixture
def gpu(monkeypatch):
    """Counters and times as a GPU gives them."""
    frame = pd.DataFrame([["k", 1, 2, 1000, 2000, 3000, 40, 781]], columns=list(hardware.COLUMNS))
    times = pd.DataFrame({"us": [2.0, 5.0], "us_p20": [1.5, 4.5], "us_p80": [2.5, 5.5]})
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(runtime, "gpu_name", lambda: "some GPU")
    monkeypatch.setattr(hardware, "counters", lambda *args, **options: frame)
    monkeypatch.setattr(benchmark, "bench", lambda *args, **options: times)


def test_report_with_a_gpu(gpu):
    found = section(report(torch.exp, "M,N", (64, 32)), "Measured")
    assert cells(found)[1] == ["`k`", "1,000", "1,280", "2,000", "3,000", "781"]
    assert "on some GPU with M = 64, N = 32" in found
    assert "takes 2.50 times as long as the copy" in found
    assert cells(found)[-1] == ["the function", "5.0", "4.5", "5.5"]


def test_report_without_counters(gpu, monkeypatch):
    def counters(*args, **options):
        raise CountersUnavailable("counters: no permission")

    monkeypatch.setattr(hardware, "counters", counters)
    found = section(report(torch.exp, "64,32"), "Measured")
    assert "There are no hardware counters: counters: no permission." in found
    assert "as long as the copy" in found
