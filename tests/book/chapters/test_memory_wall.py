"""What the folded cells of `book/memory-wall.ipynb` do, on data where a claim is false, too."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from notebooks import code_cells, load

from memtraffic import runtime
from memtraffic_book import exhibits, text
from memtraffic_book.chapters import memory_wall as page

pytestmark = pytest.mark.skipif(runtime.HAS_GPU, reason="a GPU measures itself")
BOOK = Path(__file__).resolve().parents[3] / "book"
X = torch.tensor([[1.0, 2, 3, 4, 5], [0, 0, 0, 0, 9], [7, 7, 7, 7, 7]])
RATES = pd.Series({"multiply-add": 32e12, "exp2": 4e12})


@pytest.fixture
def found(monkeypatch):
    """A function that sets what experiments return, by id."""

    def set_(**frames):
        monkeypatch.setattr(page, "experiment", lambda id, gpu=None: frames[id])
        monkeypatch.setattr(page, "experiments", lambda *ids, gpu=None: [frames[id] for id in ids])

    return set_


def test_draw_times_quotes_what_was_raced(glued):
    page.draw_times()
    assert {"copy", "naive", "speedup", "exponentials", "ratio"} == set(glued)
    assert glued["copy"].endswith(" µs") and len(plt.get_fignums()) == 1


def test_trace_rows_sees_what_is_left_nan(capsys):
    y = X.clone()
    y[:, 4] = float("nan")
    page.trace_rows(exhibits.copy_rows, X, y)
    assert "12 of the 15" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="still NaN"):
        page.trace_rows(exhibits.copy_rows, X, X)


def test_kernel_of_the_page_is_the_one_that_was_timed():
    printed = [cell.source for cell in code_cells(load(BOOK / "memory-wall.ipynb"))]
    assert text.source(exhibits.copy_rows) in printed


def test_time_first_copy_refuses_a_slow_one(found, glued, capsys):
    race = pd.DataFrame({"impl": ["copy", "copy_rows"], "us": [90.0, 100.0]})
    found(first_copy=race)
    page.time_first_copy()
    assert "reaches 90.0 % of the speed" in capsys.readouterr().out and glued["first"] == "90 %"
    found(first_copy=race.assign(us=[80.0, 100.0]))
    with pytest.raises(AssertionError, match="85 % needed"):
        page.time_first_copy()


def test_draw_machine_and_roofline(glued):
    page.draw_machine()
    page.draw_roofline(4e12, RATES, 1 / 8)
    assert glued["ridge"] == "1 per byte" and glued["l2"].endswith(" MiB")
    assert len(plt.get_fignums()) == 2


def test_check_floor_refuses_a_kernel_that_beats_it(found, glued):
    page.check_floor()
    assert glued["skip_found"] and glued["lost"].endswith(" %")
    fast = pd.DataFrame({"gb_per_s": [4300.0]})
    roofs = pd.DataFrame({"datasheet_gb_per_s": [4800.0]})
    copies = pd.DataFrame({"gb_per_s": [4200.0]})
    found(map_float32=fast, map_bfloat16=fast, copies=copies, roof=roofs)
    with pytest.raises(AssertionError, match="beats its floor"):
        page.check_floor()


@pytest.fixture
def timed(found):
    """Kernels half as fast as a copy at 128 columns, which take no others."""
    rows = [("copy", n, 10.0) for n in page.LADDER_AT]
    rows += [("naive", n, 20.0 if n == 128 else 0.0) for n in (128, 4096)]
    rows += [("masked", n, 20.0 if n == 128 else 0.0) for n in (128, 4096)]
    found(map_float32=pd.DataFrame(rows, columns=["impl", "n", "us"]))


def test_ladder_has_what_was_counted_beside_what_was_timed(timed, glued, monkeypatch, capsys):
    monkeypatch.setattr(page, "LADDER", ("naive", "masked"))
    page.keep_ladder()
    assert glued == {
        "naive_reads": "5MN + 2M", "naive_writes": "3MN + 2M", "naive_128": "50 %",
        "naive_4096": "–", "naive_65536": "–",
        "masked_reads": "MN", "masked_writes": "MN", "masked_128": "50 %",
        "masked_4096": "–", "masked_65536": "–",
    }  # fmt: skip
    assert "reads fall from 5MN + 2M to MN" in capsys.readouterr().out


def test_ladder_has_to_end_at_mn(timed, monkeypatch):
    monkeypatch.setattr(page, "LADDER", ("masked", "naive"))
    with pytest.raises(AssertionError, match="fall from MN"):
        page.keep_ladder()


def test_examine_judges_answers():
    assert page.examine(torch.clone)(exhibits.first_copy)
    with pytest.raises(AssertionError):
        page.examine(page.reverse)(exhibits.first_copy)
    with pytest.raises(AssertionError, match="reads MN, not 3MN"):
        page.examine(torch.clone, "3MN")(exhibits.first_copy)
