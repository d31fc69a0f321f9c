"""The states of the figures that move: of what is counted, or read from a recording.

Such a figure is an SVG file in `book/_static`, a still picture that carries its states. A notebook,
Colab, paper and a page without JavaScript show the picture as any other image. The site puts the
SVG itself into the page, and `book/_static/figures.js` moves what it finds there. How it is drawn
the file says alone: `fill` puts the states into it. Two figures have nothing to be filled with,
because their script computes what they show: `trips.svg` and `warp.svg`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pandas as pd
import torch

from memtraffic.kernels.softmax import fused, masked, persistent, tiled
from memtraffic.meters.count import count
from memtraffic_book import units

SVG = "http://www.w3.org/2000/svg"


class Frame(NamedTuple):
    """A state of a picture.

    say: the sentence that is read out. classes: for the name of each group, the class of each of
    its members. texts: by key. places: the attributes of what moves, by key.
    """

    say: str
    classes: Mapping[str, Sequence[str]]
    texts: Mapping[str, str]
    places: Mapping[str, Mapping[str, float | str]]


class States(NamedTuple):
    """The states of a picture: the number of the one that it shows, and what is the same in all.

    fixed: texts and attributes by key, as of a `Frame`.
    """

    frames: Sequence[Frame]
    start: int = -1
    fixed: Mapping[str, Any] = {}


def fill(picture: str, states: States) -> str:
    """The text of an SVG file with these states in it, which shows one of them.

    picture: the text of the file. What changes has its key as `data-group`, `data-text` or
    `data-place`.
    """
    ElementTree.register_namespace("", SVG)
    root, frames, shown = (
        ElementTree.fromstring(picture),
        states.frames,
        states.frames[states.start],
    )
    texts, places = {**shown.texts, **states.fixed}, {**shown.places, **states.fixed}
    for element in root.iter():
        if key := element.get("data-group"):
            for member, of in zip(element, shown.classes[key], strict=True):
                member.attrib.pop("class", None)
                member.attrib |= {"class": of} if of else {}
        if key := element.get("data-text"):
            element.text = texts[key]
        if key := element.get("data-place"):
            for name, value in places[key].items():
                element.set(name, f"{value:g}" if isinstance(value, float) else str(value))
    [script] = root.iter(f"{{{SVG}}}script")
    names = list(
        dict.fromkeys(it for frame in frames for of in frame.classes.values() for it in of)
    )
    told = [
        frame._asdict()
        | {"classes": {key: [*map(names.index, of)] for key, of in frame.classes.items()}}
        for frame in frames
    ]
    data = {"names": names, "frames": told, "start": states.start % len(frames)}
    script.text = json.dumps(json.loads(script.text or "") | data, separators=(",", ":"))
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>") + "\n"


# ---- who touches which element

RUNGS: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {  # and the matrix of each
    "fused": (fused.softmax, (4, 8)),
    "masked": (masked.softmax, (4, 6)),
    "tiled": (functools.partial(tiled.softmax, rows=2), (4, 8)),
    "persistent": (functools.partial(persistent.softmax, rows=1, programs=2), (4, 8)),
}
KINDS = {"read": "load", "written": "store"}
ITEMSIZE = 4  # bytes of an element
FULL = 284.0  # units that a bar is wide when all has moved


def step_frames(softmax: Callable[..., Any], shape: tuple[int, int]) -> Iterator[Frame]:
    """The state before a rung accesses a small matrix, and that after each load and store.

    Raises AssertionError where it does not read MN elements and write MN.
    """
    m, n = shape
    counted = count(softmax, torch.zeros(shape), trace=True)
    moved = counted.read_elements, counted.written_elements
    assert moved == (m * n, m * n), moved
    found = counted.accesses  # loads and stores take turns
    look = {"x": ["idle"] * (m * n), "y": ["none"] * (m * n)}
    sent = dict.fromkeys(KINDS, 0)
    for number in range(len(found) + 1):
        at = max(0, number - 1)
        step, turn = found[at], found[at // 2 * 2 :][:2]
        touched = step.offsets if number else ()
        sent[step.kind] += len(touched)
        who, tensor = step.program[0], step.argument.removesuffix("_ptr")
        classes = {tensor: [*cells] for tensor, cells in look.items()}
        for i in touched:
            look[tensor][i] = f"of{who}"
            classes[tensor][i] = f"of{who} {KINDS[step.kind]}"
        texts = {KINDS[it.kind]: f"{KINDS[it.kind]}s {len(it.offsets)} elements" for it in turn}
        texts["who"] = f"program {who}"
        classes |= {
            f"{it} who": ["" if of[:2] == "of" else "gone" for of in cells]
            for it, cells in look.items()
        }
        held = (f"of{who}", "dead") if number else ("none", "none")
        block = 1 << (n - 1).bit_length()  # columns; those that the matrix has not are dead
        classes["held"] = (len(step.offsets) // n) * ([held[0]] * n + [held[1]] * (block - n))
        places = {}
        for kind, name in KINDS.items():
            classes[f"{name} way"] = ["" if touched and kind == step.kind else "off"]
            texts[f"{name} bytes"] = f"{kind} {ITEMSIZE * sent[kind]} bytes"
            places[f"{name} bar"] = {"width": FULL * sent[kind] / (m * n)}
        say = f"Step {number} of {len(found)}: program {who} {texts[KINDS[step.kind]]}."
        yield Frame(say if number else "Nothing has moved yet.", classes, texts, places)


# ---- letters in the post

LETTER = 1024  # bytes in flight per SM
CHART = (112.0, 290.0, 112.0, 182.0)  # left, right, top, bottom


def letters(read: pd.DataFrame, idle_ns: float) -> States:
    """Bytes in flight: letters in the post, and the bag that they fill.

    read: the recorded lines of a kernel that reads, with columns `kib_per_sm`, `sms`, `gb_per_s`
    and `latency_ns`. idle_ns: how long an answer takes where memory has nothing else to do. By
    Little's law, bandwidth × idle latency of the bytes in flight travel. The others are not under
    way: they wait in line, or are those of a program that has nothing in flight just then.
    """
    most, kib = read["gb_per_s"].max(), read["kib_per_sm"].max()
    left, right, top, bottom = CHART
    points = [
        (left + (right - left) * it.kib_per_sm / kib, bottom - (bottom - top) * it.gb_per_s / most)
        for it in read.itertuples()
    ]
    frames = []
    for it, (x, y) in zip(read.itertuples(), points, strict=True):
        travel = min(it.kib_per_sm, round(it.gb_per_s * idle_ns / it.sms / LETTER))
        wait, full = it.kib_per_sm - travel, it.gb_per_s / most
        flight = units.format_bytes(LETTER * it.kib_per_sm)
        answer = f"{units.format_ns(it.latency_ns)} at most"
        say = f"With {flight} in flight per SM, a read reaches {units.format_gb_per_s(it.gb_per_s)}"
        say += f", and an answer takes {answer}."
        classes = ["of0"] * travel + ["dead"] * wait + ["gone"] * (kib - it.kib_per_sm)
        texts = {"flight": f"{flight} in flight per SM", "answer": f"answer after {answer}"}
        texts |= {"travel": f"{travel} travel", "wait": f"{wait} not under way"}
        texts["full"] = f"{100 * full:.0f} % full"
        bag = {"y": 186 - 70 * full, "height": 70 * full}
        frames.append(
            Frame(say, {"letters": classes}, texts, {"bag": bag, "here": {"cx": x, "cy": y}})
        )
    bend = next(i for i, value in enumerate(read["gb_per_s"]) if value >= 0.95 * most)
    drawn = [f"{x:.1f} {y:.1f}" for x, y in points]
    line, dots = "M" + "L".join(drawn), "".join(f"M{it}h0" for it in drawn)
    fixed = {"line": {"d": line}, "dots": {"d": dots}, "most": units.format_gb_per_s(most)}
    return States(frames, bend, fixed)


def all_states(read: pd.DataFrame, idle_ns: float) -> dict[str, States]:
    """The states of each picture, by the name of its file. read, idle_ns: as of `letters`."""
    steppers = {f"steps-{name}.svg": States([*step_frames(*it)]) for name, it in RUNGS.items()}
    return steppers | {"letters.svg": letters(read, idle_ns)}
