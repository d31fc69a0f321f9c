"""The chart of how many programs fit, in a real browser, against the rules that it repeats."""

import json
import random
import re

import pytest
from notebooks import BOOK

from memtraffic import residency
from memtraffic.gpus import TARGETS
from memtraffic.residency import Resources
from memtraffic_book import build

STATIC = BOOK / "_static"
SCRIPTS = [STATIC / "occupancy-data.js", STATIC / "occupancy.js"]
NAMES = {
    "registers": "registers", "shared": "shared memory", "warps": "warp slots",
    "blocks": "places for programs", "vgprs": "vector registers", "waves": "wave slots",
    "lds": "LDS", "groups": "places for workgroups",
}  # fmt: skip
WORDS = {
    "nvidia": ("registers per thread", "shared memory per program, bytes", "warps per program"),
    "amd": ("vector registers per lane", "LDS per program, bytes", "waves per program"),
}
INPUTS = "registers", "shared", "warps"
USED = """
const box = document.querySelector(".occupancy-chart");
const output = box.querySelector("output"), svg = box.querySelector("svg");
const [select, registers, shared, warps] = box.querySelectorAll("select, input[type=number]");
const sliders = [...box.querySelectorAll("input[type=range]")];
const numbers = [registers, shared, warps];
const inputs = { target: select, registers, shared, warps, slider: sliders[0] };
const said = () => ({
  text: output.textContent, detail: box.querySelector("output + p").textContent,
  drawn: svg.childElementCount, label: svg.getAttribute("aria-label"),
  words: numbers.map((it) => it.labels[0].textContent),
  values: numbers.map((it) => it.value), slider: sliders[0].value,
  ranges: [numbers, sliders].map((all) => all.map((it) => [Number(it.min), Number(it.max)])),
  invalid: numbers.map((it) => it.getAttribute("aria-invalid") === "true"),
  described: document.getElementById(registers.getAttribute("aria-describedby")) === output,
  marked: [output.classList.contains("wrong"), svg.classList.contains("past")],
});
const set = ([name, value]) => {
  inputs[name].value = value;
  inputs[name].dispatchEvent(new Event("input", { bubbles: true }));
  return said();
};
"""


def test_chart_data_is_that_of_the_table(monkeypatch, tmp_path):
    (tmp_path / "_static").mkdir()
    monkeypatch.setattr(build, "book_folder", lambda: tmp_path)
    made = build.write_chart_data().read_text("utf-8")
    assert SCRIPTS[0].read_text("utf-8") == made, "python -m memtraffic_book draw"


def points():
    """Kernels of any kind, and at the steps of each limit, for every target."""
    draw = random.Random(0)
    for target, gpu in TARGETS.items():
        for _ in range(200):
            shared = draw.choice([0, draw.randint(0, 262144), draw.randint(0, 16384)])
            registers = draw.choice([draw.randint(1, 512), draw.randint(1, 96)])
            yield target, registers, shared, draw.randint(1, 32)
        for k in range(1, 64):
            yield from ((target, step, 0, draw.choice([1, 2, 4, 8])) for step in (8 * k, 8 * k + 1))
            yield from ((target, 16, k * gpu.shared_granularity + i, 1) for i in (-1, 0, 1))
        most = gpu.shared_per_program
        yield from ((target, 16, most + i, warps) for i in (0, 1) for warps in (1, 33))
        yield from ((target, count, 0, 1) for count in (254, 255, 256, 257, 511, 512, 513))
        yield from ((target, 8, 0, warps) for warps in (1, 2, 15, 16, 17, 31, 32, 33))


def expected_answer(target, registers, shared, warps):
    """The chart's answer by the module. The chart knows no scalar or accumulation registers."""
    kernel = Resources(
        "k", target, warps, registers, 0, shared, vgprs=registers, allocated_vgprs=registers
    )
    report = residency.Occupancy.of(kernel)
    limits = {name: count for name, count in report.limits.items() if name != "sgprs"}
    binding = [name for name, count in limits.items() if count == report.resident]
    return {"limits": limits, "resident": report.resident, "binding": binding}


@pytest.mark.browser
def test_chart_answers_as_the_module(browser):
    asked = list(points())
    script = "([target, registers, shared, warps]) => ({ target, registers, shared, warps })"
    script = f"{json.dumps(asked)}.map({script}).map(window.memtrafficOccupancy.answer)"
    answers = browser.run_on("", SCRIPTS, f"return {script};")
    expected = [expected_answer(*point) for point in asked]
    wrong = [it for it in zip(asked, answers, expected, strict=True) if it[1] != it[2]]
    assert not wrong, f"{len(wrong)} of {len(asked)} differ, such as {wrong[:3]}"
    assert {len(answer["binding"]) for answer in answers} >= {1, 2, 3}
    assert {name for answer in answers for name in answer["binding"]} == set(NAMES)


@pytest.fixture
def chart():
    """The chart as the chapter has it, after the figure that paper and a notebook show for it."""
    cells = json.loads((BOOK / "occupancy.ipynb").read_text("utf-8"))["cells"]
    [at] = [i for i, cell in enumerate(cells) if "occupancy-chart" in "".join(cell["source"])]
    assert any("image/png" in output.get("data", {}) for output in cells[at - 1]["outputs"])
    style = (STATIC / "memtraffic.css").read_text("utf-8")
    assert re.search(r"@media print \{\s*\.occupancy-chart \{\s*display: none;", style)
    text = "".join(cells[at]["source"])
    return re.search(r'<div class="occupancy-chart"[^>]*></div>', text)[0]


def ends(gpu):
    """The least and the most of each input."""
    most = 255 if gpu.vendor == "nvidia" else gpu.max_addressable_vgprs
    return [[1, most], [0, 262144], [1, 1024 // gpu.warp_size]]


def expected_words(target, registers, shared, warps):
    """How many fit, what limits them, and all limits, in the words of the vendor."""
    answer = expected_answer(target, registers, shared, warps)
    counts = {0: "None fits", 1: "1 program fits"}
    count = counts.get(answer["resident"], f"{answer['resident']} programs fit")
    names = ", ".join(NAMES[name] for name in answer["binding"])
    limits = ", ".join(f"{NAMES[name]} {value}" for name, value in answer["limits"].items())
    word, *_ = WORDS[TARGETS[target].vendor]
    label = f"Programs that fit, by {word}: {answer['resident']} at {registers}."
    return f"{count}. Limit: {names}.", limits, label


def steps():
    """What is changed, and what follows: the GPU, and its point or what is wrong, and where.

    What a new GPU does not allow is cut.
    """
    now = {"registers": 69, "shared": 32784, "warps": 4}  # as on the page
    for target in ("sm_90", *reversed(TARGETS)):
        gpu = TARGETS[target]
        now = {it: min(now[it], most) for it, (_, most) in zip(INPUTS, ends(gpu), strict=True)}
        yield ("target", target), target, [*now.values()], None
        for name, words, (least, most) in zip(INPUTS, WORDS[gpu.vendor], ends(gpu), strict=True):
            for value in (least - 1, most + 1, "", "many", "4.5"):
                yield (name, value), target, f"{words}: from {least} to {most}", name
            for now[name] in (least, most, 4):
                yield (name, now[name]), target, [*now.values()], None
        for name, now["registers"] in (("slider", 200), ("registers", ends(gpu)[0][1])):
            yield (name, now["registers"]), target, [*now.values()], None


@pytest.mark.browser
def test_chart_inputs_change_its_answer_or_say_their_range(browser, chart):
    asked = [it for it, *_ in steps()]
    script = f"{USED} return [said(), ...{json.dumps(asked)}.map(set)];"
    first, *found = browser.run_on(chart, SCRIPTS, script)
    assert first == found[0]
    for shown, (_, target, says, wrong) in zip(found, steps(), strict=True):
        assert tuple(shown["words"]) == WORDS[TARGETS[target].vendor]
        assert shown["ranges"] == [ends(TARGETS[target])] * 2 and shown["described"]
        assert shown["invalid"] == [name == wrong for name in INPUTS]
        assert shown["marked"] == [bool(wrong)] * 2
        said = shown["text"], shown["detail"], shown["label"]
        if wrong:  # the chart of the last answer stays, pale
            assert said[:2] == (says, "\N{NO-BREAK SPACE}") and shown["drawn"] >= 3
        else:
            assert said == expected_words(target, *says) and shown["drawn"] >= 3
            assert shown["values"] == list(map(str, says)) and shown["slider"] == str(says[0])


@pytest.mark.browser
def test_charts_can_be_used_without_a_mouse_or_eyes(browser, chart):
    script = """
        const all = (selector) => [...document.querySelectorAll(selector)];
        const named = all(".occupancy-chart :is(select, input)").map((input) => {
          input.focus();
          const name = input.labels[0]?.textContent ?? input.getAttribute("aria-label");
          return [name, document.activeElement === input];
        });
        const live = all(".occupancy-chart output").map((it) => it.getAttribute("aria-live"));
        return [named, all("[id]").map((element) => element.id), live];"""
    inputs, ids, aloud = browser.run_on(chart + chart, SCRIPTS, script)
    words = [word for word in WORDS["nvidia"] for _ in ("number", "slider")]
    assert inputs == [[word, True] for word in ["GPU", *words] * 2]
    assert len(set(ids)) == len(ids), "two charts share an id"
    assert aloud == ["polite", "polite"]
