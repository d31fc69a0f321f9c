"""The figures that move, and the states of the one whose states are measured.

Such a figure is an SVG file in `book/_static`, a still picture that carries its states. A notebook,
Colab, paper and a page without JavaScript show the picture as any other image. The site puts the
SVG itself into the page, and `book/_static/figures.js` moves what it finds there. How it is drawn
the file says alone, and most say their states, too, or their script computes what they show. Into
`letters.svg` its states are filled from the recordings.
"""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from memtraffic_book import units

SVG = "http://www.w3.org/2000/svg"
LETTER = 1024  # bytes in flight per SM
CHART = (112.0, 290.0, 112.0, 182.0)  # left, right, top, bottom


def letters(picture: str, read: pd.DataFrame, idle_ns: float) -> str:
    """Bytes in flight: letters in the post, and the bag that they fill. Returns the picture anew.

    picture: the text of the file. What changes has its key as `data-group`, `data-text` or
    `data-place`. read: the recorded lines of a kernel that reads, with columns `kib_per_sm`, `sms`,
    `gb_per_s` and `latency_ns`. idle_ns: how long an answer takes where memory has nothing else to
    do. By Little's law, bandwidth × idle latency of the bytes in flight travel. The others
    wait: in line, or to be written by a program that has nothing in flight just then.
    """
    most, kib = read["gb_per_s"].max(), read["kib_per_sm"].max()
    left, right, top, bottom = CHART
    names, points = ["of0", "gone", "dead"], []
    frames: list[dict[str, Any]] = []
    for it in read.itertuples():
        travel = min(it.kib_per_sm, round(it.gb_per_s * idle_ns / it.sms / LETTER))
        wait, full = it.kib_per_sm - travel, it.gb_per_s / most
        flight = units.format_bytes(LETTER * it.kib_per_sm)
        answer = f"{units.format_ns(it.latency_ns)} at most"
        speed = units.format_gb_per_s(it.gb_per_s)
        say = (
            f"With {flight} in flight per SM, a read reaches {speed}, and an answer takes {answer}."
        )
        classes = [0] * travel + [2] * wait + [1] * (kib - it.kib_per_sm)
        texts = {"flight": f"{flight} in flight per SM", "answer": f"answer after {answer}"}
        texts |= {"travel": f"{travel} travel", "wait": f"{wait} wait"}
        texts["full"] = f"{100 * full:.0f} % full"
        x = left + (right - left) * it.kib_per_sm / kib
        points.append((x, bottom - (bottom - top) * it.gb_per_s / most))
        here = dict(zip(("cx", "cy"), points[-1], strict=True))
        places = {"bag": {"y": 186 - 70 * full, "height": 70 * full}, "here": here}
        told = {"say": say, "classes": {"letters": classes}, "texts": texts, "places": places}
        frames.append(told)
    start = next(i for i, value in enumerate(read["gb_per_s"]) if value >= 0.95 * most)
    drawn = [f"{x:.1f} {y:.1f}" for x, y in points]
    shown = frames[start]
    texts = {**shown["texts"], "most": units.format_gb_per_s(most)}
    places = {name: _short(it) for name, it in shown["places"].items()}
    places |= {
        "line": {"d": "M" + "L".join(drawn)},
        "dots": {"d": "".join(map("M{}h0".format, drawn))},
    }

    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(picture)
    for element in root.iter():
        if key := element.get("data-group"):
            for member, of in zip(element, shown["classes"][key], strict=True):
                member.set("class", names[of])
        if key := element.get("data-text"):
            element.text = texts[key]
        if key := element.get("data-place"):
            element.attrib |= places[key]
    [script] = root.iter(f"{{{SVG}}}script")
    data = {"names": names, "frames": frames, "start": start}
    script.text = json.dumps(json.loads(script.text or "") | data, separators=(",", ":"))
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>") + "\n"


def _short(places: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:g}" for name, value in places.items()}
