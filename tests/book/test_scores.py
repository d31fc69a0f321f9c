import math

import pandas as pd
import pytest

from memtraffic_book import scores
from memtraffic_book.scores import Choice, Lead, Match, choose, geometric_mean, match

NAN = float("nan")


def frame(times, spread=0.01, dtype="float32", versions=None):
    """A recording from {n: {kernel: µs, or the reason why there is no time}}."""
    rows = []
    for n, kernels in times.items():
        for name, us in kernels.items():
            note, us = (us, 0.0) if isinstance(us, str) else ("", us)
            low, high = us * (1 - spread), us * (1 + spread)
            rows.append(
                [name, 4096, n, dtype, us, low, high, us, 0.0, (versions or {}).get(name, ""), note]
            )
    names = "impl m n dtype us us_p20 us_p80 us_reversed gb_per_s version note"
    return pd.DataFrame(rows, columns=names.split())


KERNELS = ["copy", scores.OURS, scores.TORCH, "Liger", "QuACK"]
BOOK = frame(
    {
        256: dict(zip(KERNELS, (8.0, 10.0, 12.0, 10.05, 9.0), strict=True)),
        384: dict(zip(KERNELS, (9.0, 10.0, 20.0, 12.0, "refused: why"), strict=True)),
        2048: dict(zip(KERNELS, (38.0, 40.0, 80.0, 39.9, "refused: why"), strict=True)),
        65536: dict(zip(KERNELS, (90.0, 100.0, 200.0, "refused: no", 80.0), strict=True)),
    },
    versions={"Liger": "0.8.5"},
)


def test_timed_has_no_times_where_none_was_taken():
    us = scores.timed(BOOK)
    assert list(us.columns) == KERNELS and list(us.index) == [256, 384, 2048, 65536]
    assert us["QuACK"].notna().tolist() == [True, False, False, True]
    gone = frame({256: {"copy": 1.0, "Liger backward": "absent: x"}})
    assert scores.timed(gone)["Liger"].isna().all()


def test_shares_of_either_roof():
    assert scores.shares(BOOK)[scores.OURS].tolist() == pytest.approx([0.8, 0.9, 0.95, 0.9])
    back = frame({256: {"add": 5.0, "memtraffic.softmax backward": 10.0}})
    assert scores.shares(back).to_dict() == {scores.OURS: {256: 0.5}}


def test_match_counts_by_the_rule_of_level():
    mean = pytest.approx((1.005 * 1.2 * 39.9 / 40) ** (1 / 3))
    found = match(BOOK, "Liger", scores.PRINTED)
    assert found == Match("Liger", 3, 1, 2, 0, mean, pytest.approx(0.9975), 2048)
    assert match(BOOK, "QuACK", scores.PRINTED)[1:5] == (1, 0, 0, 1)
    assert match(BOOK, "QuACK", [384]) is None and match(BOOK, "FlagGems", [256]) is None


def test_match_is_level_only_if_each_median_lies_in_the_spread_of_the_other():
    narrow = frame({256: {scores.OURS: 10.0, "Liger": 10.05}}, spread=0.01)
    narrow.loc[narrow["impl"] == "Liger", ["us_p20", "us_p80"]] = (10.04, 10.06)
    assert match(narrow, "Liger", [256])[2:5] == (1, 0, 0)
    others = [it.other for it in scores.matches(BOOK, scores.PRINTED)]
    assert others == [scores.TORCH, "Liger", "QuACK"]


def test_against_fastest_has_the_worst_first_and_no_others():
    us = scores.timed(BOOK)
    leads = scores.against_fastest(us, scores.PRINTED)
    assert leads == [
        Lead(256, "QuACK", pytest.approx(0.9)),
        Lead(2048, "Liger", pytest.approx(0.9975)),
        Lead(384, "Liger", pytest.approx(1.2)),
    ]
    assert [lead.n for lead in scores.against_fastest(us, us.index, ["QuACK"])] == [65536, 256]
    assert scores.against_fastest(us, scores.PRINTED, ["FlagGems"]) == []


@pytest.mark.parametrize(
    ("us", "wanted"),
    [
        pytest.param({"Liger": 10.1}, (scores.OURS, scores.OURS), id="ours"),
        pytest.param({"Liger": 9.9}, ("Liger", scores.OURS), id="nearly-level"),
        pytest.param({"Liger": 9.0}, ("Liger", "Liger"), id="another"),
        pytest.param({"Liger": "refused: x"}, (scores.OURS, scores.OURS), id="not-timed"),
        pytest.param({"copy": 1.0, scores.TORCH: 10.5}, (scores.OURS, scores.TORCH), id="none"),
    ],
)
def test_choose(us, wanted):
    kernels = {scores.OURS: 10.0, scores.TORCH: 20.0} | us
    choice = choose("rows", scores.timed(frame({256: kernels, 512: kernels})), lambda n: n == 256)
    assert (choice.fastest, choice.ship) == wanted
    assert choice.over_torch == pytest.approx(kernels[scores.TORCH] / kernels[choice.fastest])


def test_choose_names_who_is_level_with_what_is_shipped():
    """Within 2 percent below it, or above it where it is ours."""
    times = {scores.OURS: 10.0, scores.TORCH: 20.0, "Liger": 9.9, "QuACK": 10.15, "FlagGems": 10.3}
    us = scores.timed(frame({256: times}))
    assert choose("rows", us, lambda n: True).level == ("Liger", "QuACK")
    us = scores.timed(frame({256: times | {"Liger": 9.0, "QuACK": 9.1}}))
    found = choose("rows", us, lambda n: True)
    assert (found.ship, found.level) == ("Liger", ("QuACK",))


def test_choice_gains_what_is_shipped():
    for gains, shipped, gain in (((2.2, 1.1), "Liger", 2.2), ((2.2, 1.1), scores.OURS, 2.0)):
        assert Choice("rows", "Liger", *gains, shipped).gain == pytest.approx(gain)
    assert Choice("rows", "Liger", 1.05, 1.2, scores.TORCH).gain == 1
    assert geometric_mean([1, 2, 4]) == pytest.approx(2) and math.isnan(geometric_mean([]))


def test_rungs_and_roofs_are_none_of_the_others():
    times = {"copy": 1.0, scores.OURS: 3.0, "tiled": 2.0, "naive": 9.0, "Liger": 4.0, "QuACK": 5.0}
    us = scores.timed(frame({256: times | {scores.TORCH: 6.0}}))
    assert scores.others(us) == ["Liger", "QuACK", scores.TORCH]
    assert scores.winners(us, [256]) == {scores.OURS: [256]}
    assert [lead.other for lead in scores.against_fastest(us, [256])] == ["Liger"]
    assert choose("rows", us, lambda n: True).fastest == scores.OURS
    us = scores.timed(BOOK)
    assert list(scores.winners(us, us.index).items()) == [
        ("QuACK", [256, 65536]),
        (scores.OURS, [384]),
        ("Liger", [2048]),
    ]
    part = [256, 384, 781, 1024]
    assert scores.spans([], part) == ""
    assert scores.spans([384, 256, 1024], part) == "256 to 384, 1024"
    assert scores.spans(part, part) == "256 to 1024"


def test_choose_takes_only_kernels_that_take_every_width():
    us = scores.timed(BOOK)
    assert choose("rows", us, lambda n: n <= 384) == Choice(
        "rows", scores.OURS, pytest.approx((1.2 * 2) ** 0.5), 1.0, scores.OURS
    )
    assert choose("rows", us, lambda n: n == 256).fastest == "QuACK"
    # However fast it is at the other width: its mean would be of fewer widths than the others'.
    times = {scores.OURS: 10.0, scores.TORCH: 20.0, "Liger": 11.0}
    us = scores.timed(frame({256: times | {"QuACK": 0.5}, 512: times | {"QuACK": "refused: x"}}))
    found = choose("rows", us, lambda n: True)
    assert (found.fastest, found.ship, found.level) == (scores.OURS, scores.OURS, ())
    assert choose("rows", us, lambda n: n > 2**20) is None


def test_refusals():
    notes = {
        256: {"copy": 1.0, "Liger": 2.0, "QuACK": "refused: x", "FlagGems": "absent: x"},
        512: {"copy": 1.0, "Liger": "wrong: x", "QuACK": 3.0, "FlagGems": "absent: x"},
    }
    found = frame(notes, versions={"Liger": "0.8.5"})
    found.loc[found["us"] == 3.0, "note"] = "imprecise: x"
    rows = scores.refusals(found).set_index("impl")
    assert list(rows.index) == ["Liger", "QuACK", "FlagGems"]
    assert rows.loc["Liger"].tolist() == ["0.8.5", 1, 0, 1, 0, False, "512", ""]
    assert rows.loc["QuACK"].tolist() == ["", 1, 1, 0, 1, False, "256", "refused: x"]
    assert rows["absent"].tolist() == [False, False, True]


def test_over_least_is_of_the_bytes_of_the_matrix():
    counted = pd.DataFrame(
        {
            "m": 4,
            "n": 64,
            "dtype": ["float32", "bfloat16", "float16", "float64"],
            "l1_l2_read_bytes": [1024, 768, 512, 2048],
            "l2_write_sectors": [48, 16, 16, 64],
            "dram_read_bytes": [2048, 512, 512, 2048],
        }
    )
    found = scores.over_least(counted)
    assert list(found["read"]) == [1.0, 1.5, 1.0, 1.0]
    assert list(found["written"]) == [1.5, 1.0, 1.0, 1.0]
    assert list(found["from_memory"]) == [2.0, 1.0, 1.0, 1.0]
    assert list(found.columns) == ["n", "dtype", "read", "written", "from_memory"]
