"""The figures that move, as SVG files: each is a still picture that carries its own data.

A notebook, Colab, paper and a page without JavaScript show the picture as any other image. The site
puts the SVG itself into the page, and `book/_static/figures.js` moves what it finds there. What a
figure shows is counted by the package's meter, or read from a recording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from memtraffic.kernels.softmax import fused, masked, naive, persistent, tiled
from memtraffic.meters.count import OpTraffic, count
from memtraffic.meters.sectors import count_sectors
from memtraffic.tensors import SECTOR_BYTES
from memtraffic_book import units
from memtraffic_book.figures.drawing import BLUE, INK, MUTED, ORANGE, PALE, PROGRAM_COLORS
from memtraffic_book.figures.hardware import FILLS

WIDE = 300  # units of a picture: a text of 10 of them is 11 pixels high on a phone
FONT = "'DejaVu Sans', Verdana, Geneva, sans-serif"
STYLE = {  # of what has a class; a program or an operation has its number
    ".none": "fill:#ffffff;stroke:#aab4be;stroke-dasharray:2 2",
    ".idle": "fill:#ffffff;stroke:#8c98a4",
    ".dead": f"fill:url(#dead);stroke:{MUTED}",
    **{f".of{i}": f"fill:{color};stroke:{MUTED}" for i, color in enumerate(PROGRAM_COLORS)},
    "g .load": f"stroke:{BLUE};stroke-width:1.8",
    "g .store": f"stroke:{ORANGE};stroke-width:1.8",
    ".on": f"fill:#cfe3ff;stroke:{BLUE}",
    ".off": "opacity:.2",
    ".gone": "opacity:0",
}
HATCH = (  # of what is there and of no use
    '<pattern id="dead" patternUnits="userSpaceOnUse" width="4" height="4">'
    '<path d="M0 0H4V4H0z" fill="#ffffff"/>'
    f'<path d="M-1 1L1-1M0 4L4 0M3 5L5 3" stroke="{MUTED}" stroke-width=".7"/></pattern>'
)
Point = tuple[float, float]


# ---- a picture


def tag(name: str, inside: str = "", **attributes: Any) -> str:
    """An element of SVG. A `_` in an attribute's name is a `-`; `class_` is the class."""
    texts = {
        key.rstrip("_").replace("_", "-"): f"{value:g}" if isinstance(value, float) else str(value)
        for key, value in attributes.items()
    }
    told = "".join(f' {key}="{escape(value)}"' for key, value in texts.items())
    return f"<{name}{told}>{inside}</{name}>" if inside else f"<{name}{told}/>"


class Member(NamedTuple):
    """An element of a group: its name, what is in it, and its attributes but for the class."""

    name: str
    inside: str
    look: Mapping[str, Any]


def arrow(x: float, tail: float, head: float, color: str) -> Member:
    """A vertical arrow."""
    wide = head + (6 if head < tail else -6)
    d = f"M{x:g} {tail:g}V{wide:g}M{x - 4:g} {wide:g}L{x:g} {head:g}L{x + 4:g} {wide:g}z"
    return Member("path", "", {"d": d, "stroke": color, "stroke_width": 2.4, "fill": color})


class Frame(NamedTuple):
    """A state of a picture.

    say: the sentence that is read out. classes: for the name of each group, the class of each of
    its members. texts: by key. places: the attributes of what moves, by key.
    """

    say: str
    classes: Mapping[str, Sequence[str]]
    texts: Mapping[str, str]
    places: Mapping[str, Mapping[str, float | str]]


@dataclass
class Picture:
    """A picture in the making, drawn in the state that it starts in.

    kind: of figure, as `figures.js` names it. data: what else that needs. start: the number of the
    state.
    """

    kind: str
    frames: list[Frame] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    start: int = -1
    parts: list[str] = field(default_factory=list)

    def add(self, name: str, inside: str = "", **attributes: Any) -> None:
        """Adds an element that stays as it is."""
        self.parts.append(tag(name, inside, **attributes))

    def write(self, x: float, y: float, text: str, anchor: str = "start", **look: Any) -> None:
        """Adds a text. anchor: "start", "middle" or "end"."""
        look |= {} if anchor == "start" else {"text_anchor": anchor}
        self.add("text", escape(text), x=float(x), y=float(y), **look)

    def change(self, key: str, x: float, y: float, anchor: str = "start", **look: Any) -> None:
        """Adds a text that changes."""
        self.write(x, y, self.frames[self.start].texts[key], anchor, data_text=key, **look)

    def move(self, key: str, name: str, **attributes: Any) -> None:
        """Adds an element some of whose attributes change."""
        self.add(name, **{"data_place": key, **attributes, **self.frames[self.start].places[key]})

    def group(self, key: str, members: Sequence[Member]) -> None:
        """Adds a group of elements whose classes change."""
        classes = self.frames[self.start].classes[key]
        pairs = zip(members, classes, strict=True)
        drawn = [
            tag(it.name, it.inside, **it.look, **({"class_": of} if of else {})) for it, of in pairs
        ]
        self.add("g", "".join(drawn), data_group=key)

    def cells(self, key: str, at: Sequence[Point], size: float) -> None:
        """Adds a group of square cells."""
        box = f"h{size - 2:g}v{size - 2:g}h{2 - size:g}z"
        self.group(key, [Member("path", "", {"d": f"M{x + 1:g} {y + 1:g}{box}"}) for x, y in at])

    def numbers(self, key: str, at: Sequence[Point], numbers: Sequence[int]) -> None:
        """Adds a group of numbers, each of which begins at a place."""
        members = zip(at, numbers, strict=True)
        self.group(key, [Member("text", str(it), {"x": x, "y": y}) for (x, y), it in members])

    def svg(self, high: float) -> str:
        """The text of the file, of a picture so many units high."""
        names = list(
            dict.fromkeys(it for f in self.frames for of in f.classes.values() for it in of)
        )
        frames = [
            {
                "say": frame.say,
                "classes": {key: [*map(names.index, of)] for key, of in frame.classes.items()},
                "texts": frame.texts,
                "places": frame.places,
            }
            for frame in self.frames
        ]
        data = {"kind": self.kind, **self.data}
        if self.kind == "frames":
            data |= {"names": names, "frames": frames, "start": self.start % len(frames)}
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.3 * WIDE:g}" height="'
            f'{1.3 * high:g}" viewBox="0 0 {WIDE} {high:g}" font-family="{FONT}" font-size="10" '
            f'fill="{INK}">',
            tag("style", "".join(f"{name}{{{look}}}" for name, look in STYLE.items())),
            *([tag("defs", HATCH)] if "dead" in names else []),
            tag("path", fill="#ffffff", d=f"M0 0H{WIDE}V{high:g}H0z"),
            *self.parts,
            tag("script", escape(json.dumps(data, separators=(",", ":"))), type="application/json"),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


# ---- who touches which element


class Step(NamedTuple):
    """What a program of a kernel loads or stores at one time.

    who: its number. kind: "load" or "store". tensor, touched: its name and elements.
    """

    who: int
    kind: str
    tensor: str
    touched: Sequence[int]


class Rung(NamedTuple):
    """A rung of the ladder, and the matrix that it is shown on. options: of its softmax."""

    softmax: Callable[..., object]
    shape: tuple[int, int] = (4, 8)
    options: Mapping[str, int] = {}

    def run(self, x: Tensor) -> object:
        """The softmax of `x`."""
        return self.softmax(x, **self.options)


RUNGS = {
    "fused": Rung(fused.softmax),
    "masked": Rung(masked.softmax, (4, 6)),
    "tiled": Rung(tiled.softmax, options={"rows": 2}),
    "persistent": Rung(persistent.softmax, options={"rows": 1, "programs": 2}),
}


def steps(rung: Rung) -> list[Step]:
    """What a rung does to its matrix, in the order of the meter: loads and stores take turns.

    Raises AssertionError where it does not read MN elements and write MN.
    """
    counted = count(rung.run, torch.zeros(rung.shape), trace=True)
    moved = counted.read_elements, counted.written_elements
    assert moved == (rung.shape[0] * rung.shape[1],) * 2, moved
    kinds = {"read": "load", "written": "store"}
    return [
        Step(it.program[0], kinds[it.kind], it.argument.removesuffix("_ptr"), it.offsets)
        for it in counted.accesses
    ]


# ---- a state for each step, and the picture

KINDS = {"load": "read", "store": "written"}
COLORS = {"load": BLUE, "store": ORANGE}
ITEMSIZE = 4  # bytes of an element
FULL = 284.0  # units that a bar is wide when all has moved


def step_frames(found: Sequence[Step], shape: tuple[int, int]) -> Iterator[Frame]:
    """The state before the first step, and that after each."""
    m, n = shape
    look = {"x": ["idle"] * (m * n), "y": ["none"] * (m * n)}
    totals = {kind: sum(len(it.touched) for it in found if it.kind == kind) for kind in KINDS}
    moved = dict.fromkeys(KINDS, 0)
    for number in range(len(found) + 1):
        at = max(0, number - 1)
        step, turn = found[at], found[at // 2 * 2 :][:2]
        touched = step.touched if number else ()
        moved[step.kind] += len(touched)
        classes = {tensor: [*cells] for tensor, cells in look.items()}
        for i in touched:
            look[step.tensor][i] = f"of{step.who}"
            classes[step.tensor][i] = f"of{step.who} {step.kind}"
        name = f"program {step.who}"
        texts = {it.kind: f"{it.kind}s {len(it.touched)} elements" for it in turn} | {"who": name}
        classes |= {
            f"{it} who": ["" if of[:2] == "of" else "gone" for of in cells]
            for it, cells in look.items()
        }
        held = (f"of{step.who}", "dead") if number else ("none", "none")
        block = 1 << (n - 1).bit_length()  # columns; those that the matrix has not are dead
        classes["held"] = (len(step.touched) // n) * ([held[0]] * n + [held[1]] * (block - n))
        classes |= {
            f"{kind} way": ["" if touched and kind == step.kind else "off"] for kind in KINDS
        }
        texts |= {
            f"{kind} bytes": f"{KINDS[kind]} {ITEMSIZE * n} bytes" for kind, n in moved.items()
        }
        bars = {f"{kind} bar": {"width": FULL * n / totals[kind]} for kind, n in moved.items()}
        say = f"Step {number} of {len(found)}: {name} {texts[step.kind]}."
        yield Frame(say if number else "Nothing has moved yet.", classes, texts, bars)


def grid(at: Point, rows: int, columns: int, size: float) -> list[Point]:
    """The places of cells, row by row, from the left and top."""
    return [(at[0] + j * size, at[1] + i * size) for i in range(rows) for j in range(columns)]


def stepper(name: str) -> str:
    """The file of the figure in which a rung works on a small matrix, step by step.

    Registers are above and memory is below, as in the drawing of the machine.
    """
    rung = RUNGS[name]
    (m, n), found = rung.shape, steps(rung)
    rows, wide = len(found[0].touched) // n, 1 << (n - 1).bit_length()
    picture = Picture("frames", list(step_frames(found, rung.shape)), {"label": "step"})
    above, below = 12.0 + 15 * rows, 84.0
    memory = above + 42
    for y, high, color in ((8.0, above, FILLS["registers"]), (memory, below, PALE)):
        picture.add("rect", x=8, y=y, width=FULL, height=high, fill=color, stroke=MUTED)
    picture.change("who", 16, 12 + above / 2, font_weight="bold")
    picture.write(84, 12 + above / 2, "registers", fill=MUTED)
    picture.cells("held", grid((FULL + 2 - 15 * wide, 14), rows, wide, 15), 15)
    for tensor, x in (("x", 14.0), ("y", FULL + 2 - 15 * n)):
        at = grid((x, memory + 18), m, n, 15)
        picture.write(x + 1, memory + 13, f"{tensor}, in memory", fill=MUTED)
        picture.cells(tensor, at, 15)
        whose = {i: step.who for step in found for i in step.touched if step.tensor == tensor}
        begin = [(left + 4.4, top + 11) for left, top in at]
        picture.numbers(f"{tensor} who", begin, [whose[i] for i in range(m * n)])
    end = memory + below
    for i, (kind, color) in enumerate(COLORS.items()):
        low, high = memory - 4, memory - 30
        way = arrow(30, low, high, color) if kind == "load" else arrow(268, high, low, color)
        picture.group(f"{kind} way", [way])
        picture.change(kind, (42, 256)[i], memory - 13, ("start", "end")[i], fill=color)
        picture.change(f"{kind} bytes", 8, end + 16 + 28 * i, font_weight="bold", fill=color)
        total = ITEMSIZE * sum(len(it.touched) for it in found if it.kind == kind)
        text = f"of {total} = MN × {ITEMSIZE}"
        picture.write(292, end + 16 + 28 * i, text, "end")
        bar: dict[str, Any] = {"x": 8, "y": end + 21 + 28 * i, "height": 7}
        picture.add("rect", **bar, width=FULL, fill="#ffffff", stroke=MUTED, stroke_width=0.7)
        picture.move(f"{kind} bar", "rect", **bar, fill=color)
    return picture.svg(end + 62)


# ---- bytes that travel

SHAPE = 4096, 16384  # the running example of the book
COLUMNS = {"five lines of PyTorch": 75, "one kernel": 225}  # and their middles


def trips() -> str:
    """The file of the figure in which bytes travel for five lines and, beside them, for a kernel.

    Both move at one rate, so that a way is as long as its bytes are many.
    """
    matrix = ITEMSIZE * SHAPE[0] * SHAPE[1]
    lines = count(naive.softmax, torch.empty(SHAPE, device="meta")).ops
    kernel = OpTraffic("softmax", matrix // ITEMSIZE, matrix // ITEMSIZE, matrix, matrix)
    ways = [[(op.name, op.read_bytes, op.written_bytes) for op in ops] for ops in (lines, [kernel])]
    texts, classes = {}, {}
    for i, ops in enumerate(ways):
        sides = {"load": [op[1] for op in ops], "store": [op[2] for op in ops]}
        texts[f"{i} name"] = "done"
        texts[f"{i} moved"] = units.format_bytes(sum(sum(side) for side in sides.values()))
        classes[f"{i} held"] = ["none"] * 8
        for kind, side in sides.items():
            texts[f"{i} {kind}s"] = f"{sum(n_bytes > matrix / 2 for n_bytes in side)}×"
            classes[f"{i} {kind} dots"] = ["gone"] * 3
    still = Frame("", classes, texts, {})
    picture = Picture("trips", [still], {"ways": ways, "matrix": matrix})
    for i, (title, middle) in enumerate(COLUMNS.items()):
        left = middle - 67
        picture.write(middle, 14, title, "middle", font_weight="bold")
        for y, high, color in ((22, 42, FILLS["registers"]), (136, 26, FILLS["dram"])):
            picture.add("rect", x=left, y=y, width=134, height=high, fill=color, stroke=MUTED)
        picture.write(left + 6, 36, "registers", fill=MUTED)
        picture.change(f"{i} name", left + 128, 36, "end", font_weight="bold")
        picture.cells(f"{i} held", grid((middle - 60, 43), 1, 8, 15), 15)
        picture.write(middle, 153, "memory", "middle")
        for kind, sign, tail, head, anchor in (
            ("load", -1, 132, 70, "end"),
            ("store", 1, 68, 130, "start"),
        ):
            x, color = middle + 30 * sign, COLORS[kind]
            way = arrow(x, tail, head, color)
            picture.add(way.name, **way.look, opacity=0.3)
            look = {"fill": color, "font_weight": "bold"}
            picture.change(f"{i} {kind}s", x + 12 * sign, 104, anchor, **look)
            dot = {"cx": x, "cy": tail, "r": 4, "fill": color, "stroke": "#ffffff"}
            picture.group(f"{i} {kind} dots", [Member("circle", "", dot)] * 3)
        picture.change(f"{i} moved", middle, 183, "middle", font_size=16, font_weight="bold")
        picture.write(middle, 197, "moved", "middle", fill=MUTED)
    return picture.svg(204)


# ---- letters in the post

LETTER = 1024  # bytes in flight per SM
LETTERS = 16  # in a line of the picture
CHART = (112.0, 290.0, 112.0, 182.0)  # left, right, top, bottom


def letters(read: pd.DataFrame, idle_ns: float) -> str:
    """The file of the figure of bytes in flight: letters in the post, and the bag that they fill.

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
        say = f"With {flight} in flight per SM, a read reaches {units.format_gb_per_s(it.gb_per_s)}"
        say += f", and an answer takes {units.format_ns(it.latency_ns)} at most."
        classes = ["of0"] * travel + ["dead"] * wait + ["gone"] * (kib - it.kib_per_sm)
        texts = {
            "flight": f"{flight} in flight per SM",
            "answer": f"answer after {units.format_ns(it.latency_ns)} at most",
        }
        texts |= {"travel": f"{travel} travel", "wait": f"{wait} not under way"}
        texts |= {"full": f"{full:.0%}".replace("%", " % full")}
        bag = {"y": 186 - 70 * full, "height": 70 * full}
        frames.append(
            Frame(say, {"letters": classes}, texts, {"bag": bag, "here": {"cx": x, "cy": y}})
        )
    bend = next(i for i, value in enumerate(read["gb_per_s"]) if value >= 0.95 * most)
    picture = Picture("frames", frames, {"label": "bytes in flight"}, bend)
    picture.change("flight", 8, 16, font_weight="bold")
    picture.change("answer", 292, 16, "end")
    shape = "h13v9h-13zl6.5 5l6.5-5"
    places = grid((10, 24), kib // LETTERS, LETTERS, 17.6)
    picture.group(
        "letters",
        [Member("path", "", {"d": f"M{x:g} {24 + (y - 24) * 0.74:g}{shape}"}) for x, y in places],
    )
    picture.change("travel", 10, 90, fill=BLUE, font_weight="bold")
    picture.change("wait", 290, 90, "end", fill=MUTED, font_weight="bold")
    sack = "M34 112C26 140 8 150 10 172C11 186 18 186 46 186"
    sack += "C74 186 81 186 82 172C84 150 66 140 58 112z"
    picture.add("clipPath", tag("path", d=sack), id="sack")
    picture.move("bag", "rect", x=8, width=76, fill=PROGRAM_COLORS[0], clip_path="url(#sack)")
    picture.add("path", d=sack + "M32 118H60", fill="none", stroke=INK, stroke_width=1.5)
    picture.change("full", 46, 160, "middle", font_weight="bold")
    picture.write(46, 200, "bandwidth", "middle")
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    picture.add("path", d=f"M{left:g} {top:g}V{bottom:g}H{right:g}", fill="none", stroke=MUTED)
    picture.add("path", d=line, fill="none", stroke=BLUE, stroke_width=1.5)
    dots = "".join(tag("circle", cx=round(x, 1), cy=round(y, 1), r=2) for x, y in points)
    picture.add("g", dots, fill=BLUE)
    picture.move("here", "circle", r=5, fill=ORANGE, stroke="#ffffff")
    picture.write(right, top - 6, units.format_gb_per_s(most), "end", fill=MUTED)
    picture.write(right, 200, "in flight per SM →", "end")
    return picture.svg(208)


# ---- a warp over sectors

DTYPES = {"float32": 4, "bfloat16": 2}  # bytes of an element
WARP = 32  # lanes
SECTOR = 68.0, 14.0  # units of a sector in the picture, of which a line has four
MOST = {"stride": 8, "first": 7}  # elements, so that 32 sectors are enough
STRIDED = {"dtype": "float32", "bits": 32, "stride": 2, "first": 0}  # what the picture starts with


def sectors_of_a_warp() -> str:
    """The file of the figure in which 32 lanes load from sectors of 32 bytes."""
    size = DTYPES["float32"]
    addresses = 2 * size * np.arange(WARP)  # of every other element
    requests, sectors = count_sectors(addresses[None], np.ones(WARP, dtype=bool))
    wide, high = SECTOR
    unit, left, top = (wide - 4) / SECTOR_BYTES, 15.0, 42.0
    touched = {*(addresses // SECTOR_BYTES)}
    boxes = "".join(
        f"M{left + place % 128 // 32 * wide + place % 32 * unit:g} {top + place // 128 * high:g}"
        f"h{size * unit - 0.4:g}v{high - 4:g}h{0.4 - size * unit:g}z"
        for place in map(int, addresses)
    )
    pieces = [boxes, *[""] * 7]
    places = {f"request {i}": {"d": pieces[i]} for i in range(8)}
    classes = {"sectors": ["on" if i in touched else "none" for i in range(32)]}
    texts = {
        "requests": f"{requests} request of {8 * size} bits a lane",
        "sectors": f"{sectors} sectors per request",
        "wanted": f"wanted {WARP * size} bytes",
        "moved": f"moved {SECTOR_BYTES * sectors} bytes",
    }
    frame = Frame("", classes, texts, places)
    data = {"dtypes": DTYPES, "most": MOST, "begin": STRIDED, "unit": unit, "size": [wide, high]}
    picture = Picture("sectors", [frame], {**data, "corner": [left, top]})
    picture.change("requests", 8, 16, font_weight="bold")
    picture.change("sectors", 292, 16, "end", font_weight="bold", fill=BLUE)
    picture.change("wanted", 8, 31, fill=MUTED)
    picture.change("moved", 292, 31, "end", fill=MUTED)
    box = f"h{wide - 2:g}v{high - 2:g}h{2 - wide:g}z"
    corners = [(left - 1 + i % 4 * wide, top - 1 + i // 4 * high) for i in range(32)]
    picture.group("sectors", [Member("path", "", {"d": f"M{x:g} {y:g}{box}"}) for x, y in corners])
    for i in range(8):
        color = BLUE if i == 0 else (ORANGE, MUTED)[i % 2]
        picture.move(f"request {i}", "path", fill=color)
    picture.write(292, top + 8 * high + 10, "a box: a sector of 32 bytes", "end", fill=MUTED)
    return picture.svg(top + 8 * high + 16)


def draw(read: pd.DataFrame, idle_ns: float) -> dict[str, str]:
    """The name and the text of each file in `book/_static`. read, idle_ns: as of `letters`."""
    steppers = {f"steps-{name}.svg": stepper(name) for name in RUNGS}
    return steppers | {
        "trips.svg": trips(),
        "letters.svg": letters(read, idle_ns),
        "warp.svg": sectors_of_a_warp(),
    }
