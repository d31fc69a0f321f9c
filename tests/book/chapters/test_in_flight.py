"""What the folded cells of `book/in-flight.ipynb` do, on data where a claim is false, too."""

import pytest

from memtraffic_book import experiment
from memtraffic_book.chapters import in_flight


@pytest.fixture
def flight():
    return experiment("bytes_in_flight")


def test_check_law_refuses_a_latency_that_is_wrong(flight):
    in_flight.check_law(flight, 337.0, 11_300)
    with pytest.raises(AssertionError, match="the law predicts"):
        in_flight.check_law(flight, 1000.0, 11_300)


def test_draw_bend_finds_the_bend_right_of_what_was_calculated(flight):
    curve = in_flight.draw_bend(flight, 11_300)
    assert curve["read"].max() > 0.9
    with pytest.raises(AssertionError, match=r"1\.2x of that"):
        in_flight.draw_bend(flight, 22_000)
    in_flight.draw_kernels(curve)


def test_show_load_refuses_a_latency_that_stays(flight):
    curve = in_flight.draw_bend(flight, 11_300)
    in_flight.show_load(flight, curve)
    with pytest.raises(AssertionError, match=r"over 1\.5x"):
        in_flight.show_load(flight.assign(latency_ns=400.0), curve)


def test_show_ways_refuses_warps_that_count_by_themselves():
    measured = experiment("slots_in_flight").query("access == 'read'")
    in_flight.show_ways(measured)
    slow = measured.assign(gb_per_s=measured["gb_per_s"].where(measured["slots"] != 4, 9.0))
    with pytest.raises(AssertionError, match="4 warps have"):
        in_flight.show_ways(slow)
