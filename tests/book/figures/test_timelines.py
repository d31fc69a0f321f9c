import itertools

import pytest
from drawings import boxes, texts, title

from memtraffic_book import figures

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests


def end(spans):
    return max(span.end for span in spans)


# ---- plans


def test_plan_of_one_stage_does_one_thing_after_the_other():
    spans = figures.plan(2, 3, 1, tiles=2)
    assert [(span.kind, span.start, span.end, span.tile) for span in spans] == [
        ("load", 0, 2, 0),
        ("compute", 2, 5, 0),
        ("store", 5, 6, 0),
        ("load", 6, 8, 1),
        ("compute", 8, 11, 1),
        ("store", 11, 12, 1),
    ]


def test_plan_of_three_stages_loads_while_it_computes():
    spans = figures.plan(2, 3, 1, tiles=2, stages=3)
    assert [(span.lane, span.kind, span.start, span.end) for span in spans] == [
        ("buffer 0", "load", 0, 2),
        ("buffer 0", "compute", 2, 5),
        ("buffer 0", "store", 5, 6),
        ("buffer 1", "wait", 0, 2),
        ("buffer 1", "load", 2, 4),
        ("buffer 1", "wait", 4, 6),
        ("buffer 1", "compute", 6, 9),
        ("buffer 1", "store", 9, 10),
    ]


OPTIONS = [
    {"stages": stages, "programs": programs, "latency": latency, "tiles": tiles}
    for stages, programs, latency, tiles in itertools.product(
        (1, 2, 3, 4), (1, 2, 3), (0, 1.5), (1, 2, 7)
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda it: "-".join(map(str, it.values())))
def test_plan_does_each_tile_once_and_memory_serves_one_at_a_time(options):
    spans = figures.plan(2, 1.5, 1, **options)
    for kind, duration in (("load", 2), ("compute", 1.5), ("store", 1)):
        them = [span for span in spans if span.kind == kind]
        assert sorted(span.tile for span in them) == list(range(options["tiles"]))
        assert all(span.end - span.start == pytest.approx(duration) for span in them)
    moved = sorted((it.start, it.end) for it in spans if it.kind in ("load", "store"))
    assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(moved))
    for _, lane in itertools.groupby(spans, key=lambda span: span.lane):
        assert all(a.end == pytest.approx(b.start) or a.end < b.start
                   for a, b in itertools.pairwise(lane))  # fmt: skip
    for tile in range(options["tiles"]):
        load, compute, store = (
            next(it for it in spans if it.tile == tile and it.kind == kind)
            for kind in ("load", "compute", "store")
        )
        assert load.end <= compute.start and compute.end <= store.start
        assert load.start >= options["latency"]


def test_plan_of_more_stages_or_programs_ends_earlier():
    one, two, three = (end(figures.plan(2, 2, 1, tiles=6, stages=k)) for k in (1, 2, 3))
    assert one == two == 30 > three
    assert end(figures.plan(2, 2, 1, tiles=6, programs=2)) < one
    assert end(figures.plan(2, 2, 1, tiles=6, programs=3)) >= 6 * 3, "memory is the floor"


def test_plan_counts_the_latency_of_each_request():
    assert end(figures.plan(2, 2, 1, tiles=3, latency=4)) == 3 * (4 + 2 + 2 + 1)


def test_plan_shared_alone_nobody_waits():
    spans = figures.plan_shared([[2, 3], [3, 2]], 1, 0.5, together=False)
    assert {span.kind for span in spans} == {"load", "compute", "store"}
    assert [(it.lane, it.kind, it.start, it.end, it.tile) for it in spans[:4]] == [
        ("program 0", "load", 0, 2, 0),
        ("program 0", "compute", 2, 3, 0),
        ("program 0", "store", 3, 3.5, 0),
        ("program 0", "load", 3.5, 6.5, 1),
    ]
    assert end(spans) == 5 + 2 * 1.5


def test_plan_shared_together_all_store_when_the_slowest_has_computed():
    spans = figures.plan_shared([[2, 3], [3, 2]], 1, 0.5, together=True)
    stores = sorted({(it.tile, it.start, it.end) for it in spans if it.kind == "store"})
    assert stores == [(0, 4, 4.5), (1, 8.5, 9)]
    waits = [(it.lane, it.start, it.end, it.tile) for it in spans if it.kind == "wait"]
    assert waits == [("program 0", 3, 4, 0), ("program 1", 7.5, 8.5, 1)]
    assert end(spans) == 2 * (3 + 1.5)


# ---- timelines


def test_timeline_draws_each_span_on_one_scale():
    one, three = figures.plan(2, 1.5, 1, tiles=4), figures.plan(2, 1.5, 1, tiles=4, stages=3)
    ax = figures.timeline({"ask, wait, compute": one, "ask ahead": three})
    for kind in ("load", "compute", "store"):
        assert len(boxes(ax, kind)) == 8
        widths = {round(box[2], 6) for box in boxes(ax, kind)}
        assert len(widths) == 1, "one scale for all"
    assert len(boxes(ax, "wait")) == sum(span.kind == "wait" for span in one + three)
    ends = [line.get_xdata()[0] for line in ax.lines if line.get_gid() == "end"]
    starts = min(box[0] for box in boxes(ax, "load"))
    assert (ends[1] - starts) / (ends[0] - starts) == pytest.approx(end(three) / end(one))
    saved = end(one) - end(three)
    assert f"ends at {end(one):.3g} µs" in texts(ax)
    assert f"ends at {end(three):.3g} µs, {saved:.3g} µs earlier" in texts(ax)
    assert [text for text in texts(ax) if text.startswith("buffer")] == ["buffer 0", "buffer 1"]
    assert {"wait", "load", "compute", "store"} <= {*texts(ax)}
    share = 100 * saved / end(one)
    assert title(ax) == f"“ask ahead” ends {share:.0f} % earlier than “ask, wait, compute”."


def test_timeline_differs_by_more_than_colour():
    ax = figures.timeline({"one": figures.plan(2, 1, 1, tiles=2, latency=1)}, "It waits.")
    looks = {box.get_gid(): box.get_hatch() for box in ax.patches if box.get_gid()}
    assert len(set(looks.values())) == len(looks) == 4


def test_timeline_of_measured_spans_has_its_unit():
    spans = [figures.Span("", "load", 0, 120, 0), figures.Span("", "compute", 120, 180, 0)]
    ax = figures.timeline({"kernel": spans}, "The load takes two thirds.", unit="ns")
    assert {"ends at 180 ns", "time, ns", "0", "50", "100", "150"} <= {*texts(ax)}


# ---- rounds


def test_take_turns_of_a_queue_takes_the_first_free_slot():
    assert figures.take_turns([3, 1, 1, 1], 2) == [(0, 0, 3), (1, 0, 1), (1, 1, 2), (1, 2, 3)]


def test_take_turns_of_persistent_programs_start_once():
    turns = figures.take_turns([1, 1, 1], 2, start=0.5, persistent=True)
    assert turns == [(0, 0.5, 1.5), (1, 0.5, 1.5), (0, 1.5, 2.5)]
    assert figures.take_turns([1, 1, 1], 2, start=0.5)[2] == (0, 2, 3)


def test_rounds_hatches_the_idle_slots_of_the_last_round():
    ax = figures.rounds(20, 8)
    assert len(boxes(ax, "tile")) == 40 and len(boxes(ax, "idle")) == 8
    assert texts(ax).count("19") == 2 and texts(ax).count("slot 7") == 2
    assert title(ax) == (
        "20 tiles on 8 slots need 3 rounds, and in the last round 4 of 8 slots are idle."
    )
    assert not boxes(ax, "start")


def test_rounds_that_fill_have_no_idle_slot():
    ax = figures.rounds(8, 4)
    assert not boxes(ax, "idle") and title(ax) == "8 tiles fill 4 slots 2 times."


def test_rounds_of_measured_durations():
    ax = figures.rounds([1.0, 1.5, 1.0, 2.0, 1.2], 2, start=0.1, unit="µs")
    assert len(boxes(ax, "start")) == 5 + 2
    ends = [line.get_xdata()[0] for line in ax.lines if line.get_gid() == "end"]
    assert len(ends) == 2 and "time, µs" in texts(ax)


def test_take_turns_at_its_pace_gives_a_slow_slot_fewer_tiles_of_a_queue():
    pace = [1, 2]
    assert figures.take_turns([1, 1, 1], 2, pace=pace) == [(0, 0, 1), (1, 0, 2), (0, 1, 2)]
    turns = figures.take_turns([1, 1, 1, 1], 2, pace=pace, persistent=True)
    assert turns == [(0, 0, 1), (1, 0, 2), (0, 1, 2), (1, 2, 4)]


def test_rounds_marks_a_slow_slot():
    ax = figures.rounds(4, 2, pace=[1, 2], title="One slot is slow.")
    assert texts(ax).count("slot 0") == texts(ax).count("slot 1, slow") == 2
    ends = [line.get_xdata()[0] for line in ax.lines if line.get_gid() == "end"]
    assert len(ends) == 2 and ends[0] < ends[1]


# ---- the order of a compiled loop

WORK = ("reduce", "store")
