"""The chart of how many programs fit, in a real browser, against the module whose rules it repeats."""

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from memtraffic import occupancy
from memtraffic.occupancy import amd, nvidia
from memtraffic.targets import Resources

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "book" / "_static"
SCRIPTS = [STATIC / "occupancy-data.js", STATIC / "occupancy.js"]
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --host-resolver-rules=MAP\t*\t~NOTFOUND --dump-dom"
).split(" ")


def test_the_data_is_that_of_the_module():
    made = f"{occupancy.script()}\n"
    assert SCRIPTS[0].read_text("utf-8") == made, (
        "book/_static/occupancy-data.js is not what the module holds; make it anew:\n"
        'python -c "from memtraffic import occupancy; print(occupancy.script())" > book/_static/occupancy-data.js'
    )


def test_the_chart_asks_for_nothing_from_elsewhere():
    text = SCRIPTS[1].read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(
        r"https?:|fetch\(|XMLHttpRequest|import\(|WebSocket|@import|\bsrc\b", text
    )


@pytest.fixture
def browse(tmp_path):
    """Opens a page with the two scripts and `body` in a browser, runs `script` there; returns what it gave to `done`."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not program:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)}")

    def run(script, body=""):
        tags = "".join(f'<script src="{it.as_uri()}"></script>' for it in SCRIPTS)
        page = tmp_path / "page.html"
        page.write_text(
            f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>chart</title><pre id="done"></pre>{body}
<script>const wrong = []; addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));
const done = (found) => document.getElementById("done").textContent = JSON.stringify({{ found, wrong }});</script>
{tags}<script>addEventListener("load", () => {{ {script} }});</script></html>""",
            encoding="utf-8",
        )
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        options = [it.replace("\t", " ") for it in OPTIONS]
        answer = subprocess.run(
            [program, *options, profile, page.as_uri()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=120,
            text=True,
        )
        [text] = re.findall(r'<pre id="done">(.*?)</pre>', answer.stdout, re.S)
        assert text, "the page's script did not come to its end"
        told = json.loads(html.unescape(text))
        assert told["wrong"] == []
        return told["found"]

    return run


POINT = ("target", "registers", "shared", "warps")


def points():
    """Kernels of any kind, and at the steps of each limit, for every target."""
    draw, found = random.Random(0), []
    for target, unit in (nvidia.SMS | amd.CUS).items():
        is_sm = target in nvidia.SMS
        piece = nvidia.shared_unit(unit) if is_sm else unit.lds_unit
        most = unit.shared_per_block if is_sm else unit.lds_per_group
        for _ in range(400):
            shared = draw.choice([0, draw.randint(0, 262144), draw.randint(0, 16384)])
            registers = draw.choice([draw.randint(1, 512), draw.randint(1, 96)])
            found.append((target, registers, shared, draw.randint(1, 32)))
        found += [(target, registers, 0, 2) for registers in range(1, 65)]
        for k in range(1, 64):
            steps = (8 * k, 8 * k + 1)
            found += [(target, it, 0, draw.choice([1, 2, 4, 8])) for it in steps]
            found += [(target, 16, k * piece + it, 1) for it in (-1, 0, 1)]
        found += [(target, 16, most + it, warps) for it in (0, 1) for warps in (1, 33)]
        found += [(target, it, 0, 1) for it in (254, 255, 256, 257, 511, 512, 513)]
        found += [(target, 8, 0, warps) for warps in (15, 16, 17, 31, 32, 33)]
    return [dict(zip(POINT, it, strict=True)) for it in found]


def of_the_module(point):
    """The chart's answer by the module; the chart knows no scalar registers and no accumulators."""
    registers = point["registers"]
    kernel = Resources(
        "k", point["target"], point["warps"], registers, 0, point["shared"],
        vgprs=registers, agprs=0, sgprs=0, allocated_vgprs=registers, allocated_sgprs=0,
    )  # fmt: skip
    limits = {
        name: programs
        for name, programs in occupancy.limits(kernel).items()
        if name != "sgprs"
    }
    report = occupancy.report(kernel)
    least = [name for name, programs in limits.items() if programs == report["resident"]]  # fmt: skip
    assert least[0] == report["binding"]
    return {"limits": limits, "resident": report["resident"], "binding": least}


def test_the_chart_answers_as_the_module(browse):
    asked = points()
    script = f"done({json.dumps(asked)}.map(window.memtrafficOccupancy.answer));"
    answers = browse(script)
    wrong = [
        (point, answer, of_the_module(point))
        for point, answer in zip(asked, answers, strict=True)
        if answer != of_the_module(point)
    ]
    assert not wrong, f"{len(wrong)} of {len(asked)} differ, such as {wrong[:3]}"
    print(f"chart: {len(asked)} answers, all equal")
    assert len(asked) > 5000
    assert {len(answer["binding"]) for answer in answers} >= {1, 2, 3}
    assert {name for answer in answers for name in answer["binding"]} == {
        "registers", "shared", "warps", "blocks", "vgprs", "waves", "lds", "groups",
    }  # fmt: skip


@pytest.fixture
def chart():
    """The chart as the chapter has it."""
    cells = json.loads((ROOT / "book/occupancy.ipynb").read_text("utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells)
    [found] = re.findall(r'<div class="occupancy-chart"[^>]*></div>', text)
    return found


USED = """
const box = document.querySelector(".occupancy-chart"), output = box.querySelector("output"), svg = box.querySelector("svg");
const [select, registers, shared, warps] = box.querySelectorAll("select, input[type=number]");
const sliders = [...box.querySelectorAll("input[type=range]")], detail = box.querySelector("output + p");
const said = () => ({
  text: output.textContent, detail: detail.textContent, drawn: svg.childElementCount, label: svg.getAttribute("aria-label"),
  words: [registers, shared, warps].map((it) => it.labels[0].textContent),
});
const set = (input, value) => {
  input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  return said();
};
"""


NAMES = {
    "registers": "registers", "shared": "shared memory", "warps": "places for warps", "blocks": "places for programs",
    "vgprs": "vector registers", "waves": "places for waves", "lds": "LDS", "groups": "places for workgroups",
}  # fmt: skip
WORDS = {
    "nvidia": ("registers a thread", "shared memory, bytes a program", "warps a program"),
    "amd": ("vector registers a lane", "LDS, bytes a program", "waves a program"),
}  # fmt: skip


def words_of(target):
    return WORDS["nvidia" if target in nvidia.SMS else "amd"]


def answer_text(target, registers, shared, warps):
    """What the chart says: how many fit and what limits them, and after it all limits."""
    point = {"target": target, "registers": registers, "shared": shared, "warps": warps}
    answer = of_the_module(point)
    counts = {0: "None fits", 1: "1 program fits"}
    count = counts.get(answer["resident"], f"{answer['resident']} programs fit")
    names = ", ".join(NAMES[name] for name in answer["binding"])
    limits = (f"{NAMES[name]} {value}" for name, value in answer["limits"].items())
    return f"{count}. Limit: {names}.", ", ".join(limits)


def test_every_input_of_the_chart_changes_its_answer(browse, chart):
    found = browse(
        USED
        + """done({
          first: said(),
          target: set(select, "gfx942"), back: set(select, "sm_90"),
          registers: set(registers, "128"), slider_after_number: sliders[0].value,
          slider: set(sliders[0], "200"), number_after_slider: registers.value,
          shared: set(shared, "100000"), warps: set(warps, "16"), none: set(registers, "255"),
          one: (set(shared, "0"), set(registers, "128")),
          keyboard: (set(shared, "100000"), sliders[0].value = 33, sliders[0].stepDown(), set(sliders[0], sliders[0].value)),
        });""",
        chart,
    )
    said = {name: it for name, it in found.items() if isinstance(it, dict)}
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
        told = said[name]
        assert (told["text"], told["detail"]) == answer_text(*point), (name, told)
        assert tuple(told["words"]) == words_of(point[0])
        word = words_of(point[0])[0]
        resident = of_the_module(dict(zip(POINT, point, strict=True)))["resident"]
        assert told["label"] == f"Programs that fit, by {word}: {resident} at {point[1]}."  # fmt: skip
    assert set(said) == set(expected)
    assert said["first"]["text"] == "6 programs fit. Limit: shared memory."
    assert said["first"]["detail"] == "registers 7, shared memory 6, places for warps 16, places for programs 32"  # fmt: skip
    assert said["none"]["text"] == "None fits. Limit: registers."
    assert said["one"]["text"] == "1 program fits. Limit: registers."
    assert "vector registers 7" in said["target"]["detail"]
    assert "LDS 1" in said["target"]["detail"]
    assert (found["slider_after_number"], found["number_after_slider"]) == ("128", "200")  # fmt: skip
    assert found["first"]["drawn"] >= 3
    assert found["slider"]["label"].endswith(" at 200.")


@pytest.mark.parametrize(
    ("target", "name", "value", "message"),
    [
        pytest.param("sm_90", "registers", "0", "registers a thread: from 1 to 255", id="too-few"),
        pytest.param("sm_90", "registers", "256", "registers a thread: from 1 to 255", id="too-many"),
        pytest.param("sm_90", "registers", "-5", "registers a thread: from 1 to 255", id="negative"),
        pytest.param("sm_90", "registers", "", "registers a thread: from 1 to 255", id="empty"),
        pytest.param("sm_90", "registers", "many", "registers a thread: from 1 to 255", id="no-number"),
        pytest.param("gfx942", "registers", "513", "vector registers a lane: from 1 to 512", id="too-many-on-cdna"),
        pytest.param("gfx1100", "registers", "257", "vector registers a lane: from 1 to 256", id="too-many-on-rdna"),
        pytest.param("sm_90", "shared", "262145", "shared memory, bytes a program: from 0 to 262144", id="shared"),
        pytest.param("gfx942", "shared", "262145", "LDS, bytes a program: from 0 to 262144", id="lds"),
        pytest.param("sm_90", "warps", "33", "warps a program: from 1 to 32", id="warps"),
        pytest.param("gfx942", "warps", "17", "waves a program: from 1 to 16", id="waves-on-cdna"),
        pytest.param("gfx1201", "warps", "33", "waves a program: from 1 to 32", id="waves-on-rdna"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_said(browse, chart, target, name, value, message):
    script = f"set(select, {target!r}); done([set({name}, {value!r}), set({name}, '4')]);"  # fmt: skip
    wrong, right = browse(USED + script, chart)
    assert (wrong["text"], wrong["detail"], wrong["drawn"]) == (message, "", 0)
    assert wrong["label"] is None
    assert "fit" in right["text"] and right["detail"] and right["drawn"] > 0
    assert right["label"].startswith("Programs that fit, by ")


def test_the_ranges_are_those_of_the_gpu(browse, chart):
    targets = [*nvidia.SMS, *amd.CUS]
    ends = {}
    for target, unit in (nvidia.SMS | amd.CUS).items():
        most = 255 if target in nvidia.SMS else unit.most_vgprs
        warps = 16 if target.startswith("gfx9") else 32
        ends[target] = {"registers": (1, most), "shared": (0, 262144), "warps": (1, warps)}  # fmt: skip
    script = f"""const ends = {json.dumps(ends)}, inputs = {{ registers, shared, warps }}, found = {{}};
    for (const target of {json.dumps(targets)}) {{
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
    assert len(found) == 3 * len(targets)
    for target, own in ends.items():
        for word, (name, (least, most)) in zip(words_of(target), own.items(), strict=True):  # fmt: skip
            texts, told = found[f"{target} {name}"]
            message = f"{word}: from {least} to {most}"
            assert told == [least, most] * 2, (target, name)
            assert [text == message for text in texts] == [True, False, False, True]
            assert all(". Limit: " in text for text in texts[1:3])


def test_the_chart_can_be_used_without_a_mouse_or_eyes(browse, chart):
    inputs, ids, aloud, resources = browse(
        """
        const inputs = [...document.querySelectorAll(".occupancy-chart :is(select, input)")].map((it) => {
          it.focus();
          const name = [...it.labels].map((label) => label.textContent).join() || it.getAttribute("aria-label");
          return [it.type, name, document.activeElement === it && it.tabIndex >= 0];
        });
        const ids = [...document.querySelectorAll("[id]")].map((it) => it.id);
        const outputs = [...document.querySelectorAll(".occupancy-chart output")].map((it) => it.getAttribute("aria-live"));
        done([inputs, ids, outputs, performance.getEntriesByType("resource").map((it) => it.name)]);
        """,
        chart + chart,
    )
    kinds = ["select-one", *["number", "range"] * 3]
    assert [kind for kind, _, _ in inputs] == kinds * 2
    assert all(name and focused for _, name, focused in inputs), inputs
    assert len(set(ids)) == len(ids), "two charts share an id"
    assert aloud == ["polite", "polite"]
    assert set(resources) <= {it.as_uri() for it in SCRIPTS}, "fetched from elsewhere"
