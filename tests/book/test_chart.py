"""The chart of how many programs fit, in a real browser, against the rules that it repeats."""

import json
import random
import re
from pathlib import Path

import pytest
from browser import run_script

from memtraffic import residency
from memtraffic.gpus import TARGETS
from memtraffic.residency import Resources

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "book" / "_static"
SCRIPTS = [STATIC / "occupancy-data.js", STATIC / "occupancy.js"]
browser = pytest.mark.browser


def test_chart_data_is_that_of_the_table():
    from memtraffic_book.build import chart_data

    assert SCRIPTS[0].read_text("utf-8") == chart_data(), (
        "book/_static/occupancy-data.js is not what memtraffic.gpus holds; make it again with "
        "python -m memtraffic_book chart-data"
    )


def test_chart_asks_for_nothing_from_elsewhere():
    text = SCRIPTS[1].read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(
        r"https?:|fetch\(|XMLHttpRequest|import\(|WebSocket|@import|\bsrc\b", text
    )


@pytest.fixture
def browse(tmp_path):
    """Opens a page with the scripts and `body`, and runs `script`; returns what it gave `done`."""

    return lambda script, body="": run_script(tmp_path, SCRIPTS, script, body)


POINT = ("target", "registers", "shared", "warps")


def points():
    """Kernels of any kind, and at the steps of each limit, for every target."""
    draw, found = random.Random(0), []
    for target, gpu in TARGETS.items():
        for _ in range(400):
            shared = draw.choice([0, draw.randint(0, 262144), draw.randint(0, 16384)])
            registers = draw.choice([draw.randint(1, 512), draw.randint(1, 96)])
            found.append((target, registers, shared, draw.randint(1, 32)))
        found += [(target, registers, 0, 2) for registers in range(1, 65)]
        for k in range(1, 64):
            steps = (8 * k, 8 * k + 1)
            found += [(target, step, 0, draw.choice([1, 2, 4, 8])) for step in steps]
            found += [(target, 16, k * gpu.shared_granularity + i, 1) for i in (-1, 0, 1)]
        most = gpu.shared_per_program
        found += [(target, 16, most + i, warps) for i in (0, 1) for warps in (1, 33)]
        found += [(target, count, 0, 1) for count in (254, 255, 256, 257, 511, 512, 513)]
        found += [(target, 8, 0, warps) for warps in (15, 16, 17, 31, 32, 33)]
    return [dict(zip(POINT, values, strict=True)) for values in found]


def expected_answer(point):
    """The chart's answer by the module. The chart knows no scalar or accumulation registers."""
    registers = point["registers"]
    kernel = Resources(
        "k", point["target"], point["warps"], registers, 0, point["shared"],
        vgprs=registers, allocated_vgprs=registers,
    )  # fmt: skip
    report = residency.Occupancy.of(kernel)
    limits = {name: count for name, count in report.limits.items() if name != "sgprs"}
    binding = [name for name, count in limits.items() if count == report.resident]
    assert binding[0] == report.binding
    return {"limits": limits, "resident": report.resident, "binding": binding}


@browser
def test_chart_answers_as_the_module(browse, capsys):
    asked = points()
    answers = browse(f"done({json.dumps(asked)}.map(window.memtrafficOccupancy.answer));")
    wrong = [
        (point, answer, expected_answer(point))
        for point, answer in zip(asked, answers, strict=True)
        if answer != expected_answer(point)
    ]
    assert not wrong, f"{len(wrong)} of {len(asked)} differ, such as {wrong[:3]}"
    with capsys.disabled():
        print(f"chart: {len(asked)} answers, all equal")
    assert len(asked) > 5000
    assert {len(answer["binding"]) for answer in answers} >= {1, 2, 3}
    assert {name for answer in answers for name in answer["binding"]} == set(NAMES)


@pytest.fixture
def chart():
    """The chart as the chapter has it."""
    cells = json.loads((ROOT / "book/occupancy.ipynb").read_text("utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells)
    [found] = re.findall(r'<div class="occupancy-chart"[^>]*></div>', text)
    return found


USED = """
const box = document.querySelector(".occupancy-chart");
const output = box.querySelector("output"), svg = box.querySelector("svg");
const [select, registers, shared, warps] = box.querySelectorAll("select, input[type=number]");
const sliders = [...box.querySelectorAll("input[type=range]")];
const detail = box.querySelector("output + p");
const said = () => ({
  text: output.textContent, detail: detail.textContent, drawn: svg.childElementCount,
  label: svg.getAttribute("aria-label"),
  words: [registers, shared, warps].map((it) => it.labels[0].textContent),
  invalid: [registers, shared, warps].map((it) => it.getAttribute("aria-invalid") === "true"),
  described: document.getElementById(registers.getAttribute("aria-describedby")) === output,
  marked: [output.classList.contains("wrong"), svg.hasAttribute("hidden")],
});
const set = (input, value) => {
  input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  return said();
};
"""


NAMES = {
    "registers": "registers", "shared": "shared memory", "warps": "warp slots",
    "blocks": "block slots", "vgprs": "vector registers", "waves": "wave slots", "lds": "LDS",
    "groups": "workgroup slots",
}  # fmt: skip
WORDS = {
    "nvidia": ("registers per thread", "shared memory per program, bytes", "warps per program"),
    "amd": ("vector registers per lane", "LDS per program, bytes", "waves per program"),
}


def words_of(target):
    return WORDS[TARGETS[target].vendor]


def answer_text(target, registers, shared, warps):
    """What the chart says: how many fit and what limits them, and after it all limits."""
    answer = expected_answer(dict(zip(POINT, (target, registers, shared, warps), strict=True)))
    counts = {0: "None fits", 1: "1 program fits"}
    count = counts.get(answer["resident"], f"{answer['resident']} programs fit")
    names = ", ".join(NAMES[name] for name in answer["binding"])
    limits = (f"{NAMES[name]} {value}" for name, value in answer["limits"].items())
    return f"{count}. Limit: {names}.", ", ".join(limits)


@browser
def test_chart_inputs_change_its_answer(browse, chart):
    found = browse(
        USED
        + """done({
          first: said(),
          target: set(select, "gfx942"), back: set(select, "sm_90"),
          registers: set(registers, "128"), slider_after_number: sliders[0].value,
          slider: set(sliders[0], "200"), number_after_slider: registers.value,
          shared: set(shared, "100000"), warps: set(warps, "16"), none: set(registers, "255"),
          one: (set(shared, "0"), set(registers, "128")),
          keyboard: (set(shared, "100000"), sliders[0].value = 33, sliders[0].stepDown(),
            set(sliders[0], sliders[0].value)),
        });""",
        chart,
    )
    said = {name: value for name, value in found.items() if isinstance(value, dict)}
    expected = {
        "first": ("sm_90", 69, 32784, 4),
        "target": ("gfx942", 69, 32784, 4),
        "back": ("sm_90", 69, 32784, 4),
        "registers": ("sm_90", 128, 32784, 4),
        "slider": ("sm_90", 200, 32784, 4),
        "shared": ("sm_90", 200, 100000, 4),
        "warps": ("sm_90", 200, 100000, 16),
        "none": ("sm_90", 255, 100000, 16),
        "one": ("sm_90", 128, 0, 16),
        "keyboard": ("sm_90", 32, 100000, 16),
    }
    for name, point in expected.items():
        shown = said[name]
        assert (shown["text"], shown["detail"]) == answer_text(*point), (name, shown)
        assert tuple(shown["words"]) == words_of(point[0])
        word = words_of(point[0])[0]
        resident = expected_answer(dict(zip(POINT, point, strict=True)))["resident"]
        assert shown["label"] == f"Programs that fit, by {word}: {resident} at {point[1]}."
    assert set(said) == set(expected)
    assert (found["slider_after_number"], found["number_after_slider"]) == ("128", "200")
    assert found["first"]["drawn"] >= 3
    assert found["slider"]["label"].endswith(" at 200.")


NO_NUMBERS = [("registers", "", 255), ("registers", "many", 255), ("registers", "69.5", 255)]
NO_NUMBERS += [("shared", "0.5", 262144)]


@browser
def test_chart_says_what_is_no_whole_number(browse, chart):
    script = f"""const inputs = {{ registers, shared, warps }};
    done({json.dumps(NO_NUMBERS)}.map(
      ([name, value]) => [set(inputs[name], value), set(inputs[name], "4")]));"""
    answers = browse(USED + script, chart)
    for (name, value, most), (wrong, right) in zip(NO_NUMBERS, answers, strict=True):
        word = WORDS["nvidia"][POINT.index(name) - 1]
        message = f"{word}: from {0 if name == 'shared' else 1} to {most}"
        assert (wrong["text"], wrong["detail"], wrong["drawn"]) == (message, "", 0), value
        assert wrong["label"] is None
        assert wrong["invalid"] == [it == name for it in POINT[1:]] and wrong["described"]
        assert (wrong["marked"], right["marked"]) == ([True] * 2, [False] * 2)
        assert not any(right["invalid"]) and right["described"]
        assert "fit" in right["text"] and right["detail"] and right["drawn"] > 0
        assert right["label"].startswith("Programs that fit, by ")


@browser
def test_chart_keeps_to_what_a_new_gpu_allows(browse, chart):
    values = browse(
        USED
        + """const values = () => [registers, shared, warps].map((it) => it.value);
        const found = [];
        for (const [target, count] of [["gfx942", "400"], ["sm_90", null], ["gfx942", null]]) {
          set(select, target);
          if (count) { set(registers, count); set(warps, "16"); }
          found.push(values());
        }
        set(select, "sm_90"); set(warps, "32"); set(select, "gfx942");
        done([...found, values(), output.textContent.includes("fit")]);""",
        chart,
    )
    cut = ["255", "32784", "16"]
    assert values == [["400", "32784", "16"], cut, cut, cut, True]


def test_figure_above_the_chart_shows_the_same():
    """Paper, a notebook and a reader without JavaScript get the figure."""
    cells = json.loads((ROOT / "book/occupancy.ipynb").read_text("utf-8"))["cells"]
    [at] = [i for i, cell in enumerate(cells) if "occupancy-chart" in "".join(cell["source"])]
    above = cells[at - 1]
    assert any("image/png" in output.get("data", {}) for output in above["outputs"])
    assert above["metadata"]["mystnb"]["image"]["alt"]
    style = (STATIC / "memtraffic.css").read_text("utf-8")
    assert re.search(r"@media print \{\s*\.occupancy-chart \{\s*display: none;", style)


@browser
def test_chart_ranges_are_those_of_the_gpu(browse, chart):
    ends = {}
    for target, gpu in TARGETS.items():
        most = 255 if gpu.vendor == "nvidia" else gpu.max_addressable_vgprs
        warps = 1024 // gpu.warp_size
        ends[target] = {"registers": (1, most), "shared": (0, 262144), "warps": (1, warps)}
    script = f"""const ends = {json.dumps(ends)}, inputs = {{ registers, shared, warps }};
    const found = {{}};
    for (const target of {json.dumps(list(TARGETS))}) {{
      set(select, target);
      for (const [name, [min, max]] of Object.entries(ends[target])) {{
        const input = inputs[name], slider = sliders[Object.keys(inputs).indexOf(name)];
        found[`${{target}} ${{name}}`] = [
          [min - 1, min, max, max + 1].map((value) => set(input, value).text),
          [input.min, input.max, slider.min, slider.max].map(Number),
        ];
        set(input, 4);
      }}
    }}
    done(found);"""
    found = browse(USED + script, chart)
    assert len(found) == 3 * len(TARGETS)
    for target, own in ends.items():
        for word, (name, (least, most)) in zip(words_of(target), own.items(), strict=True):
            texts, range_shown = found[f"{target} {name}"]
            message = f"{word}: from {least} to {most}"
            assert range_shown == [least, most] * 2, (target, name)
            assert [text == message for text in texts] == [True, False, False, True]
            assert all(". Limit: " in text for text in texts[1:3])


@browser
def test_chart_can_be_used_without_a_mouse_or_eyes(browse, chart):
    inputs, ids, aloud, resources = browse(
        """
        const all = (selector) => [...document.querySelectorAll(selector)];
        const inputs = all(".occupancy-chart :is(select, input)").map((input) => {
          input.focus();
          const labels = [...input.labels].map((label) => label.textContent).join();
          const focused = document.activeElement === input && input.tabIndex >= 0;
          return [input.type, labels || input.getAttribute("aria-label"), focused];
        });
        const ids = all("[id]").map((element) => element.id);
        const live = all(".occupancy-chart output").map((it) => it.getAttribute("aria-live"));
        done([inputs, ids, live, performance.getEntriesByType("resource").map((it) => it.name)]);
        """,
        chart + chart,
    )
    kinds = ["select-one", *["number", "range"] * 3]
    assert [kind for kind, _, _ in inputs] == kinds * 2
    assert all(name and focused for _, name, focused in inputs), inputs
    assert len(set(ids)) == len(ids), "two charts share an id"
    assert aloud == ["polite", "polite"]
    assert set(resources) <= {path.as_uri() for path in SCRIPTS}, "fetched from elsewhere"
