"""The figures that move, in a real browser, against what they show: counts and recordings."""

import re
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from browser import run_script

from memtraffic import count
from memtraffic.kernels.softmax import naive
from memtraffic_book import build
from memtraffic_book.figures import moving

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
SCRIPT = STATIC / "figures.js"
browser = pytest.mark.browser


def test_figures_are_drawn_from_what_is_counted_and_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "book_folder", lambda: tmp_path)
    (tmp_path / "_static").mkdir()
    for path in build.draw_moving():
        stored = (STATIC / path.name).read_text("utf-8")
        assert stored == path.read_text("utf-8"), f"python -m memtraffic_book moving: {path.name}"
    assert {path.name for path in STATIC.glob("*.svg") if "<script" in path.read_text()} == {
        path.name for path in (tmp_path / "_static").iterdir()
    }


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
  const found = [seen(figure)];
  while (!before.disabled) { before.click(); found.push(seen(figure)); }
  const back = found.reverse(), on = [back[0]];
  while (!after.disabled) { after.click(); on.push(seen(figure)); }
  if (JSON.stringify(on) !== JSON.stringify(back)) throw new Error("on and back differ");
  return on;
};
"""


def expected_of_programs(rung):
    """After each access: the owner of each element of x and y, the bytes, and what is now moved."""
    accesses = count(rung.run, torch.zeros(rung.shape), trace=True).accesses
    owners = {"x": {}, "y": {}}
    moved = {"read": 0, "written": 0}
    yield owners, moved, None
    for access in accesses:
        moved[access.kind] += 4 * len(access.offsets)
        owners[access.argument[0]] |= dict.fromkeys(access.offsets, access.program[0])
        yield owners, moved, access


@browser
def test_stepper_shows_each_access_of_each_program(browse):
    rungs = {name: rung for name, rung in moving.RUNGS.items() if name != "naive"}
    found = browse([f"steps-{name}" for name in rungs], STATES + "done(figures.map(states));")
    for rung, states in zip(rungs.values(), found, strict=True):
        elements = rung.shape[0] * rung.shape[1]
        for state, (owners, moved, access) in zip(states, expected_of_programs(rung), strict=True):
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


@browser
def test_stepper_shows_each_operation_of_the_five_lines(browse):
    [states] = browse(["steps-naive"], STATES + "done(figures.map(states));")
    ops = count(naive.softmax, torch.zeros(4, 8)).ops
    moved = [(op.read_bytes, 0) for op in ops], [(0, op.written_bytes) for op in ops]
    turns = [turn for pair in zip(*moved, strict=True) for turn in pair]
    totals = list(accumulate(turns, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
    for i, (state, (read, written)) in enumerate(zip(states, totals, strict=True)):
        texts = state["texts"]
        assert texts["load bytes"] == f"read {read} bytes"
        assert texts["store bytes"] == f"written {written} bytes"
        lit = [cell for key in moving.TENSORS for cell in state["groups"][key] if cell[:2] == "of"]
        assert len(lit) * 4 == sum(turns[i - 1] if i else (0,))
        assert not i or f": {ops[(i - 1) // 2].name} " in state["said"]
    assert totals[-1] == (4 * (5 * 32 + 2 * 4), 4 * (3 * 32 + 2 * 4))
    assert [state["texts"]["x trips"] for state in states][::3] == [
        "read 0×",
        "read 2×",
        *["read 2×"] * 2,
    ]


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
    names = [path.stem for path in map(Path, moving.draw())]
    found = browse(
        names,
        """
        const used = (figure) => [...figure.querySelectorAll("button, input, select")];
        const named = (it) => it.ariaLabel || it.labels?.[0]?.textContent || it.textContent;
        const focused = (it) => (it.disabled = false, it.focus(), document.activeElement === it);
        done(figures.map((figure) => used(figure).map((it) => [named(it).trim(), focused(it)])));
        """,
    )
    for inputs in found:
        assert inputs and all(name and focused for name, focused in inputs)
