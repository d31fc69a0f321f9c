import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import kernels  # tests/kernels.py
import pandas as pd
import pytest
import torch

import memtraffic
from memtraffic import benchmark, runtime
from memtraffic.errors import CountersUnavailable
from memtraffic.gpus import TARGETS as TARGETS_OF_THE_TABLE
from memtraffic.inputs import Arguments
from memtraffic.kernels.softmax import fused, naive
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD
from memtraffic.meters import counters as hardware
from memtraffic.reporting import make_page, page, report, sections, to_html, to_markdown
from memtraffic.reporting.subject import find_roles

pytest.importorskip("triton", reason="Triton is not installed")

TARGETS = ["sm_90", "gfx942"]
LINEAR = torch.nn.Linear(3, 2, device=runtime.device())


def softmax_into(y, x):
    fused._softmax_fused_kernel[(x.shape[0],)](
        y, y.stride(0), x, x.stride(0), BLOCK=x.shape[1], num_warps=1
    )


def section(text, heading):
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def cells(text):
    """The cells of all rows of Markdown's tables, by line, without the rules."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def pictures(made):
    return [block for block in made.blocks if isinstance(block, page.Picture)]


@pytest.fixture(scope="module")
def text():
    return report(fused.softmax, sizes=(16, 4096), targets=TARGETS)


def test_report_formula(text):
    head, *rows = cells(section(text, "Formula"))
    assert head == ["direction", "elements", "least"]
    assert rows == [["reads", "MN", "MN"], ["writes", "MN", "MN"]]


def test_report_of_what_moves_more_than_the_least():
    found = section(report(naive.softmax, sizes=(2, 4)), "Formula")
    assert cells(found)[1:] == [["reads", "5MN + 2M", "MN"], ["writes", "3MN + 2M", "MN"]]
    assert "moves 72 elements, 4.50 times the least of 16." in found


def test_report_small_case(text):
    rows = cells(section(text, "A small case"))
    assert rows[1:3] == [["`_softmax_fused_kernel`", "16", "16"], ["total", "16", "16"]]
    assert rows[4:] == [
        ["0, 0, 0", "load", "`x_ptr`", "8", "0-7"],
        ["0, 0, 0", "store", "`y_ptr`", "8", "0-7"],
        ["1, 0, 0", "load", "`x_ptr`", "8", "8-15"],
        ["1, 0, 0", "store", "`y_ptr`", "8", "8-15"],
    ]


def test_report_compiled(text):
    rows = cells(section(text, "Compiled"))[1:]
    assert [row[0] for row in rows] == ["sm_90 (H200)", "gfx942 (MI300X)"]
    for row, target in zip(rows, TARGETS, strict=True):
        [kernel] = memtraffic.resources(fused.softmax, target, inputs="16,4096")
        numbers = kernel.num_warps, kernel.registers, kernel.spill_bytes, kernel.shared_bytes
        assert row[2:6] == [f"{number:,}" for number in numbers]
        assert row[6] == f"{kernel.load_bits[128]} of 128"


def test_report_occupancy(text):
    rows = cells(section(text, "Occupancy"))[1:]
    for row, target, slots in zip(rows, TARGETS, (64, 32), strict=True):
        [one] = memtraffic.occupancy(fused.softmax, target, inputs="16,4096")
        warps = one.resident * one.num_warps
        assert row[2:5] == [str(one.resident), one.binding, f"{warps} of {slots}"]
        assert row[5] == f"{warps / slots:.0%}"


@pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures")
def test_report_without_a_gpu_measures_nothing(text):
    said = "This machine has no GPU, so there are no hardware counters and no bandwidth."
    assert section(text, "Measured").strip() == said


@pytest.mark.parametrize(
    ("inputs", "sizes"), [("M,N", "M = 3, N = 5"), ("M,K K,N", "M = 2, K = 2, N = 4")]
)
def test_report_small_case_has_no_size_of_one(inputs, sizes):
    fn = torch.exp if inputs == "M,N" else torch.matmul
    numbers = (8,) * (1 + inputs.count(","))
    found = section(report(fn, inputs, numbers), "A small case")
    assert f"Counted with {sizes}, in elements:" in found


@pytest.mark.slow
def test_report_of_all_targets():
    rows = cells(section(report(fused.softmax, sizes=(16, 64)), "Compiled"))
    assert len(rows) == 1 + len(TARGETS_OF_THE_TABLE)


@pytest.mark.slow
def test_report_backward():
    text = report(memtraffic.softmax, sizes=(16, 64), targets=["sm_90"], backward=True)
    assert cells(section(text, "Formula"))[1:] == [
        ["forward", "reads", "MN", "MN"],
        ["forward", "writes", "MN", "MN"],
        ["backward", "reads", "2MN", "2MN"],
        ["backward", "writes", "MN", "MN"],
    ]
    compiled = [row[1] for row in cells(section(text, "Compiled"))[1:]]
    assert compiled == ["`softmax_kernel`", "`softmax_backward_kernel`"]


@pytest.mark.parametrize(
    ("fn", "inputs", "least"),
    [
        pytest.param(lambda x: x.exp_(), "M,N", ["MN", "MN"], id="in-place"),
        pytest.param(lambda y, x: y.copy_(x), "M,N M,N", ["MN", "MN"], id="out"),
        pytest.param(lambda x, w: (x * w, x.sum(1)), "M,N N", ["MN + N", "MN + M"], id="two"),
        pytest.param(lambda x: x.T, "M,N", ["MN", "0"], id="view"),
        pytest.param(torch.matmul, "M,K K,N", ["MK + KN", "MN"], id="product"),
        pytest.param(LINEAR, "M,3", ["3M + 8", "2M"], id="module"),
        pytest.param(torch.exp, "3,5", ["15", "15"], id="numbers"),
    ],
)
def test_report_least(fn, inputs, least):
    rows = cells(section(report(fn, inputs), "Formula"))
    assert [row[2] for row in rows[1:]] == least


def test_report_of_what_touches_a_part():
    found = section(report(lambda x: x[:, :1].exp()), "Formula")
    assert "does not touch every element" in found


def test_report_of_an_op_and_of_arguments():
    found = report(lambda y, dy: y * dy, SOFTMAX_BACKWARD, (4, 8))
    assert cells(section(found, "Formula"))[1][1:] == ["2MN", "2MN"]
    found = report(torch.exp, Arguments((torch.ones(3, 5, device=runtime.device()),)))
    assert cells(section(found, "Formula"))[1][1:] == ["15", "15"]


def test_find_roles_of_a_kernel_that_is_given_its_output():
    x = torch.ones(4, 8, device=runtime.device())
    roles = find_roles(softmax_into, Arguments((torch.zeros_like(x), x)))
    assert roles == [(False, True), (True, False)]


def test_report_without_a_formula():
    """It says so, and goes on."""

    def ragged(x):
        return x[: int(x.shape[0] ** 0.5)].exp()

    text = report(ragged)
    assert "There is no formula: what it reads is no sum" in section(text, "Formula")
    assert cells(section(text, "A small case"))[-1][0] == "total"


def test_report_of_a_kernel_in_a_function():
    """What cannot be compiled is a sentence."""
    text = report(fused.softmax, sizes=(16, 100), targets=["sm_90"])
    assert "ValueError: fused: 100 columns" in section(text, "Compiled")
    assert "With M = 16, N = 100" in section(text, "Formula")


def test_report_of_a_kernel_that_no_gpu_launches(monkeypatch):
    [kernel] = memtraffic.resources(fused.softmax, "sm_90", inputs="16,64", num_warps=64)
    monkeypatch.setattr(sections, "resources", lambda *args, **options: [kernel, kernel])
    text = report(fused.softmax, sizes=(16, 64), targets=["sm_90"])
    said = r"No sm\_90 launches `_softmax_fused_kernel`: 2048 threads"
    assert section(text, "Compiled").count(said) == 1
    [row] = cells(section(text, "Compiled"))[1:]
    assert row[1] == "`_softmax_fused_kernel` × 2"


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        pytest.param(kernels.raises, TypeError, "cannot take", id="raises"),
        pytest.param(lambda x: x.numpy(), Exception, "NumPy", id="numpy"),
        pytest.param(lambda x: (y for y in x), Exception, "generator", id="generator"),
        pytest.param(3, TypeError, "not a function", id="number"),
    ],
)
def test_report_of_what_cannot_be_metered(fn, error, message):
    with pytest.raises(error, match=message):
        report(fn)


def test_find_roles_of_what_is_not_done():
    with pytest.raises(TypeError, match="of type generator, before it did its work"):
        find_roles(lambda x: (y for y in x), Arguments((torch.ones(3),)))


def test_report_of_an_unknown_target():
    with pytest.raises(LookupError, match="sm_91"):
        report(naive.softmax, targets=["sm_91"])


def test_report_shows_the_first_accesses_of_many():
    text = section(report(lambda x: fused.softmax(x), "40,4", targets=["sm_90"]), "A small case")
    assert "make 40 loads and 40 stores, of which these are the first 24:" in text
    assert len(cells(text)) == 3 + 1 + 24


# ---- with a GPU, which is not here


@pytest.fixture
def gpu(monkeypatch):
    """Counters and times as a GPU gives them; returns the bytes that the copy moves."""
    frame = pd.DataFrame([["k", 1, 2, 1000, 2000, 3000, 40, 781]], columns=list(hardware.COLUMNS))
    sources = []

    def fastest_copy(x):
        sources.append(2 * x.nbytes)
        return x.clone

    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(runtime, "gpu_name", lambda: "some GPU")
    monkeypatch.setattr(hardware, "counters", lambda *args, **options: frame)
    monkeypatch.setattr(benchmark, "fastest_copy", fastest_copy)
    times = [2e-6] * 5, [1e-6] * 5
    monkeypatch.setattr(benchmark, "time_interleaved", lambda calls: times[: len(calls)])
    return sources


def test_report_with_a_gpu(gpu):
    made = make_page(torch.exp, "M,N", (64, 32))
    found = section(to_markdown(made), "Measured")
    rows = cells(found)
    assert rows[1] == ["`k`", "1,000", "1,280", "2,000", "3,000", "781"]
    assert gpu == [2 * 64 * 32 * 4]  # the least: reads and writes
    assert "some GPU with M = 64, N = 32" in found
    assert "0.50 times the bandwidth of the fastest copy" in found
    assert rows[3] == ["the function", "2.0", "2.0 to 2.0", f"{2 * 64 * 32 * 4 / 2e-6 * 1e-9:.0f}"]


def test_report_without_counters(gpu, monkeypatch):
    def counters(*args, **options):
        raise CountersUnavailable("counters: no permission")

    monkeypatch.setattr(hardware, "counters", counters)
    found = section(report(torch.exp, "64,32"), "Measured")
    assert "There are no hardware counters: counters: no permission." in found
    assert "the fastest copy" in found


# ---- what is written


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_to_html_needs_no_other_file():
    made = make_page(naive.softmax)
    text = to_html(made)
    parser = Elements()
    parser.feed(text)
    assert parser.open == []
    [image] = [attrs for tag, attrs in parser.seen if tag == "img"]
    assert image["alt"].startswith("All operations together move 4.00 times the least")
    kind, data = image["src"].split(",")
    assert kind == "data:image/svg+xml;base64"
    ElementTree.fromstring(base64.b64decode(data))
    assert not re.findall(r'(?:src|href)="(?!data:)', text)


def test_to_html_and_to_markdown_take_signs_as_they_are():
    made = page.Page("a<b|*", [page.Text("x_y <i> `a_b<`"),
                                    page.Table(("k",), [("a|b",)])])  # fmt: skip
    assert r"x\_y \<i\> `a_b<`" in to_markdown(made)
    assert r"| a\|b |" in to_markdown(made)
    assert "<p>x_y &lt;i&gt; <code>a_b&lt;</code></p>" in to_html(made)
    assert "<h1>a&lt;b|*</h1>" in to_html(made)


@pytest.mark.parametrize(("fn", "name"), [(naive.softmax, "traffic"), (fused.softmax, "occupancy")])
def test_pictures_are_the_same_each_time(fn, name):
    first, second = (make_page(fn, targets=TARGETS) for _ in range(2))
    assert [it.name for it in pictures(first)] == [name]
    assert pictures(first) == pictures(second)
    assert runtime.HAS_GPU or to_html(first) == to_html(second)  # a GPU measures anew


def test_a_picture_of_occupancy_is_drawn_for_several_targets():
    made = [make_page(fused.softmax, "M,N", (16, 64), targets=to) for to in (["sm_90"], TARGETS)]
    assert pictures(made[0]) == []
    [one] = pictures(made[1])
    assert one.name == "occupancy"
    [report_] = memtraffic.occupancy(fused.softmax, "gfx942", inputs="16,64")
    share = report_.resident * report_.num_warps / 32
    assert f"gfx942 (MI300X) {share:.0%}" in one.alt
