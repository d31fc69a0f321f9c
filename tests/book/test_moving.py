"""The figures that move, against what they show: counts and recordings."""

import functools
import itertools
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from notebooks import BOOK

from memtraffic import count
from memtraffic.kernels.softmax import fused, masked, naive, persistent, tiled
from memtraffic.meters.operations import OpTraffic
from memtraffic.meters.sectors import count_sectors
from memtraffic_book import build, recording, units
from memtraffic_book.catalog import EXPERIMENTS

STATIC = BOOK / "_static"
PUBLISHED = recording.root() / recording.PUBLISHED
RUNGS = {  # and the matrix of each
    "fused": (fused.softmax, (4, 8)),
    "masked": (masked.softmax, (4, 6)),
    "tiled": (functools.partial(tiled.softmax, rows=2), (4, 8)),
    "persistent": (functools.partial(persistent.softmax, rows=1, programs=2), (4, 8)),
}


def picture(name):
    return ElementTree.parse(STATIC / f"{name}.svg").getroot()


def keyed(root, key):
    return {it.get(f"data-{key}"): it for it in root.iter() if it.get(f"data-{key}")}


@functools.cache
def frames(name):
    """The states that a picture carries, which shows one of them."""
    root = picture(name)
    [script] = root.iter("{http://www.w3.org/2000/svg}script")
    data = json.loads(script.text)
    for frame in data["frames"]:
        classes = frame["classes"].items()
        frame["classes"] = {key: [data["names"][i] for i in of] for key, of in classes}
    shown, places = data["frames"][data["start"]], keyed(root, "place")
    groups, texts = keyed(root, "group"), keyed(root, "text")
    assert shown["texts"] == {key: texts[key].text for key in shown["texts"]}
    for key, of in shown["classes"].items():
        assert [it.get("class", "") for it in groups[key]] == of
    for key, attributes in shown["places"].items():
        for attribute, value in attributes.items():
            assert float(places[key].get(attribute)) == pytest.approx(value, rel=1e-5)
    return data["frames"]


@pytest.mark.parametrize("name", RUNGS)
def test_stepper_shows_each_access_of_each_program(name):
    softmax, (rows, columns) = RUNGS[name]
    elements, owners = rows * columns, {"x": {}, "y": {}}
    accesses = count(softmax, torch.zeros(rows, columns), trace=True).accesses
    assert sum(len(it.offsets) for it in accesses) == 2 * elements
    say, states = "Nothing has moved yet.", frames(f"steps-{name}")
    for number, (state, access) in enumerate(zip(states, [None, *accesses], strict=True)):
        touched = access.argument[0] if access else None
        if access:
            program, moved = access.program[0], len(access.offsets)
            owners[touched] |= dict.fromkeys(access.offsets, program)
            verb = {"x": "load", "y": "store"}[touched]
            say = f"Step {number} of {len(accesses)}: program {program} {verb}s {moved} elements."
            assert state["texts"][verb] == f"{verb}s {moved} elements"
            assert state["texts"]["who"] == f"program {program}"
            row = [f"of{program}"] * columns + ["dead"] * (8 - columns)  # of the block
            assert state["classes"]["held"] == moved // columns * row
        assert state["say"] == say
        for tensor, verb, word, rest in (
            "x load read idle".split(),
            "y store written none".split(),
        ):
            owner, now = owners[tensor], access.offsets if touched == tensor else ()
            assert state["classes"][tensor] == [
                (f"of{owner[i]}" if i in owner else rest) + f" {verb}" * (i in now)
                for i in range(elements)
            ]
            who = ["" if i in owner else "gone" for i in range(elements)]
            assert state["classes"][f"{tensor} who"] == who
            assert state["classes"][f"{verb} way"] == ["" if now else "off"]
            assert state["texts"][f"{verb} bytes"] == f"{word} {4 * len(owner)} bytes"
            assert state["places"][f"{verb} bar"]["width"] == 284 * len(owner) / elements
    for tensor, owner in owners.items():  # which the picture has at each element
        written = [it.text for it in keyed(picture(f"steps-{name}"), "group")[f"{tensor} who"]]
        assert written == [str(owner[i]) for i in range(elements)]


def test_letters_follow_the_law_and_the_recording():
    flight = recording.read(PUBLISHED, EXPERIMENTS["bytes_in_flight"]).query("access == 'read'")
    [idle] = recording.read(PUBLISHED, EXPERIMENTS["occupancy_latency"])["latency_ns"]
    best = flight["gb_per_s"].max()
    for state, row in zip(frames("letters"), flight.itertuples(), strict=True):
        drawn, texts = state["classes"]["letters"], state["texts"]
        assert len(drawn) - drawn.count("gone") == row.kib_per_sm
        law = row.gb_per_s * idle / row.sms / 1024  # GB/s times ns is bytes
        assert drawn.count("of0") == pytest.approx(law, abs=0.51)
        assert texts["travel"] == f"{drawn.count('of0')} travel"
        assert texts["wait"] == f"{drawn.count('dead')} wait"
        assert texts["full"] == f"{100 * row.gb_per_s / best:.0f} % full"
        assert state["places"]["bag"]["height"] == pytest.approx(70 * row.gb_per_s / best)
        said = f"{1.024 * row.kib_per_sm:.1f} kB", f"{row.gb_per_s:.0f} GB/s"
        assert all(it in state["say"] for it in (*said, f"{row.latency_ns:,.0f} ns"))


def test_letters_are_filled_anew_whatever_they_showed(monkeypatch, tmp_path):
    stored, copy = (STATIC / "letters.svg").read_text("utf-8"), tmp_path / "_static/letters.svg"
    other = re.sub(r'class="(gone|dead)"', 'class="of0"', stored)
    other = re.sub(r"\d+ (travel|wait|% full|GB/s)<", r"0 \1<", other)
    other = re.sub(r' (height|cy|d)="[^"]*"(?=[^>]*data-place)', r' \1="1"', other)
    other = re.sub(r'(data-place[^>]*) (height|cy|d)="[^"]*"', r'\1 \2="1"', other)
    copy.parent.mkdir()
    copy.write_text(other.replace('"start":', '"start":9'), "utf-8")
    monkeypatch.setattr(build, "book_folder", lambda: tmp_path)  # not that of the recordings
    assert build.draw_moving() == copy
    assert copy.read_text("utf-8") == stored != other, "python -m memtraffic_book draw"


# ---- in a browser

STATES = """
const figure = document.querySelector("figure");
const [play, before, after] = figure.querySelectorAll("button");
const slider = figure.querySelector("input"), output = figure.querySelector("output");
const all = (key, of) => Object.fromEntries(
  [...figure.querySelectorAll(`[data-${key}]`)].map((it) => [it.dataset[key], of(it)]));
const seen = () => ({
  groups: all("group", (it) => [...it.children].map((each) => each.getAttribute("class"))),
  texts: all("text", (it) => it.textContent),
  places: all("place", (it) => Object.fromEntries(
    [...it.attributes].map((each) => [each.name, each.value]))),
  said: output.textContent, value: Number(slider.value),
});
const slide = (value) => {
  slider.value = value;
  slider.dispatchEvent(new Event("input"));
  return seen();
};
"""


@pytest.fixture
def browse(browser):
    """Runs a script on a page with a figure."""

    def run(name, script):
        body = f'<figure class="moving">{(STATIC / f"{name}.svg").read_text("utf-8")}</figure>'
        return browser.run_on(body, [STATIC / "figures.js"], script)

    return run


@pytest.mark.browser
@pytest.mark.parametrize("name", ["steps-masked", "letters"])
def test_buttons_show_one_frame_after_the_other(browse, name):
    script = f"""{STATES}
      const first = seen(), back = [], on = [];
      while (after.ariaDisabled !== 'true') after.click();
      for (back.push(seen()); before.ariaDisabled !== 'true'; back.push(seen())) before.click();
      for (on.push(seen()); after.ariaDisabled !== 'true'; on.push(seen())) after.click();
      return [first, back.reverse(), on];"""
    first, back, on = browse(name, script)
    assert back == on and first in on
    for number, (state, frame) in enumerate(zip(on, frames(name), strict=True)):
        assert (state["value"], state["said"]) == (number, frame["say"])
        assert state["groups"] == frame["classes"]
        assert frame["texts"].items() <= state["texts"].items()
        for key, attributes in frame["places"].items():
            found = {name: float(state["places"][key][name]) for name in attributes}
            assert found == attributes


@pytest.mark.browser
def test_frames_play_to_the_end_and_can_be_stopped(browse):
    script = f"""{STATES}
      let tick = null, pause = 0;
      window.setInterval = (step, time, ...given) => {{
        [tick, pause] = [() => step(...given), time];
        return 1;
      }};
      window.clearInterval = () => {{ tick = null; }};
      const marks = [], at = (act) => {{
        act();
        marks.push([slider.value, play.textContent, output.ariaLive, tick !== null]);
      }};
      at(() => {{}}); at(() => play.click()); at(() => {{ tick(); tick(); }});
      at(() => play.click()); at(() => slide(1));
      at(() => {{ play.click(); while (tick) tick(); }});
      at(() => {{ play.click(); slide(2); }}); at(() => {{ play.click(); before.click(); }});
      return [marks, pause, [play, before, slider, after].map((it) => it.ariaLabel)];"""
    marks, pause, labels = browse("steps-tiled", script)
    rest = ["Play", "polite", False]
    assert marks == [
        *(["4", *rest], ["0", "Pause", "off", True], ["2", "Pause", "off", True], ["2", *rest]),
        *(["1", *rest], ["4", *rest], ["2", *rest], ["1", *rest]),
    ]
    assert 500 < pause < 2000 and labels == [None, "one back", "step", "one on"]


def expected_of_trips(ops, moved):
    """What the picture says of these operations when so many bytes have moved."""
    matrix, trips = 4 * 4096 * 16384, {"loads": 0, "stores": 0}
    for op in ops:
        for kind, n_bytes in (("loads", op.read_bytes), ("stores", op.written_bytes)):
            trips[kind] += n_bytes > matrix / 2
            if moved < n_bytes:
                share = moved / n_bytes if kind == "loads" else 1 - moved / n_bytes
                return op.name, trips, math.floor(8 * share + 0.5)
            moved -= n_bytes
    return "done", trips, 0


@pytest.mark.browser
def test_trips_say_what_has_moved(browse):
    asked = [0, 1, *range(7, 1000, 31), 1000]
    states = browse("trips", f"{STATES} return {asked}.map(slide);")
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
    assert states[-1]["texts"] == {
        key: it.text for key, it in keyed(picture("trips"), "text").items()
    }


@pytest.mark.browser
def test_sectors_of_a_warp_are_those_that_the_meter_counts(browse):
    kinds = ("float32", "bfloat16"), (32, 64, 128)
    asked = [("bfloat16", 16, 1, 3), *itertools.product(*kinds, (1, 2, 8), range(8))]
    asked += [("float32", 32, 2, 0)]  # as the still picture
    script = f"""
      const figure = document.querySelector("figure");
      const [dtype, bits, stride, first] = figure.querySelectorAll("select, input");
      const all = (key) => [...figure.querySelectorAll(`[data-${{key}}]`)];
      const texts = () => all("text").map((it) => it.textContent);
      const boxes = [...figure.querySelector("[data-group=sectors]").children];
      const lanes = () => all("place").map((it) => (it.getAttribute("d").match(/M/g) ?? []).length);
      return {json.dumps(asked)}.map((values) => {{
        [stride, dtype, bits, first].forEach((input, i) => {{
          input.value = values[[2, 0, 1, 3][i]];
          input.dispatchEvent(new Event("input", {{ bubbles: true }}));
        }});
        return [texts(), boxes.map((it) => it.getAttribute("class") === "on"), lanes(), bits.value];
      }});"""
    for (dtype, bits, stride, first), found in zip(asked, browse("warp", script), strict=True):
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
    still = picture("warp")
    assert [it.get("class") == "on" for it in keyed(still, "group")["sectors"]] == boxes
    assert [it.text for it in keyed(still, "text").values()] == texts
