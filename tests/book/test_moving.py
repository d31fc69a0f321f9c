"""The figures that move, in a real browser, against what they show: counts and recordings."""

import json
import math
import random
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from browser import run_script

from memtraffic import count
from memtraffic.kernels.softmax import naive
from memtraffic.meters.operations import OpTraffic
from memtraffic.meters.sectors import count_sectors
from memtraffic_book import build, recording, units
from memtraffic_book.catalog import EXPERIMENTS
from memtraffic_book.figures import moving

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
SCRIPT = STATIC / "figures.js"
browser = pytest.mark.browser


def test_figures_are_filled_with_what_is_counted_and_recorded(monkeypatch, tmp_path):
    """Their script computes what the others show: see below."""
    monkeypatch.setattr(build, "book_folder", lambda: tmp_path)  # not that of the recordings
    shutil.copytree(STATIC, tmp_path / "_static")
    filled = {path.name: path.read_text("utf-8") for path in build.draw_moving()}
    for name, text in filled.items():
        stored = (STATIC / name).read_text("utf-8")
        assert stored == text, f"python -m memtraffic_book moving: {name}"
    moving = {it.name for it in STATIC.glob("*.svg") if "<script" in it.read_text("utf-8")}
    assert moving == filled.keys() | {"trips.svg", "warp.svg"}


def test_fill_overwrites_all_that_changes():
    flight, idle, stored = *recorded(), (STATIC / "letters.svg").read_text("utf-8")
    states = moving.letters(flight, idle)
    fixed = {"most": "7 < 8", "line": {"d": "M0 0"}, "dots": {"d": ""}}
    changed = moving.fill(stored, moving.States(states.frames[:3], 0, fixed))
    assert ">7 &lt; 8<" in changed and ">1.0 kB in flight per SM<" in changed
    assert changed.count('"say"') == 3 and '"start":0' in changed
    assert changed.count('class="of0"') == 1 and 'd="M0 0" fill' in changed
    assert moving.fill(changed, states) == stored


def recorded():
    """What the letters are drawn from: the lines of a kernel that reads, and the idle latency."""
    folder = recording.root() / recording.PUBLISHED
    flight = recording.read(folder, EXPERIMENTS["bytes_in_flight"]).query("access == 'read'")
    [idle] = recording.read(folder, EXPERIMENTS["occupancy_latency"])["latency_ns"]
    return flight, idle


def test_script_asks_for_nothing_from_elsewhere():
    assert not re.findall(
        r"https?:|fetch\(|XMLHttpRequest|import\(|WebSocket|\bsrc\b", SCRIPT.read_text()
    )


@pytest.fixture
def browse(tmp_path):
    """Runs a script on a page with these figures; `figures` are their elements."""

    def run(names, script, *options):
        drawn = [(STATIC / f"{name}.svg").read_text("utf-8") for name in names]
        body = "".join(f'<figure class="moving">{text}</figure>' for text in drawn)
        start = 'const figures = [...document.querySelectorAll("figure.moving")];'
        return run_script(tmp_path, [SCRIPT], start + script, body, *options)

    return run


# ---- frames

STATES = """
const seen = (figure) => {
  const all = (key, of) => Object.fromEntries(
    [...figure.querySelectorAll(`[data-${key}]`)].map((it) => [it.dataset[key], of(it)]));
  return {
    groups: all("group", (it) => [...it.children].map((each) => each.getAttribute("class"))),
    texts: all("text", (it) => it.textContent),
    places: all("place", (it) => ({
      width: it.getAttribute("width"), height: it.getAttribute("height"),
      x: it.getAttribute("x"), y: it.getAttribute("y") })),
    said: figure.querySelector("output").textContent,
    value: Number(figure.querySelector("input").value),
    disabled: [...figure.querySelectorAll("button")].map((it) => it.disabled),
  };
};
const states = (figure) => {
  const [play, before, after] = figure.querySelectorAll("button");
  while (!after.disabled) after.click();
  const found = [seen(figure)];
  while (!before.disabled) { before.click(); found.push(seen(figure)); }
  const back = found.reverse(), on = [back[0]];
  while (!after.disabled) { after.click(); on.push(seen(figure)); }
  if (JSON.stringify(on) !== JSON.stringify(back)) throw new Error("on and back differ");
  return on;
};
"""


def drawn(name):
    """The texts of a still picture, by key, and those of a group as a list."""
    root = ElementTree.parse(STATIC / f"{name}.svg").getroot()
    texts = {it.get("data-text"): it.text for it in root.iter() if it.get("data-text")}
    groups = {it.get("data-group"): [each.text for each in it] for it in root.iter()}
    return texts | groups


def expected_of_programs(softmax, shape):
    """After each access: the owner of each element of x and y, the bytes, and what is now moved."""
    accesses = count(softmax, torch.zeros(shape), trace=True).accesses
    owners = {"x": {}, "y": {}}
    moved = {"read": 0, "written": 0}
    yield owners, moved, None
    for access in accesses:
        moved[access.kind] += 4 * len(access.offsets)
        owners[access.argument[0]] |= dict.fromkeys(access.offsets, access.program[0])
        yield owners, moved, access


@browser
def test_stepper_shows_each_access_of_each_program(browse):
    rungs = moving.RUNGS
    found = browse([f"steps-{name}" for name in rungs], STATES + "done(figures.map(states));")
    for (name, rung), states in zip(rungs.items(), found, strict=True):
        elements = math.prod(rung[1])
        for state, (owners, moved, access) in zip(states, expected_of_programs(*rung), strict=True):
            for tensor, whose in owners.items():
                rest = "idle" if tensor == "x" else "none"
                now = access.offsets if access and access.argument[0] == tensor else ()
                kind = " load" if tensor == "x" else " store"
                assert state["groups"][tensor] == [
                    (f"of{whose[i]}" if i in whose else rest) + kind * (i in now)
                    for i in range(elements)
                ]
            for kind, word in (("load", "read"), ("store", "written")):
                assert state["texts"][f"{kind} bytes"] == f"{word} {moved[word]} bytes"
                width = moving.FULL * moved[word] / (4 * elements)
                assert float(state["places"][f"{kind} bar"]["width"]) == pytest.approx(width)
            if access:
                held = [it == f"of{access.program[0]}" for it in state["groups"]["held"]]
                assert sum(held) == len(access.offsets)
                assert f"program {access.program[0]} " in state["said"]
        assert moved == {"read": 4 * elements, "written": 4 * elements}
        for tensor, whose in owners.items():  # which the picture has at each element
            assert drawn(f"steps-{name}")[f"{tensor} who"] == [str(whose[i]) for i in sorted(whose)]


@browser
def test_letters_show_each_point_of_the_recording(browse):
    flight, idle = recorded()
    [states] = browse(["letters"], STATES + "done(figures.map(states));")
    best = flight["gb_per_s"].max()
    for state, row in zip(states, flight.itertuples(), strict=True):
        drawn = state["groups"]["letters"]
        assert len(drawn) - drawn.count("gone") == row.kib_per_sm
        law = row.gb_per_s * idle / row.sms / 1024  # GB/s times ns is bytes
        assert drawn.count("of0") == pytest.approx(law, abs=0.51)
        assert state["texts"]["travel"] == f"{drawn.count('of0')} travel"
        assert state["texts"]["wait"] == f"{drawn.count('dead')} not under way"
        assert float(state["places"]["bag"]["height"]) == pytest.approx(70 * row.gb_per_s / best)
        said = f"With {1.024 * row.kib_per_sm:.1f} kB in flight per SM, a read reaches "
        said += f"{row.gb_per_s:.0f} GB/s, and an answer takes {row.latency_ns:,.0f} ns at most."
        assert state["said"] == said
        assert state["texts"]["full"] == f"{100 * row.gb_per_s / best:.0f} % full"


def expected_of_trips(ops, moved):
    """What the picture says of these operations when so many bytes have moved."""
    matrix, trips, left = 4 * 4096 * 16384, {"loads": 0, "stores": 0}, moved
    for op in ops:
        for kind, n_bytes in (("loads", op.read_bytes), ("stores", op.written_bytes)):
            trips[kind] += n_bytes > matrix / 2
            if left < n_bytes:
                share = left / n_bytes if kind == "loads" else 1 - left / n_bytes
                return op.name, trips, math.floor(8 * share + 0.5)
            left -= n_bytes
    return "done", trips, 0


@browser
def test_trips_say_what_has_moved(browse):
    draw = random.Random(0)
    asked = [0, 1, 999, 1000, *(draw.randint(0, 1000) for _ in range(100))]
    script = (
        STATES
        + f"""
      const slider = figures[0].querySelector("input");
      const at = (value) => {{
        slider.value = value;
        slider.dispatchEvent(new Event("input"));
        return seen(figures[0]);
      }};
      done({asked}.map(at));"""
    )
    states = browse(["trips"], script, "--force-prefers-reduced-motion")
    matrix = 4 * 4096 * 16384
    lines = count(naive.softmax, torch.empty(4096, 16384, device="meta"))
    total = lines.read_bytes + lines.written_bytes
    assert total == 8 * matrix + 4 * 4 * 4096
    kernel = [OpTraffic("softmax", 0, 0, matrix, matrix)]
    for share, state in zip(asked, states, strict=True):
        moved = math.floor(share / 1000 * total + 0.5)
        for i, (ops, most) in enumerate(((lines.ops, total), (kernel, 2 * matrix))):
            name, trips, held = expected_of_trips(ops, min(moved, most))
            assert state["texts"][f"{i} name"] == name
            assert state["texts"][f"{i} moved"] == units.format_bytes(min(moved, most))
            assert trips == {it: int(state["texts"][f"{i} {it}"][:-1]) for it in trips}
            assert state["groups"][f"{i} held"] == [f"of{i}"] * held + ["none"] * (8 - held)
    still = states[asked.index(1000)]["texts"]
    assert still == {key: text for key, text in drawn("trips").items() if key in still}


@browser
def test_sectors_of_a_warp_are_those_that_the_meter_counts(browse):
    draw, ends = random.Random(0), [(1, 0), (1, 7), (8, 0), (8, 7)]
    strides = ends + [
        (draw.choice([1, 1, draw.randint(1, 8)]), draw.randint(0, 7)) for _ in range(100)
    ]
    asked = [
        (draw.choice(["float32", "bfloat16"]), draw.choice([32, 64, 128]), *it) for it in strides
    ]
    asked += [("bfloat16", 16, 1, 3), ("bfloat16", 128, 1, 7), ("float32", 128, 1, 4)]
    asked += [("float32", 32, 2, 0)]  # as the still picture
    script = f"""
      const [dtype, bits, stride, first] = figures[0].querySelectorAll("select, input");
      const all = (key) => [...figures[0].querySelectorAll(`[data-${{key}}]`)];
      const texts = () => all("text").map((it) => it.textContent);
      const boxes = [...figures[0].querySelector("[data-group=sectors]").children];
      const lanes = () => all("place").map((it) => (it.getAttribute("d").match(/M/g) ?? []).length);
      done({json.dumps(asked)}.map((values) => {{
        [stride, dtype, bits, first].forEach((input, i) => {{
          input.value = values[[2, 0, 1, 3][i]];
          input.dispatchEvent(new Event("input", {{ bubbles: true }}));
        }});
        return [texts(), boxes.map((it) => it.getAttribute("class") === "on"), lanes(), bits.value];
      }}));"""
    seen = set()
    for (dtype, bits, stride, first), found in zip(asked, browse(["warp"], script), strict=True):
        size = {"float32": 4, "bfloat16": 2}[dtype]
        wanted = bits // 8 // size if stride == 1 else 1
        vector = max(it for it in (1, 2, 4, 8) if wanted % it == 0 and first % it == 0)
        lanes = np.arange(32) * wanted * stride
        addresses = np.stack([size * (first + lanes + k) for k in range(0, wanted, vector)])
        requests, sectors = count_sectors(addresses, np.ones(32, dtype=bool))
        texts, boxes, drawn, shown = found
        assert texts == [
            f"{requests} request{'s' * (requests > 1)} of {8 * size * vector} bits a lane",
            f"{sectors / requests:g} sectors per request",
            f"wanted {32 * wanted * size} bytes",
            f"moved {32 * sectors} bytes",
        ]
        assert [i for i, on in enumerate(boxes) if on] == np.unique(addresses // 32).tolist()
        assert drawn == [32] * requests + [0] * (8 - requests)
        assert shown == str(8 * size * wanted)
        seen.add((requests, sectors // requests))
    assert len(seen) > 10, seen
    root = ElementTree.parse(STATIC / "warp.svg").getroot()
    [group] = root.findall(".//*[@data-group='sectors']")
    assert [it.get("class") == "on" for it in group] == boxes
    still = [it.text for it in root.findall(".//*[@data-text]")]
    assert still == texts


@browser
def test_frames_play_to_the_end_and_can_be_stopped(browse):
    script = (
        STATES
        + """
      const [play, before, after] = figures[0].querySelectorAll("button");
      const slider = figures[0].querySelector("input"), marks = [];
      const output = figures[0].querySelector("output");
      const look = () => marks.push([slider.value, play.textContent, output.ariaLive]);
      const slide = (to) => { slider.value = to; slider.dispatchEvent(new Event("input")); };
      look(); play.click(); look();
      setTimeout(() => { look(); play.click(); look(); }, 2500);
      setTimeout(() => { look(); slide(1); look(); play.click(); }, 6000);
      setTimeout(() => { look(); done(marks); }, 20000);"""
    )
    found = browse(["steps-tiled"], script, "--virtual-time-budget=30000")
    assert found == [
        *(["4", "Play", "polite"], ["0", "Pause", "off"], ["2", "Pause", "off"]),
        *(["2", "Play", "polite"], ["2", "Play", "polite"], ["1", "Play", "polite"]),
        ["4", "Play", "polite"],
    ]


@browser
def test_figures_can_be_used_without_a_mouse_or_eyes(browse):
    found = browse(
        sorted(path.stem for path in STATIC.glob("*.svg") if "<script" in path.read_text("utf-8")),
        """
        const used = (figure) => [...figure.querySelectorAll("button, input, select")];
        const named = (it) => it.ariaLabel || it.labels?.[0]?.textContent || it.textContent;
        const focused = (it) => (it.disabled = false, it.focus(), document.activeElement === it);
        done(figures.map((figure) => used(figure).map((it) => [named(it).trim(), focused(it)])));
        """,
    )
    for inputs in found:
        assert inputs and all(name and focused for name, focused in inputs)
