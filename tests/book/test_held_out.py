"""Cases drawn by chance, and what is said of the times there."""

import math
from collections import Counter

import pandas as pd
import pytest

from memtraffic.tensors import matrix
from memtraffic.testing import assert_correct
from memtraffic_book import held_out
from memtraffic_book.held_out import MOST_BYTES, draw, summary, verdicts


def test_draw_covers_the_space_evenly():
    cases = draw(2000, seed=781)
    assert draw(2000, seed=781) == cases != draw(2000, seed=782)
    for sizes in ([it.m for it in cases], [it.n for it in cases]):
        assert min(sizes) == 1 and max(sizes) > 2**19
        tenths = Counter(int(math.log2(size) // 5) for size in sizes)
        assert all(count > 150 for count in tenths.values())
    kinds = Counter((it.dtype, it.backward) for it in cases)
    assert len(kinds) == 4 and min(kinds.values()) > 350
    sizes = {"float32": 4, "bfloat16": 2}
    assert max(it.m * it.n * sizes[it.dtype] for it in cases) <= MOST_BYTES


def raced(m, **us):
    base = {"m": m, "n": 8, "dtype": "float32", "backward": False, "note": ""}
    return [{"impl": name, **base, "us": time} for name, time in us.items()]


def test_verdicts_are_of_the_fastest_that_was_timed():
    rows = [
        *raced(1, copy=90, ours=100, torch=96, Liger=0.0),
        *raced(2, copy=90, ours=100, torch=94),
        *raced(3, copy=9, ours=10, torch=9.2),
        *raced(4, copy=9, ours=10, torch=8.9),
        *raced(5, copy=90, ours=50, torch=100),
    ]
    found = verdicts(pd.DataFrame(rows))
    assert list(found["speed"]) == pytest.approx([0.89, 0.92, 0.94, 0.96, 2])
    assert dict(zip(found["m"], found["met"], strict=True)) == {4: 0, 3: 1, 2: 0, 1: 1, 5: 1}
    assert list(found["of_copy"]) == pytest.approx([0.9, 0.9, 0.9, 0.9, 1.8])
    assert set(found["fastest"]) == {"torch"}
    assert "5 of 6 cases timed, 3 as fast" in summary(found, 6)
    assert "Of 3 of 20" in summary(found, 6)


def test_verdicts_without_ours_are_an_error():
    with pytest.raises(RuntimeError, match=r"ours was not timed at .*wrong: row 0"):
        verdicts(pd.DataFrame(raced(1, copy=9, ours=0, torch=9)).assign(note="wrong: row 0"))


@pytest.mark.parametrize(("m", "n"), [(7, 5), (3, 781)])
def test_swept_tile_is_a_softmax_whichever_tile_is_the_fastest(m, n, monkeypatch):
    monkeypatch.setattr(
        held_out, "time_interleaved", lambda calls, budget: [[i] for i in range(len(calls), 0, -1)]
    )
    assert_correct("softmax", held_out.swept_tile, matrix(m, n))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # packages warn of what they like
def test_held_out_cases_are_timed():
    found = verdicts(held_out.measure(draw(2, seed=1)))
    assert len(found) == 2 and (found["speed"] > 0.2).all()
