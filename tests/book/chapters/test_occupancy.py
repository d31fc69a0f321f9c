"""What the folded cells of `book/occupancy.ipynb` do, on data where a claim is false, too."""

import pytest

from memtraffic import runtime
from memtraffic_book import experiment, experiments
from memtraffic_book.chapters import occupancy

pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures itself")


def test_compare_warps_refuses_warps_that_matter(glued, monkeypatch):
    occupancy.compare_warps()
    assert glued["tried"].startswith("of 155 variants")
    warps = experiment("occupancy_warps")
    slow = warps.assign(us=warps["us"] * warps["num_warps"])
    monkeypatch.setattr(occupancy, "experiment", lambda id: slow)
    with pytest.raises(AssertionError, match="at most 10 % apart"):
        occupancy.compare_warps()


def test_draw_packing_refuses_other_limits(glued):
    occupancy.draw_packing(69, 32_784, 4, (7, 6, 16, 32))
    assert glued == {"fit": "6", "last": "80"}
    with pytest.raises(AssertionError, match="allow 6 programs"):
        occupancy.draw_packing(69, 32_784, 4, (6, 6, 16, 32))


def test_compare_with_tutorial_refuses_a_launcher_that_starts_more(monkeypatch, capsys):
    occupancy.compare_with_tutorial()
    assert "At 8 of 8 widths" in capsys.readouterr().out
    plans = experiment("occupancy_plans")
    monkeypatch.setattr(
        occupancy, "experiment", lambda id: plans.assign(resident=plans["resident"] + 1)
    )
    with pytest.raises(AssertionError, match="At 0 of 8"):
        occupancy.compare_with_tutorial()


def test_compare_programs_refuses_a_second_that_brings_nothing(glued, monkeypatch):
    occupancy.compare_programs()
    assert glued.keys() == {"alone", "double"}
    timed, plans = experiments("occupancy_programs", "occupancy_plans")
    level = timed.assign(us=500.0)
    monkeypatch.setattr(occupancy, "experiments", lambda *ids: (level, plans))
    with pytest.raises(AssertionError, match=r"over 1\.05x"):
        occupancy.compare_programs()
